"""What goes wrong in the speculation of mlx-lm 0.32.2, row by row: ours does it right."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
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
from selection import cases, in_one_test

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


def ours(
    target: nn.Module, drafter: Any, prompt: Sequence[int] = PROMPT, **options: Any
) -> list[int]:
    options = {"max_tokens": NUM_TOKENS, "draft_length": 4} | options
    return [t.token for t in sd.speculate(target, prompt, drafter, **options)]


def test_row_6_a_prompt_cache_may_be_the_targets_alone(tmp_path: Path) -> None:
    """Such as one from a prompt-cache file."""
    target, file = model(), str(tmp_path / "prompt.safetensors")
    caches = make_prompt_cache(target)
    plain(target, PROMPT[:6], 0, prompt_cache=caches)
    save_prompt_cache(file, caches)
    for drafter in (sd.ModelDrafter(model(seed=7)), sd.PromptLookupDrafter(min_ngram=1)):
        text = ours(target, drafter, PROMPT[6:], prompt_cache=load_prompt_cache(file))
        assert text == plain(target)


@pytest.mark.parametrize("name", cases(["gemma3n", "gemma4_text", "afm7", "nanbeige"], "afm7"))
def test_row_7_a_model_may_make_more_or_fewer_caches_than_it_has_layers(name: str) -> None:
    """Target's and draft model's caches in one list are told apart by how many there are."""
    target = model(name)
    both = make_prompt_cache(target) + make_prompt_cache(target)
    assert len(make_prompt_cache(target)) != len(target.layers)
    text = ours(target, sd.ModelDrafter(target), max_tokens=24, prompt_cache=both)
    assert text == plain(target, num_tokens=24)


@in_one_test("num_tokens", range(1, 9))
def test_rows_8_to_10_the_callers_caches_end_at_prompt_and_emitted(num_tokens: int) -> None:
    """Whatever the last token was; with kv_bits they are the quantized ones."""
    target, draft = tiny.build("qwen2", hidden_size=128), model(seed=7)  # heads of 32
    for options in ({}, {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 4}):
        caches = make_prompt_cache(target) + make_prompt_cache(draft)
        drafter = sd.ModelDrafter(draft)
        text = ours(target, drafter, prompt_cache=caches, max_tokens=num_tokens, **options)
        assert text == plain(target, num_tokens=num_tokens, **options)
        assert {c.offset for c in caches} == {len(PROMPT) + len(text)}
        mine = caches[: len(make_prompt_cache(target))]
        assert all(isinstance(c, QuantizedKVCache) == bool(options) for c in mine)


@in_one_test("after", range(3, 20, 3))
def test_row_11_an_interrupt_while_drafting_leaves_the_cache_in_order(after: int) -> None:
    """The target's cache holds prompt + emitted, and can be continued from."""
    target, emitted = model(), 0
    caches, coming = make_prompt_cache(target), plain(target)

    def interrupted(start: int, limit: int) -> list[int]:
        if start >= after:
            raise KeyboardInterrupt
        return [*coming[start : start + limit - 1], 0]  # and errs at its end

    drafter = scripted.ScriptedDrafter(interrupted)
    with pytest.raises(KeyboardInterrupt):
        for _ in sd.speculate(target, PROMPT, drafter, prompt_cache=caches, draft_length=4):
            emitted += 1
    assert {c.offset for c in caches} == {len(PROMPT) + emitted}
    again = ours(target, None, [9], prompt_cache=caches, max_tokens=8)
    assert again == plain(target, [*PROMPT, *coming[:emitted], 9], 8)
