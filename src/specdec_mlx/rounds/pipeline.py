"""Pipelined mode: what keeps the loop as fast as plain decoding where nothing is drafted.

With nothing worth drafting the loop runs like mlx-lm's own: the next pass is launched on a token
that the host has not seen yet, so that the device never waits for Python. Who wants the algorithm
alone may skip this file: without it the text is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from specdec_mlx.rounds.clock import Round, RoundClock
from specdec_mlx.rounds.sequence import SequenceState
from specdec_mlx.types import NO_DRAFT, Target

HIT_RATE_DECAY = 0.8
"""Decay of the moving average of "this round had a draft"."""

LOW_HIT_RATE = 0.05
"""Share of rounds with a draft below which pipelined mode pays."""


@dataclass
class Pipeline:
    """Whether the next pass may start before this one's token is known.

    A pass that was launched ahead leaves no room for a draft before its token, which costs the
    first token of the next draft; waiting costs the overlap. So: pipelined while there is no draft,
    and little chance of one after the next token.

    is_on: the mode. draft_hit_rate: share of the rounds lately that had a draft.
    """

    target: Target
    sequence: SequenceState
    clock: RoundClock
    stream: Any
    is_on: bool = True
    draft_hit_rate: float = 1.0

    def choose(self, found: bool, has_cheap_drafter: bool) -> None:
        """Choose the mode of the next round.

        Args:
            found: whether there is a draft for it.
            has_cheap_drafter: whether looking for one is free.
        """
        self.draft_hit_rate = HIT_RATE_DECAY * self.draft_hit_rate + (1 - HIT_RATE_DECAY) * found
        may_wait = self.draft_hit_rate >= LOW_HIT_RATE and has_cheap_drafter
        self.is_on = not found and not may_wait

    def verify_ahead(self, current: Round) -> Round | None:
        """In pipelined mode, start the pass after this one before its token is known."""
        if not self.is_on or len(current.draft) or not self.sequence.wants_more(besides=1):
            return None
        self.clock.launch_begins()
        with mx.stream(self.stream):
            token = current.under_way.next_token
            self.target.extend_history(token)
            ahead = self.target.launch(token, NO_DRAFT, self.sequence.num_generated + 1)
        return self.clock.launched(ahead, is_ahead=True)
