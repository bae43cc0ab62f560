"""What a pass over all rows takes, by the host's clock."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

from specdec_mlx.batch.rows import Rounds


@dataclass
class Pace:
    """What a pass over all rows takes, in seconds, from one reading to the next.

    is_steady: whether they are the seconds of one pass with the rows of the one before it, and the
    caller was not busy with its tokens for most of the time. away: how long it was.
    """

    seconds: float = 0.0
    is_steady: bool = False
    away: float = 0.0
    _read_at: float = 0.0
    _uids: tuple[int, ...] = ()

    def was_read(self, current: Rounds, ahead: Rounds) -> None:
        """A pass was read."""
        now = perf_counter()
        self.seconds, self._read_at = now - self._read_at, now
        uids = tuple(row.uid for row, _ in current)
        in_step = all(round_.is_ahead == bool(ahead) for _, round_ in current)
        undisturbed = self.away < self.seconds / 2
        self.is_steady = uids == self._uids and in_step and undisturbed
        self._uids = uids
