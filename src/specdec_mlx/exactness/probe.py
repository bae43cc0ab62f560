"""Does a pass over m positions give the logits of m single passes?

Lossless decoding depends on it. It is measured once for each loaded model: at its start, past its
window, and across positions that its configuration names, when a text comes near them.
`specdec_mlx.lab.probe` measures more passes, and reports them.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.batch_caches import BatchCaches
from specdec_mlx.caches import Rollback, leaves_of, wait_for, window_of
from specdec_mlx.exactness.recurrent_states import in_steps, padded, recurrent_states_of
from specdec_mlx.exactness.rounding import is_rounding
from specdec_mlx.exactness.side_by_side import LOGITS, Run, SinglePasses, largest_difference
from specdec_mlx.kernels.contract import Kernels, within
from specdec_mlx.models.anatomy import anatomy_of, group_of
from specdec_mlx.models.loading import PerModel
from specdec_mlx.trees.shape import path_to
from specdec_mlx.trees.tree_pass import (
    TreeLayout,
    chooses_blocks,
    is_rope,
    tree_pass,
    with_offset_shift,
)

WIDTHS = (2, 5, 9)


QUICK_WIDTHS = (5,)
"""Width measured before the first draft on a model. It takes 7 passes if the logits are bitwise
equal to the logits of single passes, else mostly 8 to 10."""

KERNEL_WIDTHS = (5, 9)
"""Widths measured with kernels, which may begin above 5 rows."""

NUM_TEXTS = 3  # texts that the probe measures at the start


CONTEXT = 12


STEP = 2048


MARGIN = 32  # positions before a possible change of the model at which it is measured


BOUNDARY = re.compile(r"(?:max_position|attention_chunk|floor_scale)\w*'?[=:] ?(\d+)")
"""Positions, in a configuration's text, at which a model may change."""


TREE = (-1, -1, 0, 0, 1, 2)
"""Parents in the tree that is measured: two branches, one of which forks again."""


TEXT_LENGTHS, TEXT_WIDTHS, TEXTS_KEPT = (3, 7, 1), (5, 1, 3), (2, 1, 3)
"""Three texts that are tried as rows: tokens before a pass, in it, and kept of the pass."""


@dataclass(frozen=True)
class WidthReport:
    """Passes over `width` positions after `context` others, compared with single passes.

    Attributes:
        width, context: numbers of positions.
        max_difference: of a logit.
        spread: standard deviation of the logits.
        argmax_flips: positions whose likeliest token differs.
        bitwise: all logits are equal.
        alike: nearly all modules compute several rows bitwise as they compute each row alone.
        fault: name of the module at which a difference arrives that rounding does not explain, or
            "".
        rounding: how far rounding alone moves a logit of single passes. 0 if not measured.
    """

    width: int
    context: int
    max_difference: float
    spread: float
    argmax_flips: int
    bitwise: bool
    alike: bool = True
    fault: str = ""
    rounding: float = 0.0

    @property
    def exact(self) -> bool:
        """True if rounding explains the difference."""
        return not self.fault


@dataclass(eq=False)
class ProbePoint:
    """A position at which passes are measured.

    Attributes:
        start: first position of the text that the measurement covers.
        context: tokens fed before the pass.
        shift: further positions that the caches claim to hold.
        name: words for the warning.
        exact: verdicts so far, by (True for trees, active kernels or "").
    """

    start: int
    context: int
    shift: int = 0
    name: str = ""
    exact: dict[tuple[bool, str], bool] = field(default_factory=dict)


