"""Heads that draft token by token, each time from a state that they made.

Such a head reads pairs: the target's state at a position and a token behind it. Of each pair it
makes a state (Li et al. 2024, arXiv 2401.15077, section 3; DeepSeek-V3, arXiv 2412.19437, section
2.2). It has key-value caches of its own. The entries made while drafting are dropped after each
verdict, and those positions are read again with the target's true states.

Most heads have one layer, which moves on while it drafts: its state takes the place of the target's
at the next position. Others have a layer for each token of a draft. Layer k (from 0) makes, at
every position t, a state for the token k + 2 positions further:

    s_k(t) = layer_k(h_t, embed(x_{t+1+k})),  logits of x_{t+2+k} = head_k(s_k(t))

Chained layers read s_{k-1}(t) in place of h_t (DeepSeek-V3, equation 21); others read the target's
state like the first. Such a draft stays at the last position that the target has read. Layer k can
read a pair when x_{t+1+k} is known, so it is k positions behind the text, and reads those with
drafted tokens first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from specdec_mlx.drafters.heads.drafter import Head
from specdec_mlx.drafters.heads.session import SteppingSession, WaitingRows, joined
from specdec_mlx.target.rollback import Rollback
from specdec_mlx.target.tree_passes import GrowingRows, pass_over, teach_depths, view_of
from specdec_mlx.token_ids import to_ids
from specdec_mlx.types import Draft, FeatureRows

FEW = 8
"""Pairs that are read in one step with the last one; more are read apart, for less."""


class Level:
    """One layer's side of a generation.

    waiting: what takes the place of the target's states at positions that it has not read.
    num_read: positions that its caches hold, apart from what was drafted last.
    """

    def __init__(self, layer: RecurrentHead, waiting: WaitingRows) -> None:
        """Nothing was read yet."""
        self.layer = layer
        self.rollback = Rollback(layer.make_cache())
        self.waiting = waiting
        self.num_read = 0

    def rewind(self) -> None:
        """Drop what was drafted last."""
        self.rollback.rewind_to(self.num_read)

    def step(self, states: mx.array, tokens: mx.array) -> mx.array:
        """One pass of the layer over n further positions; states [n, D]."""
        made: mx.array = self.layer.step(states, tokens, self.rollback.caches)
        self.rollback.advance(states.shape[0])
        return made


class RecurrentSession(SteppingSession):
    """Reads pairs as they become known, and drafts from the state of the last one.

    levels: the layers, the first first. state: [1, D] that the first made of the last pair, None
    where that was not read. drafted: tokens of the draft under way. made: rows for the next layer
    that the one before made of them.
    """

    def __init__(self, *args: Any) -> None:
        """Nothing was read yet."""
        super().__init__(*args)
        first, *others = self.head.levels
        self.levels = [Level(first, self.waiting), *(Level(x, WaitingRows()) for x in others)]
        self.state: mx.array | None = None
        self.drafted: list[mx.array] = []
        self.made: list[mx.array] = []
        self.rows = GrowingRows()

    def see(self, features: FeatureRows) -> None:
        """Take the rows of further positions; layers that are not chained all read them."""
        if not self.head.chained:
            for level in self.levels[1:]:
                level.waiting.add(self.head.rows(features))
        super().see(features)

    def begin_draft(self, limit: int) -> int:
        """`limit`, or as many as there are layers for; 0 before a pair was read."""
        if limit == 0:
            return 0
        if self.num_pairs(0) > FEW:
            self.read()
        self.read_pairs()
        if self.state is None:
            return 0
        for level in self.levels:
            level.rollback.checkpoint()
        self.drafted, self.made = [], [self.state] if self.head.moves_on else []
        return limit if self.head.moves_on else min(limit, len(self.levels))

    def next_logits(self, token: mx.array | None) -> mx.array:
        """Of the first layer's state of the last pair; then of what is made of drafted tokens."""
        made: Any = self.state
        level = self.levels[0]
        if token is not None:
            self.drafted.append(token)
            level = self.levels[min(len(self.drafted), len(self.levels) - 1)]
            waiting = [] if self.head.moves_on else level.waiting.parts
            rows = joined([*waiting, *self.made])
            made = level.step(rows, joined(self.drafted[-rows.shape[0] :]))[-1:]
            self.made = [made] if self.head.chained else []
        logits: mx.array = level.layer.logits(made)
        return logits

    @property
    def forks(self) -> bool:
        """Where branches were asked for, and rows of these caches can see their own path alone."""
        return self.branches > 1 and self.levels[0].rollback.takes_trees()

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
        self.rows = GrowingRows()

    def logits_after(self, tokens: mx.array, parents: Sequence[int]) -> mx.array:
        """A step from the states of the parents; see `growing.Levels`."""
        rows, rollback = self.rows.further(parents), self.levels[0].rollback
        states = self.made[0][mx.array(list(parents)) + 1]
        with pass_over(rows):
            views = [view_of(cache, rows) for cache in rollback.caches]
            made = self.head.step(states, tokens, views)
        rollback.advance(len(rows))
        self.made = [mx.concatenate([*self.made, made])]
        logits: mx.array = self.head.logits(made)
        return logits

    def read(self) -> list[Any]:
        """Read the pairs that are complete, but for the last one, whose state a draft begins with.

        What the others leave in the caches is all that anybody needs of them, so that of the last
        layer no more is computed than keys and values. A few that a draft begins with are not worth
        a step of their own.
        """
        self.read_pairs(but=1)
        states = [cache.state for level in self.levels for cache in level.rollback.caches]
        return [*states, *(level.waiting.parts for level in self.levels[1:])]

    def read_pairs(self, but: int = 0) -> None:
        """Read the pairs that are complete, `but` for so many of the first layer; drop drafts."""
        for depth, level in enumerate(self.levels):
            number = self.num_pairs(depth) - (but if depth == 0 else 0)
            level.rewind()
            while number > 0:
                count = min(number, self.context.prefill_step_size)
                first = level.waiting.start + 1 + depth
                tokens = to_ids(self.tokens[first : first + count])
                made = level.step(level.waiting.take(count), tokens)
                level.num_read += count
                number -= count
                if depth == 0:
                    self.state = None if but else made[-1:]
                if self.head.chained and level is not self.levels[-1]:
                    self.levels[depth + 1].waiting.add(made)

    def num_pairs(self, depth: int) -> int:
        """How many rows wait at a layer whose token is known."""
        waiting = self.levels[depth].waiting
        return min(len(waiting), len(self.tokens) - 1 - depth - waiting.start)


class RecurrentHead(Head):
    """Such a head, or one of its layers.

    width: D of its states. moves_on: True if it has one layer, which drafts any number of tokens.
    chained: True if a layer reads what was made before it, and not the target's states.
    """

    width: int
    session = RecurrentSession
    moves_on = True
    chained = True

    @property
    def levels(self) -> Sequence[RecurrentHead]:
        """The layers that draft a token each; the one that moves on."""
        return [self]

    def step(self, states: mx.array, tokens: mx.array, cache: list[Any]) -> mx.array:
        """States [n, D] of n consecutive positions.

        Args:
            states: [n, D] rows of the target, or states that were made in their place.
            tokens: [n] the token after each position.
            cache: the head's own, to which n positions are added.
        """
        return self.forward(states[None], tokens[None], cache)[0]

    @abstractmethod
    def forward(self, states: mx.array, tokens: mx.array, cache: list[Any]) -> mx.array:
        """`step` on texts side by side: states [batch, n, D], tokens [batch, n]."""
