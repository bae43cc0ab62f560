"""How many tokens to draft: a fixed number, a heuristic, or what pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specdec_mlx.draft_length.tuning import AcceptanceHistory, Learned, RoundCosts, Tuning
from specdec_mlx.errors import UnknownNameError
from specdec_mlx.token_ids import to_list
from specdec_mlx.types import Draft, Evidence, RoundRecord

DEFAULT_LENGTH = 4
"""MLX's Metal kernels read the weights once for up to 5 rows: 4 drafts and the pending token."""


class DraftLength(Protocol):
    """Chooses the draft length of each round of one generation; learns from the rounds."""

    def limit(self, cheap: bool) -> int:
        """Most tokens to draft now, >= 0; decided before anything is drawn.

        cheap: whether proposing is free, so that more may be asked for than `cut` will keep.
        """
        ...

    def cut(self, draft: Draft) -> int:
        """How many tokens of a point-mass draft to keep, 0 to K.

        A draft that was drawn at random is never shown here: dropping a drawn token because of
        what it is would change the output law.
        """
        ...

    def record(self, round_: RoundRecord) -> None:
        """Learn from a finished round."""
        ...


class Fixed:
    """Always up to `length` tokens."""

    def __init__(self, length: int) -> None:
        """Refuse a negative length."""
        if length < 0:
            raise ValueError(f"draft_length={length}: expected an int >= 0 (0 is plain decoding).")
        self.length = length

    def limit(self, cheap: bool) -> int:
        """The fixed length."""
        return self.length

    def cut(self, draft: Draft) -> int:
        """Keep all."""
        return len(draft)

    def record(self, round_: RoundRecord) -> None:
        """Learn nothing."""


class Heuristic(Fixed):
    """Two more after a draft accepted whole, one less otherwise, never below 1.

    The schedule of Hugging Face's assisted generation; it knows nothing of costs.
    """

    def __init__(self, length: int = 5) -> None:
        """Start with `length`."""
        super().__init__(length)

    def record(self, round_: RoundRecord) -> None:
        """Follow the last verdict."""
        if round_.drafted:
            whole = round_.accepted == round_.drafted
            self.length = self.length + 2 if whole else max(1, self.length - 1)


LENGTHS = (1, 2, 3, 4, 6, 9, 14)
"""Draft lengths that are tried: few, so that kernels are compiled for few shapes; 4, 9 and 14 fill
MLX's tiles of 5 rows."""

PROBE_SHARE = 0.01
"""Share of the time that may go into finding out whether a parked draft model pays again."""

PROBE_ROUNDS = 2
"""Rounds of such a probe: in the first a draft model reads what it has missed."""

DEAR_CREDIT = 3.0
"""What the first trials of a draft model may lose, in plain rounds: asking it costs much the same
for one token as for four, so that only a long draft shows what it can do."""

TRIAL_SHARE = 0.002
"""Share of the time that may go into trying lengths whose cost is not known."""

RATE_MEMORY = 0.95
"""Share of the past that is left in the running rate after another round: about 20 rounds."""


