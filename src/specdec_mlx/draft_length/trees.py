"""Trees of drafts: grown node by node, as far as each is worth the position that it takes.

Every guess of every look-up has a chance, that the text goes through it: that of its parent, times
how often guesses with the like of its evidence, rank and depth were right (`guesses`). The node of
the greatest chance comes next. A tree of n nodes is worth 1 + the sum of their chances, less what a
round with n draft tokens costs at the going rate: the value rule of the automatic draft length, of
which a chain is the case of one guess at each place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import ClassVar, NamedTuple

from specdec_mlx.draft_length.acceptance import AcceptanceHistory
from specdec_mlx.draft_length.accounts import COPY_LENGTHS, LookUpAccount
from specdec_mlx.draft_length.guesses import GuessHistory
from specdec_mlx.token_ids import to_list
from specdec_mlx.types import ROOT, Branches, Draft, Evidence, Guess, RoundRecord
from specdec_mlx.types.trees import chain

Path = tuple[int, ...]
"""The tokens of a tree down to a node."""

Guesser = tuple[Branches, GuessHistory]
"""A session with several guesses at a place, and how often they were right."""

SIZES = (*COPY_LENGTHS, 96, 128)
"""Numbers of nodes that are tried: few, as with draft lengths, so that each is measured soon."""

LIKELIEST_FORK = 0.5
"""A second guess is right at most as often as the first: where a position costs more, no look is
taken at any."""


class _Chain(NamedTuple):
    """A chain that was proposed, and the chance of each token after those before it."""

    tokens: Path
    chances: Sequence[float]


class _Place(NamedTuple):
    """What was guessed at a place: by each history; the chances that each token was given; pooled."""

    known: list[tuple[GuessHistory, Sequence[Guess]]]
    given: dict[int, list[float]]
    chances: dict[int, float]


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

    def forks_may_pay(self, rate: float) -> bool:
        """Whether a position somewhere costs less than the likeliest second guess can bring."""
        costs = self.learned.costs
        if self.was_refused or costs.needs_plain:
            return False
        known = [costs.optimistic_ratio(n) for n in (1, *SIZES)]
        sizes = (1, *SIZES)
        return any(
            rate * (after - before) < LIKELIEST_FORK * (more - less)
            for less, more, before, after in zip(sizes, sizes[1:], known, known[1:], strict=False)
        )

    def asks(self, may_fork: Callable[[], bool]) -> bool:
        """Whether the target takes a tree; once it took none, no more are grown."""
        self.was_refused = not may_fork()
        return not self.was_refused

    def grow(
        self,
        drafts: Sequence[tuple[Draft, AcceptanceHistory]],
        chosen: int | None,
        guessers: Sequence[Guesser],
        rate: float,
        limit: int,
        depth: int,
    ) -> tuple[Draft, float]:
        """The tree of the largest value; a chain where it does not fork.

        Args:
            drafts: chains that were proposed, each with what is known of its drafter.
            chosen: index of the one that is worth most by itself, whose chances stand as they are.
            guessers: who has more to say, each with how often that was right.
            rate: the going rate, in tokens a plain round's time.
            limit: most nodes.
            depth: most nodes on a path.

        Returns:
            The draft, and what it is worth beyond plain decoding.
        """
        self.asked = {}
        chains = [
            _Chain(tuple(to_list(draft.tokens)), list(history.chances(_evidence_of(draft))))
            for draft, history in drafts
        ]
        costs = self.learned.costs
        prices = {n: rate * costs.optimistic_ratio(n) for n in SIZES}
        parents: list[int] = []
        tokens: list[int] = []
        order = count()
        waiting: list[tuple[float, int, int, Path, int]] = []

        def expand(node: int, path: Path, reach: float) -> None:
            if len(path) == depth:
                return
            for token, chance in self._guesses(path, chains, chosen, guessers).items():
                heappush(waiting, (-reach * chance, next(order), node, path, token))

        expand(ROOT, (), 1.0)
        best, best_value, expected = 0, 1.0 - rate, 1.0
        while waiting and len(tokens) < limit:
            reach = -waiting[0][0]
            n = len(tokens)
            if not any(
                expected + reach * (size - n) - prices[size] > best_value
                for size in SIZES
                if size > n
            ):
                break  # were all that follows as likely as this
            _, _, parent, path, token = heappop(waiting)
            parents.append(parent)
            tokens.append(token)
            expected += reach
            n += 1
            expand(n - 1, (*path, token), reach)
            if n in prices or not waiting:
                value = expected - min([prices[size] for size in SIZES if size >= n])
                if value > best_value and self.can_afford(n, expected):
                    best, best_value = n, value
        is_chain = parents[:best] == chain(best)
        draft = Draft(tokens[:best], parents=None if is_chain else parents[:best])
        return draft, best_value - (1.0 - rate)

    def _guesses(
        self,
        path: Path,
        chains: Sequence[_Chain],
        chosen: int | None,
        guessers: Sequence[Guesser],
    ) -> dict[int, float]:
        """All that may follow a path, each with its chance after it."""
        depth = len(path)
        given: dict[int, dict[int, float]] = {}
        for source, (tokens, chances) in enumerate(chains):
            if depth < len(tokens) and tokens[:depth] == path:
                given.setdefault(tokens[depth], {})[source] = chances[depth]
        known = []
        for session, history in guessers:
            guesses = session.guesses_after(path)
            if guesses:
                known.append((history, guesses))
                own = history.chances(guesses, depth)
                for (token, _), chance in zip(guesses, own, strict=False):
                    given.setdefault(token, {})[id(history)] = chance
        all_given = {token: list(by.values()) for token, by in given.items()}
        chances = self.learned.pooled.chances(all_given) if given else {}
        tokens, own = chains[chosen] if chosen is not None else ((), ())
        if depth < len(tokens) and tokens[:depth] == path:
            token = tokens[depth]
            rest = sum(chances.values()) - chances[token]
            left = 1 - own[depth]
            if rest > left:
                chances = {t: c * left / rest for t, c in chances.items()}
            chances[token] = own[depth]
        self.asked[path] = _Place(known, all_given, chances)
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


def _evidence_of(draft: Draft) -> Sequence[Evidence | int]:
    """What speaks for its tokens; 0 where nothing is known."""
    return [0] * len(draft) if draft.evidence is None else draft.evidence
