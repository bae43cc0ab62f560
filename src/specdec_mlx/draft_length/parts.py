"""One drafter in one generation: what its drafts are worth, and what they cost.

A look-up is free to ask: each of its drafts is scored against what came, verified or not, so that
the drafter is used again once a text becomes predictable. A drafter that costs time tells nothing
until it is paid for: its losses are bounded by an account (`store.Account`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from time import perf_counter

from specdec_mlx.draft_length.chances import Scored, told
from specdec_mlx.draft_length.chips import WIDTHS
from specdec_mlx.draft_length.costs import Staircase, bounded
from specdec_mlx.draft_length.store import Learned
from specdec_mlx.types import MOST_WAITING, Draft, Evidence, RoundRecord, Step, Stepwise

LENGTHS = tuple(rows - 1 for rows in WIDTHS)
"""Draft lengths that are chosen from."""

LONGEST = 12
"""Most tokens that are drafted one by one, and by a look-up whose drafts were wrong lately."""

PREDICTABLE = 0.4
"""Recent acceptance from which on a look-up is asked for long drafts."""

REST = 8
"""Rounds without asking a drafter that costs time, after one in which it was not worth it."""

LOOKAHEAD = 4
"""Further tokens that are weighed with the next one: a wider pass may cost no more."""

READING = 0.02
"""Cost of reading a token, in draft steps, where it was not measured."""


@dataclass
class Prices:
    """What passes cost and tokens are worth, as of the latest round.

    rate: tokens that a plain round's time has lately brought. most: longest draft that may be
    tried. losses: cost of a draft's pass beyond a plain round, by length. context: positions on the
    caches. latest: the text's last token, None at first. clock: seconds.
    """

    stairs: Staircase
    rate: float = 1.0
    most: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    context: int = 0
    latest: int | None = None
    clock: Callable[[], float] = perf_counter
    _known: tuple[dict[int, float], bool] = ({}, True)

    def cost(self, length: int) -> float:
        """Cost of the pass over a draft of so many tokens, in plain rounds."""
        return self.stairs(1 + length)

    def update(self, stairs: Staircase, rate: float) -> None:
        """Take over what the last round has changed."""
        self.rate = rate
        known = stairs.fitted, stairs.needs_plain
        if known[0] is not self._known[0] or known[1] is not self._known[1]:
            self.stairs, self._known = stairs, known
            self.most = stairs.most_rows() - 1
            self.losses = {n: stairs.fitted[n + 1] - 1.0 for n in LENGTHS}

    def best(self, reaches: Sequence[float]) -> tuple[int, float]:
        """The length of the largest value, and what it is worth beyond plain decoding, in tokens.

        Args:
            reaches: of each token the chance that it is accepted, those before it included.
        """
        best, gain, tokens = 0, 0.0, 0.0
        whole, losses, rate = len(reaches), self.losses, self.rate
        for length, reach in enumerate(reaches[: self.most], start=1):
            tokens += reach
            if length in losses or length == whole:
                loss = losses[length] if length in losses else self.cost(length) - 1.0
                if tokens - rate * loss > gain:
                    best, gain = length, tokens - rate * loss
                if tokens - rate * loss + reach * (whole - length) <= gain:
                    break  # were all that follows right if this one is, and free
        return best, gain


def verdict_of(round_: RoundRecord) -> list[bool]:
    """Of each token of a chain that was judged, True if it was accepted."""
    return [*[True] * round_.accepted, *[False] * (round_.accepted < round_.drafted)]


@dataclass(eq=False)
class LookUp:
    """A drafter that is free to ask.

    learned: outlives the generation. scored: the draft that is compared with what comes. gain: what
    its next draft is expected to bring beyond plain decoding, in tokens.
    """

    prices: Prices
    learned: Learned
    scored: Scored | None = None
    gain: float = 0.0

    def __post_init__(self) -> None:
        """How predictable this text is, is not known yet."""
        self.learned.begin_text()

    def limit(self) -> int:
        """Most tokens to ask for."""
        return LENGTHS[-1] if self.learned.chances.recent >= PREDICTABLE else LONGEST

    def reaches(self, tokens: Sequence[int], evidence: Sequence[Evidence | int]) -> list[float]:
        """[K] chance of each token of a copied chain that it and all before it are accepted."""
        return [
            *accumulate(self.learned.chances.of_draft(evidence, tokens, self.prices.latest), mul)
        ]

    def cut(self, draft: Draft) -> int:
        """Number of tokens to keep of a point mass; all or none of a tree, by its first chain."""
        tokens, evidence = told(draft if draft.parents is None else draft.first_chain())
        kept, self.gain = self.prices.best(self.reaches(tokens, evidence))
        if kept or self.scored is None:  # an earlier draft goes on if this one is not verified
            self.scored = Scored(tokens, evidence, self.learned.chances, self.prices.latest)
        return kept if draft.parents is None else len(draft) * (kept > 0)

    def settle(self, round_: RoundRecord) -> float:
        """Learn from a round with its draft what that cost; the cost in plain rounds."""
        if round_.steady:
            self.prices.stairs.add(1 + round_.drafted, round_.seconds)
        return self.prices.cost(round_.drafted)

    def follow(self, round_: RoundRecord, drafted: bool) -> float:
        """Go on by a round with its draft or another's; cost of steps that brought no draft."""
        if self.scored is not None and self.scored.is_through(round_.tokens):
            self.scored = None
        return 0.0


