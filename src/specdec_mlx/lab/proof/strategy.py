"""Does a rollback strategy keep its contract? Passes of one layer, without a model.

After rollbacks, later passes are compared with a cache that only saw the kept tokens, one by one.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import ArraysCache

from specdec_mlx.caches import STRATEGIES, Rollback, Strategy, window_of
from specdec_mlx.errors import CacheRollbackError
from specdec_mlx.exactness.rounding import ROUNDING, shortens_products
from specdec_mlx.lab.proof.conformance import Conformance

Feed = Callable[[Any, mx.array], mx.array]
"""(cache, tokens [S]) -> rows [S, D]: one pass over S positions, which the cache then holds."""

KEY_WIDTH = 64  # quantized caches need a multiple of 32

TOLERANCE = 1e-4
"""Largest difference of a row that was computed beside others, or from rows in another order."""

WINDOW = 8  # taken for caches that never forget

TREE_SIZE = 4
TREE_PATHS = ((), (0, 1), (1,), (0, 2), (1, 3), (0, 1, 3))
"""Nodes that are kept of a tree, from the root down."""

WIDTHS = (1, 2, 5)
"""Widths of passes that are restored or rolled back: some classes write single positions in place.

One wider than the window comes after them.
"""

REJECTED = 1000  # first of the token ids that are drafted and rejected


def attend(cache: Any, tokens: mx.array) -> mx.array:
    """A layer of attention over a cache. Rows [S, D + 1] have the position in the last column."""
    states = mx.sin(mx.arange(1, KEY_WIDTH + 1) * (tokens[:, None] + 1.0))[None, None]
    mask = create_attention_mask(states[0], cache, return_array=True)
    positions = cache.offset + mx.arange(tokens.shape[0], dtype=mx.float32)
    keys, values = cache.update_and_fetch(states, states)
    flat = 1 / KEY_WIDTH  # so that every token attended to weighs about as much
    rows = scaled_dot_product_attention(states, keys, values, cache=cache, scale=flat, mask=mask)
    return mx.concatenate([rows[0, 0], positions[:, None]], axis=-1)


def check_strategy(
    strategy: Strategy, make_cache: Callable[[], Any], feed: Feed = attend
) -> list[str]:
    """Check a rollback strategy against the contract of `specdec_mlx.caches`.

    Args:
        strategy: an instance, which need not be registered.
        make_cache: makes an empty cache of the class that the strategy is for. A cache that forgets
            after `max_size` tokens should have a small limit. If it has no attribute of this name,
            use eight positions.
        feed: (cache, tokens [S]) -> rows [S, D], a pass of one layer. The rows follow from the
            cache's contents. The default is attention, for classes with `update_and_fetch`. If the
            strategy gathers rows, the cache entry of a position has to follow from its token only.

    Returns:
        A line for each property that was checked.

    Raises:
        AssertionError: the strategy broke a property. The message says what happened and what to
            do.
        ValueError: `feed` does not return rows.
    """
    check = StrategyConformance(strategy, make_cache, feed)
    lines = check.run(["protocol"])
    with patch.dict(STRATEGIES, {type(make_cache()): strategy}):
        lines += check.run(["widths", "restore"])
        if not check.refuses:
            lines += check.run(["rollback", "gather"][: 1 + strategy.gathers])
    return lines


class StrategyConformance(Conformance):
    """The test of a strategy. The text is 0, 1, 2, ..., so that all tokens differ."""

    properties = {  # noqa: RUF012
        "protocol": "Give an instance of a class of caches.Strategy's kind",
        "widths": "Passes that are not what single tokens are have to be narrower: widest_pass",
        "restore": "Put back all that a pass changes, whether or not it came to its end, and never "
        "write to what save() returned",
        "rollback": "Take back exactly what was rejected, the class's own counters included; trim "
        "returns how many positions it dropped, and where can_trim may say no, must_restore is "
        "true",
        "gather": "Move the rows that are kept to where they belong, and count them alone",
    }

    def __init__(self, strategy: Strategy, make_cache: Callable[[], Any], feed: Feed) -> None:
        self.subject, self.make_cache, self.feed = strategy, make_cache, feed
        self.window = window_of(make_cache()) or WINDOW
        half, full = self.window // 2, self.window
        # Empty, short, around a full window, and more than two windows.
        self.lengths = sorted({0, 1, half, full - 1, full, full + 1, 2 * full + 1})
        self.refuses = False
        self._plain: list[mx.array] = []
        self._plain_cache = make_cache()  # never drafted on

    def protocol(self) -> str:
        is_strategy = isinstance(self.subject, Strategy)
        self.require(is_strategy, f"{self.subject!r} is no instance of one.")
        widest = self.subject.widest_pass(self.make_cache())
        self.require(widest is None or widest >= 1, f"widest_pass is {widest}; expected >= 1.")
        if self._plain_rows(2).shape[0] != 2:
            raise ValueError("feed has to return rows [S, D], one for each token of the pass.")
        return str(self.subject.name)

    def widths(self) -> str:
        """Passes up to `widest_pass` positions equal passes over single tokens."""
        for length in self.lengths:
            self._go_on(
                self._fed(length),
                length,
                f"nothing was drafted, and {length} tokens were fed in wide passes",
            )
        return f"wide passes are what single tokens are, at {len(self.lengths)} lengths"

    def restore(self) -> str:
        """`restore` returns a cache to its state at `save`, any number of times, or refuses.

        This is tested after complete passes, and after passes interrupted at each change of the
        cache.
        """
        cache = self.make_cache()
        try:
            self.subject.restore(cache, self.subject.save(cache))
        except CacheRollbackError as error:
            is_single = self.subject.widest_pass(cache) == 1
            self.require(is_single, f"it refused: {error}", "Then widest_pass has to be 1")
            self.refuses = True
            return "refused, so single tokens only, which are never taken back"
        points = 0
        for length, width in itertools.product(self.lengths, WIDTHS):
            cache = self._fed(length)
            saved, before, num_whole = self.subject.save(cache), contents(cache), 0
            rejected = _rejected(self._limited(cache, width))
            # Interrupt the pass at change 0, 1, ... until two passes are complete.
            for at in itertools.count():
                where = f"put back at {length} tokens, change {at}"
                with self.blaming(where):
                    with suppress(InterruptedPass), interrupting(cache, at):
                        self._pass(cache, rejected)
                        num_whole += 1
                    self.subject.restore(cache, saved)
                    after = contents(cache)
                for name in {**before, **after}:
                    now, then = after.get(name), before.get(name)
                    self.require(now == then, f"{where}: {name} is {now}, was {then}.")
                if num_whole == 2:
                    break
                points += not num_whole
            self._go_on(cache, length, where)
        return f"exact after whole passes, and after {points} interruptions"

    def rollback(self) -> str:
        """Draft, roll back and continue, for every number of kept tokens.

        This is also tested beside a cache that cannot be trimmed. Then all caches return to the
        checkpoint, and the next pass reads the kept tokens again.
        """
        histories = 0
        for length, width in itertools.product(self.lengths, (*WIDTHS, self.window + 2)):
            # The strategy may allow less than this width, so several widths give the same case.
            limited = self._limited(self._fed(length), width)
            if limited < width and limited in WIDTHS:
                continue  # This width was tested already.
            for num_kept, is_beside in itertools.product(range(limited + 1), (False, True)):
                cache = self._fed(length, singly=(limited + num_kept) % 2 == 1)
                where = (
                    f"after {length} tokens, a pass over {limited} positions of which {num_kept} "
                )
                where += "were kept" + ", beside a cache that cannot be trimmed" * is_beside
                rollback = Rollback([cache, *[ArraysCache(1)] * is_beside], length)
                with self.blaming(where):
                    # Beside a cache without trim, a second rewind starts from a restored cache.
                    for end in (length + num_kept, length + max(0, num_kept - 1))[: 1 + is_beside]:
                        start = rollback.position
                        width_now = self._limited(cache, limited)
                        known = range(min(end - start, width_now))
                        rows = self._draft(rollback, width_now, known)
                        self._check_rows(rows[: len(known)], start, where)
                        rollback.rewind_to(end)
                self._go_on(cache, rollback.position, where)
                histories += 1
        return f"{histories} histories, each as if nothing had been drafted"

    def gather(self) -> str:
        """Any of the last positions can be kept, as if the others had never been fed."""
        histories = 0
        for length, path in itertools.product(self.lengths, TREE_PATHS):
            cache = self._fed(length)
            if self._limited(cache, TREE_SIZE + 1) <= TREE_SIZE:
                continue
            rollback = Rollback([cache], length)
            where = f"after {length} tokens, a tree of {TREE_SIZE} of which {list(path)} were kept"
            with self.blaming(where):
                self._draft(rollback, TREE_SIZE + 1, [0, *(1 + node for node in path)])
                reached = rollback.keep(length + 1, path)
            self._go_on(cache, reached, where)
            histories += 1
        return f"{histories} histories, each as if only what was kept had been fed"

    # What the checks are made of

    def _fed(self, length: int, *, singly: bool = False) -> Any:
        cache, start = self.make_cache(), 0
        while start < length:
            width = 1 if singly else self._limited(cache, length - start)
            self._pass(cache, range(start, start + width))
            start += width
        return cache

    def _draft(self, rollback: Rollback, width: int, places: Iterable[int]) -> mx.array:
        """A pass after a checkpoint, with the text's tokens at `places`, and wrong tokens."""
        tokens = _rejected(width)
        for depth, place in enumerate(places):
            tokens[place] = rollback.position + depth
        rollback.checkpoint()
        rows = self._pass(rollback.caches[0], tokens)
        rollback.advance(width)
        return rows

    def _limited(self, cache: Any, width: int) -> int:
        widest = self.subject.widest_pass(cache)
        return width if widest is None else min(width, widest)

    def _pass(self, cache: Any, tokens: Sequence[int]) -> mx.array:
        return self.feed(cache, mx.array(list(tokens), mx.int32))

    def _go_on(self, cache: Any, start: int, where: str) -> None:
        singles = [1] * (self.window + 2)
        rows, first = [], start
        with self.blaming(where):
            for width in [3, *singles, 3] if start % 2 else [*singles, 3]:
                width = self._limited(cache, width)
                rows.append(self._pass(cache, range(start, start + width)))
                start += width
            self._check_rows(mx.concatenate(rows), first, where)

    def _check_rows(self, rows: mx.array, start: int, where: str) -> None:
        if not len(rows):
            return
        off = mx.abs(rows - self._plain_rows(start + len(rows))[start:]).max(axis=-1)
        most = ROUNDING[mx.float16] if shortens_products() else TOLERANCE
        # `not off <= most` also finds NaN.
        first: Any = mx.argmax(~(off <= most)).item()
        self.require(
            mx.all(off <= most).item(),
            f"{where}: the row of token {start + first} is off by {off[first].item():.2g} from "
            "that of a cache that was never drafted on.",
        )

    def _plain_rows(self, length: int) -> mx.array:
        while len(self._plain) < length:
            self._plain.append(self._pass(self._plain_cache, [len(self._plain)]))
        return mx.concatenate(self._plain[:length])


