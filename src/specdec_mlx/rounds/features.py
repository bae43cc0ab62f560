"""What a drafter reads of the target: rows of kept positions, handed on in the text's order."""

from __future__ import annotations

from collections.abc import Sequence

from specdec_mlx.errors import DraftError
from specdec_mlx.rounds.clock import Round
from specdec_mlx.types import (
    Drafter,
    DraftSession,
    FeatureRows,
    Outcome,
    ReadsTarget,
    SeesTarget,
    Tappable,
    Target,
)


class FeatureFeed:
    """The way of the target's states to one session: each position of the text once, in order."""

    def __init__(self, session: SeesTarget, target: Tappable) -> None:
        """Nothing was shown yet."""
        self._session = session
        self._target = target
        self._num_shown = 0

    @classmethod
    def between(cls, drafter: Drafter, session: DraftSession, target: Target) -> FeatureFeed | None:
        """The way from a target to a session, tapped as its drafter wants; None for no wish.

        Raises:
            DraftError: the target cannot be read, or the session has no `see`.
        """
        if not isinstance(drafter, ReadsTarget):
            return None
        if not isinstance(target, Tappable):
            raise DraftError(
                f"{type(drafter).__name__} reads the target's states, and this target cannot be "
                "read. Use a drafter that works on tokens, such as 'prompt-lookup'."
            )
        if not isinstance(session, SeesTarget):
            raise DraftError(
                f"{type(drafter).__name__} wants features, and its session has no see(features)."
            )
        target.tap(drafter.features)
        return cls(session, target)

    def show_fed(self, start: int) -> None:
        """Show what the latest `feed` computed; it began at position `start` of the text."""
        rows, num_rows = self._target.fed_features()
        self._show(rows, start, range(num_rows))

    def show_round(self, current: Round, outcome: Outcome, start: int) -> None:
        """Show a round's rows: of the pending tokens, from position `start` on, and those kept."""
        rows = current.under_way.features
        assert rows is not None, "a tapped target brings features with every pass"
        num_pending = current.num_pending
        kept = outcome.kept[: len(outcome.tokens) - 1]
        self._show(rows, start, [*range(num_pending), *(num_pending + node for node in kept)])

    def _show(self, rows: FeatureRows, start: int, indices: Sequence[int]) -> None:
        """Show rows whose positions are `start` and those after it, but for those already shown."""
        new = indices[max(0, self._num_shown - start) :]
        if new:
            self._session.see(rows.rows(new))
            self._num_shown = start + len(indices)
