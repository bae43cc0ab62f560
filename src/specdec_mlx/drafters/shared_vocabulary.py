"""The tokens that two tokenizers have in common."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from specdec_mlx.drafters.spelling import Spelling
from specdec_mlx.drafters.tokenizers import PerPair, difference_between
from specdec_mlx.errors import TokenizerMismatchError

ORDINARY = (
    "The museum opened again in the spring, after a long winter of repairs. Visitors who remember "
    "the old building will find the same wide staircase, but the paintings now hang in brighter "
    "rooms, and a small garden has taken the place of the car park behind the library.\n",
    'def total(prices, discount=0.0):\n    """Return the sum of all prices after the discount.'
    '"""\n    result = 0\n    for price in prices:\n        result += price * (1 - discount)\n'
    "    return round(result, 2)\n",
)
"""Ordinary text, to see what share of its tokens two vocabularies have in common."""

ENOUGH = 0.6
"""Share of common tokens in ordinary text from which a draft drawn from them is better than one
without a distribution. Drawing accepts about 0.67 where the likeliest token, proposed alone, is
accepted at 0.37 (a model and its own 4-bit copy at temperature 1); 0.6 of the one is the other."""


@dataclass(eq=False)
class SharedVocabulary:
    """Two tokenizers, and the tokens with the same bytes in both; special ones by content or role.

    roles: beginnings and ends of texts, target id -> draft id. difference: the first, in words.
    """

    target: Spelling
    draft: Spelling
    roles: Mapping[int, int]
    difference: str
    is_logged: bool = False

    @cached_property
    def to_draft(self) -> dict[int, int]:
        """Draft id of each target id that has one; no two have the same."""
        theirs = self.draft.ids_of
        mapped = {
            index: theirs[word] for word, index in self.target.ids_of.items() if word in theirs
        }
        contents = {content: index for index, content in self.draft.special.items()}
        for index, content in self.target.special.items():
            if content in contents:
                mapped[index] = contents[content]
        for index, other in self.roles.items():
            if index not in mapped and other not in mapped.values():
                mapped[index] = other
        return mapped

    @cached_property
    def to_target(self) -> dict[int, int]:
        """Target id of each draft id that has one."""
        return {theirs: ours for ours, theirs in self.to_draft.items()}

    @cached_property
    def coverage(self) -> float:
        """Share of common tokens in ordinary text, of the tokenizer that has fewer of them."""
        return min(_share(self.target, self.to_draft), _share(self.draft, self.to_target))

    @cached_property
    def draft_tokens_per_token(self) -> float:
        """Draft tokens for one of the target's in ordinary text."""
        return len(_ordinary(self.draft)) / len(_ordinary(self.target))

    def ids(self, vocab_size: int, draft_width: int) -> tuple[mx.array, mx.array]:
        """The common tokens as arrays, for models with logits of these widths.

        [V] the draft id of each target id, or 0; and [V] 0 for these, -inf elsewhere. `logits[...,
        ids] + floor`, normalised, is the draft's distribution given that the token is a common one.
        """
        index = np.zeros(vocab_size, np.uint32)
        floor = np.full(vocab_size, -np.inf, np.float32)
        for ours, theirs in self.to_draft.items():
            if ours < vocab_size and theirs < draft_width:
                index[ours], floor[ours] = theirs, 0
        return mx.array(index), mx.array(floor)

    def log_once(self) -> None:
        """Log in one line what becomes of drafts in other tokens."""
        if not self.is_logged:
            self.is_logged = True
            logging.getLogger(__name__).warning(
                "specdec_mlx: the draft model has a tokenizer of its own (%s); what it drafts is "
                "carried over as text, or drawn from the %d tokens that both have.",
                self.difference,
                len(self.to_draft),
            )


def _compared(target: Any, draft: Any) -> SharedVocabulary | None:
    difference = difference_between(target, draft)
    if difference is None:
        return None
    try:
        ours, theirs = Spelling(target), Spelling(draft)
    except TokenizerMismatchError as error:
        raise TokenizerMismatchError(
            f"The draft model's tokenizer is not the target's: {difference}. Nor can its drafts be "
            f"carried over as text: {error} Use a draft model of the same family, or a drafter "
            "that needs no model, such as 'prompt-lookup'."
        ) from error
    roles = [
        (getattr(target, role, None), getattr(draft, role, None))
        for role in ("eos_token_id", "bos_token_id")
    ]
    same = {a: b for a, b in roles if a is not None and b is not None}
    return SharedVocabulary(ours, theirs, same, difference)


shared_between = PerPair(_compared)
"""What two tokenizers share, None where they are the same; TokenizerMismatchError where they
differ, and one of them cannot be read as bytes."""


def _share(spelling: Spelling, common: Container[int]) -> float:
    ids = _ordinary(spelling)
    return sum(index in common for index in ids) / len(ids)


def _ordinary(spelling: Spelling) -> list[int]:
    return [index for text in ORDINARY for index in spelling.encode(text, at_start=True)[0]]
