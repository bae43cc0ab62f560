"""Priors by machine: what a pass over m rows costs on Apple chips, out of `chips.tsv`.

A quantized product reads the weights once for a few rows and then in tiles, of 32 rows, or of 64 on
chips with neural accelerators: a staircase.
"""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

WIDTHS = (2, 3, 4, 5, 6, 9, 13, 20, 32, 48, 64)
"""Rows of the passes that are chosen from: the last ones before a step of some curve, and 20 and 48
for machines without tiles. A draft of K tokens is K + 1 rows."""


class Curve(NamedTuple):
    """Costs of passes on one machine.

    points: (rows, cost), the cost of one row being 1; straight lines between them. tile: rows of a
    further tile, each of which costs as much as the widest pass named; 0: the last slope goes on.
    """

    points: tuple[tuple[int, float], ...]
    tile: int = 0

    def __call__(self, rows: int) -> float:
        """Cost of a pass over `rows` >= 1."""
        widest, most = self.points[-1]
        if self.tile and rows > widest:
            return most * -(-rows // self.tile)
        i = min(max(1, bisect_right(self.points, (rows, 0.0))), len(self.points) - 1)
        (m0, c0), (m1, c1) = self.points[i - 1 : i + 1]
        return c0 + (c1 - c0) * (rows - m0) / (m1 - m0)

    def steps(self) -> list[int]:
        """Rows at which a line begins or ends."""
        tiles = [self.tile + 1, 2 * self.tile + 1] if self.tile else []
        return [*(rows for rows, _ in self.points), *tiles]


def _read() -> dict[str, Curve]:
    lines = Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8").splitlines()
    curves = {}
    for line in lines:
        if not line.startswith(("#", "name\t")):
            name, costs, tile, *_ = line.split("\t")
            pairs = [pair.split(":") for pair in costs.split()]
            curves[name] = Curve(tuple((int(m), float(cost)) for m, cost in pairs), int(tile))
    return curves


CURVES = _read()
"""By the names that `replay --cost` takes."""

MILDEST = CURVES["mildest"]
"""Where nothing is known of a machine; two measurements correct it."""


def prior_for(model: nn.Module) -> Curve:
    """The curve of the machine nearest to this one, for weights and layers like this model's."""
    chip = str(mx.device_info().get("device_name", "")).removeprefix("Apple ")
    layers = model.modules()
    bits = [layer.bits for layer in layers if hasattr(layer, "bits")]
    if not chip.startswith(("M1", "M2", "M3", "M4", "M5")):
        return MILDEST
    if any("Switch" in type(layer).__name__ for layer in layers):
        return CURVES["m5-max-30b-a3b"]
    if not bits:
        return CURVES["bf16-m3-ultra"] if chip == "M3 Ultra" else MILDEST
    if max(bits) >= 8:
        return CURVES["m5-max-27b-8bit"]
    if chip[:2] in ("M1", "M2"):
        is_affine = any(getattr(layer, "mode", "affine") == "affine" for layer in layers)
        return MILDEST if "Ultra" in chip else CURVES["m1-m2" if is_affine else "fp-modes"]
    if min(bits) <= 2:
        return CURVES["m4-pro-2bit"]
    return CURVES[{"M3": "m3-max", "M4": "m4-pro", "M5": "m5-max-27b"}[chip[:2]]]
