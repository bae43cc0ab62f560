"""Draft lengths: the contract, and what drafts that fork need.

A drafter with a tree of its own hands it over as a `Draft` with `parents`. Sessions that have
several drafts may leave it to the draft length which of them, or which tree of them, is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

from specdec_mlx.contracts.drafting import (
    ROOT,
    Draft,
    DraftSession,
    Evidence,
    RoundRecord,
)
from specdec_mlx.contracts.trees import chain
from specdec_mlx.token_ids import to_list


class DraftLength(Protocol):
    """Chooses the draft length of each round of one generation; learns from the rounds.

    `part` is the key of the drafter that is asked, one of several under `FirstOf`;
    `RoundRecord.part` of the one whose draft was verified.
    """

    def limit(self, part: str, cheap: bool) -> int:
        """Most tokens to draft now, >= 0; decided before anything is drawn.

        cheap: True if proposing is free, so that more may be asked for than `cut` keeps.
        """

    def cut(self, part: str, draft: Draft) -> int:
        """How many tokens of a point-mass draft to keep, 0 to K.

        A drawn draft is never shown here: dropping a token for what it is would change the output
        law.
        """

    def record(self, round_: RoundRecord) -> None:
        """Learn from a finished round."""


@runtime_checkable
class ValuesDrafts(DraftLength, Protocol):
    """A draft length that values drafts; default: they are verified as they are proposed."""

    def begin(
        self, part: str, session: DraftSession, may_fork: Callable[[], bool]
    ) -> Callable[[int], Draft]:
        """Register a session; returns the function that gets its drafts, by most tokens."""

    def choose(self, drafts: Sequence[tuple[str, Draft]]) -> tuple[str, Draft]:
        """The draft that is worth most, with its drafter's key; empty where none is worth any.

        drafts: point masses of at least one token, each with its drafter's key; at least one.
        """

    def beats_chosen(self, part: str) -> bool:
        """True if a session that costs time promises more than the draft that was chosen last."""

    def best_tree(
        self,
        part: str,
        drafts: Sequence[tuple[str, Draft]],
        may_fork: Callable[[], bool],
    ) -> Draft:
        """The chain or the tree that is worth most, of what several look-ups propose.

        drafts: chains of point masses, each with its drafter's key. may_fork: asked if a tree is
        best.
        """

    def price(self, num_drafted: int) -> float:
        """Price of verifying so many tokens, in tokens; infinite where it cannot be tried."""

    def wants_timing(self, num_drafted: int) -> bool:
        """True if a round's seconds are needed now; the loop then waits before it emits."""


TokenPath = tuple[int, ...]  # the tokens that lead to a node of a tree, its own last


def texts_of(draft: Draft) -> list[TokenPath]:
    """The text of each node."""
    tokens, texts = to_list(draft.tokens), list[TokenPath]()
    for token, parent in zip(tokens, draft.tree, strict=True):
        texts.append((*(() if parent == ROOT else texts[parent]), token))
    return texts


def draft_of(
    texts: Iterable[TokenPath], evidence: Sequence[Evidence | int] | None = None
) -> Draft:
    """The draft whose nodes have these texts, in order; a chain where they do not fork."""
    nodes = {text: node for node, text in enumerate(texts)}
    parents = [nodes.get(text[:-1], ROOT) for text in nodes]
    forks = parents != chain(len(parents))
    return Draft(
        [text[-1] for text in nodes], None, evidence, parents if forks else None
    )
