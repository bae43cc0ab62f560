"""A trained head's side of a generation: it follows the text, keeps the target's rows, and drafts.

`RecurrentSource` drafts token by token, each time from a state that the head made of a pair: the
target's state at a position and the token after it (Li et al. 2024, arXiv 2401.15077, section 3).
After each verdict the drafted positions are dropped from the head's caches, and read again with the
target's states. Most heads have one layer, whose state takes the place of the target's at the next
position. Others have a layer for each token of a draft:

    s_k(t) = layer_k(h_t, embed(x_{t+1+k})),  logits of x_{t+2+k} = head_k(s_k(t))

Chained layers read s_{k-1}(t) in place of h_t (DeepSeek-V3, arXiv 2412.19437, equation 21). Layer k
lags k positions, until x_{t+1+k} is known; a draft reads those with drafted tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from specdec_mlx.caches import Rollback, states_of
from specdec_mlx.contracts import MANY_WAITING, MOST_WAITING, DraftContext, FeatureRows
from specdec_mlx.drafters.draft_sources import DraftSource, Parents
from specdec_mlx.token_ids import to_ids
from specdec_mlx.trees.tree_pass import next_level, pass_over, patch_ropes, takes_trees, view_of


class Unread:
    """States [n, W], in parts, of consecutive positions from `start` on that were not read yet."""

    def __init__(self) -> None:
        self.start = self.num_rows = 0
        self.parts: list[mx.array] = []

    def add(self, rows: mx.array) -> None:
        """Append rows [n, W]."""
        self.parts.append(rows)
        self.num_rows += rows.shape[0]

    def first(self, num_rows: int) -> mx.array:
        """The first rows, at most as many as there are."""
        self.parts = [mx.concatenate(self.parts)]
        return self.parts[0][:num_rows]

    def take(self, num_rows: int) -> mx.array:
        """Remove and return the first rows, at most as many as there are."""
        taken = self.first(num_rows)
        rest = self.parts[0][taken.shape[0] :]
        self.parts, self.num_rows = [rest] if rest.shape[0] else [], rest.shape[0]
        self.start += taken.shape[0]
        return taken


class HeadReader(DraftSource):
    """A head's side of a generation; an earlier turn in the target's caches is unknown to it.

    waiting: the target's states that it was shown. takers: all that take them, this first.
    reads_alone: it reads what waits by itself where that is much, and not with other texts.
    """

    reads_alone = True

    def __init__(
        self, head: Any, prompt: Sequence[int], context: DraftContext, takers: list[Unread]
    ) -> None:
        super().__init__(prompt, context, context.num_unseen)
        self.head = head
        self.takers = takers
        self.waiting = takers[0]

    def see(self, features: FeatureRows) -> None:
        """Take the rows of further positions; a long prompt is read chunk by chunk."""
        for unread in self.takers:
            unread.add(self.head.rows(features))
        self.read_if_many()

    def observe(self, tokens: Sequence[int]) -> None:
        """Take the tokens emitted."""
        super().observe(tokens)
        self.read_if_many()

    def read_if_many(self) -> None:
        """Read what waits, since states take room."""
        if self.reads_alone and self.waiting.num_rows >= MOST_WAITING:
            mx.async_eval(self.read())

    @abstractmethod
    def read(self) -> list[Any]:
        """Read what can be before a draft; the arrays to compute for it."""


class Level:
    """One layer in a generation; its caches hold what was taken of `unread`, and the latest draft.

    unread: the states that it reads.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.unread = Unread()
        self.rollback = Rollback(layer.make_cache())

    def step(self, states: mx.array, tokens: mx.array) -> Any:
        """States [n, D] of n further positions, from states [n, D] and tokens [n]."""
        made = self.layer.step(states, tokens, self.rollback.caches)
        self.rollback.advance(states.shape[0])
        return made


