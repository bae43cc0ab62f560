"""What goes wrong in the speculation of mlx-lm 0.32.2 with the caller's caches: ours does it right.

A list that holds the target's caches alone, and interrupts while drafting, are in test_faults.py.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

import specdec_mlx as sd
import tiny
from selection import cases, in_one_test

PROMPT = [5, 17, 99, 3, 64, 17, 99, 42, 5, 17]
KV_BITS = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 4}


def both_write(target: Any, draft: Any, num_tokens: int, **options: Any) -> list[Any]:
    """Caches of target and draft model in one list, after a text that is mlx-lm's own."""
    caches = make_prompt_cache(target) + make_prompt_cache(draft)
    steps = generate_step(mx.array(PROMPT), target, max_tokens=num_tokens, **options)
    options |= {"prompt_cache": caches, "max_tokens": num_tokens, "draft_length": 4}
    items = sd.speculate(target, PROMPT, sd.ModelDrafter(draft), **options)
    assert [item.token for item in items] == [int(token) for token, _ in steps]
    return caches


@pytest.mark.parametrize("name", cases(["gemma3n", "gemma4_text", "afm7", "nanbeige"], "afm7"))
def test_a_model_may_make_more_or_fewer_caches_than_it_has_layers(name: str) -> None:
    """Target's and draft model's caches in one list are told apart by how many there are."""
    target = tiny.build(name)
    assert len(both_write(target, target, 24)) != 2 * len(target.layers)


@in_one_test("num_tokens", range(1, 9))
def test_the_callers_caches_end_at_prompt_and_emitted(num_tokens: int) -> None:
    """Whatever the last token was; with kv_bits they are the quantized ones."""
    target, draft = tiny.build("qwen2", hidden_size=128), tiny.build("qwen2", seed=7)  # heads of 32
    for options in ({}, KV_BITS):
        caches = both_write(target, draft, num_tokens, **options)
        assert {cache.offset for cache in caches} == {len(PROMPT) + num_tokens}
        mine = caches[: len(make_prompt_cache(target))]
        assert all(isinstance(cache, QuantizedKVCache) == bool(options) for cache in mine)
