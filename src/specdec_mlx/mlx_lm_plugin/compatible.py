"""Versions of mlx-lm that can be extended, and a check of the functions that are replaced."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import mlx_lm

from specdec_mlx.loop import speculate

SERIES = "0.32"
INSTALL = f"pip install 'mlx-lm>={SERIES},<0.33'"

STEPS = ("generate_step", "speculative_generate_step")
"""Functions of `mlx_lm.generate` that are replaced."""


class MlxLmVersionError(RuntimeError):
    """This mlx-lm is not one that can be extended."""


def generate_module() -> Any:
    """The module `mlx_lm.generate`; as an attribute of the package that name is a function."""
    return importlib.import_module("mlx_lm.generate")


def check_version() -> None:
    """Raise MlxLmVersionError for another series of mlx-lm."""
    if not mlx_lm.__version__.startswith(f"{SERIES}."):
        raise MlxLmVersionError(
            f"mlx-lm {mlx_lm.__version__} is not of the {SERIES} series, the one that specdec_mlx "
            f"knows how to extend. {INSTALL}; or call specdec_mlx.generate, which replaces nothing."
        )


def check_steps() -> None:
    """Raise MlxLmVersionError unless the functions to replace are mlx-lm's own, as we know them."""
    check_version()
    known = inspect.signature(speculate).parameters.keys() | {
        "prompt",
        "draft_model",
        "num_draft_tokens",
    }
    for name in STEPS:
        step = getattr(generate_module(), name, None)
        if step is None:
            raise MlxLmVersionError(f"mlx_lm.generate has no {name}. {INSTALL}.")
        if getattr(step, "__module__", None) != "mlx_lm.generate":
            raise MlxLmVersionError(
                f"mlx_lm.generate.{name} has been replaced by one of {step.__module__}. Undo that "
                "first."
            )
        if unknown := inspect.signature(step).parameters.keys() - known:
            raise MlxLmVersionError(
                f"mlx_lm.generate.{name} takes {', '.join(sorted(unknown))}, which specdec_mlx "
                f"does not know. {INSTALL}."
            )
