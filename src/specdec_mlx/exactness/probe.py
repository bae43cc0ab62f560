"""Does a pass over m positions give the logits of m single passes?

Lossless decoding stands on that. It is measured once for each loaded model: at its start, past its
window, and across positions that its configuration names, once a text comes near them.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.batch_caches import BatchCaches
from specdec_mlx.caches import Rollback, leaves_of, wait_for, window_of
from specdec_mlx.exactness.recurrent_states import (
    in_steps,
    recurrent_states_of,
    ways_back,
)
from specdec_mlx.exactness.rounding import is_rounding
from specdec_mlx.models.anatomy import anatomy_of
from specdec_mlx.models.loading import PerModel
from specdec_mlx.trees.passes import (
    TreeLayout,
    chooses_blocks,
    is_rope,
    tree_pass,
    with_offset_shift,
)
from specdec_mlx.trees.shape import path_to

WIDTHS = (2, 5, 9)


QUICK_WIDTHS = (5,)
"""Widths measured before the first draft on a model: about 7 passes' worth of time."""


CONTEXT = 12


STEP = 2048


# positions before one at which a model may change, from which on that is measured
MARGIN = 32


BOUNDARY = re.compile(r"(?:max_position|attention_chunk|floor_scale)\w*'?[=:] ?(\d+)")
"""Positions, in a configuration's text, at which a model may change."""


TREE = (-1, -1, 0, 0, 1, 2)
"""Parents in the tree that is measured: two branches, one of which forks again."""


TEXT_LENGTHS, TEXT_WIDTHS, TEXTS_KEPT = (3, 7, 1), (5, 1, 3), (2, 1, 3)
"""Of texts that are tried as rows of a batch: tokens before a pass, in it, and kept of those."""


