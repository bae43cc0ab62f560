"""OpenBLAS for MLX on Linux: the library's names, the copy, the second start, the threads."""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.nn as nn
import numpy as np
import pytest

from selection import in_one_test
from specdec_mlx.cli import blas
from specdec_mlx.cli.elf import system_v_hash, without_prefix

# --- names --------------------------------------------------------------------------------------

SYMBOLS = ["", "scipy_cblas_sgemm", "scipy_dgemm_", "other", "scipy_", "xscipy_a"]
RENAMED = ["", "cblas_sgemm", "dgemm_", "other", "", "xscipy_a"]
HASH_TAG, GNU_HASH_TAG, END_TAG = 4, 0x6FFFFEF5, 0
NUM_HASH_WORDS = 2 + len(SYMBOLS) + 3  # what the old table leaves room for: 3 buckets


def make_library(num_hash_words: int = NUM_HASH_WORDS, hash_type: int = 0x6FFFFFF6) -> bytes:
    """A 64-bit ELF library of nothing but names: what `without_prefix` reads, and in its places."""
    text = b"".join(name.encode() + b"\0" for name in SYMBOLS)
    starts = [len(b"".join(n.encode() + b"\0" for n in SYMBOLS[:i])) for i in range(len(SYMBOLS))]
    symbols = b"".join(
        struct.pack("<IBBHQQ", start, 0x12, 0, 1, 0x1000 + i, 8) for i, start in enumerate(starts)
    )
    dynamic = struct.pack("<4Q", GNU_HASH_TAG, 0x99, END_TAG, 0)
    parts = {5: text, 11: symbols, hash_type: bytes(4 * num_hash_words), 6: dynamic}
    offset, image, headers = 64, b"", b""
    types = {5: 3, 11: 11, hash_type: hash_type, 6: 6}  # 3: a table of strings
    for kind, part in parts.items():
        fields = (0, types[kind], 0, offset, offset, len(part), 0, 0, 8, 0)
        headers += struct.pack("<IIQQQQIIQQ", *fields)
        image, offset = image + part, offset + len(part)
    head = bytearray(b"\x7fELF\x02\x01" + bytes(58))
    struct.pack_into("<Q", head, 0x28, offset)
    struct.pack_into("<H", head, 0x3C, len(parts))
    return bytes(head) + image + headers


def look_up(library: bytes, name: str) -> int | None:
    """Number of the symbol of a name, found as a loader finds it; None if there is none."""
    start, count = struct.unpack_from("<Q", library, 0x28)[0], 4
    sections = [struct.unpack_from("<IIQQQQIIQQ", library, start + 64 * i) for i in range(count)]
    (_, _, _, _, text, *_), (_, _, _, _, symbols, *_), (_, _, _, _, table, *_) = sections[:3]
    num_buckets, _ = struct.unpack_from("<2I", library, table)
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
    """Each of them, and those that never had it; none with it any more."""
    library = without_prefix(make_library(), "scipy_")
    assert [look_up(library, name) for name in RENAMED if name] == [1, 2, 3, 5]
    assert look_up(library, "scipy_cblas_sgemm") is None


def test_the_loader_is_told_which_kind_of_table_it_is() -> None:
    """The tag of GNU's kind becomes that of System V's; where the table lies stays."""
    before, after = make_library(), without_prefix(make_library(), "scipy_")
    at = before.index(struct.pack("<QQ", GNU_HASH_TAG, 0x99))
    assert struct.unpack_from("<2Q", after, at) == (HASH_TAG, 0x99)
    assert len(after) == len(before)


@in_one_test(
    ("library", "reason"),
    [
        (b"\xcf\xfa\xed\xfe" + bytes(100), "expected a 64-bit ELF library"),
        (b"\x7fELF\x01\x01" + bytes(100), "expected a 64-bit ELF library"),
        (make_library(hash_type=9), "no section of type"),
        (make_library(num_hash_words=len(SYMBOLS)), "no room for 6 symbols"),
    ],
)
def test_other_libraries_are_refused(library: bytes, reason: str) -> None:
    """A Mac's, a 32-bit one, one without the table, and one whose table is too small."""
    with pytest.raises(ValueError, match=reason):
        without_prefix(library, "scipy_")


