"""One drafter in one generation: what its drafts are worth, and what they cost.

A look-up is free to ask: what it proposes is scored against what came, verified or not, so that it
is noticed when a text becomes predictable. Of what costs time to ask nothing is known without
paying; it drafts on account (`store.Account`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate, count
from operator import mul
from typing import Protocol

from specdec_mlx.draft_length.chances import Chances, Scored, told
from specdec_mlx.draft_length.chips import WIDTHS
from specdec_mlx.draft_length.costs import Staircase, median
from specdec_mlx.draft_length.store import Learned
from specdec_mlx.types import (
    MOST_WAITING,
    ROOT,
    Branches,
    Draft,
    DraftSession,
    Evidence,
    RoundRecord,
    SeesTarget,
    Step,
    TimesReading,
    TimesSteps,
)
from specdec_mlx.types.trees import chain

LENGTHS = tuple(rows - 1 for rows in WIDTHS)
"""Draft lengths that are chosen from."""

LONGEST = 12
"""Most tokens that are drafted one by one, and by a look-up whose drafts were wrong lately."""

SURE = 0.4
"""Recent acceptance from which on a look-up is asked for more."""

LEAST_RATE = 1.1
"""What costs time is weighed at the rate of its best length, or at this: not at one left over."""

RETRY = 12
"""Rounds after which what costs time is asked again where it was not worth it."""

REST = 3
"""Rounds for which "not worth asking" stands before it is worked out anew."""

LOOKAHEAD = 4
"""Further tokens that are weighed with the next one: a wider pass may cost no more."""

READING = 0.02
"""Cost of reading a token, in draft steps, where it is not known."""


class Prices(Protocol):
    """What a part asks of the draft length; see `auto.Auto`."""

    latest: int | None
    context: int
    stairs: Staircase
    rate: float
    most: int

    def cost(self, length: int) -> float:
        """Cost of the pass over so many draft tokens, in plain rounds."""


@dataclass(eq=False)
class LookUp:
    """A drafter in one generation that is free to ask.

    auto: the generation's. learned: outlives it. scored: the draft that is held against what comes.
    gain: what its next draft is expected to bring beyond plain decoding, in tokens.
    """

    auto: Prices
    learned: Learned
    scored: Scored | None = None
    gain: float = 0.0

    def __post_init__(self) -> None:
        """How predictable this text is, is not known yet."""
        self.learned.begin_text()

    def limit(self) -> int:
        """Most tokens to ask for."""
        return LENGTHS[-1] if self.learned.chances.recent >= SURE else LONGEST

    def drafting(self, num_steps: int) -> float:
        """Cost of a draft without its pass, in plain rounds."""
        return 0.0

    def loss(self, length: int) -> float:
        """What a round with so many draft tokens costs beyond a plain one, in plain rounds."""
        return self.auto.cost(length) - 1.0 + self.drafting(length)

    def cut(self, draft: Draft) -> int:
        """How much of a point mass to keep."""
        tokens, evidence = told(draft)
        chances = self.learned.chances.of_draft(evidence, tokens, self.auto.latest)
        kept = self.best(chances, len(tokens))
        if kept or self.scored is None:  # an earlier draft goes on if this one is not verified
            self.scored = Scored(tokens, evidence, self.learned.chances, self.auto.latest)
        return kept

    def best(self, chances: Iterable[float], whole: int) -> int:
        """The length of the largest value; `gain` is what it is worth.

        Args:
            chances: of each token, given those before it; whole: how many there are.
        """
        best, self.gain, reach, tokens = 0, 0.0, 1.0, 0.0
        most, rate = self.auto.most, self.auto.rate
        for length, chance in enumerate(chances, start=1):
            if length > most:
                break
            reach *= chance
            tokens += reach
            if length in LENGTHS or length == whole:
                gain = tokens - rate * self.loss(length)
                if gain > self.gain:
                    best, self.gain = length, gain
                if gain + reach * (whole - length) <= self.gain:
                    break  # were all that follows right if this one is, and cost nothing
        return best

    def settle(self, round_: RoundRecord) -> float:
        """Learn from a round with its draft what that cost; the cost in plain rounds."""
        if round_.steady:
            self.auto.stairs.add(1 + round_.drafted, round_.seconds)
        return self.auto.cost(round_.drafted)

    def follow(self, round_: RoundRecord, drafted: bool) -> float:
        """Go on by a round with its draft or another's; cost of steps that brought no draft."""
        if self.scored is not None and self.scored.is_through(round_.tokens):
            self.scored = None
        return 0.0


