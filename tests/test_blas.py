"""OpenBLAS for MLX on Linux: the library's names, the copy, and the second start."""

from __future__ import annotations

import ctypes
import struct
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from selection import in_one_test
from specdec_mlx.cli import blas


@pytest.mark.skipif(sys.platform != "linux", reason="an ELF library is loaded")
def test_a_real_library_loads_and_runs_under_its_plain_names(tmp_path: Path) -> None:
    """NumPy's own OpenBLAS, whose names have the same prefix; others keep theirs, and are found in
    the new table, too. One without the old table is refused, or with one that is too small.
    """
    folder = Path(np.__file__).parent.parent / "numpy.libs"
    (source,) = folder.glob("libscipy_openblas64_*.so")
    image = bytearray(source.read_bytes())
    copy = tmp_path / "plain.so"
    copy.write_bytes(blas.without_prefix(image, b"scipy_"))
    assert copy.stat().st_size == len(image)
    library = ctypes.CDLL(str(copy))
    assert library.openblas_get_num_threads64_() >= 1
    assert all(hasattr(library, name) for name in ("cblas_dgemm64_", "dgemm_64_", "gotoblas"))
    for name in ("openblas_get_num_threads64_", "cblas_dgemm64_", "dgemm_64_"):
        assert not hasattr(library, f"scipy_{name}")

    section = image.rindex(struct.pack("<I", blas.GNU_HASH))  # its type; 28 bytes on, its size
    struct.pack_into("<Q", image, section + 28, 8)
    with pytest.raises(ValueError, match=r"no room for \d+ symbols"):
        blas.without_prefix(image, b"scipy_")
    struct.pack_into("<I", image, section, 9)
    with pytest.raises(KeyError, match=str(blas.GNU_HASH)):
        blas.without_prefix(image, b"scipy_")


@in_one_test("magic", [b"\xcf\xfa\xed\xfe", b"\x7fELF\x01\x01"])
def test_a_macs_library_and_a_32_bit_one_are_refused(magic: bytes) -> None:
    with pytest.raises(ValueError, match="expected a 64-bit ELF library"):
        blas.without_prefix(magic + bytes(100), b"scipy_")


def test_the_wheels_library_is_copied_with_plain_names_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the wheel's version; the wheel stays as it is, and what is wrong with it is no error: the
    command works without.
    """
    library, cache = tmp_path / blas.LIBRARY, tmp_path / "cache"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"an OpenBLAS")
    wheel = SimpleNamespace(version="1.2", locate_file=tmp_path.joinpath)
    monkeypatch.setattr(blas, "distribution", lambda name: wheel)
    monkeypatch.setenv("SPECDEC_MLX_CACHE", str(cache))
    without_prefix = blas.without_prefix
    monkeypatch.setattr(blas, "without_prefix", lambda library, prefix: library + prefix)
    copy = cache / "blas" / "libopenblas-1.2.so"
    assert blas.find_openblas() == str(copy)
    assert copy.read_bytes() == b"an OpenBLASscipy_"
    assert library.read_bytes() == b"an OpenBLAS"
    library.unlink()
    assert blas.find_openblas() == str(copy)
    assert list(copy.parent.iterdir()) == [copy]

    wheel.version = "1.3"
    assert blas.find_openblas() is None  # without its library
    library.write_bytes(b"MZ")
    monkeypatch.setenv("SPECDEC_MLX_CACHE", str(library))
    assert blas.find_openblas() is None  # with a file where the folder should be
    monkeypatch.setenv("SPECDEC_MLX_CACHE", str(cache))
    monkeypatch.setattr(blas, "without_prefix", without_prefix)
    assert blas.find_openblas() is None  # of another kind

    def no_distribution(name: str) -> Any:
        raise PackageNotFoundError(name)

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
        blas.THREADS: "4",
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
