"""Whole texts with heads on real targets: the target's own, whatever the head proposes.

The heads have random weights, and so are nearly always wrong. Where it matters that some of a draft
is kept, part of what they propose is replaced by what is coming; their caches and rows are the same
as if they had proposed it themselves.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import heads
import specdec_mlx as sd
import test_distribution as distribution
import tiny
from scripted import OracleDrafter
from selection import FULL, cases
from specdec_mlx.checks.stand_ins import standing_alone
from specdec_mlx.checks.state import check_state
from specdec_mlx.checks.subject import Subject, Work
from specdec_mlx.drafters.heads.drafter import HeadDrafter
from specdec_mlx.drafters.heads.gemma4_assistant import AssistantSession
from specdec_mlx.drafters.heads.mtp_families import FAMILIES
from specdec_mlx.drafters.heads.recurrent import Level
from specdec_mlx.rules.block import Block
from specdec_mlx.target.keys_values import keys_values_of
from specdec_mlx.target.strategies import leaves
from specdec_mlx.target.taps import Taps
from specdec_mlx.token_ids import to_list
from specdec_mlx.types import Draft, DraftContext, FeatureRows, Features

KINDS = ("eagle3", "eagle1", "dflash", "medusa", "assistant")
PROMPT = [5, 17, 99, 3, 64, 17, 99, 42]
NUM_TOKENS = 40
"""Past the windows of the tiny models."""


@cache
def target(name: str) -> nn.Module:
    return tiny.build(name)


@cache
def plain(name: str) -> list[int]:
    return [t.token for t in sd.speculate(target(name), PROMPT, max_tokens=NUM_TOKENS)]


@cache
def drafter(kind: str, name: str) -> HeadDrafter:
    """A random head of a kind for a target; "mtp" is the layer of its own family."""
    make = heads.mtp(name) if kind == "mtp" else heads.HEADS[kind]
    return HeadDrafter(heads.random_head(make, target(name)))


@dataclass(frozen=True, eq=False)
class PartlyRight:
    """A head whose drafts are right at about half of the positions, and checked on the way.

    Before each draft a fresh session is shown the states of a fresh pass over the text, and has to
    draft the same.
    """

    head: HeadDrafter
    model: nn.Module
    text: Sequence[int]
    compared: list[int] = field(default_factory=list)

    @property
    def features(self) -> Features:
        return self.head.features

    def begin(self, prompt: Sequence[int], context: DraftContext) -> PartlyRightSession:
        return PartlyRightSession(self, prompt, context)


class PartlyRightSession:
    def __init__(self, drafter: PartlyRight, prompt: Sequence[int], context: DraftContext) -> None:
        self.drafter = drafter
        self.context = context
        self.tokens = list(prompt)
        self.num_prompt = len(prompt)
        self.session: Any = drafter.head.begin(prompt, context)
        vocab = context.vocab_size
        self.script = OracleDrafter(drafter.text, vocab, wrong=0.5).script()

    def see(self, features: FeatureRows) -> None:
        self.session.see(features)

    def observe(self, tokens: Sequence[int]) -> None:
        self.session.observe(tokens)
        self.tokens += tokens

    def propose(self, limit: int) -> Draft:
        draft = self.session.propose(limit)
        fresh = self.drafter.head.begin(self.tokens, self.context)
        fresh.see(rows_of(self.drafter.model, self.tokens[:-1], self.drafter.features))
        assert to_list(draft.tokens) == to_list(fresh.propose(limit).tokens)
        self.drafter.compared.append(len(draft))
        start = len(self.tokens) - self.num_prompt
        return Draft(self.script[start : start + len(draft)])


def rows_of(model: nn.Module, tokens: Sequence[int], wanted: Features) -> FeatureRows:
    """The states of a fresh pass over these tokens."""
    caches = make_prompt_cache(model)
    taps = Taps(model, wanted, lambda index: keys_values_of(caches, index))
    taps.read(lambda: model(mx.array([tokens]), cache=caches)[0])
    assert taps.features is not None
    return taps.features


TABLE = [
    *((kind, "qwen2") for kind in KINDS),
    ("eagle3", "qwen3_5"),
    ("eagle1", "qwen3_moe"),
    ("dflash", "gemma3_text"),
    ("medusa", "deepseek_v3"),
    ("assistant", "gemma3_text"),
    ("assistant", "gemma4"),
    *(("mtp", "llama" if name == "llama_mtp" else name) for name in FAMILIES),
]
"""Each kind of head on plain caches, each kind of target, and each family's own layer."""

