"""What sessions would propose after tokens that may be rejected, which cascades ask them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specdec_mlx.contracts import NO_DRAFT, Draft, DraftContext, Drafter, Session
from specdec_mlx.drafters.drawing import DRAWN_AT_ONCE
from specdec_mlx.drafters.model import ModelReader
from specdec_mlx.duck_typed import as_given, begin_session


def begin_ahead(
    asked_by: Drafter, drafter: Drafter, prompt: Sequence[int], context: DraftContext
) -> Any:
    """A session that can be asked what follows a draft; ValueError for one that cannot."""
    alone = replace(context, shared_drafts=None)
    session = as_given(begin_session(drafter, list(prompt), alone))
    if not (isinstance(reader_of(session), ModelReader) or hasattr(session, "propose_after")):
        raise ValueError(
            f"{type(asked_by).__name__}: {drafter.class_name} cannot be asked what follows a "
            "draft; expected a drafter whose sessions have propose_after, such as 'suffix'."
        )
    return session


def propose_after(session: Any, tokens: Sequence[int], limit: int) -> Draft:
    """What follows the text and `tokens` together, point masses; nothing is noted."""
    if isinstance(reader := reader_of(session), ModelReader):
        return _of_model(session, reader, tokens, limit)
    draft: Draft = session.propose_after(tokens, limit)
    return draft


def reader_of(session: Any) -> Any:
    """The source of a session that draws its drafts, None for another one."""
    return getattr(session, "source", None)


def _of_model(session: Session, reader: ModelReader, tokens: Sequence[int], limit: int) -> Draft:
    """A chain of a draft model: few tokens, for one pass to check."""
    end = len(reader.tokens)
    if limit <= 0 or not end:
        return NO_DRAFT
    # a way back from what is read now, which may not be handed out
    reader.rollback.checkpoint()
    reader.catch_up()
    with reader.rollback.undone(end - 1):
        reader.tokens += tokens
        draft = session.propose(min(limit, DRAWN_AT_ONCE))
        del reader.tokens[end:]
    return draft
