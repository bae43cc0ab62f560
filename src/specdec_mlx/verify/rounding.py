"""How far rounding may take a model's numbers apart."""

from __future__ import annotations

import mlx.core as mx

ROUNDING = {mx.float32: 1e-3, mx.bfloat16: 0.25, mx.float16: 0.05}
"""Difference that rounding explains, relative to the spread of the logits; a wrong mask is above.

Measured on 123 tiny architectures: in float32 the exact ones stay below 1e-4 and the others reach
0.7 and 1.6. Last places reach 0.24 in bfloat16 and 0.04 in float16, both in latent attention; where
another expert is chosen a row is up to 1.8 off, which is found if it is among those measured.
"""


def is_rounding(difference: float, spread: float, dtype: mx.Dtype) -> bool:
    """True if rounding in this type explains a difference of numbers with this spread."""
    return difference <= ROUNDING.get(dtype, 1e-3) * max(spread, 1e-6)
