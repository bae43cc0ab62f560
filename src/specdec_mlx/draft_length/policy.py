"""How many tokens to draft: the contract, a fixed number, a heuristic; and "auto" by name."""

from __future__ import annotations

from typing import Protocol

from specdec_mlx.draft_length.auto import Auto
from specdec_mlx.draft_length.tuning import Tuning
from specdec_mlx.errors import UnknownNameError
from specdec_mlx.options import whole, wrong
from specdec_mlx.types import Draft, RoundRecord

DEFAULT_LENGTH = 4
"""MLX's Metal kernels read the weights once for up to 5 rows: 4 drafts and the pending token."""

NAMES = ("auto", "heuristic")


class DraftLength(Protocol):
    """Chooses the draft length of each round of one generation; learns from the rounds.

    Of a drafter that is made of several, such as `FirstOf`, each part is asked in turn; `part` is
    the key of the one that is asked, and `RoundRecord.part` of the one whose draft was verified.
    """

    def limit(self, part: str, cheap: bool) -> int:
        """Most tokens to draft now, >= 0; decided before anything is drawn.

        Args:
            part: key of the drafter that is asked.
            cheap: whether proposing is free, so that more may be asked for than `cut` will keep.
        """
        ...

    def cut(self, part: str, draft: Draft) -> int:
        """How many tokens of a point-mass draft to keep, 0 to K.

        A draft that was drawn at random is never shown here: dropping a drawn token because of
        what it is would change the output law.

        Args:
            part: key of the drafter that proposed it.
            draft: what it proposed, within the limit.
        """
        ...

    def record(self, round_: RoundRecord) -> None:
        """Learn from a finished round."""
        ...


class Fixed:
    """Always up to `length` tokens."""

    def __init__(self, length: int) -> None:
        """Refuse a negative length."""
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


def make_draft_length(choice: int | str | DraftLength, tuning: Tuning | None = None) -> DraftLength:
    """Policy for what a caller passed as `draft_length`.

    Args:
        choice: a number of tokens, "auto", "heuristic", or a policy, which is taken as it is.
        tuning: what "auto" has learned so far and goes on learning; None begins anew.

    Raises:
        UnknownNameError: for a name that is none of these.
        ValueError: for what is no int >= 0 and no policy, and a tuning that is none.
    """
    if tuning is not None and not isinstance(tuning, Tuning):
        raise wrong("tuning", tuning, "a Tuning, such as specdec_mlx.Tuning.load(path), or None")
    if isinstance(choice, str):
        if choice not in NAMES:
            raise UnknownNameError(
                f"Unknown draft_length {choice!r}. Known: an int >= 0, {', '.join(NAMES)}."
            )
        return Auto(tuning or Tuning()) if choice == "auto" else Heuristic()
    if not isinstance(choice, int | type) and hasattr(choice, "limit"):
        return choice
    return Fixed(choice)  # type: ignore[arg-type]


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
