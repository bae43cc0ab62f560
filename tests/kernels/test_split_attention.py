"""Split attention: the values of one call, where a race finds it faster, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import product
from threading import Barrier
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import base, qwen2
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import QuantizedKVCache

import tiny
from scripted import PROMPT, OracleDrafter, plain, target
from selection import in_one_test
from specdec_mlx.caches import Rollback
from specdec_mlx.kernels import split_attention
from specdec_mlx.kernels.split_attention import FEWEST, MOST, MOST_IN_CALL, SplitAttention, split
from specdec_mlx.loop import speculate
from specdec_mlx.models import anatomy
from specdec_mlx.options import Options
from specdec_mlx.target import Verifier

LENGTH = 40
attention = base.scaled_dot_product_attention


class AlwaysFaster(dict[Any, bool]):
    """Results of races that parts have always won."""

    def __contains__(self, shape: object) -> bool:
        return True

    def get(self, *shape: Any) -> Any:
        return True


def splitting() -> SplitAttention:
    return SplitAttention(faster=AlwaysFaster())


@pytest.fixture
def short_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes over tiny texts are cut too."""
    monkeypatch.setattr(split_attention, "LONG", 1)


def normal(*shape: int, key: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(key))


def mask_of(kind: str, rows: int) -> Any:
    seen = create_causal_mask(rows, LENGTH - rows)
    rounded = normal(2, 8, rows, LENGTH, key=9)
    return {
        "none": None,
        "causal": "causal",
        "boolean": seen,
        "window": create_causal_mask(rows, LENGTH - rows, window_size=7),
        "additive": mx.where(seen, 0.0, -1e9),
        "scores of heads": mx.where(seen, rounded, -mx.inf),
        "padding": mx.broadcast_to(mx.arange(LENGTH) > 3, (2, 1, 1, LENGTH)),
        "texts": mx.stack([seen, seen & (mx.arange(LENGTH) > 2)])[:, None],
    }[kind]


MASKS = "none", "causal", "boolean", "window", "additive", "scores of heads", "padding", "texts"


def call_of(rows: int, mask: str, kv_heads: int, bits: int | None, sinks: bool) -> dict[str, Any]:
    keys, values = normal(2, kv_heads, LENGTH, 32, key=1), normal(2, kv_heads, LENGTH, 32, key=2)
    cache: Any = None
    if bits is not None:
        cache = QuantizedKVCache(group_size=32, bits=bits)
        keys, values = cache.update_and_fetch(keys, values)
    return {
        "queries": normal(2, 8, rows, 32),
        "keys": keys,
        "values": values,
        "cache": cache,
        "scale": 0.3,
        "mask": mask_of(mask, rows),
        "sinks": normal(8, key=3) if sinks else None,
    }


KINDS = [(None, False), (None, True), (4, False), (8, False)]
"""Bits of quantized keys and values, and whether there are sinks."""

SHAPES = [*product([6], MASKS), *product(range(FEWEST, MOST + 1), ["causal", "boolean"])]


@in_one_test(
    ("rows", "mask", "kv_heads", "kind"),
    [
        (rows, mask, kv_heads, kind)
        for (rows, mask), kv_heads, kind in product(SHAPES, (8, 2, 1), KINDS)
        # mlx-lm's quantized attention takes no such masks with grouped heads
        if kind[0] is None or kv_heads == 8 or mask in ("none", "causal", "boolean", "window")
    ],
)
def test_parts_have_the_values_of_one_call(
    rows: int, mask: str, kv_heads: int, kind: tuple[int | None, bool]
) -> None:
    """To 1e-6 in float32: every mask, grouped heads, sinks, quantized keys and values."""
    sizes = []

    def counted(**call: Any) -> mx.array:
        sizes.append(call["queries"].shape[2])
        return attention(**call)

    whole = attention(**call_of(rows, mask, kv_heads, *kind))
    parts = split(counted, call_of(rows, mask, kv_heads, *kind))
    assert sum(sizes) == rows
    assert len(sizes) > 1
    assert max(sizes) <= MOST_IN_CALL
    assert float(mx.abs(whole - parts).max()) <= 1e-6 * max(1.0, float(mx.abs(whole).max()))


