"""Caches of prompts that were read, in memory and, if the server was given a folder, in files.

One entry stands for a conversation. Where its caches cannot be shortened, the ends of the shorter
entries that it takes the place of are states to go back to.
"""

from __future__ import annotations

import copy
import json
import platform
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import PromptTrie

from specdec_mlx.drafters.fingerprint import content_digest
from specdec_mlx.files import read_text
from specdec_mlx.server.flags import ServerSettings
from specdec_mlx.server.models import Loaded
from specdec_mlx.server.prefix_files import (
    KeptPrefix,
    PrefixFiles,
    States,
    nearest_in,
    stateful,
    thinned,
)

UNBOUNDED = 2**63  # bytes


class Prefixes:
    """The most recent entries, of all models.

    most_bytes: of all of them together. files_of: the files of a place, None for none.
    """

    def __init__(
        self,
        most_entries: int,
        most_bytes: int = UNBOUNDED,
        files_of: Callable[[Any], PrefixFiles | None] = lambda place: None,
    ) -> None:
        self.most_entries, self.most_bytes = most_entries, most_bytes
        self.files_of = files_of
        self._trie = PromptTrie()
        self.entries: list[KeptPrefix] = []  # the least recently used one first

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(entry.nbytes for entry in self.entries)

    def fetch_nearest_cache(
        self, place: Hashable, tokens: list[int]
    ) -> tuple[list[Any] | None, list[int]]:
        """The cache [layers] that holds most of `tokens`, or None, and the tokens it lacks.

        One token is always left to feed.
        """
        known = tokens[:-1]
        nearest = self._nearest(place, known)
        if (files := self.files_of(place)) is not None:
            held, reached = files.longest(known)
            is_longer = reached > len(nearest.tokens)
            if is_longer and (loaded := files.load(held)) is not None:
                self._add(KeptPrefix(place, held, *loaded))
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
        for _, common, entry in nearest_in(self._trie, place, tokens):
            reached = entry.back_at(common)
            if len(reached.tokens) > len(nearest.tokens):
                nearest = reached
                self.entries.remove(entry)
                self.entries.append(entry)
        return nearest

    def insert_cache(
        self, place: Hashable, tokens: list[int], caches: list[Any], *, has_ended: bool = True
    ) -> None:
        """Keep the caches that hold `tokens`, in the place of those that hold a part of them.

        has_ended: they are of a whole text, which is kept in a file too.
        """
        at: States = {}
        while stateful(caches) and (before := self._within(place, tokens)) is not None:
            self._pop(before)
            at |= before.at | {len(before.tokens): stateful(before.caches)}
        at.pop(len(tokens), None)
        entry = KeptPrefix(place, tokens, list(caches), thinned(at, len(tokens)))
        self._add(entry)
        if has_ended and (files := self.files_of(place)) is not None:
            files.save(entry)

    def _within(self, place: Hashable, tokens: list[int]) -> KeptPrefix | None:
        """The longest entry whose text the tokens begin with, if there is one."""
        found = nearest_in(self._trie, place, tokens)
        whole = (entry for held, common, entry in found if common == len(held))
        return next(whole, None)

    def _pop(self, entry: KeptPrefix) -> None:
        self._trie.pop(entry.place, entry.tokens)
        self.entries.remove(entry)

    def _add(self, entry: KeptPrefix) -> None:
        """Add an entry, in the place of those that it can be shortened to."""
        replaced = [self._trie.add(entry.place, entry.tokens, entry)]
        if not stateful(entry.caches):
            replaced += [old for _, old in self._trie.pop_prefixes(entry.place, entry.tokens)]
        self.entries = [old for old in self.entries if old not in replaced]
        self.entries.append(entry)
        self.trim_to(self.most_bytes)

    def trim_to(self, most_bytes: int) -> None:
        """Forget the least recently used entries that are too many, or too large."""
        while self.entries and (len(self.entries) > self.most_entries or self.nbytes > most_bytes):
            self._pop(self.entries[0])


def prefixes_for(settings: ServerSettings, loaded: Callable[[], Loaded | None]) -> Prefixes:
    """The prefixes of a server; in files those of the model that is loaded, whole on this rank."""
    has_files = settings.prompt_cache and mx.distributed.init().size() == 1

    @lru_cache
    def opened(place: Any) -> PrefixFiles:
        model = loaded()
        assert model is not None
        assert settings.prompt_cache is not None
        folder = settings.prompt_cache.expanduser().absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return PrefixFiles(folder, digest(model, settings), settings.prompt_cache_limit)

    def files_of(place: Any) -> PrefixFiles | None:
        model = loaded()
        # files do not tell where pictures are
        is_loaded = model is not None and model.place == place and model.sight is None
        return opened(place) if has_files and is_loaded else None

    has_draft_caches = settings.flags.choice.model.name is not None
    most_entries = settings.prompt_cache_size * (2 if has_draft_caches else 1)
    most_bytes = settings.prompt_cache_bytes
    return Prefixes(most_entries, UNBOUNDED if most_bytes is None else most_bytes, files_of)


def digest(loaded: Loaded, settings: ServerSettings) -> str:
    """Digest of all that the caches of a model depend on, 16 hexadecimal digits."""
    adapter = loaded.adapter
    architecture = mx.device_info()["architecture"]
    about: Sequence[Any] = [
        loaded.config,
        adapter and json.loads(read_text(Path(adapter) / "adapter_config.json")),
        loaded.files if loaded.config.get("model_file") else (),  # code of its own
        (settings.kv_bits, settings.kv_group_size, settings.quantized_kv_start),
        f"{version('mlx-lm')}-{version('mlx')}-{platform.platform()}-{architecture}",
    ]
    return content_digest(loaded.model, about)[:16]
