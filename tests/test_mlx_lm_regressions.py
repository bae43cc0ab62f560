"""What goes wrong in mlx-lm's own speculation, row by row: ours does it right.

Where it is cheap a test also runs mlx-lm's own step, and sees it fail. On a later mlx-lm that has
repaired a row, the test passes with a warning that the row can be retired.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import (
    KVCache,
    QuantizedKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)
from mlx_lm.sample_utils import make_sampler

import scripted
import specdec_mlx as sd
import tiny
from selection import FULL, in_one_test

SEEN_ON = "0.32.2"
VOCAB = 128
PROMPT = [5, 17, 99, 3, 64, 17, 99, 42, 5, 17]
NUM_TOKENS = 60
"""Enough to fill the windows of 16 tokens and go on."""


def stock_fails(row: int, failed: bool) -> None:
    """Assert that mlx-lm's own speculation failed where we saw it fail; say so on a later one."""
    if mlx_lm.__version__ == SEEN_ON:
        assert failed, f"Row {row}: mlx-lm {SEEN_ON} was seen to fail here, and did not."
    elif not failed:
        warnings.warn(
            f"mlx-lm {mlx_lm.__version__} is right where {SEEN_ON} was wrong: row {row} of "
            "tests/test_mlx_lm_regressions.py can be retired.",
            stacklevel=2,
        )


def error_of(call: Callable[[], Any]) -> str | None:
    """What the call raises, in words; None if it raises nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def raises(call: Callable[[], Any]) -> bool:
    """Whether the call ends in an error."""
    return error_of(call) is not None


@cache
def model(name: str = "qwen2", seed: int = 0) -> nn.Module:
    return tiny.build(name, seed=seed)


def plain(
    target: nn.Module, prompt: Sequence[int] = PROMPT, num_tokens: int = NUM_TOKENS, **options: Any
) -> list[int]:
    """What mlx-lm writes without speculation."""
    steps = generate_step(mx.array(prompt), target, max_tokens=num_tokens, **options)
    return [int(token) for token, _ in steps]


def oracle(
    target: nn.Module, wrong: float = 0.3, num_tokens: int = NUM_TOKENS + 10, **options: Any
) -> scripted.OracleDrafter:
    """A drafter that knows the text and errs in a share of positions."""
    return scripted.OracleDrafter(plain(target, num_tokens=num_tokens, **options), VOCAB, wrong)


def ours(
    target: nn.Module, drafter: Any, prompt: Sequence[int] = PROMPT, **options: Any
) -> list[int]:
    options = {"max_tokens": NUM_TOKENS, "draft_length": 4} | options
    return [t.token for t in sd.speculate(target, prompt, drafter, **options)]


def stock(
    target: nn.Module, draft_model: Any, prompt: Sequence[int] = PROMPT, **options: Any
) -> list[int]:
    """What mlx-lm's own speculation writes."""
    options = {"max_tokens": NUM_TOKENS, "num_draft_tokens": 4} | options
    steps = speculative_generate_step(mx.array(prompt), target, draft_model, **options)
    return [int(token) for token, _, _ in steps]


def stock_oracle(drafter: scripted.OracleDrafter) -> Any:
    """The same drafter as a draft model."""
    return scripted.scripted_model(PROMPT, drafter)


def test_row_5_a_draft_length_of_0_keeps_the_processors_history() -> None:
    """Each processor sees the prompt and all that was emitted, also when nothing is drafted.

    With a prompt of one token mlx-lm's history is right at first, so this is not row 4.
    """
    target, prompt = model(), PROMPT[:1]
    seen: list[int] = []

    def spy(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.size)
        return logits

    text = ours(target, oracle(target), prompt, draft_length=0, logits_processors=[spy])
    assert text == plain(target, prompt)
    assert seen[:20] == list(range(1, 21))
    seen.clear()
    stock(target, target, prompt, num_draft_tokens=0, logits_processors=[spy], max_tokens=20)
    stock_fails(5, seen != list(range(1, 21)))


