"""Compare two tokenizers, read them as bytes, and find the special tokens that both have."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from typing import Any

from specdec_mlx.errors import TokenizerMismatchError
from specdec_mlx.memory.persistent import PROBES, SAMPLES, fingerprint_of
from specdec_mlx.models.loading import PerModel, unwrapped


def check_same_tokenizer(target: Any, draft: Any) -> None:
    """Raise TokenizerMismatchError, with the first difference, unless both tokenizers encode alike.

    Vocabularies, special ids and encodings of samples are compared. Unused ids may differ.
    """
    difference = first_difference(target, draft)
    if difference:
        raise TokenizerMismatchError(
            f"The draft model's tokenizer is not the target's: {difference}. Use a draft model of "
            "the same family, or a drafter that needs no model, such as 'prompt-lookup'."
        )


@PerModel
def first_difference(target: Any, draft: Any) -> str | None:
    """The first difference in words, or None if no difference matters."""
    # Comparing 50,000 tokens takes a tenth of a second, so this function is cached and a
    # fingerprint is tried first.
    if fingerprint_of(target) != fingerprint_of(draft):
        difference = _vocabulary_difference(target.get_vocab(), draft.get_vocab())
        if difference is not None:
            return difference
    for name in ("bos_token_id", "eos_token_id"):
        theirs, ours = getattr(target, name, None), getattr(draft, name, None)
        if None not in (theirs, ours) and theirs != ours:
            return f"{name} is {theirs} there and {ours} here"
    for text in SAMPLES:
        theirs, ours = (list(one.encode(text, add_special_tokens=False)) for one in (target, draft))
        if theirs != ours:
            return f"{text!r} is encoded as {theirs} there and {ours} here"
    return None


def _vocabulary_difference(target: dict[str, int], draft: dict[str, int]) -> str | None:
    owners = {index: token for token, index in draft.items()}
    for token, index in sorted(target.items(), key=itemgetter(1)):
        if (other := draft.get(token, index)) != index:
            return f"token {token!r} has id {index} there and {other} here"
        if (owner := owners.get(index, token)) != token:
            return f"id {index} is {token!r} there and {owner!r} here"
    return None


ANCHOR = "\n"
"""Encoded before a continuation of a text, for tokenizers that put a space before every text."""

_BYTE = re.compile("<0x([0-9A-F]{2})>")


class Spelling:
    """A tokenizer in bytes. Raises TokenizerMismatchError if it does not give back a text.

    Attributes:
        spelled: id of every token that is text, and its bytes.
        special: id of every other token, and its content.
        prefix: ids that a text begins with.
        prepends_space: the tokenizer puts a space before a text, as sentencepiece does.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Read a vocabulary; TokenizerMismatchError if it does not give back a text."""
        self._backend = backend = _backend_of(tokenizer)
        added = backend.get_added_tokens_decoder()
        self.special = _special_tokens(tokenizer, backend)
        read = _reader(backend.decoder)
        vocabulary = backend.get_vocab().items()
        self.spelled = {
            index: added[index].content.encode() if index in added else read(token)
            for token, index in vocabulary
            if index not in self.special
        }
        bos = getattr(tokenizer, "bos_token_id", None)
        begins = backend.encode("", add_special_tokens=True).ids[:1]
        self.prefix = [index for index in begins if index == bos and index in self.special]
        self.prepends_space = self._joined("a") == b" a"
        self._check_round_trips()

    def encode(self, text: str, *, at_start: bool = False) -> tuple[list[int], list[int]]:
        """Encode a text at the start of a text (`at_start`) or inside a text.

        Returns ids [n], and the end of each token among the characters [n], ascending.
        """
        anchor = ANCHOR if self.prepends_space and not at_start else ""
        encoding = self._backend.encode(anchor + text, add_special_tokens=False)
        stops = (max(0, stop - len(anchor)) for _, stop in encoding.offsets)
        ascending = list(accumulate(stops, max))
        first = ascending.count(0) if anchor else 0
        return encoding.ids[first:], ascending[first:]

    def _joined(self, text: str) -> bytes:
        ids = self._backend.encode(text, add_special_tokens=False).ids
        return b"".join(self.spelled.get(index, b"") for index in ids)

    def _check_round_trips(self) -> None:
        """Raise TokenizerMismatchError unless the probes come back, by table and by decoder."""
        before = " " if self.prepends_space else ""
        # A tokenizer may change other scripts. That costs acceptance in such texts, and nothing
        # else.
        for text in PROBES:
            ids = self._backend.encode(text, add_special_tokens=False).ids
            decoded = self._backend.decode(ids, skip_special_tokens=False)
            joined = self._joined(text)
            if joined != (before + text).encode() or decoded not in (text, " " + text):
                as_bytes = f" and, token by token, {joined!r}"
                raise TokenizerMismatchError(f"{text!r} comes back as {decoded!r}{as_bytes}.")


def _backend_of(tokenizer: Any) -> Any:
    """The tokenizer of Hugging Face's library `tokenizers` inside `mlx_lm.load`'s tokenizer."""
    backend: Any = getattr(unwrapped(tokenizer), "backend_tokenizer", None)
    if not hasattr(backend, "get_added_tokens_decoder"):
        kind = type(unwrapped(tokenizer)).__name__
        raise TokenizerMismatchError(f"{kind} is no tokenizer of the library `tokenizers`.")
    # A tokenizer's file may set a maximum length, which would cut the text.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _special_tokens(tokenizer: Any, backend: Any) -> dict[int, str]:
    """Id and content of the tokens that are not text."""
    added = backend.get_added_tokens_decoder()
    special = {index: token.content for index, token in added.items() if token.special}
    roles = [getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id")]
    eos_ids = added.keys() & (getattr(tokenizer, "eos_token_ids", None) or ())
    for index in {*roles, *eos_ids} - {None}:
        special.setdefault(index, str(backend.id_to_token(index)))
    # A line break may end a text in one model and still be ordinary text.
    probes = backend.encode("".join(PROBES), add_special_tokens=False)
    return {index: content for index, content in special.items() if index not in probes.ids}


def _reader(decoder: Any) -> Callable[[str], bytes]:
    """A function that reads a token of the vocabulary as bytes, as the decoder does."""
    state = {"type": ""} if decoder is None else json.loads(decoder.__getstate__())
    steps = state.get("decoders", [state])
    kinds = {step["type"] for step in steps}
    # GPT-2 style: each byte is written as a printable character.
    if "ByteLevel" in kinds:
        return _byte_level
    space = next(filter(None, map(_space_sign, steps)), " ")

    def read(token: str) -> bytes:
        byte = _BYTE.fullmatch(token) if "ByteFallback" in kinds else None
        return bytes.fromhex(byte[1]) if byte else token.replace(space, " ").encode()

    return read


def _space_sign(step: dict[str, Any]) -> str | None:
    if step["type"] == "Metaspace":
        return str(step["replacement"])
    if step["type"] == "Replace" and step["content"] == " ":
        return step["pattern"].get("String")  # type: ignore[no-any-return]
    return None


def _byte_level(token: str) -> bytes:
    try:
        return token.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:  # added by hand, as it is
        return token.encode()


_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_ALPHABET = {byte: byte for byte in _PRINTABLE} | {256 + i: b for i, b in enumerate(_OTHERS)}
"""Characters of byte-level vocabularies -> bytes (Radford et al. 2019, section 2.2)."""


ORDINARY = (
    "The museum opened again in the spring, after a long winter of repairs. Visitors who remember "
    "the old building will find the same wide staircase, but the paintings now hang in brighter "
    "rooms, and a small garden has taken the place of the car park behind the library.\n",
    'def total(prices, discount=0.0):\n    """Return the sum of all prices after the discount.'
    '"""\n    result = 0\n    for price in prices:\n        result += price * (1 - discount)\n'
    "    return round(result, 2)\n",
)
"""Ordinary text, on which the tokens of two tokenizers are counted."""


