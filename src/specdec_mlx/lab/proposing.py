"""Drafts outside of the loop, as the loop would take them."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from specdec_mlx.contracts import Draft, Session
from specdec_mlx.draft_length.drafting import Selection, SessionPart
from specdec_mlx.draft_length.policy import Fixed


class SelectionAlone(Selection):
    """The loop's selection for a combination outside of it, at lengths that are given."""

    def __init__(self, session: Session, key: str) -> None:
        self.length, self.stream = Fixed(0), mx.default_stream(mx.default_device())
        self.use(session, key)

    def propose(self, limit: int) -> Draft:
        """The draft that the loop would verify at this fixed length."""
        self._most = limit
        return self.select()[1]

    def _limit(self, part: SessionPart) -> int:
        return self._most


def proposing(session: Session, key: str) -> Callable[[int], Draft]:
    """The way to a session's drafts outside of the loop; key: of its drafter."""
    is_alone = session.groups(key) == [[(key, session)]]
    return session.propose if is_alone else SelectionAlone(session, key).propose
