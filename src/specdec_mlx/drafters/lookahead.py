"""Lookahead decoding: n-grams that the target guessed in parallel (Fu et al. 2024).

arXiv 2402.02057. Beside the draft that is verified, the pass computes *rows*: guesses at the next
few positions, each made by the target in an earlier pass from the guess before it, so that they
settle as in Jacobi iteration. What the target says after them is one further token of an n-gram,
which goes into a pool; drafts are n-grams of the pool that begin with the text's last token.

The rows are a tree. Of W columns, the first begins with the text's last token, and the others with
a trunk of W - 1 guesses that follow it; the later guesses of a column hang from its first one:

    text - x1 - x2 - x3         level 0, the trunk
      |     |    |    |
      y0    y1   y2   y3        level 1
      |     |    |    |
      z0    z1   z2   z3        level 2: what the target says after these ends the n-grams

So they ride in the pass as any other nodes of a draft, a guess that happens to be right is kept,
and what the target says comes back with the rejected ones. Of a target that takes no trees only the
draft's first chain is verified, which has the first column at most, and of other drafters' drafts
what is said after a rejected token is noted as a pair: that is close to Token Recycling, with a
table of what was said last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from specdec_mlx.token_ids import to_list
from specdec_mlx.types import (
    ROOT,
    Draft,
    DraftContext,
    Evidence,
    FeatureRows,
    Features,
    ValuesDrafts,
)
from specdec_mlx.types.trees import chain, first_path

MOST_OF_A_TOKEN = 16
"""N-grams that the pool keeps of each first token."""

NEXT_PLACE = 7919
"""By how much the places of the text differ that columns are begun with: a prime, so that they are
spread, and the same for every run."""

Path = tuple[int, ...]
"""Tokens that follow the text, or an n-gram's first token."""


@dataclass
class Pool:
    """N-grams by their first token: what follows it, and how often that was guessed, latest last.

    known: first token -> what follows [1 to N - 1] -> times.
    """

    known: dict[int, dict[Path, int]] = field(default_factory=dict)

    def add(self, first: int, rest: Path) -> None:
        """Note an n-gram; of each first token the oldest ones go."""
        some = self.known.setdefault(first, {})
        some[rest] = some.pop(rest, 0) + 1
        if len(some) > MOST_OF_A_TOKEN:
            del some[next(iter(some))]

    def after(self, first: int, path: Path = ()) -> list[tuple[Path, int]]:
        """What may follow a token and a path after it, the latest first, with its times."""
        at = len(path)
        some = self.known.get(first, {})
        return [
            (rest[at:], times)
            for rest, times in reversed(some.items())
            if len(rest) > at and rest[:at] == path
        ]


