"""Drafts from what the target itself thought of next (Token Recycling, Luo et al. 2024).

At every position that the target computes, those of rejected drafts too, its likeliest next tokens
are noted under the token that stands there. A draft follows this table from token to token: a
bigram model of the target's own making, for the price of a look at its logits. A draft is a chain
of likeliest successors; a tree, as the paper has it, branches out to the others (`TreeOf`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from specdec_mlx.drafters.evidence import share_class
from specdec_mlx.token_ids import to_list
from specdec_mlx.types import Draft, DraftContext, Evidence, FeatureRows, Features, Guess

TOP = 8
"""Successors that are kept of each token, as in the paper."""

MOST_STEADY = 16
"""A successor that was the likeliest so many times in a row is as sure as it gets."""


@dataclass(slots=True)
class Successors:
    """What followed a token, by the target's latest opinion.

    tokens: the likeliest first. steady: how often in a row the first was the first. right, seen:
    how often it was what it had been the time before, of how many times.
    """

    tokens: list[int]
    steady: int = 1
    right: int = 0
    seen: int = 0


@dataclass(eq=False)
class SuccessorTable:
    """Token -> its likeliest successors; at most one entry for each token of the vocabulary.

    Give the same table to several generations, and each begins with what the others have left. An
    entry takes at most 300 bytes: 15 MB for 50,000 tokens.
    """

    successors: dict[int, Successors] = field(default_factory=dict)

    def note(self, token: int, likeliest: list[int]) -> None:
        """Note what the target thinks of next after a token [TOP], the likeliest first."""
        known = self.successors.get(token)
        if known is None:
            self.successors[token] = Successors(likeliest)
            return
        same = known.tokens[0] == likeliest[0]
        known.seen += 1
        known.right += same
        known.steady = min(known.steady + 1, MOST_STEADY) if same else 1
        known.tokens = likeliest

    def draft(self, token: int, length: int) -> Draft:
        """The chain of likeliest successors after a token, as far as it is known."""
        tokens: list[int] = []
        evidence: list[Evidence] = []
        while len(tokens) < length and (known := self.successors.get(token)) is not None:
            token = known.tokens[0]
            tokens.append(token)
            evidence.append(Evidence(known.steady, share_class(known.right, known.seen)))
        return Draft(tokens, evidence=evidence)

    def guesses(self, token: int) -> list[Guess]:
        """What the target thought of next after a token, the likeliest first; [] if unknown."""
        known = self.successors.get(token)
        if known is None:
            return []
        evidence = Evidence(known.steady, share_class(known.right, known.seen))
        return [Guess(likely, evidence) for likely in known.tokens]


@dataclass(frozen=True)
class RecyclingDrafter:
    """Proposes what the target itself thought likeliest after the last token, wherever that stood.

    It reads the target's 8 likeliest tokens at every position from the first generated token on,
    which takes the device one partial sort of the logits a pass.

    num_draft: most tokens in a draft, beside the loop's own limit.
    table: what is known at first, and goes on to be added to; None begins anew in each generation.

    Raises ValueError for a number below 1.
    """

    num_draft: int = 4
    table: SuccessorTable | None = None
    features: ClassVar[Features] = Features(top=TOP)

    def __post_init__(self) -> None:
        """Refuse a number that means nothing."""
        if self.num_draft < 1:
            raise ValueError(f"RecyclingDrafter: num_draft is {self.num_draft}, expected >= 1.")

    @property
    def key(self) -> str:
        """Its options, and whether its table is kept; not what is in it."""
        kept = self.table is not None
        return f"{__name__}.RecyclingDrafter(num_draft={self.num_draft}, kept={kept})"

    def begin(self, prompt: Sequence[int], context: DraftContext) -> RecyclingSession:
        """Begin after `prompt` [n]."""
        return RecyclingSession(self, prompt)


class RecyclingSession:
    """One generation: the text, and the rows that were shown and not yet noted."""

    cheap = True

    def __init__(self, drafter: RecyclingDrafter, prompt: Sequence[int]) -> None:
        """Nothing was shown yet."""
        self._num_draft = drafter.num_draft
        self._table = drafter.table if drafter.table is not None else SuccessorTable()
        self._tokens = list(prompt)
        self._first = max(0, len(prompt) - 1)
        self._num_seen = 0
        self._waiting: list[tuple[int, FeatureRows]] = []

    def see(self, features: FeatureRows) -> None:
        """Take the rows of further positions; those of the prompt are dropped uncomputed."""
        assert features.top_tokens is not None
        if self._num_seen + len(features.top_tokens) > self._first:
            self._waiting.append((self._num_seen, features))
        self._num_seen += len(features.top_tokens)

    def see_rejected(self, tokens: Sequence[int], features: FeatureRows) -> None:
        """Note what would have followed tokens that were not kept [n]."""
        self._note(tokens, features)

    def observe(self, tokens: Sequence[int]) -> None:
        """Append the tokens emitted, and note the rows of those that are known by now."""
        self._tokens += tokens
        for start, features in self._waiting:
            self._note(self._tokens[start:], features)
        self._waiting.clear()

    def propose(self, limit: int) -> Draft:
        """Follow the table from the last token."""
        if not self._tokens:
            return Draft()
        return self._table.draft(self._tokens[-1], min(limit, self._num_draft))

    def guesses_after(self, path: Sequence[int]) -> list[Guess]:
        """The successors of the last token, as the target had them last."""
        last = path[-1] if path else self._tokens[-1] if self._tokens else -1
        return self._table.guesses(last)

    def _note(self, tokens: Sequence[int], features: FeatureRows) -> None:
        assert features.top_tokens is not None
        rows = len(features.top_tokens)
        flat = to_list(features.top_tokens.flatten())
        width = len(flat) // max(1, rows)
        for i, token in enumerate(tokens[:rows]):
            likeliest = flat[i * width : (i + 1) * width]
            if likeliest[0] >= 0:  # a replay knows the rows of its text alone
                self._table.note(token, likeliest)
