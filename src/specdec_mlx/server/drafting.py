"""Who drafts for a request: the drafters of the server's flags, or those that the request names."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from specdec_mlx.arguments import name_in, unknown
from specdec_mlx.contracts import DraftContext, Drafter, all_drafters
from specdec_mlx.drafters.choosing.choice import (
    DraftModel,
    best_of,
    is_place_of_model,
    waits_for_model,
)
from specdec_mlx.drafters.choosing.registry import (
    MODEL_DRAFTER,
    NO_DRAFTER,
    drafter_names,
    takes,
)
from specdec_mlx.drafters.heads.loading import load_head
from specdec_mlx.duck_typed import as_given
from specdec_mlx.errors import HeadError, ModelFolderError, UnreadableError
from specdec_mlx.memory import Memory
from specdec_mlx.memory.persistent import PersistentStore
from specdec_mlx.mlx_lm_plugin.flags import KEY, USER, Flags
from specdec_mlx.models.loading import explained
from specdec_mlx.server.flags import DEFAULT_MODEL
from specdec_mlx.server.loading import LoadedModel
from specdec_mlx.server.requests import RequestError, TextRequest

MOST_MEMORIES = 64  # users or keys whose memories are kept; the least recently used are forgotten
NOT_HERE = "this server has no such model that it can load. Its log says why."


class Drafters:
    """Decides who drafts. The library's own `DrafterChoice` makes each drafter."""

    def __init__(self, flags: Flags) -> None:
        """Raises ValueError and MissingPackageError for a wrong flag, before a target is loaded."""
        self.flags, self.choice = flags, flags.drafting
        self._specs = {drafter_name(spec): str(spec) for spec in self.choice.ordered}
        self._memory_of = lru_cache(MOST_MEMORIES)(lambda owner: Memory())
        for spec in self._specs.values():
            # Drafters that need the target are made in `check`.
            if not (flags.waits_for_target and waits_for_model(spec)):
                self.choice.make(spec)

    def check(self, loaded: LoadedModel, *, is_default: bool) -> None:
        """Make the drafters of the flags for a model; raises ValueError if they do not fit it.

        A memory or a table must fit the model that was given at the start. It is left out for
        other models.
        """
        specs = self._specs_of(self._specs, loaded)
        drafters = [self._make(spec, loaded) for spec in specs.values()]
        # Token ids of another tokenizer would only draft nonsense.
        for file in [*files_of(drafters), self.flags.remembered]:
            if file is not None:
                if is_default:
                    file.check_tokenizer(loaded.tokenizer)
                file.leave_out_others()
        context = DraftContext(tokenizer=loaded.tokenizer)
        for drafter in filter(None, drafters):
            drafter.check(context)

    def choose(self, request: TextRequest, loaded: LoadedModel) -> tuple[Drafter | None, str]:
        """The drafter of a request, and its name; raises ValueError and MissingPackageError."""
        model = request.draft_model
        if model not in (None, DEFAULT_MODEL, self.choice.model.name):
            if request.drafters is not None:
                raise RequestError("Give drafter or draft_model, not both.")
            return self._draft_model(model, loaded), MODEL_DRAFTER
        names = self._specs if request.drafters is None else request.drafters
        specs = self._specs_of(names, loaded)
        owner = {USER: request.user, KEY: request.key}.get(self.flags.memory_for)
        memory = self._memory_of(owner) if owner else None  # the memory of everybody
        parts = [
            self.choice.make(spec, memory=memory)
            if memory is not None and takes(name, "memory")
            else self._make(spec, loaded)
            for name, spec in specs.items()
        ]
        return best_of(parts), "+".join(specs) or NO_DRAFTER

    def _specs_of(self, names: Iterable[str], loaded: LoadedModel) -> dict[str, str]:
        """The specs of drafters by their names; raises UnknownNameError."""
        specs = {name: self._specs.get(name, name) for name in names if name != NO_DRAFTER}
        for name in specs.keys() - self._specs.keys():
            if name not in drafter_names():
                raise unknown("drafter", name, drafter_names())
        return specs

    def _make(self, spec: str, loaded: LoadedModel) -> Drafter | None:
        """The drafter of a spec, made once for each loaded model."""
        if spec not in loaded.drafters:
            try:
                loaded.drafters[spec] = self.choice.make(spec, loaded.model)
            except (HeadError, UnreadableError) as error:
                # The server began with a text model, and a picture had it loaded by mlx-vlm.
                if loaded.sight is None:
                    raise
                logging.warning("%s does not draft beside pictures: %s", spec, error)
                loaded.drafters[spec] = None
        return loaded.drafters[spec]

    def _draft_model(self, name: str, loaded: LoadedModel) -> Drafter | None:
        """The drafter of a draft model or a head that a request names; the latest is kept.

        A head's files are read as safetensors or GGUF only, because others are programs.
        """
        if loaded.requested_draft_model[0] != name:
            try:
                model = DraftModel(name)
                if not model.is_head:
                    with explained(name):
                        pass
                loaded.requested_draft_model = "", None  # freed before the next one is loaded
                drafter = (
                    load_head(name, loaded.model, torch_files=False)
                    if model.is_head
                    else model.make()
                )
            except (ValueError, OSError, RuntimeError) as error:
                logging.warning("The draft model of a request is not loaded: %s", error)
                raise ModelFolderError(f"draft_model: {NOT_HERE}") from error
            loaded.requested_draft_model = name, drafter
        return loaded.requested_draft_model[1]


def drafter_name(spec: str) -> str:
    """The name of a drafter for clients; of a model's folder or repository the last part."""
    return Path(spec).name if is_place_of_model(spec) else name_in(spec)


def files_of(drafters: Iterable[Drafter | None]) -> list[PersistentStore]:
    """The memories and tables that drafters draw on."""
    parts: list[Any] = [as_given(part) for drafter in drafters for part in all_drafters(drafter)]
    values = [value for part in parts for value in getattr(part, "__dict__", {}).values()]
    return [value for value in values if isinstance(value, PersistentStore)]
