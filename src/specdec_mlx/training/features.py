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
from specdec_mlx.training.files import load_arrays, save_arrays
from specdec_mlx.types import FeatureRows, Features

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

    def __len__(self) -> int:
        """How many windows."""
        return len(self.windows)

    def fill(self, target: nn.Module) -> None:
        """Compute what is not there yet, window by window.

        Raises:
            UnreadableError: the target does not show what is wanted.
        """
        taps = reading(target, self.layers)
        for i in tqdm(range(len(self)), "features", leave=False, mininterval=1):
            if not self._path(i).exists():
                rows = read(target, taps, self.windows[i, : self.lengths[i]])
                save_arrays(self._path(i), {name: _packed(x) for name, x in rows.items()})

    def batch(self, indices: Sequence[int]) -> Batch:
        """Some of the windows, as long as the longest of them."""
        length = int(self.lengths[list(indices)].max())
        tokens, answered = (x[list(indices), :length] for x in (self.windows, self.answered))
        return _batch(mx.array(tokens), answered, [load_arrays(self._path(i)) for i in indices])

    def _path(self, index: int) -> Path:
        """File of a window, for these layers."""
        return self.folder / f"{'-'.join(map(str, (index, *self.layers)))}.safetensors"


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
    arrays = {}
    for name, first in rows[0].items():
        wide = mx.zeros((*tokens.shape, *first.shape[1:]))
        for i, row in enumerate(rows):
            wide[i, : row[name].shape[0]] = row[name]
        arrays[name] = wide
    best, head_input = np.array(arrays.pop(BEST)), arrays.pop(HEAD_INPUT)
    layers = {int(name.removeprefix("layer-")): x for name, x in arrays.items()}
    return Batch(tokens, FeatureRows(layers=layers, head_input=head_input), answered, best)


def _packed(x: mx.array) -> mx.array:
    """16 bits a number: float16 where it can hold them all, or else bfloat16."""
    if x.dtype in (mx.int32, mx.bfloat16):
        return x
    return x.astype(mx.float16 if float(mx.abs(x).max()) <= LARGEST else mx.bfloat16)