def test_row_6_a_prompt_cache_may_be_the_targets_alone(tmp_path: Path) -> None:
    """Such as one from a prompt-cache file."""
    target, draft = model(), model(seed=7)
    caches = make_prompt_cache(target)
    plain(target, PROMPT[:6], 0, prompt_cache=caches)
    save_prompt_cache(str(tmp_path / "prompt.safetensors"), caches)

    def loaded() -> list[Any]:
        return load_prompt_cache(str(tmp_path / "prompt.safetensors"))

    assert loaded()[0].offset == 6
    for drafter in (sd.ModelDrafter(draft), sd.PromptLookupDrafter(min_ngram=1)):
        text = ours(target, drafter, PROMPT[6:], prompt_cache=loaded())
        assert text == plain(target)
    stock_fails(6, raises(lambda: stock(target, draft, PROMPT[6:], prompt_cache=loaded())))


@in_one_test("name", ["gemma3n", "gemma4_text", "afm7", "nanbeige"])
def test_row_7_a_model_may_make_more_or_fewer_caches_than_it_has_layers(name: str) -> None:
    """Target's and draft model's caches in one list are told apart by how many there are."""
    target = model(name)
    both = make_prompt_cache(target) + make_prompt_cache(target)
    assert len(make_prompt_cache(target)) != len(target.layers)
    expected = plain(target, num_tokens=24)
    drafter = sd.ModelDrafter(target)
    assert ours(target, drafter, max_tokens=24, prompt_cache=both) == expected

    def wrong() -> bool:
        caches = make_prompt_cache(target) + make_prompt_cache(target)
        # Which cache went where shows in how full each is.
        stock(target, target, max_tokens=6, prompt_cache=caches)
        return len({c.offset for c in caches if isinstance(c, KVCache)}) > 1

    stock_fails(7, raises(wrong) or wrong())


def test_row_8_the_callers_caches_are_the_quantized_ones() -> None:
    """With kv_bits the caller's list ends with what was generated with."""
    target = tiny.build("qwen2", hidden_size=128)  # heads of 32
    options: dict[str, Any] = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 4}

    def caches() -> list[Any]:
        return make_prompt_cache(target) + make_prompt_cache(target)

    mine, theirs = caches(), caches()
    num_caches = len(make_prompt_cache(target))
    text = ours(target, sd.ModelDrafter(target), prompt_cache=mine, max_tokens=20, **options)
    assert text == plain(target, num_tokens=20, **options)
    assert all(isinstance(c, QuantizedKVCache) for c in mine[:num_caches])
    assert {c.offset for c in mine[:num_caches]} == {len(PROMPT) + 20}
    stock(target, target, prompt_cache=theirs, max_tokens=20, **options)
    stock_fails(8, not all(isinstance(c, QuantizedKVCache) for c in theirs[:num_caches]))


def ends_of_both(generate: Callable[..., Any], lengths: Iterable[int]) -> set[tuple[int, int]]:
    """How far target's and draft model's caches are from prompt + emitted, over several lengths."""
    target, draft = model(), model(seed=7)
    num_caches = len(make_prompt_cache(target))
    gaps = set()
    for num_tokens in lengths:
        caches = make_prompt_cache(target) + make_prompt_cache(draft)
        text = generate(target, draft, prompt_cache=caches, max_tokens=num_tokens)
        end = len(PROMPT) + len(text)
        offsets = [c.offset for c in caches]
        gaps.add((end - offsets[0], end - offsets[num_caches]))
        assert len(set(offsets[:num_caches])) == len(set(offsets[num_caches:])) == 1
    return gaps


def test_rows_9_and_10_both_caches_end_at_prompt_and_emitted() -> None:
    """Whatever the last token was, so a second turn needs nothing but its own tokens."""

    def run(target: Any, draft: Any, **options: Any) -> list[int]:
        return ours(target, sd.ModelDrafter(draft), **options)

    assert ends_of_both(run, range(1, 9)) == {(0, 0)}
    gaps = ends_of_both(stock, range(1, 9))
    stock_fails(9, any(target for target, _ in gaps))
    stock_fails(10, any(draft for _, draft in gaps))


