"""Under the coupled rule a seed is a text: with any drafter, any draft length, or none.

Bit for bit in float32 on the CPU, over prompts and settings that Hypothesis draws.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import mlx.core as mx
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_logits_processors

import specdec_mlx as sd
import tiny
from lossless import noisy_copy
from scripted import OracleDrafter, always_wrong
from selection import FULL

NUM_TOKENS = 16
LENGTHS = (1, 2, 3, 6, "auto", "heuristic")
VOCAB_SIZE = tiny.CONFIGS["llama"]["vocab_size"]


target = cache(partial(tiny.build, "llama"))
draft = cache(partial(noisy_copy, "llama", 0.2))

REQUESTS = st.fixed_dictionaries(
    {
        # few tokens, so that look-ups find something
        "prompt_tokens": st.lists(st.integers(0, 5), min_size=1, max_size=12),
        "seed": st.integers(-(2**70), 2**70),
        "sampler": st.builds(
            sd.Sampling,
            temp=st.sampled_from([0.3, 0.8, 1.0, 1.5]),
            top_p=st.sampled_from([0.0, 0.9]),
            min_p=st.sampled_from([0.0, 0.05]),
            top_k=st.sampled_from([0, 4]),
            xtc_probability=st.sampled_from([0.0, 0.5]),
        ),
        "penalty": st.sampled_from([None, 1.3]),
    }
)
"""Prompt, seed and how to sample: any filter, XTC, a penalty that looks back."""


def text(request: dict[str, Any], drafter: Any, length: Any, rule: str) -> tuple[list[int], Any]:
    """Tokens of a generation, and its stats."""
    options = dict(request) | {"max_tokens": NUM_TOKENS, "tuning": sd.Tuning()}
    penalty = options.pop("penalty", None)
    options["logits_processors"] = penalty and make_logits_processors(None, penalty)
    options |= {"drafter": drafter, "draft_length": length, "rule": rule}
    items = list(sd.speculate(target(), **options))
    return [item.token for item in items], items[-1].stats


def drafters(coming: list[int]) -> dict[str, Any]:
    """All kinds, for a text that is known."""
    return {
        "none": None,
        "n-gram": sd.NGramDrafter(min_order=1),
        "n-gram, drawn": sd.NGramDrafter(min_order=1, stochastic=True),
        "prompt lookup": sd.PromptLookupDrafter(min_ngram=1),
        "model": sd.ModelDrafter(draft()),
        "model, flatter": sd.ModelDrafter(draft(), draft_temp=2.0),
        "model, greedy": sd.ModelDrafter(draft(), greedy=True),
        "always wrong": always_wrong(coming, VOCAB_SIZE),
        "oracle": OracleDrafter(coming, VOCAB_SIZE),
    }


@given(request=REQUESTS, data=st.data())
@settings(max_examples=5)
def test_a_seed_is_a_text(request, data):
    """With every drafter, each at a draft length of its own."""
    expected, _ = text(request, None, 0, "coupled")
    for name, drafter in drafters(expected).items():
        length = data.draw(st.sampled_from(LENGTHS), label=name)
        tokens, stats = text(request, drafter, length, "coupled")
        assert tokens == expected, (name, length)
        if name in ("oracle", "model") and isinstance(length, int):
            assert stats.drafted > 0


@FULL
@given(request=REQUESTS, length=st.sampled_from(LENGTHS))
@settings(max_examples=12)
def test_point_masses_need_no_coupled_rule(request, length):
    """Under "auto", what is accepted is the target's own draw, from the noise of its position."""
    expected, _ = text(request, None, 0, "auto")
    assert text(request, None, 0, "coupled")[0] == expected
    for name in ("n-gram", "prompt lookup", "model, greedy", "always wrong", "oracle"):
        assert text(request, drafters(expected)[name], length, "auto")[0] == expected, name


def test_other_rules_have_other_texts():
    """A control: drawn drafts under rejection or block give another text for the seed."""
    request = {"prompt_tokens": [3, 1, 2], "seed": 1, "sampler": sd.Sampling(temp=1.0)}
    expected, _ = text(request, None, 0, "coupled")
    model = drafters(expected)["model"]
    for rule in ("rejection", "block", "auto"):
        assert text(request, model, 3, rule)[0] != expected
    assert text(request | {"seed": 2}, None, 0, "coupled")[0] != expected
    mx.random.seed(3)  # where no seed is given, mlx-lm's global one governs
    unseeded, _ = text(request | {"seed": None}, None, 0, "coupled")
    mx.random.seed(3)
    assert text(request | {"seed": None}, model, 3, "coupled")[0] == unseeded != expected