def wide_logits(
    model: Any, kernels: SplitAttention | None, parents: list[int] | None = None, **how: Any
) -> mx.array:
    """Logits of a pass over 9 rows after 24 tokens, the last 6 of them a tree if it has parents."""
    options = Options(kernels=kernels, **how)
    # with the probe, recurrences are replaced in the same pass
    verifier = Verifier(model, Rollback.of(model), options, probe=True)
    verifier.feed(mx.arange(1, 25))
    logits = verifier.feed(mx.arange(30, 39), parents=parents, in_round=True)
    mx.eval(logits)
    return logits


PASSES = [
    *((name, {}) for name in ("llama", "gpt_oss", "deepseek_v3", "llama4", "gemma3_text")),
    *((name, {}) for name in ("qwen3_next", "falcon_h1", "qwen2", "cohere2")),
    ("qwen2", {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}),
    ("qwen2", {"parents": [-1, -1, 0, 0, 1, 2]}),
    ("gpt_oss", {"parents": [-1, -1, 0, 0, 1, 2]}),
]


@pytest.mark.parametrize(("name", "how"), PASSES)
def test_a_model_computes_the_same_logits_in_parts(
    name: str, how: dict[str, Any], short_is_long: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, sinks, latent attention, chunks, hybrids, quantized caches and trees."""
    num_parts = []

    def counted(function: Any, call: dict[str, Any]) -> mx.array:
        num_parts.append(call["queries"].shape[2])
        return split(function, call)

    monkeypatch.setattr(split_attention, "split", counted)
    wide = {"num_attention_heads": 2, "num_key_value_heads": 1}  # 32, a group of kv_bits
    model = tiny.build(name, **wide) if "kv_bits" in how else target(name)
    whole, parts = (wide_logits(model, kernels, **how) for kernels in (None, splitting()))
    assert 9 in num_parts
    assert float(mx.abs(whole - parts).max()) < 1e-4 * float(mx.abs(whole).max())


def test_functions_are_mlx_lms_own_after_a_pass_and_after_an_exception(short_is_long: None) -> None:
    """Also if the attention itself raises."""
    model, kernels = target("qwen2"), splitting()

    def failing(function: Any, args: Any, more: Any) -> None:
        raise ZeroDivisionError

    wide_logits(model, kernels)
    assert qwen2.scaled_dot_product_attention is attention
    kernels._attend = failing  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        wide_logits(model, kernels)
    assert qwen2.scaled_dot_product_attention is attention
    assert not anatomy._num_passes


def test_a_thread_without_kernels_is_not_affected_by_a_thread_with_kernels(
    short_is_long: None,
) -> None:
    """Both are inside a pass at the same time."""
    model, meet = target("qwen2"), Barrier(2, timeout=60)
    calls: dict[str, int] = {"with": 0, "without": 0}

    class Met(SplitAttention):
        def _attend(self, *call: Any) -> Any:
            if not calls["with"]:
                meet.wait()
            calls["with"] += 1
            return super()._attend(*call)

    def write(who: str) -> mx.array:
        with mx.stream(mx.new_stream(mx.cpu)):
            if who == "with":
                return wide_logits(model, Met(faster=AlwaysFaster()))
            meet.wait()  # the other thread is within its pass now
            return wide_logits(model, None)

    with ThreadPoolExecutor(2) as pool:
        parts, whole = pool.map(write, calls)
    assert calls == {"with": 2 * len(model.layers) // 2, "without": 0}
    assert mx.allclose(parts, whole, atol=1e-4)
    assert qwen2.scaled_dot_product_attention is attention


class MachineOfRows:
    """Scripted clock: a call of attention takes a time by its rows, and computes zeros."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.now, self.seconds = 0.0, seconds

    def attention(
        self, queries: Any, keys: Any, values: Any, cache: Any, scale: Any, mask: Any
    ) -> mx.array:
        self.now += self.seconds(queries.shape[2])
        return mx.ones_like(queries)


CLIFF = {rows: 0.5 * rows if rows <= 5 else 7.5 for rows in range(1, 16)}
"""Milliseconds of a call at 32,000 positions on a chip whose kernel takes at most 5 rows."""

FLAT = dict.fromkeys(range(1, 16), 1.0)
LINEAR = {rows: 0.2 + 0.5 * rows for rows in range(1, 16)}
NEARLY = {rows: 2.0 if rows > 5 else 0.97 for rows in range(1, 16)}
"""Parts would win by 3 percent, which may be an accident."""


@in_one_test(
    ("costs", "is_split"), [(CLIFF, True), (FLAT, False), (LINEAR, False), (NEARLY, False)]
)
def test_a_race_chooses_the_faster_way(costs: dict[int, float], is_split: bool) -> None:
    """By a scripted clock, and calls of 8 rows: one of them, or two of 4."""
    machine = MachineOfRows(costs.__getitem__)
    kernels = SplitAttention(clock=lambda: machine.now)
    length = 4096
    call: dict[str, Any] = {
        "queries": normal(1, 4, 8, 8),
        "keys": normal(1, 2, length, 8),
        "values": normal(1, 2, length, 8),
        "cache": None,
        "scale": 1.0,
        "mask": "causal",
    }

    def seconds_of_a_call() -> float:
        before = machine.now
        kernels._attend(machine.attention, (), call)
        return machine.now - before

    assert seconds_of_a_call() == pytest.approx(costs[8])  # nothing is measured yet
    kernels.measure()
    assert seconds_of_a_call() == pytest.approx(2 * costs[4] if is_split else costs[8])
    assert seconds_of_a_call() <= costs[8]
    # another class of contexts, and another number of rows, have races of their own
    for change in ({"keys": normal(1, 2, 2 * length, 8)}, {"queries": normal(1, 4, 9, 8)}):
        kernels._attend(machine.attention, (), call | change)
        assert len(kernels._races) == 1
        kernels._races.clear()


def test_parts_with_other_values_are_left_out() -> None:
    """A model's attention that does not treat rows alone."""
    machine = MachineOfRows(CLIFF.__getitem__)

    def attention_to_rows(queries: Any, keys: Any, values: Any, cache: Any, scale: Any, mask: Any):
        machine.attention(queries, keys, values, cache, scale, mask)
        return queries - queries.mean(axis=2, keepdims=True)

    kernels = SplitAttention(clock=lambda: machine.now)
    keys = normal(1, 2, 4096, 8)
    kernels._attend(attention_to_rows, (normal(1, 4, 8, 8), keys, keys, None, 1.0, None), {})
    kernels.measure()
    assert [*kernels.faster.values()] == [False]


def test_narrow_passes_and_short_contexts_enter_nothing() -> None:
    """Below 6 rows and below 4,096 positions the model's functions stay as they are."""
    for rows, context in ((5, 100_000), (8, 4095)):
        with SplitAttention().around(target(), rows, context):
            assert qwen2.scaled_dot_product_attention is attention
    with SplitAttention().around(target(), 6, 4096):
        assert qwen2.scaled_dot_product_attention is not attention
    assert qwen2.scaled_dot_product_attention is attention


def test_races_run_after_the_first_token_and_move_no_random_state(
    short_is_long: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a text of 8 tokens, which is drafted at once. Texts stay the target's own."""
    events: list[str] = []
    kernels = SplitAttention()
    race = kernels._race

    def noted(*args: Any) -> bool:
        events.append("race")
        return race(*args)

    monkeypatch.setattr(kernels, "_race", noted)
    text, state = plain(30), mx.random.state[0].tolist()  # type: ignore[index]
    oracle = OracleDrafter(text, 128)
    options: dict[str, Any] = {"num_draft_tokens": 8, "kernels": kernels, "seed": 1}
    for length in (8, 30):
        events.clear()
        kernels.faster.clear()
        with closing(speculate(target(), PROMPT, oracle, max_tokens=length, **options)) as tokens:
            for token in tokens:
                assert token.token == text[events.count("token")]
                events.append("token")
        assert events.count("token") == length
        assert "race" in events
        assert events.index("token") == 0
    assert mx.random.state[0].tolist() == state  # type: ignore[index]
    assert kernels.faster


def test_the_race_takes_quantized_keys_and_sinks() -> None:
    """It makes arrays of the shapes that the pass had."""
    for bits, sinks in KINDS:
        kernels, call = SplitAttention(), call_of(8, "boolean", 8, bits, sinks)
        for name in ("keys", "values"):
            long: Any = normal(2, 8, 4096, 32)
            if bits is not None:
                long = mx.quantize(long, group_size=32, bits=bits)
            call[name] = long
        call["mask"] = create_causal_mask(8, 4088)
        kernels._attend(attention, (), call)
        kernels.measure()
        assert len(kernels.faster) == 1
