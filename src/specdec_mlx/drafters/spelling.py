"""What a tokenizer's tokens spell, in bytes, and bytes in its tokens.

Two models with different tokenizers have one thing in common: the text, as bytes. A character may
be cut in half by a token, so that bytes and not characters are what tokens add up to.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from specdec_mlx.drafters.tokenizers import unwrapped
from specdec_mlx.errors import TokenizerMismatchError

PROBES = (
    "The quick brown fox jumps over the lazy dog; the other animals, 23 of them, were sleeping.",
    "def f(x):\n    return {'a': [1, 22, 333], \"b\": x ** 2}  # ok?\n",
    "Two  spaces,\na new line\n\nand UPPER or CamelCase: a <b> & `c` = 3.14159e-10.",
)
"""What every tokenizer must give back as it was. What a tokenizer does to other scripts, or to
characters that it does not have, costs acceptance where they occur, and no more."""

ORDINARY = (
    "The museum opened again in the spring, after a long winter of repairs. Visitors who remember "
    "the old building will find the same wide staircase, but the paintings now hang in brighter "
    "rooms, and a small garden has taken the place of the car park behind the library.\n",
    'def total(prices, discount=0.0):\n    """Return the sum of all prices after the discount.'
    '"""\n    result = 0\n    for price in prices:\n        result += price * (1 - discount)\n'
    "    return round(result, 2)\n",
)
"""What many texts are like, to see what share of their tokens two vocabularies have in common."""

ANCHOR = "\n"
"""Written before a text that is not the beginning of one, for tokenizers that put a space before
what they are given."""

FIRST_CONTINUATION, LAST_CONTINUATION = 0x80, 0xBF
"""The bytes of a UTF-8 character behind its first."""


class Encoded(NamedTuple):
    """Bytes in tokens: ids [n], and where each of them ends among the bytes [n], ascending."""

    ids: list[int]
    ends: list[int]


class Spelling:
    """A tokenizer in bytes.

    spelled: bytes of every token that is text, by id. special: contents of those that are not, by
    id: the special tokens, and those that begin or end a text. prefix: ids that a text begins with.
    prepends_space: whether a space is put before what is encoded, as sentencepiece does.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Read the vocabulary of a tokenizer as `mlx_lm.load` gives it; 0.1 s for 50,000 tokens.

        Raises TokenizerMismatchError for a tokenizer that cannot be read, or that does not give
        back what it encodes.
        """
        self._backend = _backend_of(tokenizer)
        self.special = _special_tokens(tokenizer, self._backend)
        pieces = _pieces(self._backend, self.special)
        self.spelled = {index: piece.spelled for index, piece in pieces.items()}
        by_rank = sorted(pieces.items(), key=lambda item: (item[1].is_byte, item[0]), reverse=True)
        self.ids_of = {piece.spelled: index for index, piece in by_rank}
        self.prefix = _prefix(tokenizer, self._backend, self.special)
        self.prepends_space = self._joined(self._encode("a")) == b" a"
        self._check_round_trips()

    def encode(self, data: bytes, *, at_start: bool = False) -> Encoded:
        """Bytes in tokens, as the tokenizer itself would have them.

        Parts that are no UTF-8, such as the half of a character at the end, are written in tokens
        of one byte where there are such, and are left out otherwise.

        Args:
            data: text.
            at_start: whether it is the beginning of a text, for tokenizers that mark it.
        """
        ids: list[int] = []
        ends: list[int] = []
        for start, part in _readable(data):
            text = part.decode(errors="ignore")
            if text:
                encoded = self._encode_text(text, len(part), at_start and start == 0)
                ids += encoded.ids
                ends += [start + end for end in encoded.ends]
                continue
            for place, byte in enumerate(part, start + 1):
                if (index := self.ids_of.get(bytes([byte]))) is not None:
                    ids.append(index)
                    ends.append(place)
        return Encoded(ids, ends)

    def may_go_on(self, token: int) -> bool:
        """True if a longer token begins with this one, so that more text could replace it."""
        word = self.spelled[token]
        after = bisect_right(self._words, word)
        return after < len(self._words) and self._words[after].startswith(word)

    @cached_property
    def _words(self) -> list[bytes]:
        """What all tokens spell, in order."""
        return sorted(self.ids_of)

    def _encode_text(self, text: str, size: int, at_start: bool) -> Encoded:
        """Characters in tokens, without the space or the anchor in front of them.

        Where a tokenizer changes the text, it says which of its characters a token stands for.
        """
        if self.prepends_space and not at_start:
            ids = self._encode(ANCHOR + text)
            ends = self._ends(ids, size, 1 + len(ANCHOR))
            if ends is not None and 0 in ends:
                first = len(ends) - ends[::-1].index(0)
                return Encoded(ids[first:], ends[first:])
        encoding = self._backend.encode(text, add_special_tokens=False)
        ids = encoding.ids
        ends = self._ends(ids, size, int(self.prepends_space))
        if ends is None:
            stops = (len(text[:stop].encode()) for _, stop in encoding.offsets)
            ends = list(accumulate(stops, max))
        return Encoded(ids, ends)

    def _ends(self, ids: list[int], size: int, extra: int) -> list[int] | None:
        """Where tokens end, counted from `extra` bytes behind the first; None unless at `size`."""
        ends, end = [], -extra
        for index in ids:
            end += len(self.spelled.get(index, b""))
            ends.append(end)
        return ends if end == size else None

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def _joined(self, ids: list[int]) -> bytes:
        return b"".join(self.spelled.get(index, b"") for index in ids)

    def _check_round_trips(self) -> None:
        """Raise TokenizerMismatchError unless the probes come back, by table and by decoder."""
        before = " " if self.prepends_space else ""
        for text in PROBES:
            ids = self._encode(text)
            decoded = self._backend.decode(ids, skip_special_tokens=False)
            if self._joined(ids) != (before + text).encode() or decoded not in (text, " " + text):
                raise TokenizerMismatchError(f"{text!r} comes back as {decoded!r}.")


