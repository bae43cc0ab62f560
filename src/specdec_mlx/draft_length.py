"""How many tokens to draft."""

from __future__ import annotations

from typing import Protocol

from specdec_mlx.types import Draft, RoundRecord


class DraftLength(Protocol):
    """Chooses the draft length of each round of one generation; learns from the rounds."""

    def limit(self) -> int:
        """Most tokens to draft now, >= 0; decided before anything is drawn."""
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

    def limit(self) -> int:
        """The fixed length."""
        return self.length

    def cut(self, draft: Draft) -> int:
        """Keep all."""
        return len(draft)

    def record(self, round_: RoundRecord) -> None:
        """Learn nothing."""


def make_draft_length(choice: int | DraftLength) -> DraftLength:
    """Policy for what a caller passed as `draft_length`."""
    if isinstance(choice, bool | str | float):
        raise ValueError(f"draft_length={choice!r}: expected an int >= 0 or a DraftLength.")
    return Fixed(choice) if isinstance(choice, int) else choice
