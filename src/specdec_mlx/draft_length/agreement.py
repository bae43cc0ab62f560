"""What drafts that compete say about each other: a token that two drafters propose is likelier."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from specdec_mlx.token_ids import to_list
from specdec_mlx.types import Draft, Evidence

NOT_COMPARED = 0
SHARED = 1
"""Another draft begins with the same tokens, this one included."""
DISPUTED = 2
"""One that had begun with the same tokens has another one here."""
PARTED = 3
"""All that had begun with the same tokens have gone another way before."""
ALONE = 4
"""No other draft is as long, among those that had begun with the same tokens."""

NUM_CLASSES = 5


def compared(drafts: Sequence[Draft]) -> list[Draft]:
    """The drafts with what the others say in the evidence of each token.

    Args:
        drafts: point masses of at least one token that continue the same text.
    """
    tokens = [to_list(draft.tokens) for draft in drafts]
    return [
        Draft(draft.tokens, evidence=_evidence(draft, i, tokens)) for i, draft in enumerate(drafts)
    ]


def _evidence(draft: Draft, index: int, tokens: Sequence[Sequence[int]]) -> list[Evidence]:
    """What speaks for each token of one of the drafts, with the class of the others' agreement."""
    own = tokens[index]
    alike = [_num_alike(own, other) for i, other in enumerate(tokens) if i != index]
    shared = max(alike, default=0)
    disputed = any(
        shared == same < min(len(own), len(other))
        for same, other in zip(alike, (o for i, o in enumerate(tokens) if i != index), strict=True)
    )
    evidence = [Evidence()] * len(own) if draft.evidence is None else list(draft.evidence)
    here, behind = (DISPUTED, PARTED) if disputed else (ALONE, ALONE)
    classes = [SHARED] * shared + [here] + [behind] * len(own)
    return list(map(_with_agreement, evidence, classes))


def _num_alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two drafts begin with in common."""
    for n, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return n
    return min(len(one), len(other))


@lru_cache(maxsize=16384)
def _with_agreement(evidence: Evidence | int, agreement: int) -> Evidence:
    """The same few come up over and over."""
    if not isinstance(evidence, Evidence):
        evidence = Evidence(evidence)
    return evidence._replace(agreement=agreement)
