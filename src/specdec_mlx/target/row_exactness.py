"""Measures if a loaded model's texts, as rows of one batch, are what they are alone."""

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

LENGTHS = (3, 7, 1)  # tokens of the texts that are tried

WIDTHS, KEPT = (5, 1, 3), (2, 1, 3)
"""Tokens that a pass feeds to each of them, and how many of those are kept."""


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
"""True if several texts may be written at once; measured when first asked for."""


def _difference_is_rounding(model: nn.Module, rows: RowCaches) -> bool:
    """Feed three texts a padded pass, go back in each by another number, and feed one token."""
    tokens = mx.random.randint(0, vocab_size_of(model), (len(LENGTHS), 16), key=mx.random.key(0))
    texts = np.array(tokens).tolist()
    expected = []
    for text, length, width, kept in zip(texts, LENGTHS, WIDTHS, KEPT, strict=True):
        cache = make_prompt_cache(model)
        model(mx.array([text[: length + kept]]), cache=cache)
        expected.append(model(mx.array([[text[length + width]]]), cache=cache)[0, -1])
        alone = make_prompt_cache(model)
        model(mx.array([text[:length]]), cache=alone)
        rows.add(alone, length)
    drafts = zip(texts, LENGTHS, WIDTHS, strict=True)
    mx.eval(rows.feed(model, [text[length : length + width] for text, length, width in drafts]))
    ends = rows.go_back([length + kept for length, kept in zip(LENGTHS, KEPT, strict=True)])
    again = [  # what was lost of the text, and the token after it
        [*text[end : length + kept], text[length + width]]
        for text, end, length, width, kept in zip(texts, ends, LENGTHS, WIDTHS, KEPT, strict=True)
    ]
    logits, alone = rows.feed(model, again), mx.stack(expected)
    last = mx.stack([logits[row, len(text) - 1] for row, text in enumerate(again)])
    there = mx.isfinite(alone)
    difference = np.max(np.array(mx.where(there, mx.abs(last - alone), 0).astype(mx.float32)))
    spread = np.std(np.array(mx.where(there, alone, 0).astype(mx.float32)))
    return is_rounding(float(difference), float(spread), alone.dtype)
