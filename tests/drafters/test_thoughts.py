"""Thoughts before an answer: where they end, with any draft, and what holds after them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.generate import generate_step

import specdec_mlx as sd
from scripted import OracleDrafter, OracleTrees
from selection import in_one_test
from specdec_mlx.drafters.thoughts import Thought
from specdec_mlx.server.constraints import ThoughtBudget
from tiny_model_folder import write_model_folder

PROMPT = "the cat in the hat and the other cat in the hat"
NUMBERS = sd.drafters.Grammar.json_schema(
    {"type": "array", "items": {"enum": [10, 11, 20, 21]}, "minItems": 3, "maxItems": 6}
)

PLAIN, MARKED = Thought((7,)), Thought((7, 8), opens=(5, 6), calls=(9,))


@in_one_test(
    ("thought", "text", "expected"),
    [
        (PLAIN, [], None),
        (PLAIN, [1, 2], None),
        (PLAIN, [1, 7], 2),
        (PLAIN, [7, 1, 7], 1),
        (MARKED, [], 0),
        (MARKED, [5], None),
        (MARKED, [5, 1], 0),
        (MARKED, [1, 5, 6], 0),
        (MARKED, [5, 6, 7, 7], None),
        (MARKED, [5, 6, 7, 7, 8, 1], 5),
        (MARKED, [5, 6, 1, 9, 7, 8], 3),
        (MARKED, [5, 6, 7, 8, 9], 4),
    ],
)
def test_an_answer_begins_after_its_thought(
    thought: Thought, text: list[int], expected: int | None
) -> None:
    """A thought that is not closed has no answer yet; a call is part of the answer."""
    assert thought.answer_start(text) == expected


@given(st.lists(st.integers(5, 9), max_size=12), st.sampled_from([PLAIN, MARKED]))
def test_a_thought_is_closed_by_the_token_after_which_its_answer_is_known(
    text: list[int], thought: Thought
) -> None:
    """Read token by token it ends where it ends in the whole text."""
    text = [*thought.opens, *text]
    start = len(thought.opens)
    lengths = range(start + 1, len(text) + 1)
    closed = [n for n in lengths if thought.is_closed_by(text[start:n])]
    known = [n for n in lengths if thought.answer_start(text[:n]) is not None]
    assert closed[:1] == known[:1]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return mlx_lm.load(str(write_model_folder(tmp_path_factory.mktemp("model"))))[:2]  # type: ignore[return-value]


def tokens_of(
    pair: tuple[Any, Any], drafter: Any, processors: list[Any], **options: Any
) -> list[int]:
    options = {"max_tokens": 60, "num_draft_tokens": 5} | options
    given = {"drafter": drafter, "logits_processors": processors, **options}
    return [r.token for r in sd.stream_generate(*pair, PROMPT, **given)]


SAMPLED = {"sampler": sd.Sampling(temp=0.9), "seed": 5}


@pytest.mark.parametrize("how", [{}, SAMPLED], ids=["greedy", "seed"])
def test_a_grammar_begins_after_the_thought_whatever_is_drafted(
    how: dict[str, Any], pair: tuple[Any, Any]
) -> None:
    """Drafts run over the end of the thought: right ones, wrong ones, trees, and forced tokens."""
    tokenizer = pair[1]
    free = tokens_of(pair, None, [], **how)
    place = next(i for i in range(6, 40) if free[i] not in free[:i])
    thought = Thought((free[place],), eos_ids=tuple(tokenizer.eos_token_ids))

    def processors() -> list[Any]:
        return [sd.drafters.GrammarProcessor(NUMBERS, tokenizer, thought=thought)]

    expected = tokens_of(pair, None, processors(), **how)
    assert expected[: place + 1] == free[: place + 1]
    answer = tokenizer.decode(expected[place + 1 :], skip_special_tokens=True)
    assert 3 <= len(eval(answer)) <= 6
    size = pair[0].args.vocab_size
    drafters: list[Any] = [OracleDrafter(expected, size, wrong=wrong) for wrong in (0, 0.3, 1.1)]
    drafters += [
        OracleDrafter(free, size),
        OracleTrees(expected, size),
        sd.drafters.GrammarDrafter(),
        sd.drafters.FirstOf(sd.drafters.GrammarDrafter(), OracleDrafter(expected, size, wrong=0.2)),
        sd.drafters.FirstOf(sd.drafters.GrammarDrafter(), sd.ModelDrafter(pair[0])),
    ]
    for drafter in drafters:
        for length in (2, 5, 8):
            ours = tokens_of(pair, drafter, processors(), num_draft_tokens=length, **how)
            assert ours == expected, drafter


def test_a_thought_may_be_opened_or_left_out(pair: tuple[Any, Any]) -> None:
    """Where the model may open it, the first token is the mark's or the grammar's, and a mark of
    several tokens is written whole. A thought does not end the text."""
    tokenizer = pair[1]
    end = tokenizer.eos_token_id
    opens, closes = tokenizer.encode("<x"), tokenizer.encode("y>")
    assert min(len(opens), len(closes)) > 1
    thought = Thought((*closes,), opens=(*opens,), eos_ids=(end,))
    processor = sd.drafters.GrammarProcessor(NUMBERS, tokenizer, thought=thought)
    place = processor.beginning()

    def allowed(text: list[int]) -> set[int]:
        place.go_to(text)
        flags = place.allowed(pair[0].args.vocab_size + 8).tolist()
        return {token for token, flag in enumerate(flags) if flag}

    (begins,) = tokenizer.encode("[")
    assert place.forced() == []
    assert allowed([]) == {begins, opens[0]}
    assert allowed(opens[:1]) == {opens[1]}
    assert allowed(opens) == {*range(pair[0].args.vocab_size + 8)} - {end}
    assert place.forced() == []
    answers = [[begins], [*opens, *closes], [*opens, *closes, begins]]
    digits = allowed(answers[0])
    assert digits == allowed(answers[2])
    assert opens[0] not in digits
    assert allowed(answers[1]) == {begins}
    assert place.forced()[:1] == [begins]
    assert allowed([]) == {begins, opens[0]}  # and back again


# Budgets


def closed_by_hand(
    pair: tuple[Any, Any], thought: Thought, most: int, num_tokens: int
) -> list[int]:
    """The greedy text with a thought of at most so many tokens, by mlx-lm and plain Python."""
    model, tokenizer = pair
    text: list[int] = []
    start = len(tokenizer.encode(PROMPT))

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        text = tokens[start:].tolist()
        is_open = text[: len(thought.opens)] == [*thought.opens]
        body = text[len(thought.opens) :]
        for place in range(len(body) + 1):
            before = body[:place]
            if any(
                mark and (*before[-len(mark) :],) == mark
                for mark in (thought.closes, thought.calls)
            ):
                is_open = False
        if not is_open or len(body) < most:
            return logits
        begun = max(
            i for i in range(len(thought.closes)) if body[len(body) - i :] == [*thought.closes[:i]]
        )
        return mx.where(mx.arange(logits.shape[-1]) == thought.closes[begun], 0.0, -mx.inf)[None]

    for token, _ in generate_step(
        mx.array(tokenizer.encode(PROMPT)),
        model,
        max_tokens=num_tokens,
        logits_processors=[processor],
    ):
        text.append(int(token))
    return text


def test_a_thought_is_closed_when_its_budget_is_used(pair: tuple[Any, Any]) -> None:
    """Greedy, by mlx-lm's own loop with the rule written out: marks of one and of several tokens,
    thoughts that end in time, by a call too, and texts that do not begin with a thought."""
    tokenizer = pair[1]
    free = tokens_of(pair, None, [], max_tokens=40)
    new = next(free[i] for i in range(4, 30) if free[i] not in free[:i])
    unseen = next(token for token in range(40, 200) if token not in free)
    other = (*tokenizer.encode("Qz#"),)
    assert len(other) > 1
    thoughts = [
        Thought((unseen,)),
        Thought(other),
        Thought((new,)),
        Thought((free[12], *other)),  # a mark that the text has begun by itself
        Thought((unseen,), calls=(new,)),
        Thought(other, opens=(*free[:2],)),
        Thought(other, opens=(unseen,)),
    ]
    for thought in thoughts:
        for most in (0, 5, 12, 13, 39):
            expected = closed_by_hand(pair, thought, most, 40)
            ours = tokens_of(pair, None, [ThoughtBudget(thought, most)], max_tokens=40)
            assert ours == expected[: len(ours)], (thought, most)
    assert expected[:39] == free[:39]


@pytest.mark.parametrize("how", [{}, SAMPLED], ids=["greedy", "seed"])
def test_a_budget_gives_one_text_whatever_is_drafted(
    how: dict[str, Any], pair: tuple[Any, Any]
) -> None:
    """Drafts run over the place where the thought is closed, and a grammar may come after it."""
    tokenizer, size = pair[1], pair[0].args.vocab_size
    thought = Thought((*tokenizer.encode("Qz"),), eos_ids=(tokenizer.eos_token_id,))
    free = tokens_of(pair, None, [], **how)
    for most, grammar in ((3, None), (10, NUMBERS)):

        def processors(most: int = most, grammar: Any = grammar) -> list[Any]:
            budget = ThoughtBudget(thought, most)
            if grammar is None:
                return [budget]
            given = {"thought": thought}
            return [budget, sd.drafters.GrammarProcessor(grammar, tokenizer, **given)]

        expected = tokens_of(pair, None, processors(), **how)
        end = most + len(thought.closes)
        assert expected[:end] == [*free[:most], *thought.closes]
        drafters: list[Any] = [OracleDrafter(expected, size, wrong) for wrong in (0, 0.3, 1.1)]
        drafters += [OracleDrafter(free, size), OracleTrees(expected, size)]
        drafters += [sd.ModelDrafter(pair[0]), sd.PromptLookupDrafter(min_ngram=1)]
        for drafter in drafters:
            ours = tokens_of(pair, drafter, processors(), num_draft_tokens=6, **how)
            assert ours == expected, (most, grammar, drafter)
