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
    """Begin a session that can draft after tokens that are not in the text yet.

    Args:
        asked_by: the drafter that needs the session, for the error.
        drafter: makes the session.
        prompt: token ids.
        context: of the generation.

    Raises:
        ValueError: the drafter's sessions cannot do this.
    """
    # Drafts ahead of the text cannot be made together with other sequences.
    alone = replace(context, shared_drafts=None)
    session = begin_session(drafter, list(prompt), alone)
    if not (session.looks_ahead or reader_of(session)):
        raise ValueError(
            f"{type(asked_by).__name__}: {drafter.class_name} cannot be asked what follows a "
            "draft; expected a drafter whose sessions have propose_after, such as 'suffix'."
        )
    return session


def propose_after(session: Session, tokens: Sequence[int], limit: int) -> Draft:
    """A point-mass draft after the text and `tokens`. The session does not change."""
    reader = reader_of(session)
    if reader is None:
        return session.propose_after(tokens, limit)
    end = len(reader.tokens)
    if limit <= 0 or not end:
        return NO_DRAFT
    # The checkpoint allows to undo what is read now.
    reader.rollback.checkpoint()
    reader.catch_up()
    with reader.rollback.undone(end - 1):
        reader.tokens += tokens
        draft = session.propose(
            min(limit, DRAWN_AT_ONCE)
        )  # at most the tokens that a single pass draws
        del reader.tokens[end:]
    return draft


def reader_of(session: Session) -> ModelReader | None:
    source = session.source if isinstance(session, WritingSession) else None
    return source if isinstance(source, ModelReader) else None
