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
from specdec_mlx.kernels import MlxDspark, SplitAttention
from specdec_mlx.mlx_lm_plugin.installation import check_version

OPENBLAS = (
    "MLX's wheel has the reference BLAS, with which a pass over m positions costs m times one and "
    "no draft can pay; with OpenBLAS it can."
)


@dataclass(frozen=True)
class Installation:
    """The installation that generates text here.

    Attributes:
        runs_on: "metal", "cuda" or "cpu".
        device: name of the device.
        blas: matrix library of a CPU, or None.
        backends: on Linux, versions by distribution.
        mlx, mlx_lm: versions.
        openblas: variables that preload a better library.
        refusal: why mlx-lm's own calls cannot be extended, or None.
        kernels: for each of --kernels, whether it can run, or why not.
    """

    runs_on: str
    device: str
    blas: str | None
    backends: dict[str, str]
    mlx: str
    mlx_lm: str
    openblas: dict[str, str] = field(default_factory=dict)
    refusal: str | None = None
    kernels: dict[str, str] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing."""


def main(args: argparse.Namespace) -> int:
    """Print the installation, a recommendation and problems. Exit status 1 if there are any."""
    here = inspect_installation()
    print("\n".join(f"{name:<12} {value}" for name, value in table(here)))
    if here.openblas:
        print(f"\nrecommended: {OPENBLAS}\nexport {as_shell(here.openblas | {THREADS: '1'})}")
    problems = list(problems_of(here))
    for problem in problems:
        print(f"\nwarning: {problem}")
    return 1 if problems else 0


def inspect_installation() -> Installation:
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
        kernels={kind.name: kind().report() for kind in (SplitAttention, MlxDspark)},
    )


def table(here: Installation) -> Iterator[tuple[str, str]]:
    backends = ", ".join(f"{name} {number}" for name, number in here.backends.items())
    yield "specdec-mlx", specdec_mlx.__version__
    yield "backend", f"{here.runs_on} ({backends})" if backends else here.runs_on
    yield "device", here.device
    if here.blas is not None:
        is_exact = here.blas == REFERENCE_BLAS
        rows = "bit-equal to one" if is_exact else "equal to one up to 1e-4"
        yield "BLAS", f"{here.blas} (logits of several rows are {rows} in float32)"
    yield "mlx", here.mlx
    yield "mlx-lm", here.mlx_lm
    for name, words in here.kernels.items():
        yield "kernels", f"{name}: {words}"
    yield "Python", platform.python_version()
    yield "system", f"{platform.platform()}, {os.cpu_count()} cores"


def problems_of(here: Installation) -> Iterator[str]:
    """Problems of an installation, each a sentence and the command that solves it."""
    if len(here.backends) > 1:
        both = f"{' and '.join(here.backends)} are both installed and own one file, libmlx.so"
        yield f"{both}: the one installed last runs. {reinstall(here.backends)}"
    elif any(number != here.mlx for number in here.backends.values()):
        name, number = next(iter(here.backends.items()))
        yield f"{name} {number} is not of mlx's version, {here.mlx}. {reinstall(here.backends)}"
    elif here.runs_on == "cpu" and any("cuda" in name for name in here.backends):
        what = f"{next(iter(here.backends))} finds no GPU, so that all runs on the CPU."
        yield f"{what} Look at what nvidia-smi says."
    if here.blas == REFERENCE_BLAS and not here.openblas:
        yield f'{OPENBLAS} pip install "specdec-mlx[cpu]"'
    if here.refusal is not None:
        yield here.refusal
