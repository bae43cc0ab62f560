"""Files of a training that may be killed at any time: each is there whole, or not at all."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

from specdec_mlx.errors import TrainingError


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A file to write, which takes the place of `path` at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"partial-{path.name}")
    yield partial
    os.replace(partial, path)


def save_arrays(
    path: Path, arrays: Mapping[str, mx.array], metadata: Mapping[str, str] | None = None
) -> None:
    """Write arrays by name as safetensors."""
    with _whole(path) as partial:
        mx.save_safetensors(str(partial), dict(arrays), dict(metadata or {}))


def load_arrays(path: Path) -> dict[str, mx.array]:
    """Read what `save_arrays` wrote."""
    loaded: Any = mx.load(str(path))
    return dict(loaded)


def save_json(path: Path, value: Any) -> None:
    """Write a value as JSON."""
    with _whole(path) as partial:
        partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def load_json(path: Path) -> Any:
    """Read a file of JSON."""
    return json.loads(path.read_text(encoding="utf-8"))


class Clock:
    """Seconds of a training over all its runs, kept in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._began = time.monotonic() - (load_json(path) if path.exists() else 0)

    def seconds(self) -> float:
        """So far."""
        return time.monotonic() - self._began

    def keep(self) -> None:
        """Write them."""
        save_json(self.path, self.seconds())


def begin_or_resume(path: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings of a new training; raise TrainingError if an old one has others."""
    now = json.loads(json.dumps(settings))
    if not path.exists():
        save_json(path, now)
    before = load_json(path)
    names = sorted(before.keys() | now.keys())
    differ = [n for n in names if before.get(n) != now.get(n)]
    if differ:
        changes = ", ".join(f"{n} was {before.get(n)!r} and is {now.get(n)!r}" for n in differ)
        raise TrainingError(
            f"{path.parent} was begun with other settings: {changes}. Give those again to go on, "
            "or another folder to begin anew."
        )
