"""A seed is a text: with any drafter, any draft length, or none, unless another rule is named.

Bit for bit in float32 on the CPU, over prompts and settings that Hypothesis draws.
"""

from __future__ import annotations

import random
from functools import cache, partial
from typing import Any

import mlx.core as mx
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_logits_processors

import specdec_mlx as sd
import tiny
from heads import HEADS, random_head
from lossless import noisy_copy
from scripted import OracleDrafter, always_wrong
from selection import FULL, in_one_test
from specdec_mlx import lab
from specdec_mlx.batch.rounds import BatchGeneration
from specdec_mlx.batch.schedule import Request
from specdec_mlx.contracts import Draft, RoundRecord
from specdec_mlx.drafters.heads.drafter import HeadDrafter
from specdec_mlx.options import Options
from specdec_mlx.rules import make_rule

NUM_TOKENS = 16
LENGTHS = (1, 2, 3, 6, "auto")
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


def text(request: dict[str, Any], drafter: Any, length: Any, rule: Any) -> tuple[list[int], Any]:
    """Tokens of a generation, and its stats."""
    options = dict(request) | {"max_tokens": NUM_TOKENS, "tuning": sd.drafters.Tuning()}
    penalty = options.pop("penalty", None)
    options["logits_processors"] = penalty and make_logits_processors(None, penalty)
    options |= {"drafter": drafter, "num_draft_tokens": length, "rule": rule}
    items = list(sd.speculate(target(), **options))
    return [item.token for item in items], items[-1].stats


def drafters(coming: list[int]) -> dict[str, Any]:
    """All kinds, for a text that is known."""
    return {
        "none": None,
        "n-gram": sd.NGramDrafter(min_order=1),
        "n-gram, drawn": lab.StochasticNGramDrafter(min_order=1),
        "prompt lookup": sd.PromptLookupDrafter(min_ngram=1),
        "model": sd.ModelDrafter(draft()),
        "model, flatter": sd.ModelDrafter(draft(), draft_temp=2.0),
        "model, greedy": sd.ModelDrafter(draft(), greedy=True),
        "always wrong": always_wrong(coming, VOCAB_SIZE),
        "oracle": OracleDrafter(coming, VOCAB_SIZE),
    }


@given(request=REQUESTS, data=st.data())
@settings(max_examples=3)
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


class AnyLength:
    """Lengths that are drawn anew each round, as if a clock chose them."""

    def __init__(self, seed: int) -> None:
        self.coins = random.Random(seed)

    def limit(self, part: str, cheap: bool) -> int:
        return self.coins.randrange(7)

    def cut(self, part: str, draft: Draft) -> int:
        return self.coins.randint(0, len(draft))

    def record(self, round_: RoundRecord) -> None:
        """Learn nothing."""


DRAWING = {
    "model": lambda: sd.ModelDrafter(draft()),
    "tree of a model": lambda: sd.ModelDrafter(draft(), branches=3),
    "head": lambda: HeadDrafter(random_head(HEADS["eagle3"], target())),
    "tree of a head": lambda: HeadDrafter(random_head(HEADS["eagle3"], target()), branches=3),
    "n-gram": lambda: lab.StochasticNGramDrafter(min_order=1),
    "cascade": lambda: lab.Cascade(sd.ModelDrafter(draft()), "prompt-lookup:min_ngram=1", 1),
    "best of two": lambda: sd.BestOf(sd.PromptLookupDrafter(), sd.ModelDrafter(draft())),
}
"""Drafters whose drafts are drawn at random."""

PROMPTS = [[3, 1, 2, 3, 1], [4], [5, 5, 2, 5, 5, 2, 5]]


COMMON: dict[str, Any] = {"sampler": sd.Sampling(temp=1.0), "max_tokens": NUM_TOKENS}


@cache
def plain_texts() -> list[tuple[int, ...]]:
    """Texts of the prompts, each with a seed of its own, without a drafter."""
    texts = (sd.speculate(target(), p, seed=i, **COMMON) for i, p in enumerate(PROMPTS))
    return [tuple(item.token for item in items) for items in texts]


@in_one_test("name", DRAWING)
def test_a_seed_without_a_rule_is_one_text_whatever_lengths_a_clock_chooses(name):
    """Three runs, each with lengths of its own; as rows of a batch; and without a drafter."""
    drafter, drafted, plain = DRAWING[name](), 0, plain_texts()
    for seed, prompt in enumerate(PROMPTS):
        how = COMMON | {"seed": seed, "num_draft_tokens": AnyLength(seed)}
        items = list(sd.speculate(target(), prompt, drafter, **how))
        drafted += items[-1].stats.drafted
        assert tuple(item.token for item in items) == plain[seed], seed
    batch = BatchGeneration(target(), drafter, Options(num_draft_tokens=AnyLength(0)))
    for seed, prompt in enumerate(PROMPTS):
        batch.insert(Request(prompt, NUM_TOKENS, COMMON["sampler"], seed))
    texts: dict[int, tuple[int, ...]] = {}
    for row in batch.run():
        texts[row.uid] = (*texts.get(row.uid, ()), row.token.token)
    assert [texts[seed] for seed in range(len(PROMPTS))] == plain
    assert drafted > 20


def test_a_seed_goes_with_a_sampler_that_can_only_be_called():
    """Its own draws are emitted, in their order; nothing is coupled, and nothing refused."""
    first = lambda logprobs: mx.argmax(logprobs, axis=-1)  # noqa: E731
    request = {"prompt_tokens": [3, 1, 2], "seed": 1, "sampler": first}
    texts = [text(request, one, 3, "auto")[0] for one in (None, sd.ModelDrafter(draft()))]
    assert texts[0] == texts[1]


def test_other_rules_have_other_texts():
    """A control: under rejection, block, and "auto" as it is without a seed, drawn drafts give
    another text.
    """
    request = {"prompt_tokens": [3, 1, 2], "seed": 1, "sampler": sd.Sampling(temp=1.0)}
    expected, _ = text(request, None, 0, "coupled")
    model = drafters(expected)["model"]
    for rule in ("rejection", "block", make_rule("auto")):
        assert text(request, model, 3, rule)[0] != expected
    assert text(request | {"seed": 2}, None, 0, "coupled")[0] != expected
    mx.random.seed(3)  # where no seed is given, mlx-lm's global one governs
    unseeded, _ = text(request | {"seed": None}, None, 0, "coupled")
    mx.random.seed(3)
    assert text(request | {"seed": None}, model, 3, "coupled")[0] == unseeded != expected
    mx.random.seed(3)
    assert text(request | {"seed": None}, model, 3, "auto")[0] != unseeded
