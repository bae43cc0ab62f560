"""What a pass of the target shows, computed once for all windows and kept in files.

A training reads each window many times, in an order of its own, and the target is most of the
work. 16 bits are kept of each number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from tqdm import tqdm

from specdec_mlx.target.taps import Taps
from specdec_mlx.training.files import save_numpy
from specdec_mlx.types import FeatureRows, Features

SHARD = 64
"""Windows in a file."""

HEAD_INPUT = "head_input"
LARGEST = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class Batch:
    """Windows of text, and what the target showed of them.

    tokens: [batch, window]. features: each array is [batch, window, D], float32.
    """

    tokens: mx.array
    features: FeatureRows


class FeatureStore:
    """The target's features of windows, in files of a folder.

    Args:
        folder: where the files are.
        windows: int32 [n, window].
        wanted: what is kept; the head's input always is, for the target's own distribution.
    """

    def __init__(self, folder: Path, windows: np.ndarray, wanted: Features) -> None:
        """Nothing is computed yet."""
        self.folder = folder
        self.windows = windows
        self.layers = tuple(wanted.layers)
        self._open: dict[Path, np.ndarray] = {}

    def __len__(self) -> int:
        """How many windows."""
        return len(self.windows)

    def fill(self, target: nn.Module) -> None:
        """Compute what is not there yet, window by window.

        Raises:
            UnreadableError: the target does not show what is wanted.
        """
        shards = list(range(0, len(self), SHARD))
        missing = [i for i in shards if not all(path.exists() for path in self._paths(i).values())]
        if not missing:
            return
        taps = reading(target, self.layers)
        for start in tqdm(missing, "features", leave=False):
            rows = [read(target, taps, window) for window in self.windows[start : start + SHARD]]
            for name, path in self._paths(start).items():
                save_numpy(path, _packed(mx.stack([_named(row, name) for row in rows])))

    def batch(self, indices: Sequence[int]) -> Batch:
        """Some of the windows."""
        arrays = {
            name: mx.stack([self._unpacked(name, i) for i in indices]) for name in self._names()
        }
        layers = {layer: arrays[f"layer-{layer}"] for layer in self.layers}
        tokens = mx.array(self.windows[list(indices)])
        return Batch(tokens, FeatureRows(layers=layers, head_input=arrays[HEAD_INPUT]))

    def _names(self) -> Iterator[str]:
        yield HEAD_INPUT
        yield from (f"layer-{layer}" for layer in self.layers)

    def _paths(self, start: int) -> dict[str, Path]:
        """Name of an array -> its file, for the windows from `start` on."""
        return {name: self.folder / f"{name}-{start // SHARD:05}.npy" for name in self._names()}

    def _unpacked(self, name: str, index: int) -> mx.array:
        """[window, D] of one window."""
        path = self._paths(index)[name]
        if path not in self._open:
            self._open[path] = np.load(path, mmap_mode="r")
        array = mx.array(self._open[path][index % SHARD])
        if array.dtype == mx.uint16:
            array = array.view(mx.bfloat16)
        return array.astype(mx.float32)


def reading(target: nn.Module, layers: Sequence[int]) -> Taps:
    """Taps for what is kept; raises UnreadableError if the target does not show it."""
    return Taps(target, Features(head_input=True, layers=tuple(layers)))


def read(target: nn.Module, taps: Taps, window: np.ndarray) -> FeatureRows:
    """Features of one window [window], from a pass of its own."""
    tokens = mx.array(window)[None]
    logits = taps.read(lambda: target(tokens, cache=make_prompt_cache(target))[0])
    assert taps.features is not None
    mx.eval(logits, taps.features.head_input, *taps.features.layers.values())
    return taps.features


def live_batch(target: nn.Module, layers: Sequence[int], tokens: mx.array) -> Batch:
    """Windows [batch, window] that no file holds."""
    taps = reading(target, layers)
    rows = [read(target, taps, window) for window in np.array(tokens)]
    arrays = {
        name: mx.stack([_named(row, name).astype(mx.float32) for row in rows])
        for name in (HEAD_INPUT, *(f"layer-{layer}" for layer in layers))
    }
    named = {layer: arrays[f"layer-{layer}"] for layer in layers}
    return Batch(tokens, FeatureRows(layers=named, head_input=arrays[HEAD_INPUT]))


def _named(rows: FeatureRows, name: str) -> mx.array:
    """The array [window, D] of a name."""
    if name == HEAD_INPUT:
        assert rows.head_input is not None
        return rows.head_input
    return rows.layers[int(name.removeprefix("layer-"))]


def _packed(x: mx.array) -> np.ndarray:
    """16 bits a number: float16 where it can hold them all, or else bfloat16 as its bits."""
    if x.dtype == mx.bfloat16 or float(mx.abs(x).max()) > LARGEST:
        return np.array(x.astype(mx.bfloat16).view(mx.uint16))
    return np.array(x.astype(mx.float16))
