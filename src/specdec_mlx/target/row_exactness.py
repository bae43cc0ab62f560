"""Can a loaded model's texts be written as rows of one batch, and be what they are alone?"""

from __future__ import annotations

import warnings

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.per_model import PerModel
from specdec_mlx.target.model_pass import vocab_size_of
from specdec_mlx.target.rounding import is_rounding
from specdec_mlx.target.row_caches import RowCaches

LENGTHS = (3, 7, 1)
"""Tokens of the texts that are tried."""

WIDTHS, KEPT = (5, 1, 3), (2, 1, 3)
"""What a pass feeds to each of them, and how much of that is kept."""


def _can_hold_rows(model: nn.Module) -> bool:
    """True if rows of several texts give the logits that each gives alone; a warning if not."""
    rows = RowCaches.like(make_prompt_cache(model))
    reason = "its caches cannot be held in rows"
    if rows is not None:
        try:
            if _difference_is_rounding(model, rows):
                return True
            reason = "its texts differ from what they are alone"
        except Exception as error:
            reason = f"it fails with {type(error).__name__}"
    warnings.warn(
        f"specdec_mlx: several texts at once cannot be had of this model "
        f"({type(model).__module__}): {reason}. They are written one by one.",
        stacklevel=2,
    )
    return False


can_hold_rows = PerModel(_can_hold_rows)
"""Whether several texts may be written at once; measured when first asked for."""


def _difference_is_rounding(model: nn.Module, rows: RowCaches) -> bool:
    """Feed three texts a padded pass, go back in each by another number, and feed one token."""
    key = mx.random.key(0)
    tokens = mx.random.randint(0, vocab_size_of(model), (len(LENGTHS), 16), key=key)
    texts, expected = [], []
    for row, (length, width, kept) in enumerate(zip(LENGTHS, WIDTHS, KEPT, strict=True)):
        alone, text = make_prompt_cache(model), tokens[row]
        model(text[None, :length], cache=alone)
        rows.add(alone, length)
        texts.append(np.array(text))
        cache = make_prompt_cache(model)
        model(text[None, : length + kept], cache=cache)
        expected.append(model(text[None, length + width, None], cache=cache)[0, -1])
    fed = np.zeros((len(LENGTHS), max(WIDTHS)), np.uint32)
    for row, (length, width) in enumerate(zip(LENGTHS, WIDTHS, strict=True)):
        fed[row, :width] = texts[row][length : length + width]
    rows.begin(WIDTHS)
    mx.eval(model(mx.array(fed), cache=rows.caches))
    rows.finish()
    ends = rows.go_back([length + kept for length, kept in zip(LENGTHS, KEPT, strict=True)])
    return _ends_alike(model, rows, texts, list(ends), mx.stack(expected))


def _ends_alike(
    model: nn.Module, rows: RowCaches, texts: list[np.ndarray], ends: list[int], alone: mx.array
) -> bool:
    """Feed what has to be fed again and one token more, and compare the logits after it."""
    again = []
    for text, end, length, width, kept in zip(texts, ends, LENGTHS, WIDTHS, KEPT, strict=True):
        again.append([*text[end : length + kept], text[length + width]])
    widths = [len(tokens) for tokens in again]
    fed = np.zeros((len(again), max(widths)), np.uint32)
    for row, tokens in zip(fed, again, strict=True):
        row[: len(tokens)] = tokens
    rows.begin(widths)
    logits = model(mx.array(fed), cache=rows.caches)
    rows.finish()
    last = mx.stack([logits[row, width - 1] for row, width in enumerate(widths)])
    there = mx.isfinite(alone)
    difference = np.max(np.array(mx.where(there, mx.abs(last - alone), 0).astype(mx.float32)))
    spread = np.std(np.array(mx.where(there, alone, 0).astype(mx.float32)))
    return is_rounding(float(difference), float(spread), alone.dtype)