def _rejected(size: int) -> list[int]:
    return list(range(REJECTED, REJECTED + size))


def contents(cache: Any) -> dict[str, Any]:
    """A cache's plain attributes, and its arrays as dtype, shape and checksum."""
    has_rows = hasattr(cache, "keys_and_values") and not cache.empty()
    arrays: Any = dict(tree_flatten(cache.keys_and_values() if has_rows else cache.state))
    plain = (bool, int, float, str, type(None))
    members = getattr(cache, "__dict__", {})
    values: dict[str, Any] = {k: v for k, v in members.items() if isinstance(v, plain)}
    for name, value in arrays.items():
        is_array = isinstance(value, mx.array)
        checksum = zlib.crc32(bytes(memoryview(value))) if is_array else None
        values[f".state.{name}"] = (value.dtype, value.shape, checksum) if is_array else value
    return values


class InterruptedPass(BaseException):
    """Raised by `interrupting`."""


@contextmanager
def interrupting(cache: Any, at: int) -> Iterator[None]:
    """Raise InterruptedPass in place of change number `at` of a cache."""
    kind, changes = type(cache), itertools.count()

    def counted(change: Callable[..., None]) -> Callable[..., None]:
        def counted_change(self: Any, *args: Any) -> None:
            if next(changes) == at:
                raise InterruptedPass
            change(self, *args)

        return counted_change

    with ExitStack() as stack:
        for name in ("__setattr__", "__setitem__"):
            if hasattr(kind, name):
                stack.enter_context(patch.object(kind, name, counted(getattr(kind, name))))
        yield