@dataclass(eq=False)
class Model(LookUp):
    """A drafter that costs time, and drafts as many tokens as it is asked for.

    rest: rounds until it is asked again where no gain is expected. num_missed: tokens of the text
    that it has not read, None for all.
    """

    rest: int = 0
    num_missed: int | None = None

    def __post_init__(self) -> None:
        """Open its account of this text."""
        super().__post_init__()
        self.account = self.learned.account.of_text()

    def gains(self) -> list[float]:
        """[K] tokens that drafts of 1, 2, ... tokens bring, by the places alone."""
        most = LONGEST if self.learned.steps.further else min(LONGEST, self.prices.most)
        return [*accumulate(accumulate(self.learned.unseen.of_draft([0] * most), mul))]

    def loss(self, length: int) -> float:
        """Cost of a round with so many draft tokens beyond a plain one, in plain rounds."""
        return self.prices.cost(length) - 1.0 + self.learned.steps(length)

    def limit(self) -> int:
        """The length of the largest value, if that pays or is to be tried, and can be afforded."""
        self.gain = 0.0
        if self.rest or not self.prices.most:
            return 0
        gains = self.gains()
        losses = [self.loss(k) for k in range(1, len(gains) + 1)]
        values = [gain - self.prices.rate * loss for gain, loss in zip(gains, losses, strict=True)]
        self.gain = max(values)
        length = 1 + values.index(self.gain)
        if self.learned.steps.is_sure and all(k <= loss for k, loss in enumerate(losses, start=1)):
            length = 0  # not even if all were right
        while length and not self.account.stands(losses[length - 1] - gains[length - 1] / 2):
            length -= 1
        if not length:
            self.rest = REST
        return length

    def cut(self, draft: Draft) -> int:
        """All of it: `limit` chose the length."""
        return len(draft)

    def settle(self, round_: RoundRecord) -> float:
        """Learn what its draft cost and how far it was right; book what it brought."""
        plain, cost = self.prices.stairs.seconds, self.prices.cost(round_.drafted)
        if round_.steady and plain and self.has_read:
            extra = round_.seconds / plain - cost
            self.learned.steps.add(round_.drafted, extra)
        verdict = verdict_of(round_)
        self.learned.unseen.learn([0] * len(verdict), verdict)
        cost += self.learned.steps(round_.drafted)
        self.account.add(round_.emitted - cost)
        return cost

    @property
    def has_read(self) -> bool:
        """True if it has not more to read than a round's tokens."""
        return self.num_missed is not None and self.num_missed <= LONGEST + 1

    def follow(self, round_: RoundRecord, drafted: bool) -> float:
        """Earn this round's share of the time; rest where it is not worth asking."""
        self.account.earn()
        self.rest = max(0, self.rest - 1)
        if drafted:
            self.num_missed = 0
            if self.gain <= 0:
                self.rest = REST
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
        return [*accumulate(self.learned.shares[: self.prices.most])]

    def settle(self, round_: RoundRecord) -> float:
        """Learn what a tree of its size brings, too."""
        self.learned.learn_shares(round_.drafted, round_.accepted)
        return super().settle(round_)


