"""The text that comes out follows the target's law: the whole path, in MLX, by chi-square.

The joint law of the first three tokens after a prompt is known exactly, from the model's own
single-token passes over all 6 x 6 x 6 texts. 24,000 generations are held against it: every drafter
and rule, at temperature 1 and with top-p, top-k and min-p, from fixed seeds.

They run a tiny random Llama from a table of its logits, since otherwise nearly all the time would
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
from mlx_lm.models.cache import KVCache, make_prompt_cache

import specdec_mlx as sd
import tiny
from exact import WRONG_RULES
from selection import FULL, cases, in_one_test
from specdec_mlx.checks.chi_square import ChiSquare
from specdec_mlx.sampling.noise import Noise
from specdec_mlx.token_ids import to_list

V = 6
LENGTH = 3
NUM_DRAFT = 2  # so that the bonus token is among the three
PROMPT = [1, 4, 1]  # look-ups find 4, 1, 4
LOOK_UP = "prompt-lookup:min_ngram=1"

SETTINGS = {
    "temperature 1": sd.Sampling(temp=1.0),
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
RUNS_OF_TABLE = 370
MORE_RUNS_OF_TABLE = 2100  # where q matters most: drafts of a model at temperature 1
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
    grid = np.stack(np.meshgrid(*[range(V)] * length, indexing="ij"), -1) if length else np.zeros(0)
    continuations = grid.reshape(V**length, length).astype(int)
    return mx.array(np.hstack([np.tile(PROMPT, (V**length, 1)), continuations]))


def next_logits(model: nn.Module, texts: mx.array) -> mx.array:
    """Logits [B, V] after texts [B, n], by single-token passes."""
    caches = make_prompt_cache(model)
    for i in range(texts.shape[1]):
        logits = model(texts[:, i : i + 1], cache=caches)[:, -1]
    return logits


class Table(nn.Module):
    """A model's logits after every text of up to three tokens beyond the prompt, looked up."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.layers = [None]
        rows = np.zeros(((V + 1) ** LENGTH, V), np.float32)
        for length in range(LENGTH + 1):
            texts = np.array(all_texts(length))[:, len(PROMPT) :]
            rows[((texts + 1) * (V + 1) ** np.arange(length)).sum(-1)] = next_logits(
                model, all_texts(length)
            )
        self._rows = mx.array(rows)
        self._places = mx.array(
            [0] * len(PROMPT) + [(V + 1) ** i for i in range(LENGTH)] + [0] * 1000
        )

    def make_cache(self) -> list[KVCache]:
        return [KVCache()]

    def __call__(self, ids: mx.array, cache: list[KVCache]) -> mx.array:
        start = cache[0].offset
        digits = (ids + 1) * self._places[start : start + ids.shape[1]]
        digits = digits.astype(mx.float32)[:, None, :, None]
        keys, _ = cache[0].update_and_fetch(digits, digits)
        return self._rows[mx.cumsum(keys[:, 0, :, 0], axis=-1)[:, start:].astype(mx.int32)]


TARGET, DRAFT = 10, 6
"""Seeds of the two models: of a few dozen pairs, one for which all wrong variants show soon."""


@cache
def table(seed: int) -> Table:
    return Table(tiny_llama(seed))


def test_the_table_is_the_model():
    """Bit for bit, in one pass over several tokens and after a rollback."""
    for ids in all_texts(LENGTH)[:: V + 1]:
        looked_up, computed = [
            model(ids[None], cache=make_prompt_cache(model))[0, len(PROMPT) - 1 :]
            for model in (table(TARGET), tiny_llama(TARGET))
        ]
        assert mx.array_equal(looked_up, computed)
    caches = make_prompt_cache(table(TARGET))
    table(TARGET)(mx.array([[*PROMPT, 5, 5]]), cache=caches)
    caches[0].trim(2)
    again = table(TARGET)(mx.array([[2]]), cache=caches)[0]
    assert mx.array_equal(again, next_logits(tiny_llama(TARGET), mx.array([[*PROMPT, 2]])))


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
    for seed in range(runs):
        items = list(
            sd.speculate(
                model,
                PROMPT[:-1],
                drafter,
                max_tokens=1 + LENGTH,
                sampler=sampling,
                seed=seed,
                rule=rule,
                draft_length=NUM_DRAFT,
                logits_processors=[the_prompts_last],
            )
        )
        assert items[0].token == PROMPT[-1]
        count.texts[tuple(item.token for item in items[1:])] += 1
        count.accepted += items[-1].stats.accepted
        count.rejected += items[-1].stats.drafted - items[-1].stats.accepted
    return count


