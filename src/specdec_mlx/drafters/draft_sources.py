"""Drafts that are drawn from logits. A source makes the logits, and a session draws from them.

Sources are draft models, trained heads, and passes of the target itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from specdec_mlx.arguments import AUTO, check_int
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
from specdec_mlx.drafters.shortlist import NarrowOutput, TextShortlist, check_draft_vocab
from specdec_mlx.drafters.tree_drafts import TreeDraws

# of new nodes of a tree; None in a chain, where each token follows the last token
Parents = Sequence[int] | None


def check_way_of_writing(drafter: Any) -> None:
    """Raise ValueError for wrong values of a drafter's draft_temp, branches or draft_vocab."""
    check_draft_temp(drafter.draft_temp)
    check_int("branches", drafter.branches, 1)
    check_draft_vocab(getattr(drafter, "draft_vocab", AUTO))


def way_of_writing(drafter: Any) -> str:
    """The options of a drafter that change its drafts, for its key."""
    branches = f", branches={drafter.branches}" if drafter.branches > 1 else ""
    shortlist = getattr(drafter, "shortlist", None)
    vocab = "" if shortlist is None else f", draft_vocab={shortlist.size}"
    return f"greedy={drafter.greedy}, draft_temp={drafter.draft_temp}{branches}{vocab}"


class DraftSource(ABC):
    """Makes the logits of a text's drafts. It follows the text and computes steps beyond its end.

    Attributes:
        tokens: the text, without the first `num_unseen` tokens of the prompt.
        at_once: `begin_draft` makes the `logits` [n, V] of a whole draft. Otherwise `next_logits`
            makes them token by token.
        places: rows in `logits`, of the end of the text and of each node of the draft.
        text_shortlist: chooses rows of the output layer for this text, or None for all rows.
        output_rows: the rows of the present draft, or None for all rows.
        log_confidences: log of the chances [n] that the source gives the tokens of its latest step.
            They may depend on earlier tokens, and not on these tokens. None without an estimate.
    """

    at_once = False
    logits: mx.array
    text_shortlist: TextShortlist | None = None
    output_rows: NarrowOutput | None = None
    log_confidences: mx.array | None = None

    def __init__(self, prompt: Sequence[int], context: DraftContext, num_unseen: int = 0) -> None:
        self.context = context
        self.num_unseen = num_unseen
        self.prompt = prompt
        self.tokens = list(prompt)[num_unseen:]
        self.num_prompt = len(self.tokens)
        self.places = [0]  # in `logits`, of the text's end and of the draft's nodes

    def choose_rows(self, text_shortlist: TextShortlist) -> None:
        """Draft from some rows of the output layer from now on, chosen for the text so far."""
        self.text_shortlist = text_shortlist
        text_shortlist.read([*self.prompt[: self.num_unseen], *self.tokens])

    def refresh_rows(self) -> None:
        """Take the rows for the next draft. They stay until its end."""
        assert self.text_shortlist is not None
        self.output_rows = self.text_shortlist.refresh()

    @abstractmethod
    def begin_draft(self, limit: int) -> int:
        """Read the text. Returns the longest possible draft, 0 to `limit`."""

    def next_logits(self, tokens: mx.array | None, parents: Parents = None) -> mx.array:
        """Logits [1, V] after the text, or [n, V] after n more tokens of the draft.

        Args:
            tokens: the tokens [n], or None for the first step.
            parents: their parents among all earlier tokens of the draft, `ROOT` for the end of the
                text. None in a chain.
        """
        return self.logits[mx.array(places_after(self.places, tokens, parents))]

    def end_draft(self) -> None:  # noqa: B027  # most hold nothing
        """Release the state of the draft. By default there is none."""

    def hold_draft(self, num_tokens: int) -> None:  # noqa: B027  # optional
        """Count the first tokens of a shared draft as read. By default nothing is counted."""

    @property
    def takes_trees(self) -> bool:
        """True if drafts may fork, as by default."""
        return True

    def see(self, features: FeatureRows) -> None:  # noqa: B027  # optional
        """Take the target's rows (see `Session.see`). By default they are dropped."""

    def observe(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        if self.text_shortlist is not None:
            self.text_shortlist.read(tokens)

    def close(self, length: int) -> None:
        """End the generation after the first `length` tokens of prompt and output."""
        if self.context.on_close is not None:
            self.context.on_close(self, self.tokens[: length - self.num_unseen])


class WritingSession(Session):
    """A session that draws chains or trees from the logits of a source.

    Attributes:
        source: the source of the logits.
        sampling: the way drafts are drawn.
        branches: most tokens at one position.
        chances: chances of tokens in trees, which learn.
        tree: the tree that is being verified, or None.
        pace: times of the steps of `propose_while`.
    """

    def __init__(self, drafter: Any, source: DraftSource) -> None:
        self.source = source
        self.sampling = sampling_of_drafts(drafter, source.context.sampling)
        self.branches: int = drafter.branches
        self.chances = Chances.of("model")
        self.tree: TreeDraws | None = None
        self.pace = Pace()
        if (shortlist := getattr(drafter, "shortlist", None)) is not None:
            source.choose_rows(shortlist.begin(source.context))

    @property
    def forks(self) -> bool:
        return self.branches > 1 and self.source.takes_trees

    def propose(self, limit: int) -> Draft:
        """A chain or a tree of `limit` tokens, or fewer if the source has no more."""
        source = self.source
        if source.text_shortlist is not None:
            source.refresh_rows()
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
        source = self.source
        if source.text_shortlist is not None:
            source.refresh_rows()
        length = source.begin_draft(limit)

        def estimate() -> mx.array | None:
            return source.log_confidences

        if source.at_once:
            draft = truncate(self.drawn(length), goes_on, estimate)
        else:
            next_logits, pace = source.next_logits, self.pace
            draft = draft_while(length, self.draws(), next_logits, goes_on, pace, estimate)
        source.end_draft()
        return draft

    def draws(self, at_once: int = DRAWN_AT_ONCE) -> ChainDraws:
        """An empty draft. The noise of `at_once` tokens is drawn in one operation."""
        source = self.source
        return ChainDraws(source.context, self.sampling, source.tokens, source.num_prompt, at_once)

    def drawn(self, length: int) -> ChainDraws:
        draws = self.draws(length)
        return draw_rows(draws, self.source.logits) if length else draws

    @property
    def reads_target(self) -> bool:
        # A source that does not override `see` drops the rows, and then nothing needs to be
        # captured.
        return type(self.source).see is not DraftSource.see

    def see(self, features: FeatureRows) -> None:
        self.source.see(features)

    def observe(self, tokens: Sequence[int]) -> None:
        if self.tree is not None:
            self.tree.learn(tokens)
            self.tree = None
        self.source.observe(tokens)

    def close(self, length: int) -> None:
        self.source.close(length)


def places_after(known: list[int], tokens: mx.array | None, parents: Parents) -> list[int]:
    """Rows [n] in `DraftSource.logits` after n more nodes, which are added to `known`."""
    if tokens is None:
        return [0]
    # `known` begins with the end of the text, so node i is entry i + 1, and ROOT is entry 0.
    above = [len(known) - 1] if parents is None else [parent + 1 for parent in parents]
    # A block's row k is for every token at depth k, whatever the tokens before it are.
    places = [known[node] + 1 for node in above]
    known += places
    return places
