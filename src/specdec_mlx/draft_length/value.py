"""The number of tokens to draft: a fixed number, or the number that pays ("auto").

The value of K draft tokens is the expected number of emitted tokens, less their cost:

    1 + a_1 + a_1 a_2 + ... + a_1..a_K - rate * (cost(1 + K) + drafting(K)),

a_i is the chance that token i is accepted if all tokens before it are (`chances`). Costs are in
plain rounds (`costs`). rate is the number of tokens that the time of a plain round has recently
brought. The largest value wins (`Prices.best`). K = 0 is plain decoding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from math import inf
from operator import mul
from time import perf_counter
from typing import Any, ClassVar

from specdec_mlx.arguments import AUTO, check_int
from specdec_mlx.contracts import (
    MANY_WAITING,
    NO_DRAFT,
    ROOT,
    Draft,
    Evidence,
    RoundRecord,
    Session,
    Step,
    chain,
)
from specdec_mlx.draft_length.chances import tokens_and_evidence
from specdec_mlx.draft_length.costs import WIDTHS, CostModel
from specdec_mlx.draft_length.store import EXPLORATION, Learned, Tuning
from specdec_mlx.errors import UnknownNameError

LENGTHS = tuple(rows - 1 for rows in WIDTHS)  # draft lengths that are chosen from
LONGEST = 12  # most tokens drafted one by one, or by a look-up whose recent drafts were wrong
# recent acceptance from which a look-up is asked for long drafts, and a model is asked soon again
PREDICTABLE = 0.4
PAUSE = 8  # rounds without a drafter that costs time, after it did not pay
READING = 0.02  # cost of reading a token, in draft steps; many are read in one pass
RATE_DECAY = 0.95  # of moving averages, and of the two sums whose ratio is the rate

MayFork = Callable[[], bool]
Propose = Callable[[int], Draft]


class DraftLength(ABC):
    """Chooses the draft length of each round of one generation, and learns from the rounds.

    In all methods `part` is the key of the drafter that is asked. `RoundRecord.part` is the key of
    the drafter whose draft was verified.

    Attributes:
        values_drafts: `choose` and `beats_chosen` compare the values of drafts.
    """

    values_drafts: ClassVar[bool] = False

    @abstractmethod
    def limit(self, part: str, cheap: bool) -> int:
        """Most tokens to draft now, at least 0. Called before anything is drawn.

        With `cheap`, proposing is free, so the limit may be larger than the length after `cut`.
        """

    def cut(self, part: str, draft: Draft) -> int:
        """Number of tokens of a deterministic draft to keep, 0 to K. By default all are kept.

        Drawn drafts are never cut here. Dropping a token for its value would change the
        distribution of the text.
        """
        return len(draft)

    def record(self, round_: RoundRecord) -> None:  # noqa: B027  # optional
        """Learn from a finished round. By default nothing is learned."""

    def begin(self, part: str, session: Session, may_fork: MayFork) -> Propose:
        """Register a session. Returns a function from the most tokens to a draft."""
        return session.propose

    def choose(self, drafts: Sequence[tuple[str, Draft]]) -> tuple[str, Draft]:
        """The draft to verify, cut, with its drafter's key. By default the longest match wins.

        `drafts` has deterministic drafts of at least one token, each with its drafter's key.
        """
        key, draft = max(drafts, key=lambda proposal: proposal[1].match)
        return key, draft.head(self.cut(key, draft))

    def beats_chosen(self, part: str) -> bool:
        """True if a session that costs time promises more than the draft that was chosen last."""
        return True

    def wants_timing(self, num_drafted: int) -> bool:
        """True if the time of this round is needed. The loop then waits before it emits."""
        return False


class Fixed(DraftLength):
    """Always at most `length` tokens."""

    def __init__(self, length: int) -> None:
        self.length = check_int("num_draft_tokens", length, 0, f", or {AUTO!r}")

    def limit(self, part: str, cheap: bool) -> int:
        return self.length


def make_draft_length(choice: int | str | DraftLength, tuning: Tuning | None = None) -> DraftLength:
    """The draft length for a caller's `num_draft_tokens`. "auto" learns in `tuning`.

    Raises UnknownNameError for another name, and ValueError for other values.
    """
    if isinstance(choice, str):
        if choice != AUTO:
            raise UnknownNameError(
                f"num_draft_tokens={choice!r}: expected an int >= 0 or {AUTO!r}."
            )
        return Auto(tuning or Tuning())
    if isinstance(choice, DraftLength):
        return choice
    if not isinstance(choice, int | type) and hasattr(choice, "limit"):
        return Auto(policy=choice)
    return Fixed(choice)


@dataclass
class Prices:
    """Costs of passes, and the value of time.

    Attributes:
        cost_model: costs of passes.
        tokens: decaying sum of emitted tokens.
        spent: decaying sum of costs, in plain rounds.
        rate: `tokens` / `spent`, at least 1.
        most: longest draft that may be tried.
        context: positions in the caches.
        clock: seconds.
    """

    cost_model: CostModel
    tokens: float = 0.0
    spent: float = 0.0
    rate: float = 1.0
    most: int = 0
    context: int = 0
    clock: Callable[[], float] = perf_counter

    def __post_init__(self) -> None:
        self.update(self.cost_model)

    def update(self, cost_model: CostModel, tokens: float = 0.0, cost: float = 0.0) -> None:
        """Replace the costs, and add the tokens and the cost of a round."""
        if cost:
            self.tokens = RATE_DECAY * self.tokens + tokens
            self.spent = RATE_DECAY * self.spent + cost
        self.cost_model = cost_model
        # Time must be worth at least the tokens of plain decoding.
        self.rate = max(1.0, self.tokens / (self.spent or inf))
        # A plain round that is due must have no draft.
        self.most = 0 if cost_model.needs_plain else cost_model.most_rows - 1

    def best(
        self,
        reaches: Sequence[float],
        step: float = 0.0,
        drafted: int = 0,
        start: float = 0.0,
        *,
        is_copied: bool = False,
    ) -> tuple[int, float]:
        """The length with the largest value, and its gain over plain decoding in tokens.

        Args:
            reaches: chance of each token that this token and all tokens before it are accepted.
            step: cost of drafting one more token.
            drafted: tokens that are drafted already, whose cost is paid.
            start: additional cost of the first token.
            is_copied: the rows copy text.
        """
        best, gain, tokens = 0, 0.0, 0.0
        costs, rate = self.cost_model.fitted[is_copied], self.rate
        lengths = {*LENGTHS, len(reaches), drafted}
        for length, reach in enumerate(reaches[: self.most], start=1):
            tokens += reach
            if length in lengths:
                cost = costs.get(1 + length) or self.cost_model(1 + length, is_copied=is_copied)
                if length > drafted:
                    cost += start + step * (length - drafted)
                # a_1 + a_1 a_2 + ... + a_1..a_K - rate * (cost(1 + K) - 1 + drafting)
                value = tokens - rate * (cost - 1.0)
                if value > gain:
                    best, gain = length, value
        return best, gain


@dataclass(eq=False)
class LookUp:
    """A drafter that is free to ask. Each of its drafts is compared with the text, verified or not.

    Attributes:
        gain: gain of its next draft over plain decoding, in tokens.
        scored: tokens of the draft to compare with the text.
        evidence: evidence for these tokens.
        latest: last token of the text.
    """

    prices: Prices
    learned: Learned
    gain: float = 0.0
    scored: Sequence[int] = ()
    evidence: Sequence[Evidence | int] = ()
    latest: int = -2

    def __post_init__(self) -> None:
        self.learned.begin_text()

    def limit(self) -> int:
        return LENGTHS[-1] if self.learned.chances.recent >= PREDICTABLE else LONGEST

    def reaches(self, tokens: Sequence[int], evidence: Sequence[Evidence | int]) -> list[float]:
        """Chances [K] that each token of a chain and all tokens before it are accepted."""
        return [*accumulate(self.learned.chances.of_draft(evidence, tokens, self.latest), mul)]

    def cut(self, draft: Draft) -> int:
        """Number of tokens to keep. A tree is kept or dropped as a whole, by its first chain."""
        is_chain = draft.parents is None
        tokens, evidence = tokens_and_evidence(draft if is_chain else draft.first_chain())
        length, self.gain = self.prices.best(self.reaches(tokens, evidence), is_copied=True)
        self.scored, self.evidence = tokens, evidence
        return length if is_chain else len(draft) * (length > 0)

    def record(self, round_: RoundRecord, drafted: bool) -> float:
        """Learn from a round. Returns its cost above a plain round if its draft is this one."""
        if self.scored:
            right = []
            # Only the tokens up to the first mistake say something about the chances.
            for drafted_token, token in zip(self.scored, round_.tokens, strict=False):
                right.append(drafted_token == token)
                if drafted_token != token:
                    break
            self.learned.chances.learn(self.evidence, right, self.scored, self.latest)
            self.scored = ()
        if round_.tokens:
            self.latest = round_.tokens[-1]
        if not drafted:
            return 0.0
        if round_.steady:
            self.prices.cost_model.add(1 + round_.drafted, round_.seconds, is_copied=True)
        return self.prices.cost_model(1 + round_.drafted, is_copied=True) - 1.0


@dataclass(eq=False)
class Model:
    """A drafter that costs time. Nothing is known about it until an account has paid for tries.

    The value of a token is compared with the measured cost of its step. AdaEDL (Agrawal et al.
    2024) and SpecDec++ (Huang et al. 2024) have thresholds instead.

    Attributes:
        can_stop: its session can stop after any token.
        most_unread: bound of the unread tokens that it reads when it is asked.
        gain: gain of its next draft over plain decoding, in tokens.
        evidence: evidence for the tokens of its latest draft.
        unread: tokens of the text that it has not read, None for all.
        charge: cost of reading them.
        pause: rounds until it is asked again.
        num_emitted: tokens emitted in this text.
    """

    prices: Prices
    learned: Learned
    can_stop: bool = False
    most_unread: float = inf
    gain: float = 0.0
    evidence: Sequence[Evidence | int] = ()
    unread: int | None = None
    charge: float = 0.0
    pause: int = 0
    num_emitted: int = 0
    _times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.learned.begin_text()

    @property
    def num_steps(self) -> int:
        """Number of steps since the last round, if it is asked about each step."""
        return max(0, len(self._times) - 1)

    def num_unread(self) -> float:
        unread = self.prices.context if self.unread is None else self.unread
        return min(unread, self.most_unread) if unread > LONGEST + 1 else 0

    def weigh(self) -> tuple[int, float]:
        """The length with the largest value, or 1, and its possible loss. Sets `gain`."""
        steps, prices = self.learned.steps, self.prices
        reaches = [*accumulate(self.learned.unseen.of_draft([0] * LONGEST), mul)]
        length, self.gain = prices.best(reaches, steps.step, start=steps(1) - steps.step)
        length = length or 1
        loss = prices.cost_model(1 + length) - 1.0 + steps(length) - sum(reaches[:length]) / 2
        return length, loss

    def limit(self) -> int:
        """The length with the largest value, or one token as a try that the account can pay for."""
        self.gain = 0.0
        if self.pause:
            return 0
        length, loss = self.weigh()
        if self.can_stop:
            # Ski rental: reading is paid by the account, or as soon as the text would have saved
            # its cost.
            reading = READING * self.learned.steps.step * self.num_unread()
            self.charge = max(0.0, reading - self.gain * self.num_emitted)
        account = self.learned.account
        if max(loss, self.charge) > account.budget:
            self.pause = PAUSE
            self.learned.unseen.decay()
            # Drafts that were right lately earn another try sooner.
            if account.right >= PREDICTABLE:
                account.add(EXPLORATION * PAUSE * loss)
            return 0
        if not self.can_stop:
            return length
        # Two steps are enough to measure the first step and a later step.
        return min(LONGEST if self.learned.steps.first else 2, self.prices.most)

    def cut(self, draft: Draft) -> int:
        return len(draft)

    def propose_while_worth(self, session: Session, limit: int) -> Draft:
        """Its draft, while the next token is worth its step."""
        self._times = [self.prices.clock()]
        return session.propose_while(limit, self.goes_on)

    def goes_on(self, evidence: Sequence[Evidence]) -> Step:
        """Weigh the latest token and the tokens that could follow (see `Session.propose_while`)."""
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
        # A width that was never measured is verified once, because its cost is unknown.
        is_new = not self.gain and 1 + length not in self.prices.cost_model.ratios
        return Step.STOP_AFTER if best == length or is_new else Step.STOP_BEFORE

    def record(self, round_: RoundRecord, drafted: bool) -> float:
        """Learn the cost and the acceptance of a draft. Returns its cost above a plain round."""
        learned, cost_model, times = self.learned, self.prices.cost_model, self._times
        steps, account = learned.steps, learned.account
        num_steps = self.num_steps if self.can_stop else round_.drafted * drafted
        self.pause = max(0, self.pause - 1)
        self.num_emitted += round_.emitted
        # Steps are measured in units of the pass that followed them, at the same pace of the
        # machine.
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
                steps.add_round(cost_model, round_.seconds, round_.drafted)
        else:
            account.add()
        extra = (cost_model(1 + round_.drafted) - 1.0) * drafted + steps(num_steps)
        if num_steps:
            account.add((round_.emitted - 1) * drafted - extra - self.charge)
            account.right += (1 - RATE_DECAY) * ((drafted and round_.accepted > 0) - account.right)
            self.unread = 0
        elif self.unread is not None:
            self.unread += round_.emitted
        self._times, self.charge = [], 0.0
        return extra


class ValuedSession(ABC):
    """A session of a look-up that makes the most valuable draft, a chain or a tree."""

    @abstractmethod
    def propose_tree(self, limit: int, values: Auto, may_fork: MayFork) -> Draft:
        """The chain or tree of at most `limit` tokens that is worth most to `values`.

        may_fork: asked if a tree is best.
        """


@dataclass
class Auto(DraftLength):
    """The number of tokens that pays, which may be 0.

    Attributes:
        tuning: learned costs and chances.
        policy: chooses the lengths, or None. With a policy, only the draft is chosen by value.
        shared_prices: prices of passes that are shared with other texts, or None.
        parts: a `LookUp` or a `Model` for each drafter's key.
    """

    values_drafts = True

    tuning: Tuning = field(default_factory=Tuning)
    policy: DraftLength | None = None
    shared_prices: Prices | None = None
    parts: dict[str, Any] = field(default_factory=dict)
    _chosen_gain: float = 0.0

    @cached_property
    def prices(self) -> Prices:
        """The costs of passes, and the worth of a token."""
        return self.shared_prices or Prices(self.tuning.cost_model())

    def begin(self, part: str, session: Session, may_fork: MayFork) -> Propose:
        if self.policy is not None:
            return session.propose
        if session.cheap and isinstance(session, ValuedSession):
            self.part(part, LookUp)
            return lambda limit: session.propose_tree(limit, self, may_fork)
        if session.can_stop and not (session.forks and may_fork()):
            most_unread = MANY_WAITING if session.reads_target else inf
            # Two sessions of one drafter share this part.
            model = self.part(part, Model, can_stop=True, most_unread=most_unread)
            return lambda limit: model.propose_while_worth(session, limit)
        return session.propose

    def part(self, key: str, kind: type[Any], **how: Any) -> Any:
        """The part with this key. A new part is of this kind."""
        if key not in self.parts:
            learned = self.tuning.of(key, look_up=kind is LookUp)
            self.parts[key] = kind(self.prices, learned, **how)
        return self.parts[key]

    def limit(self, part: str, cheap: bool) -> int:
        """The longest length that can pay, or the best length for a drafter that costs time."""
        known = self.parts.get(part) or self.part(part, LookUp if cheap else Model)
        if self.policy is None:
            return known.limit() if self.prices.most else 0
        self.prices.most = self.policy.limit(part, cheap)
        if isinstance(known, Model):
            known.weigh()
        return self.prices.most

    def cut(self, part: str, draft: Draft) -> int:
        if self.policy is not None:
            return self.policy.cut(part, draft)
        return self.parts[part].cut(draft) if len(draft) else 0

    def choose(self, drafts: Sequence[tuple[str, Draft]]) -> tuple[str, Draft]:
        chosen, best, self._chosen_gain = "", NO_DRAFT, 0.0
        for key, draft in drafts:
            part = self.parts[key]
            length = part.cut(draft)
            if part.gain > self._chosen_gain:
                best, chosen, self._chosen_gain = draft.head(length), key, part.gain
        if self.policy is not None:
            return super().choose([one for one in drafts if one[0] == chosen] or drafts)
        return chosen, best

    def beats_chosen(self, part: str) -> bool:
        return bool(self.parts[part].gain > self._chosen_gain)

    def best_tree(self, part: str, drafts: Sequence[tuple[str, Draft]], may_fork: MayFork) -> Draft:
        """The chain, or the tree of prefixes of all chains, that is worth most.

        Args:
            part: key of the session.
            drafts: deterministic chains, each with its drafter's key.
            may_fork: asked if a tree is best.
        """
        firsts = dict(reversed(drafts))  # the first one of each drafter is scored
        for key in firsts:
            self.part(key, LookUp)
        _, best = self.choose([*reversed(firsts.items())])
        reaches: dict[tuple[int, ...], float] = {}
        for key, draft in drafts:
            tokens, evidence = tokens_and_evidence(draft)
            for n, reach in enumerate(self.parts[key].reaches(tokens, evidence), start=1):
                path = tuple(tokens[:n])
                reaches[path] = max(reach, reaches.get(path, 0.0))
        paths = sorted(reaches, key=lambda path: (-reaches[path], len(path)))
        # Sorted by chance, each path follows its parent, so every prefix of the list is a tree.
        length, gain = self.prices.best([reaches[path] for path in paths], is_copied=True)
        nodes = {path: node for node, path in enumerate(paths[:length])}
        parents = [nodes[path[:-1]] if len(path) > 1 else ROOT for path in nodes]
        if gain > self._chosen_gain and parents != chain(length) and may_fork():
            self._chosen_gain = gain
            best = Draft([path[-1] for path in nodes], parents=parents)
        return best

    def price(self, num_drafted: int) -> float:
        """Price of a pass over a draft in tokens. Infinite for a draft that cannot be tried."""
        prices = self.prices
        cost = prices.cost_model(1 + num_drafted, is_copied=True) - 1.0
        return prices.rate * cost if num_drafted <= prices.most else inf

    def record(self, round_: RoundRecord) -> None:
        if self.policy is not None:
            self.policy.record(round_)
            round_ = replace(round_, steady=False)  # no length depends on costs
        prices, cost = self.prices, 1.0
        for key, part in self.parts.items():
            cost += part.record(round_, round_.drafted > 0 and key == round_.part)
        # A round without a draft and without drafting steps is a plain pass.
        if not round_.drafted and cost == 1.0 and round_.steady:
            prices.cost_model.add(round_.fed, round_.pass_seconds)
        prices.context = round_.context
        prices.update(self.tuning.cost_model(prices.context), round_.emitted, cost)

    def wants_timing(self, num_drafted: int) -> bool:
        """True if this round is to be measured, which a slow caller would spoil."""
        if self.policy is not None:
            return False
        cost_model, rows = self.prices.cost_model, 1 + num_drafted
        is_known = rows in cost_model.ratios or rows in cost_model.copied
        return not is_known if num_drafted else cost_model.needs_plain
