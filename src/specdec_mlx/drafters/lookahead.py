"""Lookahead decoding: n-grams that the target guessed in parallel (Fu et al. 2024, 2402.02057).

Beside the draft, the pass computes *rows*: guesses at the next positions, each made by the target
in an earlier pass from the guess before it, so that they settle as in Jacobi iteration. A token
that the target says after them ends an n-gram, which goes into a pool; drafts are n-grams of the
pool that begin with the text's last token.

The rows are a tree. Of W columns, the first begins with the text's last token, and the others with
a trunk of W - 1 guesses that follow it; the later guesses of a column hang from its first one:

    text - x1 - x2 - x3         level 0, the trunk
      |     |    |    |
      y0    y1   y2   y3        level 1
      |     |    |    |
      z0    z1   z2   z3        level 2: the tokens that the target says after these end n-grams

A target that takes no trees verifies the first chain alone, and of other drafters' drafts pairs are
noted: that is close to Token Recycling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar

from specdec_mlx.contracts import (
    Draft,
    DraftContext,
    Evidence,
    FeatureRows,
    Features,
    ValuesDrafts,
    key_of,
)
from specdec_mlx.drafters.tree_of import Text, draft_of, texts_of
from specdec_mlx.options import require
from specdec_mlx.token_ids import to_list

MOST_OF_A_TOKEN = 16  # N-grams that the pool keeps of each first token

NEXT_PLACE = 7919
"""Step between the places of the text that columns begin with: a prime, so that they spread."""


@dataclass(frozen=True)
class LookaheadDrafter:
    """Proposes n-grams that the target guessed in parallel, beside the text that it wrote.

    With a fixed draft length a draft is a tree of n-grams of the pool, and then of as many columns
    as there is room for; the automatic one grows it by its chances, and adds rows where a position
    costs less than `worth`. window: columns that are guessed in parallel, W. ngram: tokens of an
    n-gram, N. num_candidates: most n-grams in a draft of a fixed length. worth: tokens that a
    position of a row is worth (0.016 on chat, 0.05 on texts that repeat). ValueError for numbers
    that mean nothing.
    """

    window: int = 5
    ngram: int = 4
    num_candidates: int = 4
    worth: float = 0.01
    features: ClassVar[Features] = Features(top=1)

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("ngram", 2), ("num_candidates", 1), ("worth", 0.0)):
            require(self, getattr(self, name) >= least, name, f"at least {least}")

    def begin(self, prompt: Sequence[int], context: DraftContext) -> LookaheadSession:
        """Begin after `prompt` [n]."""
        return LookaheadSession(self, prompt)


class Window:
    """The rows: W columns of N - 1 levels of guesses at the text's next tokens.

    levels: [N - 1][W]; level k of column j stands k + j tokens after the text's last one.
    """

    def __init__(self, width: int, num_levels: int, text: Sequence[int]) -> None:
        self.width = width
        self.levels: list[list[int]] = [[] for _ in range(num_levels)]
        self._num_begun = 0
        self._fill(text)

    def columns(self) -> list[Text]:
        """Of each column the trunk up to its first token, and the guesses that hang from it."""
        trunk, *others = self.levels
        return [(*trunk[1 : j + 1], *(level[j] for level in others)) for j in range(self.width)]

    def advance(self, said: Sequence[int | None], text: Sequence[int], num_emitted: int) -> None:
        """Drop the first level; the target's tokens [W], None if not computed, are the last."""
        if any(token is not None for token in said):
            last = self.levels[-1]
            new = [last[j] if token is None else token for j, token in enumerate(said)]
            self.levels, num_emitted = [*self.levels[1:], new], num_emitted - 1
        self.levels = [level[num_emitted:] for level in self.levels]
        self._fill(text)

    def _fill(self, text: Sequence[int]) -> None:
        """Begin new columns with tokens of the text, and the first one with its last token."""
        while len(self.levels[0]) < self.width:
            self._num_begun += 1
            place = NEXT_PLACE * self._num_begun
            for k, level in enumerate(self.levels):
                level.append(text[(place + k) % len(text)])
        self.levels[0][0] = text[-1]