@PerModel
def places_of(model: nn.Module) -> list[ProbePoint]:
    """Probe points of a loaded model, in order of their starts."""
    windows = windows_of(model)
    short = min(CONTEXT, max(1, max(windows, default=CONTEXT + max(WIDTHS)) - max(WIDTHS)))
    # With this context the widest pass stays within the window.
    places = [ProbePoint(0, short)]
    if windows:
        name = f" past its window of {max(windows)} tokens"
        places.append(ProbePoint(min(windows), max(windows) + 1, name=name))
    attributes = [value for module in model.modules() for value in vars(module).values()]
    # Configurations are dataclasses that modules keep.
    texts = {repr(value) for value in attributes if is_dataclass(value)}
    for boundary in {int(number) for text in texts for number in BOUNDARY.findall(text)}:
        shift, name = max(0, boundary - 2 - short), f" around position {boundary}"
        places.append(ProbePoint(max(0, boundary - MARGIN), short, shift, name))
    return sorted(places, key=lambda place: place.start)


def first_inexact(model: nn.Module, position: int, *, on_trees: bool = False) -> int | None:
    """First position at which a wide pass is not exact, or None.

    Only the points that `position` comes near are measured. `on_trees` asks about passes over
    trees.
    """
    for place in places_of(model):
        if place.start > position + MARGIN:
            return None if on_trees else place.start
        if not _known_exact(model, place, on_trees):
            return place.start
    return None


def kernels_around(
    kernels: Kernels | None,
    model: nn.Module,
    rows: int,
    context: int,
    on_trees: bool = False,
    *,
    probe: bool = True,
) -> AbstractContextManager[object]:
    """Kernels around a pass, or nothing: for one row, and where a probe finds other logits."""
    if kernels is None or rows < 2:
        return nullcontext()
    if probe and kernels.active(model):
        near = (place for place in places_of(model) if place.start <= context + MARGIN)
        if not all(_known_exact(model, place, on_trees, kernels) for place in near):
            return nullcontext()
    return kernels.around(model, rows, context)


def _known_exact(
    model: nn.Module, place: ProbePoint, on_trees: bool, kernels: Kernels | None = None
) -> bool:
    key = on_trees, kernels.active(model) if kernels else ""
    if key not in place.exact:
        place.exact[key] = _is_exact(model, place, on_trees, kernels)
    return place.exact[key]


def _is_exact(
    model: nn.Module, place: ProbePoint, on_trees: bool, kernels: Kernels | None = None
) -> bool:
    try:
        if on_trees:
            report = tree_report(model, place.context, shift=place.shift, kernels=kernels)
            return report.exact and not chooses_blocks(model)
        report = _quick_report(model, place, kernels)
    # Not every model accepts a position for each row, or claimed positions.
    except Exception:
        if not (on_trees or place.shift):
            raise
        return not on_trees
    if report.exact:
        return True
    if kernels is not None:
        _warn(
            model,
            f"{place.name} gives other logits on the kernels {kernels.name!r} (by up to "
            f"{report.max_difference:.2g}, first at {report.fault}), so they are left out there",
        )
        return False
    _warn(
        model,
        f"{place.name} gives other logits for several positions at once than one by one (by up to "
        f"{report.max_difference:.2g}, first at {report.fault}), so nothing is drafted there. The "
        "text is right, as fast as plain decoding. "
        "Run specdec-mlx probe to see by how much",
    )
    return False


def _quick_report(model: nn.Module, place: ProbePoint, kernels: Kernels | None) -> WidthReport:
    """A report on one text, or on more texts if a small difference may be a fault."""
    # Rows that modules compute alike should not differ at all, so that one text does not settle a
    # difference.
    widths = QUICK_WIDTHS if kernels is None else KERNEL_WIDTHS
    for text in range(num_texts_at(place)):
        reports, _ = compare(model, place, widths, text, kernels)
        report = next((report for report in reports if report.fault), reports[-1])
        if report.bitwise or report.fault or not report.alike:
            break
    return report


def num_texts_at(place: ProbePoint) -> int:
    # Away from the start a text must fill a window, which takes long, or the caches only claim
    # positions.
    return 1 if place.start else NUM_TEXTS


def _warn(model: nn.Module, what: str) -> None:
    warnings.warn(f"specdec_mlx: this model ({type(model).__module__}){what}.", stacklevel=3)


@PerModel
def warn_of_chains(model: nn.Module) -> None:
    """Warn, once for each loaded model, that trees are not verified."""
    _warn(model, " verifies no tree of drafts in one pass; chains are drafted, for the same text")


