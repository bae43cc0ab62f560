"""Going back: a model's caches as one, with a position that can be moved back.

All caches move together or not at all: an exception in the middle, Ctrl-C included, leaves them
where they were. Each cache class of mlx-lm has a strategy, which alone knows its insides.
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
    """How one class of cache goes back; as it is, by the cache's own `trim`.

    must_restore: going back may need what `save` took before the pass, which is kept until the
    verdict. gathers: `gather` can keep some of the last rows and drop those between them, which
    trees need. `back` is a number of positions > 0.
    """

    name = "trim"
    must_restore = False
    gathers = False
    # nothing but the attributes is saved, and any width is exact: no call in each pass
    saves_by_name = takes_any_width = True

    def __init_subclass__(cls) -> None:
        cls.saves_by_name = cls.save is Strategy.save
        cls.takes_any_width = cls.widest_pass is Strategy.widest_pass

    def save(self, cache: Any) -> Any:
        """All that `restore` needs, taken before a pass; no buffer is copied."""
        return vars(cache).copy()

    def restore(self, cache: Any, saved: Any) -> None:
        """Put the cache back exactly as it was when it was saved."""
        vars(cache).update(saved)

    def can_trim(self, cache: Any, back: int) -> bool:
        """True if the last `back` positions can be dropped in place."""
        return True

    def trim(self, cache: Any, back: int) -> int:
        """Drop the last `back` positions; return how many were dropped."""
        if cache.empty():  # made for a layer that has no attention, and never fed
            return back
        return int(cache.trim(back))

    def widest_pass(self, cache: Any) -> int | None:
        """Most positions that one pass may have and still be exact; None for any number."""
        return None

    def gather(self, cache: Any, last: int, kept: Sequence[int]) -> None:
        """Of the `last` positions keep those with the given indices, in this order.

        As it is, for caches that hold one row a position.
        """
        if not cache.empty():
            # in a window rows are shifted
            begin = getattr(cache, "_idx", cache.offset) - last
            cache.keys = _moved(cache.keys, begin, kept)
            cache.values = _moved(cache.values, begin, kept)
        self.trim(cache, last - len(kept))


Trim = Strategy


class TrimToPath(Trim):
    """Trim, or keep some of the last rows, for caches that hold one row a position."""

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
    """Trim where that is enough; else put the buffers from before the pass back."""

    must_restore = True

    def save(self, cache: Any) -> Any:
        return {name: saved_buffer(value) for name, value in vars(cache).items()}

    def restore(self, cache: Any, saved: Any) -> None:
        vars(cache).update({name: saved_buffer(value) for name, value in saved.items()})


class RotatingWindow(SavedBuffers):
    """A rotating window: in temporal order after a pass over several positions, so sliced then.

    With `keep` > 0 the mask for several positions forgets the kept tokens once the window is full:
    a pass may only fill it up.
    """

    name = "window"
    gathers = True

    def can_trim(self, cache: Any, back: int) -> bool:
        if cache.offset <= cache.max_size:
            return True
        rows = cache.keys.shape[2]
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
    """Trim, unless the pass dropped rows of an earlier chunk that are needed again."""

    name = "trim within chunks"

    def can_trim(self, cache: Any, back: int) -> bool:
        position = cache.offset - back
        first_needed = position - position % cache.chunk_size
        return bool(cache.start_position <= first_needed)


class Snapshot(SavedBuffers):
    """Put back recurrent state from before the pass; kept tokens may have to be fed again."""

    name = "snapshot and replay"

    def can_trim(self, cache: Any, back: int) -> bool:
        return False

    def trim(self, cache: Any, back: int) -> int:
        return 0


class Unknown(Snapshot):
    """A class that is not in the table: trimmed while it says that it can, else deep copies."""

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
    """There is no known way back, so nothing is drafted."""

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
    """Strategy of a cache; a class that is not in the table gets a general one, with its name."""
    kind = type(cache)
    if kind not in STRATEGIES:
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


def _moved(rows: Any, begin: int, kept: Sequence[int]) -> Any:
    """Rows [..., S, D], those kept of the ones from `begin` on moved to `begin`; a new array."""
    if not isinstance(rows, mx.array):  # quantized: packed values, scales, biases
        return type(rows)(_moved(part, begin, kept) for part in rows)
    # ascending: those lie in place
    skipped = sum(index == i for i, index in enumerate(kept))
    index = mx.array([begin + row for row in kept[skipped:]])
    axis = rows.ndim - 2
    moved = mx.take(rows, index, axis=axis)
    return mx.slice_update(rows, moved, mx.array([begin + skipped]), (axis,))


def saved_buffer(value: Any) -> Any:
    """The data under another name: writing through one array does not show in the other."""
    if isinstance(value, mx.array):
        return value[...]
    return [saved_buffer(item) for item in value] if isinstance(value, list) else value


def window_of(cache: Any) -> int | None:
    """Number of tokens after which a cache forgets; None if it keeps everything."""
    for name in ("max_size", "chunk_size", "window_size"):
        if isinstance(size := getattr(cache, name, None), int):
            return size
    return None


def leaves(caches: Sequence[Any]) -> Iterator[Any]:
    """All caches that hold state, nested lists resolved, in a fixed order."""
    for cache in caches:
        if parts := parts_of(cache):
            yield from leaves(parts)
        else:
            yield cache


def leaves_of(model: nn.Module) -> list[Any]:
    """The caches that a model makes for a text, nested lists resolved; nothing is fed to them."""
    return list(leaves(make_prompt_cache(model)))


def parts_of(cache: Any) -> Sequence[Any]:
    """What a list of caches holds, mlx-lm's or mlx-vlm's; nothing of one that holds state."""
    parts: Sequence[Any] = getattr(cache, "caches", ())
    return parts


T = TypeVar("T")


def states_of(caches: Sequence[Any]) -> list[Any]:
    """The arrays that caches hold, to be computed together; no handle on them is to be kept."""
    # mlx-lm 0.31's have none before they are fed
    return [getattr(cache, "state", ()) for cache in caches]


def wait_for(caches: Sequence[Any]) -> None:
    """Wait until all that was fed to caches is computed."""
    mx.eval(states_of(caches))


def chain_pass(
    model: nn.Module, tokens: mx.array, caches: Sequence[Any], **inputs: Any
) -> mx.array:
    """Logits [S, V] of a pass over tokens [S] in a row, lazy."""
    logits: mx.array = model(tokens[None], cache=caches, **inputs).squeeze(0)
    return logits


@dataclass
class Rollback:
    """A model's caches, and how many positions they hold of what this object was fed.

    caches: the caller's own list, whose entries may be replaced (kv_bits does). states: how
    recurrences go step by step once the prompt was read, or None. base: positions of earlier texts,
    of which caches know but for those kept elsewhere.
    """

    caches: list[Any]
    position: int = 0
    states: RecurrentStates | None = None
    base: int = 0
    checkpoints: list[tuple[int, list[Any]]] = field(default_factory=list)
    """Positions, and what each cache needs to go back there; None for one that needs nothing."""
    _found: list[tuple[Any, Strategy]] = field(default_factory=list, compare=False)
    _found_in: list[Any] = field(default_factory=list, compare=False)
    _take_any_width: bool = True
    _chosen: dict[int, Strategy] = field(default_factory=dict)
    """Index among all caches -> its way back into the latest pass, where it has one of its own."""

    def __post_init__(self) -> None:
        offsets = [cache.offset for cache in leaves(self.caches) if hasattr(cache, "offset")]
        if offsets:
            self.base = max(offsets) - self.position

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

        call: calls the model, from (model, tokens [S], caches, **inputs) to logits [S, V]; None for
        tokens in a row.
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
        """Remember this position, before a pass with a draft; of earlier ones the last is kept."""
        saved = [s.save(cache) if s.must_restore else None for cache, s in self.strategies()]
        earlier = self.checkpoints
        while earlier and earlier[-1][0] >= self.position:
            earlier = earlier[:-1]
        self.checkpoints = [*earlier[-1:], (self.position, saved)]

    @contextmanager
    def undone(self, position: int | None = None) -> Iterator[None]:
        """Take back the passes of this block, those before `position` excepted.

        The ways back stay as they were before the block: a round that is still handed out needs
        its checkpoint.
        """
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
        """Note a pass over `num_positions` that was not made by `forward`."""
        self._chosen = {}
        self.position += num_positions

    def drop_checkpoints(self) -> None:
        """Forget all checkpoints, so that no saved buffer outlives its round."""
        self.checkpoints = []

    def widest_pass(self) -> int | None:
        """Most positions that one pass may have here; None for any number."""
        pairs = self.strategies()
        if self._take_any_width:
            return None
        limits = (strategy.widest_pass(cache) for cache, strategy in pairs)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def end(self) -> int:
        """Positions that the caches hold, those of earlier turns included."""
        return self.base + self.position

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
                if not strategy.gathers:
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
                self._check([strategy.trim(cache, back) for cache, strategy in pairs], back)
                return back
            return self._return_to_checkpoint(position)

        self.position -= self._all_or_nothing(go_back)
        return self.position

    def strategies(self) -> list[tuple[Any, Strategy]]:
        """Every cache that holds state, with its strategy; found anew where one was replaced."""
        if [*map(id, self._found_in)] != [*map(id, self.caches)]:
            self._found_in = list(self.caches)
            self._found = [(cache, strategy_for(cache)) for cache in leaves(self.caches)]
            self._take_any_width = all(s.takes_any_width for _, s in self._found)
        if not self._chosen:
            return self._found
        return [(cache, self._chosen.get(i) or s) for i, (cache, s) in enumerate(self._found)]

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
            dropped.append(back if strategy.must_restore else strategy.trim(cache, back))
        self._check(dropped, back)
        return back

    def _check(self, dropped: Sequence[int], back: int) -> None:
        """Raise CacheRollbackError unless every cache dropped what was asked."""
        for layer, (cache, got) in enumerate(zip(leaves(self.caches), dropped, strict=True)):
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


OTHER_THREAD = (
    "was read on or closed in another thread than the one that began it, and MLX computes an array "
    "only in the thread that made it. Read and close a generation in one thread."
)


def is_of_other_thread(error: BaseException) -> bool:
    """True if MLX refused to compute here what another thread has begun."""
    return isinstance(error, RuntimeError) and "in current thread" in str(error)


def note_other_thread(error: BaseException) -> None:
    """Say on MLX's error about threads what the caller did."""
    if is_of_other_thread(error):
        error.add_note(f"This generation {OTHER_THREAD}")


@contextmanager
def refused_after_failure(caches: Sequence[Any]) -> Iterator[None]:
    """Have caches refused from now on if this block, which brings them in order, fails.

    Raises CacheRollbackError in the place of MLX's error about threads.
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
