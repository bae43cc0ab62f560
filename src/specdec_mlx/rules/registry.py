"""Rules by name, and the rule that chooses among them.

A package that declares

    [project.entry-points."specdec_mlx.rules"]
    my-rule = "my_package:MyRule"

gives its rule a name in `rule=` and on the command line. A built-in name stays with the built-in
rule, any other with the package whose name comes first.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from specdec_mlx.errors import MissingPackageError, UnknownNameError
from specdec_mlx.options import did_you_mean, split_spec
from specdec_mlx.rules.block import Block
from specdec_mlx.rules.lossy import Lenient, Typical
from specdec_mlx.rules.match import Coupled, Match
from specdec_mlx.rules.rejection import Rejection
from specdec_mlx.rules.trees import MultiRound, OwnTokens, Traversal, TreeRule
from specdec_mlx.types import (
    AcceptanceRule,
    Agreement,
    Draft,
    Randomness,
    TargetRows,
    TreeVerdict,
    Verdict,
)


@dataclass(frozen=True)
class Auto:
    """Match for point masses, greedy targets and samplers that can only be called, else block.

    For point masses match accepts as often as any rule can; for drafts drawn at random block
    verification does.
    """

    name = "auto"
    needs_distribution = False

    def decide(
        self, target: TargetRows, draft: Draft, randomness: Randomness
    ) -> Verdict | Agreement:
        """Let the rule decide that suits the draft."""
        has_choice = target.has_distribution and not target.greedy
        rule = self.for_draft(draft) if has_choice else Match()
        return rule.decide(target, draft, randomness)

    def for_draft(self, draft: Draft) -> AcceptanceRule:
        """Block for drafts drawn at random, else match."""
        return Match() if draft.logprobs is None else Block()


@dataclass(frozen=True)
class AutoOnTrees:
    """The same choice on trees: the target's own tokens, and traversal for drafts drawn at random.

    Each comes down to the rule that `Auto` takes where a tree does not fork.
    """

    def decide_tree(self, target: TargetRows, draft: Draft, randomness: Randomness) -> TreeVerdict:
        """Let the rule decide that suits the draft."""
        is_drawn = draft.logprobs is not None and target.has_distribution
        rule: TreeRule = Traversal() if is_drawn else OwnTokens()
        return rule.decide_tree(target, draft, randomness)


ON_TREES: dict[type, TreeRule] = {
    Auto: AutoOnTrees(),
    Match: OwnTokens(),
    Coupled: OwnTokens(),
    Rejection: MultiRound(),
    Block: Traversal(),
}
"""What decides about trees where a chain would be decided about by a rule of this very class."""


def tree_rule_for(rule: AcceptanceRule) -> TreeRule | None:
    """What decides about trees in a rule's place; None where it decides about chains alone."""
    return rule if isinstance(rule, TreeRule) else ON_TREES.get(type(rule))


LOSSLESS: dict[str, Callable[..., AcceptanceRule]] = {
    "auto": Auto,
    "match": Match,
    "coupled": Coupled,
    "rejection": Rejection,
    "block": Block,
}
"""Rules that leave the target's distribution alone."""

LOSSY: dict[str, Callable[..., AcceptanceRule]] = {"lenient": Lenient, "typical": Typical}
"""Rules that change it; asked for by name only."""

RULES = {**LOSSLESS, **LOSSY}
"""The built-in rules, by name."""

GROUP = "specdec_mlx.rules"
"""Entry points by which packages give their rules a name."""


def rule_names() -> list[str]:
    """Names that `rule=` takes: the built-in ones, and those of installed packages."""
    return [*RULES, *_installed()]


def make_rule(choice: str | AcceptanceRule) -> AcceptanceRule:
    """The rule that a caller passed as `rule`.

    Args:
        choice: a rule, or NAME or NAME:key=value,..., such as "lenient:lenience=0.5" and
            "typical:epsilon=0.09,delta=0.3".

    Raises:
        UnknownNameError: no rule has this name.
        ValueError: options that the rule does not take, or something that is no rule.
        MissingPackageError: the package that brings the rule cannot be imported.
    """
    if not isinstance(choice, str):
        return _checked(choice, choice)
    name, options = split_spec(choice)
    kind = RULES.get(name) or _load(name)
    try:
        return _checked(choice, kind(**options))
    except TypeError as error:
        raise ValueError(f"Rule {choice!r}: {_reason(name, kind, options, error)}") from error


def _checked(choice: object, rule: object) -> AcceptanceRule:
    """The rule, if it is one."""
    if isinstance(rule, AcceptanceRule) and not isinstance(rule, type):
        return rule
    raise ValueError(f"rule={choice!r}: expected a name or an instance of an AcceptanceRule.")


def _load(name: str) -> Callable[..., AcceptanceRule]:
    """What makes the rule of an installed package."""
    if name not in _installed():
        raise UnknownNameError(f"Unknown rule {name!r}. Known: {', '.join(rule_names())}.")
    entry = _installed()[name]
    try:
        kind: Callable[..., AcceptanceRule] = entry.load()
    except (ImportError, AttributeError) as error:
        raise MissingPackageError(
            f"Rule {name!r} of {_package(entry)} cannot be loaded: {error}. Install it anew."
        ) from error
    return kind


@functools.cache
def _installed() -> dict[str, EntryPoint]:
    """Entry points by name, looked up once in a process, since that reads every package's metadata.

    A UserWarning names those that want a name that is taken.
    """
    known: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=GROUP), key=_package):
        owner = "specdec-mlx" if entry.name in RULES else _package(known.get(entry.name, entry))
        if owner == _package(entry):
            known[entry.name] = entry
            continue
        warnings.warn(
            f"specdec_mlx: rule {entry.name!r} of {_package(entry)} is left out, since {owner} has "
            "one of that name. Uninstall one of them, or give the rule itself instead of its name.",
            stacklevel=2,
        )
    return known


def _package(entry: EntryPoint) -> str:
    """Name of the distribution that an entry point came with."""
    return entry.dist.name if entry.dist is not None else entry.module


def _reason(
    name: str, kind: Callable[..., Any], options: dict[str, object], error: TypeError
) -> str:
    """Why a rule could not be made."""
    taken = getattr(kind, "__dataclass_fields__", {})
    near = "".join(did_you_mean(option, taken) for option in options if option not in taken)
    return f"{name} takes no options." if options and not taken else f"{error}.{near}"
