"""PARD: a draft model that was trained to draft in parallel, behind mask tokens.

An et al. 2025, arXiv 2504.18583.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from specdec_mlx.contracts import DraftContext
from specdec_mlx.drafters.model import ModelDrafter, ModelSession
from specdec_mlx.drafters.writing import AtOnceSession
from specdec_mlx.token_ids import to_ids


@dataclass(frozen=True, eq=False)
class PardDrafter(ModelDrafter):
    """Draft with a model trained to draft in parallel; mask_token: `pard_token` in its config."""

    tokenizers: str = "same"
    mask_token: int = 0

    @property
    def key(self) -> str:
        """The model by its content, and how it drafts."""
        return f"PARD {super().key}"

    def describe(self) -> str:
        """Kind and mask token."""
        return f"PARD; mask token {self.mask_token}"

    def session(self, prompt: Sequence[int], context: DraftContext) -> PardSession:
        """The model's side of a generation."""
        return PardSession(self, prompt, context)


class PardSession(AtOnceSession, ModelSession):
    """A generation of the draft model; its caches never hold more than the text."""

    def __init__(self, drafter: PardDrafter, prompt: Sequence[int], context: DraftContext) -> None:
        super().__init__(drafter, prompt, context)
        self.mask_token = drafter.mask_token

    @property
    def forks(self) -> bool:
        """True if its drafts are trees; these take no pass of their own."""
        return self.branches > 1

    def begin_draft(self, limit: int) -> int:
        """Feed the text, and a mask for each token of the draft but the first."""
        if limit == 0:
            return 0
        self.catch_up()
        self.places = [0]
        room = self.rollback.widest_pass()
        pending = self.tokens[self.rollback.position :]
        length = limit if room is None else min(limit, 1 + room - len(pending))
        self.make_guesses(pending, length)
        return length

    def make_guesses(self, pending: Sequence[int], length: int) -> None:
        """Make the logits of a draft; the caches keep the text, and drop the masks."""
        self.rollback.checkpoint()
        self.logits = self.guesses(pending, length - 1)[-length:]
        self.rollback.rewind_to(len(self.tokens))

    def guesses(self, pending: Sequence[int], number: int) -> mx.array:
        """Logits [n + number, V] of the pending tokens, and of masks behind them."""
        return self.feed(to_ids([*pending, *[self.mask_token] * number]))
