"""The models that requests may name, one of them loaded at a time."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

from specdec_mlx.draft_length.store import kept_tuning
from specdec_mlx.drafters.choosing.candidates import models_in
from specdec_mlx.errors import ModelFolderError
from specdec_mlx.models.loading import check_folder, explained, is_in_cache
from specdec_mlx.server.drafting import NOT_HERE, Drafters
from specdec_mlx.server.flags import DEFAULT_MODEL, ServerSettings, refused
from specdec_mlx.server.loading import LoadedModel, Loader
from specdec_mlx.server.prefix_files import files_for
from specdec_mlx.server.requests import RequestError, TextRequest

ANY_NAME = (
    " A server that is started with --any-model-name takes any unknown name for its own model."
)
NO_ADAPTER = (
    "model, adapters: this server cannot load them together. An adapter is a folder with an "
    "adapter_config.json, as mlx_lm.lora makes one. The log of the server says why."
)
PATH_STARTS = "/", ".", "~"  # of names that can only be paths

MLX_FILES = {"config.json", "model.safetensors.index.json", "tokenizer_config.json"}
"""Files of a repository in the Hugging Face cache that is listed, as mlx-lm's server does."""

Names = tuple[str, str | None]  # of a model and its adapter


class Models:
    """The models; `load_default`, `load` and what frees them belong to the engine's thread."""

    def __init__(self, settings: ServerSettings) -> None:
        """Make what needs no target; raises ValueError and MissingPackageError for a wrong flag."""
        self.settings, self.flags = settings, settings.flags
        self.loader, self.drafters = Loader(settings), Drafters(settings.flags)
        self.loaded: LoadedModel | None = None
        self.created = int(time.time())

    def names_of(self, request: TextRequest) -> Names:
        """Name and adapter of the model for a request.

        The adapter that was given at the start belongs to the given model, however a client
        spells its name. Raises RequestError for no model, and for what requests may not set.
        """
        self.settings.check(request)
        name, default = request.model, self.settings.model
        if not can_be_looked_up(name):
            raise self._not_here()
        loaded = None if self.loaded is None else self.loaded.name
        if loaded is not None and loaded != default and name == public_name(loaded):
            return loaded, request.adapter
        if default is not None and self._is_default(name, default):
            has_adapter = request.adapter is not None
            return default, request.adapter if has_adapter else self.settings.adapter_path
        if name in ("", DEFAULT_MODEL):
            raise RequestError("This server was started without --model. Name a model.")
        if not self.settings.allows_model(name):
            hint = "" if self.settings.any_model_name else ANY_NAME
            raise ModelFolderError(f"{refused('model', name)}{hint}")
        return name, request.adapter

    def _is_default(self, name: str, default: str) -> bool:
        """True for a name of the model that was given at the start."""
        if name in ("", DEFAULT_MODEL, default, public_name(default)):
            return True
        folder = Path(name).expanduser()
        if folder.exists():
            # The same folder may be spelled in several ways.
            return folder.resolve() == Path(default).expanduser().resolve()
        is_free = not name.startswith(PATH_STARTS) and not is_in_cache(name)
        return self.settings.any_model_name and is_free

    @contextmanager
    def _private(self, request: TextRequest) -> Iterator[None]:
        """Log the reason why a model cannot be loaded, and tell the client only that it cannot.

        The reason would tell which files are on this machine.
        """
        try:
            yield
        except (ValueError, OSError, RuntimeError) as error:
            logging.warning("A request's model cannot be loaded: %s", error)
            if request.adapter is not None:
                raise RequestError(NO_ADAPTER) from error
            is_default = self.names_of(request)[0] == self.settings.model
            raise self._not_here(is_default) from error

    def _not_here(self, is_default: bool = False) -> ModelFolderError:
        """The error for the name of a model. For a path it is the same, whatever is there."""
        takes_any = self.settings.any_model_name or self.settings.model is None
        return ModelFolderError(f"model: {NOT_HERE}{'' if takes_any or is_default else ANY_NAME}")

    def load_default(self) -> LoadedModel:
        """Load the model that was given at the start; raises the reason, which no client gets."""
        names = self.names_of(TextRequest())
        return self._replace(self.loader.open(*names, sees=False))

    def load(self, request: TextRequest) -> LoadedModel:
        """The model for a request, loaded; raises RequestError and ModelFolderError.

        The model before is freed once all files of this model were looked at.
        """
        names, loaded = self.names_of(request), self.loaded
        sees = bool(request.pictures) and self.loader.may_see(*names)
        if loaded is not None and loaded.fits(names, has_pictures=sees):
            return loaded
        with self._private(request):
            if mx.distributed.init().size() > 1:  # a model that is spread is read at once
                with explained(names[0]):
                    self.reset()
            opened = self.loader.open(*names, sees=sees)
        return self._replace(opened)

    def _replace(self, loaded: LoadedModel) -> LoadedModel:
        """Free the model before, and read this model's weights; raises ValueError."""
        # Checked before the model in use is freed, so that a wrong request costs nothing.
        self.drafters.check(loaded, is_default=loaded.name == self.settings.model)
        self.reset()
        # Weights are read now, once the memory of the last model is free.
        mx.eval(loaded.model.parameters())
        loaded.has_rows = self.loader.can_hold_rows(loaded.model)
        loaded.prefix_files = files_for(loaded, self.settings)
        self.loaded = loaded
        if self.flags.keeps_tuning:
            name, adapter = loaded.names
            tuning = kept_tuning(loaded.model, name, adapter, self.flags.kernels)
            loaded.closing.enter_context(tuning)
        return loaded

    def reset(self) -> None:
        """Free the model that is loaded, and keep its tuning."""
        loaded, self.loaded = self.loaded, None
        if loaded is None:
            return
        loaded.closing.close()
        # Known facts about a model keep some of its modules alive. Empty, they hold no weights.
        for part in list(loaded.model.modules()):
            part.clear()
        # Modules and caches refer to each other in circles.
        gc.collect()
        mx.clear_cache()

    def unload(self) -> None:
        self.drafters.choice.model.forget()
        self.reset()

    def keep(self) -> None:
        """Write what was learned, and the memory, to their files."""
        if (loaded := self.loaded) is not None:
            loaded.closing.close()
        self.flags.save_memory()

    def loaded_for(self, request: TextRequest) -> LoadedModel | None:
        """The model for a request, if it is loaded; raises RequestError. Any thread may ask."""
        names, loaded = self.names_of(request), self.loaded
        return loaded if loaded is not None and loaded.names == names else None

    def can_see(self, request: TextRequest) -> bool:
        """True if the model for a request may be shown pictures; raises RequestError for none.

        Any thread may ask.
        """
        return self.loader.may_see(*self.names_of(request))

    def tokenizer_for(self, request: TextRequest) -> Any:
        """The tokenizer of the model for a request, which need not be loaded; raises RequestError.

        Any thread may ask.
        """
        if (loaded := self.loaded_for(request)) is not None:
            return loaded.tokenizer
        name = self.names_of(request)[0]
        with self._private(request), explained(name):
            return self.loader.tokenizer(name)

    def listed(self) -> list[dict[str, Any]]:
        """The models that a client may name: `id`, `created`, and `context_length` if loaded."""
        loaded = None if self.loaded is None else self.loaded.name
        names = [*map(public_name, filter(None, [self.settings.model, loaded]))]
        cached = [name for name, folder in models_in(None) if has_files(folder)]
        names += filter(self.settings.allows_model, cached)
        return [self._entry(name, name) for name in dict.fromkeys(names)]

    def find_entry(self, name: str) -> dict[str, Any]:
        """The entry, by this name, of the model that a request with it gets.

        Raises RequestError and ModelFolderError for the name of no model that is here.
        """
        for entry in self.listed():
            if entry["id"].strip("/") == name.strip("/"):
                return entry
        request = TextRequest(model=name)
        model = self.names_of(request)[0]
        if model != self.settings.model and not is_in_cache(model):
            with self._private(request):
                check_folder(Path(model).expanduser())
        return self._entry(name, model)

    def _entry(self, name: str, model: str) -> dict[str, Any]:
        """The entry by a name that a client gave for a model."""
        loaded, entry = self.loaded, {"id": name, "created": self.created}
        if loaded is None or model not in (loaded.name, public_name(loaded.name)):
            return entry
        return {**entry, "context_length": loaded.longest_text}


def public_name(name: str) -> str:
    """The name under which clients see a model: of a folder the last part, which tells no more."""
    folder = Path(name).expanduser()
    return folder.resolve().name if folder.exists() else name


def can_be_looked_up(name: str) -> bool:
    """True for a name that this user can look for, whether a folder has it or not."""
    try:
        Path(name).expanduser().exists()
    except (OSError, RuntimeError) as error:
        logging.warning("%.99s names no model: %s", name, error)
        return False
    return True


def has_files(folder: Path) -> bool:
    """True for a folder that looks like one of mlx-lm's."""
    return all((folder / name).exists() for name in MLX_FILES)
