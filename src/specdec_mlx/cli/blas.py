"""OpenBLAS for MLX on a Linux CPU: found, given its plain names, and preloaded.

The extra `cpu` brings `scipy-openblas32`, whose names begin with `scipy_`; a copy without is
cached.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import mlx.core as mx
import numpy as np

from specdec_mlx.bench.machine import REFERENCE_BLAS, blas_name
from specdec_mlx.folders import cache_root

WHEEL, LIBRARY = "scipy-openblas32", "scipy_openblas32/lib/libscipy_openblas.so"
PRELOADED, THREADS, MOST_THREADS = "SPECDEC_MLX_PRELOADED", "OPENBLAS_NUM_THREADS", 8
DYNAMIC, SYMBOLS, GNU_HASH, HASH_TAG, GNU_HASH_TAG = 6, 11, 0x6FFFFFF6, 4, 0x6FFFFEF5
SECTION = "<u4,<u4,<u8,<u8,<u8,<u8,<u4,<u4,<u8,<u8"  # 1: type, 4: offset, 5: size, 6: link


def start_again_with_openblas(command: str) -> str | None:
    """Replace this process by one with OpenBLAS preloaded; there, the library, elsewhere None."""
    if library := os.environ.pop(PRELOADED, None):  # what this process starts is to inherit nothing
        if others := os.environ.pop("LD_PRELOAD", "").split()[1:]:
            os.environ["LD_PRELOAD"] = " ".join(others)
        return library
    arguments = sys.argv[1:]
    is_command = arguments[:1] == [command] and sys.orig_argv[-len(arguments) :] == arguments
    if is_command and needs_openblas() and (library := find_openblas()):
        print(f"Preloading OpenBLAS in place of MLX's reference BLAS: {library}", file=sys.stderr)
        threads = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // 2))
        preload = " ".join([library, *os.environ.get("LD_PRELOAD", "").split()])
        environment = {THREADS: str(threads), **os.environ, PRELOADED: library}
        environment["LD_PRELOAD"] = preload
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    return None


def needs_openblas() -> bool:
    """True if matrices are multiplied on a Linux CPU with the reference BLAS."""
    is_cpu = sys.platform == "linux" and mx.default_device() == mx.cpu
    return is_cpu and blas_name() == REFERENCE_BLAS


def find_openblas() -> str | None:
    """The wheel's library under its plain names, for `LD_PRELOAD`; None without the wheel."""
    with suppress(PackageNotFoundError, OSError, ValueError, KeyError):
        wheel = distribution(WHEEL)
        copy = cache_root() / "blas" / f"libopenblas-{wheel.version}.so"
        if not copy.exists():
            library = without_prefix(Path(str(wheel.locate_file(LIBRARY))).read_bytes(), b"scipy_")
            copy.parent.mkdir(parents=True, exist_ok=True)
            (part := copy.with_suffix(f".{os.getpid()}")).write_bytes(library)
            part.replace(copy)
        return str(copy)
    return None


def without_prefix(library: bytes, prefix: bytes) -> bytes:
    """A 64-bit ELF library with the prefix taken off its symbols; ValueError, KeyError for others.

    A name is an offset into a table of strings, and skips the prefix; System V's hash table
    replaces GNU's, which wants an order of symbols.
    """
    if not library.startswith(b"\x7fELF\x02\x01"):
        raise ValueError(f"It begins with {library[:6]!r}, expected a 64-bit ELF library.")
    image = bytearray(library)
    start, count = (int.from_bytes(image[i:j], "little") for i, j in ((40, 48), (60, 62)))
    sections = np.frombuffer(image, SECTION, count, start).tolist()
    words = {s[1]: np.frombuffer(image, "<u4", s[5] // 4, s[4]) for s in sections}
    strings = sections[next(s[6] for s in sections if s[1] == SYMBOLS)]
    text = library[strings[4] :]
    names, table = words[SYMBOLS][::6], words[GNU_HASH]  # of the six words of a symbol the first
    names += np.array([len(prefix) * text.startswith(prefix, at) for at in names.tolist()], "<u4")
    num_buckets = len(table) - 2 - len(names)
    if num_buckets < 1:
        raise ValueError(f"The ELF library's hash table has no room for {len(names)} symbols.")
    table[:2], table[2:] = (num_buckets, len(names)), 0
    buckets, following = np.split(table[2:], [num_buckets])
    for i, at in enumerate(names[1:].tolist(), start=1):  # symbol 0 is none, and ends a bucket
        bucket = system_v_hash(text[at : text.index(b"\0", at)]) % num_buckets
        following[i], buckets[bucket] = buckets[bucket], i
    tags = words[DYNAMIC].view("<u8")[::2]
    tags[tags == GNU_HASH_TAG] = HASH_TAG
    return bytes(image)


def system_v_hash(name: bytes) -> int:
    """Hash of a symbol's name in the generic ABI of ELF."""
    value = 0
    for byte in name:
        value = (value << 4) + byte
        value = (value ^ (value & 0xF0000000) >> 24) & 0x0FFFFFFF
    return value
