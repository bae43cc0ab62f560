"""Drafts outside of the loop, as the loop would take them."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from specdec_mlx.contracts import Draft, Session
from specdec_mlx.draft_length.drafting import ANY_LENGTH, Selection
from specdec_mlx.draft_length.value import Fixed


def proposing(session: Session, key: str) -> Callable[[int], Draft]:
    """A function that drafts from a session outside of the loop.

    Args:
        session: drafts.
        key: of the session's drafter.
    """
    # A session that is its own single source needs no selection.
    if session.groups(key) == [[(key, session)]]:
        return session.propose
    stream = mx.default_stream(mx.default_device())
    selection = Selection.of(session, key, Fixed(ANY_LENGTH), lambda: True, stream)
    return lambda limit: selection.choose(lambda: limit).draft
