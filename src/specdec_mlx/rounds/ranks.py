"""One generation on several ranks of `mx.distributed`: all of them launch the same passes.

What the target computes is equal on all ranks. Whatever a clock, a file, a memory or a random seed
decides is not: drafts and their lengths, the seed, and when the caller has had enough. So rank 0
alone drafts, and once a round the ranks meet: one small collective carries its draft, and from
each rank whether it goes on. Between two meetings all do the same, a pass; whoever fails or leaves
says so at the next one, and then all end there.

Rank 0's caller counts: the others hand out what it has taken, and caches end where it ended.
"""

from __future__ import annotations

import math
import sys
import zlib
from array import array
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.draft_length.policy import DraftLength, Fixed
from specdec_mlx.errors import DraftError, RankError
from specdec_mlx.rounds.clock import Round, RoundClock
from specdec_mlx.rounds.drafting import Drafting
from specdec_mlx.rounds.features import FeatureFeed
from specdec_mlx.rounds.meeting import MOST_TOKENS, Said, State
from specdec_mlx.rounds.sequence import SequenceState
from specdec_mlx.sampling.noise import Noise
from specdec_mlx.stats.account import SpeculationStats
from specdec_mlx.target.inputs import check_draft, noise_of
from specdec_mlx.target.ranks import group_of
from specdec_mlx.target.rollback import refuse
from specdec_mlx.token_ids import to_list
from specdec_mlx.types import (
    NO_DRAFT,
    Draft,
    DraftContext,
    Drafter,
    DraftsOnEveryRank,
    Outcome,
    ReadsTarget,
    RunsModel,
    Target,
    all_drafters,
    key_of,
)

WORD = 32
"""Bits of a number that is sent."""

T_co = TypeVar("T_co", covariant=True)


class Ranks:
    """The ranks that one generation runs on, and what they send each other.

    What is sent runs on the stream of the target's own collectives, in one order on all ranks.

    Args:
        group: of `mx.distributed`.
        stream: MLX's stream that the passes run on.
    """

    def __init__(self, group: mx.distributed.Group, stream: Any) -> None:
        """Nothing is sent yet."""
        self.group = group
        self.stream = stream
        self.is_first = group.rank() == 0

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Numbers [n] below 2^32 of every rank, in the order of ranks; n is the same on all."""
        with mx.stream(self.stream):
            own = mx.array(list(numbers), mx.uint32)[None]
            gathered: list[list[int]] = mx.distributed.all_gather(own, group=self.group).tolist()  # type: ignore[assignment]
        return gathered

    def from_first(self, own: mx.array | None, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        """Rank 0's array on every rank, where others have None; under way at once."""
        with mx.stream(self.stream):
            sent = mx.zeros(shape, dtype) if own is None else own.astype(dtype)
            received = mx.distributed.all_sum(sent, group=self.group)
            mx.async_eval(received)
        return received


def ranks_of(model: nn.Module, stream: Any) -> Ranks | None:
    """The ranks that a model is spread over; None for a model that is whole on each."""
    group = group_of(model)
    return None if group is None else Ranks(group, stream)


def shared_noise(
    ranks: Ranks | None, seed: int | None, prompt: Sequence[int], max_tokens: int, drafts: bool
) -> Noise:
    """The noise of a generation: rank 0's seed, once all ranks are seen to begin the same.

    Args:
        ranks: None for one machine.
        seed: the caller's; None takes one from MLX's global random state.
        prompt: [n] token ids.
        max_tokens: tokens to emit.
        drafts: whether there is a drafter.

    Raises:
        RankError: the ranks were called with different prompts or numbers; on all of them.
    """
    noise = noise_of(seed)
    if ranks is None:
        return noise
    low, high = noise.seed % (1 << WORD), (noise.seed >> WORD) % (1 << WORD)
    begins = [_checksum(prompt, 0), len(prompt), max_tokens % (1 << WORD), int(drafts)]
    gathered = ranks.gather([*begins, low, high])
    for rank, (*others, _, _) in enumerate(gathered):
        if others != gathered[0][:-2]:
            raise RankError(
                f"Rank {rank} was called with another prompt, max_tokens or drafter than rank 0. "
                "Call all ranks of a sharded model with the same arguments."
            )
    low, high = gathered[0][-2:]
    return Noise(high << WORD | low)


