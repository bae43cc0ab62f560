"""How large a difference rounding explains."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.models.anatomy import Call, watching
from specdec_mlx.models.loading import PerModel

ROUNDING = {mx.float32: 1e-3, mx.bfloat16: 0.25, mx.float16: 0.05}
"""Largest difference that rounding explains, relative to the spread of the logits.

Measured on 123 tiny architectures. In float32 the exact architectures stay below 1e-4, and the
others reach 0.7 and 1.6. Rounding reaches 0.24 in bfloat16 and 0.04 in float16, both in latent
attention. If rounding changes the choice of an expert, a row is up to 1.8 off. This shows if the
row is among the measured rows.
"""


@cache
def shortens_products() -> bool:
    """True if products of several float32 rows have 10 bits after the point, as in TF32."""
    # MLX does so by default on an M5 and on NVIDIA's GPUs, and not for a single row.
    width = 1024
    layer = nn.Linear(width, width, bias=False)
    layer.weight = mx.eye(width)
    rows = mx.full((8, width), 1 + 2.0**-12)
    return not mx.array_equal(layer(rows), rows)


def last_place(dtype: mx.Dtype) -> float:
    """Distance from 1 to the next number, in products of several rows on this device."""
    if dtype == mx.float32 and shortens_products():
        dtype = mx.float16
    return mx.finfo(dtype).eps


@PerModel
def rounding_of(model: nn.Module) -> float:
    """`ROUNDING` of the coarsest type that the model's modules are called with."""
    # The type of the logits does not tell: a model may cast them at the end.
    calls: list[Call] = []
    with watching([part for part in model.modules() if part is not model], calls.append):
        logits = model(mx.zeros((1, 2), mx.int32), cache=make_prompt_cache(model))
    handed = [logits, *(argument for _, argument, _ in calls if isinstance(argument, mx.array))]
    kinds = {array.dtype for array in handed if mx.issubdtype(array.dtype, mx.floating)}
    if mx.float32 in kinds and shortens_products():
        kinds |= {mx.float16}
    return max(ROUNDING.get(kind, ROUNDING[mx.float32]) for kind in kinds)


def is_rounding(model: nn.Module, difference: float, spread: float) -> bool:
    return difference <= rounding_of(model) * max(spread, 1e-6)
