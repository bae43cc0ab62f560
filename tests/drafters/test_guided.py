"""What a grammar among the processors forces is drafted first, without being asked for."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

import specdec_mlx as sd
import tiny_text
from specdec_mlx.drafters.grammar import Grammar, GrammarDrafter, GrammarProcessor
from specdec_mlx.drafters.guided import IndexDrafter, with_forced

PROMPT = "the cat and the hat in the rain, the cat"
WORDS = [[40, 41, 42, 43, 44], [50, 51, 52, 53, 54]]


class Index:
    """Either of two words, over and over; as Outlines' index tells of its states."""

    def get_initial_state(self) -> int:
        return 0

    def get_allowed_tokens(self, state: int) -> list[int]:
        word, place = divmod(state, 10)
        return [WORDS[word][place]] if place else [word[0] for word in WORDS]

    def get_next_state(self, state: int, token: int) -> int | None:
        if token not in self.get_allowed_tokens(state):
            return None
        word, place = divmod(state, 10)
        if not place:
            word = [word[0] for word in WORDS].index(token)
        return word * 10 + place + 1 if place < 4 else 0


class Follows:
    """A processor that remembers, as Outlines' do: it is shown each token once."""

    def __init__(self) -> None:
        self.index = Index()
        self.state: Any = None

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if self.state is None:
            self.state = self.index.get_initial_state()
        else:
            self.state = self.index.get_next_state(self.state, int(tokens[-1].item()))
        allowed = mx.zeros(logits.shape[-1], mx.bool_)
        allowed[mx.array(self.index.get_allowed_tokens(self.state))] = True
        return mx.where(allowed, logits, -mx.inf)


def run(drafter: Any, processor: Any) -> tuple[list[int], Any]:
    given = tiny_text.model(), tiny_text.tokenizer(), PROMPT, 40
    how: Any = {"drafter": drafter, "num_draft_tokens": 4, "logits_processors": [processor]}
    responses = list(sd.stream_generate(*given, **how))
    return [response.token for response in responses], responses[-1].stats


def test_what_an_index_forces_is_drafted_by_any_drafter() -> None:
    """Four of five tokens have no choice; the text is plain decoding's."""
    expected, _ = run(None, Follows())
    assert {*expected} <= {*WORDS[0], *WORDS[1]}
    text, stats = run("ngram", Follows())
    assert text == expected
    forced = stats.by_drafter["IndexDrafter"]
    assert forced[0] == forced[1] > 20
    assert stats.tokens_per_pass > 2


def test_each_grammar_has_one_drafter_and_no_other_has_any() -> None:
    """In front of what was given; one that is there already stays; None stays plain decoding."""
    grammar = GrammarProcessor(Grammar.regex("(the|cat)+"), tiny_text.tokenizer())
    look_up, own = sd.PromptLookupDrafter(), GrammarDrafter()
    assert with_forced(None, [grammar]) is None
    for processors in ([], [lambda tokens, logits: logits]):
        assert with_forced(look_up, processors) is look_up
    assert with_forced(own, [grammar]) is own
    for drafter in (look_up, sd.FirstOf(own, look_up)):
        both = with_forced(drafter, [grammar])
        assert isinstance(both, sd.FirstOf)
        assert both.drafters[-1] is look_up
        assert len(both.drafters) == 2
    three: Any = with_forced(look_up, [grammar, Follows()])
    kinds = [type(one) for one in three.drafters]
    assert kinds == [IndexDrafter, GrammarDrafter, sd.PromptLookupDrafter]
