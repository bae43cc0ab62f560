"""The conformance test of strategies passes ours, and fails those broken in one way each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from selection import in_one_test
from specdec_mlx.target.strategies import (
    STRATEGIES,
    Chunks,
    Gathers,
    SavedBuffers,
    SingleTokens,
    Snapshot,
    Strategy,
    Trim,
    TrimRows,
    TrimToPath,
    Unknown,
    Window,
)
from specdec_mlx.testing import check_strategy
from specdec_mlx.testing.cache_passes import Feed, attend
from specdec_mlx.testing.strategy import StrategyConformance

WINDOW = 8

Case = tuple[Callable[[], Strategy], Callable[[], Any], Feed]


def recur(cache: Any, tokens: mx.array) -> mx.array:
    """A recurrence with two states, the second of which is written in place."""
    rows = []
    for token in tokens.tolist():
        new = mx.sin(mx.arange(1, 9) * (token + 1.0))
        state = mx.zeros(8) if cache[0] is None else cache[0]
        cache[0] = mx.tanh(0.9 * mx.roll(state, 1) + new)
        if cache[1] is None:
            cache[1] = mx.zeros(8)
        cache[1][:] = 0.5 * cache[1] + new
        rows.append(mx.concatenate([cache[0], cache[1]]))
    return mx.stack(rows)


def attend_in_chunks(cache: ChunkedKVCache, tokens: mx.array) -> mx.array:
    """Attention within chunks, as llama4 has it."""
    cache.maybe_trim_front()
    start, end = cache.offset, cache.offset + tokens.shape[0]
    keys, queries = mx.arange(cache.start_position, end), mx.arange(start, end)[:, None]
    is_seen = (keys // cache.chunk_size == queries // cache.chunk_size) & (keys <= queries)
    new = mx.sin(mx.arange(1, 9) * (tokens[:, None] + 1.0))[None, None]
    held, _ = cache.update_and_fetch(new, new)
    rows = mx.where(is_seen[..., None], held[0, 0][None], 0.0).sum(axis=1)
    return mx.concatenate([rows, queries], axis=-1)


CASES: dict[str, Case] = {
    "KVCache": (TrimToPath, KVCache, attend),
    "QuantizedKVCache": (TrimToPath, partial(QuantizedKVCache, 32, 8), attend),
    "ConcatenateKVCache": (TrimRows, ConcatenateKVCache, attend),
    "RotatingKVCache": (Window, partial(RotatingKVCache, WINDOW), attend),
    "RotatingKVCache with keep": (Window, partial(RotatingKVCache, WINDOW, keep=4), attend),
    "ChunkedKVCache": (Chunks, partial(ChunkedKVCache, WINDOW), attend_in_chunks),
    "ArraysCache": (Snapshot, partial(ArraysCache, 2), recur),
    "a class that is not known": (Unknown, partial(ArraysCache, 2), recur),
    "a class that is asked": (Unknown, partial(RotatingKVCache, WINDOW), attend),
}
"""A strategy, its class of cache, and a pass over it."""


@pytest.mark.parametrize("name", CASES)
def test_our_strategies_keep_the_contract(name: str) -> None:
    """Restored exactly, also after an interruption; as if nothing had been drafted."""
    make, make_cache, feed = CASES[name]
    lines = check_strategy(make(), make_cache, feed)
    parts = [line.partition(":")[0] for line in lines]
    gathers = ["gather"] if isinstance(make(), Gathers) else []
    assert parts == ["protocol", "widths", "restore", "interrupt", "rollback", *gathers]


def test_caches_that_hold_a_row_a_position_keep_paths_of_trees() -> None:
    """Trees need it of these classes; of others nothing is asked."""
    kinds = {kind for kind, strategy in STRATEGIES.items() if isinstance(strategy, Gathers)}
    assert {KVCache, QuantizedKVCache, RotatingKVCache} <= kinds
    assert ArraysCache not in kinds


def test_every_registered_strategy_is_tried() -> None:
    """Each with the class that it is registered for."""
    tried = {(type(make_cache()), make) for make, make_cache, _ in CASES.values()}
    known = {KVCache, QuantizedKVCache, ConcatenateKVCache, RotatingKVCache, ChunkedKVCache}
    assert {(kind, type(STRATEGIES[kind])) for kind in known | {ArraysCache}} <= tried


def test_a_strategy_that_refuses_has_nothing_to_take_back() -> None:
    """Single tokens only, since it says so of the width too."""
    lines = check_strategy(SingleTokens(), KVCache)
    assert lines[-1].startswith("restore: refused, so single tokens only")


def test_a_feed_that_gives_no_rows_is_refused() -> None:
    """Nothing could be told from them."""
    with pytest.raises(ValueError, match=r"rows \[S, D\]"):
        check_strategy(Trim(), KVCache, lambda cache, tokens: attend(cache, tokens)[:0])


def test_the_registration_is_as_before() -> None:
    """Whether the class was registered, or not, and whether the check passed or failed."""

    class Mine(KVCache):
        pass

    before = dict(STRATEGIES)
    check_strategy(Trim(), Mine)
    with pytest.raises(AssertionError):
        check_strategy(RestoresNothing(), KVCache)
    assert before == STRATEGIES


# Broken in one way each ---------------------------------------------------------------------------


class NoTrim:
    name, must_restore = "no trim", False


class NoPosition(Trim):
    """Lets a pass have none."""

    def widest_pass(self, cache: Any) -> int | None:
        return 0


class Refuses(Trim):
    """Has no way back, and lets passes be as wide as they like."""

    restore = SingleTokens.restore


class RestoresNothing(Trim):
    def restore(self, cache: Any, saved: Any) -> None: ...


class RestoresTheOffset(Window):
    """Not the place in the window."""

    def restore(self, cache: Any, saved: Any) -> None:
        cache.offset = saved["offset"]


class SavesTheListItself(Snapshot):
    """Whatever is written into it."""

    def save(self, cache: Any) -> Any:
        return dict(vars(cache))

    def restore(self, cache: Any, saved: Any) -> None:
        vars(cache).update(saved)


class RestoresOnce(Snapshot):
    """Hands out what was saved, which the next pass writes to."""

    def restore(self, cache: Any, saved: Any) -> None:
        vars(cache).update(saved)


class ForgetsAnEmptyCache(Unknown):
    """Right but for a cache that nothing was fed to."""

    def restore(self, cache: Any, saved: Any) -> None:
        if saved["offset"]:
            super().restore(cache, saved)


class RestoresWholePasses(Window):
    """Takes the offset for a sign that a pass has happened, whose last change it is not."""

    def restore(self, cache: Any, saved: Any) -> None:
        if cache.offset != saved["offset"]:
            super().restore(cache, saved)


class TrimsNothing(Trim):
    """And says that it did."""

    def trim(self, cache: Any, back: int) -> int:
        return back


class TrimsOneTooMany(Trim):
    """And says that it did not."""

    def trim(self, cache: Any, back: int) -> int:
        super().trim(cache, min(back + 1, cache.offset))
        return back


class CountsWrongly(Trim):
    def trim(self, cache: Any, back: int) -> int:
        return super().trim(cache, back) - 1


class TrimsTheFront(Trim):
    """Drops as many rows as it should, the oldest ones."""

    def trim(self, cache: Any, back: int) -> int:
        cache.keys, cache.values = cache.keys[..., back:, :], cache.values[..., back:, :]
        cache.offset -= back
        return back


class LeavesTheRows(TrimRows):
    """A cache that appends behind its last row keeps the rejected ones."""

    trim = Trim.trim


class AlwaysTrims(Window):
    """Also where the window has forgotten what would be needed."""

    def can_trim(self, cache: Any, back: int) -> bool:
        return True


class NeverRestores(Snapshot):
    """Cannot trim either."""

    must_restore = False


class AnyWidth(Window):
    """Also where the mask for several positions forgets what is kept."""

    def widest_pass(self, cache: Any) -> int | None:
        return None


class BareTrim(SavedBuffers):
    """mlx-lm's own trim is wrong for a window that has wrapped."""

    name = "bare trim"


