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
from contextlib import suppress
from itertools import islice
from typing import Any

import mlx.core as mx

from specdec_mlx.caches import Rollback, states_of
from specdec_mlx.contracts import (
    MANY_WAITING,
    MOST_WAITING,
    DraftContext,
    DrafterStates,
    FeatureRows,
)
from specdec_mlx.drafters.draft_sources import DraftSource, Parents
from specdec_mlx.errors import CacheRollbackError
from specdec_mlx.memory.drafter_states import KEPT_ROWS, LatestFeatures
from specdec_mlx.token_ids import to_ids
from specdec_mlx.trees.tree_pass import next_level, pass_over, patch_ropes, takes_trees, view_of


class UnreadStates:
    """States [n, W] of consecutive positions that a layer has not read yet.

    Attributes:
        start: position of the first state.
        num_rows: number of states.
        parts: the states, in arrays of one or more rows.
    """

    def __init__(self) -> None:
        self.start = self.num_rows = 0
        self.parts: list[mx.array] = []

    def add(self, rows: mx.array) -> None:
        self.parts.append(rows)
        self.num_rows += rows.shape[0]

    def reset(self, start: int, rows: mx.array | None = None) -> None:
        """Replace all states by `rows`, from the position `start` on."""
        self.start, self.num_rows, self.parts = start, 0, []
        if rows is not None:
            self.add(rows)

    def first(self, num_rows: int) -> mx.array:
        # Joined only when read, because each verdict adds a few rows.
        self.parts = [mx.concatenate(self.parts)]
        return self.parts[0][:num_rows]

    def take(self, num_rows: int) -> mx.array:
        """Remove and return the first rows, or all if there are fewer."""
        rows = self.first(num_rows)
        rest = self.parts[0][rows.shape[0] :]
        self.parts, self.num_rows = [rest] if rest.shape[0] else [], rest.shape[0]
        self.start += rows.shape[0]
        return rows


