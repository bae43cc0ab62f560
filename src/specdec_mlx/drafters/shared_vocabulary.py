"""Two tokenizers: the first difference, each of them in bytes, and the tokens that both have."""

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
    """Raise TokenizerMismatchError, showing the first difference, unless both encode alike.

    Compared are vocabularies, special ids and how samples are encoded; unused ids may differ.
    """
    difference = first_difference(target, draft)
    if difference:
        raise TokenizerMismatchError(
            f"The draft model's tokenizer is not the target's: {difference}. Use a draft model of "
            "the same family, or a drafter that needs no model, such as 'prompt-lookup'."
        )


@PerModel
def first_difference(target: Any, draft: Any) -> str | None:
    """The first difference in words, None if there is none that matters.

    Compared once: it takes a tenth of a second for 50,000 tokens.
    """
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
"""Encoded before a text that is not the beginning of one, for tokenizers that put a space before
what they are given."""

_BYTE = re.compile("<0x([0-9A-F]{2})>")


class Spelling:
    """A tokenizer in bytes.

    spelled: bytes of every token that is text, by id. special: contents of the other tokens, by id.
    prefix: ids that a text begins with. prepends_space: before what is encoded, as sentencepiece
    does.
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
        """Text in the tokenizer's own tokens, at the start of a text or inside.

        Returns ids [n], and where each of them ends among the characters [n], ascending.
        """
        anchor = ANCHOR if self.prepends_space and not at_start else ""
        encoding = self._backend.encode(anchor + text, add_special_tokens=False)
        stops = (max(0, stop - len(anchor)) for _, stop in encoding.offsets)
        ends = list(accumulate(stops, max))
        first = ends.count(0) if anchor else 0
        return encoding.ids[first:], ends[first:]

    def _joined(self, text: str) -> bytes:
        ids = self._backend.encode(text, add_special_tokens=False).ids
        return b"".join(self.spelled.get(index, b"") for index in ids)

    def _check_round_trips(self) -> None:
        """Raise TokenizerMismatchError unless the probes come back, by table and by decoder.

        What a tokenizer does to other scripts costs acceptance where they occur, and no more.
        """
        before = " " if self.prepends_space else ""
        for text in PROBES:
            ids = self._backend.encode(text, add_special_tokens=False).ids
            decoded = self._backend.decode(ids, skip_special_tokens=False)
            joined = self._joined(text)
            if joined != (before + text).encode() or decoded not in (text, " " + text):
                as_bytes = f" and, token by token, {joined!r}"
                raise TokenizerMismatchError(f"{text!r} comes back as {decoded!r}{as_bytes}.")


def _backend_of(tokenizer: Any) -> Any:
    """Hugging Face's own tokenizer in what `mlx_lm.load` gives."""
    backend: Any = getattr(unwrapped(tokenizer), "backend_tokenizer", None)
    if not hasattr(backend, "get_added_tokens_decoder"):
        kind = type(unwrapped(tokenizer)).__name__
        raise TokenizerMismatchError(f"{kind} is no tokenizer of the library `tokenizers`.")
    backend.no_truncation()
    backend.no_padding()
    return backend


def _special_tokens(tokenizer: Any, backend: Any) -> dict[int, str]:
    """Contents of the tokens that are no text, by id; a line break that ends a text is some."""
    added = backend.get_added_tokens_decoder()
    special = {index: token.content for index, token in added.items() if token.special}
    roles = [getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id")]
    ends = added.keys() & (getattr(tokenizer, "eos_token_ids", None) or ())
    for index in {*roles, *ends} - {None}:
        special.setdefault(index, str(backend.id_to_token(index)))
    probes = backend.encode("".join(PROBES), add_special_tokens=False)
    return {index: content for index, content in special.items() if index not in probes.ids}


def _reader(decoder: Any) -> Callable[[str], bytes]:
    """How a token of the vocabulary is read, by what the decoder does."""
    whole = {"type": ""} if decoder is None else json.loads(decoder.__getstate__())
    steps = whole.get("decoders", [whole])
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level
    space = next(filter(None, map(_space_sign, steps)), " ")

    def read(token: str) -> bytes:
        byte = _BYTE.fullmatch(token) if "ByteFallback" in kinds else None
        return bytes.fromhex(byte[1]) if byte else token.replace(space, " ").encode()

    return read


def _space_sign(step: dict[str, Any]) -> str | None:
    """The sign that a step turns into a space."""
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
"""Ordinary text, to see how many tokens two tokenizers make of it."""


@dataclass(eq=False)
class SharedVocabulary:
    """Two tokenizers, and the special tokens that both have, by content or role.

    roles: beginnings and ends of texts, target id -> draft id. difference: the first, in words.
    """

    target: Spelling
    draft: Spelling
    roles: Mapping[int, int]
    difference: str

    @cached_property
    def to_draft(self) -> dict[int, int]:
        """Draft id of each special id of the target that has one; no two have the same."""
        theirs = {content: index for index, content in self.draft.special.items()}
        ours = self.target.special.items()
        mapped = {index: theirs[content] for index, content in ours if content in theirs}
        for index, other in self.roles.items():
            if other not in mapped.values():
                mapped.setdefault(index, other)
        return mapped

    @cached_property
    def to_target(self) -> dict[int, int]:
        """Target id of each draft id that has one."""
        return {theirs: ours for ours, theirs in self.to_draft.items()}

    @cached_property
    def draft_tokens_per_token(self) -> float:
        """Draft tokens for one of the target's in ordinary text."""
        draft, target = (
            sum(len(one.encode(text, at_start=True)[0]) for text in ORDINARY)
            for one in (self.draft, self.target)
        )
        return draft / target


@PerModel
def log_foreign(shared: SharedVocabulary) -> None:
    """Log, once, in one line what becomes of drafts in other tokens."""
    logging.getLogger(__name__).warning(
        "specdec_mlx: the draft model has a tokenizer of its own (%s); what it drafts is carried "
        "over as text.",
        shared.difference,
    )


@PerModel
def shared_between(target: Any, draft: Any) -> SharedVocabulary | None:
    """What two tokenizers share, None where they are the same.

    Raises TokenizerMismatchError where they differ, and one of them cannot be read as bytes.
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
