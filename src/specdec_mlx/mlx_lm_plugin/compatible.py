"""Which mlx-lm this is, and whether what we replace in it is what we know."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import mlx_lm

SERIES = "0.32"
INSTALL = f"pip install 'mlx-lm>={SERIES},<0.33'"

_SHARED = {
    "prompt",
    "model",
    "stream",
    "max_tokens",
    "sampler",
    "logits_processors",
    "prompt_cache",
    "prefill_step_size",
    "kv_bits",
    "kv_group_size",
    "quantized_kv_start",
}

STEPS: dict[str, set[str]] = {
    "generate_step": _SHARED | {"max_kv_size", "prompt_progress_callback", "input_embeddings"},
    "speculative_generate_step": _SHARED | {"draft_model", "num_draft_tokens"},
}
"""The functions of `mlx_lm.generate` that are replaced, and the parameters that we carry out."""


class MlxLmVersionError(RuntimeError):
    """This mlx-lm is not one that can be extended."""


def generate_module() -> Any:
    """The module `mlx_lm.generate`; as an attribute of the package that name is a function."""
    return importlib.import_module("mlx_lm.generate")


def check_version() -> None:
    """Raise MlxLmVersionError for a series of mlx-lm that we have not been tried with."""
    if not mlx_lm.__version__.startswith(f"{SERIES}."):
        raise MlxLmVersionError(
            f"mlx-lm {mlx_lm.__version__} is not of the {SERIES} series, the one that specdec_mlx "
            f"knows how to extend. {INSTALL}; or call specdec_mlx.generate, which replaces nothing."
        )


def check_steps() -> None:
    """Raise MlxLmVersionError unless the functions to replace are mlx-lm's own, as we know them."""
    check_version()
    for name, known in STEPS.items():
        step = getattr(generate_module(), name, None)
        if step is None:
            raise MlxLmVersionError(f"mlx_lm.generate has no {name}. {INSTALL}.")
        if getattr(step, "__module__", None) != "mlx_lm.generate":
            raise MlxLmVersionError(
                f"mlx_lm.generate.{name} has been replaced by one of {step.__module__}. Undo that "
                "first."
            )
        unknown = inspect.signature(step).parameters.keys() - known
        if unknown:
            raise MlxLmVersionError(
                f"mlx_lm.generate.{name} takes {', '.join(sorted(unknown))}, which specdec_mlx "
                f"does not know. {INSTALL}."
            )
