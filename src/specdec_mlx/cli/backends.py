"""Backends of MLX on Linux: which are installed, and a clear error if none loads.

Their distributions put the same file in the same place, so that only one can be installed. This
module does not import MLX.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from specdec_mlx.errors import MissingBackendError

EXTRAS = {"mlx-cpu": "cpu", "mlx-cuda-12": "cuda12", "mlx-cuda-13": "cuda13"}
"""Distributions that own `libmlx.so`, and the extra that takes each."""


def installed(names: Iterable[str] = EXTRAS) -> dict[str, str]:
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def require_mlx() -> None:
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        raise without_mlx(error) from None


def without_mlx(error: ImportError) -> MissingBackendError:
    return MissingBackendError(why_mlx_is_missing(error), name="mlx.core")


def why_mlx_is_missing(error: ImportError) -> str:
    if sys.platform != "linux":
        return (
            f"MLX cannot be imported ({error}). On a Mac with Apple silicon: "
            "pip install --force-reinstall mlx"
        )
    backends = installed()
    if not backends:
        what = 'MLX has no backend here: pip install "specdec-mlx[cpu]", or "specdec-mlx[cuda13]" '
        return f"{what}for an NVIDIA GPU."
    there = ", ".join(f"{name} {number}" for name, number in installed(["mlx", *EXTRAS]).items())
    needs = "" if max(backends) == "mlx-cpu" else " CUDA also needs NVIDIA's driver."
    return f"MLX does not load ({error}) from {there}. Mend it: {reinstall(backends)}.{needs}"


def reinstall(backends: dict[str, str]) -> str:
    """The command that removes all backends and installs MLX with the newest of them again."""
    # `max` prefers CUDA, and the later version of CUDA: nobody installs these by mistake.
    anew = f'pip install "specdec-mlx[{EXTRAS[max(backends)]}]"'
    return f"pip uninstall -y mlx {' '.join(backends)} && {anew}"