class RecurrentSource(HeadReader):
    """Reads pairs as they become known, and drafts from the state [1, D] of the last one.

    drafted: tokens of the draft. made: states that its next step starts from.
    """

    drafted: list[mx.array]
    made: list[mx.array]
    fed_parents: list[int]

    def __init__(self, head: Any, prompt: Sequence[int], context: DraftContext) -> None:
        self.levels = [Level(layer) for layer in head.levels]
        self.first = self.levels[0]
        takers = self.levels[:1] if head.chained else self.levels
        super().__init__(head, prompt, context, [level.unread for level in takers])
        self.state: mx.array | None = None

    @property
    def takes_trees(self) -> bool:
        """True if its caches take them."""
        return takes_trees(self.first.rollback)

    def begin_draft(self, limit: int) -> int:
        """Read all pairs; `limit`, or the number of layers, 0 before there was a pair."""
        if limit == 0:
            return 0
        # all but the last for keys and values alone
        if self.waiting.num_rows >= MANY_WAITING:
            self.read_pairs(but=1)
        self.read_pairs()
        if self.state is None:
            return 0
        for level in self.levels:
            level.rollback.checkpoint()
        self.drafted, self.made = [], [self.state] if self.head.moves_on else []
        self.fed_parents = []
        return limit if self.head.moves_on else min(limit, len(self.levels))

    def next_logits(self, tokens: mx.array | None, parents: Parents = None) -> Any:
        """Logits of the state of the last pair, then of steps over drafted tokens."""
        made, level = self.state, self.first
        if tokens is not None and parents is not None:
            made = self._grow(tokens, parents)
        elif tokens is not None:
            self.drafted.append(tokens)
            level = self.levels[min(len(self.drafted), len(self.levels) - 1)]
            # a layer of its own reads the states for which it lacked a token until now, too
            rows = mx.concatenate([*([] if self.head.moves_on else level.unread.parts), *self.made])
            made = level.step(rows, mx.concatenate(self.drafted[-rows.shape[0] :]))[-1:]
            self.made = [made] if self.head.chained else []
        return level.layer.logits(made)

    def _grow(self, tokens: mx.array, parents: Sequence[int]) -> Any:
        """States [n, D] of further nodes of a tree, from the states of their parents."""
        patch_ropes(self.head)
        rows, rollback = next_level(self.fed_parents, parents), self.first.rollback
        states = self.made[0][mx.array(list(parents)) + 1]
        with pass_over(rows):
            views = [view_of(cache, rows) for cache in rollback.caches]
            made = self.head.step(states, tokens, views)
        rollback.advance(len(rows))
        self.made = [mx.concatenate([*self.made, made])]
        return made

    def hand_over(self) -> Rollback | None:
        """Its caches, to become a row, with all pairs but the last; None before the first token."""
        if len(self.tokens) == self.num_prompt or self.num_unread < 1:
            return None
        self.read_pairs(but=1)
        if not self.waiting.start:
            return None
        self.reads_alone = False
        return self.first.rollback

    @property
    def num_held(self) -> int:
        """Pairs in its row that count."""
        return self.waiting.start

    @property
    def num_unread(self) -> int:
        """Pairs that are complete, and not read."""
        return min(self.waiting.num_rows, len(self.tokens) - 1 - self.waiting.start)

    def unread(self, count: int) -> tuple[list[int], mx.array]:
        """Tokens [n] and states [n, D] of the next pairs."""
        first = self.waiting.start + 1
        return self.tokens[first : first + count], self.waiting.first(count)

    def count_read(self, count: int) -> None:
        """Drop so many pairs, which its row has read."""
        self.waiting.take(count)

    def read(self) -> list[Any]:
        """Read the complete pairs but the last: the last layer computes only keys and values."""
        self.read_pairs(but=1)
        states = [array for level in self.levels for array in states_of(level.rollback.caches)]
        return [*states, *(level.unread.parts for level in self.levels[1:])]

    def read_pairs(self, but: int = 0) -> None:
        """Drop drafts and read the complete pairs, in the first layer all but so many."""
        for depth, level in enumerate(self.levels):
            unread = level.unread
            level.rollback.rewind_to(unread.start)
            known = len(self.tokens) - 1 - depth - unread.start
            number = min(unread.num_rows, known) - (but if depth == 0 else 0)
            while number > 0:
                count = min(number, self.context.prefill_step_size)
                first = unread.start + 1 + depth
                made = level.step(unread.take(count), to_ids(self.tokens[first : first + count]))
                number -= count
                if depth == 0:
                    self.state = None if but else made[-1:]
                if self.head.chained and level is not self.levels[-1]:
                    self.levels[depth + 1].unread.add(made)