@dataclass(eq=False)
class SharedVocabulary:
    """Two tokenizers, and the special tokens that both have, by content or by role.

    Attributes:
        target: the target's tokenizer.
        draft: the draft model's tokenizer.
        roles: target id and draft id of the tokens that begin and end a text.
        difference: the first difference in words.
    """

    target: Spelling
    draft: Spelling
    roles: Mapping[int, int]
    difference: str

    @cached_property
    def to_draft(self) -> dict[int, int]:
        """Draft id of each special id of the target. No two have the same draft id."""
        theirs = {content: index for index, content in self.draft.special.items()}
        ours = self.target.special.items()
        # The same content means the same token. Roles such as EOS are matched next.
        mapped = {index: theirs[content] for index, content in ours if content in theirs}
        for index, other in self.roles.items():
            if other not in mapped.values():
                mapped.setdefault(index, other)
        return mapped

    @cached_property
    def to_target(self) -> dict[int, int]:
        return {theirs: ours for ours, theirs in self.to_draft.items()}

    @cached_property
    def draft_tokens_per_token(self) -> float:
        """Draft tokens for each target token in ordinary text."""
        draft, target = (
            sum(len(one.encode(text, at_start=True)[0]) for text in ORDINARY)
            for one in (self.draft, self.target)
        )
        return draft / target


@PerModel
def log_foreign(shared: SharedVocabulary) -> None:
    logging.getLogger(__name__).warning(
        "specdec_mlx: the draft model has a tokenizer of its own (%s); what it drafts is carried "
        "over as text.",
        shared.difference,
    )


@PerModel
def shared_between(target: Any, draft: Any) -> SharedVocabulary | None:
    """The tokens that two tokenizers share, or None if the tokenizers are the same.

    Raises TokenizerMismatchError if they differ and one of them cannot be read as bytes.
    """
    difference = first_difference(target, draft)
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
    roles = ("eos_token_id", "bos_token_id")
    pairs = [(getattr(target, role, None), getattr(draft, role, None)) for role in roles]
    same = {a: b for a, b in pairs if a is not None and b is not None}
    return SharedVocabulary(ours, theirs, same, difference)
