"""The text that comes out follows the target's law: the whole path, in MLX, by chi-square.

The joint law of the first three tokens after a prompt is known exactly, from the model's own
single-token passes over all 6 x 6 x 6 texts. 24,000 generations are held against it: every drafter
and rule, at temperature 1 and with top-p, top-k and min-p, from fixed seeds.

They run a tiny random Llama whose logits are remembered, since otherwise nearly all the time would
go into passes whose outcome is known; loop, caches, laws, rules and noise are the same.

False alarms: with other seeds one of the tests here would fail with a chance of 1e-4 while nothing
is wrong (Bonferroni's share, 2e-6, for each chi-square). Power at temperature 1 with a model's
drafts, 2,000 runs; exact total variation of the wrong law in brackets:

    a residual replaced by p        1.000  (0.288)
    a bonus at temperature 0.5      0.988  (0.074)
    p and q swapped                 1.000  (0.698)
    lenience 1.2                    0.998  (0.119)
    a declared q other than drawn   0.999  (0.118)
    a drawn token dropped           1.000  (0.184)

from the noncentral chi-square law of the enumerated wrong laws. All six are run, with fewer runs
where that is enough and more for lenience, and all must be found.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_unflatten
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

import specdec_mlx as sd
import tiny
from exact import WRONG_RULES, Altered, declared_at_power, dropped
from selection import cases
from specdec_mlx.checks.chi_square import ChiSquare
from specdec_mlx.checks.stand_ins import Remembered
from specdec_mlx.sampling.noise import Noise
from specdec_mlx.token_ids import to_list

V = 6
LENGTH = 3
NUM_DRAFT = 2  # so that the bonus token is among the three
PROMPT = [1, 4, 1]  # look-ups find 4, 1, 4
LOOK_UP = "prompt-lookup:min_ngram=1"
AT_ONE = sd.Sampling(temp=1.0)

SETTINGS = {
    "temperature 1": AT_ONE,
    "top-p": sd.Sampling(temp=0.8, top_p=0.8),
    "top-k": sd.Sampling(temp=1.2, top_k=3),
    "min-p": sd.Sampling(temp=0.8, min_p=0.2),
}
CASES = {
    "prompt lookup": (lambda model: sd.PromptLookupDrafter(min_ngram=1), "auto"),
    "n-gram": (lambda model: sd.NGramDrafter(), "auto"),
    "n-gram, drawn": (lambda model: sd.NGramDrafter(min_order=1, stochastic=True), "auto"),
    "model": (sd.ModelDrafter, "auto"),
    "model, token by token": (sd.ModelDrafter, "rejection"),
    "model, coupled": (sd.ModelDrafter, "coupled"),
    "model, greedy": (partial(sd.ModelDrafter, greedy=True), "auto"),
    "model, sharper": (partial(sd.ModelDrafter, draft_temp=0.6), "auto"),
    "model, flatter, coupled": (partial(sd.ModelDrafter, draft_temp=1.6), "coupled"),
    "cascade": (lambda model: sd.Cascade(sd.ModelDrafter(model), LOOK_UP, 1), "auto"),
    "cascade, coupled": (lambda model: sd.Cascade(sd.ModelDrafter(model), LOOK_UP, 1), "coupled"),
    "best of everything": (lambda model: best_of_everything(model), "auto"),
    "best of everything, coupled": (lambda model: best_of_everything(model), "coupled"),
}


def best_of_everything(model: nn.Module) -> sd.BestOf:
    """Point masses and drawn drafts, free ones and ones that cost time; all of them get a turn."""
    return sd.BestOf(
        sd.PromptLookupDrafter(min_ngram=2),
        sd.ModelDrafter(model),
        sd.SuffixDrafter(min_match=2),
        sd.RecyclingDrafter(num_draft=2),
        sd.NGramDrafter(min_order=1, stochastic=True),
    )


FALSE_ALARM = 1e-4 / (2 * len(CASES) * len(SETTINGS) + len(SETTINGS))
RUNS = 370
MORE_RUNS = 2100  # where q matters most: drafts of a model at temperature 1
LARGER_CASES = ("model", "model, token by token")

# The models ---------------------------------------------------------------------------------------


@cache
def tiny_llama(seed: int) -> nn.Module:
    """One layer, width 32, six tokens."""
    arguments = llama.ModelArgs(
        model_type="llama",
        hidden_size=32,
        num_hidden_layers=1,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        rms_norm_eps=1e-5,
        vocab_size=V,
        tie_word_embeddings=False,
    )
    mx.random.seed(seed)
    model = llama.Model(arguments)
    model.update(tree_unflatten(tiny.randomised(model)))
    mx.eval(model.parameters())
    return model


def all_texts(length: int) -> mx.array:
    """The prompt and every continuation by `length` tokens; [V ** length, n]."""
    continuations = np.array(list(np.ndindex((V,) * length)), int).reshape(V**length, length)
    return mx.array(np.hstack([np.tile(PROMPT, (V**length, 1)), continuations]))


def next_logits(model: nn.Module, texts: mx.array) -> mx.array:
    """Logits [B, V] after texts [B, n], by single-token passes."""
    caches = make_prompt_cache(model)
    for i in range(texts.shape[1]):
        logits = model(texts[:, i : i + 1], cache=caches)[:, -1]
    return logits


TARGET, DRAFT = 10, 6
"""Seeds of the two models: of a few dozen pairs, one for which all wrong variants show soon."""


@cache
def remembered(seed: int) -> Remembered:
    """The model after the prompt, whose last token is certain for the target."""
    return Remembered(tiny_llama(seed), PROMPT, gives_last=seed == TARGET)


# The comparison -----------------------------------------------------------------------------------


def law_of(logits: mx.array, sampling: sd.Sampling) -> np.ndarray:
    """Law [..., V] in float64."""
    law = np.exp(np.array(sampling.log_distribution(logits), np.float64))
    return law / law.sum(-1, keepdims=True)


@cache
def joint_law(sampling: sd.Sampling) -> np.ndarray:
    """Exact law [V, V, V] of the target's first three tokens."""
    joint = np.ones(())
    for length in range(LENGTH):
        laws = law_of(next_logits(tiny_llama(TARGET), all_texts(length)), sampling)
        joint = joint[..., None] * laws.reshape((V,) * (length + 1))
    return joint