IN_SHORT = (
    ("eagle3", "qwen2"),
    ("dflash", "gemma3_text"),
    ("medusa", "deepseek_v3"),
    ("assistant", "gemma4"),
    ("mtp", "qwen3_5"),
    ("mtp", "longcat_flash"),
    ("mtp", "step3p5"),
)


@pytest.mark.parametrize(("kind", "name"), cases(TABLE, *IN_SHORT))
def test_a_head_after_any_verdict_is_as_after_a_fresh_pass(kind: str, name: str) -> None:
    """On every kind of cache, over drafts kept in part, whole and not at all; and the text."""
    reader = PartlyRight(drafter(kind, name), target(name), plain(name))
    tokens = list(sd.speculate(target(name), PROMPT, reader, max_tokens=NUM_TOKENS, draft_length=4))
    assert [t.token for t in tokens] == plain(name)
    stats = tokens[-1].stats
    assert stats.accepted > 5
    assert stats.drafted - stats.accepted > 5
    assert sum(reader.compared) == stats.drafted


@pytest.mark.parametrize(("kind", "name"), IN_SHORT)
def test_greedy_text_is_the_targets_own_at_any_draft_length(kind: str, name: str) -> None:
    """With heads that are nearly always wrong."""
    for length in (0, 1, 2, 5, 8, "auto"):
        tokens = sd.speculate(
            target(name), PROMPT, drafter(kind, name), max_tokens=24, draft_length=length
        )
        assert [t.token for t in tokens] == plain(name)[:24], length


@pytest.mark.parametrize("name", ["qwen2", "gemma4"])
def test_an_assistant_reads_quantized_caches_and_earlier_turns(name: str) -> None:
    """What caches hold is unpacked, and of earlier turns too; the text is plain's."""
    model, options = target(name), dict[str, Any]()
    if name == "qwen2":  # with heads of 32, the smallest group
        model = tiny.build(name, num_attention_heads=2, num_key_value_heads=1)
        options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
    one = HeadDrafter(heads.random_head(heads.HEADS["assistant"], model))
    texts = []
    for reader in (None, one):
        options["prompt_cache"] = make_prompt_cache(model)
        text: list[int] = []
        for prompt in (PROMPT, [7, 7, 21]):
            turn = sd.speculate(model, prompt, reader, draft_length=3, **options)
            text += [next(turn).token for _ in range(12)]
            turn.close()
        texts.append(text)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("lets_go", [True, False])