def p_value(seen: np.ndarray, law: np.ndarray) -> float:
    """Chance of a chi-square as large as this under the law."""
    return ChiSquare.of(seen.ravel(), law.ravel() * seen.sum()).p_value


# The tests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases(CASES, "cascade", "prompt lookup"))
def test_text_follows_the_targets_law(case):
    """Chi-square of the joint of 3 tokens, in each setting; nothing filtered comes."""
    make_drafter, rule = CASES[case]
    accepted = rejected = 0
    for name, sampling in SETTINGS.items():
        is_larger = name == "temperature 1" and case in LARGER_CASES
        runs = MORE_RUNS_OF_TABLE if is_larger else RUNS_OF_TABLE
        count = generate(table(TARGET), make_drafter(table(DRAFT)), sampling, runs, rule)
        assert p_value(count.texts, joint_law(sampling)) > FALSE_ALARM, name
        accepted += count.accepted
        rejected += count.rejected
    assert min(accepted, rejected) > 50


def rejects(drafter: Any, runs: int, rule: Any = "rejection") -> bool:
    """Whether the test above would fail at temperature 1, on so many runs of the table."""
    sampling = SETTINGS["temperature 1"]
    count = generate(table(TARGET), drafter, sampling, runs, rule)
    return p_value(count.texts, joint_law(sampling)) < FALSE_ALARM


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("residual replaced by p", 500),
        pytest.param("bonus at temperature 0.5", 2000, marks=FULL),
        pytest.param("p and q swapped", 200, marks=FULL),
        pytest.param("lenience 1.2", 3000, marks=FULL),
    ],
)
def test_wrong_rules_are_found(name, runs):
    """The same test rejects them."""
    assert rejects(sd.ModelDrafter(table(DRAFT)), runs, WRONG_RULES[name])


def test_auto_takes_block_for_drawn_drafts():
    """Seed by seed the same texts, and the same drafts kept, as when asked for by name."""
    sampling, drafter = SETTINGS["temperature 1"], sd.ModelDrafter(table(DRAFT))
    counts = [
        generate(table(TARGET), drafter, sampling, 60, rule)
        for rule in ("auto", "block", "rejection")
    ]
    same = [
        counts[0].accepted == other.accepted and np.array_equal(counts[0].texts, other.texts)
        for other in counts[1:]
    ]
    assert same == [True, False]


@dataclass(frozen=True, eq=False)
class Altered:
    """A model's drafts, changed before they are handed over."""

    alter: Any

    def begin(self, prompt: list[int], context: sd.DraftContext) -> sd.DraftSession:
        session = sd.ModelDrafter(table(DRAFT)).begin(prompt, context)
        propose = session.propose
        session.propose = lambda limit: self.alter(propose(limit))
        return session


def misdeclared(draft: sd.Draft) -> sd.Draft:
    """Wrong: the law handed over is one at temperature 0.7, and was not drawn from."""
    logprobs = draft.logprobs / 0.7
    return sd.Draft(draft.tokens, logprobs - mx.logsumexp(logprobs, axis=-1, keepdims=True))


def dropped(draft: sd.Draft) -> sd.Draft:
    """Wrong: a token drawn by less than a chance of 0.2 is taken back, and all after it."""
    own = mx.take_along_axis(draft.logprobs, draft.tokens[:, None].astype(mx.int32), axis=-1)
    sure = (mx.exp(own[:, 0]) >= 0.2).astype(mx.int32)
    return draft.head(int(mx.cumprod(sure).sum().item()))


