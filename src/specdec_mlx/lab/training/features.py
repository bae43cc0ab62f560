"""Features: the target's states, computed once for all windows and kept in files, in 16 bits."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.contracts import FeatureRows, Features
from specdec_mlx.errors import TrainingError
from specdec_mlx.files import replacing
from specdec_mlx.models.anatomy import StateReader


def save_arrays(
    path: Path, arrays: Mapping[str, mx.array], metadata: dict[str, str] | None = None
) -> None:
    with replacing(path) as partial:
        mx.save_safetensors(str(partial), dict(arrays), metadata or {})


def save_json(path: Path, value: Any) -> None:
    with replacing(path) as partial:
        partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def load_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


class Clock:
    """Seconds that a training took in all its runs, saved in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._began = time.monotonic() - (load_json(path) if path.exists() else 0)

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def keep(self) -> None:
        save_json(self.path, self.seconds())


def begin_or_resume(path: Path, settings: Mapping[str, Any]) -> None:
    """Save the settings of a new training. TrainingError if a saved training has other settings."""
    if not path.exists():
        save_json(path, settings)
    # JSON turns tuples into lists, so the new settings make the same round trip.
    before, now = load_json(path), json.loads(json.dumps(settings))
    differ = [n for n in sorted(before.keys() | now.keys()) if before.get(n) != now.get(n)]
    if differ:
        changes = ", ".join(f"{n} was {before.get(n)!r} and is {now.get(n)!r}" for n in differ)
        raise TrainingError(
            f"{path.parent} was begun with other settings: {changes}. Give those again to go on, "
            "or another folder to begin anew."
        )


@dataclass(frozen=True)
class Batch:
    """Windows of text, and the target's float32 states. All arrays are [batch, window, ...].

    Attributes:
        tokens: token ids.
        features: the target's states.
        answered: True for tokens that are learnt.
        best: the target's likeliest next token.
    """

    tokens: mx.array
    features: FeatureRows
    answered: np.ndarray
    best: np.ndarray

    @property
    def counted(self) -> np.ndarray:
        """True where the next token is learnt, [batch, window]."""
        # Position i predicts token i + 1, so the last position predicts nothing.
        counted: np.ndarray = np.pad(self.answered[:, 1:], [(0, 0), (0, 1)])
        return counted


class FeatureStore:
    """The target's features of windows [n, window, 2], up to the last learnt token, in files.

    The target reads each window at its first use. Raises UnreadableError then.
    """

    def __init__(
        self, target: nn.Module, folder: Path, windows: np.ndarray, wanted: Features
    ) -> None:
        self.target = target
        self.folder = folder
        self.windows = windows[..., 0]
        self.answered = windows[..., 1] > 0
        # Index of the last learnt token, plus 1. Later tokens are padding.
        self.lengths = windows.shape[1] - np.argmax(self.answered[:, ::-1], axis=1)
        self.layers = tuple(wanted.layers)

    def __len__(self) -> int:
        return len(self.windows)

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = [self._rows(i) for i in indices]
        length = int(self.lengths[list(indices)].max())
        tokens, answered = (x[list(indices), :length] for x in (self.windows, self.answered))
        return _batch(mx.array(tokens), answered, rows)

    def _rows(self, index: int) -> Any:
        name = "-".join(map(str, (index, *self.layers)))
        path = self.folder / f"{name}.safetensors"
        if not path.exists():
            window = self.windows[index, : self.lengths[index]]
            rows = read(self.target, self.layers, window)
            save_arrays(path, {name: _packed(x) for name, x in rows.items()})
        return mx.load(str(path))


def live_batch(target: nn.Module, layers: Sequence[int], tokens: mx.array) -> Batch:
    """Windows [batch, window] without a file, in which all tokens are learnt."""
    rows = [read(target, layers, window) for window in np.array(tokens)]
    return _batch(tokens, np.ones(tokens.shape, bool), rows)


def read(target: nn.Module, layers: Sequence[int], window: np.ndarray) -> dict[str, mx.array]:
    """Features of one window [window], by name. Raises UnreadableError."""
    reader = StateReader(target, Features(tuple(layers), head_input=True))
    tokens = mx.array(window)[None]
    logits = reader.read(lambda: target(tokens, cache=make_prompt_cache(target))[0])
    captured: Any = reader.features
    rows = {"head_input": captured.head_input, "best": mx.argmax(logits, axis=-1).astype(mx.int32)}
    rows |= {f"layer-{layer}": states for layer, states in captured.layers.items()}
    mx.eval(rows)
    return rows


def _batch(tokens: mx.array, answered: np.ndarray, rows: Sequence[dict[str, mx.array]]) -> Batch:
    arrays = {}
    for name, first in rows[0].items():
        wide = mx.zeros((*tokens.shape, *first.shape[1:]))
        for i, row in enumerate(rows):
            wide[i, : row[name].shape[0]] = row[name]
        arrays[name] = wide
    best, head_input = np.array(arrays.pop("best")), arrays.pop("head_input")
    layers = {int(name.removeprefix("layer-")): x for name, x in arrays.items()}
    return Batch(tokens, FeatureRows(layers=layers, head_input=head_input), answered, best)


def _packed(x: mx.array) -> mx.array:
    """16 bits for each number: float16 if all numbers fit, and bfloat16 otherwise."""
    if x.dtype in (mx.int32, mx.bfloat16):
        return x
    fits = float(mx.abs(x).max()) <= np.finfo(np.float16).max
    return x.astype(mx.float16 if fits else mx.bfloat16)