class HeadReader(DraftSource):
    """Follows a text for a head.

    Of positions of earlier turns in the target's caches, the head knows what a kept state holds.
    If the state lacks positions before the next row, the reader leaves them out of its text.

    Attributes:
        takers: the unread states of all layers that read the target's states.
        waiting: the unread states of the first layer.
        reads_alone: many waiting states are read by this reader. False in a batch, which reads the
            states of all its texts together.
        num_open: last positions of a text that not all layers can read before later tokens.
        store: where the state is kept, or None.
        latest: the latest rows that were shown, in arrays of one or more rows.
        num_latest: number of these rows.
    """

    reads_alone = True
    num_open = 0

    def __init__(
        self, head: Any, prompt: Sequence[int], context: DraftContext, takers: list[UnreadStates]
    ) -> None:
        self.head = head
        self.prompt = prompt
        self.takers = takers
        self.waiting = takers[0]
        self.store = context.drafter_states if head.has_state else None
        self.latest: list[mx.array] = []
        self.num_latest = 0
        super().__init__(prompt, context, self.resume(context.num_unseen))

    def resume(self, num_unseen: int) -> range:
        """Take a kept state, if there is one. Returns the positions to leave out of the text."""
        caches: list[Any] | None = None
        if self.store is not None and num_unseen:
            caches, num_held = self.store.fetch(self.head, self.prompt[:num_unseen])
        if caches is None:
            return range(num_unseen)
        *caches, latest = caches
        # Positions are counted without those that the head was never shown.
        end = num_held - latest.num_skipped
        has_rows = num_held == num_unseen and latest.rows.shape[0] >= self.num_open
        if end <= self.num_open or not self.take_state(caches, latest, end, has_rows):
            return range(num_unseen)
        if has_rows and self.num_open:
            self.remember(latest.rows)
        first_row = num_held - self.num_open if has_rows else num_unseen
        return range(end - self.num_open, first_row)

    @abstractmethod
    def take_state(
        self, caches: list[Any], latest: LatestFeatures, end: int, has_rows: bool
    ) -> bool:
        """Go on from the caches of `end` positions. False if that is impossible.

        has_rows: the latest rows go up to the next row. Otherwise positions between are missing,
            so the last `num_open` positions are dropped.
        """

    def see(self, features: FeatureRows) -> None:
        rows = self.head.rows(features)
        for unread in self.takers:
            unread.add(rows)
        if self.store is not None and self.num_open:
            self.remember(rows)
        # Waiting states take memory. The tokens of all but the latest states are known here.
        if self.reads_alone and self.waiting.num_rows >= MOST_WAITING:
            mx.async_eval(self.read())

    def remember(self, rows: mx.array) -> None:
        self.latest.append(rows)
        self.num_latest += rows.shape[0]
        while self.num_latest - self.latest[0].shape[0] >= 2 * KEPT_ROWS:
            self.num_latest -= self.latest.pop(0).shape[0]

    def close(self, length: int) -> None:
        super().close(length)
        # The rows of the last tokens may be unknown, and the last tokens need not be wanted.
        end = min(length - self.num_skipped, self.waiting.start + self.waiting.num_rows)
        if self.store is not None and end > self.num_open:
            with suppress(CacheRollbackError):
                self.keep(end, self.store)

    @property
    def keeps(self) -> bool:
        """True if its caches outlive the generation."""
        return self.store is not None

    def keep(self, end: int, store: DrafterStates) -> None:
        """Store the state of the first `end` tokens of this reader's text."""
        rows = mx.zeros((0, 1))
        if self.num_open:
            joined = mx.concatenate(self.latest)
            stop = joined.shape[0] - (self.waiting.start + self.waiting.num_rows - end)
            # Indices copy the rows, where a slice would keep all of them in memory.
            rows = joined[mx.arange(max(0, stop - KEPT_ROWS), max(0, stop))]
        del self.tokens[end:]
        caches, states = self.finish(end, rows)
        text = [*self.prompt, *self.tokens[self.num_prompt :]][: end + self.num_skipped]
        mx.async_eval(states_of(caches), rows, states)
        latest = LatestFeatures(rows, len(text), self.num_skipped, states)
        store.store(self.head, text, [*caches, latest])

    @abstractmethod
    def finish(self, end: int, rows: mx.array) -> tuple[list[Any], list[mx.array]]:
        """Bring the caches to the first `end` positions, as far as these can be read.

        Returns the caches, and the states that chained layers have not read. Raises
        CacheRollbackError. `rows` [r, W] are the rows before `end`.
        """

    @abstractmethod
    def read(self) -> list[Any]:
        """Read all complete pairs except the last. Returns the arrays to compute."""


