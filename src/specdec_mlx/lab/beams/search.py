"""Beam search with a drafter: several steps a pass, and the beams of a plain beam search.

One pass over each beam's guess tells the likeliest continuations of each guessed position. The
search goes on with the same pass as long as the beams of a step were guessed, or cannot matter
(Leviathan et al. 2023, appendix A.4).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache

from specdec_mlx.batch_caches import BatchCaches
from specdec_mlx.caches import Rollback, wait_for
from specdec_mlx.contracts import (
    Draft,
    DraftContext,
    Drafter,
    RoundRecord,
    Session,
)
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.draft_length.value import Auto, DraftLength, Fixed, make_draft_length
from specdec_mlx.drafters.draft_sources import WritingSession
from specdec_mlx.drafters.model import ModelReader
from specdec_mlx.duck_typed import begin_session
from specdec_mlx.errors import LogitsError, RowsError
from specdec_mlx.exactness.probe import can_hold_rows
from specdec_mlx.lab.papers.tree_drafts import texts_of
from specdec_mlx.lab.papers.vertical_cascade import GuessedSource
from specdec_mlx.lab.proposing import proposing
from specdec_mlx.models.anatomy import top_tokens
from specdec_mlx.models.loading import PerModel
from specdec_mlx.target import check_draft
from specdec_mlx.token_ids import read_all, to_ids

Tokens = tuple[int, ...]

Continuations = Sequence[tuple[int, float]]
"""Tokens that may follow a beam, with their log-probabilities; the likeliest of them."""


@dataclass(frozen=True)
class Beam:
    """A continuation of the prompt.

    Attributes:
        tokens: generated tokens.
        logprob: sum of their log-probabilities.
        is_finished: True after a stop token.
    """

    tokens: Tokens = ()
    logprob: float = 0.0
    is_finished: bool = False


def next_beams(
    beams: Sequence[Beam],
    continuations: Mapping[Tokens, Continuations],
    num_beams: int,
    stop_tokens: frozenset[int],
) -> list[Beam] | None:
    """Make a step of beam search, or return None if the known continuations do not decide it.

    Args:
        beams: the beams before the step. Finished beams compete unchanged.
        continuations: tokens of an open beam -> its `num_beams` likeliest continuations. A beam may
            be missing here. No continuation is likelier than its beam, so the beam is dropped if it
            is less likely than all chosen beams.
        num_beams: number of beams to keep.
        stop_tokens: tokens that finish a beam.
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
    # log p <= 0, so a continuation is at most as likely as its beam.
    if unknown and (len(best) < num_beams or best[-1].logprob <= max(unknown)):
        return None
    return best


@dataclass
class BeamDrafting:
    """A session of the drafter for each beam.

    Attributes:
        sessions: generated tokens that a session has observed -> the session.
    """

    drafter: Drafter
    prompt: Sequence[int]
    context: DraftContext
    stream: Any
    sessions: dict[Tokens, Session] = field(default_factory=dict)

    def follow(self, texts: Sequence[Tokens]) -> None:
        """Bring the sessions to these generated tokens, and drop all other sessions.

        If several beams continue one session, the last beam takes it, and the others get a copy or
        a new session.
        """
        # The session with the longest common beginning has the least to read.
        before, self.sessions = self.sessions, {}
        begun = [[known for known in before if text[: len(known)] == known] for text in texts]
        sources = [max(known, key=len, default=()) for known in begun]
        for i, (text, source) in enumerate(zip(texts, sources, strict=True)):
            session = before.get(source)
            # A later beam needs this session too.
            if source in sources[i + 1 :]:
                session = copy_of(session)
            if session is None:
                session = begin_session(self.drafter, [*self.prompt, *text], self.context)
            elif len(text) > len(source):
                session.observe(text[len(source) :])
            self.sessions[text] = session

    def continued(self, text: Tokens, limit: int) -> list[Tokens]:
        with mx.stream(self.stream):
            draft = proposing(self.sessions[text], "")(limit)
        check_draft(draft, self.context.vocab_size or 0)
        return [(*text, *path) for path in paths_of(draft, limit) or [()]]


