"""The contract of a draft length."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from specdec_mlx.contracts import Draft, RoundRecord, Session


class DraftLength(Protocol):
    """Chooses the draft length of each round of one generation; learns from the rounds.

    `part` is the key of the drafter that is asked, one of several under `FirstOf`;
    `RoundRecord.part` of the one whose draft was verified.
    """

    def limit(self, part: str, cheap: bool) -> int:
        """Most tokens to draft now, >= 0; decided before anything is drawn.

        cheap: True if proposing is free, so that more may be asked for than `cut` keeps.
        """

    def cut(self, part: str, draft: Draft) -> int:
        """How many tokens of a point-mass draft to keep, 0 to K.

        A drawn draft is never shown here: dropping a token for what it is would change the output
        law.
        """

    def record(self, round_: RoundRecord) -> None:
        """Learn from a finished round."""


@runtime_checkable
class ValuesDrafts(DraftLength, Protocol):
    """A draft length that values drafts; default: they are verified as they are proposed."""

    def begin(
        self, part: str, session: Session, may_fork: Callable[[], bool]
    ) -> Callable[[int], Draft]:
        """Register a session; returns the function that gets its drafts, by most tokens."""

    def choose(self, drafts: Sequence[tuple[str, Draft]]) -> tuple[str, Draft]:
        """The draft that is worth most, with its drafter's key; empty where none is worth any.

        drafts: point masses of at least one token, each with its drafter's key; at least one.
        """

    def beats_chosen(self, part: str) -> bool:
        """True if a session that costs time promises more than the draft that was chosen last."""

    def best_tree(
        self, part: str, drafts: Sequence[tuple[str, Draft]], may_fork: Callable[[], bool]
    ) -> Draft:
        """The chain or the tree that is worth most, of what several look-ups propose.

        drafts: chains of point masses, each with its drafter's key. may_fork: asked if a tree is
        best.
        """

    def price(self, num_drafted: int) -> float:
        """Price of verifying so many tokens, in tokens; infinite where it cannot be tried."""

    def wants_timing(self, num_drafted: int) -> bool:
        """True if a round's seconds are needed now; the loop then waits before it emits."""


class ValuedSession(ABC):
    """A look-up's session that drafts what is worth most, as a tree if that is best."""

    @abstractmethod
    def propose_tree(self, limit: int, values: ValuesDrafts, may_fork: Callable[[], bool]) -> Draft:
        """The chain or tree of at most `limit` tokens that is worth most to `values`.

        may_fork: asked if a tree is best.
        """
