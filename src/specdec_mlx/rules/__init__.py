"""Acceptance rules: how much of a draft is kept, and what follows."""

from specdec_mlx.rules.arithmetic import acceptance_probability, residual
from specdec_mlx.rules.block import Block
from specdec_mlx.rules.coins import CoinRule, Rejection
from specdec_mlx.rules.lossy import Lenient, Typical

__all__ = [
    "Block",
    "CoinRule",
    "Lenient",
    "Rejection",
    "Typical",
    "acceptance_probability",
    "residual",
]
