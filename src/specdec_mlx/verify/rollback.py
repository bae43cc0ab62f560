"""Going back: a model's caches as one, with a position that can be moved back.

How each class of cache drops rejected entries stands in `strategies`. All move together or not at
all: an exception in the middle, Ctrl-C included, leaves them where they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.errors import CacheRollbackError
from specdec_mlx.verify.recurrent_states import RecurrentStates
from specdec_mlx.verify.strategies import Gathers, Strategy, leaves, strategy_for

T = TypeVar("T")


def states_of(caches: Sequence[Any]) -> list[Any]:
    """The arrays that caches hold, to be computed together; no handle on them is to be kept."""
    # mlx-lm 0.31's have none before they are fed
    return [getattr(cache, "state", ()) for cache in caches]


def wait_for(caches: Sequence[Any]) -> None:
    """Wait until all that was fed to caches is computed."""
    mx.eval(states_of(caches))


@dataclass
class Rollback:
    """A model's caches, and how many positions they hold of what this object was fed.

    caches: the caller's own list, whose entries may be replaced (kv_bits does). states: how
    recurrences go step by step once the prompt was read, or None.
    """

    caches: list[Any]
    position: int = 0
    states: RecurrentStates | None = None
    checkpoints: list[tuple[int, list[Any]]] = field(default_factory=list)
    """Positions, and what each cache needs to go back there; None for one that needs nothing."""
    _found: list[tuple[Any, Strategy]] = field(default_factory=list, compare=False)
    _found_in: list[Any] = field(default_factory=list, compare=False)
    _chosen: dict[int, Strategy] = field(default_factory=dict)
    """Index among all caches -> its way back into the latest pass, where it has one of its own."""

    @classmethod
    def of(cls, model: nn.Module, caches: list[Any] | None = None) -> Rollback:
        """Of caches that are in step with the model's text; without any, of new ones."""
        return cls(caches or make_prompt_cache(model))

    def forward(
        self,
        model: nn.Module,
        tokens: mx.array,
        call: Callable[..., mx.array] | None = None,
        **inputs: Any,
    ) -> mx.array:
        """One pass of a model over tokens [S]; logits [S, V]. Exceptions change no cache.

        call: a function that calls the model in another way, from (model, tokens [S], caches,
        **inputs) to logits [S, V].
        """
        width, states = tokens.shape[0], self.states
        self._chosen = {}

        def run() -> mx.array:
            if call is not None:
                return call(model, tokens, self.caches, **inputs)
            logits: mx.array = model(tokens[None], cache=self.caches, **inputs).squeeze(
                0
            )
            return logits

        if states is None or width == 1:
            logits = self._all_or_nothing(run)
        else:
            caches = list(leaves(self.caches))
            logits, self._chosen = self._all_or_nothing(
                lambda: states.run(run, caches, width)
            )
        self.position += logits.shape[0]
        return logits

    def checkpoint(self) -> None:
        """Remember this position, before a pass with a draft; of earlier ones the last is kept."""
        saved = [
            s.save(cache) if s.must_restore else None for cache, s in self.strategies()
        ]
        self.checkpoints = [*self.checkpoints[-1:], (self.position, saved)]

    def advance(self, num_positions: int) -> None:
        """Note a pass over `num_positions` that was not made by `forward`."""
        self._chosen = {}
        self.position += num_positions

    def drop_checkpoints(self) -> None:
        """Forget all checkpoints, so that no saved buffer outlives its round."""
        self.checkpoints = []

    def widest_pass(self) -> int | None:
        """Most positions that one pass may have here; None for any number."""
        limits = (strategy.widest_pass(cache) for cache, strategy in self.strategies())
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def end(self) -> int:
        """Positions that the caches hold, those of earlier turns included."""
        offsets = (
            cache.offset for cache in leaves(self.caches) if hasattr(cache, "offset")
        )
        return max(offsets, default=self.position)

    def keep(self, position: int, kept: Sequence[int]) -> int:
        """Keep some positions of a draft that began at `position`; see `rewind_to`.

        kept: ascending indices, `range(n)` or a path; CacheRollbackError if rows between cannot be
        dropped.
        """
        # ascending, so that this is a chain's head
        if not kept or kept[-1] == len(kept) - 1:
            return self.rewind_to(position + len(kept))

        def gather() -> None:
            for layer, (cache, strategy) in enumerate(self.strategies()):
                if not isinstance(strategy, Gathers):
                    raise CacheRollbackError(
                        f"Cache {layer} ({type(cache).__name__}) cannot keep rows {list(kept)} of "
                        "a draft and drop those between them. Draft chains with this kind of cache."
                    )
                strategy.gather(cache, self.position - position, kept)

        self._all_or_nothing(gather)
        self.position = position + len(kept)
        return self.position

    def rewind_to(self, position: int) -> int:
        """Go back to `position`, or to the last checkpoint before it if a cache cannot stop there.

        Returns the position reached; what lies between has to be fed again. Raises
        CacheRollbackError, all caches as before, if one cannot go back.
        """
        back = self.position - position
        if back <= 0:
            return self.position

        def go_back() -> int:
            pairs = self.strategies()
            if all(strategy.can_trim(cache, back) for cache, strategy in pairs):
                self._check(
                    [strategy.trim(cache, back) for cache, strategy in pairs], back
                )
                return back
            return self._return_to_checkpoint(position)

        self.position -= self._all_or_nothing(go_back)
        return self.position

    def strategies(self) -> list[tuple[Any, Strategy]]:
        """Every cache that holds state, with its strategy; found anew where one was replaced."""
        if [*map(id, self._found_in)] != [*map(id, self.caches)]:
            self._found_in = list(self.caches)
            self._found = [
                (cache, strategy_for(cache)) for cache in leaves(self.caches)
            ]
        if not self._chosen:
            return self._found
        return [
            (cache, self._chosen.get(i) or s)
            for i, (cache, s) in enumerate(self._found)
        ]

    def _all_or_nothing(self, change: Callable[[], T]) -> T:
        """Put every cache back if a change of them raises; a note says which cannot be."""
        before = [
            (cache, s, vars(cache).copy() if s.saves_by_name else s.save(cache))
            for cache, s in self.strategies()
        ]
        try:
            return change()
        except BaseException as error:
            self._chosen = {}
            for cache, strategy, saved in before:
                try:
                    strategy.restore(cache, saved)
                except CacheRollbackError as failure:
                    error.add_note(str(failure))
            raise

    def _return_to_checkpoint(self, position: int) -> int:
        """Go back to the last checkpoint at or before a position; return how far back that is."""
        earlier = [(at, saved) for at, saved in self.checkpoints if at <= position]
        if not earlier:
            kinds = sorted({type(cache).__name__ for cache in leaves(self.caches)})
            raise CacheRollbackError(
                f"No way back from position {self.position} to {position}: {', '.join(kinds)} kept "
                "no state from before it. Discard these caches and start from the prompt."
            )
        at, saved = earlier[-1]
        back = self.position - at
        self._chosen = {}
        dropped = []
        for (cache, strategy), state in zip(self.strategies(), saved, strict=True):
            if strategy.must_restore:
                strategy.restore(cache, state)
            dropped.append(
                back if strategy.must_restore else strategy.trim(cache, back)
            )
        self._check(dropped, back)
        return back

    def _check(self, dropped: Sequence[int], back: int) -> None:
        """Raise CacheRollbackError unless every cache dropped what was asked."""
        for layer, (cache, got) in enumerate(
            zip(leaves(self.caches), dropped, strict=True)
        ):
            if got != back:
                raise CacheRollbackError(
                    f"Cache {layer} ({type(cache).__name__}) gave back {got} of {back} positions. "
                    "Discard these caches; use drafter=None with this kind of cache."
                )


_unusable: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def mark_unusable(caches: Sequence[Any], reason: str) -> None:
    """Have these caches refused by every later generation: it is not known what they hold."""
    for cache in leaves(caches):
        with suppress(TypeError):  # of a class that cannot be referred to weakly
            _unusable[cache] = reason


def check_usable(caches: Sequence[Any]) -> None:
    """Raise CacheRollbackError for caches that an earlier generation could not bring in order."""
    for cache in leaves(caches):
        reason = None
        with suppress(TypeError):
            reason = _unusable.get(cache)
        if reason is not None:
            raise CacheRollbackError(
                f"prompt_cache holds a {type(cache).__name__} that is not usable: {reason} Make "
                "new caches and start from the prompt."
            )
