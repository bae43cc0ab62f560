"""Texts to write: which of them wait, are read, are written, and leave."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import mlx.core as mx

from specdec_mlx.caches import Rollback, states_of
from specdec_mlx.contracts import AcceptanceRule, Drafter, DrafterStates, LogitsProcessor, Outcome
from specdec_mlx.draft_length.value import DraftLength
from specdec_mlx.loop import Generation, Round, Token, tokens_of
from specdec_mlx.sampling import Sampler, Sampling
from specdec_mlx.sequence import PromptReader
from specdec_mlx.stats.account import SpeculationStats
from specdec_mlx.target import Verifier

MOST_AT_ONCE = 8  # prompts that are read at the same time, as in mlx-lm's batches


@dataclass(frozen=True)
class OwnDrafting:
    """Drafter, rule and draft length of one text. A length of None is the batch's."""

    drafter: Drafter | None
    rule: str | AcceptanceRule = "auto"
    num_draft_tokens: int | str | DraftLength | None = None


@dataclass
class Request:
    """One text to write.

    Attributes:
        prompt: [n] token ids.
        max_tokens: most tokens of the text.
        prompt_cache: caches of the tokens before the prompt or, with `num_read`, of exactly the
            first `num_read` tokens of the prompt. Shared between requests, and never changed.
        num_read: tokens of the prompt in these caches.
        num_said: tokens at the end of the prompt that are the beginning of the text, generated
            elsewhere. They count among max_tokens.
        drafter_states: where drafters keep their states of the conversation, or None.
        drafting: the text's own drafting. None for the batch's.
        is_end: called with each token that joins the text. True ends the text there.
        stats: an account to continue.
        sampler, seed, logits_processors, prefill_stops, prompt_progress_callback: as in `Options`.
    """

    prompt: Sequence[int] | mx.array
    max_tokens: int = 128
    sampler: Sampler | Sampling | None = None
    seed: int | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    prompt_cache: list[Any] | None = None
    num_read: int = 0
    num_said: int = 0
    drafter_states: DrafterStates | None = None
    drafting: OwnDrafting | None = None
    is_end: Callable[[Token], bool] | None = None
    stats: SpeculationStats | None = None
    prefill_stops: Sequence[int] = ()
    prompt_progress_callback: Callable[[int, int], None] | None = None

    @property
    def is_read(self) -> bool:
        """True if the caches hold the prompt except for its last token, which a round feeds."""
        return self.num_read >= len(self.prompt) - 1

    def waits_for(self, other: Request) -> bool:
        """True if the other request reads the same prompt after the same tokens."""
        if self.is_read or not isinstance(self.prompt, list) or self.prompt != other.prompt:
            return False
        alone = [one.prompt_cache is None or one.num_read > 0 for one in (self, other)]
        return all(alone) or self.prompt_cache is other.prompt_cache


class BatchToken(NamedTuple):
    """One emitted token of one text.

    Attributes:
        uid: of the text.
        token: the token.
        finish_reason: "stop", "length" or None.
        prompt_cache: caches of a text that has ended, on request. They hold the first `num_cached`
            tokens of the prompt and the text.
        num_cached: see there.
    """

    uid: int
    token: Token
    finish_reason: str | None
    prompt_cache: list[Any] | None = None
    num_cached: int = 0


@dataclass(eq=False)
class BatchText:
    """A text that is read or written. `finish_reason` may also be "removed"."""

    uid: int
    request: Request
    generation: Generation
    verifier: Verifier
    finish_reason: str | None = None
    prompt_cache: list[Any] | None = None
    num_cached: int = 0

    @property
    def reader(self) -> PromptReader:
        return self.generation.reader

    @property
    def is_new(self) -> bool:
        """True if nothing of its prompt is read, and nobody needs to see it read in steps."""
        reader, features = self.reader, self.generation.drafting.features
        is_open = self.finish_reason is None and reader.num_left > 0
        return is_open and reader.num_read == 0 and features is None and not reader.stops

    def may_run_ahead(self, round_: Round) -> bool:
        generation = self.generation
        # The first token is known before a drafter is asked for the first time.
        waits = generation.drafting.session is not None and generation.sequence.num_generated == 0
        return not round_.num_drafted and not waits and generation.sequence.wants_more(besides=1)

    def keep_caches(self, alone: Rollback, *, complete: bool) -> None:
        """Keep these caches for the text's last token. `complete` feeds the tokens they lack."""
        self.verifier.rollback = alone
        while complete and (left := len(self.generation.sequence.tokens) - alone.position) > 0:
            self.generation.feed(left)
        # MLX computes an array only in the thread that made it, and a server reads these in others.
        mx.async_eval(states_of(alone.caches))
        self.prompt_cache, self.num_cached = alone.caches, alone.position

    def cut_at(self, stop_tokens: frozenset[int], round_: Round, outcome: Outcome) -> None:
        """End the text at the first stop token of a round, or at its last wanted token."""
        sequence, is_end = self.generation.sequence, self.request.is_end
        if not sequence.wants_more():
            self.finish_reason = "length"
        tokens = tokens_of(round_, outcome, self.generation.stats)
        for i, token in enumerate(tokens, start=1):
            if (is_end is not None and is_end(token)) or token.token in stop_tokens:
                self.finish_reason = "stop"
                num_after = len(outcome.tokens) - i
                # The loop stops by max_tokens, so that a lower limit ends the text here.
                sequence.max_tokens = sequence.num_generated - num_after
                del sequence.tokens[len(sequence.tokens) - num_after :]
                outcome.tokens = outcome.tokens[:i]
                return


