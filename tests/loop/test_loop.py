"""The loop on tiny models: exact lengths, exact caches, honest counts, clear errors."""

from __future__ import annotations

import copy
import functools
import inspect
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors

import scripted
import specdec_mlx as sd
import tiny
from lossless import noisy_copy
from scripted import PROMPT, plain, target
from selection import FULL, cases, in_one_test
from specdec_mlx import lab
from specdec_mlx import target as passes
from specdec_mlx.exactness.probe import places_of
from specdec_mlx.options import Options

VOCAB = 128
NUM_TOKENS = 24


def emitted(drafter: Any, prompt: Sequence[int] = PROMPT, **kwargs: Any) -> list[int]:
    kwargs.setdefault("max_tokens", NUM_TOKENS)
    kwargs.setdefault("num_draft_tokens", 4)
    return [t.token for t in sd.speculate(kwargs.pop("model", target()), prompt, drafter, **kwargs)]


def oracle(wrong: float = 0.0, num_tokens: int = NUM_TOKENS + 10) -> scripted.OracleDrafter:
    return scripted.OracleDrafter(plain(num_tokens=num_tokens), VOCAB, wrong=wrong)


def best_of_everything(model: nn.Module) -> Any:
    look_ups = sd.PromptLookupDrafter(min_ngram=1), sd.NGramDrafter()
    draft_model = sd.ModelDrafter(tiny.build("qwen2", seed=7))
    return sd.BestOf(*look_ups, lab.StochasticNGramDrafter(), draft_model)


DRAFTERS: dict[str, Callable[[nn.Module], Any]] = {
    "none": lambda model: None,
    "prompt lookup": lambda model: sd.PromptLookupDrafter(min_ngram=1),
    "suffix": lambda model: sd.SuffixDrafter(sd.Memory()),
    "stochastic n-gram": lambda model: lab.StochasticNGramDrafter(),
    "itself": sd.ModelDrafter,
    "another model": lambda model: sd.ModelDrafter(tiny.build("qwen2", seed=7)),
    "best of everything": best_of_everything,
    "cascade": lambda model: lab.Cascade(sd.ModelDrafter(model), "suffix", num_first=1),
}
"""Every kind of built-in drafter, made for a target."""


@pytest.mark.parametrize("bits", [None, pytest.param(4, marks=FULL)])
@in_one_test("name", DRAFTERS)
def test_greedy_text_is_the_targets_own(name: str, bits: int | None) -> None:
    """Any drafter, any K: the tokens are those of `mlx_lm.generate_step`, one by one."""
    model = target(bits=bits)
    for prompt, length in ((PROMPT, 4), ([7], 1), ([1, 2, 3] * 12, "auto")):
        how: dict[str, Any] = {"model": model, "num_draft_tokens": length}
        assert emitted(DRAFTERS[name](model), prompt, **how) == plain(NUM_TOKENS, prompt, model)


@in_one_test(("name", "replays"), [("mamba", True), ("mamba2", False), ("qwen2", False)])
def test_recurrent_caches_feed_again_what_was_kept_and_make_no_extra_pass(name, replays):
    """After a rejection the accepted tokens join the next pass, and are counted; unless states
    can be chosen among, as those of Mamba-2. Counts add up wherever the last block is cut.
    """
    drafter = scripted.OracleDrafter(plain(model=target(name), num_tokens=40), VOCAB, 0.4)
    for num_tokens in (1, 2, 7, 8, 9, NUM_TOKENS):
        options = {"max_tokens": num_tokens, "num_draft_tokens": 4}
        *_, last = sd.speculate(target(name), PROMPT, drafter, **options)
        stats = last.stats
        assert stats.emitted == num_tokens
        assert stats.emitted + stats.cut == stats.accepted + stats.target_passes
        assert stats.fed == stats.target_passes + stats.drafted + stats.replayed
    assert (stats.replayed > 0) == replays


