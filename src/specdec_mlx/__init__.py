"""Speculative decoding for mlx-lm: the same text, sooner."""

from specdec_mlx.cli import backends as _backends

try:
    import mlx.core as _mlx_core  # noqa: F401 (all that follows needs it)
except ImportError as _error:
    raise _backends.without_mlx(_error) from None

from specdec_mlx.checks import CheckReport as CheckReport
from specdec_mlx.checks import check as check
from specdec_mlx.draft_length.policy import DraftLength as DraftLength
from specdec_mlx.draft_length.tuning import Tuning as Tuning
from specdec_mlx.drafters.first_of import FirstOf as FirstOf
from specdec_mlx.drafters.grammar import Grammar as Grammar
from specdec_mlx.drafters.grammar import GrammarDrafter as GrammarDrafter
from specdec_mlx.drafters.grammar import GrammarProcessor as GrammarProcessor
from specdec_mlx.drafters.model import ModelDrafter as ModelDrafter
from specdec_mlx.drafters.ngram import NGramDrafter as NGramDrafter
from specdec_mlx.drafters.prompt_lookup import PromptLookupDrafter as PromptLookupDrafter
from specdec_mlx.drafters.registry import drafter_names as drafter_names
from specdec_mlx.drafters.registry import make_drafter as make_drafter
from specdec_mlx.errors import CacheRollbackError as CacheRollbackError
from specdec_mlx.errors import DraftError as DraftError
from specdec_mlx.errors import GrammarError as GrammarError
from specdec_mlx.errors import LogitsError as LogitsError
from specdec_mlx.errors import MissingBackendError as MissingBackendError
from specdec_mlx.errors import MissingPackageError as MissingPackageError
from specdec_mlx.errors import ModelFolderError as ModelFolderError
from specdec_mlx.errors import PromptError as PromptError
from specdec_mlx.errors import TokenizerMismatchError as TokenizerMismatchError
from specdec_mlx.errors import UnknownNameError as UnknownNameError
from specdec_mlx.generation import SpeculativeResponse as SpeculativeResponse
from specdec_mlx.generation import Text as Text
from specdec_mlx.generation import generate as generate
from specdec_mlx.generation import stream_generate as stream_generate
from specdec_mlx.loop import Token as Token
from specdec_mlx.loop import speculate as speculate
from specdec_mlx.mlx_lm_plugin import MlxLmVersionError as MlxLmVersionError
from specdec_mlx.mlx_lm_plugin import Speculation as Speculation
from specdec_mlx.mlx_lm_plugin import install as install
from specdec_mlx.mlx_lm_plugin import installed as installed
from specdec_mlx.mlx_lm_plugin import uninstall as uninstall
from specdec_mlx.rules.block import Block as Block
from specdec_mlx.rules.lossy import Lenient as Lenient
from specdec_mlx.rules.lossy import Typical as Typical
from specdec_mlx.rules.rejection import Rejection as Rejection
from specdec_mlx.sampling.distribution import Sampling as Sampling
from specdec_mlx.stats.account import SpeculationStats as SpeculationStats
from specdec_mlx.target.exactness import ProbeReport as ProbeReport
from specdec_mlx.target.exactness import probe as probe
from specdec_mlx.types import AcceptanceRule as AcceptanceRule
from specdec_mlx.types import Draft as Draft
from specdec_mlx.types import DraftContext as DraftContext
from specdec_mlx.types import Drafter as Drafter
from specdec_mlx.types import DraftSession as DraftSession

__version__ = "0.1.0"
