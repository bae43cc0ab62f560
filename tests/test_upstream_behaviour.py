"""What mlx-lm's own tests check of its calls, checked with the plugin in force.

On tiny models, with the target as its own draft model where one is wanted, and against what the
same call does without the plugin.
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
    can_trim_prompt_cache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from mlx_lm.sample_utils import make_logits_processors, make_sampler

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


@pytest.fixture
def stock(pair: Pair) -> Any:
    """The text of a stock call without the plugin, whatever is in force now."""
    from specdec_mlx.mlx_lm_plugin.compatible import generate_module

    def text(**options: Any) -> str:
        generate = generate_module()
        ours = {name: getattr(generate, name) for name in ("generate_step",)}
        generate.generate_step = getattr(
            ours["generate_step"], "__wrapped__", generate.generate_step
        )
        try:
            return str(mlx_lm.generate(*pair, **({"prompt": PROMPT, "max_tokens": 40} | options)))
        finally:
            generate.generate_step = ours["generate_step"]

    return text


def test_the_stock_text_without_the_plugin_is_stock(stock: Any, pair: Pair) -> None:
    """So that the comparisons below compare."""
    expected = mlx_lm.generate(*pair, prompt=PROMPT, max_tokens=40)
    with installed(draft_length=3) as speculation:
        assert stock() == expected
        assert speculation.stats is None


def test_a_logit_bias_decides(speculation: Any, pair: Pair) -> None:
    """A huge bias on one token makes it the whole text."""
    model, tokenizer = pair
    token = tokenizer.encode("h")[0]
    processors = make_logits_processors({token: 2000.0, 1: -20.0})
    options: dict[str, Any] = {"max_tokens": 7, "logits_processors": processors}
    assert mlx_lm.generate(model, tokenizer, "cat", **options) == "h" * 7
    draft = {"draft_model": model, "num_draft_tokens": 2}
    assert mlx_lm.generate(model, tokenizer, "cat", **options, **draft) == "h" * 7


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 5])
def test_max_tokens_is_exact(num_tokens: int, speculation: Any, pair: Pair) -> None:
    """Also in the middle of a draft; and the last response says why it ended."""
    prompt = pair[1].apply_chat_template(MESSAGES, add_generation_prompt=True)
    for options in ({}, {"draft_model": pair[0], "num_draft_tokens": 3}):
        got = list(mlx_lm.stream_generate(*pair, prompt, max_tokens=num_tokens, **options))
        assert len(got) == num_tokens
        assert [r.finish_reason for r in got] == [None] * (num_tokens - 1) + ["length"]
        assert [r.generation_tokens for r in got] == list(range(1, num_tokens + 1))


def test_a_processor_has_seen_all_of_the_text(speculation: Any, pair: Pair) -> None:
    """The prompt at first; one more token a call; the last one in the end."""
    seen: list[list[int]] = []

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())
        return logits

    prompt = pair[1].encode(PROMPT)
    got = [
        r.token
        for r in mlx_lm.stream_generate(*pair, prompt, max_tokens=9, logits_processors=[processor])
    ]
    assert seen == [prompt + got[:n] for n in range(10)]


class Costly:
    """A processor that counts its calls and remembers what it saw."""

    def __init__(self) -> None:
        self.calls = 0
        self.lengths: list[int] = []

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self.calls += 1
        self.lengths.append(tokens.shape[0])
        return logits


@in_one_test("pure", [False, True])
def test_a_costly_processor_is_called_no_more_than_positions_are_verified(
    pure: bool, pair: Pair
) -> None:
    """One call for each position that is judged; for one that remembers, each emitted token once.

    With a drafter that is often wrong, so that many positions are verified in vain.
    """
    import specdec_mlx as sd

    model, tokenizer = pair
    prompt = tokenizer.encode(PROMPT)
    costly = Costly()
    costly.pure = pure  # type: ignore[attr-defined]
    tokens = list(
        sd.speculate(
            *(model, prompt, sd.PromptLookupDrafter(min_ngram=1)),
            max_tokens=60,
            draft_length=5,
            logits_processors=[costly],
            probe=False,
        )
    )
    stats = tokens[-1].stats
    assert stats.accepted < stats.drafted
    verified = stats.drafted + stats.target_passes
    if pure:
        assert costly.calls == verified
    else:
        assert costly.calls == stats.emitted + stats.cut < verified
        assert costly.lengths == list(range(len(prompt), len(prompt) + costly.calls))


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
    """Repeatably after `mx.random.seed`, and with a sampler of the caller's own too."""
    drawn = []
    for seed in (3, 3, 4):
        mx.random.seed(seed)
        sampler = make_sampler(**arguments)
        got = list(mlx_lm.stream_generate(*pair, PROMPT, max_tokens=25, sampler=sampler))
        for response in got:
            allowed = make_sampler(**{**arguments, "temp": 0.0})
            assert response.logprobs[response.token] > -mx.inf
            if "top_k" in arguments:
                rank = mx.sum(response.logprobs > response.logprobs[response.token])
                assert rank.item() < arguments["top_k"]
            assert allowed(response.logprobs[None]).shape == (1,)
        drawn.append([response.token for response in got])
    assert drawn[0] == drawn[1] != drawn[2]
    least = mlx_lm.generate(
        *pair, PROMPT, max_tokens=5, sampler=lambda logprobs: mx.array([pair[1].encode("h")[0]])
    )
    assert least == "hhhhh"


