"""Caches of prompts that were read, in memory and, if the server was given a folder, in files.

One entry stands for a conversation. Where its caches cannot be shortened, the ends of the shorter
entries that it takes the place of are states to go back to.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from specdec_mlx.server.prefix_files import (
    KeptPrefix,
    PrefixFiles,
    States,
    num_common,
    stateful,
    thinned,
)

UNBOUNDED = 2**63  # bytes


class Prefixes:
    """The most recent entries, of all models; most_bytes: of all of them together."""

    def __init__(self, most_entries: int, most_bytes: int | None = None) -> None:
        self.most_entries = most_entries
        self.most_bytes = UNBOUNDED if most_bytes is None else most_bytes
        self.entries: list[KeptPrefix] = []  # the least recently used one first

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(entry.nbytes for entry in self.entries)

    def fetch_nearest_cache(
        self, place: Hashable, tokens: list[int], files: PrefixFiles | None = None
    ) -> tuple[list[Any] | None, list[int]]:
        """The cache [layers] that holds most of `tokens`, or None, and the tokens it lacks.

        One token is always left to feed. files: of the place, where more may be held.
        """
        known = tokens[:-1]
        nearest = self._nearest(place, known)
        if files is not None and (found := files.longer(known, len(nearest.tokens))) is not None:
            self._add(KeptPrefix(place, *found))
            nearest = self._nearest(place, known)
        if not nearest.tokens:
            return None, tokens
        # which takes its states along, also where it leaves the entry's text
        if stateful(nearest.caches):
            self._add(replace(nearest, caches=copy.deepcopy(nearest.caches)))
        return nearest.caches, tokens[len(nearest.tokens) :]

    def _nearest(self, place: Hashable, tokens: list[int]) -> KeptPrefix:
        """A copy of the entry that holds most of the tokens, as far as it holds them."""
        nearest = KeptPrefix(place, [], [])
        known = [(num_common(entry.tokens, tokens), entry) for entry in self._of(place)]
        for common, entry in sorted(known, key=lambda one: one[0], reverse=True):
            if common > len(nearest.tokens):
                reached = entry.back_at(common)
                if len(reached.tokens) > len(nearest.tokens):
                    nearest = reached
                    self.entries.remove(entry)
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
        entry = KeptPrefix(place, tokens, list(caches), thinned(at, len(tokens)))
        self._add(entry)
        if files is not None:
            files.save(entry)

    def _of(self, place: Hashable) -> list[KeptPrefix]:
        return [entry for entry in self.entries if entry.place == place]

    def _add(self, entry: KeptPrefix) -> None:
        """Add an entry, in the place of those that it can be shortened to."""
        least = len(entry.tokens) if stateful(entry.caches) else 0
        for old in self._of(entry.place):
            if least <= len(old.tokens) and entry.tokens[: len(old.tokens)] == old.tokens:
                self.entries.remove(old)
        self.entries.append(entry)
        self.trim_to(self.most_bytes)

    def trim_to(self, most_bytes: int) -> None:
        """Forget the least recently used entries that are too many, or too large."""
        while self.entries and (len(self.entries) > self.most_entries or self.nbytes > most_bytes):
            del self.entries[0]
