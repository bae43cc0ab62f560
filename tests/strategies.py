"""All Hypothesis strategies."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from exact import NUM_STATES, Source

shapes = st.sampled_from([(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3), (4, 1), (4, 2), (5, 1)])
"""Pairs (V, K) that take milliseconds to enumerate."""

small_shapes = shapes.filter(lambda shape: shape != (3, 3))


@st.composite
def laws(draw: st.DrawFn, vocab_size: int) -> np.ndarray:
    """A law [V], float64: spread out, with zeros, or a one-hot."""
    weight = st.one_of(st.just(0.0), st.floats(1e-9, 1.0))
    weights = np.array(draw(st.lists(weight, min_size=vocab_size, max_size=vocab_size)))
    if weights.sum() == 0:
        weights[draw(st.integers(0, vocab_size - 1))] = 1.0
    return np.asarray(weights / weights.sum())


@st.composite
def law_pairs(draw: st.DrawFn, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Laws p and q [V]: related in no way, equal, a hair apart, or with disjoint supports."""
    p = draw(laws(vocab_size))
    relation = draw(st.sampled_from(["none", "equal", "close", "disjoint"]))
    if relation == "equal":
        return p, p
    if relation == "close":
        q = p * (1 + 1e-8 * np.arange(vocab_size))
        return p, q / q.sum()
    if relation == "none" or np.all(p > 0):
        return p, draw(laws(vocab_size))
    q = np.where(p > 0, 0.0, draw(laws(vocab_size)) + 1e-3)
    return p, q / q.sum()


@st.composite
def source_pairs(draw: st.DrawFn, vocab_size: int) -> tuple[Source, Source]:
    """Target and draft: a pair of laws for each state of the text."""
    pairs = draw(st.lists(law_pairs(vocab_size), min_size=NUM_STATES, max_size=NUM_STATES))
    p, q = zip(*pairs, strict=True)
    return Source(np.stack(p)), Source(np.stack(q))


@st.composite
def blocks(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a rule is given: target_probs [K+1, V], draft tokens [K], draft_probs [K, V]."""
    vocab_size, num_draft = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    pairs = draw(st.lists(law_pairs(vocab_size), min_size=num_draft, max_size=num_draft))
    p, q = (np.stack(rows) for rows in zip(*pairs, strict=True))
    tokens = [draw(st.sampled_from(np.flatnonzero(row).tolist())) for row in q]
    return np.concatenate([p, [draw(laws(vocab_size))]]), np.array(tokens), q


@st.composite
def copies(draw: st.DrawFn, vocab_size: int, num_draft: int) -> list[tuple[int, ...]]:
    """A draft of up to K tokens for each state."""
    draft = st.lists(st.integers(0, vocab_size - 1), max_size=num_draft).map(tuple)
    return draw(st.lists(draft, min_size=NUM_STATES, max_size=NUM_STATES))


def draft_lengths(num_draft: int) -> st.SearchStrategy[list[int]]:
    """A length of 0 to K for each state."""
    return st.lists(st.integers(0, num_draft), min_size=NUM_STATES, max_size=NUM_STATES)


@st.composite
def logit_rows(draw: st.DrawFn) -> mx.array:
    """Logits [1, V] as a model might give them: ties, masked tokens, and extremes included."""
    vocab_size = draw(st.integers(2, 12))
    scale = draw(st.sampled_from([0.1, 1.0, 5.0, 1e4]))
    value = st.one_of(
        st.floats(-1, 1, width=32).map(lambda x: x * scale),
        st.sampled_from([0.0, scale, -scale, -np.inf]),
    )
    values = draw(st.lists(value, min_size=vocab_size, max_size=vocab_size))
    if np.all(np.isneginf(values)):
        values[draw(st.integers(0, vocab_size - 1))] = 0.0
    return mx.array([values], dtype=mx.float32)


def sampling_arguments(vocab_size: int) -> st.SearchStrategy[dict[str, Any]]:
    """Arguments for any way to sample from V tokens at a temperature above 0."""
    off = st.just(0.0)
    token = st.integers(0, vocab_size - 1)
    return st.fixed_dictionaries(
        {
            "temp": st.sampled_from([0.5, 1.0, 2.0]) | st.floats(0.05, 5.0),
            "top_p": off | st.sampled_from([0.5, 0.9, 1.0]) | st.floats(0.01, 0.99),
            "min_p": off | st.sampled_from([0.1, 1.0]) | st.floats(0.001, 0.999),
            "min_tokens_to_keep": st.integers(1, vocab_size),
            "top_k": st.integers(0, vocab_size - 1),
            "xtc_probability": off | st.just(1.0) | st.floats(0.01, 0.99),
            "xtc_threshold": st.just(0.1) | st.floats(0.0, 0.5),
            "xtc_special_tokens": st.lists(token, max_size=2, unique=True),
        }
    )
