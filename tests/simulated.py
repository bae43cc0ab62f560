"""A world for draft lengths: the text is known, drafters are right by rule, time is a table."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specdec_mlx.contracts import Draft, RoundRecord
from specdec_mlx.draft_length.store import Learned
from specdec_mlx.draft_length.value import DraftLength

WRONG = -1


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
    has_draft: Callable[[int], bool] = lambda position: True
    token_cost: float = 0.0

    def propose(self, position: int, limit: int) -> Draft:
        places = range(position, position + limit if self.has_draft(position) else position)
        tokens = [i % 100 if self.is_right(i) else WRONG for i in places]
        evidence = None if self.evidence is None else [self.evidence] * len(tokens)
        return Draft(tokens, evidence=evidence)


def verdict(
    drafted: int, accepted: int, seconds: float, tokens: Sequence[int] = (), part: str = "it"
) -> RoundRecord:
    """A round's record, as the loop would report it."""
    part = part if drafted else ""
    emitted = accepted + 1
    return RoundRecord(drafted, accepted, emitted, drafted + 1, tokens, seconds, part=part)


@dataclass
class World:
    """A text whose token at a position is that modulo 100, drafters in turn, and a clock."""

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

    def run(self, policy: DraftLength, num_tokens: int) -> list[RoundRecord]:
        """Go on until so many tokens more are there, without ever running ahead."""
        start, end = len(self.records), self.position + num_tokens
        while self.position < end:
            draft, part = self.propose(policy)
            drafted = len(draft)
            accepted = [*draft.tokens, WRONG].index(WRONG)
            tokens = [i % 100 for i in range(self.position, self.position + accepted + 1)]
            time = self.cost(drafted) + (self.parts[part].token_cost * drafted if part else 0.0)
            record = verdict(drafted, accepted, time, tokens, part)
            policy.record(record)
            self.position += len(tokens)
            self.records.append(record)
        return self.records[start:]


def know(learned: Learned, step: float) -> None:
    """Have a draft step's cost measured."""
    learned.steps.first.extend([step] * 3)
    learned.steps.further.extend([step] * 3)


def drafted(records: Sequence[RoundRecord]) -> list[int]:
    return [r.drafted for r in records]


def seconds(records: Sequence[RoundRecord]) -> float:
    return sum(r.seconds for r in records)


def emitted(records: Sequence[RoundRecord]) -> int:
    return sum(r.emitted for r in records)


def lost(records: Sequence[RoundRecord]) -> float:
    """What they took longer than plain decoding, in plain rounds."""
    return seconds(records) - emitted(records)