@dataclass
class Count:
    """Texts [V, V, V] that were generated, and how many draft tokens were kept and not."""

    texts: np.ndarray
    accepted: int = 0
    rejected: int = 0


def the_prompts_last(tokens: mx.array, logits: mx.array) -> mx.array:
    """Makes the first token certain; a logits processor."""
    if tokens.shape[0] >= len(PROMPT):
        return logits
    return mx.where(mx.arange(V) == PROMPT[-1], 0.0, -mx.inf)[None]


the_prompts_last.pure = True  # type: ignore[attr-defined]


def generate(
    model: nn.Module, drafter: Any, sampling: sd.Sampling, runs: int, rule: Any = "auto"
) -> Count:
    """Three tokens from each of the seeds 0 ... runs - 1, behind one that is certain."""
    count = Count(np.zeros((V,) * LENGTH))
    options: dict[str, Any] = {"sampler": sampling, "rule": rule, "draft_length": NUM_DRAFT}
    options |= {"max_tokens": 1 + LENGTH, "logits_processors": [the_prompts_last]}
    options |= {"probe": not isinstance(model, Remembered)}
    for seed in range(runs):
        items = list(sd.speculate(model, PROMPT[:-1], drafter, seed=seed, **options))
        assert items[0].token == PROMPT[-1]
        count.texts[tuple(item.token for item in items[1:])] += 1
        count.accepted += items[-1].stats.accepted
        count.rejected += items[-1].stats.drafted - items[-1].stats.accepted
    return count


def p_value(seen: np.ndarray, law: np.ndarray) -> float:
    """Chance of a chi-square as large as this under the law."""
    return ChiSquare.of(seen.ravel(), law.ravel() * seen.sum()).p_value


@pytest.mark.parametrize("case", cases(CASES, "n-gram, drawn"))
def test_text_follows_the_targets_law(case):
    """Chi-square of the joint of 3 tokens, in each setting; nothing filtered comes."""
    make_drafter, rule = CASES[case]
    accepted = rejected = 0
    for name, sampling in SETTINGS.items():
        is_larger = sampling == AT_ONE and case in LARGER_CASES
        runs = MORE_RUNS if is_larger else RUNS
        count = generate(remembered(TARGET), make_drafter(remembered(DRAFT)), sampling, runs, rule)
        assert p_value(count.texts, joint_law(sampling)) > FALSE_ALARM, name
        accepted += count.accepted
        rejected += count.rejected
    assert min(accepted, rejected) > 50


