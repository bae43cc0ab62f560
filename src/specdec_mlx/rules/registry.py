"""Rules by name, and the rule that chooses among them.

A package that declares

    [project.entry-points."specdec_mlx.rules"]
    my-rule = "my_package:MyRule"

gives its rule a name in `rule=` and on the command line. Built-in names stay, others go to the
first package by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

from specdec_mlx.contracts import (
    AcceptanceRule,
    Decision,
    Draft,
    Randomness,
    TargetRows,
)
from specdec_mlx.errors import UnknownNameError
from specdec_mlx.options import installed, load, make_with, split_spec, wrong
from specdec_mlx.rules.block import Block
from specdec_mlx.rules.match import Coupled, Match
from specdec_mlx.rules.rejection import Rejection


@dataclass(frozen=True)
class AutoRule:
    """Match for point masses, greedy targets and opaque samplers, else block."""

    name = "auto"
    needs_distribution = False

    def decide(
        self, target: TargetRows, draft: Draft, randomness: Randomness
    ) -> Decision:
        """Pass on to the rule that suits the draft."""
        has_choice = target.has_distribution and not target.greedy
        rule = self.for_draft(draft) if has_choice else Match()
        return rule.decide(target, draft, randomness)

    def for_draft(self, draft: Draft) -> AcceptanceRule:
        """Block for drafts drawn at random, else match."""
        return Match() if draft.logprobs is None else Block()


RULES: dict[str, Callable[..., AcceptanceRule]] = {
    "auto": AutoRule,
    "match": Match,
    "coupled": Coupled,
    "rejection": Rejection,
    "block": Block,
}
"""The rules of the library, by name. They leave the target's distribution alone."""

GROUP = "specdec_mlx.rules"  # entry points by which packages give their rules a name


def rule_names() -> list[str]:
    """Names that `rule=` takes: the built-in ones, and those of installed packages."""
    return [*RULES, *_installed()]


def make_rule(
    choice: str | AcceptanceRule, *, is_seeded: bool = False
) -> AcceptanceRule:
    """The rule that a caller passed: one, or NAME:key=value,... as "lenient:lenience=0.5".

    With a seed "auto" is coupled: under block the length of a draft, which timing chooses, would
    have a say in the text.

    Raises:
        UnknownNameError: no rule has this name.
        ValueError: options that the rule does not take, or something that is no rule.
        MissingPackageError: the package that brings the rule cannot be imported.
    """
    rule: Any = choice
    if isinstance(choice, str):
        name, options = split_spec(
            "coupled" if is_seeded and choice == "auto" else choice
        )
        if name not in RULES and name not in _installed():
            raise UnknownNameError(
                f"Unknown rule {name!r}. Known: {', '.join(rule_names())}."
            )
        kind = RULES.get(name) or load(_installed()[name], "rule")
        rule = make_with("rule", name, kind, options)
    if isinstance(rule, AcceptanceRule) and not isinstance(rule, type):
        return rule
    raise wrong("rule", choice, "a name or an instance of an AcceptanceRule")


@functools.cache
def _installed() -> dict[str, EntryPoint]:
    return installed(GROUP, "rule", RULES)
