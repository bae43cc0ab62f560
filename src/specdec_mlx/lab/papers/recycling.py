"""Drafts from the target's own likeliest next tokens (Token Recycling, Luo et al. 2024).

The likeliest next tokens are noted at every computed position, also after rejected tokens. A draft
is a chain of likeliest successors. A tree, as in the paper, branches to other successors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from specdec_mlx.arguments import require
from specdec_mlx.contracts import (
    NO_DRAFT,
    Draft,
    DraftContext,
    Drafter,
    Evidence,
    FeatureRows,
    Features,
    LookUpSession,
    TextIndex,
    share_class,
)
from specdec_mlx.drafters.first_of import BestOf
from specdec_mlx.drafters.ngram import NGramDrafter
from specdec_mlx.drafters.suffix import SuffixDrafter
from specdec_mlx.lab.papers.tree_drafts import TokenPath
from specdec_mlx.memory.persistent import fingerprint_of
from specdec_mlx.memory.store import Memory

TOP = 8  # successors that are kept of each token, as in the paper
BRANCHES = 4  # successors of the last token that a tree goes on from
MOST_STEADY = 16  # A successor that came first so many times in a row is as sure as it gets


@dataclass(slots=True)
class Successors:
    """Guesses of one or more tokens after a context. The best and latest comes first.

    Attributes:
        texts: the guesses.
        steady: how often in a row the first guess came.
        right: how often the first guess stayed, out of `seen`.
        seen: how often guesses were noted after the first time.
    """

    texts: list[TokenPath] = field(default_factory=list)
    steady: int = 0
    right: int = 0
    seen: int = -1

    def evidence(self, rank: int) -> Evidence:
        """Evidence for each token of the guess with this rank."""
        share = share_class(self.right / self.seen) if self.seen else 0
        return Evidence(self.steady, share, rank=rank)

    def drafts(self) -> list[Draft]:
        ranked = enumerate(self.texts)
        return [Draft(text, evidence=[self.evidence(i)] * len(text)) for i, text in ranked]


@dataclass(eq=False, repr=False)
class SuccessorTable:
    """Guesses of the target after each context, shared by generations. An entry takes 1 kB.

    Attributes:
        successors: context -> its guesses, with the latest context last.
        most: limit of contexts. The oldest are dropped.
        top: limit of guesses for each context.
    """

    successors: dict[TokenPath, Successors] = field(default_factory=dict)
    most: int = 100_000
    top: int = TOP
    _others: dict[Any, Any] = field(default_factory=dict, init=False)

    def of(self, context: DraftContext) -> SuccessorTable:
        """The table for a tokenizer and vocabulary size. The first caller gets this table."""
        whose = fingerprint_of(context.tokenizer), context.vocab_size
        if whose == self._others.setdefault("first", whose):
            return self
        others: dict[Any, SuccessorTable] = self._others
        return others.setdefault(whose, SuccessorTable(most=self.most, top=self.top))

    def __repr__(self) -> str:
        """No content, because a drafter's key must not change with it."""
        return "<SuccessorTable>"

    def note(self, context: TokenPath, *texts: TokenPath) -> None:
        """Put guesses after a context before earlier guesses. The best guess comes first."""
        known = self.successors.pop(context, None) or Successors()
        # Steady first guesses are evidence that the guess is right.
        same = known.texts[:1] == [texts[0]]
        known.seen += 1
        known.right += same
        known.steady = min(known.steady + 1, MOST_STEADY) if same else 1
        known.texts = list(dict.fromkeys((*texts, *known.texts)))[: self.top]
        self.successors[context] = known  # A dict keeps the order, so the oldest context is first.
        if len(self.successors) > self.most:
            del self.successors[next(iter(self.successors))]

    def drafts(
        self, tokens: Sequence[int], length: int, width: int = 1, branches: int = BRANCHES
    ) -> Iterator[Draft]:
        """At most `branches` chains of `length` single tokens, from contexts of `width` tokens."""
        for rank in range(branches if length > 0 else 0):
            text, evidence = list(tokens[-width:]), list[Evidence]()
            while len(evidence) < length and (known := self.successors.get(tuple(text[-width:]))):
                # A chain branches at its first token only, and follows the best guesses from there.
                place = 0 if evidence else rank
                if place >= len(known.texts):
                    return
                text += known.texts[place]
                evidence.append(known.evidence(place))
            if evidence:
                yield Draft(text[-len(evidence) :], evidence=evidence)


