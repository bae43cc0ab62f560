"""PARD: a small model that drafts all tokens in one pass (An et al. 2025, arXiv 2504.18583).

It is an ordinary model with the target's tokenizer, trained to see behind mask tokens: the pass
over what is new in the text and K - 1 masks has the K drafts in its last K rows. It reads nothing
of the target, so that one such model serves a family.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from specdec_mlx.drafters.model import ModelDrafter, ModelSession
from specdec_mlx.drafters.tokenizers import check_same_tokenizer
from specdec_mlx.drafters.writing import WritesAtOnce
from specdec_mlx.token_ids import to_ids
from specdec_mlx.types import DraftContext


@dataclass(frozen=True, eq=False)
class PardDrafter(ModelDrafter):
    """Draft with a model that was trained to draft in parallel; see `ModelDrafter`.

    mask_token: what stands for tokens that are not known yet, `pard_token` in its config.
    """

    mask_token: int = 0

    @property
    def key(self) -> str:
        """The model by its content, and how it drafts."""
        return f"PARD {super().key}"

    def check(self, context: DraftContext) -> None:
        """Raise TokenizerMismatchError for a target with another tokenizer."""
        if self.tokenizer is not None and context.tokenizer is not None:
            check_same_tokenizer(context.tokenizer, self.tokenizer)

    def describe(self) -> str:
        """What was recognised, in a line."""
        return f"PARD; mask token {self.mask_token}"

    def begin(self, prompt: Sequence[int], context: DraftContext) -> PardSession:
        """Start a generation; the model reads the prompt with its first proposal."""
        return PardSession(self, prompt, context)


class PardSession(WritesAtOnce, ModelSession):
    """The draft model's side of one generation; its caches never hold more than the text."""

    def __init__(self, drafter: PardDrafter, prompt: Sequence[int], context: DraftContext) -> None:
        """Start with the prompt as the text."""
        super().__init__(drafter, prompt, context)
        self.mask_token = drafter.mask_token

    @property
    def forks(self) -> bool:
        """True if drafts are to fork; all of one comes from one pass, which is none over a tree."""
        return self.branches > 1

    def all_logits(self, limit: int) -> mx.array | None:
        """Logits [n, V] of the next n <= limit tokens; None for no limit at all."""
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
