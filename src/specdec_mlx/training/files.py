"""Files of a training that may be killed at any time: each is there whole, or not at all."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from specdec_mlx.errors import TrainingError


def save_arrays(
    path: Path, arrays: Mapping[str, mx.array], metadata: Mapping[str, str] | None = None
) -> None:
    """Write arrays by name as safetensors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"partial-{path.name}")
    mx.save_safetensors(str(partial), dict(arrays), dict(metadata or {}))
    os.replace(partial, path)


def load_arrays(path: Path) -> dict[str, mx.array]:
    """What `save_arrays` wrote."""
    loaded: Any = mx.load(str(path))
    return dict(loaded)


def save_json(path: Path, value: Any) -> None:
    """Write a value as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"partial-{path.name}")
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


class Clock:
    """Seconds that a training has taken, over all runs of it.

    Args:
        path: file that keeps them.
    """

    def __init__(self, path: Path) -> None:
        """Go on from what was kept."""
        self.path = path
        self._began = time.monotonic() - (json.loads(path.read_text()) if path.exists() else 0)

    def seconds(self) -> float:
        """So far."""
        return time.monotonic() - self._began

    def keep(self) -> None:
        """Write them."""
        save_json(self.path, self.seconds())


def begin_or_resume(path: Path, settings: Mapping[str, Any]) -> None:
    """Note how a training is set up, or see that one that goes on is set up as it was.

    Raises:
        TrainingError: it was begun with other settings.
    """
    now = json.loads(json.dumps(settings))
    if not path.exists():
        save_json(path, now)
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    names = sorted(before.keys() | now.keys())
    differ = [name for name in names if before.get(name) != now.get(name)]
    if differ:
        what = ", ".join(f"{n} was {before.get(n)!r} and is {now.get(n)!r}" for n in differ)
        raise TrainingError(
            f"{path.parent} was begun with other settings: {what}. Give those again to go on, or "
            "another folder to begin anew."
        )
