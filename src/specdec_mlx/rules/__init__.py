"""Acceptance rules: how much of a draft is kept, and what follows."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec_mlx.rules.arithmetic import acceptance_probability as acceptance_probability
    from specdec_mlx.rules.arithmetic import residual as residual
    from specdec_mlx.rules.block import Block as Block
    from specdec_mlx.rules.coins import CoinRule as CoinRule
    from specdec_mlx.rules.lossy import Lenient as Lenient
    from specdec_mlx.rules.lossy import Typical as Typical
    from specdec_mlx.rules.rejection import Rejection as Rejection

_PLACES = {
    "Block": "specdec_mlx.rules.block",
    "CoinRule": "specdec_mlx.rules.coins",
    "Lenient": "specdec_mlx.rules.lossy",
    "Rejection": "specdec_mlx.rules.rejection",
    "Typical": "specdec_mlx.rules.lossy",
    "acceptance_probability": "specdec_mlx.rules.arithmetic",
    "residual": "specdec_mlx.rules.arithmetic",
}

__all__ = [*_PLACES]


def __getattr__(name: str) -> Any:
    """Import the module of a name when it is first used."""
    if name in _PLACES:
        return getattr(_import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
