"""Rules by name, and the rule that chooses among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specdec_mlx.errors import UnknownNameError
from specdec_mlx.options import split_spec
from specdec_mlx.rules.block import Block
from specdec_mlx.rules.lossy import Lenient, Typical
from specdec_mlx.rules.match import Coupled, Match
from specdec_mlx.rules.rejection import Rejection
from specdec_mlx.types import (
    AcceptanceRule,
    Agreement,
    Draft,
    Randomness,
    TargetRows,
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
"""What `rule=` knows, by name."""


def rule_names() -> list[str]:
    """Names that `rule=` takes."""
    return list(RULES)


def make_rule(choice: str | AcceptanceRule) -> AcceptanceRule:
    """The rule that a caller passed as `rule`.

    choice: a rule, or NAME or NAME:key=value,..., such as "lenient:lenience=0.5" and
    "typical:epsilon=0.09,delta=0.3". Raises UnknownNameError, and ValueError for options that the
    rule does not take.
    """
    if not isinstance(choice, str):
        if isinstance(choice, AcceptanceRule) and not isinstance(choice, type):
            return choice
        raise ValueError(f"rule={choice!r}: expected a name or an instance of an AcceptanceRule.")
    name, options = split_spec(choice)
    if name not in RULES:
        raise UnknownNameError(f"Unknown rule {name!r}. Known: {', '.join(RULES)}.")
    try:
        return RULES[name](**options)
    except TypeError as error:
        raise ValueError(f"Rule {choice!r}: {_reason(name, options, error)}.") from error


def _reason(name: str, options: dict[str, object], error: TypeError) -> str:
    """Why a rule could not be made."""
    takes_none = not getattr(RULES[name], "__dataclass_fields__", None)
    return f"{name} takes no options" if options and takes_none else str(error)
