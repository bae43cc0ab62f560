"""Shapes and types of the package's own calls, checked while the tests run.

jaxtyping's import hook wraps each function of what stands in `CHECKED`, so that [K+1, V] meets
[K, V] where it is written so, and beartype checks the rest. Protocols whose members are computed
when they are asked for are not checked: the check itself would ask.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from beartype import BeartypeConf, BeartypeHintOverrides, beartype
from jaxtyping import install_import_hook

CHECKED = [
    "sampling",
    "drafters",
    "stats.counterfactual",
    "rules",
    "trees.tree_rules",
    "lab.papers",
]
ARITHMETIC = "residual point_mass draw leading_run namespace_of ratio capped_ratio at row"
UNCHECKED = {"make_rule", "acceptance_probability", "with_zero_row", *ARITHMETIC.split()}
"""Functions of `rules` that are not checked: `make_rule` has its own errors, and the exact tests
call the arithmetic thousands of times with shapes that follow from those of its callers."""


def install() -> None:
    """Check all that is imported from now on."""
    install_import_hook([f"specdec_mlx.{name}" for name in CHECKED], f"{__name__}.checked")


def checked(function: Any) -> Any:
    """A function whose arguments and result are checked at each call."""
    in_rules = function.__module__ == "specdec_mlx.rules"
    if "<locals>" in function.__qualname__ or (in_rules and function.__name__ in UNCHECKED):
        return function
    decorate: Any = beartype(conf=_conf())
    return decorate(function)


@cache
def _conf() -> BeartypeConf:
    types = import_module("specdec_mlx.contracts")
    protocols = [kind for kind in vars(types).values() if getattr(kind, "_is_protocol", False)]
    lazy = [kind for kind in protocols if not getattr(kind, "_is_runtime_protocol", False)]
    return BeartypeConf(
        hint_overrides=BeartypeHintOverrides(dict.fromkeys(lazy, object)),  # type: ignore[operator]
        is_pep484_tower=True,  # an int is a float, as everywhere
    )
