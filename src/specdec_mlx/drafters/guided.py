"""Forced tokens first: the drafter of what a grammar leaves no choice of."""

from __future__ import annotations

from collections.abc import Sequence

from specdec_mlx.contracts import Drafter, LogitsProcessor, all_drafters
from specdec_mlx.drafters.first_of import FirstOf
from specdec_mlx.drafters.grammar import GrammarDrafter, GrammarProcessor


def with_forced(drafter: Drafter | None, processors: Sequence[LogitsProcessor]) -> Drafter | None:
    """The drafter, asked after those of what grammars among a generation's processors force."""
    if drafter is None:
        return None
    own = any(isinstance(one, GrammarDrafter) for one in all_drafters(drafter))
    if own or not any(isinstance(one, GrammarProcessor) for one in processors):
        return drafter
    return FirstOf(GrammarDrafter(), drafter)
