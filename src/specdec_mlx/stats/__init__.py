"""Accounts of generations, counterfactuals, and what theory expects."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec_mlx.stats.account import SpeculationStats as SpeculationStats


def __getattr__(name: str) -> Any:
    """Import the account when it is first used."""
    if name == "SpeculationStats":
        from specdec_mlx.stats.account import SpeculationStats

        return SpeculationStats
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