if sys.platform == "linux":

    def test_a_real_library_loads_and_runs_under_its_plain_names(tmp_path: Path) -> None:
        """NumPy's own OpenBLAS, whose names have the same prefix."""
        folder = Path(np.__file__).parent.parent / "numpy.libs"
        (source,) = folder.glob("libscipy_openblas64_*.so")
        copy = tmp_path / "plain.so"
        copy.write_bytes(without_prefix(source.read_bytes(), "scipy_"))
        library = ctypes.CDLL(str(copy))
        assert library.openblas_get_num_threads64_() >= 1
        assert not hasattr(library, "scipy_openblas_get_num_threads64_")


# --- the library --------------------------------------------------------------------------------


class Wheel:
    """Stands for the installed wheel."""

    version = "1.2"

    def __init__(self, root: Path, library: bytes) -> None:
        self.root = root
        file = root / blas.WHEEL_LIBRARY
        file.parent.mkdir(parents=True)
        file.write_bytes(library)

    def locate_file(self, path: str) -> Path:
        return self.root / path


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    installed = Wheel(tmp_path / "site-packages", make_library())
    monkeypatch.setattr(blas, "distribution", lambda name: installed)
    monkeypatch.setenv("SPECDEC_MLX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(blas.ctypes, "CDLL", raises(OSError("not found")))
    return installed


def raises(error: BaseException) -> Any:
    def fail(*args: Any) -> None:
        raise error

    return fail


def test_the_wheels_library_is_copied_with_plain_names_once(wheel: Wheel, tmp_path: Path) -> None:
    """The copy alone lies in the cache, by the wheel's version; the wheel stays as it is."""
    copy = Path(str(blas.find_openblas()))
    assert copy == tmp_path / "cache" / "blas" / "libopenblas-1.2.so"
    assert copy.read_bytes() == without_prefix(make_library(), "scipy_")
    assert wheel.locate_file(blas.WHEEL_LIBRARY).read_bytes() == make_library()
    (wheel.root / blas.WHEEL_LIBRARY).unlink()
    assert blas.find_openblas() == str(copy)
    assert list(copy.parent.iterdir()) == [copy]


def no_wheel(wheel: Wheel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "distribution", raises(PackageNotFoundError("no")))


def no_library(wheel: Wheel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (wheel.root / blas.WHEEL_LIBRARY).unlink()


def another_kind(wheel: Wheel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (wheel.root / blas.WHEEL_LIBRARY).write_bytes(b"MZ")


def no_cache(wheel: Wheel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file where the folder should be")


@pytest.mark.parametrize("spoil", [no_wheel, no_library, another_kind, no_cache])
def test_without_the_wheel_the_systems_library_is_taken_if_there_is_one(
    spoil: Any, wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that is wrong with the wheel is an error: the command works without."""
    spoil(wheel, tmp_path / "cache", monkeypatch)
    assert blas.find_openblas() is None
    monkeypatch.setattr(blas.ctypes, "CDLL", lambda name: name)
    assert blas.find_openblas() == "libopenblas.so.0"


# --- the second start ---------------------------------------------------------------------------


class Started(BaseException):
    """`os.execve` does not return."""


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, list[str], dict]]]:
    """A `specdec-mlx demo --seconds 9` that wants OpenBLAS, and what it is replaced by."""
    seen: list[tuple[str, list[str], dict]] = []

    def execve(*call: Any) -> None:
        seen.append(call)
        raise Started

    environment = {"LD_PRELOAD": "libtrace.so", "PATH": "/bin"}
    monkeypatch.setattr(blas.os, "environ", dict(environment))
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
    starts: list, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same Python with the same arguments; what was preloaded before stays, behind it."""
    with pytest.raises(Started):
        blas.start_again_with_openblas("demo")
    ((program, arguments, environment),) = starts
    assert program == "/venv/bin/python"
    expected = ["-X", "dev", "/venv/bin/specdec-mlx", "demo", "--seconds", "9"]
    assert arguments == ["/venv/bin/python", *expected]
    environment.pop("PYTEST_CURRENT_TEST", None)
    assert environment == {
        "LD_PRELOAD": "/cache/libopenblas.so libtrace.so",
        "PATH": "/bin",
        blas.PRELOADED: "/cache/libopenblas.so",
    }
    assert capsys.readouterr().err.startswith("Preloading OpenBLAS")


@pytest.mark.parametrize("before", [{}, {"LD_PRELOAD": "libtrace.so"}])
def test_the_second_start_is_the_last_and_its_children_inherit_nothing(
    before: dict[str, str], starts: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the library could not be loaded after all."""
    monkeypatch.setattr(blas.os, "environ", dict(before))
    with pytest.raises(Started):
        blas.start_again_with_openblas("demo")
    monkeypatch.setattr(blas.os, "environ", dict(starts[0][2]))
    assert blas.start_again_with_openblas("demo") == "/cache/libopenblas.so"
    assert len(starts) == 1
    blas.os.environ.pop("PYTEST_CURRENT_TEST", None)
    assert blas.os.environ == before


@pytest.mark.parametrize(
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
    ids=[
        "Mac",
        "GPU",
        "preloaded by the user",
        "another library",
        "none there",
        "a test",
        "a test that runs the command",
    ],
)
def test_nothing_starts_again_where_that_gains_nothing(
    module: Any, name: str, value: Any, starts: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And never in a process that is not the command itself."""
    monkeypatch.setattr(module, name, value)
    assert blas.start_again_with_openblas("demo") is None
    assert starts == []


# --- threads ------------------------------------------------------------------------------------


class Machine:
    """A clock that the work moves: seconds of a piece of work by number of threads."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds = seconds
        self.now = 0.0

    def work(self, num_threads: int) -> None:
        self.now += self.seconds[num_threads]

    def clock(self) -> float:
        return self.now


@in_one_test(
    ("seconds", "expected"),
    [
        ({1: 0.010, 2: 0.006}, 2),
        ({1: 0.010, 2: 0.0095}, 1),
        ({1: 0.010, 2: 0.500}, 1),
        ({1: 0.010, 2: 0.006, 4: 0.0058}, 2),
        ({1: 0.010, 2: 0.011, 4: 0.004}, 4),
        ({1: 9.0, 2: 5.0}, 2),
    ],
)
def test_threads_are_taken_where_they_clearly_help(
    seconds: dict[int, float], expected: int
) -> None:
    """By the time that all trials took; a trial is no longer than a second, or one of each."""
    machine = Machine(seconds)
    assert blas.soonest(list(seconds), machine.work, machine.clock) == expected
    assert machine.now <= blas.TRIAL_SECONDS + 2 * sum(seconds.values())


def test_occasional_waiting_counts_in_full() -> None:
    """Two threads that are quick nine times out of ten, and then wait long, are not taken."""
    machine = Machine({1: 0.010, 2: 0.006})
    calls = 0

    def work(num_threads: int) -> None:
        nonlocal calls
        calls += 1
        machine.work(num_threads)
        machine.now += 0.5 if num_threads == 2 and calls % 10 == 0 else 0.0

    assert blas.soonest([1, 2], work, machine.clock) == 1


@pytest.fixture
def openblas(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A process with OpenBLAS on eight cores; the numbers of threads that were set."""
    counts: list[int] = []
    library = SimpleNamespace(openblas_set_num_threads=counts.append)
    monkeypatch.setattr(blas.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(blas.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    for name in blas.THREADS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return counts


class Layered(nn.Module):
    """A model of one layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers = [layer]


def test_the_number_that_is_left_set_is_the_best_one(openblas: list[int]) -> None:
    """1, 2 and 4 are tried, half of the cores at most, on the model's own matrices."""
    chosen = blas.choose_num_threads(Layered(nn.Linear(8, 8)))
    assert set(openblas) == {1, 2, 4}
    assert openblas[-1] == chosen


@in_one_test("cores", [1, 2, 3])
def test_on_few_cores_one_thread_is_taken_untried(
    cores: int, openblas: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one would wait whenever another program runs."""
    monkeypatch.setattr(blas.os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    assert blas.choose_num_threads(Layered(nn.Linear(8, 8))) == 1
    assert set(openblas) == {1}


def test_the_users_number_of_threads_stays(
    openblas: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of OpenBLAS's variables it is in."""
    for name in blas.THREADS_VARIABLES:
        with monkeypatch.context() as patch:
            patch.setenv(name, "2")
            assert blas.choose_num_threads(Layered(nn.Linear(8, 8))) is None
    assert openblas == []


def test_quantized_matrices_are_not_for_blas(openblas: list[int]) -> None:
    """There is nothing to measure, and nothing is set."""
    quantized = nn.QuantizedLinear(64, 64, bias=False)
    assert blas.choose_num_threads(Layered(quantized)) is None
    assert openblas == []


def test_a_process_without_openblas_has_nothing_to_set(
    openblas: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference BLAS has one thread."""
    monkeypatch.setattr(blas.ctypes, "CDLL", lambda name: SimpleNamespace())
    assert blas.choose_num_threads(Layered(nn.Linear(8, 8))) is None
