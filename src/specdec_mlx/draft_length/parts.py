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
from statistics import median_low
from time import perf_counter

from specdec_mlx.draft_length.chances import Scored, told
from specdec_mlx.draft_length.chips import WIDTHS
from specdec_mlx.draft_length.costs import Staircase
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

FEW = 64
"""Tokens below which the time of reading them says nothing about one of them."""

READING = 0.02
"""Cost of reading a token, in draft steps, where it was not measured."""


def free(num_steps: int) -> float:
    """Cost of drafting with a look-up."""
    return 0.0


@dataclass
class Prices:
    """Costs of passes and the worth of a token, as of the latest round.

    rate: tokens that a plain round's time has lately brought. most: longest draft that may be
    tried. context: positions on the caches. latest: the text's last token, None at first. clock:
    seconds.
    """

    stairs: Staircase
    rate: float = 1.0
    most: int = 0
    context: int = 0
    latest: int | None = None
    clock: Callable[[], float] = perf_counter
    _fitted: dict[int, float] = field(default_factory=dict)

    def cost(self, length: int) -> float:
        """Cost of the pass over a draft of so many tokens, in plain rounds."""
        return self.stairs(1 + length)

    def update(self, stairs: Staircase, rate: float) -> None:
        """Take over what the last round has changed."""
        self.stairs, self.rate = stairs, rate
        if self._fitted is not stairs.fitted or self.most <= 0:
            self._fitted, self.most = stairs.fitted, stairs.most_rows() - 1
        elif stairs.needs_plain:
            self.most = 0

    def best(
        self,
        reaches: Sequence[float],
        drafting: Callable[[int], float] = free,
        drafted: int = 0,
        most: int | None = None,
    ) -> tuple[int, float]:
        """The length of the largest value, and what it is worth beyond plain decoding, in tokens.

        Args:
            reaches: of each token the chance that it is accepted, those before it included.
            drafting: cost of so many draft steps. drafted: tokens whose steps are paid already.
            most: longest draft; None for what may be tried.
        """
        best, gain, tokens = 0, 0.0, 0.0
        whole, costs, rate = len(reaches), self._fitted, self.rate
        for length, reach in enumerate(reaches[: most or self.most], start=1):
            tokens += reach
            if length in LENGTHS or length in (whole, drafted):
                cost = costs[1 + length] if 1 + length in costs else self.stairs(1 + length)
                if drafting is not free:
                    cost += drafting(max(length, drafted)) - drafting(drafted)
                value = tokens - rate * (cost - 1.0)
                if value > gain:
                    best, gain = length, value
                if value + reach * (whole - length) <= gain:
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
        self.learned.chances.doubt()
        self.learned.unseen.doubt()

    def limit(self) -> int:
        """Most tokens to ask for."""
        return LENGTHS[-1] if self.learned.chances.recent >= PREDICTABLE else LONGEST

    def reaches(self, tokens: Sequence[int], evidence: Sequence[Evidence | int]) -> list[float]:
        """[K] chance of each token of a copied chain that it and all before it are accepted."""
        chances = self.learned.chances.of_draft(evidence, tokens, self.prices.latest)
        return [*accumulate(chances, mul)]

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
    """A drafter that costs time, and drafts as many tokens, or nodes, as it is asked for.

    rest: rounds until it is asked again. num_missed: tokens of the text that it has not read, None
    for all.
    """

    rest: int = 0
    num_missed: int | None = None

    def __post_init__(self) -> None:
        """Doubt what a step cost: a slow machine may be quick again."""
        super().__post_init__()
        for samples in vars(self.learned.steps).values():
            if len(samples) > 1:
                samples.popleft()

    def limit(self) -> int:
        """The length of the largest value, or one token to find out, if it can be afforded."""
        self.gain, steps = 0.0, self.learned.steps
        if self.rest or not self.prices.most:
            return 0
        reaches = [*accumulate(self.learned.unseen.of_draft([0] * LONGEST), mul)]
        most = LONGEST if len(steps.first) > 1 else None  # what its passes cost alone is not known
        length, self.gain = self.prices.best(reaches, steps, most=most)
        length = length or 1
        loss = self.prices.cost(length) - 1.0 + steps(length) - sum(reaches[:length]) / 2
        if not self.learned.account.stands(loss):
            self.rest = REST
            self.learned.unseen.doubt()
            return 0
        return length

    def cut(self, draft: Draft) -> int:
        """All of it: `limit` chose the length."""
        return len(draft)

    def settle(self, round_: RoundRecord) -> float:
        """Learn what its draft cost and how far it was right; book what it brought."""
        plain, cost = self.prices.stairs.seconds, self.prices.cost(round_.drafted)
        if round_.steady and plain and self.has_read:
            step = (round_.seconds / plain - cost) / round_.drafted
            self.learned.steps.add(self.learned.steps.first, step)
        verdict = verdict_of(round_)
        self.learned.unseen.learn([0] * len(verdict), verdict)
        cost += self.learned.steps(round_.drafted)
        self.learned.account.add(round_.emitted - cost)
        return cost

    @property
    def has_read(self) -> bool:
        """True if it has not more to read than a round's tokens."""
        return self.num_missed is not None and self.num_missed <= LONGEST + 1

    def follow(self, round_: RoundRecord, drafted: bool) -> float:
        """Earn this round's share of the time; rest where it is not worth asking."""
        self.learned.account.earn()
        self.rest = max(0, self.rest - 1)
        if drafted:
            self.num_missed = 0
            if self.gain <= 0:
                self.rest = REST
        elif self.num_missed is not None:
            self.num_missed += round_.emitted
        return 0.0