class Window:
    """The rows: W columns of N - 1 levels of guesses at the text's next tokens.

    levels: [N - 1][W]; level k of column j stands k + j tokens after the text's last one, which is
    level 0 of column 0.
    """

    def __init__(self, width: int, num_levels: int, text: Sequence[int]) -> None:
        """Begin with what stands somewhere in the text."""
        self.width = width
        self.levels: list[list[int]] = [[] for _ in range(num_levels)]
        self._num_begun = 0
        self._fill(text)

    def columns(self) -> list[tuple[Path, Path]]:
        """Of each column the trunk up to its first token, and the guesses that hang from it."""
        trunk = self.levels[0]
        return [
            (tuple(trunk[1 : j + 1]), tuple(level[j] for level in self.levels[1:]))
            for j in range(self.width)
        ]

    def advance(self, said: Sequence[int | None], text: Sequence[int], num_emitted: int) -> None:
        """Move on: the first level goes, what the target said is the last.

        Args:
            said: [W] what came after each column; None where it was not computed, and of nothing
                that was, the levels stay.
            text: with the tokens emitted.
            num_emitted: how many there are. What was guessed for their places goes.
        """
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

    With a fixed draft length a draft is a tree of so many tokens: n-grams of the pool first, then
    as many columns of the window as there is room for. With the automatic one it is grown from the
    pool by its chances, and the rows are added where a position costs less than `worth`.

    window: columns that are guessed in parallel, W.
    ngram: tokens of an n-gram, N, its first included.
    num_candidates: most n-grams of the pool in a draft of a fixed length.
    worth: tokens that a position of a row is worth, in n-grams of later rounds; 0.016 on SmolLM2's
        chat, 0.05 on texts that repeat themselves.

    Raises ValueError for numbers that mean nothing.
    """

    window: int = 5
    ngram: int = 4
    num_candidates: int = 4
    worth: float = 0.01
    features: ClassVar[Features] = Features(top=1)

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        for name, least in (("window", 1), ("ngram", 2), ("num_candidates", 1), ("worth", 0.0)):
            got = getattr(self, name)
            if got < least:
                raise ValueError(f"LookaheadDrafter: {name} is {got}, expected >= {least}.")

    @property
    def key(self) -> str:
        """Its options."""
        return f"{__name__}.{self!r}"

    def begin(self, prompt: Sequence[int], context: DraftContext) -> LookaheadSession:
        """Begin after `prompt` [n]."""
        return LookaheadSession(self, prompt)


@dataclass
class _Proposal:
    """A tree in the making: the tokens that lead to each node, parents first.

    columns: the node at which each column of the window ends, as far as they are in it.
    """

    nodes: dict[Path, int] = field(default_factory=dict)
    columns: list[int] = field(default_factory=list)

    def add(self, path: Path) -> int:
        """The node of a path, and all before it; `ROOT` for the text."""
        for n in range(1, len(path) + 1):
            self.nodes.setdefault(path[:n], len(self.nodes))
        return self.nodes[path] if path else ROOT

    def would_have(self, path: Path) -> int:
        """How many nodes it would have with that path."""
        return len(self.nodes) + sum(path[:n] not in self.nodes for n in range(1, len(path) + 1))

    def draft(self, evidence: Sequence[Evidence] | None = None) -> Draft:
        """As a draft: a chain where it does not fork."""
        parents = [ROOT if len(path) == 1 else self.nodes[path[:-1]] for path in self.nodes]
        forks = parents != chain(len(parents))
        return Draft([path[-1] for path in self.nodes], None, evidence, parents if forks else None)


class LookaheadSession:
    """One generation: the text, the pool, the window, and what was shown and is not noted yet."""

    cheap = True

    def __init__(self, drafter: LookaheadDrafter, prompt: Sequence[int]) -> None:
        """Nothing was guessed yet."""
        self._config = drafter
        self._tokens = list(prompt)
        self._pool = Pool()
        self._window: Window | None = None
        self._proposal = _Proposal()
        self._rejected: tuple[list[int], list[int]] = ([], [])
        self._key = drafter.key
        self._chain_key = f"{drafter.key} as a chain"

    # --- what it proposes -----------------------------------------------------------------------

    def propose(self, limit: int) -> Draft:
        """A tree of at most `limit` tokens: n-grams of the pool, then rows."""
        proposal, times = _Proposal(), list[int]()
        last = self._tokens[-1] if self._tokens else -1
        for path, count in self._pool.after(last)[: self._config.num_candidates]:
            while proposal.would_have(path) > limit:
                path = path[:-1]
            proposal.add(path)
            times += [count] * (len(proposal.nodes) - len(times))
        self._add_rows(proposal, limit, limit)
        times += [0] * (len(proposal.nodes) - len(times))
        self._proposal = proposal
        return proposal.draft([Evidence(count) for count in times])

    def propose_tree(self, limit: int, values: ValuesDrafts, may_fork: Callable[[], bool]) -> Draft:
        """What is worth verifying of the pool, and rows where they cost little."""
        longest = min(limit, values.limit(self._chain_key, True))
        draft = values.grow(
            self._key, [(self._chain_key, c) for c in self.candidates(longest)], may_fork
        )
        self._proposal = _Proposal()
        for path in _paths(draft):
            self._proposal.add(path)
        rows = self._rows_worth(values, limit)
        if len(rows.nodes) > len(draft) and may_fork():
            self._proposal, draft = rows, rows.draft()
        return draft

    def _rows_worth(self, values: ValuesDrafts, limit: int) -> _Proposal:
        """The proposal with as many columns of the window as are worth their positions."""
        before = len(self._proposal.nodes)
        for num_columns in range(self._config.window, 0, -1):
            rows = _Proposal(dict(self._proposal.nodes))
            self._add_rows(rows, limit, limit, num_columns)
            more = len(rows.nodes) - before
            price = values.extra_price(before, before + more) if more else 0.0
            if price <= more * self._config.worth:
                return rows
        return self._proposal

    def candidates(self, limit: int) -> list[Draft]:
        """The n-grams of the pool that go on from the last token, the latest first."""
        last = self._tokens[-1] if self._tokens else -1
        return [
            Draft(path[:limit], evidence=[Evidence(times, rank=rank)] * min(limit, len(path)))
            for rank, (path, times) in enumerate(self._pool.after(last) if limit else ())
        ]

    def _add_rows(
        self, proposal: _Proposal, limit: int, depth: int, num_columns: int | None = None
    ) -> None:
        """Add columns of the window, as many as there is room for; None: of all of them."""
        if not self._tokens:
            return
        if self._window is None:
            self._window = Window(self._config.window, self._config.ngram - 1, self._tokens)
        for trunk, guesses in self._window.columns()[:num_columns]:
            path = trunk + guesses
            if len(path) > depth or proposal.would_have(path) > limit:
                break
            proposal.columns.append(proposal.add(path))

    # --- what it is told ------------------------------------------------------------------------

    def see(self, features: FeatureRows) -> None:
        """Take the rows of further positions, which are dropped: the text says the same."""

    def see_rejected(self, tokens: Sequence[int], features: FeatureRows) -> None:
        """Take what the target would have said after tokens that were not kept [n]."""
        assert features.top_tokens is not None
        said = to_list(features.top_tokens[:, 0])
        if -1 not in said:  # a replay knows the rows of its text alone
            self._rejected = list(tokens), said

    def observe(self, tokens: Sequence[int]) -> None:
        """Append the tokens emitted; fill the pool, and move the window on."""
        proposal, kept = self._proposal, self._kept_nodes(tokens)
        rejected, said = self._rejected
        after = dict(zip(self._rejected_nodes(kept), said, strict=False))
        after |= {node: tokens[i + 1] for i, node in enumerate(kept)}
        if self._window is not None:
            for j, node in enumerate(proposal.columns):
                if node in after:
                    first, *rest = [level[j] for level in self._window.levels]
                    self._pool.add(first, (*rest, after[node]))
            self._tokens += tokens
            missing = self._config.window - len(proposal.columns)
            came = [*map(after.get, proposal.columns), *[None] * missing]
            self._window.advance(came, self._tokens, len(tokens))
        else:
            self._tokens += tokens
        if not proposal.columns:
            for token, next_token in zip(rejected, said, strict=True):
                self._pool.add(token, (next_token,))
        self._proposal, self._rejected = _Proposal(), ([], [])

    def _kept_nodes(self, tokens: Sequence[int]) -> list[int]:
        """The nodes of the proposal that are in the text, with a token after them."""
        kept: list[int] = []
        for n in range(1, len(tokens)):
            node = self._proposal.nodes.get(tuple(tokens[:n]))
            if node is None:
                break
            kept.append(node)
        return kept

    def _rejected_nodes(self, kept: Sequence[int]) -> list[int]:
        """The nodes of the proposal that the rejected tokens are, if it was verified.

        That is all of it, or its first chain where the target takes no trees; [] for other drafts.
        """
        draft = self._proposal.draft()
        parents = draft.parents or chain(len(draft))
        for verified in (range(len(draft)), first_path(parents)):
            nodes = [node for node in verified if node not in kept]
            if nodes and [draft.tokens[node] for node in nodes] == self._rejected[0]:
                return nodes
        return []


def _paths(draft: Draft) -> list[Path]:
    """The tokens that lead to each node of a draft."""
    tokens = to_list(draft.tokens)
    parents = chain(len(tokens)) if draft.parents is None else draft.parents
    paths: list[Path] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(() if parent == ROOT else paths[parent]), token))
    return paths