@FULL
@pytest.mark.parametrize(("alter", "runs"), [(misdeclared, 2400), (dropped, 1000)])
def test_wrong_drafts_are_found(alter, runs):
    """The same test rejects them."""
    assert rejects(Altered(alter), runs)


# Model drafters -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("setting", "draft_temp"), [("temperature 1", None), ("top-k", 0.6)])
def test_a_models_drafts_follow_the_law_it_declares(setting, draft_temp):
    """1,000 drafts of 2 tokens: chi-square of their joint."""
    sampling = SETTINGS[setting]
    drafter = sd.ModelDrafter(table(DRAFT), draft_temp=draft_temp)
    seen = np.zeros((V, V))
    first, second = np.zeros((V,)), np.zeros((V, V))
    for seed in range(1000):
        context = sd.DraftContext(sampling=sampling, noise=Noise(seed), vocab_size=V)
        draft = drafter.begin(PROMPT, context).propose(2)
        x, y = to_list(draft.tokens)
        seen[x, y] += 1
        first, second[x] = np.exp(np.array(draft.logprobs, np.float64))
    if draft_temp is not None:
        sampling = replace(sampling, temp=draft_temp)
    own = [law_of(next_logits(tiny_llama(DRAFT), all_texts(i)), sampling) for i in (0, 1)]
    np.testing.assert_allclose(first, own[0][0], atol=1e-6)
    np.testing.assert_allclose(second[first > 0], own[1][first > 0], atol=1e-6)
    assert p_value(seen, own[0][0][:, None] * own[1]) > FALSE_ALARM


@in_one_test("num_accepted", [0, 1, 2, 3])
def test_a_models_law_is_right_after_any_verdict(num_accepted):
    """However much of a draft was kept, the next one continues what was really emitted."""
    sampling = SETTINGS["top-p"]
    context = sd.DraftContext(sampling=sampling, noise=Noise(0), vocab_size=V)
    session = sd.ModelDrafter(tiny_llama(DRAFT)).begin(PROMPT, context)
    text = list(PROMPT)
    for _ in range(3):
        kept = session.propose(3).tokens.tolist()[:num_accepted]
        emitted = [*kept, (sum(text) + 2) % V]
        session.observe(emitted)
        text += emitted
    draft = session.propose(2)
    first = draft.tokens[0].item()
    for row, seen in zip(draft.logprobs, (text, [*text, first]), strict=True):
        own = law_of(next_logits(tiny_llama(DRAFT), mx.array([seen]))[0], sampling)
        np.testing.assert_allclose(np.exp(np.array(row, np.float64)), own, atol=1e-6)


def test_a_draft_temperature_of_0_is_greedy():
    """A point mass; and with a greedy target any draft temperature is."""
    for sampling, draft_temp in [(SETTINGS["top-p"], 0.0), (sd.Sampling(), 1.5)]:
        context = sd.DraftContext(sampling=sampling, noise=Noise(0), vocab_size=V)
        drafter = sd.ModelDrafter(table(DRAFT), draft_temp=draft_temp)
        draft = drafter.begin(PROMPT, context).propose(2)
        greedy = sd.ModelDrafter(table(DRAFT), greedy=True).begin(PROMPT, context).propose(2)
        assert draft.logprobs is None
        assert draft.tokens.tolist() == greedy.tokens.tolist()
    for wrong in (-0.5, float("nan")):
        with pytest.raises(ValueError, match="draft_temp="):
            sd.ModelDrafter(table(DRAFT), draft_temp=wrong)


NUM_TOKENS = 200


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_model_that_drafts_for_itself_is_always_right(rule):
    """p = q: all drafts are kept over 200 tokens at temperature 1."""
    model = tiny.build("llama")
    *_, last = sd.speculate(
        model,
        [3, 1, 2],
        sd.ModelDrafter(model),
        max_tokens=NUM_TOKENS,
        sampler=sd.Sampling(temp=1.0),
        seed=0,
        rule=rule,
        draft_length=4,
    )
    assert last.stats.emitted == NUM_TOKENS
    assert last.stats.acceptance_rate == 1.0
