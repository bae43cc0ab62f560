"""The base of sessions that draw drafts from logits: of draft models, and of trained heads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from specdec_mlx.arguments import whole
from specdec_mlx.contracts import Draft, DraftContext, GoesOn, Session
from specdec_mlx.draft_length.chances import Chances
from specdec_mlx.drafters.drawing import (
    DRAWN_AT_ONCE,
    ChainDraws,
    Pace,
    check_draft_temp,
    draft_to,
    draft_while,
    draw_rows,
    sampling_of_drafts,
    truncate,
)
from specdec_mlx.drafters.growing import TreeDraws

# of nodes of a tree; None in a chain, each token after the last
Parents = Sequence[int] | None


def check_way_of_writing(drafter: Any) -> None:
    """Raise ValueError for the options of a drafter that its sessions cannot follow."""
    check_draft_temp(drafter.draft_temp)
    whole("branches", drafter.branches, 1)


def way_of_writing(drafter: Any) -> str:
    """The options that a drafter's sessions follow, for its key."""
    branches = f", branches={drafter.branches}" if drafter.branches > 1 else ""
    return f"greedy={drafter.greedy}, draft_temp={drafter.draft_temp}{branches}"


class WritingSession(Session):
    """A session that draws its drafts from logits, which two methods of its own bring.

    `begin_draft` reads what was missed of the text, `next_logits` goes on from there.

    drafter: its options are used. tokens: the text, at first the prompt. on_close: called with the
    text [n] at the end of the generation.
    """

    def __init__(self, drafter: Any, prompt: Sequence[int], context: DraftContext) -> None:
        self.on_close: Callable[[Sequence[int]], None] | None = None
        how = {"greedy": drafter.greedy, "draft_temp": drafter.draft_temp}
        self.sampling = sampling_of_drafts(context.sampling, **how)
        self.context = context
        self.tokens = list(prompt)
        self.num_prompt = len(self.tokens)
        self.branches: int = drafter.branches
        self.chances = Chances.of("model")
        # the draft that is being verified, if it forked
        self.tree: TreeDraws | None = None
        self.pace = Pace()

    @abstractmethod
    def begin_draft(self, limit: int) -> int:
        """Read the text for a draft; returns how long it may be, 0 to `limit`."""

    @abstractmethod
    def next_logits(self, tokens: mx.array | None, parents: Parents = None) -> mx.array:
        """Logits [1, V] after the text for None, or [n, V] after n further tokens of the draft.

        parents: of these among all that were given, `ROOT` for the text; None in a chain.
        """

    def end_draft(self) -> None:  # most hold nothing
        """Release what was held for the draft; by default nothing is."""

    @property
    def forks(self) -> bool:
        """True if its drafts are trees."""
        return self.branches > 1

    def propose(self, limit: int) -> Draft:
        """`limit` tokens as one lazy graph, or a tree of as many; fewer where it has no more."""
        length = self.begin_draft(limit)
        if length and self.forks:
            self.tree = TreeDraws(
                *(self.context, self.sampling, self.tokens, self.num_prompt),
                self.branches,
                self.chances,
            )
            draft = self.tree.write(self.next_logits, limit, length)
        else:
            draft = draft_to(length, self.draws(length), self.next_logits)
        self.end_draft()
        return draft

    def propose_while(self, limit: int, goes_on: GoesOn) -> Draft:
        """Up to `limit` tokens, as long as they are worth it; see `draft_while`."""
        length = self.begin_draft(limit)
        draft = draft_while(length, self.draws(), self.next_logits, goes_on, self.pace)
        self.end_draft()
        return draft

    def draws(self, at_once: int = DRAWN_AT_ONCE) -> ChainDraws:
        """An empty draft after the text; `at_once` tokens share an operation for their noise."""
        return ChainDraws(self.context, self.sampling, self.tokens, self.num_prompt, at_once)

    def observe(self, tokens: Sequence[int]) -> None:
        """Add the tokens emitted to the text, and learn from them if the draft forked."""
        if self.tree is not None:
            self.tree.learn(tokens)
            self.tree = None
        self.tokens += tokens

    def close(self, length: int) -> None:
        """End the generation after the first `length` tokens."""
        if self.on_close is not None:
            self.on_close(self.tokens[:length])


def places_after(known: list[int], tokens: mx.array | None, parents: Parents) -> list[int]:
    """Places [n] in a draft of what follows the text, or n further nodes.

    known: [0], for the text's end, to which those of the nodes are added. See
    `WritingSession.next_logits`.
    """
    if tokens is None:
        return [0]
    above = [len(known) - 1] if parents is None else [parent + 1 for parent in parents]
    places = [known[node] + 1 for node in above]
    known += places
    return places


class AtOnceSession(WritingSession):
    """A session whose `begin_draft` makes the logits [n, V] of a whole draft in one pass."""

    logits: mx.array
    places: list[int]

    def next_logits(self, tokens: mx.array | None, parents: Parents = None) -> mx.array:
        """Logits of the places, whatever the tokens are."""
        return self.logits[mx.array(places_after(self.places, tokens, parents))]

    def propose(self, limit: int) -> Draft:
        """A chain whose tokens are drawn together, or a tree."""
        return super().propose(limit) if self.branches > 1 else self.drawn(limit).draft()

    def propose_while(self, limit: int, goes_on: GoesOn) -> Draft:
        """The part that is worth verifying; see `truncate`."""
        return truncate(self.drawn(limit), goes_on)

    def drawn(self, limit: int) -> ChainDraws:
        """All tokens of a draft, drawn."""
        length = self.begin_draft(limit)
        draws = self.draws(length)
        return draw_rows(draws, self.logits) if length else draws
