"""The report of `specdec-mlx probe`: how exact passes over several positions are, and where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import mlx.nn as nn

from specdec_mlx.caches import leaves_of
from specdec_mlx.exactness.probe import (
    CONTEXT,
    WIDTHS,
    ProbePoint,
    WidthReport,
    compare,
    num_texts_at,
    places_of,
    windows_of,
)
from specdec_mlx.exactness.recurrent_states import ways_back
from specdec_mlx.exactness.side_by_side import (
    LOGITS,
    SinglePasses,
    arrivals,
    largest_difference,
    shaken,
)

LEAST_TIE, TIE_FACTOR = 1e-4, 4
"""Logits so many times the largest difference apart are still a near tie: each of the two may move,
and earlier rounding has moved the caches. A heuristic."""


@dataclass(frozen=True)
class ProbeReport:
    """Result of `probe`.

    Attributes:
        caches: classes, and how each rolls back.
        window: tokens of the longest window, or None.
        rows: a report for each place and width.
    """

    caches: tuple[str, ...]
    window: int | None
    rows: tuple[WidthReport, ...]

    @property
    def exact(self) -> bool:
        """True if passes over several positions are as good as single steps everywhere."""
        return all(row.exact for row in self.rows)

    @property
    def differences(self) -> list[float]:
        """Rounding of a logit, at each place where drafts are verified with rounding.

        It is measured in single passes, so a fault in a wide pass does not add to it.
        """
        return [row.rounding for row in self.rows if row.exact and not row.bitwise]

    def __str__(self) -> str:
        """A small table and a verdict."""
        lines = [f"caches: {', '.join(self.caches)}", "context  width  max difference  flips"]
        for row in self.rows:
            verdict = "bitwise the same" if row.bitwise else ""
            verdict = verdict if row.exact else f"NOT EXACT at {row.fault}"
            lines.append(
                f"{row.context:>7}  {row.width:>5}  {row.max_difference:>14.2e}  "
                f"{row.argmax_flips:>5}  {verdict}"
            )
        how = "exact where it does not say otherwise, and switches itself off where it does"
        if self.exact:
            is_bitwise = all(row.bitwise for row in self.rows)
            how = "exact on this model" + ", up to the rounding of near ties" * (not is_bitwise)
        lines.append(f"Drafting is {how}.")
        return "\n".join(lines)


def probe(
    model: nn.Module, widths: Sequence[int] = WIDTHS, past_window: bool = True
) -> ProbeReport:
    """Compare passes over several positions with single passes, wherever a model may change.

    Three texts are compared at the model's start, and one at each other place. A text takes about
    13 passes, or 40 if they are not bitwise equal, and a prefill of the window.

    Args:
        model: the model.
        widths: positions of each pass.
        past_window: probe past the window too.
    """
    places = [p for p in places_of(model) if past_window or p.context <= CONTEXT]
    rows = [row for place in places for row in _probed(model, place, widths)]
    kinds = [type(cache).__name__ for cache in leaves_of(model)]
    ways = dict(zip(reversed(kinds), reversed(ways_back(model)), strict=True))
    caches = tuple(f"{kind} ({ways[kind]})" for kind in dict.fromkeys(kinds))
    return ProbeReport(caches, max(windows_of(model), default=None), tuple(rows))


def _probed(model: nn.Module, place: ProbePoint, widths: Sequence[int]) -> list[WidthReport]:
    """The worst of several texts for each width. A text with a fault ends the probe."""
    texts: list[list[WidthReport]] = []
    for text in range(num_texts_at(place)):
        reports, passes = compare(model, place, widths, text)
        texts.append(reports)
        if any(report.fault for report in reports):
            break
        if not all(report.bitwise for report in reports):
            rounding = logit_rounding(passes)
            texts[-1] = [replace(report, rounding=rounding) for report in reports]
    return [
        replace(
            max(of_width, key=lambda report: (bool(report.fault), report.max_difference)),
            bitwise=all(report.bitwise for report in of_width),
            rounding=max(report.rounding for report in of_width),
        )
        for of_width in zip(*texts, strict=True)
    ]


def logit_rounding(passes: SinglePasses) -> float:
    """Change of a logit if each input of a module changes in its last place."""
    differences = []
    # Random changes of one unit in the last place imitate another order of sums.
    for key, run in enumerate(passes.alone(passes.start)):
        moved = arrivals(passes.model, run, shaken({}, 1.0, key))[LOGITS]
        differences.append(largest_difference(moved, passes.rows[key][LOGITS]))
    return max(differences)


def near_tie(differences: Iterable[float]) -> float:
    """Gap below which rounding may exchange two logits, given such `differences`."""
    return max([LEAST_TIE, *(TIE_FACTOR * difference for difference in differences)])