def test_input_embeddings_stand_for_the_prompt(speculation: Any, stock: Any, pair: Pair) -> None:
    """Whole, and in chunks with progress for each."""
    model, tokenizer = pair
    ids = mx.array(tokenizer.encode(PROMPT))
    embeddings = model.model.embed_tokens(ids)
    progress: list[tuple[int, int]] = []
    for step in (2048, 5):
        text = mlx_lm.generate(
            *(model, tokenizer, ids),
            max_tokens=40,
            input_embeddings=embeddings,
            prefill_step_size=step,
            prompt_progress_callback=lambda done, total: progress.append((done, total)),
        )
        assert text == stock()
    assert progress[-1] == (len(ids), len(ids))
    assert len(progress) > len(ids) / 5


@pytest.mark.parametrize("cache", ["KVCache", "RotatingKVCache"])
def test_a_prompt_cache_is_reused(
    cache: str, speculation: Any, stock: Any, pair: Pair, tmp_path: Path
) -> None:
    """Turn by turn, and trimmed back to try another answer, and through a file."""
    model, tokenizer = pair
    make = {
        "KVCache": lambda: make_prompt_cache(model),
        "RotatingKVCache": lambda: [RotatingKVCache(max_size=500) for _ in model.layers],
    }[cache]
    first, second = tokenizer.encode(PROMPT), tokenizer.encode(" and again the hat")
    caches = make()
    mlx_lm.generate(model, tokenizer, first, max_tokens=1, prompt_cache=caches)
    assert {c.offset for c in caches} == {len(first) + 1}
    assert can_trim_prompt_cache(caches)
    trim_prompt_cache(caches, 1)
    save_prompt_cache(str(tmp_path / "cache.safetensors"), caches)
    expected = stock(prompt=first + second)
    for again in (load_prompt_cache(str(tmp_path / "cache.safetensors")), caches):
        text = mlx_lm.generate(model, tokenizer, second, max_tokens=40, prompt_cache=again)
        assert text == expected
        assert {c.offset for c in again} == {len(first + second) + 40}


def test_a_cache_of_the_models_own_making_is_used(
    speculation: Any, stock: Any, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model may say what caches it needs; a window of 4 makes another text."""
    model = pair[0]
    wide = stock()
    monkeypatch.setattr(
        type(model),
        "make_cache",
        lambda self: [RotatingKVCache(max_size=4) for _ in self.layers],
        raising=False,
    )
    narrow = stock()
    assert mlx_lm.generate(*pair, PROMPT, max_tokens=40) == narrow != wide


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_caches(bits: int, speculation: Any, stock: Any, pair: Pair) -> None:
    """From the beginning and from the middle of the text on."""
    for start in (0, 20, 60):
        options: dict[str, Any] = {
            "kv_bits": bits,
            "kv_group_size": 32,
            "quantized_kv_start": start,
        }
        assert mlx_lm.generate(*pair, PROMPT, max_tokens=40, **options) == stock(**options)


def test_a_bounded_cache(speculation: Any, stock: Any, pair: Pair) -> None:
    """`max_kv_size` is kept to."""
    expected = stock(max_kv_size=16)
    assert mlx_lm.generate(*pair, PROMPT, max_tokens=40, max_kv_size=16) == expected


def test_batches_are_left_alone(speculation: Any, pair: Pair) -> None:
    """`batch_generate` has a loop of its own, in which nothing is drafted."""
    from mlx_lm import batch_generate

    prompts = [pair[1].encode(f"{i} {PROMPT}") for i in range(3)]
    batched = batch_generate(*pair, prompts, max_tokens=12)
    single = [mlx_lm.generate(*pair, prompt, max_tokens=12) for prompt in prompts]
    assert batched.texts == single