@PerModel
def can_hold_rows(model: nn.Module) -> bool:
    """True if rows of several texts give the logits of each text alone. Warns if not."""
    rows = BatchCaches.like(make_prompt_cache(model))
    reason = "its caches cannot be held in rows"
    if chooses_blocks(model):
        reason = "it attends to blocks of positions, which padding shifts"
    elif rows is not None:
        try:
            with in_steps(model, max(TEXT_WIDTHS)):
                report = _texts_report(model, rows)
                if is_rounding(model, report.max_difference, report.spread):
                    return True
            reason = "its texts differ from what they are alone"
        except Exception as error:
            reason = f"it fails with {type(error).__name__}"
    _warn(model, f" cannot write several texts at once: {reason}. They are written one by one")
    return False


def _texts_report(model: nn.Module, rows: BatchCaches) -> WidthReport:
    """Feed three texts in a padded pass, shorten each differently, and feed one more token.

    The beginnings of the first two are read in one padded pass.
    """
    texts: Any = random_tokens(model, 16 * len(TEXT_LENGTHS)).reshape(-1, 16).tolist()
    *together, last = [text[:n] for text, n in zip(texts, TEXT_LENGTHS, strict=True)]
    for _ in together:
        rows.add(make_prompt_cache(model), 0)
    with padded(model):
        mx.eval(rows.feed(model, together))
    rows.add(prefilled(model, mx.array(last)), len(last))
    about = list(zip(texts, TEXT_LENGTHS, TEXT_WIDTHS, TEXTS_KEPT, strict=True))
    expected = []
    for text, length, width, num_kept in about:
        alone = prefilled(model, mx.array(text[: length + num_kept]))
        expected.append(model(mx.array([[text[length + width]]]), cache=alone)[0, -1])
    mx.eval(rows.feed(model, [text[start : start + width] for text, start, width, _ in about]))
    lengths = rows.go_back([length + num_kept for _, length, _, num_kept in about])
    again = [  # the kept tokens that went with recurrent state, and the next token
        [*text[end : length + num_kept], text[length + width]]
        for end, (text, length, width, num_kept) in zip(lengths, about, strict=True)
    ]
    logits = rows.feed(model, again)
    after = mx.stack([logits[row, len(text) - 1] for row, text in enumerate(again)])
    return _of_logits(after, mx.stack(expected), max(TEXT_LENGTHS))


def tree_report(
    model: nn.Module, context: int, *, shift: int = 0, kernels: Kernels | None = None
) -> WidthReport:
    """Compare one pass over `TREE`, after `context` + 1 tokens, with each of its paths alone.

    shift: further positions that the caches claim. kernels: of the pass over the tree.
    """
    size = len(TREE)
    tokens = random_tokens(model, context + 1 + size)
    ids = tokens[context:]
    paths = [[0, *(node + 1 for node in path_to(i, TREE))] for i in range(-1, size)]

    def alone(start: list[Any]) -> list[Run]:
        return [
            partial(_logits, model, ids[mx.array(path)], copy.deepcopy(start)) for path in paths
        ]

    def wide() -> mx.array:
        caches = copy.deepcopy(passes.start)
        around = kernels_around(kernels, model, size + 1, context + shift, probe=False)
        return within(around, partial(tree_pass, model, ids, caches, TreeLayout.after(1, TREE)))

    passes = SinglePasses(model, prefilled(model, tokens[:context], shift), alone)
    return _report(passes, wide, size + 1, context)


def _logits(model: nn.Module, tokens: mx.array, caches: list[Any]) -> mx.array:
    logits: mx.array = model(tokens[None], cache=caches)[0]
    return logits


def prefilled(model: nn.Module, tokens: mx.array, shift: int = 0) -> list[Any]:
    """Caches that hold tokens [n] and claim `shift` positions before them."""
    caches = [with_offset_shift(cache, shift) for cache in make_prompt_cache(model)]
    for i in range(0, tokens.shape[0], STEP):
        model(tokens[None, i : i + STEP], cache=caches)
        wait_for(caches)
    return caches


