"""Pipelined mode: as fast as plain decoding where nothing is drafted.

The next pass is launched on a token that the host has not seen, as in mlx-lm, so that the device
never waits for Python. Who wants the algorithm alone may skip this file: the text is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from specdec_mlx.contracts import NO_DRAFT, Target
from specdec_mlx.engine.clock import Round, RoundClock
from specdec_mlx.engine.sequence import SequenceState

HIT_RATE_DECAY = 0.8  # decay of the moving average of "this round's draft was of use"
FIRST_HIT_RATE = 0.3  # initial value

LOW_HIT_RATE = 0.08
"""Rate below which pipelined mode pays. A pass that is not overlapped takes longer by what building
it takes the host, 0.05 of a plain round of SmolLM2 on a CPU and more on a GPU; a draft that has to
begin one token later loses about 0.6 of one."""


@dataclass
class Pipeline:
    """Whether the next pass may start before this one's token is known: little chance of a draft.

    A pass launched ahead costs the first token of the next draft; waiting costs the overlap.
    draft_hit_rate: share of the rounds lately that kept something of a draft.
    """

    target: Target
    sequence: SequenceState
    clock: RoundClock
    stream: Any
    is_on: bool = True
    draft_hit_rate: float = FIRST_HIT_RATE

    def choose(self, found: bool, may_find: bool) -> None:
        """Choose the mode of the next round: is there a draft, or will one be looked for?"""
        may_wait = self.draft_hit_rate >= LOW_HIT_RATE and may_find
        self.is_on = not found and not may_wait

    def record(self, num_accepted: int) -> None:
        """Learn from a round how likely a draft is of use."""
        hit = (1 - HIT_RATE_DECAY) * (num_accepted > 0)
        self.draft_hit_rate = HIT_RATE_DECAY * self.draft_hit_rate + hit

    def verify_ahead(self, current: Round) -> Round | None:
        """In pipelined mode, start the pass after this one before its token is known."""
        if (
            not self.is_on
            or current.num_drafted
            or not self.sequence.wants_more(besides=1)
        ):
            return None
        self.clock.launch_begins()
        with mx.stream(self.stream):
            token = current.under_way.next_token
            self.target.extend_history(token)
            ahead = self.target.launch(token, NO_DRAFT, self.sequence.num_generated + 1)
        return self.clock.launched(ahead, is_ahead=True)
