"""Going back in a conversation whose caches cannot be shortened, by states kept at some positions.

Attention caches are cut at any position. Recurrent state, and windows that have wrapped, go back
only to a copy, so copies of these are kept with the caches of a conversation.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from specdec_mlx.errors import CacheRollbackError
from specdec_mlx.verify.rollback import Rollback
from specdec_mlx.verify.strategies import leaves, strategy_for

MOST_POINTS = 16  # positions of one conversation at which states are kept

States = dict[int, list[Any]]
"""Position -> copies, as they were there, of the caches that cannot be shortened."""


@dataclass(frozen=True)
class Points:
    """States after the caches of a conversation in mlx-lm's store, which counts their bytes."""

    at: States

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(cache.nbytes for caches in self.at.values() for cache in caches)

    def is_trimmable(self) -> bool:
        """False: what it stands with cannot be shortened."""
        return False


def stateful(caches: Sequence[Any]) -> list[Any]:
    """Those of the caches that may go back only to a copy."""
    return [cache for cache in leaves(caches) if strategy_for(cache).must_restore]


def split(kept: Sequence[Any]) -> tuple[list[Any], States]:
    """The caches of an entry of the store, and the states that are kept with them."""
    if isinstance(kept[-1], Points):
        return list(kept[:-1]), kept[-1].at
    return list(kept), {}


def thinned(at: Mapping[int, list[Any]], end: int) -> States:
    """The states at `MOST_POINTS` positions at most: the first, and more the nearer to the end."""
    left = dict(sorted(at.items()))
    while len(left) > MOST_POINTS:
        before, *inner = [*left, end]
        gaps = zip([before, *inner], inner, inner[1:], strict=False)
        del left[min(gaps, key=lambda gap: (gap[2] - gap[0]) / (end - gap[1] + 1))[1]]
    return left


def back_at(kept: Sequence[Any], length: int, position: int) -> tuple[list[Any], States, int]:
    """Copies of an entry's caches, of `length` tokens, at `position` or the last one before it that
    can be had; the states before it; and that position, 0 if there is none."""
    caches, at = split(kept)
    caches = copy.deepcopy(caches)
    rollback = Rollback(caches, length)
    if (point := max((p for p in at if p <= position), default=0)) > 0:
        states = iter(at[point])
        pairs = ((strategy_for(cache), cache) for cache in leaves(caches))
        saved = [s.save(next(states)) if s.must_restore else None for s, _ in pairs]
        rollback.checkpoints = [(point, saved)]
    reached = 0
    with suppress(CacheRollbackError):
        reached = rollback.rewind_to(position)
    return caches, {p: states for p, states in at.items() if p < reached}, reached
