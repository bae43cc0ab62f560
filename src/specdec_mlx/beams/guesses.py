"""A drafter's guesses of a beam search: how each beam goes on, and how far to guess."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.contracts import (
    Draft,
    DraftContext,
    Drafter,
    DraftLength,
    Session,
    key_of,
    optional,
)
from specdec_mlx.contracts.branching import texts_of
from specdec_mlx.draft_length.auto import Auto
from specdec_mlx.draft_length.policy import make_draft_length
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.engine.selection import proposing
from specdec_mlx.models import PerModel
from specdec_mlx.verify.inputs import begin_session, check_draft

Tokens = tuple[int, ...]

Continuations = Sequence[tuple[int, float]]
"""Tokens that may follow a beam, with their log-probabilities; the likeliest of them."""


@dataclass(frozen=True)
class Beam:
    """A continuation: generated tokens, the sum of their log-probabilities, and if it has ended."""

    tokens: Tokens = ()
    logprob: float = 0.0
    is_finished: bool = False


def next_beams(
    beams: Sequence[Beam],
    continuations: Mapping[Tokens, Continuations],
    num_beams: int,
    stop_tokens: frozenset[int],
) -> list[Beam] | None:
    """One step of beam search: the likeliest of all beams with one token more.

    Finished beams stay, and compete. A beam with unknown continuations, which are never likelier
    than itself, is dropped if it is less likely than all that are chosen. `continuations` are the
    `num_beams` likeliest of each open beam. None where those that are known do not decide it.
    """
    candidates: list[Beam] = []
    unknown: list[float] = []
    for beam in beams:
        if beam.is_finished:
            candidates.append(beam)
        elif beam.tokens in continuations:
            candidates += [
                Beam((*beam.tokens, token), beam.logprob + logprob, token in stop_tokens)
                for token, logprob in continuations[beam.tokens]
            ]
        else:
            unknown.append(beam.logprob)
    best = sorted(candidates, key=lambda beam: -beam.logprob)[:num_beams]
    if unknown and (len(best) < num_beams or best[-1].logprob <= max(unknown)):
        return None
    return best


@dataclass
class BeamDrafting:
    """A session of the drafter for each beam."""

    drafter: Drafter
    prompt: Sequence[int]
    context: DraftContext
    stream: Any
    _sessions: dict[Tokens, Session] = field(default_factory=dict)
    """By the generated tokens that a session has observed."""

    def follow(self, beams: Sequence[Beam]) -> None:
        """Bring the sessions to these beams; those of other beams are dropped.

        The last beam that goes on from another takes its session over, the others a copy or a new
        one.
        """
        before, self._sessions = self._sessions, {}
        texts = [beam.tokens for beam in beams]
        begun = [[known for known in before if text[: len(known)] == known] for text in texts]
        sources = [max(known, key=len, default=()) for known in begun]
        for i, (text, source) in enumerate(zip(texts, sources, strict=True)):
            session = before.get(source)
            if source in sources[i + 1 :]:
                fork = optional(session, "fork")
                session = None if fork is None else fork()
            if session is None:
                session = begin_session(self.drafter, [*self.prompt, *text], self.context)
            elif len(text) > len(source):
                session.observe(text[len(source) :])
            self._sessions[text] = session

    def guesses(self, beam: Beam, limit: int) -> list[Tokens]:
        """How a beam may go on, up to `limit` tokens: one way for a chain, several for a tree."""
        with mx.stream(self.stream):
            session = self._sessions[beam.tokens]
            draft = proposing(session, key_of(self.drafter))(limit)
        check_draft(draft, self.context.vocab_size or 0)
        return paths_of(draft, limit)


def paths_of(draft: Draft, limit: int) -> list[Tokens]:
    """The chains from the root of a draft to its leaves, each cut to `limit` tokens."""
    texts = texts_of(draft)
    inner = {text[:-1] for text in texts}
    return list(dict.fromkeys(text[:limit] for text in texts if text not in inner))


_learned: PerModel[dict[int, DraftLength]] = PerModel(lambda model: {})


def guess_length_for(
    model: nn.Module, num_beams: int, choice: int | str | DraftLength
) -> DraftLength:
    """How many steps to guess; "auto" is kept with the model, by beams. Raises ValueError."""
    if choice != "auto":
        return make_draft_length(choice)
    learned = _learned(model)
    if num_beams not in learned:
        learned[num_beams] = Auto(Tuning.for_model(model))
    return learned[num_beams]
