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
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
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
from specdec_mlx.errors import CacheRollbackError
from specdec_mlx.target.rollback import Rollback
from specdec_mlx.target.strategies import STRATEGIES, leaves, strategy_for

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
    "unknown, trims now and then": ("qwen3", lambda: SometimesTrims(WINDOW)),
    "unknown, never trims": ("qwen3", NeverTrims),
    "ChunkedKVCache": ("llama4", None),
    "ArraysCache": ("mamba2", None),
    "CacheList of arrays and keys": ("falcon_h1", None),
    "CacheList of arrays and a window": ("baichuan_m1", None),
    "LayerCache": ("deepseek_v41", None),
}
"""One for every class that mlx-lm's architectures make."""

tokens = st.integers(1, VOCAB - 28)
drafts = st.lists(tokens, min_size=1, max_size=WINDOW + 4)
shares = st.floats(0, 1)


class Speculation(RuleBasedStateMachine):
    """Caches that are drafted on and rolled back, beside caches that only ever see single tokens.

    text: tokens that both have been given. references: for each position of the text the logits
    there and a copy of the plain caches, so that going back is to forget the later copies.
    """

    def __init__(self, subject: str) -> None:
        super().__init__()
        name, self.kind = SUBJECTS[subject]
        # Heads are wide enough for caches to be quantized.
        self.model = build(name, **{"head_dim": 32} if self.kind else {})
        self.tape = Rollback(self.make())
        self.start = 0  # position in the text at which the tape was made
        self.text: list[int] = []
        self.references: list[tuple[mx.array, list[Any]]] = []

    def make(self) -> list[Any]:
        return [self.kind(), self.kind()] if self.kind else make_prompt_cache(self.model)

    @rule(new=st.lists(tokens, min_size=1, max_size=5))
    def decode_plainly(self, new: list[int]) -> None:
        """A prompt, or tokens without a draft."""
        self.text += new
        self.feed_pending()
        self.tape.drop_checkpoints()

    @rule(token=tokens, draft=drafts, share=shares)
    def verify_a_draft(self, token: int, draft: list[int], share: float) -> None:
        """A round, of which a share is kept: none of it, its token, or some of its draft."""
        length = len(self.text)
        draft = self.launch(token, draft)
        self.go_back(length + round(share * (1 + len(draft))))

    @rule(token=tokens, draft=drafts, share=shares)
    def draft_one_by_one(self, token: int, draft: list[int], share: float) -> None:
        """The draft model's side of a round: single tokens after the mark."""
        self.text.append(token)
        self.feed_pending()
        self.tape.checkpoint()
        for proposed in draft:
            self.text.append(proposed)
            self.feed(1)
        self.go_back(len(self.text) - len(draft) + round(share * len(draft)))

    @rule(token=tokens, drafts=st.tuples(drafts, drafts), share=shares, taken=shares)
    def stop_inside_a_block(
        self, token: int, drafts: tuple[list[int], list[int]], share: float, taken: float
    ) -> None:
        """The next round is under way when the caller closes, some tokens into the last one."""
        before = len(self.text)
        self.verify_a_draft(token, drafts[0], share)
        after = len(self.text)
        self.launch(token, drafts[1])
        self.go_back(before + 1 + int(taken * (after - before - 1)))

    @rule()
    def start_another_turn(self) -> None:
        """Bring the caches to the end of the text, and use them for the next generation."""
        self.feed_pending()
        self.start = len(self.text)
        self.tape = Rollback(self.tape.caches)

    def teardown(self) -> None:
        self.decode_plainly([1])

    def launch(self, token: int, draft: list[int]) -> list[int]:
        """Feed what is pending, a token and as much of the draft as the caches can take."""
        self.text.append(token)
        room = self.tape.widest_pass()
        if room is not None:
            draft = draft[: max(0, room - len(self.pending))]
        if len(self.pending) + len(draft) > (room or 99):
            self.feed_pending()
            return []
        self.tape.checkpoint()
        self.text += draft
        self.feed(len(self.pending))
        return draft

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
        assert largest_difference(logits, expected) < 1e-3
        offsets = {c.offset for c in leaves(self.tape.caches) if hasattr(c, "offset")}
        assert offsets <= {self.position}

    def reference(self, index: int) -> mx.array:
        """Logits after the token at `index`, from single tokens alone."""
        while len(self.references) <= index:
            token = self.text[len(self.references)]
            earlier = self.references[-1][1] if self.references else self.make()
            caches = copy.deepcopy(earlier)
            logits = self.model(mx.array([[token]]), cache=caches)[0, 0]
            mx.eval(logits)
            self.references.append((logits, caches))
        return self.references[index][0]


@pytest.mark.parametrize("rolls_back", [True, False])
@pytest.mark.parametrize("subject", cases(SUBJECTS, *SUBJECTS.keys() - {"LayerCache"}))
def test_drafting_leaves_no_trace(
    subject: str, rolls_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any sequence of passes, drafts, rollbacks and turns the logits are those of caches
    that saw only the tokens that were kept, one at a time. A rollback that only counts is found
    out."""
    if not rolls_back:
        monkeypatch.setattr(Rollback, "rewind_to", only_counting)
    with nullcontext() if rolls_back else pytest.raises(AssertionError):
        run_state_machine_as_test(
            lambda: Speculation(subject),
            settings=settings(
                max_examples=10,
                stateful_step_count=12,
                deadline=None,
                derandomize=True,
                database=None,
                phases=[Phase.generate],  # a failing history is short enough to read as it is
                suppress_health_check=list(HealthCheck),
            ),
        )


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


def test_dropping_checkpoints_lets_go_of_every_buffer() -> None:
    tape = Rollback([KVCache(), RotatingKVCache(WINDOW), ArraysCache(1)])
    tape.checkpoint()
    tape.checkpoint()
    tape.drop_checkpoints()
    assert tape == Rollback(tape.caches)


@in_one_test("kind", [KVCache, type("HandleOn", (KVCache,), {})])
def test_going_back_copies_no_keys(kind: type[KVCache]) -> None:
    """A round over 8,192 cached tokens needs no second buffer; one handle on it, as is kept for a
    class that is not known, and it does."""
    kept = kind()
    tape = Rollback([kept])
    many, one_more = (mx.zeros((1, 1, n, 64)) for n in (8192 - 100, 5))
    mx.eval(kept.update_and_fetch(many, many), one_more)
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
