"""Does a pass over m positions give what m single passes give?

Lossless decoding stands on that, and it is a property of the model, its caches and the backend, not
of the algorithm: a mask that is one too wide, or attention that looks ahead, breaks it with no
speculation at all. So it is measured, once for each loaded model.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.per_model import PerModel
from specdec_mlx.target.branch_rows import tree_logits
from specdec_mlx.target.ranks import group_of
from specdec_mlx.target.recurrent_states import ways_back
from specdec_mlx.target.rounding import is_rounding
from specdec_mlx.target.strategies import leaves, window_of
from specdec_mlx.target.timing import time_of
from specdec_mlx.target.tree_passes import TreeRows, chooses_blocks, pass_over, teach_ropes, view_of
from specdec_mlx.types.trees import depths_of, path_to

WIDTHS = (2, 5, 9)
QUICK_WIDTHS = (5,)
"""What is measured before the first draft on a model: about 7 passes' worth of time."""

CONTEXT = 12
STEP = 2048


@dataclass(frozen=True)
class WidthReport:
    """Passes over `width` positions after `context` tokens, against single ones.

    max_difference: largest difference of a logit. spread: standard deviation of the logits.
    argmax_flips: positions whose most likely token differs. bitwise: whether all logits are equal.
    exact: whether rounding explains the difference.
    """

    width: int
    context: int
    max_difference: float
    spread: float
    argmax_flips: int
    bitwise: bool
    exact: bool


@dataclass(frozen=True)
class ProbeReport:
    """What `probe` measured. caches: classes and how each rolls back. window: tokens, or None."""

    caches: tuple[str, ...]
    window: int | None
    rows: tuple[WidthReport, ...]

    @property
    def exact(self) -> bool:
        """Whether several positions at once are as good as one by one everywhere."""
        return all(row.exact for row in self.rows)

    def __str__(self) -> str:
        """A small table and a verdict."""
        lines = [f"caches: {', '.join(self.caches)}", "context  width  max difference  flips"]
        for row in self.rows:
            verdict = "bitwise the same" if row.bitwise else "" if row.exact else "NOT EXACT"
            lines.append(
                f"{row.context:>7}  {row.width:>5}  {row.max_difference:>14.2e}  "
                f"{row.argmax_flips:>5}  {verdict}"
            )
        lines.append(
            "Drafting is exact on this model."
            if self.exact
            else "Drafting is not exact where it says so, and switches itself off there."
        )
        return "\n".join(lines)


def probe(
    model: nn.Module, widths: Sequence[int] = WIDTHS, seed: int = 0, past_window: bool = True
) -> ProbeReport:
    """Compare passes over several positions with single ones, before and past the window.

    widths: positions a pass, each >= 1. The tokens are random, by `seed`. Costs about 20 passes
    and, if the model has a window and `past_window` is set, a prefill of it.
    """
    window = _window(model)
    contexts = [_short_context(window)]
    if window is not None and past_window:
        contexts.append(window + 1)
    rows = [row for context in contexts for row in _compare(model, context, widths, seed)]
    return ProbeReport(_describe_caches(model), window, tuple(rows))


def is_exact(model: nn.Module, *, past_window: bool) -> bool:
    """Whether drafting is exact here; measured when first asked for, with a warning if not."""
    return _exact_past_window(model) if past_window else _exact_before_window(model)


def _before_window(model: nn.Module) -> bool:
    return _verdict(model, _short_context(_window(model)), "")


def _past_window(model: nn.Module) -> bool:
    window = _window(model)
    return window is None or _verdict(model, window + 1, f" past its window of {window} tokens")


def is_exact_on_trees(model: nn.Module, *, past_window: bool) -> bool:
    """Whether a tree in one pass is exact here; measured when first asked for."""
    return _trees_past_window(model) if past_window else _trees_before_window(model)


_exact_before_window = PerModel(_before_window)
_exact_past_window = PerModel(_past_window)


def _verdict(model: nn.Module, context: int, where: str) -> bool:
    bad = [row for row in _compare(model, context, QUICK_WIDTHS, seed=0) if not row.exact]
    if bad:
        worst = max(row.max_difference for row in bad)
        warnings.warn(
            f"specdec_mlx: this model ({type(model).__module__}){where} gives other logits for "
            f"several positions at once than one by one (by up to {worst:.2g}), so nothing is "
            "drafted there. The text is right, as fast as plain decoding. See "
            "specdec_mlx.probe(model).",
            stacklevel=2,
        )
    return not bad


TREE = (-1, -1, 0, 0, 1, 2)
"""Parents in the tree that is measured: two branches, one of which forks again."""


ROWS_AT_MOST = 1.1
"""What a tree may cost as rows of a batch, in passes over a chain of as many tokens: the automatic
draft length takes the two for alike."""


def _on_trees(model: nn.Module, context: int) -> bool:
    """Whether each node's logits are those of its own path run alone."""
    return not chooses_blocks(model) and tree_report(model, context).exact


def _rows_pay(model: nn.Module) -> bool:
    """Whether the branches of a tree may be rows of a batch; a line if not."""
    reason = "whose ranks would not agree on what that costs"
    if group_of(model) is None:
        reason = "which gives other logits for them"
        if tree_report(model, _short_context(_window(model)), by_rows=True).exact:
            cost = rows_cost(model)
            if cost <= ROWS_AT_MOST:
                return True
            reason = f"which would cost {cost:.1f} times as much as a chain of as many tokens"
    warnings.warn(
        f"specdec_mlx: this model ({type(model).__module__}) verifies no tree of drafts in one "
        f"pass, but for its branches as rows of a batch, {reason}; so only chains are drafted. "
        "The text is the same.",
        stacklevel=2,
    )
    return False