def spelling_of(tokenizer: Any) -> Spelling:
    """The tokenizer in bytes, read once; raises TokenizerMismatchError, see `Spelling`."""
    inner = unwrapped(tokenizer)
    with suppress(TypeError):  # of somebody's class that cannot be kept weakly
        if inner not in _spellings:
            _spellings[inner] = Spelling(tokenizer)
        return _spellings[inner]
    return Spelling(tokenizer)


_spellings: WeakKeyDictionary[Any, Spelling] = WeakKeyDictionary()


def is_continuation(byte: int) -> bool:
    """True if a byte stands inside a UTF-8 character."""
    return FIRST_CONTINUATION <= byte <= LAST_CONTINUATION


def whole_characters(data: bytes) -> bytes:
    """The bytes without the beginning of a character at their end."""
    for start in range(len(data) - 1, max(-1, len(data) - 4), -1):
        if not is_continuation(data[start]):
            try:
                data[start:].decode()
            except UnicodeDecodeError:
                return data[:start]
            break
    return data


def _readable(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The bytes in parts that are text, or that are no UTF-8 at all; each with its place."""
    start = 0
    while start < len(data):
        try:
            data[start:].decode()
        except UnicodeDecodeError as error:
            if error.start:
                yield start, data[start : start + error.start]
            yield start + error.start, data[start + error.start : start + error.end]
            start += error.end
        else:
            yield start, data[start:]
            return


class _Piece(NamedTuple):
    """A token of text. is_byte: whether it stands for a byte that no other token has."""

    spelled: bytes
    is_byte: bool = False


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


def _pieces(backend: Any, special: dict[int, str]) -> dict[int, _Piece]:
    """The tokens that are text, by id."""
    added = backend.get_added_tokens_decoder()
    spell = _speller(backend.decoder)
    return {
        index: _Piece(added[index].content.encode()) if index in added else spell(token)
        for token, index in backend.get_vocab().items()
        if index not in special
    }


def _speller(decoder: Any) -> Callable[[str], _Piece]:
    """How a token of the vocabulary is read, by what the decoder does."""
    steps = list(_steps(json.loads(decoder.__getstate__()))) if decoder is not None else []
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level
    has_bytes = "ByteFallback" in kinds
    space = next(filter(None, map(_space_sign, steps)), " ")

    def spell(token: str) -> _Piece:
        if has_bytes and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return _Piece(bytes.fromhex(token[3:5]), is_byte=True)
        return _Piece(token.replace(space, " ").encode())

    return spell


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a decoder is made of."""
    if decoder["type"] != "Sequence":
        yield decoder
        return
    for step in decoder["decoders"]:
        yield from _steps(step)


def _space_sign(step: dict[str, Any]) -> str | None:
    """What a step turns into a space."""
    if step["type"] == "Metaspace":
        return str(step["replacement"])
    if step["type"] == "Replace" and step["content"] == " ":
        return step["pattern"].get("String")  # type: ignore[no-any-return]
    return None


def _byte_level(token: str) -> _Piece:
    """A token written in the alphabet of byte-level vocabularies."""
    try:
        return _Piece(token.translate(_ALPHABET).encode("latin-1"))
    except UnicodeEncodeError:  # added by hand, as it is
        return _Piece(token.encode())


def _alphabet() -> dict[int, int]:
    """Characters of byte-level vocabularies -> bytes (Radford et al. 2019, section 2.2).

    Printable bytes stand for themselves, the others are counted on from 256.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + i: byte for i, byte in enumerate(others)}


_ALPHABET = _alphabet()


def _prefix(tokenizer: Any, backend: Any, special: dict[int, str]) -> list[int]:
    """What the tokenizer puts before a text by itself, such as BOS."""
    bos = getattr(tokenizer, "bos_token_id", None)
    ids = backend.encode("", add_special_tokens=True).ids[:1]
    return [index for index in ids if index == bos and index in special]