def copy_of(session: Session | None) -> Session | None:
    """An independent copy of a draft model's session. None for other sessions.

    Caches that cannot be trimmed are not copied. The copy reads the text again.
    """
    if not isinstance(session, WritingSession) or not isinstance(session.source, ModelReader):
        return None
    if isinstance(session.source, GuessedSource):  # its guesser would be shared
        return None
    other, source = copy.copy(session), copy.copy(session.source)
    other.source, read = source, source.rollback
    other.chances = copy.deepcopy(session.chances)
    source.tokens = list(source.tokens)
    if can_trim_prompt_cache(read.caches):
        source.rollback = Rollback(copy.deepcopy(read.caches), read.position)
    else:
        source.rollback = Rollback.of(source.model)
    return other


def paths_of(draft: Draft, limit: int) -> list[Tokens]:
    texts = texts_of(draft)
    inner = {text[:-1] for text in texts}
    return list(dict.fromkeys(text[:limit] for text in texts if text not in inner))


_learned: PerModel[dict[int, DraftLength]] = PerModel(lambda model: {})


def guess_length_for(
    model: nn.Module, num_beams: int, choice: int | str | DraftLength
) -> DraftLength:
    """Number of steps to guess. "auto" learns for each model and `num_beams`. Raises ValueError."""
    if choice != "auto":
        return make_draft_length(choice)
    learned = _learned(model)
    if num_beams not in learned:
        learned[num_beams] = Auto(Tuning.for_model(model))
    return learned[num_beams]


@dataclass
class BeamRows:
    """The target with a row of a batch for each text.

    Attributes:
        num_top: number of continuations to return for each position.
        row_of: generated tokens -> the row that holds the prompt and all these tokens except the
            last.
    """

    model: nn.Module
    prompt: Sequence[int]
    num_top: int
    prefill_step_size: int = 2048
    stream: Any = generation_stream
    caches: BatchCaches = field(init=False)
    row_of: dict[Tokens, int] = field(default_factory=lambda: {(): 0})
    """The row that holds the prompt and these generated tokens but for the last of them."""

    def __post_init__(self) -> None:
        """Read the prompt except its last token. RowsError if the model cannot hold rows."""
        with mx.stream(self.stream):
            caches = Rollback(make_prompt_cache(self.model))
            rows = BatchCaches.like(caches.caches) if can_hold_rows(self.model) else None
            if rows is None:
                raise RowsError(
                    "Beams are rows of one batch, and this model's texts cannot be. Generate "
                    "one text, or use a model that specdec_mlx.batch_generate writes together."
                )
            end = len(self.prompt) - 1
            for start in range(0, end, self.prefill_step_size):
                part = self.prompt[start : min(end, start + self.prefill_step_size)]
                caches.forward(self.model, to_ids(part))
                wait_for(caches.caches)
            rows.add(caches.caches, end)
        self.caches = rows

    def verify(self, texts: Sequence[Tokens], num_known: int) -> dict[Tokens, Continuations]:
        """Make a pass over texts, each a beam of `num_known` tokens and a guess.

        Returns the likeliest continuations after the beam, and after each guessed token.
        """
        with mx.stream(self.stream):
            self.caches.keep([self.row_of[text[:num_known]] for text in texts])
            lengths = zip(texts, self.caches.lengths, strict=True)
            fed = [[*self.prompt, *text][length:] for text, length in lengths]
            logits = self.caches.feed(self.model, fed)
            places: dict[Tokens, tuple[int, int]] = {}
            for row, (text, tokens) in enumerate(zip(texts, fed, strict=True)):
                for n in range(num_known, len(text) + 1):
                    # Texts share beginnings. The first row that has a position serves for all.
                    places.setdefault(text[:n], (row, len(tokens) - 1 - len(text) + n))
            self.row_of = {text: row for text, (row, _) in places.items()}
            rows, columns = (mx.array(indices) for indices in zip(*places.values(), strict=True))
            tops = likeliest(logits[rows, columns], self.num_top)
        return dict(zip(places, tops, strict=True))

    def keep(self, texts: Sequence[Tokens]) -> None:
        """Drop from the caches all tokens that are not in these texts."""
        self.row_of = {text: self.row_of[text[:-1]] for text in texts}
        # The last token of each text has not been fed yet.
        end = len(self.prompt) + len(texts[0]) - 1
        with mx.stream(self.stream):
            self.caches.go_back([min(end, reached) for reached in self.caches.lengths])