@in_one_test("length", [1, 3, 5])
def test_an_oracle_yields_k_plus_one_tokens_a_pass(length: int) -> None:
    """And a drafter that is always wrong one; each token's origin says so."""
    options = {"max_tokens": 1 + 4 * (length + 1), "num_draft_tokens": length}
    tokens = list(sd.speculate(target(), PROMPT, oracle(), **options))
    stats = tokens[-1].stats
    assert (stats.target_passes, stats.accepted) == (1 + 4, 4 * length)
    assert [t.origin for t in tokens] == ["plain", *[*["draft"] * length, "bonus"] * 4]
    tokens = list(sd.speculate(target(), PROMPT, oracle(wrong=1.1), **options))
    assert [t.token for t in tokens] == plain(num_tokens=len(tokens))
    assert [t.origin for t in tokens] == ["plain", *["correction"] * (len(tokens) - 2), "plain"]
    assert tokens[-1].stats.target_passes == len(tokens)


KV_BITS = {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 4}
BOTH = [(name, {}) for name in ("gemma3n", "gemma4_text", "nanbeige", "afm7", "qwen2")]
BOTH += [("qwen2", KV_BITS)]


@pytest.mark.parametrize(("name", "options"), cases(BOTH, *BOTH[3:]))
def test_caches_of_target_and_draft_model_may_come_in_one_list(name: str, options: Any) -> None:
    """Told apart by their number, which need not be that of layers. They end at prompt and emitted,
    whatever the last token was; with kv_bits the target's are quantized."""
    heads_of_32 = {"hidden_size": 128} if name == "qwen2" else {}
    model, draft = tiny.build(name, **heads_of_32), noisy_copy(name, 0.1, **heads_of_32)
    assert (len(make_prompt_cache(model)) == len(model.layers)) == (name == "qwen2")
    for num_tokens in range(1, 9) if name == "qwen2" else [24]:
        caches = make_prompt_cache(model) + make_prompt_cache(draft)
        how = options | {"model": model, "max_tokens": num_tokens, "prompt_cache": caches}
        assert emitted(sd.ModelDrafter(draft), **how) == plain(num_tokens, model=model, **options)
        if name == "qwen2":
            assert {cache.offset for cache in caches} == {len(PROMPT) + num_tokens}
    assert isinstance(caches[0], QuantizedKVCache) == bool(options)


def test_a_draft_model_goes_on_with_states_that_grow_with_the_text() -> None:
    """LongCat keeps its latest tokens in a state, which has fewer of them in a short text."""
    model, draft = tiny.build("longcat_flash_ngram"), noisy_copy("longcat_flash_ngram", 0.1)
    caches, theirs = make_prompt_cache(model) + make_prompt_cache(draft), make_prompt_cache(model)
    for prompt in ([5], [6, 7]):
        got = emitted(sd.ModelDrafter(draft), prompt, model=model, prompt_cache=caches)
        assert got == plain(NUM_TOKENS, prompt, model, prompt_cache=theirs)


PENALTIES: list[dict[str, Any]] = [
    *({"repetition_penalty": 1.8, "repetition_context_size": size} for size in (0, 1, 6, 20)),
    {"presence_penalty": 0.8, "logit_bias": {3: 4.0, 9: -3.0}},
    {"frequency_penalty": 0.9, "frequency_context_size": 7},
]


@in_one_test(
    ("penalties", "length", "pure"),
    [*product(PENALTIES, [4], [True, False]), (PENALTIES[0], 0, True), (PENALTIES[-1], 0, False)],
)
def test_processors_see_what_they_would_see_in_plain_decoding(penalties, length, pure):
    """mlx-lm's own as far back as they look, a callable of the caller's the whole text."""
    made, histories = make_logits_processors(**penalties), []
    expected = plain(logits_processors=made)
    assert expected != plain() or penalties.get("repetition_context_size") == 1

    def opaque(tokens: mx.array, logits: mx.array) -> mx.array:
        histories.append(tokens.tolist())
        for processor in made:
            logits = processor(tokens, logits)
        return logits

    drafter = scripted.OracleDrafter(expected, VOCAB, wrong=0.3)
    processors = made if pure else [opaque]
    got = emitted(drafter, logits_processors=processors, num_draft_tokens=length)
    assert got == expected
    if not pure:
        text = [*PROMPT, *expected]
        assert histories == [text[:n] for n in range(len(PROMPT), len(PROMPT) + len(histories))]
        assert len(histories) in (
            NUM_TOKENS,
            NUM_TOKENS + 1,
        )  # the last block may reach one past max_tokens


