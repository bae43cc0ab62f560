"""What a grammar among the processors forces is drafted first, without being asked for."""

from __future__ import annotations

import mlx.core as mx

import specdec_mlx as sd
import tiny_text
from specdec_mlx.contracts import DraftContext
from specdec_mlx.drafters.grammar import Grammar, GrammarDrafter, GrammarProcessor, with_forced


def test_each_grammar_has_one_drafter_and_no_other_has_any() -> None:
    """In front of what was given; one that is there already stays; None stays plain decoding."""
    grammar = GrammarProcessor(Grammar.regex("(the|cat)+"), tiny_text.tokenizer())
    look_up, own = sd.PromptLookupDrafter(), GrammarDrafter()
    assert with_forced(None, [grammar]) is None
    for processors in ([], [lambda tokens, logits: logits]):
        assert with_forced(look_up, processors) is look_up
    assert with_forced(own, [grammar]) is own
    for drafter in (look_up, sd.drafters.FirstOf(own, look_up)):
        both = with_forced(drafter, [grammar])
        assert isinstance(both, sd.drafters.FirstOf)
        assert both.drafters[-1] is look_up
        assert len(both.drafters) == 2


def test_what_is_forced_after_tokens_that_may_not_come_is_not_noted() -> None:
    """A grammar can be asked ahead, as a cascade does; its own draft is what it was before."""
    tokenizer = tiny_text.tokenizer()
    grammar = GrammarProcessor(Grammar.regex("the cat|a dog"), tokenizer)
    grammar(mx.array([0]), mx.zeros((1, 300)))  # the text begins after one token
    session = GrammarDrafter().begin([0], DraftContext(logits_processors=[grammar]))
    (first,) = tokenizer.encode("the", add_special_tokens=False)[:1]
    assert len(session.propose(8)) == 0
    ahead = session.propose_after([first], 8)
    assert len(ahead) > 0
    assert len(session.propose(8)) == 0
    session.observe([first])
    assert session.propose(8) == ahead
