"""OpenBLAS for MLX on a Linux CPU: found, given its plain names, and preloaded.

MLX's Linux wheel brings the reference BLAS, where a pass over m positions costs m times one, so
that no draft can pay. The extra `cpu` brings OpenBLAS as `scipy-openblas32`: made for x86-64 and
for aarch64, complete in one file, and with `scipy_` in front of all its names. A copy without that
prefix is kept in the cache. A program's symbols are bound when its libraries are loaded, and so a
command that wants the copy starts again, with it in `LD_PRELOAD`.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.bench.machine import REFERENCE_BLAS, blas_name
from specdec_mlx.cli.elf import without_prefix
from specdec_mlx.folders import cache_root

WHEEL = "scipy-openblas32"
WHEEL_LIBRARY = "scipy_openblas32/lib/libscipy_openblas.so"
PREFIX = "scipy_"
SYSTEM_LIBRARY = "libopenblas.so.0"
"""What Debian and others install; the loader knows where."""

PRELOADED = "SPECDEC_MLX_PRELOADED"
"""Environment variable that tells a process that it was started again, and with which library."""

THREADS_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
MOST_THREADS = 8
TRIAL_SECONDS = 1.0
TRIAL_ROWS = (1, 5)  # a plain pass, and one with a draft of 4
WORTH_A_THREAD = 0.9
"""Share of the time that remains with more threads, above which fewer are taken: a heuristic."""

MISSING = (
    "MLX's wheel has the reference BLAS here, where a pass over m positions costs m times one: no "
    "draft can pay, and auto drafts next to nothing. With OpenBLAS it is otherwise: "
    f'pip install "specdec-mlx[cpu]" brings it ({WHEEL}, 8 MB), and so does Debian\'s '
    "libopenblas0-pthread. This command then preloads it by itself."
)


def start_again_with_openblas(command: str) -> str | None:
    """Replace this process by the same command with OpenBLAS preloaded, where that makes it faster.

    Returns where there is nothing to gain or nothing to preload, and in the process that was
    started again. A Mac has Accelerate, a GPU needs none, and a library that the user has preloaded
    stays. Nothing happens either in a process that was not started as the command, such as one that
    runs it by `runpy`: it would be lost with all that it holds.

    Returns:
        The library that was preloaded for this process; None if none was.
    """
    if (library := _take_over()) is not None:
        return library
    arguments = sys.argv[1:]
    is_command = arguments[:1] == [command] and sys.orig_argv[-len(arguments) :] == arguments
    if is_command and needs_openblas() and (library := find_openblas()) is not None:
        _start_again(library)
    return None


def needs_openblas() -> bool:
    """Whether matrices are multiplied on a Linux CPU with the reference BLAS."""
    on_linux_cpu = sys.platform == "linux" and mx.default_device() == mx.cpu
    return on_linux_cpu and blas_name() == REFERENCE_BLAS


def find_openblas() -> str | None:
    """What to write into `LD_PRELOAD`: the wheel's library, else the system's, else None.

    What cannot be used is passed over: without it the command is slower, and says so.
    """
    with suppress(PackageNotFoundError, OSError, ValueError):
        return str(_plain_copy(distribution(WHEEL)))
    with suppress(OSError):
        ctypes.CDLL(SYSTEM_LIBRARY)
        return SYSTEM_LIBRARY
    return None


def _plain_copy(wheel: Distribution) -> Path:
    """The wheel's library with plain names, made on the first call; it appears whole or not at all.

    Raises OSError where the cache cannot be written, and ValueError for another kind of library.
    """
    copy = cache_root() / "blas" / f"libopenblas-{wheel.version}.so"
    if not copy.exists():
        source = Path(str(wheel.locate_file(WHEEL_LIBRARY)))
        library = without_prefix(source.read_bytes(), PREFIX)
        copy.parent.mkdir(parents=True, exist_ok=True)
        part = copy.with_name(f".{copy.name}.{os.getpid()}.part")
        part.write_bytes(library)
        part.replace(copy)
    return copy


def _start_again(library: str) -> None:
    """The same command line in this process's place; does not return."""
    preloaded = [library, *os.environ.get("LD_PRELOAD", "").split()]
    environment = {**os.environ, "LD_PRELOAD": " ".join(preloaded), PRELOADED: library}
    print(f"Preloading OpenBLAS in place of MLX's reference BLAS: {library}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _take_over() -> str | None:
    """In a process started again: its library. What it starts in turn is not to inherit that."""
    library = os.environ.pop(PRELOADED, None)
    if library is not None:
        others = [name for name in os.environ.get("LD_PRELOAD", "").split() if name != library]
        os.environ["LD_PRELOAD"] = " ".join(others)
        if not others:
            del os.environ["LD_PRELOAD"]
    return library


def choose_num_threads(model: nn.Module) -> int | None:
    """Set OpenBLAS's number of threads to the one that multiplies a model's matrices soonest.

    Half of the cores at most are tried: a product waits for the last of its threads, up to fifty
    times as long as it takes where another program has that core, and one thread alone comes near
    what the memory gives.

    Returns:
        The number; None where the user has chosen, no OpenBLAS is loaded, or no matrix is for it.
    """
    if sys.platform != "linux":
        return None
    set_num_threads = getattr(ctypes.CDLL(None), "openblas_set_num_threads", None)
    matrices = _matrices(model)
    if set_num_threads is None or not matrices or any(map(os.environ.get, THREADS_VARIABLES)):
        return None
    inputs = [mx.zeros((rows, m.shape[1]), m.dtype) for m in matrices for rows in TRIAL_ROWS]
    mx.eval(matrices, inputs)

    def multiply(num_threads: int) -> None:
        set_num_threads(num_threads)
        for i, x in enumerate(inputs):
            mx.eval(x @ matrices[i // len(TRIAL_ROWS)].T)

    half = max(1, len(os.sched_getaffinity(0)) // 2)
    counts = [2**i for i in range(min(half, MOST_THREADS).bit_length())]
    best = soonest(counts, multiply)
    set_num_threads(best)
    return best


def soonest(
    counts: Sequence[int],
    work: Callable[[int], None],
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """The number of threads that takes least time, the trials of all in turns.

    Args:
        counts: increasing; a larger one must be clearly better.
        work: does a piece of work with so many threads.
        clock: in seconds.
    """
    seconds = dict.fromkeys(counts, 0.0)
    for count in counts:
        work(count)  # starts its threads
    if len(counts) == 1:
        return counts[0]
    began = clock()
    while sum(seconds.values()) == 0.0 or clock() - began < TRIAL_SECONDS:
        for count in counts:
            start = clock()
            work(count)
            seconds[count] += clock() - start
    best = counts[0]
    for count in counts[1:]:
        if seconds[count] < WORTH_A_THREAD * seconds[best]:
            best = count
    return best


def _matrices(model: nn.Module) -> list[mx.array]:
    """The matrices of one layer that BLAS multiplies: quantized ones are MLX's own affair."""
    layer = getattr(model, "layers", [model])[-1]
    weights = [part.weight for part in layer.modules() if isinstance(part, nn.Linear)]
    return [weight for weight in weights if weight.dtype == mx.float32]
