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
from dataclasses import dataclass, field
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
from specdec_mlx.contracts.trees import ROOT, chain, first_path, path_to
from specdec_mlx.token_ids import to_list

MOST_OF_A_TOKEN = 16  # N-grams that the pool keeps of each first token

NEXT_PLACE = 7919
"""Step between the places of the text that columns begin with: a prime, so that they spread."""

Path = tuple[int, ...]  # tokens that follow the text, or an n-gram's first token


class Pool:
    """N-grams: first token -> what follows it [1 to N - 1] -> how often guessed, latest last."""

    def __init__(self) -> None:
        self.known: dict[int, dict[Path, int]] = {}

    def add(self, first: int, rest: Path) -> None:
        """Note an n-gram; of each first token the oldest ones go."""
        some = self.known.setdefault(first, {})
        some[rest] = some.pop(rest, 0) + 1
        if len(some) > MOST_OF_A_TOKEN:
            del some[next(iter(some))]

    def after(self, tokens: Sequence[int]) -> list[tuple[Path, int]]:
        """The n-grams that begin with the last token, the latest first, and how often guessed."""
        return list(reversed(self.known.get(tokens[-1], {}).items())) if tokens else []


class Window:
    """The rows: W columns of N - 1 levels of guesses at the text's next tokens.

    levels: [N - 1][W]; level k of column j stands k + j tokens after the text's last one.
    """

    def __init__(self, width: int, num_levels: int, text: Sequence[int]) -> None:
        self.width = width
        self.levels: list[list[int]] = [[] for _ in range(num_levels)]
        self._num_begun = 0
        self._fill(text)

    def columns(self) -> list[Path]:
        """Of each column the trunk up to its first token, and the guesses that hang from it."""
        trunk = self.levels[0]
        return [
            (*trunk[1 : j + 1], *(level[j] for level in self.levels[1:])) for j in range(self.width)
        ]

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
            got = getattr(self, name)
            if got < least:
                raise ValueError(f"LookaheadDrafter: {name} is {got}, expected >= {least}.")

    def begin(self, prompt: Sequence[int], context: DraftContext) -> LookaheadSession:
        """Begin after `prompt` [n]."""
        return LookaheadSession(self, prompt)


@dataclass
class _Proposal:
    """A tree in the making: paths to its nodes, and the last node of each of its columns."""

    nodes: dict[Path, int] = field(default_factory=dict)
    columns: list[int] = field(default_factory=list)

    def add(self, path: Path, limit: int | None = None) -> int | None:
        """The node of a path, added with all before it; None beyond `limit` nodes."""
        new = [path[:n] for n in range(1, len(path) + 1) if path[:n] not in self.nodes]
        if limit is not None and len(self.nodes) + len(new) > limit:
            return None
        for part in new:
            self.nodes[part] = len(self.nodes)
        return self.nodes[path] if path else ROOT

    def draft(self, evidence: Sequence[Evidence] | None = None) -> Draft:
        parents = [ROOT if len(path) == 1 else self.nodes[path[:-1]] for path in self.nodes]
        forks = parents != chain(len(parents))
        return Draft([path[-1] for path in self.nodes], None, evidence, parents if forks else None)


class LookaheadSession:
    """One generation: the text, the pool, the window, and the latest proposal."""

    cheap = True

    def __init__(self, drafter: LookaheadDrafter, prompt: Sequence[int]) -> None:
        self._config = drafter
        self._tokens = list(prompt)
        self._pool = Pool()
        self._window: Window | None = None
        self._proposal = _Proposal()
        self._rejected: tuple[list[int], list[int]] = ([], [])
        self._key = key_of(drafter)
        self._chain_key = f"{self._key} as a chain"

    def propose(self, limit: int) -> Draft:
        """A tree of at most `limit` tokens: n-grams of the pool, then rows."""
        self._proposal, times = _Proposal(), list[int]()
        for path, count in self._pool.after(self._tokens)[: self._config.num_candidates]:
            while self._proposal.add(path, limit) is None:
                path = path[:-1]
            times += [count] * (len(self._proposal.nodes) - len(times))
        self._add_rows(self._proposal, limit)
        times += [0] * (len(self._proposal.nodes) - len(times))
        return self._proposal.draft([Evidence(count) for count in times])

    def propose_tree(self, limit: int, values: ValuesDrafts, may_fork: Callable[[], bool]) -> Draft:
        """The part of the pool that is worth verifying, and rows where they cost little."""
        longest = min(limit, values.limit(self._chain_key, True))
        known = [(self._chain_key, draft) for draft in self.candidates(longest)]
        draft = values.grow(self._key, known, may_fork)
        tokens, parents = to_list(draft.tokens), draft.parents or chain(len(draft))
        self._proposal = _Proposal()
        for node in range(len(draft)):
            self._proposal.add(tuple(tokens[i] for i in path_to(node, parents)))
        rows = self._rows_worth(values, limit)
        if len(rows.nodes) > len(draft) and may_fork():
            self._proposal, draft = rows, rows.draft()
        return draft

    def candidates(self, limit: int) -> list[Draft]:
        """The n-grams of the pool that go on from the last token, the latest first."""
        return [
            Draft(path[:limit], evidence=[Evidence(times, rank=rank)] * min(limit, len(path)))
            for rank, (path, times) in enumerate(self._pool.after(self._tokens) if limit else ())
        ]

    def _rows_worth(self, values: ValuesDrafts, limit: int) -> _Proposal:
        """The proposal with as many columns of the window as are worth their positions."""
        before = len(self._proposal.nodes)
        for num_columns in range(self._config.window, 0, -1):
            rows = _Proposal(dict(self._proposal.nodes))
            self._add_rows(rows, limit, num_columns)
            more = len(rows.nodes) - before
            price = values.extra_price(before, before + more) if more else 0.0
            if price <= more * self._config.worth:
                return rows
        return self._proposal

    def _add_rows(self, proposal: _Proposal, limit: int, num_columns: int | None = None) -> None:
        """Add columns of the window, as many as there is room for; None: of all of them."""
        if not self._tokens:
            return
        if self._window is None:
            self._window = Window(self._config.window, self._config.ngram - 1, self._tokens)
        for path in self._window.columns()[:num_columns]:
            node = proposal.add(path, limit)
            if node is None:
                break
            proposal.columns.append(node)

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
        columns, after = self._proposal.columns, self._said(tokens)
        self._tokens += tokens
        if self._window is not None:
            for j, node in enumerate(columns):
                if node in after:
                    first, *rest = [level[j] for level in self._window.levels]
                    self._pool.add(first, (*rest, after[node]))
            missing: list[int | None] = [None] * (self._config.window - len(columns))
            came = [*map(after.get, columns), *missing]
            self._window.advance(came, self._tokens, len(tokens))
        if not columns:
            for token, next_token in zip(*self._rejected, strict=True):
                self._pool.add(token, (next_token,))
        self._proposal, self._rejected = _Proposal(), ([], [])

    def _said(self, tokens: Sequence[int]) -> dict[int, int]:
        """The target's token after each node: of the whole proposal, or of its first chain."""
        nodes = self._proposal.nodes
        paths = [tuple(tokens[:n]) for n in range(1, len(tokens))]
        after = {nodes[path]: tokens[len(path)] for path in paths if path in nodes}
        rejected, said = self._rejected
        draft = self._proposal.draft()
        parents = draft.parents or chain(len(draft))
        for verified in (range(len(draft)), first_path(parents)):
            left = [node for node in verified if node not in after]
            if left and [draft.tokens[node] for node in left] == rejected:
                return after | dict(zip(left, said, strict=True))
        return after
