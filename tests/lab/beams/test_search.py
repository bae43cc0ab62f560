"""Beam search with a drafter: the beams of a plain beam search, in fewer passes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import specdec_mlx as sd
import tiny
import tiny_text
from selection import in_one_test
from specdec_mlx import lab
from specdec_mlx.contracts import Draft, DraftContext, Drafter, Features, Session
from specdec_mlx.draft_length.value import Auto, Fixed
from specdec_mlx.lab.beams.search import (
    Beam,
    BeamDrafting,
    BeamRows,
    BeamSearch,
    guess_length_for,
    next_beams,
)
from specdec_mlx.models.anatomy import vocab_size_of

PROMPT = [5, 17, 99, 3, 41, 8, 5, 17, 99]
STEPS = 12
ARCHITECTURES = ["qwen2", "gemma3_text", "qwen3_next", "falcon_h1", "deepseek_v3"]
Found = list[tuple[tuple[int, ...], float]]

model = functools.cache(tiny.build)


def plain_search(
    target: nn.Module, num_beams: int, stop_tokens: frozenset[int] = frozenset()
) -> list[Found]:
    """The beams of each step, by a pass over the whole text of each beam, without caches."""
    beams: Found = [((), 0.0)]
    steps = []
    for _ in range(STEPS):
        candidates: Found = []
        for tokens, logprob in beams:
            if tokens and tokens[-1] in stop_tokens:
                candidates.append((tokens, logprob))
                continue
            logits = target(mx.array([[*PROMPT, *tokens]]))[0, -1].astype(mx.float32)
            row = np.array(logits - mx.logsumexp(logits)).astype(np.float64)
            candidates += [((*tokens, token), logprob + row[token]) for token in range(len(row))]
        beams = sorted(candidates, key=lambda beam: -beam[1])[:num_beams]
        steps.append(beams)
        if all(tokens[-1] in stop_tokens for tokens, _ in beams):
            break
    return steps


@functools.cache
def expected(name: str, num_beams: int) -> list[Found]:
    return plain_search(model(name), num_beams)


@dataclass
class BeamOracle(Drafter, Session):
    """Guesses the beams of the coming steps as a tree, wrong in every `wrong`th node."""

    steps: list[Found]
    wrong: int = 0
    text: list[int] = field(default_factory=list)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> BeamOracle:
        return BeamOracle(self.steps, self.wrong, list(prompt[len(PROMPT) :]))

    def propose(self, limit: int) -> Draft:
        here = tuple(self.text)
        coming = self.steps[len(here) : len(here) + limit]
        paths = (tokens for step in coming for tokens, _ in step)
        order = list(dict.fromkeys(path for path in paths if path[: len(here)] == here))
        parents = [order.index(path[:-1]) if path[:-1] in order else -1 for path in order]
        drafted = [
            (path[-1] + 1) % 50 if self.wrong and (len(path) + i) % self.wrong == 0 else path[-1]
            for i, path in enumerate(order)
        ]
        return Draft(drafted, parents=parents)

    def observe(self, tokens: Sequence[int]) -> None:
        self.text += tokens


def searched(
    target: nn.Module, num_beams: int, drafter: Any, stop_tokens: frozenset[int] = frozenset()
) -> BeamSearch:
    rows = BeamRows(target, PROMPT, num_beams, prefill_step_size=4)
    context = DraftContext(sampling=sd.Sampling(), vocab_size=vocab_size_of(target))
    drafting = drafter and BeamDrafting(drafter, PROMPT, context, rows.stream)
    search = BeamSearch(rows, num_beams, STEPS, stop_tokens, drafting, Fixed(3))
    search.run()
    return search


def assert_same(beams: Sequence[Beam], found: Found) -> None:
    assert [beam.tokens for beam in beams] == [tokens for tokens, _ in found]
    np.testing.assert_allclose(
        [beam.logprob for beam in beams], [logprob for _, logprob in found], atol=2e-4
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("num_beams", [1, 3])
def test_the_beams_are_those_of_a_plain_search(name: str, num_beams: int) -> None:
    steps = expected(name, num_beams)
    plain = searched(model(name), num_beams, None)
    assert_same(plain.beams, steps[-1])
    assert plain.num_passes == plain.num_steps == STEPS
    for wrong in (0, 3):
        guessing = searched(model(name), num_beams, BeamOracle(steps, wrong))
        assert_same(guessing.beams, steps[-1])
        assert guessing.num_steps == STEPS
        assert guessing.num_passes == STEPS // 4 if wrong == 0 else guessing.num_passes < STEPS


@in_one_test("name", ["qwen2", "qwen3_next"])
def test_a_draft_model_goes_two_ways_where_a_beam_does(name: str) -> None:
    """The target itself guesses each beam's greedy continuation, of a copy of its session too."""
    drafter = sd.ModelDrafter(model(name))
    search = searched(model(name), 3, drafter)
    assert_same(search.beams, expected(name, 3)[-1])
    assert searched(model(name), 1, drafter).num_passes == STEPS // 4


