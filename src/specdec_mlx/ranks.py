"""One generation on several ranks of `mx.distributed`: all of them launch the same passes.

Decisions of a clock, a file, a memory or a seed may differ between ranks. So only rank 0 drafts,
and one small collective in each round carries its draft and the state of every rank. A rank that
fails or leaves announces this at the next meeting, where all ranks end. Rank 0's caller decides how
far the text goes: the other ranks yield the tokens that it has taken.
"""

from __future__ import annotations

import math
import sys
import zlib
from array import array
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NamedTuple

import mlx.core as mx

from specdec_mlx.caches import mark_unusable, wait_for
from specdec_mlx.contracts import (
    NO_DRAFT,
    Draft,
    DraftContext,
    Drafter,
    all_drafters,
)
from specdec_mlx.draft_length.drafting import Drafting
from specdec_mlx.draft_length.value import DraftLength, Fixed
from specdec_mlx.errors import DraftError, RankError
from specdec_mlx.exactness.feature_feed import FeatureFeed
from specdec_mlx.models.anatomy import group_of
from specdec_mlx.sampling import Noise
from specdec_mlx.target import check_draft
from specdec_mlx.token_ids import to_list

MOST_TOKENS = 64  # longest draft of a generation on several ranks; its message has room for them


class State(IntEnum):
    GOES_ON = 0
    LEAVES = 1
    FAILED = 2


class RankMessage(NamedTuple):
    """One rank's message at a meeting.

    Attributes:
        state: a `State`.
        end: length of the prompt and the tokens that this rank's caller has.
        checksum: of the rank's text.
        is_drawn: rank 0's draft was drawn at random.
        part: number, from 1, of the part that draws on every rank and has drawn this draft. 0 if
            the distribution is sent instead.
        tokens, parents: of rank 0's draft.
    """

    state: int
    end: int
    checksum: int
    is_drawn: int = 0
    part: int = 0
    tokens: Sequence[int] = ()
    parents: Sequence[int] | None = None

    def numbers(self) -> list[int]:
        # A collective needs the same shape on all ranks, so that the lists are padded.
        *head, tokens, _ = self
        parents = [parent + 1 for parent in self.parents or ()]
        lists = [[*part, *[0] * (MOST_TOKENS - len(part))] for part in (tokens, parents)]
        return [*head, len(tokens), len(parents), *lists[0], *lists[1]]

    @classmethod
    def read(cls, numbers: Sequence[int]) -> RankMessage:
        state, end, checksum, is_drawn, part, num_tokens, num_parents, *both = numbers
        parents = [parent - 1 for parent in both[MOST_TOKENS:][:num_parents]]
        return cls(state, end, checksum, is_drawn, part, both[:num_tokens], parents or None)


WORD = 32  # bits of a number that is sent


@dataclass
class Ranks:
    """The ranks of one generation. All collectives run on `stream`, and so in one order."""

    group: mx.distributed.Group
    stream: Any

    @property
    def is_first(self) -> bool:
        return self.group.rank() == 0

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Numbers [n] below 2^32 of every rank, in the order of ranks. n is equal on all ranks."""
        with mx.stream(self.stream):
            sent = mx.array(list(numbers), mx.uint32)[None]
            gathered: list[list[int]] = mx.distributed.all_gather(sent, group=self.group).tolist()  # type: ignore[assignment]
        return gathered

    def from_first(self, numbers: mx.array | None, shape: Sequence[int]) -> mx.array:
        """Rank 0's numbers on every rank, lazily. The other ranks pass None."""
        with mx.stream(self.stream):
            sent = mx.zeros(shape) if numbers is None else numbers.astype(mx.float32)
            received = mx.distributed.all_sum(sent, group=self.group)
            mx.async_eval(received)
        return received

    def share_noise(self, noise: Noise) -> Noise:
        words = noise.seed % (1 << WORD), (noise.seed >> WORD) % (1 << WORD)
        low, high, is_given = self.gather([*words, noise.is_given])[0]
        return Noise(high << WORD | low, is_given=bool(is_given))


