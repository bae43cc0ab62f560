"""What goes wrong in the speculation of mlx-lm 0.32.2, row by row: ours does it right."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    QuantizedKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)

import scripted
import specdec_mlx as sd
import tiny
from selection import FULL, in_one_test

PROMPT = [5, 17, 99, 3, 64, 17, 99, 42, 5, 17]
NUM_TOKENS = 60  # enough to fill the windows of 16 tokens and go on


@cache
def model(name: str = "qwen2", seed: int = 0) -> nn.Module:
    return tiny.build(name, seed=seed)


def plain(
    target: nn.Module, prompt: Sequence[int] = PROMPT, num_tokens: int = NUM_TOKENS, **options: Any
) -> list[int]:
    """What mlx-lm writes without speculation."""
    steps = generate_step(mx.array(prompt), target, max_tokens=num_tokens, **options)
    return [int(token) for token, _ in steps]


def oracle(target: nn.Module, wrong: float = 0.3) -> scripted.OracleDrafter:
    """A drafter that knows the text and errs in a share of positions."""
    return scripted.OracleDrafter(plain(target, num_tokens=NUM_TOKENS + 10), 128, wrong)


def ours(
    target: nn.Module, drafter: Any, prompt: Sequence[int] = PROMPT, **options: Any
) -> list[int]:
    options = {"max_tokens": NUM_TOKENS, "draft_length": 4} | options
    return [t.token for t in sd.speculate(target, prompt, drafter, **options)]


def test_row_5_a_draft_length_of_0_keeps_the_processors_history() -> None:
    """Each processor sees the prompt and all that was emitted, also when nothing is drafted."""
    target, prompt = model(), PROMPT[:1]
    seen: list[int] = []

    def spy(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.size)
        return logits

    text = ours(target, oracle(target), prompt, draft_length=0, logits_processors=[spy])
    assert text == plain(target, prompt)
    assert seen[:20] == list(range(1, 21))


def test_row_6_a_prompt_cache_may_be_the_targets_alone(tmp_path: Path) -> None:
    """Such as one from a prompt-cache file."""
    target, file = model(), str(tmp_path / "prompt.safetensors")
    caches = make_prompt_cache(target)
    plain(target, PROMPT[:6], 0, prompt_cache=caches)
    save_prompt_cache(file, caches)
    for drafter in (sd.ModelDrafter(model(seed=7)), sd.PromptLookupDrafter(min_ngram=1)):
        text = ours(target, drafter, PROMPT[6:], prompt_cache=load_prompt_cache(file))
        assert text == plain(target)


@in_one_test("name", ["gemma3n", "gemma4_text", "afm7", "nanbeige"])
def test_row_7_a_model_may_make_more_or_fewer_caches_than_it_has_layers(name: str) -> None:
    """Target's and draft model's caches in one list are told apart by how many there are."""
    target = model(name)
    both = make_prompt_cache(target) + make_prompt_cache(target)
    assert len(make_prompt_cache(target)) != len(target.layers)
    text = ours(target, sd.ModelDrafter(target), max_tokens=24, prompt_cache=both)
    assert text == plain(target, num_tokens=24)


def test_row_8_the_callers_caches_are_the_quantized_ones() -> None:
    """With kv_bits the caller's list ends with what was generated with."""
    target = tiny.build("qwen2", hidden_size=128)  # heads of 32
    options: dict[str, Any] = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 4}
    caches = make_prompt_cache(target) + make_prompt_cache(target)
    text = ours(target, sd.ModelDrafter(target), prompt_cache=caches, max_tokens=20, **options)
    assert text == plain(target, num_tokens=20, **options)
    mine = caches[: len(make_prompt_cache(target))]
    assert all(isinstance(c, QuantizedKVCache) for c in mine)
    assert {c.offset for c in mine} == {len(PROMPT) + 20}


@in_one_test("num_tokens", range(1, 9))
def test_rows_9_and_10_both_caches_end_at_prompt_and_emitted(num_tokens: int) -> None:
    """Whatever the last token was, so a second turn needs nothing but its own tokens."""
    target, draft = model(), model(seed=7)
    caches = make_prompt_cache(target) + make_prompt_cache(draft)
    text = ours(target, sd.ModelDrafter(draft), prompt_cache=caches, max_tokens=num_tokens)
    assert {c.offset for c in caches} == {len(PROMPT) + len(text)}


class Interrupted(nn.Module):
    """A draft model that is interrupted in its n-th pass after the prompt."""

    def __init__(self, inner: Any, after: int) -> None:
        super().__init__()
        self.inner, self.left = inner, after
        self.layers = inner.layers

    def __call__(self, ids: mx.array, cache: Any) -> mx.array:
        if ids.shape[1] < 3:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
        return self.inner(ids, cache=cache)


@FULL
@in_one_test("after", range(3, 20, 3))
def test_row_11_an_interrupt_while_drafting_leaves_the_cache_in_order(after: int) -> None:
    """The target's cache holds prompt + emitted, and can be continued from."""
    target, emitted = model(), 0
    caches = make_prompt_cache(target)
    drafter = sd.ModelDrafter(Interrupted(scripted.scripted_model(PROMPT, oracle(target)), after))
    with pytest.raises(KeyboardInterrupt):
        for _ in sd.speculate(target, PROMPT, drafter, prompt_cache=caches, draft_length=4):
            emitted += 1
    assert {c.offset for c in caches} == {len(PROMPT) + emitted}
    again = ours(target, None, [9], prompt_cache=caches, max_tokens=8)
    assert again == plain(target, [*PROMPT, *plain(target)[:emitted], 9], 8)


class Unmoved(nn.Module):
    """A model that gives the same law [4] at every position."""

    def __init__(self, law: Sequence[float]) -> None:
        super().__init__()
        self.layers = [None]
        self.logits = mx.log(mx.array(law))

    def __call__(self, ids: mx.array, cache: Any) -> mx.array:
        cache[0].update_and_fetch(*[mx.zeros((1, 1, ids.shape[1], 1))] * 2)
        return mx.broadcast_to(self.logits, (1, ids.shape[1], 4))


@FULL
def test_row_12_xtc_tosses_a_coin_for_each_position() -> None:
    """XTC at probability 1/2 removes token 1; one coin a round would make runs of it in fives."""
    law = sd.Sampling(temp=0.01, xtc_probability=0.5, xtc_threshold=0.1)
    always_1 = scripted.ScriptedDrafter(lambda start, limit: [1] * limit)
    target = Unmoved([1e-9, 0.6, 0.4, 1e-9])
    text = ours(target, always_1, [1], sampler=law, seed=1, max_tokens=400, probe=False)
    assert set(text) == {1, 2}
    assert abs(text.count(1) - 200) < 60  # six standard deviations
    runs = [len(list(group)) for token, group in groupby(text) if token == 1]
    assert any(run % 5 for run in runs[:-1])  # the last may have been cut by max_tokens
