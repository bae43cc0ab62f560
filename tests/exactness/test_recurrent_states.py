"""Going back on recurrent models is a choice of states: nothing is fed again, to the last bit."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import cycle
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import ArraysCache, make_prompt_cache
from mlx_lm.models.gated_delta import gated_delta_update
from mlx_lm.models.ssm import ssm_update

import specdec_mlx as sd
import tiny
from lossless import PROMPT, plain_text
from scripted import OracleDrafter
from selection import FULL, cases, in_one_test
from specdec_mlx.batch.rounds import BatchGeneration
from specdec_mlx.batch.schedule import Request, Schedule
from specdec_mlx.caches import Rollback, leaves
from specdec_mlx.exactness import recurrent_states
from specdec_mlx.exactness.recurrent_states import MOST_POSITIONS, recurrent_states_of
from specdec_mlx.lab.probing import probe
from specdec_mlx.models import anatomy as watching
from specdec_mlx.options import Options

GATED_DELTA = ["qwen3_5", "qwen3_next", "kimi_linear", "kimi_k3", "olmo_hybrid", "bailing_moe_v3"]
MAMBA_2 = ["mamba2", "falcon_h1", "nemotron_h", "granitemoehybrid", "plamo2"]
SHORT_CONVOLUTIONS = ["lfm2", "lfm2_moe", "gear"]
KNOWN = GATED_DELTA + MAMBA_2 + SHORT_CONVOLUTIONS
UNKNOWN = ["jamba", "rwkv7", "recurrent_gemma", "baichuan_m1"]
ROUND_OTHERWISE = ["kimi_linear", "kimi_k3", "bailing_moe_v3", "gear"]
"""A single position rounds otherwise in their attention: its latent form, or the last one's window,
which then rotates."""

NAMED = ["qwen3_next", "mamba2", "falcon_h1", "lfm2"]

DRAFT = [28, 66, 31, 4, 87, 12, 53, 9]
FOLLOWING = [50, 23, 77]

built = cache(tiny.build)


def step(model: nn.Module, caches: list[Any], tokens: list[int]) -> mx.array:
    return mx.concatenate([model(mx.array([[token]]), cache=caches)[0] for token in tokens])


def passed(model: nn.Module, width: int) -> tuple[Rollback, mx.array]:
    """Caches after the prompt and a pass over so many draft positions, and its logits."""
    rollback = Rollback(make_prompt_cache(model))
    rollback.forward(model, mx.array(PROMPT[:-1]))
    rollback.states = recurrent_states_of(model)
    rollback.checkpoint()
    return rollback, rollback.forward(model, mx.array(DRAFT[:width]))


def is_as_stepped(
    model: nn.Module, rollback: Rollback, logits: mx.array, num_kept: int, tolerance: float = 0.0
) -> bool:
    """True if the first logits of a pass, and those that follow, are those of single tokens."""
    caches = make_prompt_cache(model)
    model(mx.array([PROMPT[:-1]]), cache=caches)
    expected = step(model, caches, [*DRAFT[:num_kept], *FOLLOWING])
    got = mx.concatenate([logits[:num_kept], step(model, rollback.caches, FOLLOWING)])
    return bool(mx.allclose(got, expected, rtol=tolerance, atol=tolerance).item())


HALF = [(name, mx.bfloat16) for name in ("qwen3_5", "mamba2", "lfm2")]
MODELS = [*((name, mx.float32) for name in KNOWN), *HALF]


@pytest.mark.parametrize(
    ("name", "dtype"), cases(MODELS, *((name, mx.float32) for name in NAMED), *HALF)
)
def test_any_number_kept_of_a_pass_is_as_if_no_more_had_been_fed(
    name: str, dtype: mx.Dtype
) -> None:
    """Logits of the pass and those that follow are bit-equal to one token at a time, in half
    precision too. A choice can be made again, of fewer positions."""
    model, tolerance = built(name, dtype), 1e-4 if name in ROUND_OTHERWISE else 0.0
    for width in (2, 5, MOST_POSITIONS) if name in NAMED and dtype == mx.float32 else (5,):
        for num_kept in range(1, width + 1):
            rollback, logits = passed(model, width)
            start = rollback.position - width
            for kept in (min(num_kept + 1, width), num_kept):
                assert rollback.rewind_to(start + kept) == start + kept, "nothing is fed again"
            assert is_as_stepped(model, rollback, logits, num_kept, tolerance)


DTYPES = (mx.bfloat16, mx.float16, mx.float32)
WIDE = [*zip(MAMBA_2, cycle(DTYPES), strict=False)]


@pytest.mark.parametrize(("name", "dtype"), cases(WIDE, ("granitemoehybrid", mx.bfloat16)))
def test_a_wide_pass_rounds_as_single_steps(name: str, dtype: mx.Dtype) -> None:
    """Logits of passes too wide for their states to be kept are bit-equal to single tokens', as
    the probe, which measures passes as they are made, says."""
    model, draft = built(name, dtype), DRAFT * 3
    caches, rollback = make_prompt_cache(model), Rollback(make_prompt_cache(model))
    for tape in (caches, rollback.caches):
        model(mx.array([PROMPT]), cache=tape)
    rollback.states = recurrent_states_of(model)
    assert mx.array_equal(rollback.forward(model, mx.array(draft)), step(model, caches, draft))
    assert all(row.bitwise for row in probe(model, widths=(2, MOST_POSITIONS + 1)).rows)


@cache
def quantized() -> nn.Module:
    """A recurrence that rounds otherwise makes its router choose other experts."""
    model = tiny.build("granitemoehybrid", mx.bfloat16)
    nn.quantize(model, 32, class_predicate=lambda _, m: isinstance(m, nn.Linear | nn.Embedding))
    return model


def repeated(begin: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(begin).integers(3, 93, 12).tolist() * 3
    return tokens


def plain(prompt: list[int], **options: Any) -> list[int]:
    generation = generate_step(mx.array(prompt), quantized(), max_tokens=60, **options)
    return [int(token) for token, _ in generation]


LOOK_UP = sd.PromptLookupDrafter(min_ngram=1)


@FULL
@pytest.mark.parametrize("begin", [9, 0])
def test_wide_drafts_change_no_expert_of_a_quantized_model(begin: int) -> None:
    """In bfloat16: the text is plain decoding's."""
    how: dict[str, Any] = {"num_draft_tokens": 13, "max_tokens": 60, "prefill_step_size": 1}
    items = list(sd.speculate(quantized(), repeated(begin), LOOK_UP, **how))
    assert [item.token for item in items] == plain(repeated(begin), prefill_step_size=1)
    assert items[-1].stats.drafted > 60


