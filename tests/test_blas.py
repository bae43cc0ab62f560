"""OpenBLAS for MLX on Linux: the library's names, the copy, and the second start."""

from __future__ import annotations

import ctypes
import struct
import sys
from importlib.metadata import PackageNotFoundError
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from selection import in_one_test
from specdec_mlx.cli import blas
from specdec_mlx.cli.blas import system_v_hash, without_prefix

SYMBOLS = ["", "scipy_cblas_sgemm", "scipy_dgemm_", "other", "scipy_", "xscipy_a"]
RENAMED = ["", "cblas_sgemm", "dgemm_", "other", "", "xscipy_a"]
HASH_TAG, GNU_HASH_TAG, END_TAG = 4, 0x6FFFFEF5, 0
NUM_HASH_WORDS = 2 + len(SYMBOLS) + 3  # what the old table leaves room for: 3 buckets
SECTION = "<IIQQQQIIQQ"


def make_library(num_hash_words: int = NUM_HASH_WORDS, hash_type: int = 0x6FFFFFF6) -> bytes:
    """A 64-bit ELF library of nothing but names: what `without_prefix` reads, and in its places."""
    names = [name.encode() + b"\0" for name in SYMBOLS]
    starts = accumulate(map(len, names[:-1]), initial=0)
    symbols = b"".join(
        struct.pack("<IBBHQQ", start, 0x12, 0, 1, 0x1000 + i, 8) for i, start in enumerate(starts)
    )
    dynamic = struct.pack("<4Q", GNU_HASH_TAG, 0x99, END_TAG, 0)
    offset, image, headers = 64, b"", b""
    for kind, part in (
        *((3, b"".join(names)), (11, symbols)),  # 3: a table of strings
        *((hash_type, bytes(4 * num_hash_words)), (6, dynamic)),
    ):
        headers += struct.pack(SECTION, 0, kind, 0, offset, offset, len(part), 0, 0, 8, 0)
        image, offset = image + part, offset + len(part)
    head = bytearray(b"\x7fELF\x02\x01" + bytes(58))
    struct.pack_into("<Q", head, 0x28, offset)
    struct.pack_into("<H", head, 0x3C, 4)
    return bytes(head) + image + headers


def look_up(library: bytes, name: str) -> int | None:
    """Number of the symbol of a name, found as a loader finds it; None if there is none."""
    (start,) = struct.unpack_from("<Q", library, 0x28)
    sections = [struct.unpack_from(SECTION, library, start + 64 * i) for i in range(3)]
    text, symbols, table = (section[4] for section in sections)
    (num_buckets,) = struct.unpack_from("<I", library, table)
    buckets = struct.unpack_from(f"<{num_buckets}I", library, table + 8)
    following = struct.unpack_from(f"<{len(SYMBOLS)}I", library, table + 8 + 4 * num_buckets)
    i = buckets[system_v_hash(name.encode()) % num_buckets]
    while i:
        at = text + struct.unpack_from("<I", library, symbols + 24 * i)[0]
        if library[at : library.index(b"\0", at)] == name.encode():
            return i
        i = following[i]
    return None


def test_symbols_are_found_without_the_prefix() -> None:
    """All of them, in a table that the loader is told is System V's, where GNU's lay."""
    before, after = make_library(), without_prefix(make_library(), b"scipy_")
    assert [look_up(after, name) for name in RENAMED if name] == [1, 2, 3, 5]
    assert look_up(after, "scipy_cblas_sgemm") is None
    at = before.index(struct.pack("<QQ", GNU_HASH_TAG, 0x99))
    assert struct.unpack_from("<2Q", after, at) == (HASH_TAG, 0x99)
    assert len(after) == len(before)


@in_one_test(
    ("library", "reason"),
    [
        (b"\xcf\xfa\xed\xfe" + bytes(100), "expected a 64-bit ELF library"),
        (b"\x7fELF\x01\x01" + bytes(100), "expected a 64-bit ELF library"),
        (make_library(hash_type=9), str(0x6FFFFFF6)),
        (make_library(num_hash_words=len(SYMBOLS)), "no room for 6 symbols"),
    ],
)
def test_other_libraries_are_refused(library: bytes, reason: str) -> None:
    """A Mac's, a 32-bit one, one without the table, and one whose table is too small."""
    with pytest.raises((ValueError, KeyError), match=reason):
        without_prefix(library, b"scipy_")


