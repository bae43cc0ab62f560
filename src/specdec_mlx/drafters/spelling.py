"""The bytes of a tokenizer's tokens, and text in its tokens; a token may be half a character."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

from specdec_mlx.drafters.tokenizers import unwrapped
from specdec_mlx.errors import TokenizerMismatchError

PROBES = (
    "The quick brown fox jumps over the lazy dog; the other animals, 23 of them, were sleeping.",
    "def f(x):\n    return {'a': [1, 22, 333], \"b\": x ** 2}  # ok?\n",
    "Two  spaces,\na new line\n\nand UPPER or CamelCase: a <b> & `c` = 3.14159e-10.",
)
"""What every tokenizer must give back as it was. What it does to other scripts costs acceptance
where they occur, and no more."""

ANCHOR = "\n"
"""Encoded before a text that is not the beginning of one, for tokenizers that put a space before
what they are given."""

_BYTE = re.compile("<0x([0-9A-F]{2})>")


class Spelling:
    """A tokenizer in bytes.

    spelled: bytes of every token that is text, by id. ids_of: the id of those bytes, the one that
    the tokenizer writes. special: contents of the other tokens, by id. prefix: ids that a text
    begins with. prepends_space: before what is encoded, as sentencepiece does.
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
        order = {index: (_BYTE.fullmatch(token) is not None, index) for token, index in vocabulary}
        best_last = sorted(self.spelled, key=order.__getitem__, reverse=True)
        self.ids_of = {self.spelled[index]: index for index in best_last}
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
        """Raise TokenizerMismatchError unless the probes come back, by table and by decoder."""
        before = " " if self.prepends_space else ""
        for text in PROBES:
            ids = self._backend.encode(text, add_special_tokens=False).ids
            decoded = self._backend.decode(ids, skip_special_tokens=False)
            if self._joined(text) != (before + text).encode() or decoded not in (text, " " + text):
                raise TokenizerMismatchError(f"{text!r} comes back as {decoded!r}.")


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
    """Contents of the tokens that are no text, by id."""
    added = backend.get_added_tokens_decoder()
    special = {index: token.content for index, token in added.items() if token.special}
    roles = [getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id")]
    ends = getattr(tokenizer, "eos_token_ids", None) or ()
    for index in {*roles, *ends} - {None}:
        special.setdefault(index, str(backend.id_to_token(index)))
    return special


def _reader(decoder: Any) -> Callable[[str], bytes]:
    """How a token of the vocabulary is read, by what the decoder does."""
    steps = list(_steps(json.loads(decoder.__getstate__()))) if decoder is not None else []
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level
    space = next(filter(None, map(_space_sign, steps)), " ")

    def read(token: str) -> bytes:
        byte = _BYTE.fullmatch(token) if "ByteFallback" in kinds else None
        return bytes.fromhex(byte[1]) if byte else token.replace(space, " ").encode()

    return read


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The steps of a decoder, those of sequences one by one."""
    if decoder["type"] != "Sequence":
        yield decoder
        return
    for step in decoder["decoders"]:
        yield from _steps(step)


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


def _alphabet() -> dict[int, int]:
    """Characters of byte-level vocabularies -> bytes (Radford et al. 2019, section 2.2)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + i: byte for i, byte in enumerate(others)}


_ALPHABET = _alphabet()
