"""The automatic draft length: as many tokens as pay, from measured costs and learned chances.

Keeping K tokens is worth the tokens that it is expected to bring less what its round costs at the
going rate:

    1 + a_1 + a_1 a_2 + ... + a_1..a_K - rate * (cost(1 + K) + drafting(K)),

a_i the chance that token i is accepted if those before it were (`chances`), costs in plain rounds
(`costs`), and rate the tokens that a plain round's time has lately brought, at least 1. The largest
value wins; that is the marginal rule of an economic optimum, and at K = 0 it is plain decoding.

Each drafter in a generation is a part (`parts`), which knows its chances and its account.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from specdec_mlx.draft_length.chances import told
from specdec_mlx.draft_length.costs import Staircase
from specdec_mlx.draft_length.parts import LENGTHS, Forking, LookUp, Model, Stepping, Tree
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.types import (
    NO_DRAFT,
    Branches,
    Draft,
    DraftLength,
    DraftsAtOnce,
    DraftSession,
    DraftsTrees,
    ProposesTrees,
    RoundRecord,
    Stepwise,
)

RATE_MEMORY = 0.95
"""Decay of the moving sums behind the going rate, a round."""

Ask = Callable[[int], Draft]
"""Asks a session for a draft of at most so many tokens."""


@dataclass
class Auto:
    """As many tokens as pay, 0 included.

    tuning: what was learned before, by the key of the part; goes on learning. latest: the text's
    last token, None at first. context: positions on the caches at the latest round. stairs: costs
    of passes at that context. rate: the going rate. most: longest draft that may be tried.
    """

    tuning: Tuning = field(default_factory=Tuning)
    latest: int | None = None
    context: int = 0
    _parts: dict[str, LookUp] = field(default_factory=dict)
    _chosen_gain: float = 0.0

    def __post_init__(self) -> None:
        """Begin at the rate of the last text, which a few rounds can outweigh."""
        self._tokens, self._cost = self.tuning.tokens / 2, self.tuning.cost / 2
        self.stairs: Staircase = self.tuning.stairs(0)
        self._know()

    def _know(self) -> None:
        """What follows from the rounds so far, and stands until the next one."""
        rate = self._tokens / self._cost if self._cost else 1.0
        self.rate = rate if rate > 1.0 else 1.0
        self.most = self.stairs.most_rows() - 1

    def cost(self, length: int) -> float:
        """Cost of the pass over a draft of so many tokens, in plain rounds."""
        return self.stairs(1 + length)

    def begin(self, part: str, session: DraftSession, may_fork: Callable[[], bool]) -> Ask:
        """Expect a session, and see what it can do; see `types.ValuesDrafts`."""
        if isinstance(session, ProposesTrees):
            self._parts[part] = Tree(self, self.tuning.of(part, look_up=True))
            return lambda limit: session.propose_tree(limit, self, may_fork)
        if isinstance(session, DraftsTrees) and session.forks and may_fork():
            self._parts[part] = Forking(self, self.tuning.of(part))
        elif isinstance(session, Stepwise):
            learned = self.tuning.of(part)
            learned.steps.at_once = isinstance(session, DraftsAtOnce) and session.at_once
            stepping = self._parts[part] = Stepping(self, learned, session=session)
            return lambda limit: session.propose_while(limit, stepping.goes_on)
        return session.propose

    def limit(self, part: str, cheap: bool) -> int:
        """The longest length that can pay, or for a draft that costs time, the one that does."""
        if part not in self._parts:
            kind = LookUp if cheap else Model
            self._parts[part] = kind(self, self.tuning.of(part, look_up=cheap))
        return self._parts[part].limit() if self.most else 0

    def cut(self, part: str, draft: Draft) -> int:
        """The length that pays best for this draft."""
        return self._parts[part].cut(draft) if len(draft) else 0

    def choose(self, drafts: Sequence[tuple[str, Draft]]) -> tuple[int, int]:
        """The draft that is worth most, and its length; see `types.ValuesDrafts`."""
        lengths = [self.cut(key, draft) for key, draft in drafts]
        gains = [self._parts[key].gain for key, _ in drafts]
        self._chosen_gain = max(gains)
        best = gains.index(self._chosen_gain)
        return best, lengths[best]

    def outbids(self, part: str) -> bool:
        """True if a draft model promises more than what was chosen; see `types.ValuesDrafts`."""
        return self._parts[part].gain > self._chosen_gain

    def grow(
        self,
        part: str,
        drafts: Sequence[tuple[str, Draft]],
        guessers: Sequence[tuple[str, Branches]],
        limit: int,
        may_fork: Callable[[], bool],
    ) -> Draft:
        """The chain or the tree that is worth most; see `types.ValuesDrafts`."""
        tree = self._parts[part]
        assert isinstance(tree, Tree)
        best, tree.drafter, self._chosen_gain = NO_DRAFT, "", 0.0
        if drafts:
            chosen, length = self.choose(drafts)
            tree.drafter, draft = drafts[chosen]
            best = draft.head(length)
        if tree.may_fork and self.most:
            chains = []
            for key, draft in drafts:
                tokens, evidence = told(draft)
                known = self._parts[key].learned.chances.of_draft(evidence, tokens, self.latest)
                chains.append((tokens, list(known)))
            asked = [(session, self.tuning.of(key, True).chances) for key, session in guessers]
            grown = tree.grow(chains, asked, limit)
            if grown.parents is not None and tree.gain > self._chosen_gain:
                tree.may_fork = may_fork()
                if tree.may_fork:
                    best, tree.drafter = grown, ""
        return best

    def extra_price(self, num_drafted: int, with_more: int) -> float:
        """What further draft tokens cost, in tokens; see `types.ValuesDrafts`."""
        if with_more > self.most:
            return inf
        return self.rate * (self.cost(with_more) - self.cost(num_drafted))

    def record(self, round_: RoundRecord) -> None:
        """Learn cost and acceptance from a round, and the going rate; settle the accounts."""
        drafting = self._parts[round_.part] if round_.drafted else None
        if isinstance(drafting, Tree) and drafting.drafter:
            drafting = self._parts[drafting.drafter]
        cost, self.context = 1.0, round_.context
        if drafting is not None:
            cost = drafting.settle(round_)
        for part in self._parts.values():
            cost += part.follow(round_, part is drafting)
        if drafting is None and cost == 1.0 and round_.steady:
            self.stairs.add(round_.fed, round_.seconds)
        self._tokens = RATE_MEMORY * self._tokens + round_.emitted
        self._cost = RATE_MEMORY * self._cost + cost
        self.tuning.tokens, self.tuning.cost = self._tokens, self._cost
        if round_.tokens:
            self.latest = round_.tokens[-1]
        self.stairs = self.tuning.stairs(round_.context)
        self._know()

    def wants_timing(self, num_drafted: int) -> bool:
        """True if seconds are needed that a slow caller would hide; see `types.ValuesDrafts`."""
        if num_drafted == 0:
            return self.stairs.needs_plain
        return 1 + num_drafted not in self.stairs.ratios


class Unpriced(Auto):
    """Another draft length, with a choice among drafts: the most tokens that are expected win.

    Args:
        inner: says how long drafts are.
    """

    def __init__(self, inner: DraftLength) -> None:
        """Nothing is known yet."""
        super().__init__()
        self.inner = inner

    def _know(self) -> None:
        """No length is too expensive."""
        self.rate, self.most = 0.0, LENGTHS[-1]

    def begin(self, part: str, session: DraftSession, may_fork: Callable[[], bool]) -> Ask:
        """Whatever it can do, it is asked for as many tokens as the length says."""
        return session.propose

    def limit(self, part: str, cheap: bool) -> int:
        """As the other one says; the part is known from now on."""
        super().limit(part, cheap)
        return self.inner.limit(part, cheap)

    def cut(self, part: str, draft: Draft) -> int:
        """The same."""
        kept = self.inner.cut(part, draft)
        super().cut(part, draft.head(kept))
        return kept

    def score(self, tokens: Sequence[int]) -> None:
        """Hold the drafts that were chosen from against what came."""
        super().record(RoundRecord(0, 0, len(tokens), 1, tokens))

    def record(self, round_: RoundRecord) -> None:
        """Tell both."""
        self.inner.record(round_)
        super().record(round_)