class GathersRows(Trim):
    """For trees: rows are copied to where they belong."""

    def gather(self, cache: Any, last: int, kept: Sequence[int]) -> None:
        first = cache.offset - last
        for place, row in enumerate(kept):
            for rows in (cache.keys, cache.values):
                rows[..., first + place, :] = rows[..., first + row, :]
        cache.offset = first + len(kept)


class GathersTheFirst(GathersRows):
    def gather(self, cache: Any, last: int, kept: Sequence[int]) -> None:
        super().gather(cache, last, range(len(kept)))


class GathersAndForgets(GathersRows):
    """The offset stays."""

    def gather(self, cache: Any, last: int, kept: Sequence[int]) -> None:
        super().gather(cache, last, kept)
        cache.offset += last - len(kept)


def test_a_strategy_that_gathers_rows_is_tried_with_trees() -> None:
    """The sound one, which is broken below."""
    assert check_strategy(GathersRows(), KVCache)[-1].startswith("gather: 42 histories")


rotating = partial(RotatingKVCache, WINDOW)
arrays = partial(ArraysCache, 2)

BROKEN: dict[str, list[tuple[Any, Callable[[], Any], Feed]]] = {
    "protocol": [
        (NoTrim(), KVCache, attend),
        (Trim, KVCache, attend),
        (NoPosition(), KVCache, attend),
    ],
    "widths": [(AnyWidth(), partial(RotatingKVCache, WINDOW, keep=4), attend)],
    "restore": [
        (Refuses(), KVCache, attend),
        (RestoresNothing(), KVCache, attend),
        (RestoresTheOffset(), rotating, attend),
        (SavesTheListItself(), arrays, recur),
        (RestoresOnce(), arrays, recur),
        (ForgetsAnEmptyCache(), KVCache, attend),
        (Trim(), rotating, attend),
    ],
    "interrupt": [(RestoresWholePasses(), rotating, attend)],
    "rollback": [
        (TrimsNothing(), KVCache, attend),
        (TrimsOneTooMany(), KVCache, attend),
        (CountsWrongly(), KVCache, attend),
        (TrimsTheFront(), KVCache, attend),
        (LeavesTheRows(), ConcatenateKVCache, attend),
        (AlwaysTrims(), rotating, attend),
        (NeverRestores(), arrays, recur),
        (BareTrim(), rotating, attend),
    ],
    "gather": [
        (GathersTheFirst(), KVCache, attend),
        (GathersAndForgets(), KVCache, attend),
    ],
}


def test_every_property_has_a_control() -> None:
    """A strategy that is broken in this way, which it must reject."""
    assert BROKEN.keys() == StrategyConformance.properties.keys()


@in_one_test(
    ("part", "strategy", "make_cache", "feed"),
    [(part, *case) for part, cases in BROKEN.items() for case in cases],
)
def test_a_broken_strategy_fails_by_name(
    part: str, strategy: Any, make_cache: Callable[[], Any], feed: Feed
) -> None:
    """AssertionError names the property that it breaks, and says what to do."""
    with pytest.raises(AssertionError, match=f", {part}: "):
        check_strategy(strategy, make_cache, feed)


def test_what_is_wrong_with_a_rollback_is_said() -> None:
    """After which history, at which token, and by how much."""
    with pytest.raises(AssertionError) as caught:
        check_strategy(TrimsNothing(), KVCache)
    message = str(caught.value)
    assert message.startswith("TrimsNothing, rollback: after 0 tokens, a pass over 1 positions")
    assert "the row of token 0 is off by" in message
