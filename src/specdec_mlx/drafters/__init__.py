"""Ways to draft, one file each. They know the contracts, and nothing of the loop."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec_mlx.contracts import DraftContext as DraftContext
    from specdec_mlx.contracts import Features as Features
    from specdec_mlx.draft_length.store import Tuning as Tuning
    from specdec_mlx.draft_length.value import DraftLength as DraftLength
    from specdec_mlx.drafters.choosing.registry import drafter_names as drafter_names
    from specdec_mlx.drafters.choosing.registry import make_drafter as make_drafter
    from specdec_mlx.drafters.first_of import FirstOf as FirstOf
    from specdec_mlx.drafters.grammar import Grammar as Grammar
    from specdec_mlx.drafters.grammar import GrammarDrafter as GrammarDrafter
    from specdec_mlx.drafters.grammar import GrammarProcessor as GrammarProcessor
    from specdec_mlx.drafters.heads.drafter import HeadDrafter as HeadDrafter
    from specdec_mlx.drafters.heads.pard import PardDrafter as PardDrafter
    from specdec_mlx.drafters.reduced_models import first_layers as first_layers

_PLACES = {
    "DraftContext": "specdec_mlx.contracts",
    "DraftLength": "specdec_mlx.draft_length.value",
    "Features": "specdec_mlx.contracts",
    "FirstOf": "specdec_mlx.drafters.first_of",
    "Grammar": "specdec_mlx.drafters.grammar",
    "GrammarDrafter": "specdec_mlx.drafters.grammar",
    "GrammarProcessor": "specdec_mlx.drafters.grammar",
    "HeadDrafter": "specdec_mlx.drafters.heads.drafter",
    "PardDrafter": "specdec_mlx.drafters.heads.pard",
    "Tuning": "specdec_mlx.draft_length.store",
    "drafter_names": "specdec_mlx.drafters.choosing.registry",
    "first_layers": "specdec_mlx.drafters.reduced_models",
    "make_drafter": "specdec_mlx.drafters.choosing.registry",
}

__all__ = [*_PLACES]


def __getattr__(name: str) -> Any:
    """Import the module of a name when it is first used."""
    if name in _PLACES:
        return getattr(_import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
