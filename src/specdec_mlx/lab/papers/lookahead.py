"""Lookahead decoding: n-grams that the target guessed in parallel (Fu et al. 2024, 2402.02057).

Beside the draft, a pass computes *rows*, which are guesses at the next positions. The target made
each guess in an earlier pass from the guess before it, so the guesses settle as in Jacobi
iteration. The target's token after a column ends an n-gram, which goes into a pool. Drafts are
n-grams of the pool that begin with the text's last token. The pool is a table like Token
Recycling's.

The rows are a tree of W columns. The first column begins with the text's last token. The others
begin with a trunk of W - 1 guesses after it, and the later guesses of a column hang from the trunk:

    text - x1 - x2 - x3         level 0, the trunk
      |     |    |    |
      y0    y1   y2   y3        level 1
      |     |    |    |
      z0    z1   z2   z3        level 2: the target's tokens after this level end n-grams

Each rejected token is noted too, with the target's next token, as in Token Recycling. If no column
was verified, or only the first chain, there is nothing else to note.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

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
)
from specdec_mlx.draft_length.value import Auto, MayFork
from specdec_mlx.lab.papers.recycling import SuccessorTable
from specdec_mlx.lab.papers.tree_drafts import TokenPath, TreeSession, draft_of, texts_of
from specdec_mlx.token_ids import to_list

MOST_OF_A_TOKEN = 16  # n-grams that the pool keeps of each first token

NEXT_PLACE = 7919
"""Step between the places of the text that columns begin with: a prime, so that they spread."""


@dataclass(frozen=True)
class LookaheadDrafter(Drafter):
    """Proposes n-grams that the target guessed in parallel, beside the text that it wrote.

    A draft of fixed length is a tree of n-grams from the pool, and then of as many columns as fit.
    The automatic draft length grows the tree by probabilities, and adds rows where a position costs
    less than `worth`.

    Args:
        window: W, the columns that are guessed in parallel.
        ngram: N, the tokens of an n-gram.
        num_candidates: most n-grams in a draft of fixed length.
        worth: tokens that a position of a row is worth (0.016 on chat, 0.05 on texts that repeat).

    Raises:
        ValueError: a number is out of range.
    """

    window: int = 5
    ngram: int = 4
    num_candidates: int = 4
    worth: float = 0.01
    features: ClassVar[Features] = Features(top=1, rejected=True)

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("ngram", 2), ("num_candidates", 1), ("worth", 0.0)):
            require(self, getattr(self, name) >= least, name, f"at least {least}")

    def begin(self, prompt: Sequence[int], context: DraftContext) -> TreeSession:
        index = LookaheadIndex(self, prompt)
        return TreeSession(self.key, [(self.key, LookUpSession(index))], grow=index.add_rows)


class Window:
    """W columns with N - 1 levels of guesses at the text's next tokens.

    Attributes:
        levels: [N - 1][W]. Level k of column j is k + j tokens after the text's last token.
    """

    def __init__(self, width: int, num_levels: int, text: Sequence[int]) -> None:
        self.width = width
        self.levels: list[list[int]] = [[] for _ in range(num_levels)]
        self._num_begun = 0
        self._fill(text)

    def columns(self) -> list[TokenPath]:
        """For each column, the tokens before its first guess and its guesses, as one path."""
        # The first level is a chain through the columns, and the deeper guesses hang from it.
        trunk, *others = self.levels
        return [(*trunk[1 : j + 1], *(level[j] for level in others)) for j in range(self.width)]

    def advance(self, guessed: Sequence[int | None], text: Sequence[int], num_emitted: int) -> None:
        """Drop the first level, and append the target's tokens as the last level.

        Args:
            guessed: [W] tokens of the target, None if not computed.
            text: the whole text.
            num_emitted: tokens of this round.
        """
        if any(token is not None for token in guessed):
            pairs = zip(self.levels[-1], guessed, strict=True)
            new = [last if token is None else token for last, token in pairs]
            self.levels, num_emitted = [*self.levels[1:], new], num_emitted - 1
        self.levels = [level[num_emitted:] for level in self.levels]
        self._fill(text)

    def _fill(self, text: Sequence[int]) -> None:
        while len(self.levels[0]) < self.width:
            self._num_begun += 1
            # Spread places give the new columns different guesses.
            place = NEXT_PLACE * self._num_begun
            for k, level in enumerate(self.levels):
                level.append(text[(place + k) % len(text)])
        # Column 0 continues the text itself.
        self.levels[0][0] = text[-1]


class LookaheadIndex(TextIndex):
    def __init__(self, drafter: LookaheadDrafter, prompt: Sequence[int]) -> None:
        self._config = drafter
        self._tokens = list(prompt)
        self._pool = SuccessorTable(top=MOST_OF_A_TOKEN)
        self._window = Window(drafter.window, drafter.ngram - 1, prompt or (0,))
        self._draft = NO_DRAFT
        self._rejected: tuple[list[int], list[int]] = ([], [])

    def draft(self, limit: int, more: Sequence[int] = ()) -> Draft:
        known: dict[TokenPath, Evidence | int] = {}
        for n_gram in self.chains(limit)[: self._config.num_candidates]:
            for text, evidence in zip(texts_of(n_gram), n_gram.evidence or (), strict=True):
                known.setdefault(text, evidence)
        n_grams = draft_of(known, list(known.values())).head(limit)
        self._draft = self._with_rows(n_grams, limit, self._config.window)
        return self._draft

    def add_rows(self, draft: Draft, limit: int, values: Auto, may_fork: MayFork) -> Draft:
        """The valuable part of the pool, with columns if they cost little."""
        least = values.price(len(draft))
        # The widest window that pays
        for num_columns in range(self._config.window, 0, -1):
            tree = self._with_rows(draft, limit, num_columns)
            more = len(tree) - len(draft)
            if more and values.price(len(tree)) - least <= more * self._config.worth:
                draft = tree if may_fork() else draft
                break
        self._draft = draft
        return draft

    def chains(self, limit: int) -> list[Draft]:
        known = self._pool.successors.get(tuple(self._tokens[-1:]))
        return [draft.head(limit) for draft in known.drafts()] if known and limit else []

    def see(self, features: FeatureRows) -> None:
        """Do nothing, because the text has the same tokens."""

    def see_rejected(self, tokens: Sequence[int], features: FeatureRows) -> None:
        """Take the target's tokens after the rejected `tokens` [n]."""
        assert features.top_tokens is not None
        next_tokens = to_list(features.top_tokens[:, 0])
        if -1 not in next_tokens:  # -1: a replay knows only the tokens of its text.
            self._rejected = list(tokens), next_tokens

    def append(self, tokens: Sequence[int]) -> None:
        # Accepted tokens show the target's next token after each of their prefixes.
        next_after = {tuple(tokens[:n]): token for n, token in enumerate(tokens) if n}
        left = [text for text in texts_of(self._draft) if text not in next_after]
        # Rejected nodes are reported in the draft's order.
        if [text[-1] for text in left] == self._rejected[0]:
            next_after |= zip(left, self._rejected[1], strict=True)
        for token, next_token in zip(*self._rejected, strict=True):
            self._pool.note((token,), (next_token,))
        # A complete column and the target's token after it are a new n-gram.
        guessed = [next_after.get(column) for column in self._window.columns()]
        for token, first, *rest in zip(guessed, *self._window.levels, strict=True):
            if token is not None:
                self._pool.note((first,), (*rest, token))
        self._tokens += tokens
        self._window.advance(guessed, self._tokens, len(tokens))
        self._draft, self._rejected = NO_DRAFT, ([], [])

    def _with_rows(self, draft: Draft, limit: int, num_columns: int) -> Draft:
        texts = dict.fromkeys(texts_of(draft))
        for column in self._window.columns()[:num_columns]:
            # Columns share the trunk, so each adds only its new nodes.
            wider = texts | dict.fromkeys(column[:n] for n in range(1, len(column) + 1))
            if len(wider) > limit:
                break
            texts = wider
        evidence = [*(draft.evidence or ()), *[Evidence()] * len(texts)]
        return draft_of(texts, evidence[: len(texts)])
