"""Accounts of generations, and what theory expects."""

from specdec_mlx.stats.account import Rows as Rows
from specdec_mlx.stats.account import SpeculationStats as SpeculationStats

__all__ = ["Rows", "SpeculationStats"]