def check_drafts_alone(drafter: Drafter | None) -> None:
    """Raise DraftError for a drafter that rank 0 cannot run while the other ranks wait."""
    for part in all_drafters(drafter):
        name = part.class_name
        if any(group_of(model) is not None for model in part.models()):
            raise DraftError(
                f"{name} drafts with layers that are spread over the ranks, as the target's are, "
                "and ranks draft one by one. Use a draft model that is whole on each."
            )
        if part.features is not None and part.features.caches:
            raise DraftError(
                f"{name} reads the target's keys and values, of which each rank has a part. Use a "
                "draft model, or a head that reads states."
            )


class SharedDrafting(Drafting):
    """Drafting on rank 0 for all ranks. The other ranks have no policy and no session.

    A part with `on_every_rank` has a session on every rank. There the other ranks repeat rank 0's
    draws with the same noise.

    Attributes:
        is_under_way: the ranks are to meet again.
        is_over: a rank has left or failed.
        failure: exception to raise on this rank.
        is_alike: all ranks have the same text.
        is_lost: the other ranks cannot be reached.
        first_end: length of the prompt and the tokens that rank 0's caller has.
    """

    is_shared = True

    def __init__(
        self,
        ranks: Ranks,
        drafter: Drafter | None,
        length: DraftLength,
        *others: Any,
        **options: Any,
    ) -> None:
        super().__init__(drafter, length if ranks.is_first else Fixed(0), *others, **options)
        self.ranks = ranks
        self.is_under_way = True  # the first thing that all ranks do is to meet
        self.is_over = False
        self.failure: Exception | None = None
        self.is_alike = False
        self.is_lost = False
        self.first_end = 0
        self._num_met = 0  # tokens of the text at the latest meeting
        self._everywhere = [part.key for part in all_drafters(drafter) if part.on_every_rank]

    def begin(self, context: DraftContext) -> None:
        """Begin the session on rank 0 or everywhere, and check that every rank could."""
        check_drafts_alone(self.drafter)
        if self.ranks.is_first or self._everywhere:
            super().begin(context)
        else:
            self.features = FeatureFeed.of_nobody(self.drafter, self.target)
        if self.features is not None:
            self.features.at_once = True
        self._meet(State.GOES_ON)
        if self.failure is not None:
            raise self.failure

    def may_fork(self) -> bool:
        """False. Probing for trees needs passes on every rank, and only rank 0 gets here."""
        return False

    def propose(self) -> Draft:
        """Rank 0's draft, on every rank. An empty draft if the ranks end."""
        # This may run passes, in which every rank must take part.
        self.target.measure_width()
        draft = NO_DRAFT
        if self.ranks.is_first:
            draft = super().propose()
            check_draft(draft, self.target.vocab_size)
            draft = draft.head(MOST_TOKENS)
        state = State.GOES_ON if self.sequence.wants_more() else State.LEAVES
        first = self._meet(State.FAILED if self.failure else state, draft)
        if self.failure is not None:
            raise self.failure
        if self.is_over:
            return NO_DRAFT
        if not first.tokens:
            self.target.rollback.drop_checkpoints()
        return self._received(first, draft)

    def _meet(self, state: State, draft: Draft = NO_DRAFT) -> RankMessage:
        """Exchange states and rank 0's draft. Returns rank 0's message."""
        is_drawn, part = draft.logprobs is not None, 0
        if is_drawn and draft.parents is None and self.part in self._everywhere:
            part = 1 + self._everywhere.index(self.part)
        sequence = self.sequence
        # Texts could differ if ranks were called with other arguments, or by a fault. The checksum
        # covers the tokens since the last meeting.
        known = [sequence.max_tokens % (1 << WORD), self.drafter is not None]
        known += sequence.tokens[self._num_met :]
        checksum, self._num_met = (zlib.crc32(array("I", known).tobytes()), len(sequence.tokens))
        about = is_drawn, part, to_list(draft.tokens), draft.parents
        message = RankMessage(state, sequence.end, checksum, *about)
        try:
            gathered = self.ranks.gather(message.numbers())
        except RuntimeError:
            self.is_lost = True
            raise
        messages = [RankMessage.read(numbers) for numbers in gathered]
        self.is_under_way = False
        self.is_alike = len({one.checksum for one in messages}) == 1
        failed = [rank for rank, one in enumerate(messages) if one.state == State.FAILED]
        if failed and self.failure is None:
            self.failure = RankError(
                f"Rank {failed[0]} failed, and all ranks end with it; its own error says why."
            )
        elif not failed and not self.is_alike:
            self.failure = RankError(
                "The ranks' texts differ. Call all of them with the same arguments, samplers and "
                "processors; if they were, their hardware computes different numbers."
            )
        self.first_end = messages[0].end
        self.is_over = self.failure is not None or any(one.state for one in messages)
        if self.is_over:
            sequence.max_tokens = sequence.num_generated
            sequence.num_handed_out = self.first_end - sequence.prompt_length
        return messages[0]

    def _received(self, first: RankMessage, local: Draft) -> Draft:
        logprobs = local.logprobs
        if not self.ranks.is_first and first.part:
            logprobs = self._drawn_anew(first)
        elif first.is_drawn and not first.part:
            shape = len(first.tokens), self.target.vocab_size
            logprobs = self.ranks.from_first(local.logprobs, shape)
        return replace(local, tokens=first.tokens, logprobs=logprobs, parents=first.parents)

    def _drawn_anew(self, first: RankMessage) -> mx.array:
        """The distribution [K, V] of rank 0's draft, repeated by this rank's own session."""
        # If this fails, the rank must still run the pass that the other ranks run, and raise
        # afterwards: a missing rank would leave them waiting. Any distribution serves for that
        # pass.
        num_tokens = len(first.tokens)
        try:
            if first.part > len(self._everywhere):
                raise RankError(
                    "Rank 0 drafts with another drafter than this rank. Call all ranks of a "
                    "sharded model with the same arguments."
                )
            assert self.selection is not None, "a part that drafts everywhere has a session here"
            key = self._everywhere[first.part - 1]
            part = next(p for group in self.selection.groups for p in group if p.key == key)
            draft = self.selection.ask(part, num_tokens)
            if len(draft) != num_tokens or draft.logprobs is None:
                raise DraftError(f"{key} drew {len(draft)} tokens here, {num_tokens} on rank 0.")
            return draft.logprobs
        except Exception as error:
            self.failure = error
            vocab_size = self.target.vocab_size
            return mx.full((num_tokens, vocab_size), -math.log(vocab_size))

    def as_on_first(self, tokens: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """Yield the tokens that rank 0's caller has taken. Other ranks are one round late."""
        if self.ranks.is_first:
            yield from tokens
            return
        waiting: deque[Any] = deque()
        is_open, failure, num_given = True, None, 0
        with closing(tokens):
            while is_open:
                try:
                    waiting.append(next(tokens))
                except StopIteration:
                    is_open = False
                except Exception as error:
                    is_open, failure = False, error
                while waiting and self.sequence.prompt_length + num_given < self.first_end:
                    num_given += 1
                    yield waiting.popleft()
        if failure is not None:
            raise failure

    def agree_on_end(self) -> bool:
        """True if all ranks end with the same text, and can put caches in order.

        Otherwise the caches are refused from now on.
        """
        error = sys.exception()
        in_pass = self._num_met == len(self.sequence.tokens)
        # MLX raises plain RuntimeErrors. After one of them in a pass, a collective would wait
        # forever.
        self.is_lost |= in_pass and type(error) is RuntimeError
        try:
            if self.is_under_way and not self.is_lost:
                is_failure = error is not None and not isinstance(error, GeneratorExit)
                self._meet(State.FAILED if is_failure else State.LEAVES)
        finally:
            self.is_alike = self.is_alike and self.is_over
            if not self.is_alike:
                reason = f"a generation on several ranks failed ({error!r})."
                mark_unusable(self.target.rollback.caches, reason)
        return self.is_alike

    def close(self, end: int) -> None:
        super().close(end)
        # The caller may use collectives of its own next, and passes that still run would mix with
        # them.
        if self.keeps_cache and self.is_alike:
            wait_for(self.target.rollback.caches)
