"""What mlx-lm's own tests check of its calls, checked with the plugin in force.

On tiny models, with the target as its own draft model, and against the same call without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import (
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import specdec_mlx as sd
from selection import in_one_test
from specdec_mlx.mlx_lm_plugin import installed
from tiny_model_folder import write_model_folder

PROMPT = "the cat in the hat and the other cat in the hat"
MESSAGES = [{"role": "user", "content": PROMPT}]
WIDE_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}  # 32, a group of kv_bits
Pair = tuple[Any, Any]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    loaded = mlx_lm.load(str(write_model_folder(tmp_path_factory.mktemp("model"), **WIDE_HEADS)))
    return loaded[0], loaded[1]


@pytest.fixture
def speculation(pair: Pair) -> Iterator[Any]:
    """The plugin in force, with the target as its own draft model."""
    with installed(pair[0], draft_length=3) as in_force:
        yield in_force


def stock(pair: Pair, prompt: Any = PROMPT, **options: Any) -> str:
    """The text without the plugin."""
    return str(mlx_lm.generate(*pair, prompt, max_tokens=40, **options))


def with_plugin(pair: Pair, prompt: Any = PROMPT, **options: Any) -> str:
    """The text with it, which was drafted but for windows that keep their first tokens."""
    with installed(pair[0], draft_length=3) as speculation:
        text = stock(pair, prompt, **options)
        assert speculation.stats.accepted > 0 or "max_kv_size" in options
    return text


def test_a_logit_bias_decides(speculation: Any, pair: Pair) -> None:
    """A huge bias on one token makes it the whole text."""
    processors = make_logits_processors({pair[1].encode("h")[0]: 2000.0, 1: -20.0})
    for draft in ({}, {"draft_model": pair[0], "num_draft_tokens": 2}):
        options: dict[str, Any] = {"max_tokens": 7, "logits_processors": processors, **draft}
        assert mlx_lm.generate(*pair, "cat", **options) == "h" * 7


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 5])
def test_max_tokens_is_exact(num_tokens: int, speculation: Any, pair: Pair) -> None:
    """Also in the middle of a draft; and the last response says why it ended."""
    prompt = pair[1].apply_chat_template(MESSAGES, add_generation_prompt=True)
    for options in ({}, {"draft_model": pair[0], "num_draft_tokens": 3}):
        got = list(mlx_lm.stream_generate(*pair, prompt, max_tokens=num_tokens, **options))
        assert [r.finish_reason for r in got] == [None] * (num_tokens - 1) + ["length"]
        assert [r.generation_tokens for r in got] == list(range(1, num_tokens + 1))


def test_a_processor_has_seen_all_of_the_text(speculation: Any, pair: Pair) -> None:
    """The prompt at first; one more token a call; the last one in the end."""
    seen: list[list[int]] = []

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())
        return logits

    prompt = pair[1].encode(PROMPT)
    options: dict[str, Any] = {"max_tokens": 9, "logits_processors": [processor]}
    got = [r.token for r in mlx_lm.stream_generate(*pair, prompt, **options)]
    assert seen == [prompt + got[:n] for n in range(10)]


@in_one_test("pure", [False, True])
def test_a_costly_processor_is_called_no_more_than_positions_are_verified(
    pure: bool, pair: Pair
) -> None:
    """One call for each position that is judged; for one that remembers, each emitted token."""
    lengths: list[int] = []

    def costly(tokens: mx.array, logits: mx.array) -> mx.array:
        lengths.append(tokens.shape[0])
        return logits

    costly.pure = pure  # type: ignore[attr-defined]
    prompt, drafter = pair[1].encode(PROMPT), sd.PromptLookupDrafter(min_ngram=1)
    options = {"draft_length": 5, "logits_processors": [costly], "probe": False}
    stats = list(sd.speculate(pair[0], prompt, drafter, max_tokens=60, **options))[-1].stats
    assert stats.accepted < stats.drafted
    verified = stats.drafted + stats.target_passes
    if pure:
        assert len(lengths) == verified
    else:
        assert len(lengths) == stats.emitted + stats.cut < verified
        assert lengths == list(range(len(prompt), len(prompt) + len(lengths)))


SAMPLERS: list[dict[str, Any]] = [
    {"temp": 0.7},
    {"temp": 1.0, "top_p": 0.9},
    {"temp": 0.8, "top_k": 12, "min_p": 0.02},
    {"temp": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.1},
]


@pytest.mark.parametrize("arguments", SAMPLERS)
def test_samplers_draw_only_what_they_allow(
    arguments: dict[str, Any], speculation: Any, pair: Pair
) -> None:
    """Repeatably after `mx.random.seed`."""
    drawn = []
    for seed in (3, 3, 4):
        mx.random.seed(seed)
        sampler = make_sampler(**arguments)
        got = list(mlx_lm.stream_generate(*pair, PROMPT, max_tokens=25, sampler=sampler))
        for response in got:
            chosen = response.logprobs[response.token]
            rank = mx.sum(response.logprobs > chosen).item()
            assert chosen > -mx.inf
            assert rank < arguments.get("top_k", mx.inf)
        drawn.append([response.token for response in got])
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_sampler_of_the_callers_draws(speculation: Any, pair: Pair) -> None:
    token = pair[1].encode("h")
    options: dict[str, Any] = {"max_tokens": 5, "sampler": lambda logprobs: mx.array(token[:1])}
    assert mlx_lm.generate(*pair, PROMPT, **options) == "hhhhh"


@in_one_test("step", [2048, 5])
def test_input_embeddings_stand_for_the_prompt(step: int, pair: Pair) -> None:
    """Whole, and in chunks with progress for each."""
    ids = mx.array(pair[1].encode(PROMPT))
    progress: list[tuple[int, int]] = []
    options: dict[str, Any] = {
        "input_embeddings": pair[0].model.embed_tokens(ids),
        "prefill_step_size": step,
        "prompt_progress_callback": lambda done, total: progress.append((done, total)),
    }
    assert with_plugin(pair, ids, **options) == stock(pair)
    assert progress[-1] == (len(ids), len(ids))
    assert len(progress) >= len(ids) / step


@pytest.mark.parametrize("make", [make_prompt_cache, lambda model: rotating(model, 500)])
def test_a_prompt_cache_is_reused(make: Any, pair: Pair, tmp_path: Path) -> None:
    """Turn by turn, and trimmed back to try another answer, and through a file."""
    first, second = pair[1].encode(PROMPT), pair[1].encode(" and again the hat")
    caches, file = make(pair[0]), str(tmp_path / "cache.safetensors")
    with installed(pair[0], draft_length=3):
        mlx_lm.generate(*pair, first, max_tokens=1, prompt_cache=caches)
    assert {c.offset for c in caches} == {len(first) + 1}
    assert trim_prompt_cache(caches, 1) == 1
    save_prompt_cache(file, caches)
    for again in (load_prompt_cache(file), caches):
        assert with_plugin(pair, second, prompt_cache=again) == stock(pair, first + second)
        assert {c.offset for c in again} == {len(first + second) + 40}


def rotating(model: Any, size: int) -> list[RotatingKVCache]:
    return [RotatingKVCache(max_size=size) for _ in model.layers]


def test_a_cache_of_the_models_own_making_is_used(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model may say what caches it needs; a window of 4 makes another text."""
    wide = stock(pair)
    make = lambda self: rotating(self, 4)  # noqa: E731
    monkeypatch.setattr(type(pair[0]), "make_cache", make, raising=False)
    assert with_plugin(pair) == stock(pair) != wide


OPTIONS: list[dict[str, Any]] = [
    {"max_kv_size": 16},
    *(
        {"kv_bits": bits, "kv_group_size": 32, "quantized_kv_start": start}
        for bits in (4, 8)
        for start in (0, 20, 60)
    ),
]


@in_one_test("options", OPTIONS)
def test_bounded_and_quantized_caches(options: dict[str, Any], pair: Pair) -> None:
    """From the beginning, from the middle of the text on, and later."""
    assert with_plugin(pair, **options) == stock(pair, **options)


def test_batches_are_left_alone(speculation: Any, pair: Pair) -> None:
    """`batch_generate` has a loop of its own, in which nothing is drafted."""
    prompts = [pair[1].encode(f"{i} {PROMPT}") for i in range(3)]
    batched = mlx_lm.batch_generate(*pair, prompts, max_tokens=12)
    assert batched.texts == [mlx_lm.generate(*pair, prompt, max_tokens=12) for prompt in prompts]