@dataclass(eq=False)
class Model(LookUp):
    """A drafter in one generation that costs time, and drafts as many tokens as it is asked for.

    rest: rounds for which "not worth asking" stands. num_missed: tokens of the text that it has not
    read, None for all.
    """

    rest: int = 0
    num_idle: int = RETRY
    num_missed: int | None = None

    def __post_init__(self) -> None:
        """Its budget of this text."""
        super().__post_init__()
        self.account = self.learned.account.of_text()

    def drafting(self, num_steps: int) -> float:
        """See `LookUp`."""
        return self.learned.steps(num_steps)

    def gains(self) -> list[float]:
        """[K] tokens that drafts of 1, 2, ... tokens bring, of which only the places are known."""
        most = LONGEST if self.learned.steps.measured else min(LONGEST, self.auto.most)
        return [*accumulate(accumulate(self.learned.blind.of_draft([0] * most), mul))]

    def limit(self) -> int:
        """The length of the largest value, if that pays or is to be tried, and can be afforded."""
        wanted = 0 if self.rest else self.worth_asking()
        if not wanted and not self.rest:
            self.rest = REST
        return wanted

    def worth_asking(self) -> int:
        """The same, worked out anew."""
        gains = self.gains()
        losses = [self.loss(k) for k in range(1, len(gains) + 1)]
        rates = [(1.0 + gain) / (1.0 + loss) for gain, loss in zip(gains, losses, strict=True)]
        rate = min(self.auto.rate, max(LEAST_RATE, *rates))
        values = [gain - rate * loss for gain, loss in zip(gains, losses, strict=True)]
        self.gain = max(values)
        if self.gain <= 0 and self.num_idle < RETRY:
            return 0
        if self.learned.steps.is_sure and all(k <= loss for k, loss in enumerate(losses, start=1)):
            return 0  # not even if all were right
        length = 1 + values.index(self.gain)
        while length and not self.account.stands(losses[length - 1] - gains[length - 1] / 2):
            length -= 1
        return length

    def cut(self, draft: Draft) -> int:
        """All of it: `limit` chose the length."""
        return len(draft)

    def settle(self, round_: RoundRecord) -> float:
        """Learn what its draft cost and how far it was right; book what it brought."""
        plain, passed = self.auto.stairs.plain, self.auto.cost(round_.drafted)
        if round_.steady and plain and self.has_read:
            self.learned.steps.add(round_.drafted, round_.seconds / median(plain) - passed)
        blind = self.learned.blind
        expected = sum(accumulate(blind.of_draft([0] * round_.drafted), mul))
        for i in range(min(round_.accepted + 1, round_.drafted)):
            blind.learn(0, i, i < round_.accepted)
        cost = passed + self.drafting(round_.drafted)
        self.book(round_, 1.0 + expected, cost)
        return cost

    def book(self, round_: RoundRecord, expected: float, cost: float) -> None:
        """Book half of what it brought as it was expected: luck evens out; trials as it was."""
        brought = (round_.emitted + expected) / 2 if self.gain > 0 else round_.emitted
        self.account.add(brought - cost)

    @property
    def has_read(self) -> bool:
        """True if it has not more to read than a round's tokens."""
        return self.num_missed is not None and self.num_missed <= LONGEST + 1

    def follow(self, round_: RoundRecord, drafted: bool) -> float:
        """Earn this round's share of the time."""
        self.account.earn()
        self.rest = max(0, self.rest - 1)
        self.num_idle += 1
        if drafted:
            self.num_missed, self.num_idle = 0, 0
        else:
            self.learned.idle()
            if self.num_missed is not None:
                self.num_missed += round_.emitted
        return 0.0


@dataclass(eq=False)
class Forking(Model):
    """The same where drafts fork by themselves: `limit` is a number of nodes."""

    def gains(self) -> list[float]:
        """[K] tokens that trees of 1, 2, ... nodes bring."""
        return [*accumulate(self.learned.shares[: self.auto.most])]

    def settle(self, round_: RoundRecord) -> float:
        """Learn what its size brings, too."""
        self.learned.learn_shares(round_.drafted, round_.accepted)
        return super().settle(round_)