def likeliest(logits: mx.array, num_top: int) -> list[Continuations]:
    """The `num_top` likeliest tokens of each row of logits [n, V], with log-probabilities.

    Raises LogitsError if a row is not finite.
    """
    logits = logits.astype(mx.float32)
    # log softmax: log p = logit - log sum exp(logits)
    scale = mx.logsumexp(logits, axis=-1, keepdims=True)
    logprobs = logits - scale
    top = top_tokens(logprobs, num_top)
    tokens, values, scales = read_all(top, mx.take_along_axis(logprobs, top, axis=-1), scale)
    if not np.isfinite(scales).all():
        raise LogitsError(
            "The target's logits are not finite. Check the weights and the dtype of the model."
        )
    return [
        # Ties go to the lower id, so that the order does not depend on the batch.
        sorted(zip(*row, strict=True), key=lambda pair: (-pair[1], pair[0]))
        for row in zip(tokens, values, strict=True)
    ]


@dataclass
class BeamSearch:
    """A beam search in progress. Without `drafting`, each step is a pass."""

    rows: BeamRows
    num_beams: int
    max_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    drafting: BeamDrafting | None = None
    length: DraftLength = field(default_factory=lambda: Fixed(0))
    beams: list[Beam] = field(default_factory=lambda: [Beam()])
    num_passes: int = 0
    num_steps: int = 0
    _read_at: float = field(default_factory=perf_counter)
    _num_rows: int = 0

    def run(self) -> list[Beam]:
        while (texts := self._open()) and self.num_steps < self.max_tokens:
            num_known = self.num_steps
            guesses = self._guesses(texts)
            # One pass may decide several steps.
            known = self.rows.verify(guesses, num_known)
            self.num_passes += 1
            while self._open() and self.num_steps < self.max_tokens:
                beams = next_beams(self.beams, known, self.num_beams, self.stop_tokens)
                if beams is None:
                    break
                self.beams = beams
                self.num_steps += 1
            self._record(guesses, num_known)
            if left := self._open():
                self.rows.keep(left)
        return self.beams

    def _open(self) -> list[Tokens]:
        return [beam.tokens for beam in self.beams if not beam.is_finished]

    def _guesses(self, texts: list[Tokens]) -> list[Tokens]:
        # Every pass gives one step without a draft.
        left = self.max_tokens - self.num_steps - 1
        if self.drafting is None or (limit := min(self.length.limit("", False), left)) == 0:
            return texts
        self.drafting.follow(texts)
        ways = (way for text in texts for way in self.drafting.continued(text, limit))
        return list(dict.fromkeys(ways))

    def _record(self, guesses: Sequence[Tokens], num_known: int) -> None:
        now, drafted = perf_counter(), max(map(len, guesses)) - num_known
        num_steps, steady = self.num_steps - num_known, self._num_rows == len(guesses)
        # The last step of a pass needs no guess. Time is comparable at an equal number of rows.
        right, seconds = min(num_steps - 1, drafted), now - self._read_at
        self.length.record(
            RoundRecord(drafted, right, num_steps, 1 + drafted, seconds=seconds, steady=steady)
        )
        self._read_at, self._num_rows = now, len(guesses)
