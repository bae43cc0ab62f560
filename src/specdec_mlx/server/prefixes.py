"""Caches of prompts that were read, in memory and, if the server was given a folder, in files.

One entry stands for a conversation. Where its caches cannot be shortened, the ends of the shorter
entries that it takes the place of are states to go back to.
"""

from __future__ import annotations

import copy
import json
import platform
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import PromptTrie

from specdec_mlx.drafters.fingerprint import content_digest
from specdec_mlx.server.flags import ServerSettings
from specdec_mlx.server.models import Loaded
from specdec_mlx.server.prefix_files import (
    Points,
    PrefixFiles,
    States,
    back_at,
    split,
    stateful,
    thinned,
)

UNBOUNDED = 2**63  # bytes


@dataclass(eq=False)
class KeptPrefix:
    """Caches [layers] that hold `tokens`, with the states before their end.

    place: of the model that made them; another one's are never taken.
    """

    place: Hashable
    tokens: list[int]
    caches: list[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all caches and states."""
        return sum(int(cache.nbytes) for cache in self.caches)


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
        self.most_entries, self.most_bytes, self.files_of = (
            most_entries,
            most_bytes,
            files_of,
        )
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
        caches, at, length = self._nearest(place, known)
        if (files := self.files_of(place)) is not None:
            kept, reached = files.longest(known)
            if reached > length and (loaded := files.load(kept)) is not None:
                self._add(KeptPrefix(place, kept, loaded))
                caches, at, length = self._nearest(place, known)
        if length == 0:
            return None, tokens
        # which takes its states along, also where it leaves the entry's text
        if stateful(caches):
            self._add(
                KeptPrefix(place, tokens[:length], [*copy.deepcopy(caches), Points(at)])
            )
        return caches, tokens[length:]

    def _nearest(
        self, place: Hashable, tokens: list[int]
    ) -> tuple[list[Any], States, int]:
        """What `back_at` gives of the entry that holds most of the tokens."""
        found = self._trie.search(place, tokens)
        longest: tuple[list[Any], States, int] = [], {}, 0
        for held in filter(None, (found.exact, found.longer, found.shorter)):
            common = found.common_prefix if held is found.longer else len(held)
            entry = self._trie.get(place, held)
            reached = back_at(entry.caches, len(held), common)
            if reached[-1] > longest[-1]:
                longest = reached
                self.entries.remove(entry)
                self.entries.append(entry)
        return longest

    def insert_cache(
        self,
        place: Hashable,
        tokens: list[int],
        caches: list[Any],
        *,
        has_ended: bool = True,
    ) -> None:
        """Keep the caches that hold `tokens`, in the place of those that hold a part of them.

        has_ended: they are of a whole text, which is kept in a file too.
        """
        at: States = {}
        while stateful(caches) and (held := self._longest_held(place, tokens)):
            before, earlier = split(self._pop(place, held).caches)
            at |= earlier | {len(held): stateful(before)}
        at = thinned(
            {p: states for p, states in at.items() if p < len(tokens)}, len(tokens)
        )
        self._add(
            KeptPrefix(place, tokens, [*caches, Points(at)] if at else list(caches))
        )
        if has_ended and (files := self.files_of(place)) is not None:
            files.save(tokens, caches, at)

    def _longest_held(self, place: Hashable, tokens: list[int]) -> list[int] | None:
        found = self._trie.search(place, tokens)
        held: list[int] | None = found.exact or found.shorter
        return held

    def _pop(self, place: Hashable, tokens: list[int]) -> KeptPrefix:
        entry: KeptPrefix = self._trie.pop(place, tokens)
        self.entries.remove(entry)
        return entry

    def _add(self, entry: KeptPrefix) -> None:
        """Add an entry, in the place of those that it can be shortened to."""
        replaced = [self._trie.add(entry.place, entry.tokens, entry)]
        if not stateful(split(entry.caches)[0]):
            replaced += [
                old for _, old in self._trie.pop_prefixes(entry.place, entry.tokens)
            ]
        self.entries = [old for old in self.entries if old not in replaced]
        self.entries.append(entry)
        self.trim_to(self.most_bytes)

    def trim_to(self, most_bytes: int) -> None:
        """Forget the least recently used entries that are too many, or too large."""
        while self.entries and (
            len(self.entries) > self.most_entries or self.nbytes > most_bytes
        ):
            self._pop(self.entries[0].place, self.entries[0].tokens)


def prefixes_for(
    settings: ServerSettings, loaded: Callable[[], Loaded | None]
) -> Prefixes:
    """The prefixes of a server; in files those of the model that is loaded, whole on this rank."""
    opened, digests = lru_cache(PrefixFiles), dict[Any, str]()
    is_whole = mx.distributed.init().size() == 1

    def files_of(place: Any) -> PrefixFiles | None:
        model = loaded()
        if (
            settings.prompt_cache is None
            or model is None
            or model.place != place
            or not is_whole
        ):
            return None
        folder: Path = settings.prompt_cache.expanduser().absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        digests[place] = digests.get(place) or digest(model, settings)
        return opened(folder, digests[place], settings.prompt_cache_limit)

    has_draft_caches = settings.flags.choice.model.name is not None
    most_entries = settings.prompt_cache_size * (2 if has_draft_caches else 1)
    most_bytes = settings.prompt_cache_bytes
    return Prefixes(
        most_entries, UNBOUNDED if most_bytes is None else most_bytes, files_of
    )


def digest(loaded: Loaded, settings: ServerSettings) -> str:
    """Digest of all that the caches of a model depend on, 16 hexadecimal digits."""
    adapter = loaded.adapter
    architecture = mx.device_info()["architecture"]
    about: Sequence[Any] = [
        loaded.config,
        adapter and json.loads((Path(adapter) / "adapter_config.json").read_text()),
        loaded.files if loaded.config.get("model_file") else (),  # code of its own
        (settings.kv_bits, settings.kv_group_size, settings.quantized_kv_start),
        f"{version('mlx-lm')}-{version('mlx')}-{platform.platform()}-{architecture}",
    ]
    return content_digest(loaded.model, about)[:16]
