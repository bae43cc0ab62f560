"""The message that ranks of a generation exchange in each round: numbers, as many each time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

MOST_TOKENS = 26  # tokens of a draft that go with the meeting; longer ones take a second collective


class State(IntEnum):
    """State of a rank when the ranks meet."""

    GOES_ON = 0
    LEAVES = 1
    FAILED = 2


@dataclass(frozen=True)
class Said:
    """One rank's message when the ranks meet.

    end: prompt + tokens that its caller has. checksum: of its text. num_tokens, is_drawn, is_tree,
    tokens: of rank 0's draft. part: which of the parts that draft on every rank has drawn it, from
    1; 0 where its distribution is sent.
    """

    state: State
    end: int
    checksum: int
    num_tokens: int = 0
    is_drawn: bool = False
    is_tree: bool = False
    part: int = 0
    tokens: Sequence[int] = ()

    def numbers(self) -> list[int]:
        """All of it, as many numbers each time."""
        head = [self.state, self.end, self.checksum]
        tokens = [*self.tokens[:MOST_TOKENS], *[0] * (MOST_TOKENS - len(self.tokens))]
        return [*head, self.num_tokens, self.is_drawn, self.is_tree, self.part, *tokens]

    @classmethod
    def read(cls, numbers: Sequence[int]) -> Said:
        """Read what `numbers` gave."""
        state, end, checksum, num_tokens, is_drawn, is_tree, part, *tokens = numbers
        flags = bool(is_drawn), bool(is_tree)
        return cls(State(state), end, checksum, num_tokens, *flags, part, tokens[:num_tokens])