@dataclass(eq=False)
class Stepping(Model):
    """A drafter that can stop in the middle, by its own confidence.

    AdaEDL (Agrawal et al. 2024), SpecDec++ (Huang et al. 2024) and DISCO (Mamou et al. 2024) do so
    with thresholds; here a token's value is compared with its measured cost.

    reads_target: True for a head. evidence, reached: of the draft in the making, and its chance to
    be accepted up to each token. spent: cost of its steps so far. num_emitted: tokens of
    the text so far. charge: cost of reading that the text so far has not made up for.
    """

    reads_target: bool = False
    evidence: Sequence[Evidence] = ()
    reached: list[float] = field(default_factory=list)
    spent: float = 0.0
    num_emitted: int = 0
    charge: float = 0.0
    _asked_at: float = 0.0

    def limit(self) -> int:
        """The longest draft, if its first tokens pay and can be afforded.

        Reading what it has missed is paid once the text so far would have saved as much, so that
        at most twice what was needed is paid (the ski rental bound), or on the account.
        """
        if not super().limit():
            return 0
        self.charge = 0.0
        if not self.has_read:
            self.charge = max(0.0, self._reading() - max(0.0, self.gain) * self.num_emitted)
            if self.charge and not self.account.stands(self.charge + self.loss(1) / 2):
                self.rest = REST
                return 0
        return min(LONGEST, self.prices.most)

    def _reading(self) -> float:
        """Cost of reading what it has missed, in plain rounds."""
        steps = self.learned.steps
        return self._missed() * (steps.step * READING if steps.reading is None else steps.reading)

    def _missed(self) -> int:
        """Tokens that it has to read; of the target's states no more than these wait."""
        missed = self.prices.context if self.num_missed is None else self.num_missed
        return min(missed, MOST_WAITING) if self.reads_target else missed

    def ask(self, session: Stepwise, limit: int) -> Draft:
        """Its draft, as long as the next token is worth its steps."""
        self.evidence, self.reached, self.spent = (), [], 0.0
        self._asked_at = self.prices.clock()
        return session.propose_while(limit, self.goes_on)

    def goes_on(self, evidence: Sequence[Evidence]) -> Step:
        """Weigh the latest token and those that could follow it; see `types.Stepwise`."""
        length, latest = len(evidence), evidence[-1]
        self._learn_cost(length, latest)
        del self.reached[length - 1 :]  # of a token that was not taken, where a free one stands
        for i in range(len(self.reached), length):
            chance = self.learned.chances.of_draft([evidence[i]], first=i)[0]
            self.reached.append(chance * (self.reached[-1] if i else 1.0))
        self.evidence = evidence
        rate, cost, reach = self.prices.rate, self.prices.cost, self.reached[-1]
        own = reach - rate * (cost(length) - cost(length - 1))
        if length < LONGEST:
            step = 0.0 if latest.is_free else self.learned.steps.step
            follows, value = self.learned.chances if latest.is_free else self.learned.unseen, 0.0
            chances = follows.of_draft([latest if latest.is_free else 0] * LOOKAHEAD, first=length)
            for more, chance in enumerate(chances, start=length + 1):
                reach *= chance
                value += reach - rate * (cost(more) - cost(more - 1) + step)
                if value > max(0.0, -own):
                    return Step.GO_ON
        return Step.STOP_AFTER if own > 0 else Step.STOP_BEFORE

    def _learn_cost(self, length: int, latest: Evidence) -> None:
        """Learn what it took to get to the latest token."""
        steps, plain, now = self.learned.steps, self.prices.stairs.seconds, self.prices.clock()
        if latest.is_free or not plain:
            return
        taken, self._asked_at = (now - self._asked_at) / plain, now
        if length > 1:
            steps.further.append(bounded(taken))
        elif self.has_read:
            steps.first.append(bounded(taken))
        elif missed := self._missed():
            steps.reading = max(0.0, taken - steps(1)) / missed
        self.spent += taken if length > 1 or self.has_read else steps(1)

    def settle(self, round_: RoundRecord) -> float:
        """Learn what its pass cost, and what each token's evidence was worth."""
        if round_.steady:
            self.prices.stairs.add(1 + round_.drafted, round_.seconds - round_.draft_seconds)
        cost = self.prices.cost(round_.drafted) + self.spent
        self.account.add(round_.emitted - cost)
        verdict = verdict_of(round_)
        self.learned.chances.learn(self.evidence, verdict)
        self.learned.unseen.learn([0] * len(verdict), verdict)
        return cost

    def follow(self, round_: RoundRecord, drafted: bool) -> float:
        """Book steps that brought no draft, and reading that is not made up for."""
        asked, lost = bool(self.evidence), 0.0 if drafted else self.spent
        self.account.add(-lost - self.charge * asked)
        self.num_emitted += round_.emitted
        super().follow(round_, drafted or asked)
        if asked and not drafted:
            self.rest = REST
        self.evidence, self.spent, self.charge = (), 0.0, 0.0
        return lost
