"""Draft lengths: the contract, and what drafts that fork need.

Who drafts chains needs none of the latter. A drafter that has a tree of its own hands it over as a
`Draft` with `parents`; where that costs time its session has `forks`, True while `propose` gives
trees of as many tokens as it is asked for. A session with `propose_tree(limit, values, may_fork)`
is asked by it for the chain or the tree that is worth most to `values`, a `ValuesDrafts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from specdec_mlx.contracts.drafting import Draft, DraftSession, RoundRecord


@runtime_checkable
class OffersSeveral(Protocol):
    """A session that has several drafts at once; default: what it proposes."""

    def candidates(self, limit: int) -> Sequence[Draft]:
        """Point-mass chains of 1 to `limit` tokens, the likeliest first; microseconds of work."""
        ...


class DraftLength(Protocol):
    """Chooses the draft length of each round of one generation; learns from the rounds.

    Of a drafter that is made of several, such as `FirstOf`, each part is asked in turn; `part` is
    the key of the one that is asked, and `RoundRecord.part` of the one whose draft was verified.
    """

    def limit(self, part: str, cheap: bool) -> int:
        """Most tokens to draft now, >= 0; decided before anything is drawn.

        Args:
            part: key of the drafter that is asked.
            cheap: whether proposing is free, so that more may be asked for than `cut` will keep.
        """
        ...

    def cut(self, part: str, draft: Draft) -> int:
        """How many tokens of a point-mass draft to keep, 0 to K.

        A draft that was drawn at random is never shown here: dropping a drawn token because of
        what it is would change the output law.

        Args:
            part: key of the drafter that proposed it.
            draft: what it proposed, within the limit.
        """
        ...

    def record(self, round_: RoundRecord) -> None:
        """Learn from a finished round."""
        ...


@runtime_checkable
class ValuesDrafts(Protocol):
    """A draft length that values drafts; default: they are verified as they are proposed."""

    def begin(
        self, part: str, session: DraftSession, may_fork: Callable[[], bool]
    ) -> Callable[[int], Draft]:
        """Expect a session; the way to ask it for a draft of at most so many tokens.

        Args:
            part: key of its drafter.
            session: is asked what it can do.
            may_fork: True if the target takes trees now.
        """
        ...

    def limit(self, part: str, cheap: bool) -> int:
        """Most tokens to draft; see `DraftLength`."""
        ...

    def choose(self, drafts: Sequence[tuple[str, Draft]]) -> tuple[str, Draft]:
        """The draft that is worth most, with its drafter's key; empty where none is worth any.

        Args:
            drafts: point masses of at least one token, each with its drafter's key; at least one.
        """
        ...

    def outbids(self, part: str) -> bool:
        """True if a session that costs time promises more than the draft that was chosen last."""
        ...

    def grow(
        self, part: str, drafts: Sequence[tuple[str, Draft]], may_fork: Callable[[], bool]
    ) -> Draft:
        """The chain or the tree that is worth most, of what several look-ups propose.

        Args:
            part: key of the drafter that is made of them.
            drafts: chains of point masses, each with its drafter's key.
            may_fork: True if the target takes trees now; asked where a tree is worth most.
        """
        ...

    def extra_price(self, num_drafted: int, with_more: int) -> float:
        """Price of more draft tokens in a round, in tokens.

        At the going rate; infinitely much where that is not known and cannot be tried.
        """
        ...

    def wants_timing(self, num_drafted: int) -> bool:
        """True if the seconds of a round that drafted so many tokens are needed now.

        With a caller who is slow with its tokens, what a pass takes is hidden behind that. The loop
        then waits for the pass before it hands out tokens.
        """
        ...