@dataclass(eq=False)
class Stepping(Model):
    """A drafter that can stop in the middle, by its own confidence.

    AdaEDL (Agrawal et al. 2024), SpecDec++ (Huang et al. 2024) and DISCO (Mamou et al. 2024) do so
    with thresholds; here a token's value is held against its measured cost.

    evidence: of the draft in the making. reaches: chance that all of it is accepted, up to each
    token. num_steps: steps run. is_trial: True if reading is charged to the account.
    """

    session: DraftSession | None = None
    evidence: list[Evidence] = field(default_factory=list)
    reaches: list[float] = field(default_factory=list)
    num_steps: int = 0
    num_emitted: int = 0
    is_trial: bool = False

    def limit(self) -> int:
        """The longest draft, if its first tokens pay and can be afforded."""
        self.evidence, self.reaches, self.is_trial = [], [], False
        steps, plain = self.learned.steps, self.auto.stairs.plain
        if not self.rest and not steps.is_known and plain and isinstance(self.session, TimesSteps):
            steps.price = self.session.time_step() / median(plain)
            self.num_steps += 1  # this round's seconds are not those of a plain one
        wanted = super().limit()
        if wanted and not self._may_read():
            self.rest = REST
            return 0
        return min(LONGEST, self.auto.most) if wanted else 0

    def _may_read(self) -> bool:
        """True if what it has missed may be read: the text so far would have saved as much, so that
        twice what was needed is paid at most (the ski rental bound), or the account stands it."""
        if self.has_read:
            return True
        cost = self._reading()
        if cost <= max(0.0, self.gain) * self.num_emitted:
            return True
        self.is_trial = self.account.stands(cost + self.loss(1) / 2)
        return self.is_trial

    def _reading(self) -> float:
        """Cost of reading what it has missed, in plain rounds."""
        steps, plain = self.learned.steps, self.auto.stairs.plain
        if steps.reading is None and plain and isinstance(self.session, TimesReading):
            steps.reading = self.session.time_reading() / median(plain)
        missed = self.auto.context if self.num_missed is None else self.num_missed
        missed = min(missed, MOST_WAITING) if isinstance(self.session, SeesTarget) else missed
        return missed * (steps.step * READING if steps.reading is None else steps.reading)

    def goes_on(self, evidence: Sequence[Evidence]) -> Step:
        """Weigh the latest token and those that could follow it; see `types.Stepwise`."""
        length, latest = len(evidence), evidence[-1]
        self.num_steps += not latest.is_free
        del self.reaches[length - 1 :]  # of a token that was not taken, where a free one stands
        for i in range(len(self.reaches), length):
            chance = next(self.learned.chances.of_draft([evidence[i]], first=i))
            self.reaches.append(chance * (self.reaches[-1] if i else 1.0))
        self.evidence = list(evidence)
        rate, cost, reach = self.auto.rate, self.auto.cost, self.reaches[-1]
        own = reach - rate * (cost(length) - cost(length - 1))
        if length < LONGEST:
            step = 0.0 if latest.is_free or self.learned.steps.at_once else self.learned.steps.step
            chances = self.learned.chances if latest.is_free else self.learned.later
            value, more = 0.0, length
            for chance in chances.of_draft([latest] * LOOKAHEAD, first=length):
                reach *= chance
                more += 1
                value += reach - rate * (cost(more) - cost(more - 1) + step)
                if value > max(0.0, -own):
                    return Step.GO_ON
        return Step.STOP_AFTER if own > 0 else Step.STOP_BEFORE

    def settle(self, round_: RoundRecord) -> float:
        """Learn what its pass cost, and what each token's evidence was worth."""
        if round_.steady and self.auto.stairs.plain:
            self.auto.stairs.add(1 + round_.drafted, round_.seconds - round_.draft_seconds)
        cost = self.auto.cost(round_.drafted) + self.drafting(self.num_steps)
        self.book(round_, 1.0 + sum(self.reaches[: round_.drafted]), cost)
        for i in range(min(round_.accepted + 1, round_.drafted)):
            right, evidence = i < round_.accepted, self.evidence[i]
            self.learned.chances.learn(evidence, i, right)
            self.learned.blind.learn(0, i, right)
            if i and not evidence.is_free:
                self.learned.later.learn(self.evidence[i - 1], i, right)
        return cost

    def follow(self, round_: RoundRecord, drafted: bool) -> float:
        """Learn what its steps cost; book those that brought no draft."""
        plain, cost, asked = self.auto.stairs.plain, 0.0, bool(self.evidence)
        if asked and plain and self.has_read:
            self.learned.steps.add(self.num_steps, round_.draft_seconds / median(plain))
        if self.num_steps and not drafted:
            cost = self.drafting(self.num_steps)
            self.account.add(-cost)
        if asked and self.is_trial:
            self.account.add(-self._reading())
        self.num_emitted += round_.emitted
        super().follow(round_, drafted or asked)
        if asked and not drafted:
            self.rest = REST
        self.num_steps, self.evidence = 0, []
        return cost