def test_stop_tokens_finish_beams_that_stay() -> None:
    """A finished beam competes as it is; the search ends when all are finished."""
    target, num_beams = model("qwen2"), 3
    steps = expected("qwen2", num_beams)
    stop = frozenset({steps[2][0][0][-1], steps[4][1][0][-1]})
    found = plain_search(target, num_beams, stop)
    assert any(tokens[-1] in stop for tokens, _ in found[-1])
    for drafter in (None, BeamOracle(found), BeamOracle(steps)):
        assert_same(searched(target, num_beams, drafter, stop).beams, found[-1])


@given(
    logprobs=st.lists(st.lists(st.floats(-9, 0), min_size=3, max_size=3), min_size=3, max_size=3),
    scores=st.lists(st.floats(-9, 0), min_size=3, max_size=3, unique=True),
    missing=st.sets(st.integers(0, 2), min_size=1),
)
@example(logprobs=[[0.0, -8.0, -9.0]] * 3, scores=[0.0, -1.0, -9.0], missing={1, 2})
def test_a_beam_is_done_without_only_where_it_cannot_matter(logprobs, scores, missing):
    """A decision without some continuations is the one that they would have brought."""
    beams = [Beam((i,), score) for i, score in enumerate(scores)]
    known = {(i,): list(enumerate(row)) for i, row in enumerate(logprobs)}
    whole = next_beams(beams, known, 2, frozenset())
    for beam in missing:
        del known[beam,]
    decided = next_beams(beams, known, 2, frozenset())
    assert decided is None or decided == whole


@pytest.mark.full
def test_drafters_by_name_and_draft_models_leave_the_beams_alone() -> None:
    """The automatic length measures plain passes first, and learns on in the next search."""
    target, tokenizer = tiny_text.model(), tiny_text.tokenizer()
    prompt = "the cat the cat the cat the"
    plain = lab.beam_search(target, tokenizer, prompt, 2, 40, drafter=None)
    assert plain.num_passes == plain.num_steps == 40
    for how in ({"drafter": "prompt-lookup"}, {"draft_model": tiny_text.model(seed=5)}):
        for length in (4, "auto", "auto"):
            found = lab.beam_search(
                target, tokenizer, prompt, 2, 40, num_draft_tokens=length, **how
            )
            assert [beam.tokens for beam in found.beams] == [beam.tokens for beam in plain.beams]
    learned = guess_length_for(target, 2, "auto")
    assert isinstance(learned, Auto)
    assert learned.prices.most > 0


def test_beams_come_as_texts_ranked_by_score() -> None:
    target, tokenizer = tiny_text.model(), tiny_text.tokenizer()
    stop = lab.beam_search(target, tokenizer, "the cat", 3, 12).beams[0].tokens[4]
    tokenizer = tiny_text.tokenizer(eos_token_ids=[stop])
    by_sum, by_mean = (
        lab.beam_search(target, tokenizer, "the cat", 3, 12, length_penalty=penalty)
        for penalty in (0.0, 1.0)
    )
    assert by_sum.text == by_sum.beams[0].text
    assert "stop" in {beam.finish_reason for beam in by_sum.beams}
    for beam in by_sum.beams:
        said = beam.tokens[:-1] if beam.finish_reason == "stop" else beam.tokens
        assert (beam.text, beam.score) == (tokenizer.decode(said), beam.logprob)
    means = [beam.logprob / len(beam.tokens) for beam in by_sum.beams]
    assert [beam.score for beam in by_mean.beams] == sorted(means, reverse=True)


def test_what_cannot_be_searched_is_refused_in_words() -> None:
    target, tokenizer = tiny_text.model(), tiny_text.tokenizer()
    with (
        pytest.warns(UserWarning, match="several texts"),
        pytest.raises(sd.errors.RowsError, match="rows of one batch"),
    ):
        lab.beam_search(tiny.build("mamba"), tokenizer, [1, 2, 3])

    class Reader:
        features = Features(layers=(0,))

        begin = pytest.fail

    with pytest.raises(sd.errors.UnreadableError, match="Reader reads the target's states"):
        lab.beam_search(target, tokenizer, [1, 2, 3], drafter=Reader())
    for wrong in ({"num_beams": 0}, {"max_tokens": 0}, {"num_draft_tokens": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            lab.beam_search(target, tokenizer, [1, 2, 3], **wrong)
