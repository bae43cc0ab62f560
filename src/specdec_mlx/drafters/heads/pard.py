"""PARD: a draft model that was trained to draft in parallel, behind mask tokens.

An et al. 2025, arXiv 2504.18583.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec_mlx.contracts import DraftContext
from specdec_mlx.drafters.model import ModelDrafter, ModelReader
from specdec_mlx.token_ids import to_ids


@dataclass(frozen=True, eq=False)
class PardDrafter(ModelDrafter):
    """Draft with a model that was trained to draft in parallel.

    Attributes:
        mask_token: `pard_token` in the model's config.
    """

    tokenizers: str = "same"
    mask_token: int = 0

    @property
    def key(self) -> str:
        return f"PARD {super().key}"

    def describe(self) -> str:
        return f"PARD; mask token {self.mask_token}"

    def source(self, prompt: Sequence[int], context: DraftContext) -> PardSource:
        return PardSource(self, prompt, context)


class PardSource(ModelReader):
    """Feeds a mask for each token of a draft except the first."""

    at_once = True
    drafter: PardDrafter

    def begin_draft(self, limit: int) -> int:
        if limit == 0:
            return 0
        self.catch_up()
        pending, length = self.in_one_pass(limit)
        self.rollback.checkpoint()
        # The row of the last token of the text predicts the first drafted token, and each mask
        # predicts one more.
        masks = [self.drafter.mask_token] * (length - 1)
        self.logits, self.places = self.feed(to_ids([*pending, *masks]))[-length:], [0]
        # The masks are dropped, so that the caches hold the text only.
        self.rollback.rewind_to(len(self.tokens))
        return length
