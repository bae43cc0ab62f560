"""Going back: a model's caches as one, with a position that can be moved back.

A pass over S positions appends S entries to every cache of the model; after the verdict the
rejected ones must go. How each class of cache does that stands in `strategies`. All caches move
together or not at all: an exception in the middle of a pass or of a rewind, Ctrl-C included, leaves
them where they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.errors import CacheRollbackError
from specdec_mlx.target.recurrent_states import MOST_POSITIONS, RecurrentStates
from specdec_mlx.target.strategies import (
    Gathers,
    Strategy,
    leaves,
    strategy_for,
)
from specdec_mlx.target.tree_passes import VIEWS, TreeRows, tree_pass


@dataclass(frozen=True)
class _Checkpoint:
    """What caches were at a position; None where a cache needs nothing to go back."""

    position: int
    saved: list[Any]


@dataclass
class Rollback:
    """A model's caches, and how many positions they hold of what this object was fed.

    caches: the list that the model is called with, the caller's own; kept by identity, and its
        entries may be replaced while it is used (kv_bits does).
    position: positions fed since this object was made.
    broken: why a cache is not where the others are, None if all are.
    states: how recurrent states are chosen among after a short pass with a draft; None where what
        was kept of it is fed again.
    """

    caches: list[Any]
    position: int = 0
    broken: str | None = None
    states: RecurrentStates | None = None
    _checkpoints: list[_Checkpoint] = field(default_factory=list)
    _found: list[tuple[Any, Strategy]] = field(default_factory=list, compare=False)
    _found_in: list[Any] = field(default_factory=list, compare=False)
    _chosen: dict[int, Strategy] = field(default_factory=dict)
    """Index among all caches -> its way back into the latest pass, where it has one of its own."""

    def forward(
        self, model: nn.Module, tokens: mx.array, tree: TreeRows | None = None, **inputs: Any
    ) -> mx.array:
        """One pass of a model; after an exception in it the caches are as before.

        Args:
            model: whose caches these are.
            tokens: [S] token ids.
            tree: how the rows hang together where they are no chain; see `takes_trees`.
            inputs: what the model takes besides.

        Returns:
            Logits [S, V], lazy.
        """

        def run() -> mx.array:
            if tree is not None:
                return tree_pass(model, tokens, self.caches, tree, **inputs)
            logits: mx.array = model(tokens[None], cache=self.caches, **inputs).squeeze(0)
            return logits

        self._chosen = {}
        before = self._saved()
        width = tokens.shape[0]
        try:
            if self.states is not None and self._is_after_checkpoint() and width <= MOST_POSITIONS:
                logits, self._chosen = self.states.run(run, list(leaves(self.caches)), width)
            else:
                logits = run()
        except BaseException as error:
            self._put_back(before, error)
            raise
        self.position += logits.shape[0]
        return logits

    def checkpoint(self) -> None:
        """Remember this position as one to come back to; call it before a pass with a draft.

        The two latest are kept, as many as there are passes under way at a time.
        """
        saved = [
            strategy.save(cache) if strategy.must_restore else None
            for cache, strategy in self._strategies()
        ]
        self._checkpoints = [*self._checkpoints[-1:], _Checkpoint(self.position, saved)]

    def advance(self, num_positions: int) -> None:
        """Note a pass over `num_positions` that was not made by `forward`."""
        self._chosen = {}
        self.position += num_positions

    def drop_checkpoints(self) -> None:
        """Forget all checkpoints, so that no saved buffer outlives its round."""
        self._checkpoints = []

    def widest_pass(self) -> int | None:
        """Most positions that one pass may have here; None for any number."""
        widest = None
        for cache, strategy in self._strategies():
            limit = strategy.widest_pass(cache)
            if limit is not None and (widest is None or limit < widest):
                widest = limit
        return widest

    def takes_trees(self) -> bool:
        """True if a pass over a tree can be made here, and a path of it kept."""
        return all(
            type(cache) in VIEWS and isinstance(strategy, Gathers)
            for cache, strategy in self._strategies()
        )

    @property
    def end(self) -> int:
        """Positions that the caches hold, those of earlier turns included."""
        offsets = (cache.offset for cache in leaves(self.caches) if hasattr(cache, "offset"))
        return max(offsets, default=self.position)

    def keep(self, position: int, kept: Sequence[int]) -> int:
        """Keep the first `position` positions, and those of the ones after them that are named.

        Args:
            position: where the draft began.
            kept: indices of kept draft positions, ascending: `range(n)` for a chain, a path from
                the root for a tree.

        Returns:
            The position reached, which may be an earlier checkpoint; see `rewind_to`.

        Raises:
            CacheRollbackError: a cache cannot drop rows from between others.
        """
        if self.position <= position:  # the pass was made on copies
            return self.position
        if not kept or kept[-1] == len(kept) - 1:  # ascending, so that this is a chain's head
            return self.rewind_to(position + len(kept))
        state = self._strategies()
        for layer, (cache, strategy) in enumerate(state):
            if not isinstance(strategy, Gathers):
                raise CacheRollbackError(
                    f"Cache {layer} ({type(cache).__name__}) cannot keep rows {list(kept)} of a "
                    "draft and drop those between them. Draft chains with this kind of cache."
                )
        before = self._saved()
        try:
            for cache, strategy in state:
                assert isinstance(strategy, Gathers)
                strategy.gather(cache, self.position - position, kept)
        except BaseException as error:
            self._put_back(before, error)
            raise
        self.position = position + len(kept)
        return self.position

    def rewind_to(self, position: int) -> int:
        """Go back to `position`, or to the last checkpoint before it if a cache cannot stop there.

        Returns:
            The position reached; what lies between has to be fed again.

        Raises:
            CacheRollbackError: a cache gave back another number of positions than was asked. All
                caches are then as before.
        """
        back = self.position - position
        if back <= 0:
            return self.position
        before = self._saved()
        try:
            if all(strategy.can_trim(cache, back) for cache, strategy, _ in before):
                dropped = [strategy.trim(cache, back) for cache, strategy, _ in before]
            else:
                back, dropped = self._return_to(self._last_checkpoint(position))
            self._check(dropped, back)
        except BaseException as error:
            self._put_back(before, error)
            raise
        self.position -= back
        return self.position

    def _strategies(self) -> list[tuple[Any, Strategy]]:
        """Every cache that holds state, with its strategy; found anew where one was replaced."""
        is_same = len(self._found_in) == len(self.caches) and all(
            map(is_, self._found_in, self.caches)
        )
        if not is_same:
            self._found_in = list(self.caches)
            self._found = [(cache, strategy_for(cache)) for cache in leaves(self.caches)]
        if not self._chosen:
            return self._found
        return [(cache, self._chosen.get(i) or s) for i, (cache, s) in enumerate(self._found)]

    def _is_after_checkpoint(self) -> bool:
        return bool(self._checkpoints) and self._checkpoints[-1].position == self.position

    def _saved(self) -> list[tuple[Any, Strategy, Any]]:
        """Every cache with its strategy, and all that is needed to put it back."""
        return [(cache, s, s.save(cache)) for cache, s in self._strategies()]

    def _put_back(self, before: list[tuple[Any, Strategy, Any]], error: BaseException) -> None:
        """Put every cache back; one that cannot be is noted on the error."""
        self._chosen = {}
        for cache, strategy, saved in before:
            try:
                strategy.restore(cache, saved)
            except CacheRollbackError as failure:
                self.broken = str(failure)
                error.add_note(self.broken)

    def _return_to(self, checkpoint: _Checkpoint) -> tuple[int, list[int]]:
        """Put back what was saved; how far back that is, and what each cache gave back."""
        back = self.position - checkpoint.position
        self._chosen = {}
        dropped = []
        for (cache, strategy), saved in zip(self._strategies(), checkpoint.saved, strict=True):
            if strategy.must_restore:
                strategy.restore(cache, saved)
                dropped.append(back)
            else:
                dropped.append(strategy.trim(cache, back))
        return back, dropped

    def _last_checkpoint(self, position: int) -> _Checkpoint:
        for checkpoint in reversed(self._checkpoints):
            if checkpoint.position <= position:
                return checkpoint
        kinds = sorted({type(cache).__name__ for cache in leaves(self.caches)})
        raise CacheRollbackError(
            f"No way back from position {self.position} to {position}: {', '.join(kinds)} kept no "
            "state from before it. Discard these caches and start from the prompt."
        )

    def _check(self, dropped: list[int], back: int) -> None:
        if all(got == back for got in dropped):
            return
        for layer, (cache, got) in enumerate(zip(leaves(self.caches), dropped, strict=True)):
            if got != back:
                raise CacheRollbackError(
                    f"Cache {layer} ({type(cache).__name__}) gave back {got} of {back} positions. "
                    "Discard these caches; use drafter=None with this kind of cache."
                )


_refused: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def refuse(caches: Sequence[Any], reason: str) -> None:
    """Have these caches refused by every later generation: what they hold is not known."""
    for cache in leaves(caches):
        with suppress(TypeError):  # of a class that cannot be referred to weakly
            _refused[cache] = reason


def check_usable(caches: Sequence[Any]) -> None:
    """Raise CacheRollbackError for caches that an earlier generation could not bring in order."""
    for cache in leaves(caches):
        reason = None
        with suppress(TypeError):
            reason = _refused.get(cache)
        if reason is not None:
            raise CacheRollbackError(
                f"prompt_cache holds a {type(cache).__name__} that is not usable: {reason} Make "
                "new caches and start from the prompt."
            )
