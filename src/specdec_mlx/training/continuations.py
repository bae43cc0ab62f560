"""Text that a model writes itself, to learn from: what speculation is about.

A drafter has to agree with the target on the target's own text, which differs from what people
write (Zhou et al. 2023, arXiv 2310.08461, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from tqdm import tqdm

from specdec_mlx.training.files import load_arrays, save_arrays

ROWS = 32
"""Continuations that are written side by side, and stored in one file."""


def continuations(
    target: nn.Module, openings: np.ndarray, window: int, temps: Sequence[float], folder: Path
) -> np.ndarray:
    """The target's continuations of openings; those that are stored already are not written anew.

    Args:
        target: what writes.
        openings: int32 [n, opening].
        window: tokens of a row with its opening.
        temps: temperatures, taken in turn; 0 is greedy.
        folder: where the files are.

    Returns:
        int32 [n, window].
    """
    rows = []
    missing = tqdm(list(_files(folder, len(openings))), "continuations", leave=False)
    for path, start in missing:
        if not path.exists():
            some = openings[start : start + ROWS]
            turns = [temps[(start + i) % len(temps)] for i in range(len(some))]
            save_arrays(path, {"tokens": write(target, some, window, turns, seed=start)})
        rows.append(np.array(load_arrays(path)["tokens"]))
    return np.concatenate(rows)


def _files(folder: Path, count: int) -> Iterator[tuple[Path, int]]:
    """File and first row of each group of rows."""
    for start in range(0, count, ROWS):
        yield folder / f"continuations-{start // ROWS:04}.safetensors", start


def write(
    model: nn.Module, openings: np.ndarray, window: int, temps: Sequence[float], *, seed: int
) -> mx.array:
    """What a model writes behind openings, side by side.

    Args:
        model: what writes.
        openings: int32 [rows, opening].
        window: tokens of a row with its opening.
        temps: temperature of each row; 0 is greedy.
        seed: of the draws.

    Returns:
        int32 [rows, window].
    """
    tokens = mx.array(openings)
    scale = mx.array([[1 / temp if temp else 1.0] for temp in temps])
    greedy = mx.array([temp == 0 for temp in temps])
    keys = mx.random.split(mx.random.key(seed), max(1, window - tokens.shape[1]))
    cache = make_prompt_cache(model)
    pieces = [tokens]
    for key in keys[: window - tokens.shape[1]]:
        logits = model(tokens, cache=cache)[:, -1].astype(mx.float32)
        drawn = mx.random.categorical(logits * scale, key=key)
        tokens = mx.where(greedy, mx.argmax(logits, axis=-1), drawn)[:, None].astype(mx.int32)
        mx.async_eval(tokens)
        pieces.append(tokens)
    return mx.concatenate(pieces, axis=1)
