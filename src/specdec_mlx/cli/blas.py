"""OpenBLAS for MLX on a Linux CPU: a wheel's library, preloaded."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import mlx.core as mx

from specdec_mlx.files import cache_root

WHEEL, LIBRARY = "cmeel-openblas", "cmeel.prefix/lib/libopenblas.so.0"
BACKEND, FORTRAN = "mlx-cpu", "mlx_cpu.libs/libgfortran-*.so.5*"
PRELOADED, THREADS, MOST_THREADS = "SPECDEC_MLX_PRELOADED", "OPENBLAS_NUM_THREADS", 8

REFERENCE_BLAS = "reference BLAS"  # the library of MLX's Linux wheel, and any that is not known
KNOWN_BLAS = {"libopenblas": "OpenBLAS", "libmkl": "MKL", "libblis": "BLIS"}


def start_again_with_openblas(command: str) -> dict[str, str]:
    """Replace this process by one that preloads OpenBLAS. Returns {} if that is not needed.

    In the new process, returns the variables that preload it.
    """
    # The mark goes, so that children of this process decide for themselves.
    if os.environ.pop(PRELOADED, None):
        return find_openblas()
    arguments = sys.argv[1:]
    # Only a process that the command line started can be started again with the same arguments.
    is_command = arguments[:1] == [command] and sys.orig_argv[-len(arguments) :] == arguments
    if is_command and needs_openblas() and (preload := find_openblas()):
        library = preload["LD_PRELOAD"]
        print(f"Preloading OpenBLAS in place of MLX's reference BLAS: {library}", file=sys.stderr)
        threads = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // 2))
        environment = {THREADS: str(threads), **os.environ, PRELOADED: "1"}
        for name, value in preload.items():
            former = os.environ.get(name)
            environment[name] = f"{value}:{former}" if former else value
        command_line = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, command_line, environment)
    return {}


def needs_openblas() -> bool:
    is_cpu = sys.platform == "linux" and mx.default_device() == mx.cpu
    return is_cpu and blas_name() == REFERENCE_BLAS


def find_openblas() -> dict[str, str]:
    """The variables that preload the library of the wheel. {} without the wheel."""
    with suppress(PackageNotFoundError, OSError, ValueError):
        # The library needs libgfortran.so.5. MLX's CPU backend brings it under another name, so
        # that a link with the plain name is kept in the cache.
        library = Path(str(distribution(WHEEL).locate_file(LIBRARY))).resolve(strict=True)
        (fortran,) = Path(str(distribution(BACKEND).locate_file(""))).resolve().glob(FORTRAN)
        link = cache_root() / "blas" / fortran.name / "libgfortran.so.5"
        if link.resolve() != fortran:
            link.parent.mkdir(parents=True, exist_ok=True)
            (part := link.with_suffix(f".{os.getpid()}")).symlink_to(fortran)
            part.replace(link)
        return {"LD_PRELOAD": str(library), "LD_LIBRARY_PATH": f"{link.parent}:{fortran.parent}"}
    return {}


def blas_name() -> str:
    """Library that multiplies matrices on the CPU, read on Linux from the mapped files."""
    maps = Path("/proc/self/maps")
    name = blas_in(maps.read_text(encoding="utf-8") if maps.exists() else "")
    return "Accelerate" if platform.system() == "Darwin" else name


def blas_in(maps: str) -> str:
    files = {Path(line.split(maxsplit=5)[5]) for line in maps.splitlines() if "/" in line}
    loaded = [f.name for f in files if f.parent.name not in ("numpy.libs", "scipy.libs")]
    names = (name for part, name in KNOWN_BLAS.items() if any(f.startswith(part) for f in loaded))
    return next(names, REFERENCE_BLAS)


def as_shell(variables: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in variables.items())
