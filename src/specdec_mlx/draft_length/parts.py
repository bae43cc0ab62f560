"""One drafter in one generation: what its drafts are worth, and what they cost.

A look-up is free to ask, and each of its drafts is scored against what came, verified or not. A
drafter that costs time tells nothing until it is paid for: its losses are bounded by an account.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from operator import mul
from time import perf_counter

from specdec_mlx.contracts import Draft, Evidence, RoundRecord, Session, Step
from specdec_mlx.draft_length.chances import tokens_and_evidence
from specdec_mlx.draft_length.costs import WIDTHS, CostModel
from specdec_mlx.draft_length.store import EXPLORATION, Learned

LENGTHS = tuple(rows - 1 for rows in WIDTHS)  # draft lengths that are chosen from
LONGEST = 12  # tokens drafted one by one, or by a look-up whose drafts were wrong lately
# recent acceptance from which on a look-up is asked for long drafts, and a model soon again
PREDICTABLE = 0.4
PAUSE = 8  # rounds without asking a drafter that costs time, after a round in which it did not pay
READING = 0.02  # cost of reading a token, in draft steps: a prompt is read many at once
RATE_DECAY = 0.95  # of moving averages, and of the sums that the going rate is the ratio of


@dataclass
class Prices:
    """Costs of passes and the worth of a token: `rate`, the ratio of `tokens` and `spent`.

    most: longest draft that may be tried. context: positions on the caches.
    """

    cost_model: CostModel
    tokens: float = 0.0
    spent: float = 0.0
    rate: float = 1.0
    most: int = 0
    context: int = 0
    clock: Callable[[], float] = perf_counter

    def update(self, cost_model: CostModel, tokens: float = 0.0, cost: float = 0.0) -> None:
        """Take over present costs, and what a round has brought at which cost."""
        if cost:
            self.tokens = RATE_DECAY * self.tokens + tokens
            self.spent = RATE_DECAY * self.spent + cost
        self.cost_model = cost_model
        self.rate = max(1.0, self.tokens / (self.spent or inf))
        self.most = cost_model.most_rows() - 1

    def best(
        self,
        reaches: Sequence[float],
        step: float = 0.0,
        drafted: int = 0,
        start: float = 0.0,
        most: int | None = None,
    ) -> tuple[int, float]:
        """The length of the largest value, and its gain over plain decoding, in tokens.

        reaches: chance of each token that it and all before it are accepted. step: cost of drafting
        a token after those `drafted`, which are paid already. start: what the first costs besides.
        most: longest draft.
        """
        best, gain, tokens = 0, 0.0, 0.0
        costs, rate = self.cost_model.fitted, self.rate
        lengths = {*LENGTHS, len(reaches), drafted}
        for length, reach in enumerate(reaches[: most or self.most], start=1):
            tokens += reach
            if length in lengths:
                # costs are at least 1
                cost = costs.get(1 + length) or self.cost_model(1 + length)
                if length > drafted:
                    cost += start + step * (length - drafted)
                value = tokens - rate * (cost - 1.0)
                if value > gain:
                    best, gain = length, value
        return best, gain


@dataclass(eq=False)
class LookUp:
    """A drafter that is free to ask.

    gain: of its next draft over plain decoding, in tokens. scored, evidence: a draft that is
    compared with what comes. latest: last token of the text.
    """

    prices: Prices
    learned: Learned
    gain: float = 0.0
    scored: Sequence[int] = ()
    evidence: Sequence[Evidence | int] = ()
    latest: int = -2

    def __post_init__(self) -> None:
        """Decay what was recent: it is another text."""
        self.learned.chances.decay()
        self.learned.unseen.decay()

    def limit(self) -> int:
        """Most tokens to ask for."""
        return LENGTHS[-1] if self.learned.chances.recent >= PREDICTABLE else LONGEST

    def reaches(self, tokens: Sequence[int], evidence: Sequence[Evidence | int]) -> list[float]:
        """[K] chance of each token of a copied chain that it and all before it are accepted."""
        chances = self.learned.chances.of_draft(evidence, tokens, self.latest)
        return [*accumulate(chances, mul)]

    def cut(self, draft: Draft) -> int:
        """Number of tokens to keep of a point mass; all or none of a tree, by its first chain."""
        tokens, evidence = tokens_and_evidence(
            draft if draft.parents is None else draft.first_chain()
        )
        kept, self.gain = self.prices.best(self.reaches(tokens, evidence))
        self.scored, self.evidence = tokens, evidence
        return kept if draft.parents is None else len(draft) * (kept > 0)

    def record(self, round_: RoundRecord, drafted: bool) -> float:
        """Learn from a round, with its draft or another's; its cost beyond a plain round."""
        came = round_.tokens
        if self.scored:
            pairs = zip(self.scored, came, strict=False)
            right = [mine == token for mine, token in pairs]
            if False in right:
                del right[right.index(False) + 1 :]
            self.learned.chances.learn(self.evidence, right, self.scored, self.latest)
            self.scored = ()
        if came:
            self.latest = came[-1]
        if not drafted:
            return 0.0
        if round_.steady:
            self.prices.cost_model.add(1 + round_.drafted, round_.seconds)
        return self.prices.cost_model(1 + round_.drafted) - 1.0