@FULL
def test_drafts_of_several_texts_change_no_expert_of_a_quantized_model() -> None:
    """In bfloat16, with texts of different lengths in a pass: each is plain decoding's."""
    prompts = [repeated(begin)[begin:] for begin in range(4)]
    batch = BatchGeneration(quantized(), LOOK_UP, Options(num_draft_tokens=13), Schedule(3))
    for prompt in prompts:
        batch.insert(Request(prompt, 60))
    texts: list[list[int]] = [[] for _ in prompts]
    for row in batch.run():
        texts[row.uid].append(row.token.token)
    assert texts == [plain(prompt) for prompt in prompts]


@in_one_test("name", ["qwen3_next", "mamba2", "lfm2"])
def test_states_of_a_pass_are_for_that_pass_alone(name: str) -> None:
    """After another one, and after a return to the checkpoint, the way back is the checkpoint;
    so is the way to none of its positions."""
    model = built(name)
    rollback, logits = passed(model, 5)
    start = rollback.position - 5
    assert rollback.rewind_to(start) == start
    assert is_as_stepped(model, rollback, logits, 0)
    rollback, _ = passed(model, 5)
    rollback.forward(model, mx.array(FOLLOWING[:1]))
    assert rollback.rewind_to(start + 5) == start
    rollback, _ = passed(model, 5)
    model(mx.array([FOLLOWING]), cache=rollback.caches)
    rollback.advance(len(FOLLOWING))
    assert rollback.rewind_to(start + 7) == start
    rollback.advance(2)
    assert rollback.rewind_to(start + 1) == start


