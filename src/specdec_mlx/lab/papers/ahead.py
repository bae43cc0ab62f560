"""Drafts after tokens that may be rejected, which cascades ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specdec_mlx.contracts import NO_DRAFT, Draft, DraftContext, Drafter, Session
from specdec_mlx.drafters.draft_sources import WritingSession
from specdec_mlx.drafters.drawing import DRAWN_AT_ONCE
from specdec_mlx.drafters.model import ModelReader
from specdec_mlx.duck_typed import begin_session


def begin_ahead(
    asked_by: Drafter, drafter: Drafter, prompt: Sequence[int], context: DraftContext
) -> Session:
    """A session that can be asked what follows a draft; ValueError for one that cannot."""
    alone = replace(context, shared_drafts=None)
    session = begin_session(drafter, list(prompt), alone)
    if not (session.looks_ahead or reader_of(session)):
        raise ValueError(
            f"{type(asked_by).__name__}: {drafter.class_name} cannot be asked what follows a "
            "draft; expected a drafter whose sessions have propose_after, such as 'suffix'."
        )
    return session


def propose_after(session: Session, tokens: Sequence[int], limit: int) -> Draft:
    """A point-mass draft after the text and `tokens`. Nothing is noted."""
    reader = reader_of(session)
    if reader is None:
        return session.propose_after(tokens, limit)
    end = len(reader.tokens)
    if limit <= 0 or not end:
        return NO_DRAFT
    # a way back from what is read now, which may not be handed out
    reader.rollback.checkpoint()
    reader.catch_up()
    with reader.rollback.undone(end - 1):
        reader.tokens += tokens
        draft = session.propose(min(limit, DRAWN_AT_ONCE))  # for one pass to check
        del reader.tokens[end:]
    return draft


def reader_of(session: Session) -> ModelReader | None:
    """The draft model of a session that draws its drafts from a model's logits, or None."""
    source = session.source if isinstance(session, WritingSession) else None
    return source if isinstance(source, ModelReader) else None