def compare(
    model: nn.Module,
    place: ProbePoint,
    widths: Sequence[int],
    text: int = 0,
    kernels: Kernels | None = None,
) -> tuple[list[WidthReport], SinglePasses]:
    longest, context, shift = max(widths), place.context, place.shift
    tokens = random_tokens(model, context + longest, text)

    def alone(start: list[Any]) -> list[Run]:
        caches = copy.deepcopy(start)
        return [partial(_logits, model, token[None], caches) for token in tokens[context:]]

    def wide(width: int) -> mx.array:
        rollback = Rollback(copy.deepcopy(passes.start), states=states)
        around = kernels_around(kernels, model, width, context + shift, probe=False)
        return within(around, partial(rollback.forward, model, tokens[context : context + width]))

    passes = SinglePasses(model, prefilled(model, tokens[:context], shift), alone)
    states, reports = recurrent_states_of(model), []
    for width in widths:
        report = _report(passes, partial(wide, width), width, context + shift)
        if shift and not _ropes_agree(model, context + shift, width):
            report = replace(report, fault="its rotary embedding")
        reports.append(report)
    return reports, passes


def _ropes_agree(model: nn.Module, start: int, width: int) -> bool:
    """True if rope modules rotate several rows as one row at a time."""
    # Some ropes choose frequencies by the length of the text. A shifted cache shows that only here.
    differences = [mx.array(0.0)]
    for module in model.modules():
        if any(map(is_rope, type(module).__mro__)):
            # at least as wide as any head of the model
            size = 2 * module._freqs.size if hasattr(module, "_freqs") else 1024
            rows = mx.ones((1, 1, width, size))
            single = [module(rows[:, :, :1], offset=start + i) for i in range(width)]
            difference = module(rows, offset=start) - mx.concatenate(single, axis=2)
            differences.append(mx.abs(difference).max())
    # An angle in float32 is coarser the further a text goes.
    return float(mx.stack(differences).max()) < 1e-3 + 4e-7 * start


def _report(passes: SinglePasses, wide: Run, width: int, context: int) -> WidthReport:
    """Compare a wide pass with single passes. If they are not bitwise equal, look for a fault."""
    report = _of_logits(wide(), passes.joined(width)[LOGITS][0], context)
    if report.bitwise:
        return report
    if group_of(passes.model) is not None:
        # Each rank has a part of the rows and would run other passes, so that only logits decide.
        is_right = is_rounding(passes.model, report.max_difference, report.spread)
        return replace(report, fault="" if is_right else "its logits")
    off = passes.off(wide, width)
    # If kernels treat several rows differently, about four of ten modules in a layer differ.
    # Otherwise only attention does.
    num_off = sum(any(rows) for rows in off.values())
    report = replace(report, alike=5 * num_off < len(off))
    place = passes.fault(off)
    names = {id(module): name for name, module in passes.model.named_modules()}
    fault = "" if place is None else names.get(place[0], "its logits")
    return replace(report, fault=fault)


def _of_logits(logits: mx.array, expected: mx.array, context: int) -> WidthReport:
    logits, expected = logits.astype(mx.float32), expected.astype(mx.float32)
    flips = mx.argmax(logits, axis=-1) != mx.argmax(expected, axis=-1)
    return WidthReport(
        width=len(logits),
        context=context,
        max_difference=largest_difference(logits, expected),
        spread=float(mx.std(mx.where(mx.isfinite(expected), expected, 0))),
        argmax_flips=int(flips.sum()),
        bitwise=bool(mx.array_equal(logits, expected)),
    )


def random_tokens(model: nn.Module, num_tokens: int, text: int = 0) -> mx.array:
    vocab_size = anatomy_of(model).vocab_size
    return mx.random.randint(0, vocab_size, shape=(num_tokens,), key=mx.random.key(text))


def windows_of(model: nn.Module) -> list[int]:
    return [window for cache in leaves_of(model) if (window := window_of(cache))]