Rounds = list[tuple[BatchText, Round]]  # a pass under way, text by text


@dataclass
class Schedule:
    """Waiting, reading, writing and leaving texts. Each text is in one of these lists.

    Attributes:
        max_texts: most texts that are read or written at a time.
        waiting: uids and requests.
        reading: texts whose prompts are read.
        writing: texts with rows in the passes.
        leaving: texts whose last tokens are being emitted.
    """

    max_texts: int = 32
    waiting: list[tuple[int, Request]] = field(default_factory=list)
    reading: list[BatchText] = field(default_factory=list)
    writing: list[BatchText] = field(default_factory=list)
    leaving: list[BatchText] = field(default_factory=list)
    num_inserted: int = 0

    def insert(self, request: Request) -> int:
        self.waiting.append((self.num_inserted, request))
        self.num_inserted += 1
        return self.num_inserted - 1

    def remove(self, uid: int) -> None:
        """Take a text out. Its tokens end with the round that is under way."""
        self.waiting = [waiting for waiting in self.waiting if waiting[0] != uid]
        for text in (*self.reading, *self.writing, *self.leaving):
            if text.uid == uid:
                text.finish_reason = "removed"

    def clear(self) -> list[BatchText]:
        """After a failure, forget the written texts and queue the read ones again.

        Returns both.
        """
        texts = [*self.writing, *self.reading]
        unread = [(text.uid, text.request) for text in self.reading if text.finish_reason is None]
        self.waiting = unread + self.waiting
        self.writing, self.reading = [], []
        return texts

    @property
    def num_open(self) -> int:
        return len(self.writing) + len(self.reading) + len(self.waiting)

    @property
    def has_place(self) -> bool:
        return len(self.writing) + len(self.reading) < self.max_texts

    @property
    def may_join(self) -> bool:
        return bool(self.reading) or (bool(self.waiting) and self.has_place)

    def may_run_ahead(self, current: Rounds) -> bool:
        """True if no text joins, and the next token of every text may be fed unknown."""
        return not self.may_join and all(text.may_run_ahead(round_) for text, round_ in current)

    def take(self) -> tuple[int, Request] | None:
        """The next text to read, if there is a slot and nobody else is reading its prompt."""
        if self.has_place and len(self.reading) < MOST_AT_ONCE:
            for i, (_, request) in enumerate(self.waiting):
                if not any(request.waits_for(text.request) for text in self.reading):
                    return self.waiting.pop(i)
        return None

    def to_read(self) -> Iterator[BatchText]:
        # One step of each text, or in all about one step while other texts are written, so that
        # those do not stall.
        is_beside, num_read, seen = bool(self.writing), 0, set[int]()
        while texts := [text for text in self.reading if text.uid not in seen]:
            reader = texts[0].reader
            seen.add(texts[0].uid)
            if not reader.num_left or not is_beside or num_read < reader.step_size:
                before = reader.num_read
                yield texts[0]
                num_read += reader.num_read - before

    def to_read_together(self, slope: float) -> list[BatchText]:
        """New, short texts for one padded pass, if this costs less than a pass for each.

        slope: cost of one more position, in plain passes.
        """
        texts, sizes = self.reading, [text.reader.num_left for text in self.reading]
        if self.writing or len(texts) < 2 or not all(text.is_new for text in texts):
            return []
        padded = max(sizes) * len(texts) - sum(sizes)
        is_short = max(sizes) < texts[0].reader.step_size
        waits = any(one.waits_for(text.request) for _, one in self.waiting for text in texts)
        # n - 1 passes are saved, each of which costs a plain pass even if it is short. Padding
        # costs `slope` for each position.
        return texts if is_short and not waits and padded * slope <= len(texts) - 1 else []

    def join(self, texts: Sequence[BatchText]) -> None:
        self.reading = [text for text in self.reading if text not in texts]
        self.writing += texts
        for text in texts:  # it has its own caches now; release the request's
            text.request = replace(text.request, prompt_cache=None)

    def share(self, text: BatchText) -> None:
        """Give the caches of a prompt to the requests that wait for it."""
        reader = text.reader
        for i, (uid, request) in enumerate(self.waiting):
            if request.waits_for(text.request):
                # the copies share their buffers until one is written to
                caches = copy.deepcopy(reader.caches.caches)
                read = replace(request, prompt_cache=caches, num_read=reader.num_read)
                self.waiting[i] = uid, read

    def move_ended(self) -> None:
        """Move the texts that have ended from `writing` to `leaving`."""
        self.leaving = [text for text in self.writing if text.finish_reason is not None]
        self.writing = [text for text in self.writing if text.finish_reason is None]