def check_drafts_alone(drafter: Drafter | None) -> None:
    """Raise DraftError for a drafter that one rank cannot ask while the others wait."""
    for part in all_drafters(drafter):
        name = type(part).__name__
        if isinstance(part, RunsModel) and group_of(part.model) is not None:
            raise DraftError(
                f"{name} drafts with layers that are spread over the ranks, as the target's are, "
                "and ranks draft one by one. Use a draft model that is whole on each."
            )
        if isinstance(part, ReadsTarget) and part.features.caches:
            raise DraftError(
                f"{name} reads the target's keys and values, of which each rank has a part. Use a "
                "draft model, or a head that reads states."
            )


class SharedDrafting(Drafting):
    """Drafting on rank 0, for all ranks; the others have no policy of their own, and no session.

    A part that drafts on every rank has one on each. There rank 0 says how many tokens it has
    drawn, and the others draw them anew for their distribution: all draw with the same noise.

    is_over: whether some rank was seen to leave or to fail; all end then. failure: what to raise
    here for another rank's failure, or for this one's since the last meeting. meets_next: whether
    the next thing that all ranks do is to meet. leaves: whether this rank's caller has left.
    first_end: prompt + tokens that rank 0's caller has. is_apart: whether the ranks' texts differ.
    is_lost: whether they cannot be reached.
    """

    def __init__(
        self,
        ranks: Ranks,
        drafter: Drafter | None,
        length: DraftLength,
        target: Target,
        sequence: SequenceState,
        *,
        keeps_cache: bool,
        stream: Any,
    ) -> None:
        """Nothing has begun; the first thing that all ranks do is to meet."""
        length = length if ranks.is_first else Fixed(0)
        super().__init__(drafter, length, target, sequence, keeps_cache=keeps_cache, stream=stream)
        self.ranks = ranks
        self.is_over = False
        self.failure: Exception | None = None
        self.meets_next = True
        self.leaves = False
        self.is_apart = False
        self.is_lost = False
        self.first_end = 0
        self._checksum = 0
        self._num_summed = 0
        self._everywhere = [
            key_of(part)
            for part in all_drafters(drafter)
            if isinstance(part, DraftsOnEveryRank) and part.on_every_rank
        ]

    def begin(self, context: DraftContext) -> None:
        """Begin the session on rank 0 or everywhere, and see that it could be."""
        check_drafts_alone(self.drafter)
        if self.ranks.is_first or self._everywhere:
            super().begin(context)
        else:
            self.features = FeatureFeed.of_nobody(self.drafter, self.target)
        if self.features is not None:
            self.features.at_once = True
        self.meet(State.GOES_ON)
        if self.failure is not None:
            raise self.failure

    def _may_fork(self) -> bool:
        """No: to find out takes passes of all ranks, and rank 0 alone would ask."""
        return False

    def propose(self) -> Draft:
        """Rank 0's draft, on every rank; an empty one where all end."""
        self.target.widest_pass()  # may measure, with passes; so on all ranks
        draft = NO_DRAFT
        leaves = self.leaves
        if self.ranks.is_first:
            leaves = leaves or not self.sequence.wants_more()
            draft = NO_DRAFT if leaves else super().propose()
            check_draft(draft, self.target.vocab_size())
        tokens = to_list(draft.tokens)
        state = State.FAILED if self.failure else State.LEAVES if leaves else State.GOES_ON
        first = self.meet(state, draft, tokens)
        return NO_DRAFT if self.is_over else self._received(first, draft, tokens)

    def meet(self, state: State, draft: Draft = NO_DRAFT, tokens: Sequence[int] = ()) -> Said:
        """Tell the other ranks how this one goes on, and note what they say.

        Args:
            state: of this rank.
            draft: rank 0's.
            tokens: [K] its tokens on the host.

        Returns:
            What rank 0 said.
        """
        flags = draft.logprobs is not None, draft.parents is not None
        part = 0
        if flags == (True, False) and self.part in self._everywhere:
            part = 1 + self._everywhere.index(self.part)
        said = Said(state, self.sequence.end, self._sum(), len(tokens), *flags, part, tokens)
        with self.noting_loss():
            gathered = self.ranks.gather(said.numbers())
        all_said = [Said.read(numbers) for numbers in gathered]
        self.meets_next = False
        self.is_apart = len({one.checksum for one in all_said}) > 1
        failed = [rank for rank, one in enumerate(all_said) if one.state is State.FAILED]
        if failed and self.failure is None:
            self.failure = RankError(
                f"Rank {failed[0]} failed, and all ranks end with it; its own error says why."
            )
        elif self.is_apart and not failed:
            self.failure = RankError(
                "The ranks' texts differ. Call all of them with the same arguments, samplers and "
                "processors; if they were, their hardware computes different numbers."
            )
        self.is_over = self.failure is not None or any(one.state for one in all_said)
        self.first_end = all_said[0].end
        return all_said[0]

    @contextmanager
    def noting_loss(self) -> Iterator[None]:
        """Note if the backend fails in this block: whoever sends something then waits forever.

        MLX's own errors are plain RuntimeErrors.
        """
        try:
            yield
        except RuntimeError as error:
            self.is_lost = type(error) is RuntimeError
            raise

    def _sum(self) -> int:
        """Checksum of the text as far as it is known."""
        new = self.sequence.tokens[self._num_summed :]
        self._checksum = _checksum(new, self._checksum)
        self._num_summed += len(new)
        return self._checksum

    def _received(self, first: Said, own: Draft, tokens: Sequence[int]) -> Draft:
        """The draft that rank 0 spoke of, the same on every rank.

        Where nobody asked for drafts on every rank a distribution is sent, since that is less than
        a draft model's weights, which would have to be read once more, one rank after the other.
        """
        num_tokens, ids = first.num_tokens, list(first.tokens)
        is_first = self.ranks.is_first
        if num_tokens > MOST_TOKENS:
            sent = mx.array(list(tokens), mx.uint32) if is_first else None
            ids = to_list(self.ranks.from_first(sent, (num_tokens,), mx.uint32))
        parents = None
        if first.is_tree:
            sent = mx.array(list(own.parents or ()), mx.int32) if is_first else None
            parents = to_list(self.ranks.from_first(sent, (num_tokens,), mx.int32))
        logprobs = None
        if first.part:
            logprobs = own.logprobs if is_first else self._drawn_anew(first)
        elif first.is_drawn:
            shape = num_tokens, self.target.vocab_size()
            logprobs = self.ranks.from_first(own.logprobs, shape, mx.float32)
        if is_first:
            return replace(own, tokens=ids)
        return Draft(ids, logprobs, parents=parents)

    def _drawn_anew(self, first: Said) -> mx.array:
        """The distribution [K, V] of a draft that rank 0 has drawn, from this rank's own session.

        Where that fails, this rank stays with the others for one more pass, and says so then.
        """
        num_tokens = first.num_tokens
        try:
            if first.part > len(self._everywhere):
                raise RankError(
                    "Rank 0 drafts with another drafter than this rank. Call all ranks of a "
                    "sharded model with the same arguments."
                )
            key = self._everywhere[first.part - 1]
            part = next(p for group in self._groups for p in group if p.key == key)
            draft = self._ask(part, num_tokens)
            if len(draft) != num_tokens or draft.logprobs is None:
                raise DraftError(f"{key} drew {len(draft)} tokens here, {num_tokens} on rank 0.")
            return draft.logprobs
        except Exception as error:
            self.failure = error
            vocab_size = self.target.vocab_size()
            return mx.full((num_tokens, vocab_size), -math.log(vocab_size))