@pytest.mark.skipif(sys.platform != "linux", reason="an ELF library is loaded")
def test_a_real_library_loads_and_runs_under_its_plain_names(tmp_path: Path) -> None:
    """NumPy's own OpenBLAS, whose names have the same prefix."""
    folder = Path(np.__file__).parent.parent / "numpy.libs"
    (source,) = folder.glob("libscipy_openblas64_*.so")
    copy = tmp_path / "plain.so"
    copy.write_bytes(without_prefix(source.read_bytes(), b"scipy_"))
    library = ctypes.CDLL(str(copy))
    assert library.openblas_get_num_threads64_() >= 1
    assert not hasattr(library, "scipy_openblas_get_num_threads64_")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The library of a wheel that is installed, with an empty cache."""
    wheel = SimpleNamespace(version="1.2", locate_file=lambda path: tmp_path / path)
    library = tmp_path / blas.LIBRARY
    library.parent.mkdir(parents=True)
    library.write_bytes(make_library())
    monkeypatch.setattr(blas, "distribution", lambda name: wheel)
    monkeypatch.setenv("SPECDEC_MLX_CACHE", str(tmp_path / "cache"))
    return library


def test_the_wheels_library_is_copied_with_plain_names_once(library: Path, tmp_path: Path) -> None:
    """The copy alone lies in the cache, by the wheel's version; the wheel stays as it is."""
    copy = Path(str(blas.find_openblas()))
    assert copy == tmp_path / "cache" / "blas" / "libopenblas-1.2.so"
    assert copy.read_bytes() == without_prefix(make_library(), b"scipy_")
    assert library.read_bytes() == make_library()
    library.unlink()
    assert blas.find_openblas() == str(copy)
    assert list(copy.parent.iterdir()) == [copy]


def test_without_the_wheel_nothing_is_preloaded(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that is wrong with the wheel is an error: the command works without."""

    def no_distribution(name: str) -> Any:
        raise PackageNotFoundError(name)

    (tmp_path / "cache").write_text("a file where the folder should be")
    assert blas.find_openblas() is None
    (tmp_path / "cache").unlink()
    library.write_bytes(b"MZ")
    assert blas.find_openblas() is None
    library.unlink()
    assert blas.find_openblas() is None
    monkeypatch.setattr(blas, "distribution", no_distribution)
    assert blas.find_openblas() is None


class Started(BaseException):
    """`os.execve` does not return."""


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str], dict]]:
    """A `specdec-mlx demo --seconds 9` that wants OpenBLAS, and what it is replaced by."""
    seen: list[tuple[str, list[str], dict]] = []

    def execve(*call: Any) -> None:
        seen.append(call)
        raise Started

    monkeypatch.setattr(blas.os, "environ", {"LD_PRELOAD": "libtrace.so", "PATH": "/bin"})
    monkeypatch.setattr(blas.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(blas.os, "execve", execve)
    monkeypatch.setattr(sys, "argv", ["/venv/bin/specdec-mlx", "demo", "--seconds", "9"])
    monkeypatch.setattr(sys, "executable", "/venv/bin/python")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "dev", *sys.argv])
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(blas.mx, "default_device", lambda: blas.mx.cpu)
    monkeypatch.setattr(blas, "blas_name", lambda: blas.REFERENCE_BLAS)
    monkeypatch.setattr(blas, "find_openblas", lambda: "/cache/libopenblas.so")
    return seen


def test_the_command_starts_again_with_the_library_preloaded(
    starts: list, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same Python, once; its children inherit nothing, and the user's threads stay."""
    with pytest.raises(Started):
        blas.start_again_with_openblas("demo")
    ((program, arguments, environment),) = starts
    assert program == "/venv/bin/python"
    expected = ["-X", "dev", "/venv/bin/specdec-mlx", "demo", "--seconds", "9"]
    assert arguments == ["/venv/bin/python", *expected]
    environment.pop("PYTEST_CURRENT_TEST", None)
    assert environment == {
        "LD_PRELOAD": "/cache/libopenblas.so libtrace.so",
        "OPENBLAS_NUM_THREADS": "4",
        "PATH": "/bin",
        blas.PRELOADED: "/cache/libopenblas.so",
    }
    assert capsys.readouterr().err.startswith("Preloading OpenBLAS")
    for before, preload in (({"LD_PRELOAD": "libtrace.so"}, " libtrace.so"), ({}, "")):
        own = {blas.PRELOADED: "/cache/a.so", "LD_PRELOAD": f"/cache/a.so{preload}"}
        monkeypatch.setattr(blas.os, "environ", own)
        assert blas.start_again_with_openblas("demo") == "/cache/a.so"
        assert blas.os.environ == before
    monkeypatch.setattr(blas.os, "environ", {blas.THREADS: "3"})
    with pytest.raises(Started):
        blas.start_again_with_openblas("demo")
    assert starts[1][2][blas.THREADS] == "3"


@in_one_test(
    ("module", "name", "value"),
    [
        (sys, "platform", "darwin"),
        (blas.mx, "default_device", lambda: blas.mx.gpu),
        (blas, "blas_name", lambda: "OpenBLAS"),
        (blas, "blas_name", lambda: "MKL"),
        (blas, "find_openblas", lambda: None),
        (sys, "argv", ["/bin/pytest", "tests"]),
        (sys, "orig_argv", ["python", "/bin/pytest", "tests"]),
    ],
)
def test_nothing_starts_again_where_that_gains_nothing(
    module: Any, name: str, value: Any, starts: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And never in a process that is not the command itself."""
    with monkeypatch.context() as patch:
        patch.setattr(module, name, value)
        assert blas.start_again_with_openblas("demo") is None
    assert starts == []
