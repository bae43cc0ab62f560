"""Named errors. Each message says what happened, what was expected and what to do next."""


class PromptError(ValueError):
    """The prompt is empty or holds token ids that the target does not have."""


class DraftError(ValueError):
    """A drafter broke its contract: impossible tokens, or no distribution."""


class UnreadableError(ValueError):
    """A drafter wants states that this target does not expose."""


class VerdictError(ValueError):
    """A rule or sampler broke its contract: it kept tokens that were not drafted, or drew none."""


class LogitsError(ArithmeticError):
    """The target's logits are not numbers that a token can be drawn from."""


class CacheRollbackError(RuntimeError):
    """A cache did not give back the positions that were asked of it."""


class RowsError(ValueError):
    """Texts of this model cannot be rows of one batch."""


class TokenizerMismatchError(ValueError):
    """Draft and target model do not share a tokenizer."""


class UnknownNameError(ValueError):
    """A drafter, rule or policy of that name is not known."""


class ModelFolderError(ValueError):
    """A folder does not hold what a model needs."""


class DraftModelError(ValueError):
    """A draft model cannot be made lighter in the requested way."""


class HeadError(ValueError):
    """A trained head cannot be loaded, or does not fit its target."""


class TrainingError(ValueError):
    """A training cannot begin or continue with these arguments."""


class GrammarError(ValueError):
    """A grammar cannot be read, or cannot be followed."""


class MemoryFileError(ValueError):
    """A file is no memory, is damaged, or belongs to another tokenizer."""


class MissingPackageError(RuntimeError):
    """An optional package is not installed."""


class MissingBackendError(ImportError):
    """MLX has no backend here, or one that does not load."""


class MlxLmVersionError(RuntimeError):
    """This version of mlx-lm cannot be extended."""


class RankError(RuntimeError):
    """Ranks of one generation were called differently, or another rank failed."""
