"""The automatic draft length: as many tokens as pay, from measured costs and learned chances.

Keeping K tokens is worth the tokens that they are expected to bring less their cost:

    1 + a_1 + a_1 a_2 + ... + a_1..a_K - rate * (cost(1 + K) + drafting(K)),

a_i the chance that token i is accepted if those before it were (`chances`), costs in plain rounds
(`costs`), rate the tokens that a plain round's time has lately brought. The largest value wins
(`Prices.best`); at K = 0 that is plain decoding. Each drafter in a generation is a part (`parts`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from specdec_mlx.contracts import (
    MANY_WAITING,
    NO_DRAFT,
    ROOT,
    Draft,
    RoundRecord,
    Session,
    chain,
)
from specdec_mlx.draft_length.chances import tokens_and_evidence
from specdec_mlx.draft_length.contract import ValuedSession
from specdec_mlx.draft_length.parts import LookUp, Model, Prices
from specdec_mlx.draft_length.store import Tuning


@dataclass
class Auto:
    """As many tokens as pay, 0 included; see `contract.ValuesDrafts`. `tuning` learns."""

    tuning: Tuning = field(default_factory=Tuning)
    parts: dict[str, LookUp] = field(default_factory=dict)
    _chosen_gain: float = 0.0

    def __post_init__(self) -> None:
        self.prices = Prices(self.tuning.cost_model())
        self.prices.update(self.prices.cost_model)

    def begin(
        self, part: str, session: Session, may_fork: Callable[[], bool]
    ) -> Callable[[int], Draft]:
        """Register a session; returns the function that gets its drafts."""
        if isinstance(session, ValuedSession):
            self._part(part, LookUp)
            return lambda limit: session.propose_tree(limit, self, may_fork)
        if session.can_stop and not (session.forks and may_fork()):
            # which two sessions of one drafter share
            model: Any = self._part(part, Model)
            model.can_stop = True
            model.most_unread = MANY_WAITING if session.reads_target else inf
            return lambda limit: model.propose_while_worth(session, limit)
        return session.propose

    def _part(self, part: str, kind: type[LookUp]) -> LookUp:
        if part not in self.parts:
            self.parts[part] = kind(self.prices, self.tuning.of(part, look_up=kind is LookUp))
        return self.parts[part]

    def limit(self, part: str, cheap: bool) -> int:
        """The longest length that can pay, or for a draft that costs time, the one that does."""
        known = self.parts.get(part) or self._part(part, LookUp if cheap else Model)
        return known.limit() if self.prices.most else 0

    def cut(self, part: str, draft: Draft) -> int:
        """The length that pays best for this draft."""
        return self.parts[part].cut(draft) if len(draft) else 0

    def choose(self, drafts: Sequence[tuple[str, Draft]]) -> tuple[str, Draft]:
        """The draft that is worth most, cut to its length."""
        chosen, best, self._chosen_gain = "", NO_DRAFT, 0.0
        for key, draft in drafts:
            part = self.parts[key]
            length = part.cut(draft)
            if part.gain > self._chosen_gain:
                best, chosen, self._chosen_gain = draft.head(length), key, part.gain
        return chosen, best

    def beats_chosen(self, part: str) -> bool:
        """True if a draft model promises more than the draft that was chosen last."""
        return self.parts[part].gain > self._chosen_gain

    def best_tree(
        self, part: str, drafts: Sequence[tuple[str, Draft]], may_fork: Callable[[], bool]
    ) -> Draft:
        """The chain, or the tree of all chains' prefixes, that is worth most."""
        firsts = dict(reversed(drafts))  # the first one of each drafter is scored
        for key in firsts:
            self._part(key, LookUp)
        _, best = self.choose([*reversed(firsts.items())])
        reaches: dict[tuple[int, ...], float] = {}
        for key, draft in drafts:
            tokens, evidence = tokens_and_evidence(draft)
            for n, reach in enumerate(self.parts[key].reaches(tokens, evidence), start=1):
                path = tuple(tokens[:n])
                reaches[path] = max(reach, reaches.get(path, 0.0))
        paths = sorted(reaches, key=lambda path: (-reaches[path], len(path)))
        length, gain = self.prices.best([reaches[path] for path in paths])
        nodes = {path: node for node, path in enumerate(paths[:length])}
        parents = [nodes[path[:-1]] if len(path) > 1 else ROOT for path in nodes]
        if gain > self._chosen_gain and parents != chain(length) and may_fork():
            self._chosen_gain = gain
            best = Draft([path[-1] for path in nodes], parents=parents)
        return best

    def price(self, num_drafted: int) -> float:
        """Price of a pass over a draft, in tokens; infinite for one that cannot be tried."""
        prices = self.prices
        cost = prices.cost_model(1 + num_drafted) - 1.0
        return prices.rate * cost if num_drafted <= prices.most else inf

    def record(self, round_: RoundRecord) -> None:
        """Learn cost and acceptance from a round, and the going rate."""
        prices, cost = self.prices, 1.0
        for key, part in self.parts.items():
            cost += part.record(round_, round_.drafted > 0 and key == round_.part)
        if not round_.drafted and cost == 1.0 and round_.steady:
            prices.cost_model.add(round_.fed, round_.pass_seconds)
        prices.context = round_.context
        prices.update(self.tuning.cost_model(prices.context), round_.emitted, cost)

    def wants_timing(self, num_drafted: int) -> bool:
        """True if seconds are needed that a slow caller would hide."""
        cost_model = self.prices.cost_model
        return 1 + num_drafted not in cost_model.ratios if num_drafted else cost_model.needs_plain