@dataclass(frozen=True)
class WidthReport:
    """Passes over `width` positions after `context` others, against single ones.

    max_difference: of a logit; spread: their standard deviation. argmax_flips: positions whose
    likeliest token differs. bitwise: all equal. exact: rounding explains the difference.
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
    """Result of `probe`. caches: classes and how each rolls back. window: tokens, or None."""

    caches: tuple[str, ...]
    window: int | None
    rows: tuple[WidthReport, ...]

    @property
    def exact(self) -> bool:
        """True if several positions at once are as good as one by one everywhere."""
        return all(row.exact for row in self.rows)

    @property
    def differences(self) -> list[float]:
        """The largest difference of a logit in each place where drafts are verified."""
        return [row.max_difference for row in self.rows if row.exact]

    def __str__(self) -> str:
        """A small table and a verdict."""
        lines = [
            f"caches: {', '.join(self.caches)}",
            "context  width  max difference  flips",
        ]
        for row in self.rows:
            verdict = (
                "bitwise the same" if row.bitwise else "" if row.exact else "NOT EXACT"
            )
            lines.append(
                f"{row.context:>7}  {row.width:>5}  {row.max_difference:>14.2e}  "
                f"{row.argmax_flips:>5}  {verdict}"
            )
        how = "exact where it does not say otherwise, and switches itself off where it does"
        if self.exact:
            is_bitwise = all(row.bitwise for row in self.rows)
            how = "exact on this model" + ", up to the rounding of near ties" * (
                not is_bitwise
            )
        lines.append(f"Drafting is {how}.")
        return "\n".join(lines)


def probe(
    model: nn.Module, widths: Sequence[int] = WIDTHS, past_window: bool = True
) -> ProbeReport:
    """Compare passes over several positions with single ones, wherever a model may change.

    widths: positions a pass. About 20 passes for each place, and a prefill of the window, if any.
    """
    places = [p for p in places_of(model) if past_window or p.context <= CONTEXT]
    rows = [row for place in places for row in _compare(model, place, widths)]
    kinds = [type(cache).__name__ for cache in leaves_of(model)]
    ways = dict(zip(reversed(kinds), reversed(ways_back(model)), strict=True))
    caches = tuple(f"{kind} ({ways[kind]})" for kind in dict.fromkeys(kinds))
    return ProbeReport(caches, max(_windows(model), default=None), tuple(rows))


@dataclass(eq=False)
class ProbePoint:
    """A place to measure passes at, after `context` tokens and `shift` positions that caches claim.

    start: first position that this tells of. exact: verdicts, by "a pass over a tree".
    """

    start: int
    context: int
    shift: int = 0
    name: str = ""
    exact: dict[bool, bool] = field(default_factory=dict)


@PerModel
def places_of(model: nn.Module) -> list[ProbePoint]:
    """Where a loaded model may change, in order; its start is the first."""
    windows = _windows(model)
    short = min(
        CONTEXT, max(1, max(windows, default=CONTEXT + max(WIDTHS)) - max(WIDTHS))
    )
    # from which the widest pass does not go past the window
    places = [ProbePoint(0, short)]
    if windows:
        name = f" past its window of {max(windows)} tokens"
        places.append(ProbePoint(min(windows), max(windows) + 1, name=name))
    named = [value for module in model.modules() for value in vars(module).values()]
    texts = {repr(value) for value in named if is_dataclass(value)}
    for boundary in {int(found) for text in texts for found in BOUNDARY.findall(text)}:
        shift, name = max(0, boundary - 2 - short), f" around position {boundary}"
        places.append(ProbePoint(max(0, boundary - MARGIN), short, shift, name))
    return sorted(places, key=lambda place: place.start)


def first_inexact(
    model: nn.Module, position: int, *, on_trees: bool = False
) -> int | None:
    """Position that passes from this one on may not go beyond, or None: chains, trees."""
    for place in places_of(model):
        if place.start > position + MARGIN:
            return None if on_trees else place.start
        if on_trees not in place.exact:
            place.exact[on_trees] = _is_exact(model, place, on_trees)
        if not place.exact[on_trees]:
            return place.start
    return None


def _is_exact(model: nn.Module, place: ProbePoint, on_trees: bool) -> bool:
    """True if passes over a tree, or a chain, give the logits of single positions."""
    try:
        if on_trees:
            report = tree_report(model, place.context, shift=place.shift)
            return report.exact and not chooses_blocks(model)
        reports = _compare(model, place, QUICK_WIDTHS)
    # positions by row, or those claimed, are more than all models take
    except Exception:
        if not (on_trees or place.shift):
            raise
        return not on_trees
    if all(report.exact for report in reports):
        return True
    worst = max(report.max_difference for report in reports)
    _warn(
        model,
        f"{place.name} gives other logits for several positions at once than one by one (by up to "
        f"{worst:.2g}), so nothing is drafted there. The text is right, as fast as plain decoding. "
        "Run specdec-mlx probe to see by how much",
    )
    return False


def _warn(model: nn.Module, what: str) -> None:
    warnings.warn(
        f"specdec_mlx: this model ({type(model).__module__}){what}.", stacklevel=3
    )


@PerModel
def warn_of_chains(model: nn.Module) -> None:
    """Say, once for each loaded model, that no tree is verified."""
    _warn(
        model,
        " verifies no tree of drafts in one pass; chains are drafted, for the same text",
    )


@PerModel
def can_hold_rows(model: nn.Module) -> bool:
    """True if rows of several texts give the logits that each gives alone; a warning if not."""
    rows = BatchCaches.like(make_prompt_cache(model))
    reason = "its caches cannot be held in rows"
    if rows is not None:
        try:
            with in_steps(model, max(TEXT_WIDTHS)):
                if _texts_report(model, rows).exact:
                    return True
            reason = "its texts differ from what they are alone"
        except Exception as error:
            reason = f"it fails with {type(error).__name__}"
    _warn(
        model,
        f" cannot write several texts at once: {reason}. They are written one by one",
    )
    return False


def _texts_report(model: nn.Module, rows: BatchCaches) -> WidthReport:
    """Feed three texts a padded pass, go back in each by another number, and feed one token."""
    texts: Any = _random_tokens(model, 16 * len(TEXT_LENGTHS)).reshape(-1, 16).tolist()
    about = list(zip(texts, TEXT_LENGTHS, TEXT_WIDTHS, TEXTS_KEPT, strict=True))
    expected = []
    for text, length, width, kept in about:
        alone = _prefilled(model, mx.array(text[: length + kept]))
        expected.append(model(mx.array([[text[length + width]]]), cache=alone)[0, -1])
        rows.add(_prefilled(model, mx.array(text[:length])), length)
    mx.eval(
        rows.feed(
            model, [text[start : start + width] for text, start, width, _ in about]
        )
    )
    ends = rows.go_back([length + kept for _, length, _, kept in about])
    again = [  # what was lost of the text, and the token after it
        [*text[end : length + kept], text[length + width]]
        for end, (text, length, width, kept) in zip(ends, about, strict=True)
    ]
    logits = rows.feed(model, again)
    last = mx.stack([logits[row, len(text) - 1] for row, text in enumerate(again)])
    return _report(model, max(TEXT_WIDTHS), max(TEXT_LENGTHS), last, mx.stack(expected))


def tree_report(model: nn.Module, context: int, *, shift: int = 0) -> WidthReport:
    """`TREE` after `context` tokens and one more, in one pass, against each of its paths alone.

    shift: positions that the caches claim besides.
    """
    size = len(TREE)
    tokens = _random_tokens(model, context + 1 + size)
    start = _prefilled(model, tokens[:context], shift)
    ids = tokens[context:]
    paths = [[0, *(node + 1 for node in path_to(i, TREE))] for i in range(-1, size)]
    alone = [
        model(ids[mx.array(path)][None], cache=copy.deepcopy(start))[0, -1:]
        for path in paths
    ]
    logits = tree_pass(model, ids, start, TreeLayout.after(1, TREE))
    return _report(model, size + 1, context, logits, mx.concatenate(alone))


def _prefilled(model: nn.Module, tokens: mx.array, shift: int = 0) -> list[Any]:
    """Caches that hold these tokens [n], and claim `shift` positions before them."""
    caches = [with_offset_shift(cache, shift) for cache in make_prompt_cache(model)]
    for i in range(0, tokens.shape[0], STEP):
        model(tokens[None, i : i + STEP], cache=caches)
        wait_for(caches)
    return caches


def _compare(
    model: nn.Module, place: ProbePoint, widths: Sequence[int]
) -> list[WidthReport]:
    """One report for each width."""
    longest, context, shift = max(widths), place.context, place.shift
    tokens = _random_tokens(model, context + longest)
    start = _prefilled(model, tokens[:context], shift)
    single = copy.deepcopy(start)
    steps = []
    for i in range(longest):
        steps.append(model(tokens[None, context + i, None], cache=single)[0])
        # passes in one graph may be run in another order on each rank
        mx.eval(steps[-1])
    expected = mx.concatenate(steps)
    states, reports = recurrent_states_of(model), []
    for width in widths:
        rollback = Rollback(copy.deepcopy(start), states=states)
        logits = rollback.forward(model, tokens[context : context + width])
        report = _report(model, width, context + shift, logits, expected[:width])
        agrees = not shift or _ropes_agree(model, context + shift, width)
        reports.append(replace(report, exact=report.exact and agrees))
    return reports


def _ropes_agree(model: nn.Module, start: int, width: int) -> bool:
    """True if rope modules turn several rows as one by one; not if by the length of the text."""
    differences = [mx.array(0.0)]
    for module in model.modules():
        if any(map(is_rope, type(module).__mro__)):
            # as many or more
            size = 2 * module._freqs.size if hasattr(module, "_freqs") else 1024
            rows = mx.ones((1, 1, width, size))
            single = [module(rows[:, :, :1], offset=start + i) for i in range(width)]
            difference = module(rows, offset=start) - mx.concatenate(single, axis=2)
            differences.append(mx.abs(difference).max())
    # of an angle's float32
    return float(mx.stack(differences).max()) < 1e-3 + 4e-7 * start


def _report(
    model: nn.Module, width: int, context: int, logits: mx.array, expected: mx.array
) -> WidthReport:
    """Compare logits [n, V]; those that are not finite do not count."""
    logits, expected = logits.astype(mx.float32), expected.astype(mx.float32)
    finite = mx.isfinite(expected)
    difference = float(mx.where(finite, mx.abs(logits - expected), 0).max())
    spread = float(mx.std(mx.where(finite, expected, 0)))
    flips = mx.argmax(logits, axis=-1) != mx.argmax(expected, axis=-1)
    return WidthReport(
        width=width,
        context=context,
        max_difference=difference,
        spread=spread,
        argmax_flips=int(flips.sum()),
        bitwise=bool(mx.array_equal(logits, expected)),
        exact=is_rounding(model, difference, spread),
    )


def _random_tokens(model: nn.Module, num_tokens: int) -> mx.array:
    """Token ids [n]."""
    vocab_size = anatomy_of(model).vocab_size
    return mx.random.randint(0, vocab_size, shape=(num_tokens,), key=mx.random.key(0))


def _windows(model: nn.Module) -> list[int]:
    """Windows of the model's caches, but for those that keep everything."""
    return [window for cache in leaves_of(model) if (window := window_of(cache))]
