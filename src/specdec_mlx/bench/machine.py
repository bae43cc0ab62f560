"""Where a benchmark ran: without this, its numbers say nothing."""

from __future__ import annotations

import os
import platform
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

REFERENCE_BLAS = "reference BLAS"
"""What `blas_name` calls the library that MLX's Linux wheel brings, and any that it cannot tell."""


def describe_machine() -> dict[str, str]:
    """Processor, device, matrix library, versions, and how busy the machine is."""
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "load": " ".join(f"{x:.2f}" for x in os.getloadavg()),
        "device": str(mx.default_device()),
        "blas": blas_name(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("mlx", "mlx-lm", "specdec-mlx")},
    }


def blas_name() -> str:
    """Library that multiplies matrices on the CPU; on Linux read off what is loaded."""
    if platform.system() == "Darwin":
        return "Accelerate"
    maps = Path("/proc/self/maps")
    known = {"libopenblas": "OpenBLAS", "libmkl": "MKL", "libblis": "BLIS"}
    loaded = maps.read_text() if maps.exists() else ""
    return next((name for part, name in known.items() if part in loaded), REFERENCE_BLAS)


def describe_dtype(model: nn.Module) -> str:
    """The dtype that most parameters have, and the width of quantized ones."""
    sizes: Counter[str] = Counter()
    for _, value in tree_flatten(model.parameters()):
        if mx.issubdtype(value.dtype, mx.floating):
            sizes[str(value.dtype).removeprefix("mlx.core.")] += value.size
    bits = {module.bits for module in model.modules() if hasattr(module, "bits")}
    quantized = [f"{bits} bits" for bits in sorted(bits)]
    return ", ".join([*(name for name, _ in sizes.most_common(1)), *quantized])


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
