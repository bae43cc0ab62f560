"""Heads that draft token by token, each time from the state that they made last.

Such a head reads pairs: the target's state at a position and the token after it. Of each pair it
makes a state, which takes the place of the target's state at the next position while it drafts
(Li et al. 2024, arXiv 2401.15077, section 3; DeepSeek-V3, arXiv 2412.19437, section 2.2). It has
key-value caches of its own. The entries made while drafting are dropped after each verdict, and
those positions are read again with the target's true states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx

from specdec_mlx.drafters.heads.session import HeadSession
from specdec_mlx.sampling.distribution import Sampling
from specdec_mlx.target.rollback import Rollback
from specdec_mlx.token_ids import to_ids
from specdec_mlx.types import Draft, DraftContext, FeatureRows


@runtime_checkable
class RecurrentHead(Protocol):
    """One step of such a head."""

    def rows(self, features: FeatureRows) -> mx.array:
        """[n, D] what takes the place of a state at n positions that the target has read."""
        ...

    def step(self, states: mx.array, tokens: mx.array, cache: list[Any]) -> mx.array:
        """States [n, D] of n consecutive positions.

        Args:
            states: [n, D] rows of the target, or the last state of this head.
            tokens: [n] the token after each position.
            cache: the head's own, to which n positions are added.
        """
        ...

    def logits(self, states: mx.array) -> mx.array:
        """Logits [n, V] of the token after next, for states [n, D] that `step` made."""
        ...

    def make_cache(self) -> list[Any]:
        """New caches."""
        ...


class RecurrentSession(HeadSession):
    """Reads pairs as they become known, and drafts from the state of the last one.

    Args:
        head: a `RecurrentHead`.
        sampling: how drafts are drawn.
        prompt: [n] token ids.
        context: the generation's.

    rollback: the head's caches, which hold `num_read` pairs, and behind them what was drafted last.
    state: [1, D] of the last pair, None before the first.
    """

    def __init__(
        self, head: RecurrentHead, sampling: Sampling, prompt: Sequence[int], context: DraftContext
    ) -> None:
        """Nothing was read yet."""
        super().__init__(head, sampling, prompt, context)
        self.rollback = Rollback(head.make_cache())
        self.state: mx.array | None = None
        self.num_read = 0

    def propose(self, limit: int) -> Draft:
        """`limit` tokens, as one lazy graph; none before a pair was read."""
        if limit == 0:
            return Draft()
        self.read()
        if self.state is None:
            return Draft()
        self.rollback.checkpoint()
        draws = self.draws(limit)
        state = self.state
        for i in range(limit):
            token = draws.draw(self.head.logits(state))
            mx.async_eval(token)  # the device drafts while the rest of the graph is made
            if i + 1 < limit:
                state = self.step(state, token)
        return draws.draft()

    def read(self) -> list[Any]:
        """Read the pairs that are complete; drops what was drafted."""
        self.rollback.rewind_to(self.num_read)
        most = self.context.prefill_step_size
        while (count := min(self.num_pairs(), most)) > 0:
            first = self.waiting.start + 1
            tokens = to_ids(self.tokens[first : first + count])
            self.state = self.step(self.waiting.take(count), tokens)[-1:]
            self.num_read += count
        return [self.state, *(cache.state for cache in self.rollback.caches)]

    def num_pairs(self) -> int:
        """How many rows wait whose next token is known."""
        return min(len(self.waiting), len(self.tokens) - 1 - self.waiting.start)

    def step(self, states: mx.array, tokens: mx.array) -> mx.array:
        """One pass of the head over n positions; states [n, D]."""
        made: mx.array = self.head.step(states, tokens, self.rollback.caches)
        self.rollback.advance(states.shape[0])
        return made
