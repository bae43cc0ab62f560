"""Acceptance rules: how much of a draft is kept, and what follows."""

from specdec_mlx.rules.arithmetic import acceptance_probability, residual
from specdec_mlx.rules.block import Block
from specdec_mlx.rules.coins import CoinRule
from specdec_mlx.rules.rejection import Rejection

__all__ = [
    "Block",
    "CoinRule",
    "Rejection",
    "acceptance_probability",
    "residual",
]