class Interrupted(nn.Module):
    """A draft model that is interrupted in its n-th pass after the prompt."""

    def __init__(self, inner: Any, after: int) -> None:
        super().__init__()
        self.inner, self.left = inner, after
        self.layers = inner.layers
        self.make_cache = inner.make_cache

    def __call__(self, ids: mx.array, cache: Any) -> mx.array:
        if ids.shape[1] < 3:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
        return self.inner(ids, cache=cache)


@FULL
def test_row_11_an_interrupt_while_drafting_leaves_the_cache_in_order() -> None:
    """The target's cache holds prompt + emitted, and can be continued from."""

    def interrupted(after: int) -> Interrupted:
        return Interrupted(stock_oracle(oracle(target, wrong=0.3)), after)

    def run(steps: Iterable[Any]) -> int:
        emitted = 0
        with pytest.raises(KeyboardInterrupt):
            for _ in steps:
                emitted += 1
        return emitted

    target = model()
    negative = []
    for after in range(3, 20, 3):
        mine, theirs = make_prompt_cache(target), make_prompt_cache(target)
        drafter = sd.ModelDrafter(interrupted(after))
        emitted = run(sd.speculate(target, PROMPT, drafter, prompt_cache=mine, draft_length=4))
        assert {c.offset for c in mine} == {len(PROMPT) + emitted}
        text = plain(target)[:emitted]
        again = ours(target, None, [9], prompt_cache=mine, max_tokens=8)
        assert again == plain(target, [*PROMPT, *text, 9], 8)
        steps = speculative_generate_step(
            mx.array(PROMPT),
            target,
            interrupted(after),
            num_draft_tokens=4,
            prompt_cache=theirs + interrupted(0).make_cache(),
        )
        emitted = run(steps)
        negative.append(theirs[0].offset not in (len(PROMPT) + emitted, len(PROMPT) + emitted - 1))
    stock_fails(11, any(negative))


class Unmoved(nn.Module):
    """A model that gives the same law [4] at every position."""

    def __init__(self, law: Sequence[float]) -> None:
        super().__init__()
        self.layers = [None]
        self.logits = mx.log(mx.array(law))

    def make_cache(self) -> list[Any]:
        return [scripted._Position()]

    def __call__(self, ids: mx.array, cache: Any) -> mx.array:
        cache[0].offset += ids.shape[1]
        return mx.broadcast_to(self.logits, (1, ids.shape[1], 4))


@FULL
def test_row_12_xtc_tosses_a_coin_for_each_position() -> None:
    """XTC at probability 1/2 removes token 1: each token is a fair coin, whatever was drafted.

    With one coin a round of 1 + 4 positions, the runs of token 1 come in fives.
    """
    sampler = make_sampler(temp=0.01, xtc_probability=0.5, xtc_threshold=0.1)
    law = sd.Sampling(temp=0.01, xtc_probability=0.5, xtc_threshold=0.1)

    def runs_of_1(text: Sequence[int]) -> list[int]:
        runs = [len(list(group)) for token, group in groupby(text) if token == 1]
        return runs[:-1]  # the last may have been cut by max_tokens

    target, draft = Unmoved([1e-9, 0.6, 0.4, 1e-9]), Unmoved([1e-9, 1.0, 1e-9, 1e-9])
    always_1 = scripted.ScriptedDrafter(lambda start, limit: [1] * limit)
    text = ours(target, always_1, [1], sampler=law, seed=1, max_tokens=400, probe=False)
    assert set(text) == {1, 2}
    assert abs(text.count(1) - 200) < 60  # six standard deviations
    assert any(run % 5 for run in runs_of_1(text))
    mx.random.seed(1)
    theirs = stock(target, draft, [1], sampler=sampler, max_tokens=400)
    stock_fails(12, all(run % 5 == 0 for run in runs_of_1(theirs)) and 1 in theirs)
