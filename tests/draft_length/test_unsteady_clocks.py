"""The length of a draft model's drafts, whatever the clock does: the lab pair on made-up clocks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest

import scripted
import specdec_mlx as sd
from benchmarks.recorded_drafts import RecordedDrafter, record_drafts
from made_up_clocks import PACES, Machine, memory_taken, written
from selection import in_one_test
from specdec_mlx.contracts import DraftContext
from specdec_mlx.draft_length.costs import Curve
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.lab.pair import held_out_openings, load_pair
from specdec_mlx.lab.prompts import RecordedText

NUM_TEXTS, NUM_TOKENS, BEST = 6, 192, 4
COSTS = {
    0.1: Curve(((1, 1.0), (64, 1.0 + 63 * 0.15))),
    0.25: Curve(((1, 1.0), (64, 1.0 + 63 * 0.08))),
}
"""Of a draft step, and of passes, where K = 4 is the best fixed length of those up to 6."""
MEMORY = "memory comes and goes"
SEEDS = {"steady": [0], "slower once": [0], "changing": [0, 1, 2], "stalls": [0, 2, 3, 25, 28]}
MEMORY_SEEDS = range(6)
"""By pace; in some, stalls met the first draft of a text, or its first passes."""


@cache
def lab(num_texts: int = NUM_TEXTS) -> tuple[list[RecordedText], RecordedDrafter]:
    """Texts after openings that the target was not trained on, and the draft model's drafts."""
    pair, texts = load_pair(), []
    drafter = sd.ModelDrafter(pair.draft)
    for name, number, opening in [*held_out_openings()][:num_texts]:
        prompt = list(pair.tokenizer.encode(opening))
        tokens = sd.speculate(
            pair.target, prompt, drafter, max_tokens=NUM_TOKENS, num_draft_tokens=6
        )
        generated = [token.token for token in tokens]
        texts.append(RecordedText(f"{name} {number}", "lab", prompt, generated))
    return texts, RecordedDrafter("lab", texts, [record_drafts(pair.draft, t) for t in texts])


def machine(pace: str, step: float, seed: int) -> Machine:
    """A machine with a pace of `PACES`, or one whose memory is taken away and given back."""
    if pace == MEMORY:
        return Machine(PACES["steady"](seed), COSTS[step], step, memory_taken(seed))
    return Machine(PACES[pace](seed), COSTS[step], step)


def passes(step: float, length: int | str, pace: str = "steady", seed: int = 0) -> list[int]:
    """Passes of each text, with a new tuning; texts are the target's own (`written` asserts it)."""
    texts, drafter = lab()
    machines = [machine(pace, step, 100 * seed + i) for i in range(NUM_TEXTS)]
    return [
        written(text, drafter, length, machine).target_passes
        for text, machine in zip(texts, machines, strict=True)
    ]


@pytest.mark.full
@pytest.mark.parametrize("step", COSTS)
@in_one_test("pace", PACES)
def test_no_clock_silences_a_draft_model(step: float, pace: str) -> None:
    """Steady, slower from a moment on, slow and quick by turns, or stalling: at most 1.15 times the
    passes of the best fixed length, and no text above 1.5 times.
    """
    fixed = passes(step, BEST)
    found = [passes(step, "auto", pace, seed) for seed in SEEDS[pace]]
    assert sum(map(sum, found)) <= 1.15 * sum(fixed) * len(found)
    for auto in found:
        assert all(own <= 1.5 * best for own, best in zip(auto, fixed, strict=True))


@pytest.mark.full
@in_one_test("step", COSTS)
def test_memory_that_comes_and_goes_silences_no_draft_model(step: float) -> None:
    """A pass takes 1 in seven rounds of ten and 10 to 50 in the others, in bursts, whatever its
    width: at most 1.2 times the passes of the best fixed length, and no text above 1.5 times.
    """
    fixed = passes(step, BEST)
    found = [passes(step, "auto", MEMORY, seed) for seed in MEMORY_SEEDS]
    assert sum(map(sum, found)) <= 1.2 * sum(fixed) * len(found)
    worst = max(own / best for auto in found for own, best in zip(auto, fixed, strict=True))
    assert worst <= 1.5


@in_one_test("pace", [*PACES, MEMORY])
def test_a_draft_model_that_is_never_right_drafts_no_more_for_an_unsteady_clock(pace: str) -> None:
    """Its account is all that it may lose, and what a change of pace gives back is none of that."""
    texts, drafter = lab(2)
    drafted = 0
    for i, text in enumerate(texts):
        own = machine(pace, 0.1, i)
        drafted += written(text, drafter, "auto", own, Tuning(), is_right=False).drafted
    assert 0 < drafted <= 40


# A model with experts

COPIED = Curve(((1, 1.0), (2, 1.11), (5, 1.60), (64, 11.2)))
NEW = Curve(((1, 1.0), (2, 1.59), (3, 1.85), (5, 2.44), (8, 3.32), (64, 20.0)))
"""Costs of passes over rows that copy text, and over new rows."""


class LookUp(sd.Drafter):
    """Free drafts, wrong at a share of the places."""

    def __init__(self, texts: list[RecordedText], wrong: float) -> None:
        self.scripts = {}
        for seed, text in enumerate(texts):
            coins = random.Random(seed)
            self.scripts[tuple(text.prompt)] = [
                token if coins.random() > wrong else coins.randrange(9_999)
                for token in text.generated
            ]

    def begin(self, prompt: Sequence[int], context: DraftContext) -> scripted.ScriptedSession:
        script = self.scripts[tuple(prompt)]
        session = scripted.ScriptedSession(lambda start, limit: script[start : start + limit])
        session.cheap = True
        return session


@pytest.mark.full
def test_a_look_up_and_a_draft_model_each_have_the_costs_of_their_own_rows() -> None:
    """On a model with experts, both come within 0.97 of the best fixed length for their own curve,
    though they take turns from text to text and share what was learned.
    """
    texts, model = lab()
    drafters = (LookUp(texts, 0.2), model)

    def seconds(length: int | str, tuning: Tuning | None = None) -> list[float]:
        totals = [0.0, 0.0]
        for text in texts:
            for i, drafter in enumerate(drafters):
                machine = Machine(PACES["steady"](0), NEW, 0.1, copied=COPIED)
                written(text, drafter, length, machine, tuning)
                totals[i] += machine.seconds
        return totals

    best = [min(times) for times in zip(*map(seconds, (3, 4, 5, 9)), strict=True)]
    auto = seconds("auto", Tuning(has_experts=True))
    for fastest, found in zip(best, auto, strict=True):
        assert fastest >= 0.97 * found