WRONG = {  # what is wrong -> how the drafts are altered, the rule, and runs that show it
    "residual replaced by p": (None, WRONG_RULES["residual replaced by p"], 500),
    "bonus at temperature 0.5": (None, WRONG_RULES["bonus at temperature 0.5"], 2000),
    "p and q swapped": (None, WRONG_RULES["p and q swapped"], 200),
    "lenience 1.2": (None, WRONG_RULES["lenience 1.2"], 3000),
    "a declared q at temperature 0.7": (declared_at_power(1 / 0.7), "rejection", 2400),
    "a drawn token dropped": (dropped, "rejection", 1000),
}


@pytest.mark.parametrize("case", cases(WRONG, "p and q swapped"))
def test_what_is_wrong_is_found(case):
    """The same test rejects wrong rules and wrong drafts at temperature 1."""
    alter, rule, runs = WRONG[case]
    drafter: Any = sd.ModelDrafter(remembered(DRAFT))
    drafter = Altered(drafter, alter) if alter else drafter
    count = generate(remembered(TARGET), drafter, AT_ONE, runs, rule)
    assert p_value(count.texts, joint_law(AT_ONE)) < FALSE_ALARM


def test_auto_takes_block_for_drawn_drafts():
    """Seed by seed the same texts, and the same drafts kept, as when asked for by name."""
    drafter = sd.ModelDrafter(remembered(DRAFT))
    rules = ("auto", "block", "rejection")
    auto, *others = [generate(remembered(TARGET), drafter, AT_ONE, 60, rule) for rule in rules]
    same = [auto.accepted == c.accepted and np.array_equal(auto.texts, c.texts) for c in others]
    assert same == [True, False]


# Model drafters -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "draft_temp"), cases([("temperature 1", None), ("top-k", 0.6)], ("top-k", 0.6))
)
def test_a_models_drafts_declare_the_law_after_temperature_and_filters(setting, draft_temp):
    """Of both tokens, whatever the first is; that they follow it is the conformance test's."""
    sampling = SETTINGS[setting]
    drafter = sd.ModelDrafter(remembered(DRAFT), draft_temp=draft_temp)
    if draft_temp is not None:
        sampling = replace(sampling, temp=draft_temp)
    first, second = (law_of(next_logits(tiny_llama(DRAFT), all_texts(i)), sampling) for i in (0, 1))
    for seed in range(50):
        context = sd.DraftContext(sampling=SETTINGS[setting], noise=Noise(seed), vocab_size=V)
        draft = drafter.begin(PROMPT, context).propose(2)
        own = [first[0], second[to_list(draft.tokens)[0]]]
        np.testing.assert_allclose(np.exp(np.array(draft.logprobs)), own, atol=1e-6)


def test_a_draft_temperature_of_0_is_greedy():
    """A point mass; and with a greedy target any draft temperature is."""
    for sampling, draft_temp in [(SETTINGS["top-p"], 0.0), (sd.Sampling(), 1.5)]:
        context = sd.DraftContext(sampling=sampling, noise=Noise(0), vocab_size=V)
        options = ({"draft_temp": draft_temp}, {"greedy": True})
        drafters = [sd.ModelDrafter(remembered(DRAFT), **how) for how in options]
        draft, greedy = (drafter.begin(PROMPT, context).propose(2) for drafter in drafters)
        assert draft.logprobs is None
        assert draft.tokens.tolist() == greedy.tokens.tolist()
    for wrong in (-0.5, float("nan")):
        with pytest.raises(ValueError, match="draft_temp="):
            sd.ModelDrafter(remembered(DRAFT), draft_temp=wrong)


@pytest.mark.parametrize("rule", cases(["rejection", "block"], "block"))
def test_a_model_that_drafts_for_itself_is_always_right(rule):
    """p = q: all drafts are kept over 200 tokens at temperature 1."""
    model = tiny.build("llama")
    options: dict[str, Any] = {"sampler": AT_ONE, "seed": 0, "rule": rule, "draft_length": 4}
    *_, last = sd.speculate(model, [3, 1, 2], sd.ModelDrafter(model), max_tokens=200, **options)
    assert last.stats.emitted == 200
    assert last.stats.acceptance_rate == 1.0
