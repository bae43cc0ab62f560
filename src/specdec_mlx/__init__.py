"""Speculative decoding for mlx-lm: the same text, sooner."""

from specdec_mlx.cli import backends as _backends

try:
    import mlx.core as _mlx_core  # noqa: F401 (all that follows needs it)
except ImportError as _error:
    raise _backends.without_mlx(_error) from None

from specdec_mlx.batch_generation import batch_generate, batch_stream_generate
from specdec_mlx.beams.generation import BeamSearchResponse, BeamText, beam_search
from specdec_mlx.checks import CheckReport, check
from specdec_mlx.draft_length.policy import DraftLength
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.drafters.best_of import BestOf
from specdec_mlx.drafters.cascade import Cascade
from specdec_mlx.drafters.first_of import FirstOf
from specdec_mlx.drafters.grammar import Grammar, GrammarDrafter, GrammarProcessor
from specdec_mlx.drafters.heads.drafter import HeadDrafter
from specdec_mlx.drafters.heads.early_exit import early_exit
from specdec_mlx.drafters.heads.loading import load_head
from specdec_mlx.drafters.heads.pard import PardDrafter
from specdec_mlx.drafters.lookahead import LookaheadDrafter
from specdec_mlx.drafters.model import ModelDrafter
from specdec_mlx.drafters.ngram import NGramDrafter
from specdec_mlx.drafters.ngram_table import NGramTable
from specdec_mlx.drafters.prompt_lookup import PromptLookupDrafter
from specdec_mlx.drafters.recycling import RecyclingDrafter
from specdec_mlx.drafters.registry import drafter_names, make_drafter
from specdec_mlx.drafters.suffix import SuffixDrafter
from specdec_mlx.drafters.tree_of import TreeOf
from specdec_mlx.errors import (
    CacheRollbackError,
    DraftError,
    DraftModelError,
    GrammarError,
    HeadError,
    LogitsError,
    MemoryFileError,
    MissingBackendError,
    MissingPackageError,
    ModelFolderError,
    PromptError,
    RowsError,
    TokenizerMismatchError,
    UnknownNameError,
    UnreadableError,
    VerdictError,
)
from specdec_mlx.generation import generate, stream_generate
from specdec_mlx.loop import Token, speculate
from specdec_mlx.memory import Memory
from specdec_mlx.mlx_lm_plugin import MlxLmVersionError, Speculation, install, installed, uninstall
from specdec_mlx.responses import SpeculativeResponse, Text
from specdec_mlx.rules.block import Block
from specdec_mlx.rules.lossy import Lenient, Typical
from specdec_mlx.rules.rejection import Rejection
from specdec_mlx.sampling.distribution import Sampling
from specdec_mlx.stats.account import SpeculationStats
from specdec_mlx.target.exactness import ProbeReport, probe
from specdec_mlx.types import AcceptanceRule, Draft, DraftContext, Drafter, DraftSession

__version__ = "0.1.0"

__all__ = [
    "AcceptanceRule",
    "BeamSearchResponse",
    "BeamText",
    "BestOf",
    "Block",
    "CacheRollbackError",
    "Cascade",
    "CheckReport",
    "Draft",
    "DraftContext",
    "DraftError",
    "DraftLength",
    "DraftModelError",
    "DraftSession",
    "Drafter",
    "FirstOf",
    "Grammar",
    "GrammarDrafter",
    "GrammarError",
    "GrammarProcessor",
    "HeadDrafter",
    "HeadError",
    "Lenient",
    "LogitsError",
    "LookaheadDrafter",
    "Memory",
    "MemoryFileError",
    "MissingBackendError",
    "MissingPackageError",
    "MlxLmVersionError",
    "ModelDrafter",
    "ModelFolderError",
    "NGramDrafter",
    "NGramTable",
    "PardDrafter",
    "ProbeReport",
    "PromptError",
    "PromptLookupDrafter",
    "RecyclingDrafter",
    "Rejection",
    "RowsError",
    "Sampling",
    "Speculation",
    "SpeculationStats",
    "SpeculativeResponse",
    "SuffixDrafter",
    "Text",
    "Token",
    "TokenizerMismatchError",
    "TreeOf",
    "Tuning",
    "Typical",
    "UnknownNameError",
    "UnreadableError",
    "VerdictError",
    "batch_generate",
    "batch_stream_generate",
    "beam_search",
    "check",
    "drafter_names",
    "early_exit",
    "generate",
    "install",
    "installed",
    "load_head",
    "make_drafter",
    "probe",
    "speculate",
    "stream_generate",
    "uninstall",
]


def __dir__() -> list[str]:
    """The public API and nothing else."""
    return [*__all__, "__version__"]
