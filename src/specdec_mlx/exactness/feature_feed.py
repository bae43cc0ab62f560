"""The target's states for drafters: rows of the accepted positions, in the order of the text."""

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
    """Shows the target's states to sessions: each position of the text once, in order.

    Attributes:
        readers: sessions, each with the features that it wants.
        at_once: compute the states of the prompt immediately. On several ranks all must take part.
    """

    def __init__(self, readers: Sequence[tuple[Session, Features]], target: Verifier) -> None:
        self._readers = readers
        self._rejected_readers = [reader for reader in readers if reader[1].rejected]
        self._target = target
        self._num_shown = 0
        self.at_once = False

    @classmethod
    def between(cls, drafter: Drafter, session: Session, target: Verifier) -> FeatureFeed | None:
        """A feed from a target to the parts of a session that read it. None if no part does.

        Raises DraftError for a session without `see`, and UnreadableError.
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
        """A feed that captures the states and shows them to nobody."""
        # The readers are on another rank. All ranks must run the same graph.
        wishes = [wanted for part in all_drafters(drafter) if (wanted := part.features)]
        if not wishes:
            return None
        target.tap(_all_of(wishes))
        return cls([], target)

    def show_fed(self, start: int) -> None:
        rows, num_rows = self._target.fed_features()
        if self.at_once:
            mx.eval(rows.layers, rows.head_input, rows.top_tokens)
        self._show(rows, num_rows, start, range(num_rows))

    def show_last(self, start: int, end: int) -> None:
        """Show the rows before `end` of the latest pass, unless rows before the pass are missing.

        The pass began at `start`. It may not have been read.
        """
        if start <= self._num_shown < end:
            rows, num_rows = self._target.fed_features()
            self._show(rows, num_rows, start, range(min(num_rows, end - start)))

    def show_round(self, current: Round, outcome: Outcome, start: int) -> None:
        """Show a round's states: of the pending tokens from `start` on, and of accepted tokens."""
        rows = current.under_way.features
        assert rows is not None, "a tapped target brings features with every pass"
        num_pending = current.num_pending
        accepted = outcome.accepted[: len(outcome.tokens) - 1]
        indices = [*range(num_pending), *(num_pending + node for node in accepted)]
        self._show(rows, current.under_way.num_fed, start, indices)
        self._show_rejected(rows, current, outcome)

    def _show_rejected(self, rows: FeatureRows, current: Round, outcome: Outcome) -> None:
        if not self._rejected_readers:
            return
        left = [node for node in range(current.num_drafted) if node not in outcome.accepted]
        if left:
            drafted = to_list(current.under_way.draft.tokens)
            not_kept = rows.rows([current.num_pending + node for node in left])
            for session, wanted in self._rejected_readers:
                session.see_rejected([drafted[node] for node in left], not_kept.only(wanted))

    def _show(self, rows: FeatureRows, num_rows: int, start: int, indices: Sequence[int]) -> None:
        """Show the rows at these ascending indices. The first is position `start` of the text."""
        # Positions that are fed again after a rejection were shown before.
        new = indices[max(0, self._num_shown - start) :]
        if new:
            new_rows = rows if len(new) == num_rows else rows.rows(new)
            # A single reader wants exactly the features that the target captures.
            is_alone = len(self._readers) == 1
            for session, wanted in self._readers:
                session.see(new_rows if is_alone else new_rows.only(wanted))
            self._num_shown = start + len(indices)


def _all_of(wishes: Sequence[Features]) -> Features:
    return Features(
        layers=tuple(sorted({layer for wanted in wishes for layer in wanted.layers})),
        head_input=any(wanted.head_input for wanted in wishes),
        top=max(wanted.top for wanted in wishes),
        caches=tuple(sorted({cache for wanted in wishes for cache in wanted.caches})),
    )
