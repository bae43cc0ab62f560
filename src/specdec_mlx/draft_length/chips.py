"""What a pass over m rows costs on Apple chips, one row = 1: measured by others, as their sources say.

A quantized product reads the weights once for a few rows and then in tiles, of 32 rows, or 64 on
chips with neural accelerators: a staircase. These curves are where `Staircase` begins; none was
measured by this project.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

WIDTHS = (2, 3, 4, 5, 6, 9, 13, 20, 32, 48, 64)
"""Rows of the passes that are chosen from: each is the last one before a step of some curve, 20 and
48 for machines whose passes have no tiles. A draft of K tokens is K + 1 rows."""


class Curve(NamedTuple):
    """Costs of passes on one machine.

    points: (rows, cost), lines between them. tile: rows after which each further tile costs as much
    as the widest pass named. source: who measured it.
    """

    points: tuple[tuple[int, float], ...]
    tile: int = 0
    source: str = ""

    def __call__(self, rows: int) -> float:
        """Cost of a pass over `rows` >= 1."""
        widest, most = self.points[-1]
        if self.tile and rows > widest:
            return most * -(-rows // self.tile) * self.tile / (-(-widest // self.tile) * self.tile)
        i = min(max(1, bisect_right(self.points, (rows, 0.0))), len(self.points) - 1)
        (m0, c0), (m1, c1) = self.points[i - 1 : i + 1]
        return c0 + (c1 - c0) * (rows - m0) / (m1 - m0)


MILDEST = Curve(((1, 1), (2, 1.1), (3, 1.15), (4, 1.2), (5, 1.3), (6, 1.35), (9, 1.5), (13, 1.7),
                 (20, 2.1), (32, 2.7), (48, 3.6), (64, 4.5)))  # fmt: skip
"""Where nothing is known of a machine; two measurements correct it."""

CURVES = {
    "m1-m2": Curve(((1, 1), (5, 5), (32, 5)), 32, "mlx 846d176 quantized.cpp"),
    "m2-max-27b": Curve(
        ((1, 1), (2, 1.85), (3, 2.6), (4, 3.4), (5, 4.1), (6, 3.9), (32, 3.9)), 32,
        "Rapid-MLX#2195, derived",
    ),
    "m3-max": Curve(
        ((1, 1), (2, 1), (4, 1.28), (6, 2.04), (8, 2.5), (9, 3.14), (12, 3.74), (13, 3.94),
         (32, 3.98)), 32, "mlx#3863",
    ),
    "m3-ultra-31b": Curve(((1, 1), (5, 1.68), (8, 2.19), (11, 2.7), (32, 2.9)), 32, "mlxcel#1217"),
    "m4-pro": Curve(
        ((1, 1), (2, 1), (3, 1.13), (4, 1.43), (5, 1.75), (8, 2.84), (9, 3.6), (10, 4.5), (32, 4.5)),
        32, "mlx#3852",
    ),
    "m4-pro-2bit": Curve(
        ((1, 1), (2, 1.3), (3, 1.82), (4, 2.34), (5, 2.86), (8, 4.53), (10, 7.3), (32, 7.3)), 32,
        "mlx#3852",
    ),
    "m4-max-27b": Curve(
        ((1, 1), (2, 1.17), (3, 1.34), (4, 1.55), (5, 1.79), (7, 2.5), (9, 3.73), (32, 3.9)), 32,
        "mlx-serve generate.zig",
    ),
    "m5-max-70b": Curve(
        ((1, 1), (3, 1.11), (5, 1.45), (8, 2.2), (12, 3.2), (16, 3.9), (64, 3.9)), 64, "mlx#3791"
    ),
    "m5-max-27b": Curve(((1, 1), (2, 1.11), (3, 1.34), (12, 3.2), (64, 3.9)), 64, "rMLX#516"),
    "m5-max-27b-8bit": Curve(
        ((1, 1), (7, 1.62), (9, 1.71), (64, 2.0)), 64, "mlx-serve generate.zig"
    ),
    "m5-max-30b-a3b": Curve(
        ((1, 1), (2, 1.59), (3, 1.85), (5, 2.44), (8, 3.32), (64, 8.0)), 64, "vllm-mlx#763"
    ),
    "m3-ultra-glm": Curve(((1, 1), (2, 2.2), (5, 4.0), (32, 12.0)), 32, "omlx#2077, one point"),
    "bf16-m3-ultra": Curve(((1, 1), (2, 1.99), (16, 2.0), (32, 2.0)), 32, "mlx#4265, mlx#3888"),
    "fp-modes": Curve(((1, 1), (2, 1.4), (4, 2.2), (13, 4.5), (32, 5)), 32, "mlx#3764, derived"),
}  # fmt: skip
"""By the names that `replay --cost` takes."""


def prior_for(model: nn.Module) -> Curve:
    """The curve of a machine like this one, for weights and layers like this model's."""
    name = str(mx.device_info().get("device_name", ""))
    layers = model.modules()
    bits = [layer.bits for layer in layers if hasattr(layer, "bits")]
    experts = any("Switch" in type(layer).__name__ for layer in layers)
    modes = {getattr(layer, "mode", "affine") for layer in layers if hasattr(layer, "bits")}
    return CURVES.get(_like(name, bits, experts, modes), MILDEST)


def _like(name: str, bits: list[Any], experts: bool, modes: set[str]) -> str:
    """Name of the curve measured on the nearest machine; "" where none is near."""
    chip = name.removeprefix("Apple ")
    if not chip.startswith(("M1", "M2", "M3", "M4", "M5")):
        return ""
    if experts:
        return "m5-max-30b-a3b"
    if not bits:
        return "bf16-m3-ultra" if chip == "M3 Ultra" else ""
    if max(bits) >= 8:
        return "m5-max-27b-8bit"
    if modes != {"affine"}:
        return "fp-modes"
    if chip[:2] in ("M1", "M2"):
        return "" if "Ultra" in chip else "m1-m2"
    if min(bits) <= 2:
        return "m4-pro-2bit"
    return {"M3": "m3-max", "M4": "m4-pro", "M5": "m5-max-27b"}[chip[:2]]
