"""Heads that stop by confidence: exact whatever they decide, and asked as a draft model is."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import heads
import specdec_mlx as sd
import tiny
from exact import TARGET, Rounds, Source
from heads import Shown
from selection import cases
from specdec_mlx.contracts import (
    MOST_WAITING,
    Draft,
    DraftContext,
    Evidence,
    GoesOn,
    Step,
)
from specdec_mlx.draft_length.parts import Model
from specdec_mlx.drafters.drawing import Draws, Pace, cut_while, draft_while
from specdec_mlx.drafters.heads.drafter import HeadDrafter
from specdec_mlx.drafters.heads.one_pass import PardDrafter
from specdec_mlx.sampling.noise import Noise
from specdec_mlx.testing.enumeration import Tokens, state_after
from test_stepwise import DECIDERS, PEAKED, WAYS, Coins, stop_at

EXACT = 1e-12
LONGEST = 4
GUESSED = (1, 2, 2, 1)
"""Tokens that a draft in one pass takes to stand before its later ones, whatever is drawn."""
PROMPT = [5, 17, 99, 3, 64, 17, 99, 42]
LAYERS = {"mtp": "qwen3_5", "mtp stack": "step3p5"}
"""A prediction layer that is used again and again, and several."""

STEPPING = ("eagle3", "eagle1", *LAYERS)
AT_ONCE = ("dflash", "medusa", "pard")


# The distribution of what comes out ---------------------------------------------------------------


class Path(Draws):
    """Draws that come out as one path; its rows are those of a source."""

    is_drawn = True

    def __init__(self, tokens: Tokens, rows: Sequence[np.ndarray], peeks: bool) -> None:
        self.tokens, self.rows, self.peeks = tokens, rows, peeks
        self.num_drawn = 0

    def __len__(self) -> int:
        return self.num_drawn

    def draw(self, logits: mx.array) -> mx.array:
        self.num_drawn += 1
        return mx.array([self.tokens[self.num_drawn - 1]])

    def log_confidence(self) -> mx.array:
        return self.log_confidences()[-1:]

    def log_confidences(self) -> mx.array:
        drawn = zip(self.rows, self.tokens[: self.num_drawn], strict=False)
        return mx.log(mx.array([float(row[x] if self.peeks else row.max()) for row, x in drawn]))

    def draft(self, length: int | None = None) -> Draft:
        return Draft(self.tokens[:length])


@dataclass(frozen=True, eq=False)
class Enumerated:
    """Every draft of up to 4 tokens that the package's own loops make of a source's rows."""

    source: Source
    goes_on: GoesOn
    at_once: bool
    peeks: bool = False
    overlaps: bool = False

    @cache  # noqa: B019  there are few, and each is enumerated many times
    def drafts(self, state: int) -> list[tuple[float, Tokens, np.ndarray]]:
        weights: dict[Tokens, float] = defaultdict(float)
        rows_of: dict[Tokens, Any] = {}
        for tokens in itertools.product(range(self.source.vocab_size), repeat=LONGEST):
            followed = GUESSED if self.at_once else tokens
            rows = [self.source.probs[state_after(state, followed[:i])] for i in range(LONGEST)]
            kept = len(self.ended(Path(tokens, rows, self.peeks)))
            chance = float(np.prod([row[token] for row, token in zip(rows, tokens, strict=True)]))
            weights[tokens[:kept]] += chance
            rows_of[tokens[:kept]] = np.array(rows[:kept]).reshape(kept, self.source.vocab_size)
        return [(weight, tokens, rows_of[tokens]) for tokens, weight in weights.items()]

    def ended(self, draws: Any) -> Draft:
        if self.at_once:
            draws.num_drawn = LONGEST
            return cut_while(draws, self.goes_on)
        pace = Pace(build=1.0, wait=1.0) if self.overlaps else Pace(wait=1.0)
        return draft_while(LONGEST, draws, lambda token: mx.zeros((1, 3)), self.goes_on, pace)


@pytest.mark.parametrize("way", ["stepwise", "overlapping", "at once"])
@pytest.mark.parametrize("how", DECIDERS)
@pytest.mark.parametrize("name", cases(list(WAYS), "block"))
def test_the_loops_leave_the_joint_distribution_alone(name: str, how: str, way: str) -> None:
    """Of two rounds and three tokens, for a head that steps and for one that drafts at once."""
    overlaps = way == "overlapping"
    drafting = Enumerated(PEAKED, DECIDERS[how], way == "at once", overlaps=overlaps)
    lengths = {len(tokens) for state in range(7) for _, tokens, _ in drafting.drafts(state)}
    assert len(lengths) > 1
    assert Rounds(TARGET, drafting, WAYS[name]).total_variation(2, 3) < EXACT


@pytest.mark.parametrize("at_once", [False, True])
def test_a_loop_that_is_told_of_the_draws_is_caught(at_once: bool) -> None:
    """By the same enumeration."""
    drafting = Enumerated(PEAKED, DECIDERS["threshold"], at_once, peeks=True)
    assert Rounds(TARGET, drafting, WAYS["block"]).total_variation(1, 3) > 0.01


# The sessions -------------------------------------------------------------------------------------


target = cache(partial(tiny.build, "qwen3_5"))


@cache
def drafter(kind: str) -> Any:
    if kind == "pard":
        return PardDrafter(tiny.build("qwen2", seed=3), mask_token=127)
    make = heads.mtp(LAYERS[kind]) if kind in LAYERS else heads.HEADS[kind]
    return HeadDrafter(heads.random_head(make, target()))


def shown(kind: str, sampling: sd.Sampling, overlaps: bool = False) -> Shown:
    made = Shown(drafter(kind), PROMPT, DraftContext(sampling, noise=Noise(7), vocab_size=128))
    if hasattr(made.session, "pace"):
        made.session.pace = Pace(build=float(overlaps), wait=1.0)
    return made


@pytest.mark.parametrize("temp", [0.0, 1.0])
@pytest.mark.parametrize("kind", STEPPING + AT_ONCE)
def test_a_stopped_draft_is_the_head_of_the_whole_one(kind: str, temp: float) -> None:
    """Tokens and distributions, wherever it stops; and so is the next one, after a verdict."""
    sampling = sd.Sampling(temp=temp)
    stops = [(1, Step.STOP_AFTER), (3, Step.STOP_BEFORE), (3, Step.STOP_AFTER)]
    for overlaps, (stop, step) in itertools.product((False, True), stops):
        whole, stopped = shown(kind, sampling), shown(kind, sampling, overlaps)
        for emitted in ([9], [11, 12]):
            expected = whole.propose(5)
            draft = stopped.session.propose_while(5, stop_at(stop, step))
            kept = stop - (step is Step.STOP_BEFORE)
            assert mx.array(draft.tokens).tolist() == mx.array(expected.tokens).tolist()[:kept]
            assert len(draft) == len(draft.evidence or ()) == kept
            if temp:
                both = np.array(draft.logprobs), np.array(expected.logprobs[:kept])
                assert np.allclose(*both, atol=1e-5)
            whole.emit(*emitted)
            stopped.emit(*emitted)


@pytest.mark.parametrize("kind", STEPPING + AT_ONCE)
def test_the_evidence_is_the_largest_probability_of_what_is_drawn_from(kind: str) -> None:
    """And the decision is asked once a position, in order, with all that came before."""
    asked: list[list[float]] = []

    def goes_on(evidence: Sequence[Evidence]) -> Step:
        asked.append([known.confidence or 0.0 for known in evidence])
        return Step.GO_ON

    draft = shown(kind, sd.Sampling(temp=1.0)).session.propose_while(4, goes_on)
    assert draft.logprobs is not None
    largest = mx.exp(mx.max(draft.logprobs, axis=-1)).tolist()
    assert [len(known) for known in asked] == [1, 2, 3, 4]
    assert asked[-1] == pytest.approx(largest, rel=1e-5)
    assert all(asked[-1][: len(known)] == known for known in asked)


@pytest.mark.parametrize("temp", [0.0, 1.0])
@pytest.mark.parametrize("kind", cases(STEPPING + AT_ONCE, "mtp", "dflash"))
def test_texts_are_the_same_however_it_stops(kind: str, temp: float) -> None:
    """Coupled: a seed's text, greedy: the target's; with decisions made by coins."""

    def text(one: Any, length: Any) -> list[int]:
        options = {"rule": "coupled", "seed": 5, "sampler": sd.Sampling(temp=temp)}
        tokens = sd.speculate(target(), PROMPT, one, max_tokens=24, draft_length=length, **options)
        return [token.token for token in tokens]

    coins = Coins(1)
    assert text(drafter(kind), coins) == text(None, 0)
    (part,) = coins._parts.values()
    assert isinstance(part, Model)
    assert (part.most_unread == MOST_WAITING) == (kind != "pard")