def test_a_sampler_with_a_memory_is_called_as_in_plain_decoding() -> None:
    """An opaque sampler sees one row [1, V] at a time, in order, and none twice."""

    def make_stateful() -> Callable[[mx.array], mx.array]:
        calls = iter(range(10_000))

        def sampler(logprobs: mx.array) -> mx.array:
            assert logprobs.shape == (1, VOCAB)
            return mx.argsort(-logprobs, axis=-1)[:, next(calls) % 3]

        return sampler

    expected = plain(sampler=make_stateful(), num_tokens=NUM_TOKENS)
    drafter = scripted.OracleDrafter(expected, VOCAB, wrong=0.4)
    assert emitted(drafter, sampler=make_stateful()) == expected


@in_one_test("start", [0, 10, 14, 1000])
def test_kv_quantization_sets_in_at_the_same_token(start: int) -> None:
    options: dict[str, Any] = {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": start}
    model = tiny.build("llama", head_dim=32, layer_types=["full_attention"] * 3)
    expected = plain(model=model, num_tokens=40, **options)
    caches = make_prompt_cache(model)
    drafter = scripted.OracleDrafter(expected, VOCAB, wrong=0.3)
    got = emitted(drafter, model=model, max_tokens=40, prompt_cache=caches, **options)
    assert got == expected
    assert all(isinstance(cache, QuantizedKVCache) == (start < 1000) for cache in caches)


def of_one_token(wide_heads: nn.Module) -> None:
    """The first pass reads a prompt of one token, and no cache is quantized before it."""
    how = {**KV_BITS, "quantized_kv_start": 0}
    expected = plain(8, [5], wide_heads, **how)
    drafter = scripted.OracleDrafter(expected, VOCAB)
    assert emitted(drafter, [5], model=wide_heads, max_tokens=8, **how) == expected


def of_caches_that_were_not_quantized(wide_heads: nn.Module) -> None:
    """A later turn quantizes caches of an earlier turn after its first pass, as mlx-lm."""
    earlier = make_prompt_cache(wide_heads)
    emitted(None, model=wide_heads, prompt_cache=earlier)
    for prompt in ([5], [5, 6, 7, 8]):
        expected = plain(8, prompt, wide_heads, prompt_cache=copy.deepcopy(earlier), **KV_BITS)
        for drafter in (None, scripted.OracleDrafter(expected, VOCAB)):
            how = {**KV_BITS, "max_tokens": 8, "prompt_cache": copy.deepcopy(earlier)}
            assert emitted(drafter, prompt, model=wide_heads, **how) == expected


def of_a_text_that_is_left_before(wide_heads: nn.Module) -> None:
    """Tokens of a round may come before the start, and those after it were not handed out."""
    start = len(PROMPT) + 6
    how = {**KV_BITS, "quantized_kv_start": start}
    drafter = scripted.OracleDrafter(plain(24, model=wide_heads, **how), VOCAB)
    for num_tokens in range(1, 10):
        caches = make_prompt_cache(wide_heads)
        text = sd.speculate(wide_heads, PROMPT, drafter, prompt_cache=caches, **how)
        for _ in range(num_tokens):
            next(text)
        text.close()
        is_quantized = len(PROMPT) + num_tokens >= start
        assert isinstance(caches[0], QuantizedKVCache) == is_quantized, num_tokens


@in_one_test(
    "check", [of_one_token, of_caches_that_were_not_quantized, of_a_text_that_is_left_before]
)
def test_caches_are_quantized_where_plain_decoding_quantizes_them(check: Any) -> None:
    check(tiny.build("llama", head_dim=32, layer_types=["full_attention"] * 3))


def test_one_host_synchronisation_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token is handed out before the second round is read."""
    waits, wait = [], mx.eval
    drafter = sd.ModelDrafter(target())
    stream = sd.speculate(target(), PROMPT, drafter, max_tokens=20, num_draft_tokens=4)
    next(stream)
    monkeypatch.setattr(mx, "eval", lambda *a: waits.append("eval") or wait(*a))
    monkeypatch.setattr(passes, "to_list", lambda a: waits.append("to_list"))
    *_, last = stream
    assert waits == ["eval"] * (last.stats.target_passes - 1)


@in_one_test(
    ("prompt", "words"),
    [([], "at least one token"), ([1, 2, VOCAB], "tokenizer"), ([1, -2], ">= 0")],
)
def test_a_prompt_that_the_target_cannot_read_is_refused(prompt: list[int], words: str) -> None:
    with pytest.raises(sd.errors.PromptError, match=words):
        sd.speculate(target(), prompt)


def test_logits_that_are_not_numbers_are_refused_but_where_they_were_rejected() -> None:
    """LogitsError at the token where it happens; the tokens before it stand, the caches too."""

    def fails(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits * mx.nan if len(tokens) == len(PROMPT) + 5 else logits

    def fails_after_7(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits * mx.nan if 7 in tokens.tolist()[-2:] else logits

    fails_after_7.pure = True  # type: ignore[attr-defined]
    assert 7 not in plain()
    drafter = scripted.ScriptedDrafter(lambda emitted, limit: [7] * limit)
    assert emitted(drafter, logits_processors=[fails_after_7]) == plain()
    for fails.pure in (False, True):  # type: ignore[attr-defined]
        caches, got = make_prompt_cache(target()), []
        options: dict[str, Any] = {"logits_processors": [fails], "prompt_cache": caches}
        with pytest.raises(sd.errors.LogitsError, match="not finite"):
            for item in sd.speculate(target(), PROMPT, oracle(), num_draft_tokens=4, **options):
                got.append(item.token)
        assert {c.offset for c in caches} == {len(PROMPT) + len(got)}
        assert got == plain()[: len(got)]


def test_input_embeddings_give_plain_decodings_text() -> None:
    model = target()
    embeddings = model.model.embed_tokens(mx.array(PROMPT[::-1]))
    expected = plain(input_embeddings=embeddings)
    assert expected != plain()
    assert emitted(oracle(0.3), input_embeddings=embeddings) == expected
    assert emitted(None, [], input_embeddings=embeddings) == expected
    with pytest.raises(sd.errors.PromptError, match="drafter=None"):
        emitted(oracle(), [], input_embeddings=embeddings)
    with pytest.raises(sd.errors.PromptError, match="one row a token"):
        emitted(None, [1], input_embeddings=embeddings)


def test_defaults_and_progress_are_mlx_lms() -> None:
    """Of the arguments that both take; and the callback hears of a prompt what theirs does."""
    ours, theirs = (inspect.signature(f).parameters for f in (Options, generate_step))
    both = ours.keys() & theirs.keys() - {"prompt", "model", "stream"}
    assert len(both) > 9
    assert {n: ours[n].default for n in both} == {n: theirs[n].default for n in both}
    heard: list[list[tuple[int, int]]] = [[], []]
    options: dict[str, Any] = {"max_tokens": 3, "prefill_step_size": 2}
    prompt = mx.array(PROMPT)
    for step, calls in ((generate_step, heard[0]), (sd.speculate, heard[1])):
        noted = functools.partial(lambda calls, *done: calls.append(done), calls)
        given = (prompt, target()) if step is generate_step else (target(), prompt)
        list(step(*given, prompt_progress_callback=noted, **options))
    assert heard[0] == heard[1]


def test_a_plain_text_costs_no_probe_and_its_prompt_is_timed() -> None:
    model, began = tiny.build("qwen2"), time.perf_counter()
    *_, last = sd.speculate(model, PROMPT, max_tokens=3)
    assert id(model) not in places_of._values
    assert 0 < last.stats.prefill_seconds < time.perf_counter() - began
