"""Write models and heads into the package: matrices as int8, with a float32 scale for each row.

python -m benchmarks.lab.pack my-pair   # its folders target, draft, and heads/KIND
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from specdec_mlx.lab.pair import PACKED, SCALE, WEIGHTS


def pack(folder: Path, packed: Path) -> None:
    """Write a model folder or a head's as `unpack` reads it.

    Args:
        folder: with floating-point weights.
        packed: where it goes.
    """
    shutil.copytree(folder, packed, ignore=shutil.ignore_patterns(WEIGHTS), dirs_exist_ok=True)
    weights: Any = mx.load(str(folder / WEIGHTS))
    stored: dict[str, mx.array] = {}
    for name, weight in weights.items():
        if weight.ndim < 2 or not mx.issubdtype(weight.dtype, mx.floating):
            stored[name] = weight
            continue
        whole = weight.astype(mx.float32)
        scale = mx.maximum(mx.max(mx.abs(whole), axis=-1, keepdims=True) / 127, 1e-12)
        stored[name] = mx.round(whole / scale).astype(mx.int8)
        stored[name + SCALE] = scale
    mx.save_safetensors(str(packed / WEIGHTS), stored, {"format": "mlx"})


def main(arguments: Sequence[str] | None = None) -> None:
    """Pack every model folder below the one that is named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lab.pack")
    parser.add_argument("folder", type=Path, help="as benchmarks.lab.train --out wrote it")
    folder = parser.parse_args(arguments).folder
    for file in sorted(folder.rglob(WEIGHTS)):
        pack(file.parent, PACKED / file.parent.relative_to(folder))


if __name__ == "__main__":
    main()