class Rounds(Protocol[T_co]):
    """The steps of a generation, as `loop.Generation` has them."""

    sequence: SequenceState
    stats: SpeculationStats
    clock: RoundClock
    is_prefilled: bool
    failure: Exception | None

    @property
    def target(self) -> Target:
        """The model and its caches."""
        ...

    def prefill(self) -> None:
        """Feed the prompt but for its last token."""
        ...

    def propose(self) -> Draft:
        """A draft for the text so far."""
        ...

    def verify(self, draft: Draft) -> Round | None:
        """Start a pass; None when enough is known."""
        ...

    def accept(self, current: Round, ahead: Round | None) -> Outcome:
        """Wait for a pass, and take its verdict."""
        ...

    def roll_back(self, current: Round, outcome: Outcome) -> None:
        """Take the rejected positions back."""
        ...

    def observe(self, current: Round, outcome: Outcome) -> None:
        """Tell the drafter."""
        ...

    def emit(self, current: Round, outcome: Outcome, following: Round | None) -> Iterator[T_co]:
        """Hand out the tokens of a round."""
        ...

    def finish(self) -> None:
        """Bring the caches to prompt + tokens handed out."""
        ...


def run_on_ranks(
    generation: Rounds[T_co], drafting: SharedDrafting, context: DraftContext
) -> Generator[T_co, None, None]:
    """The loop's algorithm, with a meeting in each round.

    Rank 0 hands out a round's tokens before the meeting, so that all know how many its caller took
    before the next pass is under way. The others hand out theirs behind it.
    """
    is_first = drafting.ranks.is_first
    try:
        drafting.begin(context)
        generation.prefill()
        current = generation.verify(NO_DRAFT)
        drafting.meets_next = True
        while current is not None:
            with drafting.noting_loss():
                outcome = generation.accept(current, None)
            generation.roll_back(current, outcome)
            try:
                generation.observe(current, outcome)
            except Exception as error:  # of the drafter; what was accepted is emitted first
                generation.failure = error
            if is_first:
                yield from _emit(generation, current, outcome)
            following = _launch_next(generation, drafting)
            if not is_first and not drafting.leaves:
                outcome.tokens = outcome.tokens[: drafting.first_end - generation.sequence.end]
                try:
                    yield from _emit(generation, current, outcome)
                except GeneratorExit:  # the others learn of it when they meet again
                    drafting.leaves = True
            current = following
        if is_first and drafting.failure is not None:
            raise drafting.failure
    finally:
        _finish(generation, drafting)


