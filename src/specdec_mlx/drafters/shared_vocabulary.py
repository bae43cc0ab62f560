"""The tokens that two tokenizers have in common, and what a draft model says about those alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import mlx.core as mx
import numpy as np

from specdec_mlx.drafters.spelling import ORDINARY, Spelling, spelling_of
from specdec_mlx.drafters.tokenizers import first_difference, unwrapped
from specdec_mlx.errors import TokenizerMismatchError

ENOUGH = 0.6
"""Share of common tokens in ordinary text from which a draft drawn from them is better than one
without a distribution. Drawing accepts about 0.67 where the likeliest token, proposed alone, is
accepted at 0.37 (a model and its own 4-bit copy at temperature 1); 0.6 of the one is the other."""


@dataclass(frozen=True, eq=False)
class SharedVocabulary:
    """Two tokenizers, and the tokens with the same bytes in both.

    Of several tokens with the same bytes the one that the tokenizer itself would write counts.
    Special tokens are the same if they have the same content, or else the same role: the ends of
    two texts are one token, whatever they are called.

    roles: beginnings and ends of texts, target id -> draft id. difference: of the tokenizers, the
    first, in words.
    """

    target: Spelling
    draft: Spelling
    roles: Mapping[int, int]
    difference: str

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
        taken = set(mapped.values())
        for index, other in self.roles.items():
            if index not in mapped and other not in taken:
                mapped[index] = other
                taken.add(other)
        return mapped

    @cached_property
    def to_target(self) -> dict[int, int]:
        """Target id of each draft id that has one."""
        return {theirs: ours for ours, theirs in self.to_draft.items()}

    @cached_property
    def coverage(self) -> float:
        """Share of common tokens in ordinary text, as the one with fewer of them writes it."""
        return min(
            _share(self.target, self.to_draft.keys()), _share(self.draft, self.to_target.keys())
        )

    @cached_property
    def draft_tokens_per_token(self) -> float:
        """How many of the draft's tokens one of the target's is worth in ordinary text."""
        return _num_tokens(self.draft) / _num_tokens(self.target)

    def ids(self, vocab_size: int, draft_width: int) -> SharedIds:
        """The same as arrays, for a target and a draft model with logits of these widths."""
        index = np.zeros(vocab_size, np.uint32)
        floor = np.full(vocab_size, -np.inf, np.float32)
        for ours, theirs in self.to_draft.items():
            if ours < vocab_size and theirs < draft_width:
                index[ours], floor[ours] = theirs, 0
        return SharedIds(index, floor)


@dataclass(frozen=True, eq=False)
class SharedIds:
    """The common tokens as arrays over the target's ids, of NumPy or of MLX.

    index: [V] draft id, 0 where there is none. floor: [V] 0 where there is one, else -inf.
    """

    index: Any
    floor: Any

    def on_device(self) -> SharedIds:
        """As MLX arrays."""
        return SharedIds(mx.array(self.index), mx.array(self.floor))

    def logits(self, draft_logits: Any) -> Any:
        """Logits [..., V] over the target's ids, -inf where only the target has the token.

        draft_logits: [..., W] of the draft model. Normalised, with or without temperature and
        filters, they are the draft's distribution given that the token is a common one.
        """
        return draft_logits[..., self.index] + self.floor

    def own(self, tokens: Any) -> Any:
        """The draft model's ids of common tokens [n]."""
        return self.index[tokens]


def say_once(shared: SharedVocabulary) -> None:
    """Log in one line, once for each pair, what becomes of drafts in other tokens."""
    if shared not in _said:
        _said.add(shared)
        logging.getLogger(__name__).warning(
            "specdec_mlx: the draft model has a tokenizer of its own (%s); what it drafts is "
            "carried over as text, or drawn from the %d tokens that both have.",
            shared.difference,
            len(shared.to_draft),
        )


_said: WeakSet[SharedVocabulary] = WeakSet()


def shared_between(target: Any, draft: Any) -> SharedVocabulary | None:
    """What two tokenizers share, None where they are the same; compared once.

    Raises:
        TokenizerMismatchError: they differ, and one of them cannot be read as bytes.
    """
    ours, theirs = unwrapped(target), unwrapped(draft)
    with suppress(TypeError):  # of somebody's class that cannot be kept weakly
        known = _pairs.setdefault(ours, WeakKeyDictionary())
        if theirs not in known:
            known[theirs] = _compared(target, draft)
        return known[theirs]
    return _compared(target, draft)


_pairs: WeakKeyDictionary[Any, WeakKeyDictionary[Any, SharedVocabulary | None]]
_pairs = WeakKeyDictionary()


def _compared(target: Any, draft: Any) -> SharedVocabulary | None:
    difference = first_difference(target, draft)
    if difference is None:
        return None
    try:
        ours, theirs = spelling_of(target), spelling_of(draft)
    except TokenizerMismatchError as error:
        raise TokenizerMismatchError(
            f"The draft model's tokenizer is not the target's: {difference}. Nor can its drafts be "
            f"carried over as text: {error} Use a draft model of the same family, or a drafter "
            "that needs no model, such as 'prompt-lookup'."
        ) from error
    return SharedVocabulary(ours, theirs, _roles(target, draft), difference)


def _roles(target: Any, draft: Any) -> dict[int, int]:
    """The beginnings and the ends of texts, target id -> draft id."""
    pairs = [
        (getattr(target, role, None), getattr(draft, role, None))
        for role in ("eos_token_id", "bos_token_id")
    ]
    return {ours: theirs for ours, theirs in pairs if ours is not None and theirs is not None}


def _share(spelling: Spelling, common: Any) -> float:
    ids = _ordinary(spelling)
    return sum(index in common for index in ids) / len(ids)


def _num_tokens(spelling: Spelling) -> int:
    return len(_ordinary(spelling))


def _ordinary(spelling: Spelling) -> list[int]:
    """Ordinary text in tokens."""
    return [
        index for text in ORDINARY for index in spelling.encode(text.encode(), at_start=True).ids
    ]