@dataclass(eq=False)
class Model(LookUp):
    """A drafter that costs time, and that may stop in the middle of a draft by its own confidence.

    A token's value is compared with the measured cost of its step, where AdaEDL (Agrawal et al.
    2024) and SpecDec++ (Huang et al. 2024) have thresholds.

    can_stop: True if its session can. unread: tokens of the text that it has not read,
    None for all; `most_unread` count at most. charge: cost of reading them. pause: rounds until it
    is asked again.
    """

    can_stop: bool = False
    most_unread: float = inf
    unread: int | None = None
    charge: float = 0.0
    pause: int = 0
    num_emitted: int = 0
    _times: list[float] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """Steps since the last round, as far as it is asked about each."""
        return max(0, len(self._times) - 1)

    def num_unread(self) -> float:
        """Tokens that it has to read besides a round's."""
        unread = self.prices.context if self.unread is None else self.unread
        return min(unread, self.most_unread) if unread > LONGEST + 1 else 0

    def limit(self) -> int:
        """The length of the largest value, or one token to find out, if it can be afforded.

        Reading is paid on account, or once the text would have saved as much (ski rental bound).
        """
        self.gain, steps, prices = 0.0, self.learned.steps, self.prices
        if self.pause:
            return 0
        reaches = [*accumulate(self.learned.unseen.of_draft([0] * LONGEST), mul)]
        # what its passes cost alone is not known
        most = LONGEST if len(steps.first) > 1 else None
        start = steps(1) - steps.step
        length, self.gain = prices.best(reaches, steps.step, start=start, most=most)
        length = length or 1
        reading = READING * steps.step * self.num_unread()
        self.charge = self.can_stop * max(0.0, reading - self.gain * self.num_emitted)
        loss = prices.cost_model(1 + length) - 1.0 + steps(length) - sum(reaches[:length]) / 2
        account = self.learned.account
        if max(loss, self.charge) > account.budget:
            self.pause = PAUSE
            self.learned.unseen.decay()
            if account.right >= PREDICTABLE:
                account.add(EXPLORATION * PAUSE * loss)
            return 0
        if not self.can_stop:
            return length
        # two steps tell what each costs
        return min(LONGEST if steps.first else 2, prices.most)

    def cut(self, draft: Draft) -> int:
        """All of it: `limit` or `goes_on` chose the length."""
        return len(draft)

    def propose_while_worth(self, session: Session, limit: int) -> Draft:
        """Its draft, as long as the next token is worth its steps."""
        self._times = [self.prices.clock()]
        return session.propose_while(limit, self.goes_on)

    def goes_on(self, evidence: Sequence[Evidence]) -> Step:
        """Weigh the latest token and those that could follow it; see `Session.propose_while`."""
        length, latest, learned = len(evidence), evidence[-1], self.learned
        free = latest.is_free
        if not free:
            self._times.append(self.prices.clock())
        self.evidence, chances = evidence, learned.chances.of_draft(evidence)
        guess, step = (learned.chances, 0.0) if free else (learned.unseen, learned.steps.step)
        chances += guess.of_draft([latest if free else 0] * (LONGEST - length), first=length)
        best, _ = self.prices.best([*accumulate(chances, mul)], step, length)
        if best > length:
            return Step.GO_ON
        # A draft that is to find out is verified if what its pass costs was never measured.
        is_new = not self.gain and 1 + length not in self.prices.cost_model.ratios
        return Step.STOP_AFTER if best == length or is_new else Step.STOP_BEFORE

    def record(self, round_: RoundRecord, drafted: bool) -> float:
        """Learn what a draft cost and how far it was right; pause where that is seldom."""
        learned, cost_model, times = self.learned, self.prices.cost_model, self._times
        steps, account = learned.steps, learned.account
        num_steps = max(0, len(times) - 1) if self.can_stop else round_.drafted * drafted
        if not drafted:
            account.add()
        self.pause = max(0, self.pause - 1)
        self.num_emitted += round_.emitted
        # steps are measured by the pass that followed them
        if len(times) > 1 and round_.pass_seconds > 0:
            cost = cost_model(1 + round_.drafted)
            plain = round_.pass_seconds / cost if round_.steady else cost_model.seconds
            if self.num_unread() <= LENGTHS[-1]:  # reading them hardly takes longer
                steps.first.append((times[1] - times[0]) / plain)
            if num_steps > 1:
                steps.further.append((times[-1] - times[1]) / (num_steps - 1) / plain)
            if round_.steady:
                cost_model.add(1 + round_.drafted, round_.pass_seconds)
        if drafted:
            verdict = [True] * round_.accepted
            verdict += [False] * (round_.accepted < round_.drafted)
            learned.unseen.learn([0] * len(verdict), verdict)
            if self.can_stop:
                learned.chances.learn(self.evidence, verdict)
            elif round_.steady and cost_model.seconds:
                steps.add_whole(cost_model, round_.seconds, round_.drafted)
        extra = (cost_model(1 + round_.drafted) - 1.0) * drafted + steps(num_steps)
        if num_steps:
            account.add((round_.emitted - 1) * drafted - extra - self.charge)
            account.right += (1 - RATE_DECAY) * ((drafted and round_.accepted > 0) - account.right)
            self.unread = 0
        elif self.unread is not None:
            self.unread += round_.emitted
        self._times, self.charge = [], 0.0
        return extra