def _launch_next(generation: Rounds[T_co], drafting: SharedDrafting) -> Round | None:
    """Meet, and launch the pass that all agreed on; None where all end."""
    draft = generation.propose()
    if drafting.is_over:
        if not drafting.ranks.is_first:
            generation.failure = drafting.failure
        return None
    if not len(draft):
        generation.target.rollback.drop_checkpoints()
    following = generation.verify(draft)
    drafting.meets_next = True
    return following


def _emit(generation: Rounds[T_co], current: Round, outcome: Outcome) -> Iterator[T_co]:
    """Hand out a round's tokens; getting its pass under way is counted with the round itself."""
    generation.stats.other_seconds -= current.host_seconds
    yield from generation.emit(current, outcome, None)


def _finish(generation: Rounds[T_co], drafting: SharedDrafting) -> None:
    """End as the others do; where they do not, leave the caches, and have them refused."""
    error = sys.exception()
    is_failure = error is not None and not isinstance(error, GeneratorExit)
    try:
        if drafting.meets_next and not drafting.is_lost:
            drafting.meet(State.FAILED if is_failure else State.LEAVES)
    finally:
        is_alike = drafting.is_over and not drafting.is_apart
        if not is_alike:  # to bring the caches in order would take all ranks
            reason = f"a generation on several ranks failed ({error!r})."
            refuse(generation.target.rollback.caches, reason)
    if not is_alike:
        return
    generation.sequence.num_handed_out = drafting.first_end - generation.sequence.prompt_length
    generation.finish()
    if drafting.keeps_cache:  # no pass may be under way when the caller sends something
        mx.eval([cache.state for cache in generation.target.rollback.caches])


def _checksum(tokens: Sequence[int], start: int) -> int:
    """CRC-32 of token ids, continued from `start`."""
    return zlib.crc32(array("I", tokens).tobytes(), start)
