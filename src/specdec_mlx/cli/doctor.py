"""`specdec-mlx doctor`: the installation, its problems, and how to mend them."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version

import mlx.core as mx
import mlx_lm

import specdec_mlx
from specdec_mlx.cli.backends import installed, reinstall
from specdec_mlx.cli.blas import (
    REFERENCE_BLAS,
    THREADS,
    as_shell,
    blas_name,
    find_openblas,
    needs_openblas,
)
from specdec_mlx.errors import MlxLmVersionError
from specdec_mlx.mlx_lm_plugin.installation import check_version

OPENBLAS = (
    "MLX's wheel has the reference BLAS, with which a pass over m positions costs m times one and "
    "no draft can pay; with OpenBLAS it can."
)


@dataclass(frozen=True)
class Installation:
    """The installation that generates text here.

    runs_on: "metal", "cuda" or "cpu". blas: of a CPU. backends: versions by distribution on Linux.
    openblas: variables that preload a better library. refusal: why mlx-lm's own calls cannot be
    extended.
    """

    runs_on: str
    device: str
    blas: str | None
    backends: dict[str, str]
    mlx: str
    mlx_lm: str
    openblas: dict[str, str] = field(default_factory=dict)
    refusal: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing."""


def main(args: argparse.Namespace) -> int:
    """Print the installation, what is recommended, and its problems; exit status 1 for these."""
    found = inspect_installation()
    print("\n".join(f"{name:<12} {value}" for name, value in table(found)))
    if found.openblas:
        print(f"\nrecommended: {OPENBLAS}\nexport {as_shell(found.openblas | {THREADS: '1'})}")
    problems = list(problems_of(found))
    for problem in problems:
        print(f"\nwarning: {problem}")
    return 1 if problems else 0


def inspect_installation() -> Installation:
    """The installation that this process runs on."""
    runs_on = "metal" if mx.metal.is_available() else "cuda" if mx.cuda.is_available() else "cpu"
    refusal = None
    try:
        check_version()
    except MlxLmVersionError as error:
        refusal = str(error)
    return Installation(
        runs_on=runs_on,
        device=str(mx.device_info().get("device_name", mx.default_device())),
        blas=blas_name() if runs_on == "cpu" else None,
        backends=installed() if sys.platform == "linux" else {},
        mlx=version("mlx"),
        mlx_lm=mlx_lm.__version__,
        openblas=find_openblas() if needs_openblas() else {},
        refusal=refusal,
    )


def table(found: Installation) -> Iterator[tuple[str, str]]:
    """Names and values for a bug report."""
    backends = ", ".join(f"{name} {number}" for name, number in found.backends.items())
    yield "specdec-mlx", specdec_mlx.__version__
    yield "backend", f"{found.runs_on} ({backends})" if backends else found.runs_on
    yield "device", found.device
    if found.blas is not None:
        is_exact = found.blas == REFERENCE_BLAS
        rows = "bit-equal to one" if is_exact else "equal to one up to 1e-4"
        yield "BLAS", f"{found.blas} (logits of several rows are {rows} in float32)"
    yield "mlx", found.mlx
    yield "mlx-lm", found.mlx_lm
    yield "Python", platform.python_version()
    yield "system", f"{platform.platform()}, {os.cpu_count()} cores"


def problems_of(found: Installation) -> Iterator[str]:
    """Problems of an installation, each a sentence and the command that mends it."""
    if len(found.backends) > 1:
        both = f"{' and '.join(found.backends)} are both installed and own one file, libmlx.so"
        yield f"{both}: the one installed last runs. {reinstall(found.backends)}"
    elif any(number != found.mlx for number in found.backends.values()):
        name, number = next(iter(found.backends.items()))
        yield f"{name} {number} is not of mlx's version, {found.mlx}. {reinstall(found.backends)}"
    elif found.runs_on == "cpu" and any("cuda" in name for name in found.backends):
        what = f"{next(iter(found.backends))} finds no GPU, so that all runs on the CPU."
        yield f"{what} Look at what nvidia-smi says."
    if found.blas == REFERENCE_BLAS and not found.openblas:
        yield f'{OPENBLAS} pip install "specdec-mlx[cpu]"'
    if found.refusal is not None:
        yield found.refusal
