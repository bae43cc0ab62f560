"""What a request to the server may say about speculation, and what its reply says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdec_mlx.draft_length.policy import NAMES
from specdec_mlx.drafters.registry import drafter_names
from specdec_mlx.errors import UnknownNameError
from specdec_mlx.mlx_lm_plugin.flags import MODEL_DRAFTER, NO_DRAFTER, Flags, first_of
from specdec_mlx.rules.registry import make_rule
from specdec_mlx.stats.account import SpeculationStats
from specdec_mlx.types import Drafter

LONGEST_DRAFT = 64
"""Longest draft that a request may ask for: each token of it is a position in a pass."""


@dataclass(eq=False)
class Requested:
    """How one request is to be served, and how it was.

    drafter: None for plain decoding. name: what the reply calls it. stats: the account of the
    speculative part, None before. batched: whether mlx-lm's batch served it, or its end.
    """

    drafter: Drafter | None
    name: str
    draft_length: int | str = "auto"
    rule: str = "auto"
    stats: SpeculationStats | None = None
    batched: bool = False

    def usage(self) -> dict[str, Any]:
        """The `speculation` object of a reply."""
        account = self.stats.as_dict() if self.stats is not None else {}
        return {"drafter": self.name, "batched": self.batched, **account}


class Menu:
    """The drafters that requests may name: those that need no argument, and those of the flags.

    A request names drafters without options; the options are the server's, from its own flags.
    """

    def __init__(self, flags: Flags) -> None:
        """Make the default drafter; raises what `Flags.make` raises."""
        self.flags = flags
        self._made: dict[str, Drafter] = {}
        self._specs = {spec.partition(":")[0]: spec for spec in flags.names}
        for name in self._specs:
            self._make(name)

    @property
    def names(self) -> list[str]:
        """Names that a request may give."""
        known = {name for name in drafter_names() if name != MODEL_DRAFTER}
        return sorted(known | self._specs.keys() | {NO_DRAFTER})

    @property
    def tokenizer(self) -> Any:
        """The draft model's tokenizer, None without a draft model."""
        return getattr(self._made.get(MODEL_DRAFTER), "tokenizer", None)

    def requested(self, body: dict[str, Any]) -> Requested:
        """What the body of a request says; raises ValueError in words for the client."""
        names = _names(body.get("drafter"))
        own_model = body.get("draft_model", "default_model") not in (None, "default_model")
        if names is not None and own_model:
            raise ValueError("Give drafter or draft_model, not both.")
        rule = body.get("rule", self.flags.rule)
        make_rule(rule)
        given = body.get("draft_length", body.get("num_draft_tokens"))
        length = self.flags.draft_length if given is None else _length(given)
        if own_model:
            return Requested(None, MODEL_DRAFTER, length, rule)
        chosen = list(self._specs) if names is None else [n for n in names if n != NO_DRAFTER]
        drafter = first_of([self._make(name) for name in chosen])
        return Requested(drafter, "+".join(chosen) or NO_DRAFTER, length, rule)

    def _make(self, name: str) -> Drafter:
        if name not in self._specs and name not in self.names:
            raise UnknownNameError(f"Unknown drafter {name!r}. Known: {', '.join(self.names)}.")
        if name not in self._made:
            self._made[name] = self.flags.make(self._specs.get(name, name))
        return self._made[name]


def _names(given: Any) -> Sequence[str] | None:
    """One name or several, as a list; None for the default."""
    names = [given] if isinstance(given, str) else given
    if names is None or (isinstance(names, list) and all(isinstance(n, str) for n in names)):
        return names
    raise ValueError(f"drafter must be a name or a list of names, not {given!r}")


def _length(given: Any) -> int | str:
    if given in NAMES:
        return str(given)
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given <= LONGEST_DRAFT:
        return given
    raise ValueError(
        f"draft_length must be an int from 0 to {LONGEST_DRAFT}, {' or '.join(NAMES)}, "
        f"not {given!r}"
    )
