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

from selection import cases, in_one_test
from specdec_mlx.caches import (
    STRATEGIES,
    Chunks,
    RotatingWindow,
    SavedBuffers,
    SingleTokens,
    Snapshot,
    Strategy,
    Trim,
    TrimAndSlice,
    TrimToPath,
    Unknown,
)
from specdec_mlx.lab import check_strategy
from specdec_mlx.lab.proof.strategy import Feed, StrategyConformance, attend
from specdec_mlx.window_cache import RowsOfWindow, WindowCache

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
    "ConcatenateKVCache": (TrimAndSlice, ConcatenateKVCache, attend),
    "RotatingKVCache": (RotatingWindow, partial(RotatingKVCache, WINDOW), attend),
    "RotatingKVCache with keep": (RotatingWindow, partial(RotatingKVCache, WINDOW, keep=4), attend),
    "WindowCache": (RowsOfWindow, partial(WindowCache, WINDOW, 2), attend),
    "ChunkedKVCache": (Chunks, partial(ChunkedKVCache, WINDOW), attend_in_chunks),
    "ArraysCache": (Snapshot, partial(ArraysCache, 2), recur),
    "a class that is not known": (Unknown, partial(ArraysCache, 2), recur),
    "a class that is asked": (Unknown, partial(RotatingKVCache, WINDOW), attend),
}
"""A strategy, its class of cache, and a pass over it."""