class LayerState:
    """One layer in a generation.

    Attributes:
        unread: states that the layer has not read.
        rollback: its caches, which hold the states it has read and the latest draft.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.unread = UnreadStates()
        self.rollback = Rollback(layer.make_cache())

    def step(self, states: mx.array, tokens: mx.array) -> Any:
        made = self.layer.step(states, tokens, self.rollback.caches)
        self.rollback.advance(states.shape[0])
        return made


class RecurrentSource(HeadReader):
    """Reads pairs when both parts are known, and drafts from the state of the last pair.

    Attributes:
        levels: the head's layers.
        state: the head's state [1, D] of the last pair, or None before the first pair.
        unread_states: of chained layers, at the beginning of the latest drafts, with the number of
            tokens.
        drafted: tokens of the draft.
        next_states: states that the next step of the draft starts from.
        fed_parents: parents of the tree's nodes in the caches.
    """

    drafted: list[mx.array]
    next_states: list[mx.array]
    fed_parents: list[int]
    unread_states: list[tuple[int, list[mx.array]]]

    def __init__(self, head: Any, prompt: Sequence[int], context: DraftContext) -> None:
        self.head = head
        self.levels = [LayerState(layer) for layer in head.levels]
        self.first = self.levels[0]
        # s_k(t) = layer_k(s_{k-1}(t), embed(x_{t+1+k})) if chained, else layer_k(h_t, ...)
        takers = self.levels[:1] if head.chained else self.levels
        self.num_open = len(self.levels)
        super().__init__(head, prompt, context, [level.unread for level in takers])
        self.state: mx.array | None = None
        self.unread_states = []

    def take_state(
        self, caches: list[Any], latest: LatestFeatures, end: int, has_rows: bool
    ) -> bool:
        rest = iter(caches)
        for depth, level in enumerate(self.levels):
            part = list(islice(rest, len(level.rollback.caches)))
            # Layer k lags k positions behind the first layer.
            level.rollback = Rollback(part, end - 1 - depth)
        if not has_rows:
            return self.go_back(end - self.num_open, None)
        states = [latest.rows, *latest.states]
        if self.is_chained and len(states) < len(self.levels):
            return self.go_back(end - self.num_open, latest.rows[-self.num_open :])
        for depth, level in enumerate(self.levels):
            rows = states[depth][-1:] if self.is_chained else latest.rows[-1 - depth :]
            level.unread.reset(end - 1 - depth, rows)
        return True

    @property
    def is_chained(self) -> bool:
        """True if layers read states of other layers, which are not among the target's rows."""
        return self.head.chained and len(self.levels) > 1

    def go_back(self, position: int, rows: mx.array | None) -> bool:
        """Bring all layers to a position, with the target's rows from there. False if none can."""
        with suppress(CacheRollbackError):
            for level in self.levels:
                if level.rollback.rewind_to(position) != position:
                    return False
                level.unread.reset(position)
            for unread in self.takers:
                unread.reset(position, rows)
            return True
        return False

    @property
    def takes_trees(self) -> bool:
        return takes_trees(self.first.rollback)

    def begin_draft(self, limit: int) -> int:
        if limit == 0:
            return 0
        # A layer computes only keys and values of pairs whose state is not used, so most of a long
        # prompt is cheap.
        if self.waiting.num_rows >= MANY_WAITING:
            self.read_pairs(except_last=1)
        self.read_pairs()
        if self.state is None:
            return 0
        for level in self.levels:
            level.rollback.checkpoint()
        # The last layers have no states yet at the beginning of a short text.
        has_states = all(level.unread.num_rows for level in self.levels[1:])
        if self.is_chained and self.store is not None and has_states:
            states = [level.unread.first(1) for level in self.levels[1:]]
            self.unread_states = [*self.unread_states[-1:], (len(self.tokens), states)]
        self.drafted, self.next_states = [], [self.state] if self.head.moves_on else []
        self.fed_parents = []
        return limit if self.head.moves_on else min(limit, len(self.levels))

    def next_logits(self, tokens: mx.array | None, parents: Parents = None) -> Any:
        made, level = self.state, self.first
        if tokens is not None and parents is not None:
            made = self._grow(tokens, parents)
        elif tokens is not None:
            self.drafted.append(tokens)
            level = self.levels[min(len(self.drafted), len(self.levels) - 1)]
            # A layer for one token also reads the states whose next token was unknown until now.
            rows = mx.concatenate(
                [*([] if self.head.moves_on else level.unread.parts), *self.next_states]
            )
            made = level.step(rows, mx.concatenate(self.drafted[-rows.shape[0] :]))[-1:]
            self.next_states = [made] if self.head.chained else []
        return level.layer.logits(made, self.output_rows)

    def _grow(self, tokens: mx.array, parents: Sequence[int]) -> Any:
        """States [n, D] of n new nodes of a tree, from the states of their parents."""
        # Rotary embeddings take one offset for all rows, and each node has its own position.
        patch_ropes(self.head)
        rows, rollback = next_level(self.fed_parents, parents), self.first.rollback
        # Row 0 is the state of the text, and ROOT is -1.
        states = self.next_states[0][mx.array(list(parents)) + 1]
        with pass_over(rows):
            views = [view_of(cache, rows) for cache in rollback.caches]
            made = self.head.step(states, tokens, views)
        rollback.advance(len(rows))
        self.next_states = [mx.concatenate([*self.next_states, made])]
        return made

    def hand_over(self) -> Rollback | None:
        """Give the caches to a batch, with all pairs except the last. None before any pair."""
        if len(self.tokens) == self.num_prompt or self.num_unread < 1:
            return None
        self.read_pairs(except_last=1)
        if not self.waiting.start:
            return None
        self.reads_alone = False
        return self.first.rollback

    @property
    def num_held(self) -> int:
        """Number of valid pairs in its row."""
        return self.waiting.start

    @property
    def num_unread(self) -> int:
        return min(self.waiting.num_rows, len(self.tokens) - 1 - self.waiting.start)

    def unread(self, count: int) -> tuple[list[int], mx.array]:
        first = self.waiting.start + 1
        return self.tokens[first : first + count], self.waiting.first(count)

    def count_read(self, count: int) -> None:
        self.waiting.take(count)

    def read(self) -> list[Any]:
        self.read_pairs(except_last=1)
        states = [array for level in self.levels for array in states_of(level.rollback.caches)]
        return [*states, *(level.unread.parts for level in self.levels[1:])]

    def take_back(self, caches: list[Any], length: int) -> None:
        """Take the caches back from a batch. They hold all pairs that were read."""
        self.first.rollback = Rollback(caches, self.waiting.start)

    def finish(self, end: int, rows: mx.array) -> tuple[list[Any], list[mx.array]]:
        self.read_pairs()
        if any(level.unread.start > end - 1 - depth for depth, level in enumerate(self.levels)):
            self.read_again(end, rows)
        states = [level.unread.first(1) for level in self.levels[1:]] if self.is_chained else []
        return [cache for level in self.levels for cache in level.rollback.caches], states

    def read_again(self, end: int, rows: mx.array) -> None:
        """Drop pairs from `end` on. Windows may go back farther, and then read pairs again."""
        length, states = end, list[mx.array]()
        if self.is_chained:  # the states are known at the beginning of a draft
            known = [known for known in self.unread_states if known[0] <= end]
            length, states = known[-1] if known else (0, states)
        for depth, level in enumerate(self.levels):
            reached = level.rollback.rewind_to(length - 1 - depth)
            reads_states = self.is_chained and depth > 0
            is_known = reached == length - 1 - depth if reads_states else end - reached <= len(rows)
            if length == 0 or not is_known:
                raise CacheRollbackError("what the head has to read again is not kept")
            level.unread.reset(
                reached, states[depth - 1] if reads_states else rows[reached - end :]
            )
        self.read_pairs()

    def read_pairs(self, except_last: int = 0) -> None:
        """Drop the draft, and read the complete pairs. `except_last` applies to the first layer."""
        for depth, level in enumerate(self.levels):
            unread = level.unread
            # The states of a draft were the head's own. The verified positions are read again with
            # the target's states.
            level.rollback.rewind_to(unread.start)
            # Layer k pairs h_t with x_{t+1+k}, so it lags k positions behind the text.
            known = len(self.tokens) - 1 - depth - unread.start
            number = min(unread.num_rows, known) - (except_last if depth == 0 else 0)
            while number > 0:
                count = min(number, self.context.prefill_step_size)
                first = unread.start + 1 + depth
                made = level.step(unread.take(count), to_ids(self.tokens[first : first + count]))
                number -= count
                if depth == 0:
                    # Keeping no output of the pass lets MLX skip the attention of these rows.
                    self.state = None if except_last else made[-1:]
                if self.head.chained and level is not self.levels[-1]:
                    self.levels[depth + 1].unread.add(made)
