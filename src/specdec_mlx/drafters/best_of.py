"""Several drafters at once: the draft that is worth most is verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from specdec_mlx.contracts import Draft, DraftSession, is_cheap
from specdec_mlx.drafters.first_of import FirstOf, FirstOfSession


@dataclass(frozen=True, init=False)
class BestOf(FirstOf):
    """The draft that is worth most: its expected tokens less what its pass costs.

    Every drafter that is free to ask proposes, and the automatic draft length values each draft by
    its evidence; with a fixed length the longest match wins. One that costs time is asked, before
    it draws, where it promises more than the best of the others. All drafts are scored against what
    came. drafters: at least one, else ValueError; of equal drafts the earlier one's is taken.
    """

    def session(self, sessions: Sequence[DraftSession], keys: Sequence[str]) -> BestOfSession:
        """See `FirstOf.session`."""
        return BestOfSession(sessions, keys)


class BestOfSession(FirstOfSession):
    """One generation, seen by all of the drafters, which compete in one group."""

    def __init__(self, sessions: Sequence[DraftSession], keys: Sequence[str]) -> None:
        super().__init__(sessions, keys)
        self.groups = [[part for group in self.groups for part in group]]
        self._free = [part for _, part in self.parts if is_cheap(part)]
        self._costly = [part for _, part in self.parts if not is_cheap(part)]

    def propose(self, limit: int) -> Draft:
        """The draft of the longest match; those that cost time are asked if there is none."""
        free = [part.propose(limit) for part in self._free]
        certain = [draft for draft in free if len(draft) and draft.logprobs is None]
        if certain:
            return max(certain, key=lambda draft: draft.match)
        asked = (part.propose(limit) for part in self._costly)
        return next(filter(len, chain(asked, free)), Draft())
