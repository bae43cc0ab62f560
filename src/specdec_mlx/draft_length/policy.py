"""How many tokens to draft: a fixed number, a heuristic, and "auto" by name."""

from __future__ import annotations

from specdec_mlx.arguments import whole, wrong
from specdec_mlx.contracts import Draft, RoundRecord
from specdec_mlx.draft_length.auto import Auto
from specdec_mlx.draft_length.contract import DraftLength as DraftLength
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.errors import UnknownNameError

NAMES = ("auto", "heuristic")


class Fixed:
    """Always up to `length` tokens."""

    def __init__(self, length: int) -> None:
        self.length = whole("draft_length", length, 0, f", or one of {NAMES}")

    def limit(self, part: str, cheap: bool) -> int:
        """The fixed length."""
        return self.length

    def cut(self, part: str, draft: Draft) -> int:
        """Keep all."""
        return len(draft)

    def record(self, round_: RoundRecord) -> None:
        """Learn nothing."""


class Heuristic(Fixed):
    """Two more after a draft accepted whole, one less otherwise, as in Hugging Face's library."""

    def record(self, round_: RoundRecord) -> None:
        """Follow the last verdict."""
        if round_.drafted:
            whole = round_.accepted == round_.drafted
            self.length = self.length + 2 if whole else max(1, self.length - 1)


def make_draft_length(
    choice: int | str | DraftLength, tuning: Tuning | None = None
) -> DraftLength:
    """Policy for what a caller passed as `draft_length`; "auto" goes on with the tuning, if any.

    Raises UnknownNameError, or ValueError for what is no int >= 0, no policy or no tuning.
    """
    if tuning is not None and not isinstance(tuning, Tuning):
        raise wrong(
            "tuning", tuning, "a Tuning, such as specdec_mlx.Tuning.load(path), or None"
        )
    if isinstance(choice, str):
        if choice not in NAMES:
            raise UnknownNameError(
                f"draft_length {choice!r}: expected an int >= 0 or {NAMES}."
            )
        return Auto(tuning or Tuning()) if choice == "auto" else Heuristic(5)
    if not isinstance(choice, int | type) and hasattr(choice, "limit"):
        return choice
    return Fixed(choice)  # type: ignore[arg-type]


def parse_draft_length(text: str) -> int | str:
    """Read a draft length as typed on the command line. Raises ValueError for anything else."""
    if text in NAMES:
        return text
    if not text.isdecimal():
        raise ValueError(f"{text!r}: expected an int >= 0, {' or '.join(NAMES)}")
    return int(text)
