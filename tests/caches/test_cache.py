"""Going back leaves no trace: every cache class against one that was never drafted on."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models import deepseek_v41
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

import tiny
from lossless import largest_difference, only_counting
from selection import cases, in_one_test
from specdec_mlx.caches import STRATEGIES, Rollback, leaves, strategy_for
from specdec_mlx.errors import CacheRollbackError
from specdec_mlx.window_cache import WindowCache

WINDOW = 8
VOCAB = 128


build = cache(tiny.build)


class SometimesTrims(RotatingKVCache):
    """A class that is not in the table: it can be trimmed until its window is full."""


class NeverTrims(KVCache):
    """A class that is not in the table and cannot be trimmed."""

    def is_trimmable(self) -> bool:
        return False


# An architecture, and a cache for each layer of plain attention; None for those of its own.
SUBJECTS: dict[str, tuple[str, Callable[[], Any] | None]] = {
    "KVCache": ("qwen3", KVCache),
    "QuantizedKVCache": ("qwen3", lambda: QuantizedKVCache(group_size=32, bits=8)),
    "ConcatenateKVCache": ("qwen3", ConcatenateKVCache),
    "RotatingKVCache": ("qwen3", lambda: RotatingKVCache(WINDOW)),
    "RotatingKVCache with keep": ("qwen3", lambda: RotatingKVCache(WINDOW, keep=4)),
    "WindowCache": ("qwen3", lambda: WindowCache(WINDOW, sinks=2)),
    "unknown, trims now and then": ("qwen3", lambda: SometimesTrims(WINDOW)),
    "unknown, never trims": ("qwen3", NeverTrims),
    "ChunkedKVCache": ("llama4", None),
    "ArraysCache": ("mamba2", None),
    "CacheList of arrays and keys": ("falcon_h1", None),
    "CacheList of arrays and a window": ("baichuan_m1", None),
    "LayerCache": ("deepseek_v41", None),
}
"""One for every class that mlx-lm's architectures make."""

TOLERANCE = {mx.float32: 1e-3, mx.float16: 0.08, mx.bfloat16: 0.4}
"""Of a logit, of which the spread is 1.5."""

STEPS = st.tuples(
    st.sampled_from(["text", "pass", "pass", "pass", "singles", "stopped", "turn"]),
    st.lists(st.integers(1, VOCAB - 28), min_size=2, max_size=WINDOW + 5),
    st.floats(0, 1),
)
"""A way to go on, its tokens, and the share that is kept of those that are drafted."""


class Speculation:
    """Caches that are drafted on and rolled back, beside caches that only ever see single tokens.

    text: tokens that both have been given. references: for each position of the text the logits
    there and a copy of the plain caches, so that going back is to forget the later copies.
    """

    def __init__(self, subject: str, dtype: mx.Dtype = mx.float32) -> None:
        name, self.kind = SUBJECTS[subject]
        # Heads are wide enough for caches to be quantized.
        self.model = build(name, dtype, **{"head_dim": 32} if self.kind else {})
        self.tolerance = TOLERANCE[dtype]
        self.tape = Rollback(self.make())
        self.start = 0  # position in the text at which the tape was made
        self.text: list[int] = []
        self.references: list[tuple[mx.array, list[Any]]] = []

    def make(self) -> list[Any]:
        return [self.kind(), self.kind()] if self.kind else make_prompt_cache(self.model)

    def go_on(self, how: str, tokens: list[int], share: float) -> None:
        """By text alone, by a pass over a draft, by single tokens as a draft model does, by a round
        after which the next one is under way when the caller stops, or in another generation."""
        begin = len(self.text) + 1
        if how == "text":
            self.text += tokens
            self.feed_pending()
            self.tape.drop_checkpoints()
        elif how == "turn":
            self.feed_pending()
            self.start, self.tape = len(self.text), Rollback(self.tape.caches)
        elif how == "singles":
            self.text.append(tokens[0])
            self.feed_pending()
            self.tape.checkpoint()
            for token in tokens[1:]:
                self.text.append(token)
                self.feed(1)
            self.go_back(begin + round(share * (len(tokens) - 1)))
        else:
            self.launch(tokens)
            self.go_back(begin - 1 + round(share * (len(self.text) - begin + 1)))
            if how == "stopped" and len(self.text) >= begin:
                end = len(self.text)
                self.launch(tokens)
                self.go_back(begin + int(share * (end - begin)))

    def launch(self, tokens: list[int]) -> None:
        """Feed what is pending, a token and as much of the draft as the caches can take."""
        self.text.append(tokens[0])
        room = self.tape.widest_pass() or 99
        if len(self.pending) > room:
            self.feed_pending()
            return
        self.tape.checkpoint()
        self.text += tokens[1:][: room - len(self.pending)]
        self.feed(len(self.pending))

    def go_back(self, length: int) -> None:
        asked = length - self.start
        reached = self.tape.rewind_to(asked)
        assert reached == self.tape.position <= asked
        del self.text[length:], self.references[length:]

    @property
    def position(self) -> int:
        return self.start + self.tape.position

    @property
    def pending(self) -> list[int]:
        return self.text[self.position :]

    def feed_pending(self) -> None:
        while self.pending:
            self.feed(min(len(self.pending), self.tape.widest_pass() or 99))

    def feed(self, size: int) -> None:
        """One pass, and the same tokens one by one beside it."""
        start = self.position
        ids = mx.array([self.text[start : start + size]])
        logits = self.model(ids, cache=self.tape.caches)[0]
        self.tape.advance(size)
        expected = mx.stack([self.reference(start + i) for i in range(size)])
        assert largest_difference(logits, expected) < self.tolerance
        offsets = {c.offset for c in leaves(self.tape.caches) if hasattr(c, "offset")}
        assert offsets <= {self.position}

    def reference(self, index: int) -> mx.array:
        """Logits after the token at `index`, from single tokens alone."""
        while len(self.references) <= index:
            token = self.text[len(self.references)]
            caches = copy.deepcopy(self.references[-1][1]) if self.references else self.make()
            logits = self.model(mx.array([[token]]), cache=caches)[0, 0]
            mx.eval(logits)
            self.references.append((logits, caches))
        return self.references[index][0]


