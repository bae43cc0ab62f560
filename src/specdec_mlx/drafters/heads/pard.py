"""PARD: a small model that drafts all tokens in one pass (An et al. 2025, arXiv 2504.18583).

It is trained on mask tokens: a pass over new text and K - 1 masks has the K drafts in its last
rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from specdec_mlx.contracts import DraftContext
from specdec_mlx.drafters.model import ModelDrafter, ModelSession
from specdec_mlx.drafters.writing import WritesAtOnce
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


class PardSession(WritesAtOnce, ModelSession):
    """A generation of the draft model; its caches never hold more than the text."""

    def __init__(self, drafter: PardDrafter, prompt: Sequence[int], context: DraftContext) -> None:
        super().__init__(drafter, prompt, context)
        self.mask_token = drafter.mask_token

    @property
    def forks(self) -> bool:
        """True if its drafts are trees; these take no pass of their own."""
        return self.branches > 1

    def all_logits(self, limit: int) -> mx.array | None:
        """Logits [n, V] of the next n <= limit tokens; None for a limit of 0."""
        if limit == 0:
            return None
        self.catch_up()
        room = self.rollback.widest_pass()
        pending = self.tokens[self.rollback.position :]
        length = limit if room is None else min(limit, 1 + room - len(pending))
        self.rollback.checkpoint()
        masks = [self.mask_token] * (length - 1)
        logits = self.feed(to_ids([*pending, *masks]))[-length:]
        self.rollback.rewind_to(len(self.tokens))
        return logits