class LookaheadSession:
    """One generation: the text, the pool, the window, and the latest proposal.

    _pool: first token -> what follows it [1 to N - 1] -> how often guessed, latest last. _tree, and
    _columns of the window in it: by the texts of nodes, of a column the last one's.
    """

    cheap = True

    def __init__(self, drafter: LookaheadDrafter, prompt: Sequence[int]) -> None:
        self._config = drafter
        self._tokens = list(prompt)
        self._pool: dict[int, dict[Text, int]] = {}
        self._window: Window | None = None
        self._tree: dict[Text, None] = {}
        self._columns: list[Text] = []
        self._rejected: tuple[list[int], list[int]] = ([], [])
        self._key = key_of(drafter)
        self._chain_key = f"{self._key} as a chain"

    def propose(self, limit: int) -> Draft:
        """A tree of at most `limit` tokens: n-grams of the pool, then rows."""
        self._tree, evidence = {}, list[Evidence]()
        for text, times in self._known()[: self._config.num_candidates]:
            while not _add(self._tree, text, limit):
                text = text[:-1]
            evidence += [Evidence(times)] * (len(self._tree) - len(evidence))
        self._columns = self._add_rows(self._tree, limit, self._config.window)
        evidence += [Evidence(0)] * (len(self._tree) - len(evidence))
        return draft_of(self._tree, evidence)

    def propose_tree(self, limit: int, values: ValuesDrafts, may_fork: Callable[[], bool]) -> Draft:
        """The part of the pool that is worth verifying, and rows where they cost little."""
        longest = min(limit, values.limit(self._chain_key, True))
        known = [(self._chain_key, draft) for draft in self.candidates(longest)]
        draft = values.grow(self._key, known, may_fork)
        self._tree, self._columns = dict.fromkeys(texts_of(draft)), []
        for num_columns in range(self._config.window, 0, -1):
            tree = dict(self._tree)
            columns = self._add_rows(tree, limit, num_columns)
            more = len(tree) - len(draft)
            price = values.extra_price(len(draft), len(tree)) if more else 0.0
            if price <= more * self._config.worth:
                if more and may_fork():
                    self._tree, self._columns, draft = tree, columns, draft_of(tree)
                break
        return draft

    def candidates(self, limit: int) -> list[Draft]:
        """The n-grams of the pool that go on from the last token, the latest first."""
        return [
            Draft(text[:limit], evidence=[Evidence(times, rank=rank)] * min(limit, len(text)))
            for rank, (text, times) in enumerate(self._known() if limit else ())
        ]

    def see(self, features: FeatureRows) -> None:
        """Drop the rows of further positions: the text says the same."""

    def see_rejected(self, tokens: Sequence[int], features: FeatureRows) -> None:
        """Take the tokens that the target would have said after those that were not kept [n]."""
        assert features.top_tokens is not None
        said = to_list(features.top_tokens[:, 0])
        if -1 not in said:  # a replay knows the rows of its text alone
            self._rejected = list(tokens), said

    def observe(self, tokens: Sequence[int]) -> None:
        """Append the tokens emitted; fill the pool, and move the window on."""
        columns, after = self._columns, self._said(tokens)
        self._tokens += tokens
        if self._window is not None:
            said = [after.get(column) for column in columns]
            said += [None] * (self._config.window - len(said))
            for token, first, *rest in zip(said, *self._window.levels, strict=True):
                if token is not None:
                    self._note(first, (*rest, token))
            self._window.advance(said, self._tokens, len(tokens))
        if not columns:
            for token, next_token in zip(*self._rejected, strict=True):
                self._note(token, (next_token,))
        self._tree, self._columns, self._rejected = {}, [], ([], [])

    def _known(self) -> list[tuple[Text, int]]:
        """The pool's n-grams from the last token on, the latest first, and how often guessed."""
        return list(reversed(self._pool.get(self._tokens[-1], {}).items())) if self._tokens else []

    def _note(self, first: int, rest: Text) -> None:
        """Note an n-gram; of each first token the oldest ones go."""
        some = self._pool.setdefault(first, {})
        some[rest] = some.pop(rest, 0) + 1
        if len(some) > MOST_OF_A_TOKEN:
            del some[next(iter(some))]

    def _add_rows(self, tree: dict[Text, None], limit: int, num_columns: int) -> list[Text]:
        """Add columns of the window, as many as there is room for; returns those added."""
        if not self._tokens:
            return []
        if self._window is None:
            self._window = Window(self._config.window, self._config.ngram - 1, self._tokens)
        columns = self._window.columns()[:num_columns]
        return list(takewhile(lambda column: _add(tree, column, limit), columns))

    def _said(self, tokens: Sequence[int]) -> dict[Text, int]:
        """The target's token after each node: of the whole proposal, or of its first chain."""
        after = {tuple(tokens[:n]): token for n, token in enumerate(tokens)}
        after = {text: token for text, token in after.items() if text in self._tree}
        first_chain: list[Text] = []
        for text in self._tree:
            if text[:-1] == (first_chain[-1] if first_chain else ()):
                first_chain.append(text)
        rejected, said = self._rejected
        for verified in (self._tree, first_chain):
            left = [text for text in verified if text not in after]
            if left and [text[-1] for text in left] == rejected:
                return after | dict(zip(left, said, strict=True))
        return after


def _add(tree: dict[Text, None], text: Text, limit: int) -> bool:
    """Add a text's node, and all before it, if there is room; True if it is there."""
    new = [part for n in range(1, len(text) + 1) if (part := text[:n]) not in tree]
    has_room = len(tree) + len(new) <= limit
    if has_room:
        tree |= dict.fromkeys(new)
    return has_room
