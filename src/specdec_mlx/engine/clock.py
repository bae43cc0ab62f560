"""Host time of a round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from specdec_mlx.contracts import Outcome, PendingPass, RoundRecord, ValuesDrafts

HARDLY = 0.1
"""Share of a round's seconds for which the caller may be away, and they count as the round's."""


@dataclass(slots=True)
class Round:
    """A pass under way, and the host time that it took to get there, in seconds.

    num_drafted: tokens that it verifies. num_pending: those that were known before. is_ahead:
    launched before the round before it was read.
    """

    under_way: PendingPass
    num_drafted: int
    num_pending: int
    draft_seconds: float
    launch_seconds: float
    is_ahead: bool = False
    part: str = ""


@dataclass
class RoundClock:
    """Host time of rounds, in seconds.

    seconds: of the latest round, reading to reading. waited: for its reading. away: the caller's.
    now: the time.
    """

    seconds: float = 0.0
    waited: float = 0.0
    away: float = 0.0
    now: Callable[[], float] = field(default_factory=lambda: perf_counter)
    _read_at: float = 0.0
    _resumed_at: float = 0.0
    _draft_began: float | None = None
    _launch_began: float = 0.0
    _launching: float = 0.0
    _finished_at: float | None = None

    def start(self) -> None:
        """The first round begins."""
        self._read_at = self._resumed_at = self.now()

    def draft_begins(self) -> None:
        """A draft is asked for."""
        self._draft_began = self.now()

    def launch_begins(self) -> None:
        """A pass is about to be launched."""
        self._launch_began = self.now()

    def launched(
        self, under_way: PendingPass, *, is_ahead: bool = False, part: str = ""
    ) -> Round:
        """It is under way; part: key of the drafter whose draft it verifies."""
        began = self._launch_began if self._draft_began is None else self._draft_began
        self._draft_began = None
        draft_seconds = self._launch_began - began
        launch_seconds = self.now() - self._launch_began
        self._launching += draft_seconds + launch_seconds
        drafted = len(under_way.draft.tokens)
        pending = under_way.num_fed - drafted
        return Round(
            under_way, drafted, pending, draft_seconds, launch_seconds, is_ahead, part
        )

    def was_read(self, started: float) -> None:
        """A round was read; waiting for it began at `started`."""
        read_at = self.now()
        self.waited = read_at - started
        self.seconds = (self._finished_at or read_at) - self._read_at
        if self._finished_at is not None:
            self.away = 0.0
        self._read_at, self._finished_at = self._finished_at or read_at, None

    @property
    def was_undisturbed(self) -> bool:
        """True if its seconds are the round's own: the caller was away for less than waited."""
        return self.away < max(self.waited, HARDLY * self.seconds)

    def record(
        self, current: Round, outcome: Outcome, ahead: Round | None, context: int
    ) -> RoundRecord:
        """The account of the round that was just read.

        outcome: cut at max_tokens. ahead: the pass launched before it was read. context: on the
        caches.
        """
        return RoundRecord(
            drafted=current.num_drafted,
            accepted=len(outcome.kept),
            emitted=len(outcome.tokens),
            fed=current.under_way.num_fed,
            tokens=outcome.tokens,
            seconds=self.seconds,
            draft_seconds=current.draft_seconds,
            verify_seconds=current.launch_seconds + self.waited,
            steady=current.is_ahead == (ahead is not None) and self.was_undisturbed,
            ahead=current.is_ahead,
            context=context,
            part=current.part,
        )

    def other_seconds(self) -> float:
        """Host time of this round that was neither waiting nor getting a pass under way."""
        return self.now() - self._resumed_at - self.waited - self._launching

    def time_if_hidden(self, following: Round | None, values: ValuesDrafts) -> None:
        """Wait for the pass under way, where a slow caller hides seconds that `values` needs."""
        if following is not None and values.wants_timing(following.num_drafted):
            if self.was_undisturbed:
                return
            following.under_way.wait()
            self._finished_at = self.now()

    def resumed(self, handed_over: float) -> None:
        """The caller came back, and had the tokens from `handed_over` on."""
        self._resumed_at, self._launching = self.now(), 0.0
        self.away = self._resumed_at - handed_over
