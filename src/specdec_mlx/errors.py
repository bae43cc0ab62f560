"""Errors with a name: what happened, what was expected, what to do next."""


class PromptError(ValueError):
    """The prompt is empty or holds token ids that the target does not have."""


class DraftError(ValueError):
    """A drafter broke its contract: impossible tokens, or no distribution."""


class UnreadableError(ValueError):
    """A drafter wants to read states that this target does not show."""


class VerdictError(ValueError):
    """A rule or sampler broke its contract: what was not drafted was kept, or no token follows."""


class LogitsError(ArithmeticError):
    """The target's logits are not numbers that a token can be drawn from."""


class CacheRollbackError(RuntimeError):
    """A cache did not give back what was asked of it."""


class RowsError(ValueError):
    """A model's texts cannot be rows of one batch."""


class TokenizerMismatchError(ValueError):
    """Draft and target model do not share a tokenizer."""


class UnknownNameError(ValueError):
    """A drafter, rule or policy of that name is not known."""


class ModelFolderError(ValueError):
    """A folder does not hold what a model needs."""


class DraftModelError(ValueError):
    """A draft model cannot be made lighter in the way that was asked for."""


class HeadError(ValueError):
    """A trained head cannot be loaded, or does not fit its target."""


class TrainingError(ValueError):
    """A training cannot begin, or cannot go on, as it was asked for."""


class GrammarError(ValueError):
    """A grammar cannot be read, or cannot be followed."""


class MemoryFileError(ValueError):
    """A file is no memory, is damaged, or belongs to another tokenizer."""


class MissingPackageError(RuntimeError):
    """An optional package is not installed."""


class MissingBackendError(ImportError):
    """MLX has no backend here, or one that does not load."""


class MlxLmVersionError(RuntimeError):
    """This mlx-lm is not one that can be extended."""


class RankError(RuntimeError):
    """Ranks of one generation do not do the same, or another one failed."""
