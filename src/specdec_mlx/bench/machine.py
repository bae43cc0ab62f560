"""Description of the machine that a benchmark ran on."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

REFERENCE_BLAS = "reference BLAS"  # the library of MLX's Linux wheel, and any that is not known
KNOWN_BLAS = {"libopenblas": "OpenBLAS", "libmkl": "MKL", "libblis": "BLIS"}


def describe_machine() -> dict[str, str]:
    """Processor, device, matrix library, versions and load; and the number of ranks."""
    num_ranks = mx.distributed.init().size()
    info = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.+)", info.read_text() if info.exists() else "")
    return {
        **({"ranks": str(num_ranks)} if num_ranks > 1 else {}),
        "platform": platform.platform(),
        "processor": named[1] if named else platform.processor() or platform.machine(),
        "cores": str(os.cpu_count()),
        "load": " ".join(f"{x:.2f}" for x in os.getloadavg()),
        "device": str(mx.default_device()),
        "blas": blas_name(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("mlx", "mlx-lm", "specdec-mlx")},
    }


def blas_name() -> str:
    """Library that multiplies matrices on the CPU; on Linux read off what is loaded."""
    maps = Path("/proc/self/maps")
    found = blas_in(maps.read_text() if maps.exists() else "")
    return "Accelerate" if platform.system() == "Darwin" else found


def blas_in(maps: str) -> str:
    """Matrix library among mapped files (/proc/PID/maps), those of NumPy and SciPy left out."""
    files = {Path(line.split(maxsplit=5)[5]) for line in maps.splitlines() if "/" in line}
    loaded = [f.name for f in files if f.parent.name not in ("numpy.libs", "scipy.libs")]
    names = (name for part, name in KNOWN_BLAS.items() if any(f.startswith(part) for f in loaded))
    return next(names, REFERENCE_BLAS)


def describe_dtype(model: nn.Module) -> str:
    """The dtype of the largest parameter, and the width of quantized ones."""
    values = (value for _, value in tree_flatten(model.parameters()))
    floating = (value for value in values if mx.issubdtype(value.dtype, mx.floating))
    dtype = str(max(floating, key=lambda value: value.size).dtype).removeprefix("mlx.core.")
    bits = {module.bits for module in model.modules() if hasattr(module, "bits")}
    return ", ".join([dtype, *(f"{bits} bits" for bits in sorted(bits))])
