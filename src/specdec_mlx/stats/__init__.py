"""What happened, what would have happened, and what theory expects."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec_mlx.stats.account import SpeculationStats as SpeculationStats

_PLACES = {
    "SpeculationStats": "specdec_mlx.stats.account",
}


def __getattr__(name: str) -> Any:
    """Import the module of a name when it is first used."""
    if name in _PLACES:
        return getattr(_import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