def test_caches_that_are_padded_on_the_left_feed_again() -> None:
    """They give their recurrences a mask, as the pass that was watched had none."""
    model = built("mamba2")
    caches = [ArraysCache(2, left_padding=[1]) for _ in model.layers]
    rollback = Rollback(caches, states=recurrent_states_of(model))
    rollback.checkpoint()
    rollback.forward(model, mx.array(DRAFT))
    assert rollback.rewind_to(3) == 0


NUM_WRITTEN = 80


@cache
def long_text(name: str) -> list[int]:
    return plain_text(built(name), PROMPT, NUM_WRITTEN).tokens


def half_right(name: str, **options: Any) -> list[sd.generation.Token]:
    model = built(name)
    vocab_size = model(mx.array([[1]]), cache=make_prompt_cache(model)).shape[-1]
    drafter = OracleDrafter(long_text(name), vocab_size, wrong=0.5)
    options = {"max_tokens": NUM_WRITTEN, "num_draft_tokens": 4, **options}
    return list(sd.speculate(model, PROMPT, drafter, **options))


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "lfm2"])
def test_no_position_is_fed_again_in_a_generation(name: str) -> None:
    """The text is plain decoding's, and as much is fed as on a model with key-value caches."""
    items = half_right(name)
    assert [item.token for item in items] == long_text(name)
    stats, with_keys = items[-1].stats, half_right("llama")[-1].stats
    assert stats.replayed == 0
    assert 0.3 < stats.acceptance_rate < 0.7
    assert stats.rounds == with_keys.rounds
    assert stats.fed == with_keys.fed


@pytest.mark.parametrize("name", cases([*UNKNOWN, "mamba2"], "rwkv7", "mamba2"))
def test_other_recurrences_feed_again_what_was_kept(name: str) -> None:
    """As passes too wide for a known one do, and models that were not measured."""
    assert (recurrent_states_of(built(name)) is None) == (name in UNKNOWN)
    wide, unmeasured = {"num_draft_tokens": MOST_POSITIONS}, {"probe": False}
    for options in ({},) if name in UNKNOWN else (wide, unmeasured):
        items = half_right(name, **options)
        assert [item.token for item in items] == long_text(name)
        assert items[-1].stats.replayed > 0


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "lfm2"])
def test_a_wrong_choice_is_found_before_it_is_made(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that is late by one position: the model then feeds again."""

    def late(after: Any) -> Any:
        return lambda call, num_positions, slot: after(call, max(1, num_positions - 1), slot)

    for kind in (recurrent_states._Update, recurrent_states._Convolution):
        monkeypatch.setattr(kind, "after", late(kind.after))
    assert recurrent_states_of(tiny.build(name)) is None


def test_functions_are_mlx_lms_own_again_after_a_pass_and_after_an_exception(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And generations in two threads do not see each other."""
    model = built("qwen3_next")
    rollback, _ = passed(model, 5)
    before = step(model, rollback.caches, FOLLOWING)
    rollback = Rollback(make_prompt_cache(model), states=recurrent_states_of(model))
    rollback.checkpoint()
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(type(model.layers[-1].mlp), "__call__", lambda *args: 1 / 0)
        rollback.forward(model, mx.array(DRAFT))
    assert_nothing_is_swapped()
    assert rollback.position == 0
    assert all(cache.empty() for cache in leaves(rollback.caches))
    rollback, _ = passed(model, 5)
    assert mx.array_equal(step(model, rollback.caches, FOLLOWING), before)

    def write(_: int) -> tuple[list[int], int]:
        items = half_right("qwen3_next", stream=mx.new_stream(mx.cpu))
        return [item.token for item in items], items[-1].stats.replayed

    expected = long_text("qwen3_next")
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(write, range(2))) == [(expected, 0)] * 2
    assert_nothing_is_swapped()


def assert_nothing_is_swapped() -> None:
    for name in KNOWN:
        file = importlib.import_module(f"mlx_lm.models.{name}")
        for function in (gated_delta_update, ssm_update):
            assert getattr(file, function.__name__, function) is function
    assert not watching._num_passes
    assert watching._answers.get() is None