@pytest.mark.parametrize(
    "name", cases(CASES, "KVCache", "RotatingKVCache", "WindowCache", "ArraysCache")
)
def test_our_strategies_keep_the_contract(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restored exactly, also after an interruption; as if nothing had been drafted."""
    monkeypatch.setattr(WindowCache, "spare", 3)
    make, make_cache, feed = CASES[name]
    lines = check_strategy(make(), make_cache, feed)
    parts = [line.partition(":")[0] for line in lines]
    gathers = ["gather"] if make().gathers else []
    assert parts == ["protocol", "widths", "restore", "rollback", *gathers]
    if name == "KVCache":
        assert lines[-1].startswith("gather: 42 histories")


def test_every_registered_strategy_is_tried() -> None:
    """Each with its class; those that hold a row a position keep paths of trees."""
    tried = {(type(make_cache()), make) for make, make_cache, _ in CASES.values()}
    known = {
        KVCache,
        QuantizedKVCache,
        ConcatenateKVCache,
        RotatingKVCache,
        ChunkedKVCache,
        WindowCache,
    }
    assert {(kind, type(STRATEGIES[kind])) for kind in known | {ArraysCache}} <= tried
    kinds = {kind for kind, strategy in STRATEGIES.items() if strategy.gathers}
    assert {KVCache, QuantizedKVCache, RotatingKVCache} <= kinds
    assert ArraysCache not in kinds


def test_a_strategy_that_refuses_has_nothing_to_take_back_and_a_feed_gives_rows() -> None:
    """What is registered stays as it was, whether the check passes or not."""
    before = dict(STRATEGIES)
    lines = check_strategy(SingleTokens(), type("Mine", (KVCache,), {}))
    assert lines[-1].startswith("restore: refused, so single tokens only")
    with pytest.raises(ValueError, match=r"rows \[S, D\]"):
        check_strategy(Trim(), KVCache, lambda cache, tokens: attend(cache, tokens)[:0])
    words = "Changed, rollback: after 0 tokens, a pass over 1 positions.* token 0 is off by"
    with pytest.raises(AssertionError, match=words):
        check_strategy(TRIMS_NOTHING, KVCache)
    assert before == STRATEGIES


# Broken in one way each ---------------------------------------------------------------------------


def changed(kind: type, **members: Any) -> Any:
    """An instance of our strategy with other members."""
    return type("Changed", (kind,), members)()


def put_back(self: Any, cache: Any, saved: Any) -> None:
    """Hands out what was saved, which the next pass writes to."""
    vars(cache).update(saved)


def save_itself(self: Any, cache: Any) -> Any:
    """Saves the list, and not what is in it."""
    return dict(vars(cache))


class ForgetsAnEmptyCache(Unknown):
    """Right but for a cache that nothing was fed to."""

    def restore(self, cache: Any, saved: Any) -> None:
        if saved["offset"]:
            super().restore(cache, saved)


class RestoresWholePasses(RotatingWindow):
    """Takes the offset for a sign that a pass has happened, whose last change it is not."""

    def restore(self, cache: Any, saved: Any) -> None:
        if cache.offset != saved["offset"]:
            super().restore(cache, saved)


class TrimsTheFront(Trim):
    """Drops as many rows as it should, the oldest ones."""

    def trim(self, cache: Any, back: int) -> int:
        cache.keys, cache.values = cache.keys[..., back:, :], cache.values[..., back:, :]
        cache.offset -= back
        return back


class GathersTheFirst(TrimToPath):
    def gather(self, cache: Any, last: int, kept: Sequence[int]) -> None:
        super().gather(cache, last, range(len(kept)))


def restore_offset(self: Any, cache: Any, saved: Any) -> None:
    cache.offset = saved["offset"]


rotating = partial(RotatingKVCache, WINDOW)
kept_window = partial(RotatingKVCache, WINDOW, keep=4)
arrays = partial(ArraysCache, 2)
TRIMS_NOTHING = changed(Trim, trim=lambda self, cache, back: back)  # and says that it did

BROKEN: dict[str, list[tuple[Any, Callable[[], Any], Feed]]] = {
    "protocol": [
        (type("NoTrim", (), {"name": "no trim"})(), KVCache, attend),
        (Trim, KVCache, attend),
        (changed(Trim, widest_pass=lambda self, cache: 0), KVCache, attend),
    ],
    "widths": [  # also where the mask for several positions forgets what is kept
        (changed(RotatingWindow, widest_pass=lambda self, cache: None), kept_window, attend)
    ],
    "restore": [
        (changed(Trim, restore=SingleTokens.restore), KVCache, attend),  # at any width
        (changed(Trim, restore=lambda self, cache, saved: None), KVCache, attend),
        (
            changed(RotatingWindow, restore=restore_offset),
            rotating,
            attend,
        ),  # not the place in the window
        (changed(Snapshot, save=save_itself, restore=put_back), arrays, recur),
        (changed(Snapshot, restore=put_back), arrays, recur),
        (ForgetsAnEmptyCache(), KVCache, attend),
        (Trim(), rotating, attend),
        (RestoresWholePasses(), rotating, attend),  # not those that were interrupted
    ],
    "rollback": [
        (TRIMS_NOTHING, KVCache, attend),
        (changed(Trim, trim=lambda self, cache, back: cache.trim(back) - 1), KVCache, attend),
        (TrimsTheFront(), KVCache, attend),
        (changed(TrimAndSlice, trim=Trim.trim), ConcatenateKVCache, attend),  # its rows stay
        (changed(RotatingWindow, can_trim=lambda self, cache, back: True), rotating, attend),
        (changed(Snapshot, must_restore=False), arrays, recur),
        (changed(SavedBuffers, name="bare trim"), rotating, attend),  # mlx-lm's, once wrapped
    ],
    "gather": [
        (GathersTheFirst(), KVCache, attend),
    ],
}


@in_one_test(
    ("part", "strategy", "make_cache", "feed"),
    [(part, *case) for part, broken in BROKEN.items() for case in broken],
)
def test_a_broken_strategy_fails_by_name(
    part: str, strategy: Any, make_cache: Callable[[], Any], feed: Feed
) -> None:
    """AssertionError names the property that it breaks; every property has such a control."""
    assert BROKEN.keys() == StrategyConformance.properties.keys()
    with pytest.raises(AssertionError, match=f", {part}: "):
        check_strategy(strategy, make_cache, feed)
