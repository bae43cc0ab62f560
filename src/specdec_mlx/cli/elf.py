"""Symbols of a shared library under shorter names: an ELF file edited in place, no compiler.

A library that was built with a prefix on all its names (`scipy_cblas_sgemm`) cannot stand in for
another one that callers know without (`cblas_sgemm`). A name is an offset into a table of strings,
so that taking a prefix off is to point behind it. What is left is the table by which the loader
finds a name: the common kind, GNU's, wants the symbols in an order of its own; the older kind that
every loader still reads wants none, and fits into the same place.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

HEADER = b"\x7fELF\x02\x01"  # 64 bits, little end first: Linux on x86-64 and on aarch64
DYNAMIC_SECTION, SYMBOL_SECTION, GNU_HASH_SECTION = 6, 11, 0x6FFFFFF6
HASH_TAG, GNU_HASH_TAG = 4, 0x6FFFFEF5
SYMBOL_SIZE, DYNAMIC_ENTRY_SIZE, SECTION_HEADER_SIZE = 24, 16, 64


class _Section(NamedTuple):
    """A section header. link: number of the section that belongs to it."""

    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


def without_prefix(library: bytes, prefix: str) -> bytes:
    """The library with `prefix` taken off all dynamic symbols that begin with it.

    Raises ValueError for what is no 64-bit ELF library with a GNU hash table.
    """
    if not library.startswith(HEADER):
        raise ValueError(f"It begins with {library[:6]!r}, expected a 64-bit ELF library.")
    image = bytearray(library)
    sections = _sections(image)
    by_type = {section.type: section for section in sections}
    missing = {DYNAMIC_SECTION, SYMBOL_SECTION, GNU_HASH_SECTION} - by_type.keys()
    if missing:
        raise ValueError(f"The ELF library has no section of type {sorted(missing)}.")
    symbols, table = by_type[SYMBOL_SECTION], by_type[GNU_HASH_SECTION]
    names = _rename(image, symbols, sections[symbols.link], prefix.encode())
    _write_hash_table(image, table, names)
    _retag(image, by_type[DYNAMIC_SECTION])
    return bytes(image)


def _sections(image: bytearray) -> list[_Section]:
    (start,) = struct.unpack_from("<Q", image, 0x28)
    (count,) = struct.unpack_from("<H", image, 0x3C)
    return [
        _Section(*struct.unpack_from("<IIQQQQIIQQ", image, start + SECTION_HEADER_SIZE * i))
        for i in range(count)
    ]


def _rename(image: bytearray, symbols: _Section, strings: _Section, prefix: bytes) -> list[bytes]:
    """Point the names that begin with the prefix behind it; all names, in the symbols' order."""
    text = bytes(image[strings.offset : strings.offset + strings.size])
    names = []
    for at in range(symbols.offset, symbols.offset + symbols.size, SYMBOL_SIZE):
        (name,) = struct.unpack_from("<I", image, at)
        if text.startswith(prefix, name):
            name += len(prefix)
            struct.pack_into("<I", image, at, name)
        names.append(text[name : text.index(b"\0", name)])
    return names


def _write_hash_table(image: bytearray, table: _Section, names: list[bytes]) -> None:
    """System V's table: [number of buckets, of symbols, buckets, next symbol of the bucket]."""
    num_buckets = table.size // 4 - 2 - len(names)
    if num_buckets < 1:
        raise ValueError(f"The ELF library's hash table has no room for {len(names)} symbols.")
    buckets, following = [0] * num_buckets, [0] * len(names)
    for i, name in enumerate(names[1:], start=1):  # symbol 0 is none, and ends a bucket
        bucket = system_v_hash(name) % num_buckets
        following[i], buckets[bucket] = buckets[bucket], i
    words = [num_buckets, len(names), *buckets, *following]
    struct.pack_into(f"<{len(words)}I", image, table.offset, *words)


def system_v_hash(name: bytes) -> int:
    """Hash of a symbol's name in the generic ABI of ELF."""
    value = 0
    for byte in name:
        value = (value << 4) + byte
        top = value & 0xF0000000
        value = (value ^ top >> 24) & ~top
    return value


def _retag(image: bytearray, dynamic: _Section) -> None:
    """Say that the table is of the older kind; it lies where the other one lay."""
    for at in range(dynamic.offset, dynamic.offset + dynamic.size, DYNAMIC_ENTRY_SIZE):
        if struct.unpack_from("<Q", image, at) == (GNU_HASH_TAG,):
            struct.pack_into("<Q", image, at, HASH_TAG)