@dataclass
class Auto:
    """As many tokens as pay, 0 included; from measured cost and acceptance.

    Keeping K tokens is worth the tokens that it is expected to bring less what its round costs at
    the going rate: 1 + a_1 + a_1 a_2 + ... + a_1..a_K - rate * cost(K), with a_i the chance that
    token i is accepted if those before it were, cost in plain rounds, and rate the tokens that a
    plain round's time has lately brought, at least 1. The largest value wins; that is the marginal
    rule of an economic optimum, and at K = 0 it is plain decoding.

    What the drafter proposed and was not taken is scored all the same against what came, so that
    a parked drafter is noticed when the text becomes predictable. A draft model, which costs time
    to ask, is asked again now and then instead, for at most 1% of the time.

    tuning: what was learned before; goes on learning. drafter: whose history to use. Of several
    drafters that take turns, those that are cheap to ask and those that are not learn apart.
    """

    tuning: Tuning = field(default_factory=Tuning)
    drafter: str = "drafter"
    learned: Learned = field(init=False)
    _by_cheapness: dict[bool, Learned] = field(default_factory=dict)
    _is_cheap: bool = False
    _open: _OpenDraft | None = None
    _is_scored: bool = False
    _is_probe: bool = False
    _rounds_parked: int = 0
    _rounds_awake: int = 0
    _tokens: float = 0.0
    _cost: float = 0.0

    def __post_init__(self) -> None:
        """Look up what was learned with this kind of drafter; the form of a new text is unknown."""
        self.learned = self.tuning.of(self.drafter)
        self.learned.acceptance.form = 0.5

    def limit(self, cheap: bool) -> int:
        """The longest length that can pay, or for a draft that costs time, the one that does."""
        self._turn_to(cheap)
        if cheap:
            return LENGTHS[-1]
        best = self._best([0] * LENGTHS[-1])
        self._is_probe = best == 0
        return best or self._probe()

    def _probe(self) -> int:
        """Length at which a parked draft model is asked again; 0 if that is not due."""
        costs = self.learned.costs
        if costs.needs_plain or self._rounds_awake >= PROBE_ROUNDS:
            return 0
        values = self._values([0] * LENGTHS[-1])
        length = max(values, key=values.__getitem__)
        loss = PROBE_ROUNDS * (costs.ratio(length) - 1)
        is_due = self._rounds_awake or self._rounds_parked * PROBE_SHARE >= loss
        return length if is_due else 0

    def _turn_to(self, cheap: bool) -> None:
        """Go on with what was learned of cheap drafters, or of dear ones."""
        if cheap not in self._by_cheapness:
            second = ", cheap" if cheap else ", dear"
            name = f"{self.drafter}{second if self._by_cheapness else ''}"
            self._by_cheapness[cheap] = self.tuning.of(name)
            self._by_cheapness[cheap].acceptance.form = 0.5
            if not cheap and not self._by_cheapness[cheap].by_context:
                self._by_cheapness[cheap].credit = DEAR_CREDIT
        self.learned = self._by_cheapness[cheap]
        self._is_cheap = cheap
        self._is_scored = self._is_probe = False

    def cut(self, draft: Draft) -> int:
        """The length that pays best for this draft."""
        if not len(draft):
            return 0
        if not self._is_cheap and draft.evidence is None:
            return len(draft)  # `limit` chose the length
        evidence = [0] * len(draft) if draft.evidence is None else list(draft.evidence)
        kept = self._best(evidence)
        self._is_scored = True
        if kept or self._open is None:
            self._open = _OpenDraft(to_list(draft.tokens), evidence, self.learned.acceptance)
        return kept

    def record(self, round_: RoundRecord) -> None:
        """Learn cost and acceptance from a round, and the going rate."""
        costs = self._learn_cost(round_)
        self._tokens = RATE_MEMORY * self._tokens + round_.emitted
        self._cost = RATE_MEMORY * self._cost + costs.ratio(round_.drafted)
        self._rounds_parked = 0 if round_.drafted else self._rounds_parked + 1
        self._rounds_awake = self._rounds_awake + 1 if round_.drafted else 0
        if self._open is not None and self._open.score(round_.tokens):
            self._open = None
        if not self._is_scored:
            for i in range(min(round_.accepted + 1, round_.drafted)):
                self.learned.acceptance.observe(0, i, i < round_.accepted)

    def _learn_cost(self, round_: RoundRecord) -> RoundCosts:
        """Costs to go by, with this round's among them; a plain round is everybody's."""
        everybody = list(self._by_cheapness.values()) or [self.learned]
        for learned in everybody:
            learned.context = round_.context
        costs = self.learned.costs
        was_trial = costs.is_retry_due or not costs.is_measured(round_.drafted)
        woke = not self._is_cheap and round_.drafted and not self._rounds_awake
        if round_.steady and round_.drafted and not woke:
            costs.observe(round_.drafted, round_.seconds)
        elif round_.steady and not round_.drafted:
            for learned in everybody:
                learned.costs.observe(0, round_.seconds)
        if round_.drafted and was_trial and not self._is_probe:
            self.learned.credit -= max(0.0, costs.ratio(round_.drafted) - round_.emitted)
        self.learned.credit += TRIAL_SHARE
        return costs

    @property
    def rate(self) -> float:
        """Tokens that the time of a plain round has lately brought, at least 1."""
        return max(1.0, self._tokens / self._cost) if self._cost else 1.0

    def _best(self, evidence: Sequence[Evidence | int]) -> int:
        """Length of the largest value; 0 if none is worth more than plain decoding."""
        costs = self.learned.costs
        best, best_value = 0, 1.0 - self.rate
        if costs.needs_plain:
            return best
        for length, value in self._values(evidence).items():
            is_trial = costs.is_retry_due or not costs.is_measured(length)
            expected = value + self.rate * costs.hoped_ratio(length)
            loss = costs.worst_ratio(length) - expected
            if value > best_value and not (is_trial and loss > self.learned.credit):
                best, best_value = length, value
        return best

    def _values(self, evidence: Sequence[Evidence | int]) -> dict[int, float]:
        """What each length above 0 is worth: expected tokens less the cost at the going rate."""
        history, costs = self.learned.acceptance, self.learned.costs
        values = {}
        reach, expected = 1.0, 1.0
        for i, kind in enumerate(evidence):
            reach *= history.chance(kind, i)
            expected += reach
            length = i + 1
            if length in LENGTHS or length == len(evidence):
                values[length] = expected - self.rate * costs.hoped_ratio(length)
        return values


@dataclass
class _OpenDraft:
    """A draft, taken or not, that is being scored against what came."""

    tokens: list[int]
    evidence: Sequence[Evidence | int]
    history: AcceptanceHistory
    position: int = 0

    def score(self, emitted: Sequence[int]) -> bool:
        """Compare with the tokens emitted; whether the draft is through."""
        for token in emitted:
            if self.position == len(self.tokens):
                return True
            right = self.tokens[self.position] == token
            self.history.observe(self.evidence[self.position], self.position, right)
            self.position += 1
            if not right:
                return True
        return self.position == len(self.tokens)


NAMES = ("auto", "heuristic")


def make_draft_length(
    choice: int | str | DraftLength, drafter: str = "drafter", tuning: Tuning | None = None
) -> DraftLength:
    """Policy for what a caller passed as `draft_length`.

    drafter, tuning: whose history "auto" uses, and what it has learned so far.
    """
    if isinstance(choice, str):
        if choice not in NAMES:
            raise UnknownNameError(
                f"Unknown draft_length {choice!r}. Known: an int >= 0, {', '.join(NAMES)}."
            )
        return Auto(tuning or Tuning(), drafter) if choice == "auto" else Heuristic()
    if isinstance(choice, bool | float):
        raise ValueError(f"draft_length={choice!r}: expected an int >= 0, or one of {NAMES}.")
    return Fixed(choice) if isinstance(choice, int) else choice


def parse_draft_length(text: str) -> int | str:
    """What `make_draft_length` takes, from what somebody typed.

    Raises:
        ValueError: for anything but an int >= 0 or a name.
    """
    if text in NAMES:
        return text
    try:
        length = int(text)
    except ValueError:
        length = -1
    if length < 0:
        raise ValueError(f"{text!r}: expected an int >= 0, {' or '.join(NAMES)}")
    return length