CONTROLS = ["KVCache", "RotatingKVCache", "WindowCache", "ChunkedKVCache", "ArraysCache"]
LIKE_ANOTHER = ("QuantizedKVCache", "CacheList of arrays and a window", "LayerCache")
"""Their parts go back as those of other subjects do: tried in the full run."""

WAYS = [(subject, True) for subject in SUBJECTS] + [(subject, False) for subject in CONTROLS]


@pytest.mark.parametrize(
    ("subject", "rolls_back"), cases(WAYS, *(way for way in WAYS if way[0] not in LIKE_ANOTHER))
)
def test_drafting_leaves_no_trace(
    subject: str, rolls_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any sequence of passes, drafts, rollbacks and turns the logits are those of caches
    that saw only the tokens that were kept, one at a time. A rollback that only counts is found
    out."""
    monkeypatch.setattr(WindowCache, "spare", 3)
    if not rolls_back:
        monkeypatch.setattr(Rollback, "rewind_to", only_counting)

    @settings(max_examples=6, phases=[Phase.generate], report_multiple_bugs=False)
    @given(st.lists(STEPS, min_size=8, max_size=12))
    def check(steps: list[tuple[str, list[int], float]]) -> None:
        caches = Speculation(subject)
        for step in [*steps, ("text", [1], 0.0)]:
            caches.go_on(*step)

    with nullcontext() if rolls_back else pytest.raises(AssertionError):
        check()


@pytest.fixture(autouse=True)
def _smooth(monkeypatch: pytest.MonkeyPatch) -> None:
    """deepseek_v41 rounds activations to 8 and 4 bits, which makes jumps out of 1e-7."""
    for name in ("_fake_quant_fp8", "_fake_quant_fp4"):
        monkeypatch.setattr(deepseek_v41, name, lambda x, *args, **kwargs: x)


def test_every_cache_class_has_a_strategy() -> None:
    classes = [kind for _, kind in inspect.getmembers(mlx_lm_cache, inspect.isclass)]
    single = {
        kind
        for kind in classes
        if issubclass(kind, mlx_lm_cache._BaseCache) and not kind.__name__.startswith("Batch")
    }
    assert single - {CacheList, mlx_lm_cache._BaseCache} <= set(STRATEGIES)


class Opaque:
    __slots__ = ()

    def is_trimmable(self) -> bool:
        return False


def test_what_has_no_way_back_is_named() -> None:
    """A class without attributes that could be saved is never drafted on; a trim that did nothing,
    in silence as mlx-lm's own do, and state without a checkpoint are errors."""
    with pytest.warns(UserWarning, match="Opaque has no known way back"):
        assert strategy_for(Opaque()).widest_pass(Opaque()) == 1
    kept, rows = KVCache(), mx.zeros((1, 1, 2, 1))
    kept.update_and_fetch(rows, rows)
    kept.trim = lambda n: 0
    with pytest.raises(CacheRollbackError, match=r"Cache 0 \(KVCache\) gave back 0 of 1"):
        Rollback([kept], position=2).rewind_to(1)
    with pytest.raises(CacheRollbackError, match="ArraysCache kept no state from before it"):
        Rollback([ArraysCache(1)], position=2).rewind_to(1)
    with pytest.raises(CacheRollbackError, match=r"ConcatenateKVCache\) cannot keep rows \[1\]"):
        Rollback([ConcatenateKVCache()], position=2).keep(0, [1])


@in_one_test("kind", [KVCache, type("HandleOn", (KVCache,), {})])
def test_going_back_copies_no_keys(kind: type[KVCache]) -> None:
    """A round over 8,192 cached tokens needs no second buffer; one handle on it, as is kept for a
    class that is not known, and it does."""
    kept = kind()
    many, one_more = (mx.zeros((1, 1, n, 64)) for n in (8192 - 100, 5))
    mx.eval(kept.update_and_fetch(many, many), one_more)
    tape = Rollback([kept])
    mx.eval(kept.keys, kept.values)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(5):
        tape.checkpoint()
        kept.update_and_fetch(one_more, one_more)
        mx.eval(kept.keys, kept.values)
        tape.advance(5)
        tape.rewind_to(tape.position - 3)
    copied = mx.get_peak_memory() - before > kept.keys.nbytes / 2
    assert copied == (kind is not KVCache)
    tape.drop_checkpoints()
    assert tape == Rollback([kept], tape.position)