def test_an_assistant_lets_the_caches_grow_in_place(
    lets_go: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their memory stays where it is from pass to pass; held for longer it would be copied."""
    if not lets_go:
        monkeypatch.setattr(AssistantSession, "end_draft", lambda self: None)
    caches = make_prompt_cache(target("qwen2"))
    tokens = sd.speculate(
        target("qwen2"),
        PROMPT * 10,
        drafter("assistant", "qwen2"),
        prompt_cache=caches,
        max_tokens=20,
        draft_length=3,
    )
    places = {place_of(caches[-1].keys) for _ in tokens}
    assert (len(places) == 1) == lets_go


def place_of(array: mx.array) -> int:
    """Where its numbers lie."""
    mx.eval(array)
    return int(np.asarray(memoryview(array)).ctypes.data)


def test_the_caches_of_an_earlier_turn_are_attended_to() -> None:
    """A second turn's first draft is that of a session that was shown the whole text."""
    model, one = target("gemma4"), drafter("assistant", "gemma4")
    text = [*PROMPT, 7, 7, 21]
    context = DraftContext(vocab_size=128)

    def draft_after(begin: int) -> list[int]:
        caches = make_prompt_cache(model)
        if begin:
            model(mx.array([text[:begin]]), cache=caches)
        taps = Taps(model, one.features, lambda index: keys_values_of(caches, index))
        taps.read(lambda: model(mx.array([text[begin:-1]]), cache=caches)[0])
        session = one.begin(text[begin:], context)
        session.see(taps.features)
        return to_list(session.propose(4).tokens)

    assert draft_after(0) == draft_after(len(PROMPT))


@pytest.mark.parametrize(("kind", "name"), IN_SHORT)
def test_a_seeds_text_is_the_same_with_a_head(kind: str, name: str) -> None:
    """Under the coupled rule, drawn at temperature 1, on every kind of cache."""
    options: dict[str, Any] = {"sampler": sd.Sampling(temp=1.0), "seed": 3, "rule": "coupled"}
    alone, with_head = (
        [
            t.token
            for t in sd.speculate(target(name), PROMPT, d, max_tokens=24, draft_length=k, **options)
        ]
        for d, k in ((None, 0), (drafter(kind, name), 4))
    )
    assert alone == with_head


@pytest.mark.parametrize(("kind", "name"), IN_SHORT)
def test_a_second_turn_and_an_early_end_leave_the_text_alone(kind: str, name: str) -> None:
    """A head does not know the earlier turn; the caches hold what was handed out."""
    model, one = target(name), drafter(kind, name)
    caches = {True: make_prompt_cache(model), False: make_prompt_cache(model)}
    texts = {}
    for with_head, kept in caches.items():
        loop = sd.speculate(
            model, PROMPT, one if with_head else None, prompt_cache=kept, draft_length=3
        )
        first = [next(loop).token for _ in range(5)]
        loop.close()
        lengths = {cache.offset for cache in leaves(kept) if hasattr(cache, "offset")}
        assert lengths == {len(PROMPT) + 5}
        second = sd.speculate(
            model, [7, 7, 21], one if with_head else None, prompt_cache=kept, max_tokens=12
        )
        texts[with_head] = first + [t.token for t in second]
    assert texts[True] == texts[False]


# Drawn at random ----------------------------------------------------------------------------------

RULES = ("rejection", "block")
NUM_TEXTS = 200


@FULL
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_texts_follow_the_targets_law_with_the_heads_q(kind: str, rule: str) -> None:
    """Chi-square of the joint of three tokens of a model with six, in each setting."""
    model = distribution.tiny_llama(distribution.TARGET)
    one = HeadDrafter(heads.random_head(heads.HEADS[kind], model))
    settings = ("temperature 1", "top-k")
    alarm = 1e-4 / (len(KINDS) * len(RULES) * len(settings))
    for name in settings:
        sampling = distribution.SETTINGS[name]
        count = distribution.generate(model, one, sampling, NUM_TEXTS, rule)
        assert distribution.p_value(count.texts, distribution.joint_law(sampling)) > alarm, name
        assert min(count.accepted, count.rejected) > NUM_TEXTS / 8


@dataclass(frozen=True, eq=False)
class Flattened:
    """A head that declares another distribution than it draws from."""

    head: HeadDrafter

    @property
    def features(self) -> Features:
        return self.head.features

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Any:
        session = self.head.begin(prompt, context)
        propose = session.propose

        def wrong(limit: int) -> Draft:
            draft = propose(limit)
            uniform = mx.full(draft.logprobs.shape, -mx.log(mx.array(6.0)))
            return Draft(draft.tokens, uniform)

        session.propose = wrong  # type: ignore[method-assign]
        return session


@FULL
def test_another_q_than_the_drafts_were_drawn_from_is_found() -> None:
    """By the comparison above."""
    model = distribution.tiny_llama(distribution.TARGET)
    wrong = Flattened(HeadDrafter(heads.random_head(heads.HEADS["eagle1"], model)))
    sampling = distribution.SETTINGS["temperature 1"]
    count = distribution.generate(model, wrong, sampling, 2 * NUM_TEXTS, "rejection")
    assert distribution.p_value(count.texts, distribution.joint_law(sampling)) < 1e-6


# The users' own check -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", cases(["eagle1", "eagle3"], "eagle1"))
def test_the_check_passes_for_a_head(kind: str) -> None:
    """Its parts have drafts to look at, though most of them ask sessions outside of generations."""
    model = distribution.tiny_llama(distribution.TARGET)
    one = HeadDrafter(heads.random_head(heads.HEADS[kind], model))
    report = sd.check(
        model,
        None,
        drafter=sd.FirstOf(sd.PromptLookupDrafter(min_ngram=5), one) if kind == "eagle3" else one,
        sampler=sd.Sampling(temp=1.0),
        draft_length=3,
        prompts=[[1, 4, 1, 5], [2, 0, 3]],
        budget=6,
        progress=False,
    )
    assert not [part.name for part in report.parts if part.status == "failed"]
    assert report["drafter's state"].status == "passed"


def test_a_head_out_of_step_is_found_by_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it drafted stays in its caches."""
    model = distribution.tiny_llama(distribution.TARGET)
    one = HeadDrafter(heads.random_head(heads.HEADS["eagle1"], model))
    subject = Subject(model, standing_alone(one, model), sd.Sampling(temp=1.0), Block(), TEXTS, 6)
    work = Work(time.perf_counter() + 60)
    assert check_state(subject, work).status == "passed"

    def wrong(self: Level) -> None:
        self.num_read = self.rollback.position

    monkeypatch.setattr(Level, "rewind", wrong)
    assert check_state(subject, work).status == "failed"


TEXTS = [[1, 4, 1, 5], [2, 0, 3], [5, 5, 1]]
