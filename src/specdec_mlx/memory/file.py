"""Files of a header and of arrays.

8 bytes   magic
8 bytes   length of the header, little-endian
header    JSON: kind, id of this saving, size and checksum of the rest, and what the kind adds
zeros     up to a multiple of 64 bytes
rest      int32, little-endian
"""

from __future__ import annotations

import json
import os
import uuid
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from filelock import FileLock
from jaxtyping import Int
from msgspec import Struct

from specdec_mlx.errors import MemoryFileError
from specdec_mlx.files import Count, parse

MAGIC = b"SDMEM\x00\x00\x01"
ALIGNMENT = 64
LONGEST_HEADER = 2**28
UNFINISHED = ".specdec-unfinished"

Integers = Int[np.ndarray, " n"]


class Saving(Struct):
    """The fields that every file has: its kind, and the id of the saving that wrote it."""

    kind: str
    id: str


class FileHeader(Struct, kw_only=True, forbid_unknown_fields=True):
    """Header of a file of one kind. Each kind adds fields.

    `write_file` fills in id, size and crc32.

    Attributes:
        kind: of the file.
        id: of the saving.
        size: bytes after the header.
        crc32: checksum of these bytes.
        tokenizer: fingerprint of the tokenizer, or None.
    """

    kind: str
    id: str = ""
    size: Count = 0
    crc32: Count = 0
    tokenizer: str | None


N_GRAMS = "n-grams"  # kind of a table's file


class TableHeader(FileHeader, kw_only=True):
    """Header of a file of n-grams. The tokens and the count of each n-gram follow, by order.

    Attributes:
        bounds: max_order, min_order, max_entries.
        orders: (order, number of n-grams) each.
    """

    bounds: tuple[int, int, int]
    orders: list[tuple[Count, Count]]


H = TypeVar("H", bound=FileHeader)
S = TypeVar("S", bound=Struct)


def check_folder_of(path: Path) -> None:
    if not path.parent.is_dir():
        raise MemoryFileError(f"There is no folder {path.parent}. Make it, or give another file.")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    check_folder_of(path)
    with FileLock(path.with_name(f"{path.name}.lock")):
        yield


def write_file(path: Path, header: FileHeader, arrays: Sequence[Any]) -> str:
    """Write a header and int32 arrays [n], all or nothing. Returns the id of the saving.

    Call with the lock of the file.
    """
    content = b"".join(np.ascontiguousarray(array, "<i4").tobytes() for array in arrays)
    identity = uuid.uuid4().hex
    sums = {"id": identity, "size": len(content), "crc32": zlib.crc32(content)}
    # `json` and not msgspec, which refuses file names that are not UTF-8
    text = json.dumps(msgspec.to_builtins(header) | sums).encode()
    front = MAGIC + len(text).to_bytes(8, "little") + text
    # One name is enough because the lock allows one writer. Only the owner may read the texts.
    unfinished = path.with_name(f".{path.name}{UNFINISHED}")
    try:
        with open(unfinished, "wb", opener=partial(os.open, mode=0o600)) as file:
            file.write(front + b"\x00" * (-len(front) % ALIGNMENT) + content)
            file.flush()
            # Without it a crash could leave the new name with old or missing content.
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return identity


def read_file(path: Path, kind: str, header_type: type[H]) -> tuple[H, Integers]:
    saving, text, start = read_front(path)
    if saving.kind != kind:
        raise other_kind(path, saving.kind, kind)
    header = _parsed(path, text, header_type)
    size = path.stat().st_size - start
    if size != header.size:
        raise damaged(path, f"{size} bytes after the header, expected {header.size}")
    data: Integers = np.fromfile(path, "<i4", offset=start)
    if zlib.crc32(data.data) != header.crc32:
        raise damaged(path, "its content does not have the checksum of its header")
    return header, data


def other_kind(path: Path, got: str, expected: str) -> MemoryFileError:
    return MemoryFileError(
        f"{path} holds {got!r}, expected {expected!r}. A memory of texts is for SuffixDrafter and "
        "--memory, a table of n-grams for --drafter ngram-table:table=FILE."
    )


def damaged(path: Path, what: str) -> MemoryFileError:
    return MemoryFileError(
        f"{path} is damaged: {what}. Delete it, or move it away, and build or fill a new one."
    )


def read_front(path: Path) -> tuple[Saving, bytes, int]:
    """The saving, the header's text, and the offset of the rest. Raises MemoryFileError."""
    if path.is_dir():
        raise MemoryFileError(f"{path} is a folder, expected the file of a memory.")
    if not path.exists():
        raise FileNotFoundError(f"There is no file {path}. To begin a memory, call save(path).")
    with open(path, "rb") as file:
        magic = file.read(len(MAGIC))
        if magic[:5] != MAGIC[:5]:
            raise MemoryFileError(
                f"{path} is not a memory: it begins with {magic!r}, expected {MAGIC!r}. "
                "Make one: specdec-mlx memory build --tokenizer MODEL FILES."
            )
        if magic != MAGIC:
            raise MemoryFileError(
                f"{path} is a memory of format {magic[5:]!r}, expected {MAGIC[5:]!r}. It was "
                "written by another version of specdec-mlx: use that one, or build it anew."
            )
        length = int.from_bytes(file.read(8), "little")
        if length > LONGEST_HEADER:
            raise damaged(path, f"a header of {length} bytes")
        text = file.read(length)
        start = file.tell() + -file.tell() % ALIGNMENT
    return _parsed(path, text, Saving), text, start


def _parsed(path: Path, text: bytes, kind: type[S]) -> S:
    try:
        return parse(text, kind)
    except ValueError as error:
        raise damaged(path, f"its header cannot be read ({error})") from error
