"""Going back: all caches of a model as one object with a position that can be moved back.

All caches move together or not at all. An exception in the middle, Ctrl-C included, leaves them
where they were. Each cache class of mlx-lm has a strategy, which is the only code that knows the
attributes of that class.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from specdec_mlx.errors import CacheRollbackError

if TYPE_CHECKING:
    from specdec_mlx.exactness.recurrent_states import RecurrentStates


class Strategy:
    """How one class of cache goes back. This base class uses the cache's own `trim`.

    Attributes:
        name: shown to users.
        must_restore: going back may need what `save` took before the pass, which is kept until the
            verdict.
        gathers: `gather` can keep some of the last rows and drop the rows between them, as trees
            need.
        saves_by_name: `save` copies the attributes and nothing else.
        takes_any_width: a pass of any width is exact.
    """

    name = "trim"
    must_restore = False
    gathers = False
    # Set from the overridden methods, so that the common caches need no calls in each pass.
    saves_by_name = takes_any_width = True

    def __init_subclass__(cls) -> None:
        cls.saves_by_name = cls.save is Strategy.save
        cls.takes_any_width = cls.widest_pass is Strategy.widest_pass

    def save(self, cache: Any) -> Any:
        """Data for `restore`, taken before a pass. No buffer is copied."""
        return vars(cache).copy()

    def restore(self, cache: Any, saved: Any) -> None:
        """Put the cache back exactly as it was when `saved` was taken."""
        vars(cache).update(saved)

    def can_trim(self, cache: Any, back: int) -> bool:
        """True if the last `back` positions can be dropped in place."""
        return True

    def trim(self, cache: Any, back: int) -> int:
        """Drop the last `back` positions. Returns the number dropped."""
        if cache.empty():  # a layer without attention never feeds its cache
            return back
        return int(cache.trim(back))

    def widest_pass(self, cache: Any) -> int | None:
        """Most positions of one exact pass. None for any number."""
        return None

    def gather(self, cache: Any, last: int, rows: Sequence[int]) -> None:
        """Keep the rows with these ascending indices among the `last` positions.

        This base method is for caches with one row for each position.
        """
        if not cache.empty():
            # A window has dropped its oldest rows, so that a row's index is not its position.
            begin = getattr(cache, "_idx", cache.offset) - last
            cache.keys = _moved(cache.keys, begin, rows)
            cache.values = _moved(cache.values, begin, rows)
        self.trim(cache, last - len(rows))


Trim = Strategy


class TrimToPath(Trim):
    """Trim or gather, for caches that keep one row for each position and drop none."""

    gathers = True


class TrimAndSlice(Trim):
    """Move the offset back and slice, for a cache that appends after its last row."""

    name = "trim rows"

    def trim(self, cache: Any, back: int) -> int:
        dropped = super().trim(cache, back)
        cache.keys = cache.keys[..., : cache.offset, :]
        cache.values = cache.values[..., : cache.offset, :]
        return dropped


class SavedBuffers(Trim):
    """Trim where that is enough; else put back the buffers from before the pass."""

    must_restore = True

    def save(self, cache: Any) -> Any:
        return {name: saved_buffer(value) for name, value in vars(cache).items()}

    def restore(self, cache: Any, saved: Any) -> None:
        vars(cache).update({name: saved_buffer(value) for name, value in saved.items()})


class RotatingWindow(SavedBuffers):
    """A rotating window. A pass over several positions leaves it in temporal order.

    With `keep` > 0, mlx-lm's mask for several positions forgets the kept tokens once the window is
    full, so that a wide pass may only fill the window.
    """

    name = "window"
    gathers = True

    def can_trim(self, cache: Any, back: int) -> bool:
        # Nothing has been overwritten yet.
        if cache.offset <= cache.max_size:
            return True
        rows = cache.keys.shape[2]
        # Rows can be cut off at the end only while the end is the latest position, and only if a
        # full window, or the complete text, is left.
        in_order = cache._idx == rows
        return bool(in_order and (rows == cache.offset or rows - back >= cache.max_size))

    def trim(self, cache: Any, back: int) -> int:
        back = min(back, cache.offset)
        cache.offset -= back
        cache._idx -= back
        if cache.keys.shape[2] > cache.max_size:
            cache.keys = cache.keys[..., : cache._idx, :]
            cache.values = cache.values[..., : cache._idx, :]
        return back

    def widest_pass(self, cache: Any) -> int | None:
        return None if cache.keep == 0 else max(1, cache.max_size - cache.offset)


class Chunks(SavedBuffers):
    """Trim, unless the pass has dropped rows of an earlier chunk that are needed again."""

    name = "trim within chunks"

    def can_trim(self, cache: Any, back: int) -> bool:
        position = cache.offset - back
        first_needed = position - position % cache.chunk_size
        return bool(cache.start_position <= first_needed)


class Snapshot(SavedBuffers):
    """Put back recurrent state from before the pass. Kept tokens may have to be fed again."""

    name = "snapshot and replay"

    def can_trim(self, cache: Any, back: int) -> bool:
        return False

    def trim(self, cache: Any, back: int) -> int:
        return 0


class Unknown(Snapshot):
    """A class without a strategy: trim while it says that it can, else restore a deep copy."""

    def save(self, cache: Any) -> Any:
        return copy.deepcopy(vars(cache))

    def restore(self, cache: Any, saved: Any) -> None:
        vars(cache).clear()
        vars(cache).update(copy.deepcopy(saved))

    def can_trim(self, cache: Any, back: int) -> bool:
        return bool(cache.is_trimmable())

    def trim(self, cache: Any, back: int) -> int:
        return int(cache.trim(back))


class SingleTokens(Snapshot):
    """No way back is known, so that nothing is drafted."""

    name = "single tokens"

    def save(self, cache: Any) -> Any:
        return None

    def restore(self, cache: Any, saved: Any) -> None:
        raise CacheRollbackError(f"{type(cache).__name__} has no known way back.")

    def widest_pass(self, cache: Any) -> int | None:
        return 1


STRATEGIES: dict[type, Strategy] = {
    KVCache: TrimToPath(),
    QuantizedKVCache: TrimToPath(),
    ChunkedKVCache: Chunks(),
    ConcatenateKVCache: TrimAndSlice(),
    RotatingKVCache: RotatingWindow(),
    ArraysCache: Snapshot(),
}
"""Cache class -> its strategy. Register one of your own here: `STRATEGIES[MyCache] = MyStrategy()`;
`specdec_mlx.lab.check_strategy` holds it to the contract."""


READABLE = (KVCache, RotatingKVCache, QuantizedKVCache)
"""Caches of one key and one value for each head and position."""


def strategy_for(cache: Any) -> Strategy:
    """Strategy of a cache. An unknown class gets a general strategy, and is registered."""
    kind = type(cache)
    if kind not in STRATEGIES:
        # Without a `__dict__` there are no attributes to save and restore.
        has_names = hasattr(cache, "__dict__")
        STRATEGIES[kind] = Unknown() if has_names else SingleTokens()
        if not has_names:
            warnings.warn(
                f"specdec_mlx: {kind.__name__} has no known way back after a rejected draft, so "
                "nothing is drafted. Register a strategy in "
                "specdec_mlx.caches.STRATEGIES to lift that.",
                stacklevel=2,
            )
    return STRATEGIES[kind]


def _moved(rows: Any, begin: int, accepted: Sequence[int]) -> Any:
    """A new array of rows [..., S, D] in which the accepted rows follow `begin` directly.

    accepted: ascending indices, counted from `begin`.
    """
    if not isinstance(rows, mx.array):  # quantized: packed values, scales, biases
        return type(rows)(_moved(part, begin, accepted) for part in rows)
    # The first accepted rows are in place already. In ascending order they are 0, 1, 2, ...
    skipped = sum(index == i for i, index in enumerate(accepted))
    index = mx.array([begin + row for row in accepted[skipped:]])
    axis = rows.ndim - 2
    moved = mx.take(rows, index, axis=axis)
    return mx.slice_update(rows, moved, mx.array([begin + skipped]), (axis,))


def saved_buffer(value: Any) -> Any:
    """A second array over the same data, which later writes do not change."""
    if isinstance(value, mx.array):
        # `cache.keys[...] = x` changes the Python object that every name refers to. Indexing makes
        # a new object over the same data, and copy-on-write keeps the two apart.
        return value[...]
    return [saved_buffer(item) for item in value] if isinstance(value, list) else value


def window_of(cache: Any) -> int | None:
    """Number of tokens after which a cache forgets. None if it keeps everything."""
    for name in ("max_size", "chunk_size", "window_size"):
        if isinstance(size := getattr(cache, name, None), int):
            return size
    return None


def leaves(caches: Sequence[Any]) -> Iterator[Any]:
    """All caches that hold state, in a fixed order. Nested lists are resolved."""
    for cache in caches:
        if parts := parts_of(cache):
            yield from leaves(parts)
        else:
            yield cache


def leaves_of(model: nn.Module) -> list[Any]:
    return list(leaves(make_prompt_cache(model)))


def parts_of(cache: Any) -> Sequence[Any]:
    """The members of a list of caches, mlx-lm's or mlx-vlm's. Empty for other caches."""
    parts: Sequence[Any] = getattr(cache, "caches", ())
    return parts


T = TypeVar("T")


def states_of(caches: Sequence[Any]) -> list[Any]:
    """The arrays in the caches, to be computed together.

    Keep none of them: a second reference makes the next pass copy its buffers.
    """
    # In mlx-lm 0.31 a cache has no state before it is fed.
    return [getattr(cache, "state", ()) for cache in caches]


def wait_for(caches: Sequence[Any]) -> None:
    mx.eval(states_of(caches))


def chain_pass(
    model: nn.Module, tokens: mx.array, caches: Sequence[Any], **inputs: Any
) -> mx.array:
    """Lazy logits [S, V] of a pass over consecutive tokens [S]."""
    logits: mx.array = model(tokens[None], cache=caches, **inputs).squeeze(0)
    return logits


@dataclass
class Rollback:
    """A model's caches, and the number of positions that they hold.

    Attributes:
        caches: the caller's own list. Its entries may be replaced, as `kv_bits` does.
        position: positions fed through this object.
        states: recurrent states of each position of a pass, once the prompt was read. None if
            unknown.
        base: positions of earlier texts in the caches.
    """

    caches: list[Any]
    position: int = 0
    states: RecurrentStates | None = None
    base: int = 0
    checkpoints: list[tuple[int, list[Any]]] = field(default_factory=list)
    """Positions, with the data that each cache needs to return there. None if it needs none."""
    _strategies: list[tuple[Any, Strategy]] = field(default_factory=list, compare=False)
    _strategies_of: list[Any] = field(default_factory=list, compare=False)
    _take_any_width: bool = True
    _chosen: dict[int, Strategy] = field(default_factory=dict)
    """Index among all caches -> strategy for the latest pass only, from its recurrent states."""

    def __post_init__(self) -> None:
        offsets = [cache.offset for cache in leaves(self.caches) if hasattr(cache, "offset")]
        if offsets:
            self.base = max(offsets) - self.position

    @classmethod
    def of(cls, model: nn.Module, caches: list[Any] | None = None) -> Rollback:
        return cls(caches or make_prompt_cache(model))

    def forward(
        self,
        model: nn.Module,
        tokens: mx.array,
        call: Callable[..., mx.array] | None = None,
        **inputs: Any,
    ) -> mx.array:
        """Run one pass of a model over tokens [S]. Returns logits [S, V].

        An exception changes no cache.

        call: runs the model on (model, tokens [S], caches, **inputs) and returns logits [S, V].
        None for consecutive tokens.
        """
        width, states = tokens.shape[0], self.states
        run = partial(call or chain_pass, model, tokens, self.caches, **inputs)
        self._chosen = {}
        if states is None or width == 1:
            logits = self._all_or_nothing(run)
        else:
            caches = list(leaves(self.caches))
            logits, self._chosen = self._all_or_nothing(lambda: states.run(run, caches, width))
        self.position += logits.shape[0]
        return logits

    def checkpoint(self) -> None:
        """Save this position before a pass with a draft. Also keeps the last earlier checkpoint."""
        saved = [s.save(cache) if s.must_restore else None for cache, s in self.strategies()]
        earlier = self.checkpoints
        while earlier and earlier[-1][0] >= self.position:
            earlier = earlier[:-1]
        self.checkpoints = [*earlier[-1:], (self.position, saved)]

    @contextmanager
    def undone(self, position: int | None = None) -> Iterator[None]:
        """Take back the passes of this block, down to `position` (by default all of them)."""
        # A round that is still being handed out needs its checkpoint, so that the block must not
        # replace it.
        before, ways = self.position, (self.checkpoints, self._chosen)
        self.checkpoint()
        try:
            yield
        finally:
            self.rewind_to(before if position is None else position)
            self.checkpoints, chosen = ways
            if self.position == before:
                self._chosen = chosen

    def advance(self, num_positions: int) -> None:
        """Count a pass over `num_positions` that `forward` did not run."""
        self._chosen = {}
        self.position += num_positions

    def drop_checkpoints(self) -> None:
        # A saved buffer is a second reference: kept for longer than its round, it would make every
        # pass copy the cache.
        self.checkpoints = []

    def widest_pass(self) -> int | None:
        pairs = self.strategies()
        if self._take_any_width:
            return None
        limits = (strategy.widest_pass(cache) for cache, strategy in pairs)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def end(self) -> int:
        return self.base + self.position

    def keep(self, position: int, accepted: Sequence[int]) -> int:
        """Keep the accepted positions of a draft that began at `position`; see `rewind_to`.

        accepted: ascending indices: `range(n)` for a chain, or a path in a tree. Raises
        CacheRollbackError if rows between them cannot be dropped.
        """
        # Ascending indices that end with n - 1 are 0 to n - 1, the beginning of a chain.
        if not accepted or accepted[-1] == len(accepted) - 1:
            return self.rewind_to(position + len(accepted))

        def gather() -> None:
            for layer, (cache, strategy) in enumerate(self.strategies()):
                if not strategy.gathers:
                    raise CacheRollbackError(
                        f"Cache {layer} ({type(cache).__name__}) cannot keep rows {list(accepted)} "
                        "of a draft and drop the rows between them. Draft chains with this cache."
                    )
                strategy.gather(cache, self.position - position, accepted)

        self._all_or_nothing(gather)
        self.position = position + len(accepted)
        return self.position

    def rewind_to(self, position: int) -> int:
        """Go back to `position`, or to the last checkpoint before it.

        Returns the position reached; the tokens from there on have to be fed again. Raises
        CacheRollbackError, with all caches as before, if a cache cannot go back.
        """
        back = self.position - position
        if back <= 0:
            return self.position

        def go_back() -> int:
            pairs = self.strategies()
            # One cache that cannot trim sends all caches to the checkpoint, because all must hold
            # the same positions.
            if all(strategy.can_trim(cache, back) for cache, strategy in pairs):
                self._check([strategy.trim(cache, back) for cache, strategy in pairs], back)
                return back
            return self._return_to_checkpoint(position)

        self.position -= self._all_or_nothing(go_back)
        return self.position

    def strategies(self) -> list[tuple[Any, Strategy]]:
        # Quantization replaces entries of the list. Entries that stayed are compared by identity.
        if self._strategies_of != self.caches:
            self._strategies_of = list(self.caches)
            self._strategies = [(cache, strategy_for(cache)) for cache in leaves(self.caches)]
            self._take_any_width = all(s.takes_any_width for _, s in self._strategies)
        if not self._chosen:
            return self._strategies
        return [(cache, self._chosen.get(i) or s) for i, (cache, s) in enumerate(self._strategies)]

    def _all_or_nothing(self, change: Callable[[], T]) -> T:
        """Run a change of the caches, and put all of them back if it raises.

        A note on the exception names a cache that cannot be put back.
        """
        before = [
            (cache, s, vars(cache).copy() if s.saves_by_name else s.save(cache))
            for cache, s in self.strategies()
        ]
        try:
            return change()
        # KeyboardInterrupt is no Exception.
        except BaseException as error:
            self._chosen = {}
            for cache, strategy, saved in before:
                try:
                    strategy.restore(cache, saved)
                except CacheRollbackError as failure:
                    error.add_note(str(failure))
            raise

    def _return_to_checkpoint(self, position: int) -> int:
        """Go to the last checkpoint at or before a position. Returns the number of steps back."""
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
            dropped.append(back if strategy.must_restore else strategy.trim(cache, back))
        self._check(dropped, back)
        return back

    def _check(self, dropped: Sequence[int], back: int) -> None:
        for layer, (cache, got) in enumerate(zip(leaves(self.caches), dropped, strict=True)):
            if got != back:
                raise CacheRollbackError(
                    f"Cache {layer} ({type(cache).__name__}) gave back {got} of {back} positions. "
                    "Discard these caches; use drafter=None with this kind of cache."
                )


_unusable: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def mark_unusable(caches: Sequence[Any], reason: str) -> None:
    for cache in leaves(caches):
        with suppress(TypeError):  # a class with slots may not allow weak references
            _unusable.setdefault(cache, reason)


OTHER_THREAD = (
    "was read on or closed in another thread than the one that began it, and MLX computes an array "
    "only in the thread that made it. Read and close a generation in one thread."
)


def is_of_other_thread(error: BaseException) -> bool:
    """True for MLX's refusal to compute what another thread has begun."""
    return isinstance(error, RuntimeError) and "in current thread" in str(error)


def note_other_thread(error: BaseException) -> None:
    if is_of_other_thread(error):
        error.add_note(f"This generation {OTHER_THREAD}")


@contextmanager
def refused_after_failure(caches: Sequence[Any]) -> Iterator[None]:
    """Have caches refused from now on if this block, which puts them in order, fails.

    MLX's error about threads becomes a CacheRollbackError.
    """
    try:
        yield
    except BaseException as failure:
        if is_of_other_thread(failure):
            mark_unusable(caches, f"a generation {OTHER_THREAD}")
            raise CacheRollbackError(f"This generation {OTHER_THREAD}") from failure
        reason = f"{type(failure).__name__}: {failure}".rstrip(": ")
        mark_unusable(caches, f"a generation was interrupted and could not be undone ({reason}).")
        raise


def check_usable(caches: Sequence[Any]) -> None:
    for cache in leaves(caches):
        reason = None
        with suppress(TypeError):
            reason = _unusable.get(cache)
        if reason is not None:
            raise CacheRollbackError(
                f"prompt_cache holds a {type(cache).__name__} that is not usable: {reason} Make "
                "new caches and start from the prompt."
            )
