"""What was learned about a model, kept on disk from one command to the next."""

from __future__ import annotations

import hashlib
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.draft_length.tuning import Tuning, tuning_for
from specdec_mlx.folders import cache_root


@contextmanager
def kept_tuning(model: nn.Module, name: str) -> Iterator[None]:
    """Begin with what earlier commands learned about a model here; keep what this one learns.

    name: the model's folder or Hugging Face name. A file that cannot be read or written costs a
    line on standard error and nothing else. Of several ranks the first one reads and writes: it
    decides for all.
    """
    if mx.distributed.init().rank() > 0:
        yield
        return
    path = tuning_path(name)
    try:
        if path.exists():
            tuning_for.put(model, Tuning.load(path))
    except (OSError, ValueError) as error:
        _warn(f"starts to learn anew: {error}")
    try:
        yield
    finally:
        try:
            tuning_for(model).save(path)
        except OSError as error:
            _warn(f"cannot keep what was learned: {error}")


def tuning_path(name: str) -> Path:
    """Where the tuning of a model is kept: a file for each model, machine, MLX and ranks."""
    folder = Path(name).expanduser()
    name = str(folder.resolve()) if folder.exists() else name
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", folder.name) or "model"
    device = mx.device_info().get("device_name", platform.processor())
    num_ranks = mx.distributed.init().size()
    parts = [name, platform.node(), platform.machine(), str(device), version("mlx")]
    parts += [f"{num_ranks} ranks"] if num_ranks > 1 else []
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
    return cache_root() / "tuning" / f"{readable}-{digest}.json"


def _warn(text: str) -> None:
    print(f"specdec-mlx: draft_length=auto {text}", file=sys.stderr)
