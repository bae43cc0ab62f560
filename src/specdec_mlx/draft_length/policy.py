"""How many tokens to draft: a fixed number, or "auto"."""

from __future__ import annotations

from specdec_mlx.arguments import AUTO, whole, wrong
from specdec_mlx.arguments import parse_draft_length as parse_draft_length
from specdec_mlx.contracts import Draft, RoundRecord
from specdec_mlx.draft_length.auto import Auto
from specdec_mlx.draft_length.contract import DraftLength as DraftLength
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.errors import UnknownNameError


class Fixed:
    """Always up to `length` tokens."""

    def __init__(self, length: int) -> None:
        self.length = whole("num_draft_tokens", length, 0, f", or {AUTO!r}")

    def limit(self, part: str, cheap: bool) -> int:
        """The fixed length."""
        return self.length

    def cut(self, part: str, draft: Draft) -> int:
        """Keep all."""
        return len(draft)

    def record(self, round_: RoundRecord) -> None:
        """Learn nothing."""


def make_draft_length(choice: int | str | DraftLength, tuning: Tuning | None = None) -> DraftLength:
    """Policy for what a caller passed as `draft_length`; "auto" goes on with the tuning, if any.

    Raises UnknownNameError, or ValueError for what is no int >= 0, no policy or no tuning.
    """
    if tuning is not None and not isinstance(tuning, Tuning):
        raise wrong(
            "tuning", tuning, "a Tuning, such as specdec_mlx.drafters.Tuning.load(path), or None"
        )
    if isinstance(choice, str):
        if choice != AUTO:
            raise UnknownNameError(
                f"num_draft_tokens={choice!r}: expected an int >= 0 or {AUTO!r}."
            )
        return Auto(tuning or Tuning())
    if not isinstance(choice, int | type) and hasattr(choice, "limit"):
        return choice
    return Fixed(choice)  # type: ignore[arg-type]