@dataclass(frozen=True)
class RecyclingDrafter(Drafter):
    """Proposes the tokens that the target found likeliest when the last token occurred before.

    It reads the target's 8 likeliest tokens at every generated position, which takes a partial sort
    in each pass.

    Args:
        num_draft: most tokens in a draft.
        table: to use and extend. None for a new table.
        context: tokens of a context, 1 as in the paper, or 2.

    Raises:
        ValueError: another number.
    """

    num_draft: int = 4
    table: SuccessorTable | None = None
    context: int = 1
    features: ClassVar[Features] = Features(top=TOP, rejected=True)

    def __post_init__(self) -> None:
        require(self, self.num_draft >= 1, "num_draft", "an int >= 1")
        require(self, self.context in (1, 2), "context", "1 or 2")

    def begin(self, prompt: Sequence[int], context: DraftContext) -> LookUpSession:
        table = SuccessorTable() if self.table is None else self.table.of(context)
        first = max(0, len(prompt) - 1)
        index = RecyclingIndex(self, list(prompt), table, context.num_unseen, first)
        return LookUpSession(index)


@dataclass(eq=False)
class RecyclingIndex(TextIndex):
    """A text, and the rows of the target that are not in the table yet.

    Attributes:
        num_seen: positions whose rows were shown.
        first: position of the first row that goes into the table.
        waiting: position of the first row, and rows.
    """

    config: RecyclingDrafter
    tokens: list[int]
    table: SuccessorTable
    num_seen: int
    first: int
    waiting: list[tuple[int, Any]] = field(default_factory=list)

    def see(self, features: FeatureRows) -> None:
        """Keep the rows of new positions. Rows of the prompt are dropped uncomputed."""
        rows: Any = features.top_tokens
        if self.num_seen + len(rows) > self.first:
            self.waiting.append((self.num_seen, rows))
        self.num_seen += len(rows)

    def see_rejected(self, tokens: Sequence[int], features: FeatureRows) -> None:
        """Note the target's guesses after each of the rejected `tokens` [n]."""
        # Contexts of two tokens need the token before, which a rejected node does not report.
        if self.config.context == 1:
            self._note(tokens, 0, features.top_tokens)

    def append(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        for start, rows in self.waiting:
            self._note(self.tokens, start, rows)
        self.waiting.clear()

    def draft(self, limit: int, more: Sequence[int] = ()) -> Draft:
        return next(self._follow([*self.tokens[-self.config.context :], *more], limit), NO_DRAFT)

    def chains(self, limit: int) -> Sequence[Draft]:
        return list(self._follow(self.tokens, limit))

    def _follow(self, tokens: Sequence[int], limit: int) -> Iterator[Draft]:
        return self.table.drafts(tokens, min(limit, self.config.num_draft), self.config.context)

    def _note(self, tokens: Sequence[int], start: int, rows: Any) -> None:
        width = self.config.context
        for end, likeliest in enumerate(rows.tolist(), start + 1):
            # -1: a replay knows only the tokens of its text.
            if width <= end <= len(tokens) and likeliest[0] >= 0:
                context = tuple(tokens[end - width : end])
                self.table.note(context, *((token,) for token in likeliest))


def kept_recyclers() -> list[RecyclingDrafter]:
    """Drafters with contexts of two tokens and of one token, whose tables outlive generations."""
    return [RecyclingDrafter(table=SuccessorTable(), context=n) for n in (2, 1)]


def with_recycling(memory: Memory | str | None = None) -> BestOf:
    """Let prompt lookup, n-grams and Token Recycling compete.

    Args:
        memory: as for `SuffixDrafter`. None remembers nothing.
    """
    return BestOf(SuffixDrafter(memory), NGramDrafter(), *kept_recyclers())