@dataclass(eq=False)
class Stepping(Model):
    """A drafter that can stop in the middle, by its own confidence.

    AdaEDL (Agrawal et al. 2024), SpecDec++ (Huang et al. 2024) and DISCO (Mamou et al. 2024) do so
    with thresholds; here a token's value is compared with its measured cost.

    reads_target: True for a head. num_refused: drafts in succession that were stopped at once.
    evidence, reached: of the draft in the making, and its chance to be accepted up to each token.
    spent: cost of its steps so far. num_emitted: tokens of the text so far. charge: cost of reading
    that the text so far has not made up for.
    """

    reads_target: bool = False
    num_refused: int = 0
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
        length, steps = super().limit(), self.learned.steps
        if not length:
            return 0
        reading = median_low(steps.reading or (steps.step * READING,)) * self._missed()
        self.charge = max(0.0, reading - self.gain * self.num_emitted)
        if self.charge and not self.learned.account.stands(self.charge + steps(1)):
            self.rest = REST
            return 0
        return min(LONGEST, self.prices.most)

    def _missed(self) -> int:
        """Tokens that it has to read besides a round's; of the target's states few wait."""
        if self.has_read:
            return 0
        missed = self.prices.context if self.num_missed is None else self.num_missed
        return min(missed, MOST_WAITING) if self.reads_target else missed

    def ask(self, session: Stepwise, limit: int) -> Draft:
        """Its draft, as long as the next token is worth its steps."""
        self.evidence, self.reached, self.spent = (), [], 0.0
        self._asked_at = self.prices.clock()
        return session.propose_while(limit, self.goes_on)

    def goes_on(self, evidence: Sequence[Evidence]) -> Step:
        """Weigh the latest token and those that could follow it; see `types.Stepwise`."""
        length, latest, learned = len(evidence), evidence[-1], self.learned
        if not latest.is_free:
            self._learn_cost(length)
        del self.reached[length - 1 :]  # of a token that was not taken, where a free one stands
        for i in range(len(self.reached), length):
            (chance,) = learned.chances.of_draft([evidence[i]], first=i)
            self.reached.append(chance * (self.reached[-1] if i else 1.0))
        self.evidence = evidence
        follows = learned.chances if latest.is_free else learned.unseen
        ahead = follows.of_draft(
            [latest if latest.is_free else 0] * (LONGEST - length), first=length
        )
        reaches = [*self.reached[:-1], *accumulate(ahead, mul, initial=self.reached[-1])]
        best, _ = self.prices.best(reaches, free if latest.is_free else learned.steps, length)
        if best > length:
            return Step.GO_ON
        return Step.STOP_AFTER if best == length else Step.STOP_BEFORE

    def _learn_cost(self, length: int) -> None:
        """Learn what it took to get to the latest token."""
        steps, plain, now = self.learned.steps, self.prices.stairs.seconds, self.prices.clock()
        taken, self._asked_at = (now - self._asked_at) / plain, now
        missed = self._missed()
        if length > 1:
            steps.add(steps.further, taken)
        elif not missed:
            steps.add(steps.first, taken)
        else:
            if missed >= FEW:
                steps.add(steps.reading, (taken - steps(1)) / missed)
            taken = steps(1)
        self.spent += taken

    def settle(self, round_: RoundRecord) -> float:
        """Learn what its pass cost, and what each token's evidence was worth."""
        if round_.steady:
            self.prices.stairs.add(1 + round_.drafted, round_.seconds - round_.draft_seconds)
        cost, verdict = self.prices.cost(round_.drafted) + self.spent, verdict_of(round_)
        self.learned.account.add(round_.emitted - cost)
        self.learned.chances.learn(self.evidence, verdict)
        self.learned.unseen.learn([0] * len(verdict), verdict)
        return cost

    def follow(self, round_: RoundRecord, drafted: bool) -> float:
        """Book steps that brought no draft, and reading that is not made up for."""
        asked, lost = bool(self.evidence), 0.0 if drafted else self.spent
        self.learned.account.add(-lost - self.charge * asked)
        self.num_emitted += round_.emitted
        super().follow(round_, drafted or asked)
        if asked:
            self.num_refused = 0 if drafted else self.num_refused + 1
            self.rest = max(self.rest, min(REST, 2**self.num_refused - 2))
        self.evidence, self.spent = (), 0.0
        return lost
