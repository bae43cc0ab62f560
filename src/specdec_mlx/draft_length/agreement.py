"""What drafts that compete say about each other: a token that two drafters propose is likelier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import overload

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


def compared(drafts: Sequence[Draft]) -> list[tuple[list[int], Sequence[Evidence]]]:
    """The tokens of drafts, and what speaks for each of them, what the others say included.

    Args:
        drafts: point masses of at least one token that continue the same text.
    """
    tokens = [to_list(draft.tokens) for draft in drafts]
    return [
        (own, _evidence(own, draft.evidence, [*tokens[:i], *tokens[i + 1 :]]))
        for i, (own, draft) in enumerate(zip(tokens, drafts, strict=True))
    ]


class _Compared(Sequence[Evidence]):
    """What speaks for each token, put together when it is asked for: mostly a few are.

    drafters: the drafter's own evidence. shared: how many tokens another draft has too. here: class
    of the token behind those. behind: of all that follow.
    """

    __slots__ = ("behind", "drafters", "here", "shared")

    def __init__(
        self, drafters: Sequence[Evidence | int], shared: int, here: int, behind: int
    ) -> None:
        self.drafters, self.shared, self.here, self.behind = drafters, shared, here, behind

    def __len__(self) -> int:
        return len(self.drafters)

    def __iter__(self) -> Iterator[Evidence]:
        here, said = self.shared, SHARED
        latest: Evidence | int | None = None
        for i, evidence in enumerate(self.drafters):
            if i == here or i == here + 1:
                said = self.here if i == here else self.behind
                latest = None
            if evidence is not latest:  # else the same as the token before
                latest, found = evidence, _with_agreement(evidence, said)
            yield found

    @overload
    def __getitem__(self, index: int) -> Evidence: ...

    @overload
    def __getitem__(self, index: slice) -> list[Evidence]: ...

    def __getitem__(self, index: int | slice) -> Evidence | list[Evidence]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index < self.shared:
            return _with_agreement(self.drafters[index], SHARED)
        return _with_agreement(
            self.drafters[index], self.here if index == self.shared else self.behind
        )


def _evidence(
    own: Sequence[int],
    evidence: Sequence[Evidence | int] | None,
    others: Sequence[Sequence[int]],
) -> _Compared:
    """What speaks for each token of a draft, with the class of the others' agreement."""
    evidence = [0] * len(own) if evidence is None else evidence
    alike = [_num_alike(own, other) for other in others]
    shared = max(alike, default=0)
    is_disputed = shared < len(own) and any(
        same == shared < len(other) for same, other in zip(alike, others, strict=True)
    )
    here, behind = (DISPUTED, PARTED) if is_disputed else (ALONE, ALONE)
    return _Compared(evidence, shared, here, behind)


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
