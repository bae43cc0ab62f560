"""A horizontal cascade: a model writes the first tokens of a draft, look-up the later ones.

Later tokens are less likely to be reached, so that an expensive drafter is spent on the first ones
alone (Chen et al. 2023, arXiv 2312.11462). What look-up finds follows from the text and the tokens
drawn before it: each later token is a point mass, given those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.arguments import require, shown
from specdec_mlx.contracts import (
    Draft,
    DraftContext,
    Drafter,
    Evidence,
    GoesOn,
    ReadsTarget,
    SeesTarget,
    Session,
    Step,
    Stepwise,
    all_drafters,
    key_of,
    models_of,
    optional,
    session_parts,
)
from specdec_mlx.draft_length.chances import tokens_and_evidence
from specdec_mlx.drafters.choosing.registry import make_drafter
from specdec_mlx.drafters.first_of import Several, SeveralSession, context_for
from specdec_mlx.drafters.model import ModelDrafter
from specdec_mlx.lab.papers.ahead import begin_ahead, propose_after
from specdec_mlx.token_ids import to_ids, to_list

NUM_FIRST = 4
"""Tokens of a draft that the model writes. With the lab's, 1, 2 and 4 in drafts of 8 brought 2.9,
3.4 and 4.6 tokens a pass, for 0.34, 0.55 and 0.79 draft passes a token."""


@dataclass(frozen=True)
class Cascade(Several):
    """Drafts whose first tokens a model writes, and look-up the later ones where it finds any.

    first: a drafter that costs time, which drafts chains. then: a look-up that can be asked about a
    text that may not come (`SuffixDrafter`, `PromptLookupDrafter`), or its name. num_first: most
    tokens by `first`. Raises ValueError for parts that cannot be put together, and for a number
    below 1.
    """

    first: Drafter
    then: Drafter | str = "suffix"
    num_first: int = NUM_FIRST

    def __post_init__(self) -> None:
        then = make_drafter(self.then) if isinstance(self.then, str) else self.then
        if then is None:
            raise ValueError("Cascade: then='none' finds nothing. Give first= alone.")
        for part in all_drafters(then):
            if models_of(part) or isinstance(part, ReadsTarget):
                raise ValueError(
                    f"Cascade: then={shown(self.then)} runs a model or reads the target; expected "
                    "a look-up, such as 'suffix'."
                )
        require(self, self.num_first >= 1, "num_first", "an int >= 1")
        first, parts = self.first, getattr(self.first, "drafters", ())
        faults = {
            "is made of several. Give each its cascade.": len(parts) > 1,
            "drafts trees. Leave its branches out.": optional(first, "branches") > 1,
            "drafts on every rank. Leave that out.": optional(first, "on_every_rank"),
        }
        for fault in filter(faults.get, faults):
            raise ValueError(f"Cascade: first={type(first).__name__} {fault}")
        if isinstance(self.first, ReadsTarget):
            object.__setattr__(self, "features", self.first.features)
        object.__setattr__(self, "drafters", (self.first, then))

    @property
    def key(self) -> str:
        """The keys of both, and the number of first tokens."""
        return f"Cascade({', '.join(map(key_of, self.drafters))}, num_first={self.num_first})"

    def with_each(self, change: Callable[[Drafter], Drafter]) -> Cascade:
        """This cascade, of a changed model; its look-up stays."""
        return replace(self, first=change(self.first))

    def begin(self, prompt: Sequence[int], context: DraftContext) -> CascadeSession:
        """Begin with both; ValueError for a look-up that cannot be asked ahead."""
        first, then = self.drafters
        return CascadeSession(
            first.begin(list(prompt), context_for(first, context)),
            begin_ahead(self, then, prompt, context_for(then, context)),
            self.num_first,
        )


def cascade(
    model: nn.Module | Drafter,
    tokenizer: Any = None,
    then: str = "suffix",
    num_first: int = NUM_FIRST,
    **options: Any,
) -> Cascade:
    """The first tokens of a draft by a draft model or head, the later ones by look-up."""
    first = ModelDrafter(model, tokenizer, **options) if isinstance(model, nn.Module) else model
    return Cascade(first, then, num_first)


class CascadeSession(SeveralSession):
    """One generation of both, with the optional members of the first one's session but trees."""

    def __init__(self, first: Session, then: Any, num_first: int) -> None:
        """then: of `begin_ahead`. num_first: most tokens of a draft by the first."""
        self.then, self.num_first, self.sessions = then, num_first, (first, then)
        # in a wrapper, which is told of the end
        ((_, asked),) = session_parts(first, "")
        self.first = asked
        if isinstance(asked, Stepwise):
            self.propose_while = self._propose_while
        if isinstance(asked, SeesTarget):
            self.see = asked.see
            if (see_rejected := optional(asked, "see_rejected")) is not None:
                self.see_rejected = see_rejected

    def propose(self, limit: int) -> Draft:
        """Up to `limit` tokens, as many of them by the first as it may write."""
        draft = self.first.propose(min(limit, self.num_first))
        return self._continued(draft, limit, lambda evidence: Step.GO_ON)

    def _propose_while(self, limit: int, goes_on: GoesOn) -> Draft:
        assert isinstance(self.first, Stepwise)
        draft = self.first.propose_while(min(limit, self.num_first), goes_on)
        return self._continued(draft, limit, goes_on)

    def _continued(self, draft: Draft, limit: int, goes_on: GoesOn) -> Draft:
        """A draft, and what look-up finds after it, as far as that is worth its positions."""
        room = limit - len(draft)
        if not len(draft) or not room:
            return draft
        written = to_list(draft.tokens)
        found = propose_after(self.then, written, room)
        assert found.logprobs is None, "a look-up's draft is a point mass"
        evidence = [_evidence(each) for each in draft.evidence or ()]
        tail: list[int] = []
        for token, match in zip(*tokens_and_evidence(found), strict=True):
            evidence.append(_evidence(match)._replace(is_free=True))
            step = goes_on(evidence)
            if step is not Step.STOP_BEFORE:
                tail.append(token)
            if step is not Step.GO_ON:
                break
        if not tail:
            return draft
        tokens, logprobs = [*written, *tail], draft.logprobs
        if logprobs is not None:
            is_token = mx.arange(logprobs.shape[-1]) == to_ids(tail)[:, None]
            logprobs = mx.concatenate([logprobs, mx.where(is_token, 0.0, -mx.inf)])
        return Draft(tokens, logprobs, draft.evidence and evidence[: len(tokens)])


def _evidence(match: Evidence | int) -> Evidence:
    return match if isinstance(match, Evidence) else Evidence(match)
