"""Heads that draft token by token, each time from the state that they made last.

Such a head reads pairs: the target's state at a position and the token after it. Of each pair it
makes a state, which takes the place of the target's state at the next position while it drafts
(Li et al. 2024, arXiv 2401.15077, section 3; DeepSeek-V3, arXiv 2412.19437, section 2.2). It has
key-value caches of its own. The entries made while drafting are dropped after each verdict, and
those positions are read again with the target's true states.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from specdec_mlx.drafters.heads.drafter import Head
from specdec_mlx.drafters.heads.session import SteppingSession
from specdec_mlx.drafters.heads.target_ends import TargetEnds
from specdec_mlx.sampling.distribution import Sampling
from specdec_mlx.target.rollback import Rollback
from specdec_mlx.target.tree_passes import GrowingRows, pass_over, teach_depths, view_of
from specdec_mlx.token_ids import to_ids
from specdec_mlx.types import Draft, DraftContext, FeatureRows

FEW = 8
"""Pairs that are read in one step with the last one; more are read apart, for less."""


class RecurrentSession(SteppingSession):
    """Reads pairs as they become known, and drafts from the state of the last one.

    Args:
        head: a `RecurrentHead`.
        sampling: how drafts are drawn.
        prompt: [n] token ids.
        context: the generation's.

    rollback: the head's caches, which hold `num_read` pairs, and behind them what was drafted last.
    state: [1, D] of the last pair, None where that was not read. drafted: the one that drafts next.
    made: [1 + n, D] that state, and those of n tokens of a tree; rows: of these in the caches.
    """

    def __init__(
        self, head: RecurrentHead, sampling: Sampling, prompt: Sequence[int], context: DraftContext
    ) -> None:
        """Nothing was read yet."""
        super().__init__(head, sampling, prompt, context)
        self.rollback = Rollback(head.make_cache())
        self.state: mx.array | None = None
        self.drafted: Any = None
        self.rows = GrowingRows()
        self.made: Any = None
        self.num_read = 0

    def begin_draft(self, limit: int) -> int:
        """`limit`; 0 before a pair was read."""
        if limit == 0:
            return 0
        if self.num_pairs() > FEW:
            self.read()
        self.read_pairs(self.num_pairs())
        if self.state is None:
            return 0
        self.rollback.checkpoint()
        self.drafted = self.state
        return limit

    def next_logits(self, token: mx.array | None) -> mx.array:
        """Of the state of the last pair; then of those made of it and each drafted token."""
        if token is not None:
            self.drafted = self.step(self.drafted, token)
        logits: mx.array = self.head.logits(self.drafted)
        return logits

    @property
    def forks(self) -> bool:
        """Where branches were asked for, and rows of these caches can see their own path alone."""
        return self.branches > 1 and self.rollback.takes_trees()

    def propose(self, limit: int) -> Draft:
        """`limit` tokens, a chain or a tree; see `SteppingSession`."""
        if not self.forks:
            return super().propose(limit)
        if not self.begin_draft(limit):
            return Draft()
        self.begin_tree()
        return self.tree_draws().write(self.next_logits(None), self, limit)

    def begin_tree(self) -> None:
        """From the state of the last pair."""
        teach_depths(self.head)
        self.rows, self.made = GrowingRows(), self.drafted

    def logits_after(self, tokens: mx.array, parents: Sequence[int]) -> mx.array:
        """A step from the states of the parents; see `growing.Levels`."""
        rows = self.rows.further(parents)
        states = self.made[mx.array(list(parents)) + 1]
        with pass_over(rows):
            views = [view_of(cache, rows) for cache in self.rollback.caches]
            made = self.head.step(states, tokens, views)
        self.rollback.advance(len(rows))
        self.made = mx.concatenate([self.made, made])
        logits: mx.array = self.head.logits(made)
        return logits

    def read(self) -> list[Any]:
        """Read the pairs that are complete, but for the last one, whose state a draft begins with.

        What the others leave in the caches is all that anybody needs of them, so that of the last
        layer no more is computed than keys and values. A few that a draft begins with are not worth
        a step of their own.
        """
        if self.num_pairs() > 1:
            self.read_pairs(self.num_pairs() - 1)
            self.state = None
        return [cache.state for cache in self.rollback.caches]

    def read_pairs(self, number: int) -> None:
        """Read so many of the pairs that are complete; drops what was drafted."""
        self.rollback.rewind_to(self.num_read)
        while number > 0:
            count = min(number, self.context.prefill_step_size)
            first = self.waiting.start + 1
            tokens = to_ids(self.tokens[first : first + count])
            self.state = self.step(self.waiting.take(count), tokens)[-1:]
            self.num_read += count
            number -= count

    def num_pairs(self) -> int:
        """How many rows wait whose next token is known."""
        return min(len(self.waiting), len(self.tokens) - 1 - self.waiting.start)

    def step(self, states: mx.array, tokens: mx.array) -> mx.array:
        """One pass of the head over n positions; states [n, D]."""
        made: mx.array = self.head.step(states, tokens, self.rollback.caches)
        self.rollback.advance(states.shape[0])
        return made


class RecurrentHead(Head):
    """Such a head.

    width: D of its states. ends: of the target.
    """

    width: int
    ends: TargetEnds
    session = RecurrentSession

    @abstractmethod
    def rows(self, features: FeatureRows) -> mx.array:
        """[n, D] what takes the place of a state at n positions that the target has read."""

    @abstractmethod
    def step(self, states: mx.array, tokens: mx.array, cache: list[Any]) -> mx.array:
        """States [n, D] of n consecutive positions.

        Args:
            states: [n, D] rows of the target, or the last state of this head.
            tokens: [n] the token after each position.
            cache: the head's own, to which n positions are added.
        """

    @abstractmethod
    def logits(self, states: mx.array) -> mx.array:
        """Logits [n, V] of the token after next, for states [n, D] that `step` made."""

    def make_cache(self) -> list[Any]:
        """New caches, one for each layer."""
        return [KVCache() for _ in self.layers]
