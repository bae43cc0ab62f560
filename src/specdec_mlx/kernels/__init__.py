"""Kernels for passes over several rows, by name or as an object of your own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache

import mlx.nn as nn

from specdec_mlx.arguments import AUTO, KERNELS, NO_DRAFTER, argument_error
from specdec_mlx.errors import MissingPackageError, UnknownNameError
from specdec_mlx.kernels.contract import Kernels
from specdec_mlx.kernels.mlx_dspark import MlxDspark, installed_version, why_not
from specdec_mlx.kernels.split_attention import SplitAttention

__all__ = ["Kernels", "MlxDspark", "SplitAttention"]


class JoinedKernels(Kernels):
    """Several kernels around the same passes. The first is the outermost."""

    def __init__(self, parts: Sequence[Kernels]) -> None:
        self.parts = parts
        self.name = "+".join(part.name for part in parts)

    @contextmanager
    def around(self, model: nn.Module, rows: int, context: int) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.around(model, rows, context))
            yield

    def measure(self) -> None:
        for part in self.parts:
            part.measure()

    def active(self, model: nn.Module) -> str:
        return "+".join(filter(None, (part.active(model) for part in self.parts)))


def make_kernels(choice: Kernels | str | None) -> Kernels | None:
    """The kernels of a caller's choice, or None for MLX's own kernels alone.

    All calls with one name share one object, and with it the results of its measurements.

    Args:
        choice: an object, a name of `arguments.KERNELS`, names joined by "+", or None. "auto" takes
            all kernels that can run here.

    Raises:
        UnknownNameError: no kernels have this name.
        MissingPackageError: their package is not installed.
        ValueError: the choice is something else.
    """
    if choice is None or isinstance(choice, Kernels):
        return choice
    if not isinstance(choice, str):
        raise argument_error("kernels", choice, "None, a name or an instance of a Kernels")
    if choice == NO_DRAFTER:
        return None
    if choice == AUTO:
        return _made(_all_here())
    return _made(choice)


@cache
def _made(names: str) -> Kernels:
    parts = [_single(name) for name in names.split("+")]
    return parts[0] if len(parts) == 1 else JoinedKernels(parts)


@cache
def _single(name: str) -> Kernels:
    if name == SplitAttention.name:
        return SplitAttention()
    if name != MlxDspark.name:
        raise UnknownNameError(f"kernels={name!r}: expected one of {', '.join(KERNELS)}.")
    if installed_version() is None:
        raise MissingPackageError(
            f'kernels={name!r} needs the package {name}: pip install "specdec-mlx[kernels]"'
        )
    return MlxDspark()


def _all_here() -> str:
    return SplitAttention.name if why_not() else f"{SplitAttention.name}+{MlxDspark.name}"
