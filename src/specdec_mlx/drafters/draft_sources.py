"""Drafts that are drawn from logits: a session writes them, a source makes the logits.

Sources are draft models, trained heads, and passes of the target itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from specdec_mlx.arguments import check_int
from specdec_mlx.contracts import Draft, DraftContext, FeatureRows, GoesOn, Session
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
from specdec_mlx.drafters.tree_drafts import TreeDraws

# of nodes of a tree; None in a chain, each token after the last
Parents = Sequence[int] | None


def check_way_of_writing(drafter: Any) -> None:
    """Raise ValueError for the options of a drafter that its sessions cannot follow."""
    check_draft_temp(drafter.draft_temp)
    check_int("branches", drafter.branches, 1)


def way_of_writing(drafter: Any) -> str:
    """The options that a drafter's sessions follow, for its key."""
    branches = f", branches={drafter.branches}" if drafter.branches > 1 else ""
    return f"greedy={drafter.greedy}, draft_temp={drafter.draft_temp}{branches}"


class DraftSource(ABC):
    """Where the logits of a text's drafts come from: it follows the text, and steps beyond it.

    tokens: the text, at first the prompt without its first `num_unseen` tokens. at_once:
    `begin_draft` makes the `logits` [n, V] of a whole draft; else `next_logits` makes them token by
    token.
    """

    at_once = False
    logits: mx.array

    def __init__(self, prompt: Sequence[int], context: DraftContext, num_unseen: int = 0) -> None:
        self.context = context
        self.num_unseen = num_unseen
        self.tokens = list(prompt)[num_unseen:]
        self.num_prompt = len(self.tokens)
        self.places = [0]  # in `logits`, of the text's end and of the draft's nodes

    @abstractmethod
    def begin_draft(self, limit: int) -> int:
        """Read the text for a draft; returns how long it may be, 0 to `limit`."""

    def next_logits(self, tokens: mx.array | None, parents: Parents = None) -> mx.array:
        """Logits [1, V] after the text for None, or [n, V] after n further tokens of the draft.

        By default those that were made at once, whatever the tokens are. parents: of these among
        all that were given, `ROOT` for the text; None in a chain.
        """
        return self.logits[mx.array(places_after(self.places, tokens, parents))]

    def end_draft(self) -> None:  # noqa: B027  # most hold nothing
        """Release what was held for the draft; by default nothing is."""

    def hold_draft(self, num_tokens: int) -> None:  # noqa: B027  # optional
        """Count so many tokens of a shared draft as read; by default none is."""

    @property
    def takes_trees(self) -> bool:
        """True if its drafts may fork; by default they may."""
        return True

    def see(self, features: FeatureRows) -> None:  # noqa: B027  # optional
        """Take the target's rows, as `Session.see`; by default they are dropped."""

    def observe(self, tokens: Sequence[int]) -> None:
        """Add the tokens emitted to the text."""
        self.tokens += tokens

    def close(self, length: int) -> None:
        """End the generation after the first `length` tokens of prompt and output."""
        if self.context.on_close is not None:
            self.context.on_close(self, self.tokens[: length - self.num_unseen])


class WritingSession(Session):
    """A session that draws its drafts from a source's logits: chains, which may stop, or trees.

    drafter: its options are used.
    """

    def __init__(self, drafter: Any, source: DraftSource) -> None:
        self.source = source
        self.sampling = sampling_of_drafts(drafter, source.context.sampling)
        self.branches: int = drafter.branches
        self.chances = Chances.of("model")
        # the draft that is being verified, if it forked
        self.tree: TreeDraws | None = None
        self.pace = Pace()

    @property
    def forks(self) -> bool:
        """True if trees were asked for, and its source takes them."""
        return self.branches > 1 and self.source.takes_trees

    def propose(self, limit: int) -> Draft:
        """`limit` tokens as one lazy graph, or a tree of as many; fewer where it has no more."""
        source = self.source
        length = source.begin_draft(limit)
        if length and self.forks:
            text = source.context, self.sampling, source.tokens, source.num_prompt
            self.tree = TreeDraws(*text, self.branches, self.chances)
            draft = self.tree.write(source.next_logits, limit, length)
        elif source.at_once:
            draft = self.drawn(length).draft()
        else:
            draft = draft_to(length, self.draws(length), source.next_logits)
        source.end_draft()
        return draft

    def propose_while(self, limit: int, goes_on: GoesOn) -> Draft:
        """Up to `limit` tokens, as long as they are worth it; see `draft_while`, `truncate`."""
        source = self.source
        length = source.begin_draft(limit)
        if source.at_once:
            draft = truncate(self.drawn(length), goes_on)
        else:
            draft = draft_while(length, self.draws(), source.next_logits, goes_on, self.pace)
        source.end_draft()
        return draft

    def draws(self, at_once: int = DRAWN_AT_ONCE) -> ChainDraws:
        """An empty draft after the text; `at_once` tokens share an operation for their noise."""
        source = self.source
        return ChainDraws(source.context, self.sampling, source.tokens, source.num_prompt, at_once)

    def drawn(self, length: int) -> ChainDraws:
        """All tokens of a draft whose logits were made at once."""
        draws = self.draws(length)
        return draw_rows(draws, self.source.logits) if length else draws

    @property
    def reads_target(self) -> bool:
        """True if its source does."""
        return type(self.source).see is not DraftSource.see

    def see(self, features: FeatureRows) -> None:
        """Hand the rows of further positions to the source."""
        self.source.see(features)

    def observe(self, tokens: Sequence[int]) -> None:
        """Add the tokens emitted to the text, and learn from them if the draft forked."""
        if self.tree is not None:
            self.tree.learn(tokens)
            self.tree = None
        self.source.observe(tokens)

    def close(self, length: int) -> None:
        """End the generation after the first `length` tokens."""
        self.source.close(length)


def places_after(known: list[int], tokens: mx.array | None, parents: Parents) -> list[int]:
    """Places [n] in a draft of what follows the text, or n further nodes.

    known: [0], for the text's end, to which those of the nodes are added. See
    `DraftSource.next_logits`.
    """
    if tokens is None:
        return [0]
    above = [len(known) - 1] if parents is None else [parent + 1 for parent in parents]
    places = [known[node] + 1 for node in above]
    known += places
    return places
