"""Drafters' sides of conversations, beside the caches of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from specdec_mlx.contracts import KeptStates
from specdec_mlx.drafters.heads.drafter import Head
from specdec_mlx.models.loading import PerModel
from specdec_mlx.server.loading import LoadedModel
from specdec_mlx.server.prefix_files import PrefixFiles, files_for_head
from specdec_mlx.server.prefixes import Prefixes

_objects: PerModel[object] = PerModel(lambda owner: object())


@dataclass(frozen=True)
class ServedStates(KeptStates):
    """States among the stored prefixes of a server. Those of heads are in files too.

    Attributes:
        prefixes: where the states are stored.
        loaded: the target. Without one there are no files.
    """

    prefixes: Prefixes
    loaded: LoadedModel | None = None

    def fetch(self, owner: nn.Module, tokens: Sequence[int]) -> tuple[list[Any] | None, int]:
        # `fetch_nearest_cache` leaves the last token to be fed.
        known, files = [*tokens, 0], self.files(owner)
        caches, rest = self.prefixes.fetch_nearest_cache(place_of(owner), known, files)
        return caches, len(known) - len(rest)

    def store(self, owner: nn.Module, tokens: Sequence[int], caches: list[Any]) -> None:
        files = self.files(owner)
        self.prefixes.insert_cache(place_of(owner), list(tokens), caches, files)

    def files(self, owner: nn.Module) -> PrefixFiles | None:
        """The files of a head. A draft model can read its text again, so it has none."""
        if not isinstance(owner, Head) or self.loaded is None:
            return None
        known, place = self.loaded.head_files, place_of(owner)
        if place not in known:
            known[place] = files_for_head(owner, self.loaded.prefix_files)
        return known[place]


def place_of(owner: nn.Module) -> tuple[str, object]:
    """Key among the prefixes of a loaded draft model or head."""
    return "drafter", _objects(owner)