@dataclass(eq=False)
class Tree(LookUp):
    """Look-ups whose guesses share a tree, grown node by node.

    drafter: key of the one whose chain was worth more than a tree, "" for none. asked: path ->
    what was guessed there, and by whose chances. may_fork: True unless the target takes no trees.
    """

    drafter: str = ""
    asked: dict[tuple[int, ...], list[tuple[Chances, int, Evidence]]] = field(default_factory=dict)
    may_fork: bool = True

    def limit(self) -> int:
        """The longest; `grow` decides."""
        return LENGTHS[-1]

    def cut(self, draft: Draft) -> int:
        """All of it, as it was grown."""
        return len(draft)

    def grow(
        self,
        chains: Sequence[tuple[Sequence[int], Sequence[float]]],
        guessers: Sequence[tuple[Branches, Chances]],
        limit: int,
    ) -> Draft:
        """The tree of the largest value; `gain` is what it is worth.

        The node of the greatest chance comes next; a token that several propose has their mean.

        Args:
            chains: what was proposed, and the chance of each token after those before it.
            guessers: what has several guesses at a place. limit: most nodes.
        """
        self.asked, self.gain = {}, 0.0
        parents: list[int] = []
        tokens: list[int] = []
        waiting: list[tuple[float, int, int, tuple[int, ...]]] = []  # -chance, when, parent, path
        found = count()

        def expand(node: int, path: tuple[int, ...], reach: float) -> None:
            for token, chance in self._after(path, chains, guessers).items():
                heappush(waiting, (-reach * chance, next(found), node, (*path, token)))

        expand(ROOT, (), 1.0)
        best, expected, rate = 0, 0.0, self.auto.rate
        prices = {k: rate * self.loss(k) for k in LENGTHS}
        while waiting and len(tokens) < min(limit, self.auto.most):
            reach, n = -waiting[0][0], len(tokens)
            if all(expected + reach * (k - n) <= self.gain + prices[k] for k in LENGTHS if k > n):
                break
            _, _, parent, path = heappop(waiting)
            parents.append(parent)
            tokens.append(path[-1])
            expected += reach
            expand(n, path, reach)
            if n + 1 in prices or not waiting:
                gain = expected - rate * self.loss(n + 1)
                if gain > self.gain:
                    best, self.gain = n + 1, gain
        forks = parents[:best] != chain(best)
        return Draft(tokens[:best], parents=parents[:best] if forks else None)

    def _after(
        self,
        path: tuple[int, ...],
        chains: Sequence[tuple[Sequence[int], Sequence[float]]],
        guessers: Sequence[tuple[Branches, Chances]],
    ) -> dict[int, float]:
        """All that may follow a path, each with its chance after it."""
        depth, asked = len(path), self.asked.setdefault(path, [])
        given: dict[int, list[float]] = {}
        for tokens, known in chains:
            if depth < len(tokens) and tuple(tokens[:depth]) == path:
                given.setdefault(tokens[depth], []).append(known[depth])
        for session, chances in guessers:
            for token, evidence in session.guesses_after(path):
                asked.append((chances, token, evidence))
                chance = next(chances.of_draft([evidence], first=depth))
                given.setdefault(token, []).append(chance)
        means = {token: sum(found) / len(found) for token, found in given.items()}
        total = max(1.0, sum(means.values()))
        return {token: chance / total for token, chance in means.items()}

    def follow(self, round_: RoundRecord, drafted: bool) -> float:
        """Score the guesses at the places that the text went through."""
        path: tuple[int, ...] = ()
        for token in round_.tokens:
            for chances, guess, evidence in self.asked.get(path, ()):
                chances.learn(evidence, len(path), guess == token)
            path = (*path, token)
        self.asked = {}
        return 0.0
