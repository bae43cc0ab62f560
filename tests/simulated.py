"""A world for draft lengths: the text is known, drafters are right by rule, time is a table."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specdec_mlx.contracts import Draft, RoundRecord
from specdec_mlx.draft_length.policy import DraftLength
from specdec_mlx.draft_length.store import Learned

WRONG = -1


def never(position: int) -> bool:
    return False


def always(position: int) -> bool:
    return True


def at_random(share: float, seed: int = 0) -> Callable[[int], bool]:
    """Right at this share of the positions."""
    coins = random.Random(seed)
    table = [coins.random() < share for _ in range(20_000)]
    return lambda position: table[position % len(table)]


def line(slope: float, step: float = 0.0) -> Callable[[int], float]:
    """Cost of a round that drafts K tokens, in plain rounds: 1 + step + slope K, 1 at K = 0."""
    return lambda k: 1 + step + slope * k if k else 1.0


@dataclass(frozen=True)
class Part:
    """A drafter that proposes as many tokens as it may."""

    is_right: Callable[[int], bool]
    cheap: bool = True
    evidence: int | None = 3
    has_draft: Callable[[int], bool] = always
    token_cost: float = 0.0

    def propose(self, position: int, limit: int) -> Draft:
        places = range(position, position + limit if self.has_draft(position) else position)
        tokens = [token(i) if self.is_right(i) else WRONG for i in places]
        evidence = None if self.evidence is None else [self.evidence] * len(tokens)
        return Draft(tokens, evidence=evidence)


def token(position: int) -> int:
    """What the text has there."""
    return position % 100


@dataclass
class World:
    """A text that is all known, drafters that take turns as under `FirstOf`, and a clock."""

    cost: Callable[[int], float]
    parts: dict[str, Part]
    records: list[RoundRecord] = field(default_factory=list)
    position: int = 0

    def propose(self, policy: DraftLength) -> tuple[Draft, str]:
        """A draft that is worth verifying, and whose it is, as the loop asks for it."""
        for key, part in self.parts.items():
            if limit := policy.limit(key, part.cheap):
                draft = part.propose(self.position, limit)
                draft = draft.head(policy.cut(key, draft))
                if len(draft):
                    return draft, key
        return Draft(), ""

    def read(self, policy: DraftLength, draft: Draft, part: str = "", steady: bool = True) -> None:
        """A round's verdict, as the loop would report it."""
        accepted = 0
        while accepted < len(draft) and draft.tokens[accepted] != WRONG:
            accepted += 1
        tokens = [token(self.position + i) for i in range(accepted + 1)]
        self.position += len(tokens)
        drafting = self.parts[part].token_cost * len(draft) if part else 0.0
        record = RoundRecord(
            drafted=len(draft),
            accepted=accepted,
            emitted=len(tokens),
            fed=len(draft) + 1,
            tokens=tokens,
            seconds=self.cost(len(draft)) + drafting,
            steady=steady,
            part=part,
        )
        policy.record(record)
        self.records.append(record)

    def run(self, policy: DraftLength, num_tokens: int) -> list[RoundRecord]:
        """Go on until so many tokens more are there, without ever running ahead."""
        start, end = len(self.records), self.position + num_tokens
        while self.position < end:
            self.read(policy, *self.propose(policy))
        return self.records[start:]


def know(learned: Learned, step: float) -> None:
    """Have a draft step's cost measured."""
    learned.steps.first.extend([step] * 3)
    learned.steps.further.extend([step] * 3)


def alone(
    is_right: Callable[[int], bool],
    cost: Callable[[int], float],
    cheap: bool = True,
    evidence: int | None = 3,
    token_cost: float = 0.0,
) -> World:
    """A world with a single drafter, called "it"."""
    return World(cost, {"it": Part(is_right, cheap, evidence, token_cost=token_cost)})


def drafted(records: Sequence[RoundRecord]) -> list[int]:
    return [r.drafted for r in records]


def seconds(records: Sequence[RoundRecord]) -> float:
    return sum(r.seconds for r in records)


def emitted(records: Sequence[RoundRecord]) -> int:
    return sum(r.emitted for r in records)
