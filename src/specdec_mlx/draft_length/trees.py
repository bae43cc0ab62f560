"""Trees of drafts: grown node by node, as far as each is worth the position that it takes.

Every guess of every look-up has a chance, that the text goes through it: that of its parent, times
how often guesses with the like of its evidence, rank and depth were right (`guesses`). The node of
the greatest chance comes next. A tree of n nodes is worth 1 + the sum of their chances, less what a
round with n draft tokens costs at the going rate: the value rule of the automatic draft length, of
which a chain is the case of one guess at each place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import ClassVar, NamedTuple

from specdec_mlx.draft_length.accounts import COPY_LENGTHS, LookUpAccount
from specdec_mlx.draft_length.guesses import GuessHistory
from specdec_mlx.types import ROOT, Branches, Draft, Guess, RoundRecord
from specdec_mlx.types.trees import chain

Path = tuple[int, ...]
"""The tokens of a tree down to a node."""

SIZES = (*COPY_LENGTHS, 96, 128)
"""Numbers of nodes that are tried: few, as with draft lengths, so that each is measured soon."""

MOST_EXPENSIVE = 0.035
"""What a further position may cost, in plain rounds, where trees are grown. At 0.05 they gain up to
1% over all texts in replays, and lose 2 to 4% of some kinds."""

LONG_ENOUGH = 4
"""Tokens of a draft that says what further positions cost, with a shorter one."""


class Chain(NamedTuple):
    """A chain that was proposed, and the chance of each token after those before it."""

    tokens: Path
    chances: Sequence[float]

    def goes_through(self, path: Path) -> bool:
        """Whether it begins with a path, and goes on."""
        return len(path) < len(self.tokens) and self.tokens[: len(path)] == path


class Sources(NamedTuple):
    """What a tree is grown from.

    chains: what was proposed. best: the one that is worth most by itself; its chances stand as they
    are, so that it is worth as much as part of a tree. guessers: who has several guesses at a
    place, each with how often they were right.
    """

    chains: Sequence[Chain]
    best: Chain | None
    guessers: Sequence[tuple[Branches, GuessHistory]]


class _Place(NamedTuple):
    """What was guessed at a place, by each history, and the chances that each token was given."""

    known: list[tuple[GuessHistory, Sequence[Guess]]]
    given: dict[int, list[float]]


@dataclass
class TreeAccount(LookUpAccount):
    """Look-ups whose guesses share a tree.

    asked: what each guessed at the places that the latest tree was grown at; scored against what
    comes. drafter: key of the one whose chain was worth more than a tree; "" for none. was_refused:
    whether the target took no tree.
    """

    asked: dict[Path, _Place] = field(default_factory=dict)
    drafter: str = ""
    was_refused: bool = False
    first_budget: ClassVar[float] = 0.0

    def limit(self, rate: float) -> int:
        """The longest; `grow` decides."""
        return SIZES[-1]

    def cut(self, draft: Draft, rate: float) -> int:
        """All of it, as it was grown."""
        self.was_cut = True
        return len(draft)

    def forks_may_pay(self) -> bool:
        """Whether further positions are known to be cheap enough to look at second guesses."""
        costs = self.learned.costs
        if self.was_refused or costs.needs_plain:
            return False
        known = [n for n in SIZES if costs.is_measured(n)]
        if len(known) < 2 or known[-1] < LONG_ENOUGH:
            return False
        short, long = known[0], known[-1]
        return costs.ratio(long) - costs.ratio(short) < (long - short) * MOST_EXPENSIVE

    def asks(self, may_fork: Callable[[], bool]) -> bool:
        """Whether the target takes a tree; once it took none, no more are grown."""
        self.was_refused = not may_fork()
        return not self.was_refused

    def grow(self, sources: Sources, rate: float, limit: int, depth: int) -> tuple[Draft, float]:
        """The tree of the largest value; a chain where it does not fork.

        Args:
            sources: what it may be made of.
            rate: the going rate, in tokens a plain round's time.
            limit: most nodes.
            depth: most nodes on a path.

        Returns:
            The draft, and what it is worth beyond plain decoding.
        """
        self.asked = {}
        prices = {n: rate * self.learned.costs.optimistic_ratio(n) for n in SIZES}
        parents: list[int] = []
        tokens: list[int] = []
        waiting: list[tuple[float, int, int, Path]] = []  # -chance, when found, parent, tokens
        found = count()

        def expand(node: int, path: Path, reach: float) -> None:
            if len(path) < depth:
                for token, chance in self._chances_after(path, sources).items():
                    heappush(waiting, (-reach * chance, next(found), node, (*path, token)))

        expand(ROOT, (), 1.0)
        best, best_value, expected = 0, 1.0 - rate, 1.0
        while waiting and len(tokens) < limit:
            reach, n = -waiting[0][0], len(tokens)
            if not _may_gain(expected - best_value, reach, n, prices):
                break
            _, _, parent, path = heappop(waiting)
            parents.append(parent)
            tokens.append(path[-1])
            expected += reach
            expand(n, path, reach)
            n += 1
            if n in prices or not waiting:
                value = expected - min([price for size, price in prices.items() if size >= n])
                if value > best_value and self.can_afford(n, expected):
                    best, best_value = n, value
        forks = parents[:best] != chain(best)
        draft = Draft(tokens[:best], parents=parents[:best] if forks else None)
        return draft, best_value - (1.0 - rate)

    def _chances_after(self, path: Path, sources: Sources) -> dict[int, float]:
        """All that may follow a path, each with its chance after it."""
        depth = len(path)
        given: dict[int, list[float]] = {}
        for chain_ in sources.chains:
            if chain_.goes_through(path):
                given.setdefault(chain_.tokens[depth], []).append(chain_.chances[depth])
        known = []
        for session, history in sources.guessers:
            guesses = session.guesses_after(path)
            if guesses:
                known.append((history, guesses))
                chances_of_guesses = history.chances(guesses, depth)
                for (token, _), chance in zip(guesses, chances_of_guesses, strict=False):
                    given.setdefault(token, []).append(chance)
        self.asked[path] = _Place(known, given)
        chances = self.learned.pooled.chances(given)
        if sources.best is not None and sources.best.goes_through(path):
            _give(chances, sources.best.tokens[depth], sources.best.chances[depth])
        return chances

    def follow(self, round_: RoundRecord) -> None:
        """Score the guesses at the places that the text went through."""
        path: Path = ()
        for token in round_.tokens:
            place = self.asked.get(path)
            if place is None:
                break
            for history, guesses in place.known:
                history.learn(guesses, len(path), token)
            self.learned.pooled.learn(place.given, token)
            path = (*path, token)
        self.asked = {}


def _may_gain(lead: float, reach: float, n: int, prices: Mapping[int, float]) -> bool:
    """Whether more than n nodes may be worth more than the best so far.

    Args:
        lead: expected tokens of n nodes less the best value.
        reach: chance of the next node; those after it are no likelier.
        n: how many there are.
        prices: what sizes cost, in tokens.
    """
    return any(lead + reach * (size - n) > price for size, price in prices.items() if size > n)


def _give(chances: dict[int, float], token: int, chance: float) -> None:
    """Give a token a chance of its own; the others share what is left, if that is less."""
    others = sum(chances.values()) - chances[token]
    if others > 1 - chance:
        for other in chances:
            chances[other] *= (1 - chance) / others
    chances[token] = chance
