"""Forced tokens first: the drafters of what logits processors leave no choice of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec_mlx.contracts import (
    Draft,
    DraftContext,
    Drafter,
    LogitsProcessor,
    all_drafters,
)
from specdec_mlx.drafters.first_of import FirstOf
from specdec_mlx.drafters.grammar import FORCED, GrammarDrafter, GrammarProcessor


def with_forced(
    drafter: Drafter | None, processors: Sequence[LogitsProcessor]
) -> Drafter | None:
    """The drafter, asked after those of what grammars among a generation's processors force."""
    if drafter is None:
        return None
    first: list[Drafter] = [
        IndexDrafter(processor.index)
        for processor in processors
        if hasattr(getattr(processor, "index", None), "get_allowed_tokens")
    ]
    own = any(isinstance(one, GrammarDrafter) for one in all_drafters(drafter))
    if not own and any(isinstance(one, GrammarProcessor) for one in processors):
        first.append(GrammarDrafter())
    return FirstOf(*first, drafter) if first else drafter


@dataclass(frozen=True, eq=False)
class IndexDrafter:
    """Drafts what the index of a regular expression forces, of Outlines' logits processors.

    index: with `get_initial_state()`, `get_allowed_tokens(state)`, `get_next_state(state, token)`.
    """

    index: Any
    # the one token that is allowed at a state, or None
    forced: dict[int, int | None] = field(default_factory=dict)
    key = "IndexDrafter"

    def begin(self, prompt: Sequence[int], context: DraftContext) -> IndexSession:
        """Start where the text does."""
        return IndexSession(self)

    def forced_at(self, state: int) -> int | None:
        """The only token that may follow, None if there are several, or none is known."""
        if state not in self.forced:
            allowed: Any = self.index.get_allowed_tokens(state) or ()
            self.forced[state] = allowed[0] if len(allowed) == 1 else None
        return self.forced[state]


class IndexSession:
    """One generation's place in the index; None after a token that it does not have."""

    cheap = True

    def __init__(self, drafter: IndexDrafter) -> None:
        self.drafter, self.index = drafter, drafter.index
        self.state: int | None = self.index.get_initial_state()

    def propose(self, limit: int) -> Draft:
        """Forced tokens, as many as there are, up to `limit`."""
        tokens: list[int] = []
        state = self.state
        while state is not None and len(tokens) < limit:
            token = self.drafter.forced_at(state)
            if token is None:
                break
            tokens.append(token)
            state = self.index.get_next_state(state, token)
        return Draft(tokens, evidence=(FORCED,) * len(tokens))

    def observe(self, tokens: Sequence[int]) -> None:
        """Go on from state to state."""
        for token in tokens:
            if self.state is not None:
                self.state = self.index.get_next_state(self.state, token)
