"""Caches of prompts that were read, in memory and, if the server was given a folder, in files.

One entry stands for a conversation. Where its caches cannot be shortened, the ends of the shorter
entries that it takes the place of are states to go back to.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf
from typing import TYPE_CHECKING, Any

from specdec_mlx.caches import Rollback, leaves, strategy_for
from specdec_mlx.errors import CacheRollbackError
from specdec_mlx.memory.drafter_states import num_common

if TYPE_CHECKING:
    from specdec_mlx.server.prefix_files import PrefixFiles

MOST_POINTS = 16  # positions of one conversation at which states are kept

States = dict[int, list[Any]]
"""Position -> copies, as they were there, of the caches that cannot be shortened."""


def stateful(caches: Sequence[Any]) -> list[Any]:
    """Those of the caches that may go back only to a copy."""
    return [cache for cache in leaves(caches) if strategy_for(cache).must_restore]


def thinned(at: Mapping[int, list[Any]], end: int) -> States:
    """The states at `MOST_POINTS` positions at most: the first, and more the nearer to the end."""
    left = dict(sorted(at.items()))
    while len(left) > MOST_POINTS:
        before, *inner = [*left, end]
        gaps = zip([before, *inner], inner, inner[1:], strict=False)
        del left[min(gaps, key=lambda gap: (gap[2] - gap[0]) / (end - gap[1] + 1))[1]]
    return left


@dataclass(eq=False)
class Prefix:
    """The caches of a conversation.

    Attributes:
        place: key of the model that made the caches; no other model gets them.
        tokens: what the caches hold, token ids or keys of pictures.
        caches: [layers].
        at: states before the end of `tokens`.
    """

    place: Hashable
    tokens: list[int]
    caches: list[Any]
    at: States = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        caches = chain(self.caches, *self.at.values())
        return sum(int(cache.nbytes) for cache in caches)

    def shortened(self, position: int) -> Prefix:
        """A copy that ends at `position`, or at the last position before it that it can go to."""
        caches = copy.deepcopy(self.caches)
        rollback = Rollback(caches, len(self.tokens))
        if (point := max((p for p in self.at if p <= position), default=0)) > 0:
            states = iter(self.at[point])
            pairs = ((strategy_for(cache), cache) for cache in leaves(caches))
            saved = [s.save(next(states)) if s.must_restore else None for s, _ in pairs]
            rollback.checkpoints = [(point, saved)]
        reached = 0
        with suppress(CacheRollbackError):
            reached = rollback.rewind_to(position)
        at = {p: states for p, states in self.at.items() if p < reached}
        return Prefix(self.place, self.tokens[:reached], caches, at)


class Prefixes:
    """The most recent entries of all models.

    Args:
        most_entries: of all models together.
        most_bytes: of all entries together; None for any number.
    """

    def __init__(self, most_entries: int, most_bytes: int | None = None) -> None:
        self.most_entries = most_entries
        self.most_bytes = inf if most_bytes is None else most_bytes
        self.entries: list[Prefix] = []  # the least recently used one first

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    def fetch_nearest_cache(
        self, place: Hashable, tokens: list[int], files: PrefixFiles | None = None
    ) -> tuple[list[Any] | None, list[int]]:
        """The cache [layers] that holds most of `tokens`, or None, and the tokens it lacks.

        One token is always left to feed. files: of the place, where more may be held.
        """
        known = tokens[:-1]
        nearest = self._nearest(place, known)
        if files is not None and (longer := files.longer(known, len(nearest.tokens))) is not None:
            self._add(Prefix(place, *longer))
            nearest = self._nearest(place, known)
        if not nearest.tokens:
            return None, tokens
        # The next text inherits the states of this entry, even if it departs from the first entry.
        if stateful(nearest.caches):
            self._add(replace(nearest, caches=copy.deepcopy(nearest.caches)))
        return nearest.caches, tokens[len(nearest.tokens) :]

    def _nearest(self, place: Hashable, tokens: list[int]) -> Prefix:
        """A copy of the entry that holds most of the tokens, as far as it holds them."""
        nearest = Prefix(place, [], [])
        known = [(num_common(entry.tokens, tokens), entry) for entry in self._of(place)]
        # The entry with most in common may have no state near there, so that another saves more.
        for common, entry in sorted(known, key=lambda one: one[0], reverse=True):
            if common > len(nearest.tokens):
                reached = entry.shortened(common)
                if len(reached.tokens) > len(nearest.tokens):
                    nearest = reached
                    self.entries.remove(entry)
                    # The most recently used entry is the last.
                    self.entries.append(entry)
        return nearest

    def insert_cache(
        self,
        place: Hashable,
        tokens: list[int],
        caches: list[Any],
        files: PrefixFiles | None = None,
    ) -> None:
        """Keep the caches that hold `tokens`, in the place of those that hold a part of them.

        files: of the place, to keep them in a file too.
        """
        at: States = {}
        if stateful(caches):
            for before in self._of(place):
                if tokens[: len(before.tokens)] == before.tokens:
                    self.entries.remove(before)
                    at |= before.at | {len(before.tokens): stateful(before.caches)}
        at.pop(len(tokens), None)
        entry = Prefix(place, tokens, list(caches), thinned(at, len(tokens)))
        self._add(entry)
        if files is not None:
            files.save(entry)

    def _of(self, place: Hashable) -> list[Prefix]:
        return [entry for entry in self.entries if entry.place == place]

    def _add(self, entry: Prefix) -> None:
        """Add an entry, in the place of those that it can be shortened to."""
        least = len(entry.tokens) if stateful(entry.caches) else 0
        for old in self._of(entry.place):
            if least <= len(old.tokens) and entry.tokens[: len(old.tokens)] == old.tokens:
                self.entries.remove(old)
        self.entries.append(entry)
        self.trim_to(self.most_bytes)

    def trim_to(self, most_bytes: float) -> None:
        """Forget the least recently used entries that are too many, or too large."""
        while self.entries and (len(self.entries) > self.most_entries or self.nbytes > most_bytes):
            del self.entries[0]
