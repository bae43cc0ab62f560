"""What a grammar among the processors forces is drafted first, without being asked for."""

from __future__ import annotations

import specdec_mlx as sd
import tiny_text
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
