"""A drafter that reads the target, made to stand alone: its sessions run the target for themselves.

Parts of the check ask sessions outside of any generation, or in one whose target is looked up in a
table. There nobody shows them the target's states; so each session here has caches of the target,
feeds the text as it is observed, and is shown the states of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.rounds.features import FeatureFeed
from specdec_mlx.target.model_pass import ModelPass
from specdec_mlx.target.rollback import Rollback
from specdec_mlx.token_ids import to_ids
from specdec_mlx.types import (
    Checks,
    Closes,
    Draft,
    DraftContext,
    Drafter,
    ReadsTarget,
    all_drafters,
    key_of,
)


def standing_alone(drafter: Drafter, model: nn.Module) -> Drafter:
    """The drafter, with sessions that read the target by themselves if it reads it."""
    reads = any(isinstance(part, ReadsTarget) for part in all_drafters(drafter))
    return Reading(drafter, model) if reads else drafter


class Reading:
    """A drafter whose sessions run the target."""

    def __init__(self, drafter: Drafter, model: nn.Module) -> None:
        """drafter: reads `model`, or is made of others of which one does."""
        self.drafter = drafter
        self._model = model

    @property
    def key(self) -> str:
        """The drafter's own."""
        return key_of(self.drafter)

    def check(self, context: DraftContext) -> None:
        """Raise what the drafter raises for this target."""
        if isinstance(self.drafter, Checks):
            self.drafter.check(context)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> ReadingSession:
        """Start a generation."""
        return ReadingSession(self.drafter, self._model, prompt, context)


class ReadingSession:
    """A session, and the target's pass over its text.

    Args:
        drafter: whose session it is.
        model: the target.
        prompt: [n] token ids.
        context: the generation's.
    """

    def __init__(
        self, drafter: Drafter, model: nn.Module, prompt: Sequence[int], context: DraftContext
    ) -> None:
        """Nothing was fed yet."""
        self._tokens = list(prompt)
        self._session = drafter.begin(prompt, context)
        target: Any = ModelPass(model, Rollback(make_prompt_cache(model)), probe=False)
        self._target: ModelPass = target
        self._feed = FeatureFeed.between(drafter, self._session, target)

    def propose(self, limit: int) -> Draft:
        """The session's draft, once it was shown all of the text but for its last token."""
        self._read()
        return self._session.propose(limit)

    def observe(self, tokens: Sequence[int]) -> None:
        """Show the states of what was emitted, and tell the session."""
        self._tokens += tokens
        self._read()
        self._session.observe(tokens)

    def close(self, length: int) -> None:
        """Tell the session of the end."""
        if isinstance(self._session, Closes):
            self._session.close(length)

    def _read(self) -> None:
        start = self._target.rollback.position
        unread = self._tokens[start:-1]
        if unread and self._feed is not None:
            self._target.feed(to_ids(unread))
            self._feed.show_fed(start)