rows_pay = PerModel(_rows_pay)
"""Whether trees that no mask can be given are verified as rows; measured when first asked for."""


def rows_cost(model: nn.Module) -> float:
    """Seconds of a tree as rows, and of feeding one of its paths again, over those of a chain."""
    context, size = _short_context(_window(model)), len(TREE)
    tokens = _random_tokens(model, context + 1 + size, seed=0)
    start, ids = _prefilled(model, tokens[:context]), tokens[context:]
    deepest = max(depths_of(TREE)) + 1

    def chain() -> list[mx.array]:
        return [model(ids[None], cache=copy.deepcopy(start))]

    def rows() -> list[mx.array]:
        again = model(ids[None, :deepest], cache=copy.deepcopy(start))
        return [again, tree_logits(model, start, ids, TREE)]

    return time_of(rows, times=3) / time_of(chain, times=3)


def _trees_at_start(model: nn.Module) -> bool:
    return _on_trees(model, _short_context(_window(model)))


def _trees_after_window(model: nn.Module) -> bool:
    window = _window(model)
    return _on_trees(model, CONTEXT if window is None else window + 1)


_trees_before_window = PerModel(_trees_at_start)
_trees_past_window = PerModel(_trees_after_window)


def tree_report(
    model: nn.Module,
    context: int,
    parents: Sequence[int] = TREE,
    seed: int = 0,
    *,
    by_rows: bool = False,
) -> WidthReport:
    """A tree after one more token, in one pass, against each of its paths run alone.

    Args:
        model: whose caches all have a view, see `tree_passes`, unless `by_rows`.
        context: tokens before.
        parents: [K].
        seed: of the tokens, which are random.
        by_rows: with its branches as rows of a batch.
    """
    size = len(parents)
    tokens = _random_tokens(model, context + 1 + size, seed)
    start = _prefilled(model, tokens[:context])
    ids = tokens[context:]
    paths = [[0, *(node + 1 for node in path_to(i, parents))] for i in range(-1, size)]
    alone = [model(ids[mx.array(path)][None], cache=copy.deepcopy(start))[0, -1:] for path in paths]
    if by_rows:
        logits = tree_logits(model, start, ids, parents)
    else:
        teach_ropes(model)
        rows = TreeRows.after(1, parents)
        with pass_over(rows):
            logits = model(ids[None], cache=[view_of(cache, rows) for cache in start])[0]
    expected = mx.concatenate(alone).astype(mx.float32)
    return _report(size + 1, context, logits.astype(mx.float32), expected, logits.dtype)


def _prefilled(model: nn.Module, tokens: mx.array) -> list[Any]:
    """Caches that hold these tokens [n]."""
    caches: list[Any] = make_prompt_cache(model)
    for i in range(0, tokens.shape[0], STEP):
        model(tokens[None, i : i + STEP], cache=caches)
        mx.eval([cache.state for cache in caches])
    return caches


def _compare(model: nn.Module, context: int, widths: Sequence[int], seed: int) -> list[WidthReport]:
    """One report for each width, after `context` tokens."""
    longest = max(widths)
    is_spread = group_of(model) is not None
    tokens = _random_tokens(model, context + longest, seed)
    start = _prefilled(model, tokens[:context])
    single = copy.deepcopy(start)
    steps = []
    for i in range(longest):
        steps.append(model(tokens[None, context + i, None], cache=single)[0])
        if is_spread:  # passes in one graph may be run in another order on each rank
            mx.eval(steps[-1])
    expected = mx.concatenate(steps).astype(mx.float32)
    dtype = steps[0].dtype
    reports = []
    for width in widths:
        caches = copy.deepcopy(start)
        logits = model(tokens[None, context : context + width], cache=caches)[0]
        reports.append(_report(width, context, logits.astype(mx.float32), expected[:width], dtype))
    return reports


def _report(
    width: int, context: int, logits: mx.array, expected: mx.array, dtype: mx.Dtype
) -> WidthReport:
    finite = mx.isfinite(expected)
    difference = np.max(np.array(mx.where(finite, mx.abs(logits - expected), 0)))
    spread = np.std(np.array(mx.where(finite, expected, 0)))
    flips = np.array(mx.argmax(logits, axis=-1) != mx.argmax(expected, axis=-1)).sum()
    return WidthReport(
        width=width,
        context=context,
        max_difference=float(difference),
        spread=float(spread),
        argmax_flips=int(flips),
        bitwise=bool(mx.array_equal(logits, expected).item()),
        exact=is_rounding(float(difference), float(spread), dtype),
    )


def _random_tokens(model: nn.Module, num_tokens: int, seed: int) -> mx.array:
    """Token ids [n]; V is read off the shape of logits that are never computed."""
    vocab_size = model(mx.array([[0]]), cache=make_prompt_cache(model)).shape[-1]
    return mx.random.randint(0, vocab_size, shape=(num_tokens,), key=mx.random.key(seed))


def _window(model: nn.Module) -> int | None:
    """Largest window of the model's caches, None if they all keep everything."""
    windows = [window_of(cache) for cache in leaves(make_prompt_cache(model))]
    return max((window for window in windows if window is not None), default=None)


def _short_context(window: int | None) -> int:
    """A context that the widest pass does not take past the window."""
    return CONTEXT if window is None else max(1, min(CONTEXT, window - max(WIDTHS)))


def _describe_caches(model: nn.Module) -> tuple[str, ...]:
    kinds: dict[str, str] = {}
    for cache, name in zip(leaves(make_prompt_cache(model)), ways_back(model), strict=True):
        kinds.setdefault(type(cache).__name__, name)
    return tuple(f"{kind} ({how})" for kind, how in kinds.items())
