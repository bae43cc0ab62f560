"""What a pass of the target shows, computed once for all windows and kept in files.

A training reads each window many times, in an order of its own, and the target is most of the
work. 16 bits are kept of each number.
"""

from __future__ import annotations

from collections.abc import Sequence
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

HEAD_INPUT, BEST = "head_input", "best"
LARGEST = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class Batch:
    """Windows of text, and what the target showed of them.

    tokens: [batch, window]. features: each array is [batch, window, D], float32. answered:
    [batch, window] which tokens are learnt. best: [batch, window] the target's likeliest next one.
    """

    tokens: mx.array
    features: FeatureRows
    answered: np.ndarray
    best: np.ndarray

    @property
    def counted(self) -> np.ndarray:
        """[batch, window] the positions whose next token is learnt."""
        counted: np.ndarray = np.pad(self.answered[:, 1:], [(0, 0), (0, 1)])
        return counted


class FeatureStore:
    """The target's features of windows, in files of a folder.

    Args:
        folder: where the files are.
        windows: int32 [n, window, 2], see `texts`; what is behind the last token that is learnt is
            left out.
        wanted: what is kept; the head's input always is, for the target's own distribution.

    lengths: [n] tokens of each window.
    """

    def __init__(self, folder: Path, windows: np.ndarray, wanted: Features) -> None:
        """Nothing is computed yet."""
        self.folder = folder
        self.windows = windows[..., 0]
        self.answered = windows[..., 1] > 0
        self.lengths = windows.shape[1] - np.argmax(self.answered[:, ::-1], axis=1)
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
        taps = reading(target, self.layers)
        bar = tqdm(total=len(self), desc="features", leave=False, mininterval=1)
        for start in range(0, len(self), SHARD):
            lengths = self.lengths[start : start + SHARD]
            if not all(path.exists() for path in self._paths(start).values()):
                rows = []
                for window, length in zip(self.windows[start:], lengths, strict=False):
                    rows.append(read(target, taps, window[:length]))
                    bar.update()
                for name, path in self._paths(start).items():
                    save_numpy(path, _packed(self._side_by_side([row[name] for row in rows])))
            bar.update(start + len(lengths) - bar.n)
        bar.close()

    def batch(self, indices: Sequence[int]) -> Batch:
        """Some of the windows, as long as the longest of them."""
        length = int(self.lengths[list(indices)].max())
        rows = [
            {name: self._unpacked(name, i)[:length] for name in self._paths(0)} for i in indices
        ]
        tokens, answered = (x[list(indices), :length] for x in (self.windows, self.answered))
        return _batch(mx.array(tokens), answered, rows)

    def _side_by_side(self, rows: Sequence[mx.array]) -> mx.array:
        """[n, window, ...] of windows of any length."""
        window, no_more = self.windows.shape[1], [(0, 0)] * (rows[0].ndim - 1)
        return mx.stack([mx.pad(x, [(0, window - x.shape[0]), *no_more]) for x in rows])

    def _paths(self, start: int) -> dict[str, Path]:
        """Name of an array -> its file, for the windows from `start` on."""
        names = (BEST, HEAD_INPUT, *(f"layer-{layer}" for layer in self.layers))
        return {name: self.folder / f"{name}-{start // SHARD:05}.npy" for name in names}

    def _unpacked(self, name: str, index: int) -> mx.array:
        """[window, D] of one window."""
        path = self._paths(index)[name]
        if path not in self._open:
            self._open[path] = np.load(path, mmap_mode="r")
        array = mx.array(self._open[path][index % SHARD])
        return array.view(mx.bfloat16) if array.dtype == mx.uint16 else array


def reading(target: nn.Module, layers: Sequence[int]) -> Taps:
    """Taps for what is kept; raises UnreadableError if the target does not show it."""
    return Taps(target, Features(head_input=True, layers=tuple(layers)))


def read(target: nn.Module, taps: Taps, window: np.ndarray) -> dict[str, mx.array]:
    """What a pass of its own over one window [window] shows, by name."""
    tokens = mx.array(window)[None]
    logits = taps.read(lambda: target(tokens, cache=make_prompt_cache(target))[0])
    assert taps.features is not None
    assert taps.features.head_input is not None
    rows = {BEST: mx.argmax(logits, axis=-1).astype(mx.int32), HEAD_INPUT: taps.features.head_input}
    rows |= {f"layer-{layer}": states for layer, states in taps.features.layers.items()}
    mx.eval(rows)
    return rows


def live_batch(target: nn.Module, layers: Sequence[int], tokens: mx.array) -> Batch:
    """Windows [batch, window] that no file holds, all of which is learnt."""
    taps = reading(target, layers)
    rows = [read(target, taps, window) for window in np.array(tokens)]
    return _batch(tokens, np.ones(tokens.shape, bool), rows)


def _batch(tokens: mx.array, answered: np.ndarray, rows: Sequence[dict[str, mx.array]]) -> Batch:
    """Windows of what `read` gave of each."""
    arrays = {name: mx.stack([row[name] for row in rows]) for name in rows[0]}
    best = np.array(arrays.pop(BEST))
    head_input = arrays.pop(HEAD_INPUT).astype(mx.float32)
    layers = {int(n.removeprefix("layer-")): x.astype(mx.float32) for n, x in arrays.items()}
    return Batch(tokens, FeatureRows(layers=layers, head_input=head_input), answered, best)


def _packed(x: mx.array) -> np.ndarray:
    """16 bits a number: float16 where it can hold them all, or else bfloat16 as its bits."""
    if x.dtype == mx.int32:
        return np.array(x)
    if x.dtype == mx.bfloat16 or float(mx.abs(x).max()) > LARGEST:
        return np.array(x.astype(mx.bfloat16).view(mx.uint16))
    return np.array(x.astype(mx.float16))
