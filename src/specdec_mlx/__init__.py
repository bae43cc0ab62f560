"""Speculative decoding for mlx-lm: the same text, sooner.

The other names stand in `drafters`, `rules`, `errors`, `stats` and `lab`, which has instruments,
proofs, training and systems of papers. `vision` reads images, and `generation` has the responses.
Importing this package has no effect: a module is imported when a name of it is used.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec_mlx import drafters as drafters
    from specdec_mlx import errors as errors
    from specdec_mlx import generation as generation
    from specdec_mlx import lab as lab
    from specdec_mlx import rules as rules
    from specdec_mlx import stats as stats
    from specdec_mlx import vision as vision
    from specdec_mlx.batch_generation import batch_generate as batch_generate
    from specdec_mlx.batch_generation import batch_stream_generate as batch_stream_generate
    from specdec_mlx.contracts import Draft as Draft
    from specdec_mlx.contracts import Drafter as Drafter
    from specdec_mlx.contracts import Session as Session
    from specdec_mlx.drafters.first_of import BestOf as BestOf
    from specdec_mlx.drafters.heads.loading import load_head as load_head
    from specdec_mlx.drafters.model import ModelDrafter as ModelDrafter
    from specdec_mlx.drafters.ngram import NGramDrafter as NGramDrafter
    from specdec_mlx.drafters.prompt_lookup import PromptLookupDrafter as PromptLookupDrafter
    from specdec_mlx.drafters.suffix import SuffixDrafter as SuffixDrafter
    from specdec_mlx.generation import generate as generate
    from specdec_mlx.generation import stream_generate as stream_generate
    from specdec_mlx.loop import speculate as speculate
    from specdec_mlx.memory import Memory as Memory
    from specdec_mlx.mlx_lm_plugin import install as install
    from specdec_mlx.mlx_lm_plugin import patched as patched
    from specdec_mlx.mlx_lm_plugin import uninstall as uninstall
    from specdec_mlx.options import Options as Options
    from specdec_mlx.sampling import Sampling as Sampling

__version__ = "0.1.0"

_PLACES = {
    "BestOf": "drafters.first_of",
    "Draft": "contracts",
    "Drafter": "contracts",
    "Memory": "memory",
    "ModelDrafter": "drafters.model",
    "NGramDrafter": "drafters.ngram",
    "Options": "options",
    "PromptLookupDrafter": "drafters.prompt_lookup",
    "Sampling": "sampling",
    "Session": "contracts",
    "SuffixDrafter": "drafters.suffix",
    "batch_generate": "batch_generation",
    "batch_stream_generate": "batch_generation",
    "generate": "generation",
    "install": "mlx_lm_plugin",
    "load_head": "drafters.heads.loading",
    "patched": "mlx_lm_plugin",
    "speculate": "loop",
    "stream_generate": "generation",
    "uninstall": "mlx_lm_plugin",
}
_ROOMS = ("drafters", "errors", "generation", "kernels", "lab", "rules", "stats", "vision")

__all__ = [*_PLACES]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return _import_from(name)
    if name in _PLACES:
        value = globals()[name] = getattr(_import_from(_PLACES[name]), name)
        return value
    raise AttributeError(
        f"module 'specdec_mlx' has no attribute {name!r}. Other drafters are in "
        "specdec_mlx.drafters, rules in .rules, errors in .errors, statistics in .stats, responses "
        "in .generation, and what is for research in .lab."
    )


def _import_from(module: str) -> Any:
    """A module of this package. MissingBackendError, with what to install, if MLX is missing."""
    try:
        return _import_module(f"specdec_mlx.{module}")
    except ImportError:
        # Reached for any failed import. `require_mlx` raises only if MLX itself is missing.
        from specdec_mlx.cli.backends import require_mlx

        require_mlx()
        raise


def __dir__() -> list[str]:
    return [*_PLACES, *_ROOMS, "__version__"]
