"""The target's states for a drafter: rows of kept positions, handed on in the text's order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from specdec_mlx.contracts import (
    Drafter,
    FeatureRows,
    Features,
    Outcome,
    Session,
    all_drafters,
)
from specdec_mlx.errors import DraftError
from specdec_mlx.token_ids import to_list

if TYPE_CHECKING:
    from specdec_mlx.loop import Round
    from specdec_mlx.target import Verifier


class FeatureFeed:
    """The way of the target's states to sessions: each position of the text once, in order.

    readers: sessions, each with what it wants. at_once: the prompt's states are computed there and
    then, as on several ranks, since all may have to take part.
    """

    def __init__(self, readers: Sequence[tuple[Session, Features]], target: Verifier) -> None:
        self._readers = readers
        self._rejected_readers = [reader for reader in readers if reader[1].rejected]
        self._target = target
        self._num_shown = 0
        self.at_once = False

    @classmethod
    def between(cls, drafter: Drafter, session: Session, target: Verifier) -> FeatureFeed | None:
        """The way from a target to those of a session's parts that read it; None if none does.

        Raises DraftError for a session without `see`, UnreadableError for what the target does not
        show.
        """
        readers = []
        by_key = {one.key: one for one in all_drafters(drafter)}
        for key, part in session.parts(drafter.key):
            owner = by_key.get(key)
            if owner is None or (wanted := owner.features) is None:
                continue
            if not part.reads_target:
                name = owner.class_name
                raise DraftError(f"{name} wants features, and its session has no see(features).")
            readers.append((part, wanted))
        if not readers:
            return None
        target.tap(_all_of([wanted for _, wanted in readers]))
        return cls(readers, target)

    @classmethod
    def of_nobody(cls, drafter: Drafter | None, target: Verifier) -> FeatureFeed | None:
        """The feed where the sessions are on another rank: this one computes as much."""
        wishes = [wanted for part in all_drafters(drafter) if (wanted := part.features)]
        if not wishes:
            return None
        target.tap(_all_of(wishes))
        return cls([], target)

    def show_fed(self, start: int) -> None:
        """Show what the latest `feed` computed; it began at position `start` of the text."""
        rows, num_rows = self._target.fed_features()
        if self.at_once:
            mx.eval(rows.layers, rows.head_input, rows.top_tokens)
        self._show(rows, num_rows, start, range(num_rows))

    def show_round(self, current: Round, outcome: Outcome, start: int) -> None:
        """Show a round's rows: of the pending tokens, from position `start` on, and those kept."""
        rows = current.under_way.features
        assert rows is not None, "a tapped target brings features with every pass"
        num_pending = current.num_pending
        kept = outcome.accepted[: len(outcome.tokens) - 1]
        shown = [*range(num_pending), *(num_pending + node for node in kept)]
        self._show(rows, current.under_way.num_fed, start, shown)
        self._show_rejected(rows, current, outcome)

    def _show_rejected(self, rows: FeatureRows, current: Round, outcome: Outcome) -> None:
        """Show the rows of draft tokens that were not kept to those that want them."""
        if not self._rejected_readers:
            return
        left = [node for node in range(current.num_drafted) if node not in outcome.accepted]
        if left:
            drafted = to_list(current.under_way.draft.tokens)
            not_kept = rows.rows([current.num_pending + node for node in left])
            for session, wanted in self._rejected_readers:
                session.see_rejected([drafted[node] for node in left], not_kept.only(wanted))

    def _show(self, rows: FeatureRows, num_rows: int, start: int, indices: Sequence[int]) -> None:
        """Show new rows from position `start` on, by ascending `indices` of those of the text."""
        new = indices[max(0, self._num_shown - start) :]
        if new:
            shown = rows if len(new) == num_rows else rows.rows(new)
            # the target brings what it wants, and no more
            is_alone = len(self._readers) == 1
            for session, wanted in self._readers:
                session.see(shown if is_alone else shown.only(wanted))
            self._num_shown = start + len(indices)


def _all_of(wishes: Sequence[Features]) -> Features:
    return Features(
        layers=tuple(sorted({layer for wanted in wishes for layer in wanted.layers})),
        head_input=any(wanted.head_input for wanted in wishes),
        top=max(wanted.top for wanted in wishes),
        caches=tuple(sorted({cache for wanted in wishes for cache in wanted.caches})),
    )
