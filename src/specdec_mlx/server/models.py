"""Models by the names that requests give them, their draft models, and who drafts for a request."""

from __future__ import annotations

import gc
import json
import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.utils import hf_repo_to_path, load_config, load_tokenizer

from specdec_mlx import vision
from specdec_mlx.arguments import name_in, unknown
from specdec_mlx.caches import leaves_of
from specdec_mlx.contracts import DraftContext, Drafter, all_drafters
from specdec_mlx.draft_length.store import kept_tuning
from specdec_mlx.drafters.choosing import registry
from specdec_mlx.drafters.choosing.candidates import models_in
from specdec_mlx.drafters.choosing.choice import (
    DraftModel,
    best_of,
    is_place_of_model,
    waits_for_model,
)
from specdec_mlx.drafters.choosing.registry import MODEL_DRAFTER, NO_DRAFTER
from specdec_mlx.drafters.heads.loading import load_head
from specdec_mlx.duck_typed import as_given
from specdec_mlx.errors import ModelFolderError
from specdec_mlx.exactness.probe import can_hold_rows
from specdec_mlx.memory import Memory
from specdec_mlx.memory.persistent import PersistentStore
from specdec_mlx.memory.store import state_of
from specdec_mlx.mlx_lm_plugin.flags import KEY, USER, check_adapter
from specdec_mlx.mlx_lm_plugin.generation_config import ARGUMENTS, described, recommended_sampling
from specdec_mlx.models.loading import (
    check_folder,
    explained,
    folder_of,
    is_in_cache,
    load_on_ranks,
)
from specdec_mlx.server.flags import DEFAULT_MODEL, ServerSettings, refused
from specdec_mlx.server.pictures import Sight
from specdec_mlx.server.prefix_files import PrefixFiles, files_for, stateful
from specdec_mlx.server.requests import RequestError, TextRequest

MOST_MEMORIES = 64  # users or keys whose memories are kept; the least recently used are forgotten

# Names of the most positions of a text in configurations
POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "n_ctx",
)
LONGEST_TEXT = 2**20  # positions for models whose configuration names none

ANY_NAME = (
    "A server that is started with --any-model-name takes any unknown name for its own model."
)

NOT_HERE = "this server has no such model that it can load. Its log says why."
NO_ADAPTER = (
    "model, adapters: this server cannot load them together. An adapter is a folder with an "
    "adapter_config.json, as mlx_lm.lora makes one. The log of the server says why."
)
PATH_STARTS = "/", ".", "~"  # of names that can only be paths

MLX_FILES = {"config.json", "model.safetensors.index.json", "tokenizer_config.json"}
"""Files of a repository in the Hugging Face cache that is listed, as mlx-lm's server does."""


@dataclass(eq=False)
class Loaded:
    """A model that is loaded. files: what was read, with sizes and times.

    sampling: arguments of `Sampling` that its generation config recommends.
    sight: how pictures are shown to it; None for a model that was loaded without what sees.
    drafters: those that were made for it, by their names. named: of the draft model that a request
    named last. has_rows: its texts can be rows of one batch.
    prefix_files: where caches of its texts are kept. closing: what is due at its end.
    """

    name: str
    adapter: str | None
    model: nn.Module
    tokenizer: Any
    config: dict[str, Any]
    files: tuple[str, ...]
    sampling: dict[str, Any] = field(default_factory=dict)
    drafters: dict[str, Drafter | None] = field(default_factory=dict)
    named: tuple[str, Drafter | None] = ("", None)
    sight: Sight | None = None
    has_rows: bool = False
    prefix_files: PrefixFiles | None = None
    closing: ExitStack = field(default_factory=ExitStack)

    @property
    def names(self) -> tuple[str, str | None]:
        """What it was loaded by."""
        return self.name, self.adapter

    @property
    def place(self) -> tuple[Any, ...]:
        """Key of its caches: no other model, and no other content of its files, has it."""
        return *self.names, self.files, self.sight is not None

    @cached_property
    def is_stateful(self) -> bool:
        """True if its caches cannot be shortened, so that states are kept to go back to."""
        return bool(stateful(leaves_of(self.model)))

    @cached_property
    def longest_text(self) -> int:
        """Positions that its configuration gives a text, or `LONGEST_TEXT`."""
        config = {**self.config, **(self.config.get("text_config") or {})}
        named: list[int] = [config[name] for name in POSITIONS if isinstance(config.get(name), int)]
        if not named:
            return LONGEST_TEXT
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
        original = scaling.get("original_max_position_embeddings") or named[0]
        return max(named[0], int(original * (scaling.get("factor") or 1)))


class Models:
    """The models that requests may name, one of them loaded at a time.

    `load`, `drafter` and `reset` belong to the engine's thread; all else to any.
    """

    def __init__(self, settings: ServerSettings) -> None:
        """Make what needs no target; raises ValueError and MissingPackageError for a wrong flag."""
        self.settings, self.flags = settings, settings.flags
        self.loaded: Loaded | None = None
        self.choice = self.flags.drafting
        self.created = int(time.time())
        self._specs = {drafter_name(spec): str(spec) for spec in self.choice.ordered}
        waits = self.flags.waits_for_target
        self._made = {
            spec: self.choice.make(spec)
            for spec in self._specs.values()
            if not (waits and waits_for_model(spec))
        }
        self._tokenizer_of = lru_cache(1)(self._load_tokenizer)
        # vision models that could not be loaded with what sees
        self._blind = set[str]()
        self._memory_of = lru_cache(MOST_MEMORIES)(lambda who: Memory())

    def names_of(self, request: TextRequest) -> tuple[str, str | None]:
        """Name and adapter of the model for a request; raises RequestError for none.

        The adapter that was given at the start belongs to the given model, however a client
        spells its name.
        """
        name, given = request.model, self.settings.model
        if not can_be_looked_up(name):
            raise self._no_model()
        own = None if self.loaded is None else self.loaded.name
        if own not in (None, given) and name == public_name(str(own)):
            return str(own), request.adapter
        if given is not None and self._is_given(name):
            return (
                given,
                self.settings.adapter_path if request.adapter is None else request.adapter,
            )
        if name in ("", DEFAULT_MODEL):
            raise RequestError("This server was started without --model. Name a model.")
        if not self.settings.allows_model(name):
            hint = "" if self.settings.any_model_name else f" {ANY_NAME}"
            raise ModelFolderError(f"{refused('model', name)}{hint}")
        return name, request.adapter

    def _is_given(self, name: str) -> bool:
        """True for a name of the model that was given at the start."""
        given = str(self.settings.model)
        if name in ("", DEFAULT_MODEL, given, public_name(given)):
            return True
        folder = Path(name).expanduser()
        if folder.exists():
            return folder.resolve() == Path(given).expanduser().resolve()
        is_free = not name.startswith(PATH_STARTS) and not is_in_cache(name)
        return self.settings.any_model_name and is_free

    def load_given(self) -> Loaded:
        """Load the model that was given at the start; raises the reason, which no client gets."""
        names = self.names_of(TextRequest())
        return self._replace(self._looked_at(*names, self._read))

    def load(self, request: TextRequest) -> Loaded:
        """The model for a request, loaded; the one before is freed once all of it was looked at.

        Raises RequestError and ModelFolderError for what cannot be loaded.
        """
        self.settings.check(request)
        names, loaded = self.names_of(request), self.loaded
        has_pictures = bool(request.pictures) and self._may_see(*names)
        if has_pictures and (loaded is None or loaded.names != names or loaded.sight is None):
            logging.info(f"{names[0]} is loaded by mlx-vlm: a request has pictures.")
            try:
                loaded = self._looked_at(*names, self._read_seeing)
            except (RequestError, ModelFolderError) as error:
                # as where a conversion left out what sees
                self._blind.add(names[0])
                logging.warning(f"{names[0]} is shown no pictures: {error}")
            else:
                self._replace(loaded)
        if loaded is None or loaded.names != names:
            with self._private(request):
                loaded = self._looked_at(*names, self._read)
            self._replace(loaded)
        return loaded

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
            is_given = self.names_of(request)[0] == self.settings.model
            raise self._no_model(is_given) from error

    def _no_model(self, is_given: bool = False) -> ModelFolderError:
        """The error for the name of a model. For a path it is the same, whatever is there."""
        takes_any = self.settings.any_model_name or self.settings.model is None
        hint = "" if takes_any or is_given else f" {ANY_NAME}"
        return ModelFolderError(f"model: {NOT_HERE}{hint}")

    def can_see(self, request: TextRequest) -> bool:
        """True if the model for a request may be shown pictures; raises RequestError for none.

        Any thread may ask.
        """
        return self._may_see(*self.names_of(request))

    def _may_see(self, name: str, adapter: str | None) -> bool:
        """True for a vision model that mlx-vlm may read, with these settings."""
        may_see = adapter is None and self.settings.kv_bits is None and name not in self._blind
        may_see = may_see and mx.distributed.init().size() == 1
        return may_see and has_mlx_vlm() and is_vision_model(name)

    def _looked_at(
        self, name: str, adapter: str | None, read: Callable[[str, str | None], Any]
    ) -> Loaded:
        """A model whose files are all there and can be read; its weights are not read yet."""
        try:
            check_adapter(adapter)
            with explained(name):
                model, tokenizer, about, sight = read(name, adapter)
        except ModelFolderError:
            raise
        except (ValueError, OSError) as error:
            raise RequestError(str(error)) from error
        except Exception as error:  # of files that only look like a model's
            logging.error("%s cannot be loaded.", name, exc_info=error)
            raise ModelFolderError(f"{name} is no model that mlx-lm loads.") from error
        named = filter(None, (name, adapter))
        files = tuple(state for one in named for state in states_of_files(one))
        tokenizer = self._with_template(tokenizer)
        sampling = self._sampling_of(name)
        return Loaded(name, adapter, model, tokenizer, about, files, sampling, sight=sight)

    def _replace(self, loaded: Loaded) -> Loaded:
        """Free the model that is loaded, and read this one's weights; raises what does not fit."""
        self._check_drafters(loaded)
        self.reset()
        mx.eval(loaded.model.parameters())
        loaded.has_rows = self._measured_rows(loaded.model)
        loaded.prefix_files = files_for(loaded, self.settings)
        self.loaded = loaded
        if self.flags.keeps_tuning:
            loaded.closing.enter_context(kept_tuning(loaded.model, *loaded.names))
        return loaded

    def _measured_rows(self, model: nn.Module) -> bool:
        """True if a model's texts can be rows of one batch; a line in the log if they cannot."""
        if mx.distributed.init().size() > 1 or self.settings.kv_bits is not None:
            return False
        with warnings.catch_warnings(action="ignore"):
            has_rows = can_hold_rows(model)
        if not has_rows:
            logging.warning(
                f"{type(model).__module__}: its texts cannot be rows of one batch. Requests are "
                "served one after another."
            )
        return has_rows

    def _sampling_of(self, name: str) -> dict[str, Any]:
        """Arguments of `Sampling` that a model's generation config recommends, also logged."""
        sampling, problems = recommended_sampling(folder_of(name))
        for problem in problems:
            logging.warning(problem)
        by_flags = {ARGUMENTS[field] for field in self.settings.sampling}
        used = {name: sampling[name] for name in sampling if name not in by_flags}
        if used:
            logging.info(f"Sampling where a request gives none: {described(used)}.")
        return sampling

    @property
    def _tokenizer_config(self) -> dict[str, Any]:
        template = self.settings.chat_template
        config: dict[str, Any] = {"trust_remote_code": self.settings.trust_remote_code}
        return {**config, "chat_template": template} if template else config

    def _with_template(self, tokenizer: Any) -> Any:
        if self.settings.use_default_chat_template and tokenizer.chat_template is None:
            tokenizer.chat_template = tokenizer.default_chat_template
        return tokenizer

    def _load_tokenizer(self, name: str) -> Any:
        return self._with_template(load_tokenizer(path_of(name), self._tokenizer_config))

    def _read(self, name: str, adapter: str | None) -> Any:
        """Model, tokenizer, configuration, and the sight of a model that is shown pictures.

        A vision model is loaded without what sees until a request has a picture: its texts then are
        written sooner, and together. One that mlx-lm does not know is loaded with it at once.
        """
        try:
            read = self._read_text(name, adapter)
        except ValueError:
            if not self._may_see(name, adapter):
                raise
            return self._read_seeing(name, adapter)
        if is_vision_model(name) and not has_mlx_vlm():
            logging.info(
                f"{name} is a vision model. Pictures are named, and not shown to it, until mlx-vlm "
                "is installed: pip install 'specdec-mlx[vision]'"
            )
        return *read, None

    def _read_seeing(self, name: str, adapter: str | None) -> Any:
        """As `_read`, by mlx-vlm; raises what mlx-vlm raises."""
        trusts = self.settings.trust_remote_code
        model, processor = vision.load(name, lazy=True, trust_remote_code=trusts)
        about = load_config(folder_of(name))
        config = self._tokenizer_config
        if isinstance(template := getattr(processor, "chat_template", None), str):
            config = {"chat_template": template, **config}
        tokenizer = load_tokenizer(path_of(name), config, about.get("eos_token_id"))
        return model, tokenizer, about, Sight(model, processor, tokenizer)

    def _read_text(self, name: str, adapter: str | None) -> Any:
        """Model, tokenizer and configuration; spread over all ranks, if there are several.

        On one rank the weights are looked at, and read when they are evaluated.
        """
        how: dict[str, Any] = {
            "tokenizer_config": self._tokenizer_config,
            "return_config": True,
            "trust_remote_code": self.settings.trust_remote_code,
        }
        group = mx.distributed.init()
        if group.size() == 1:
            return mlx_lm.load(path_of(name), adapter_path=adapter, lazy=True, **how)
        self.reset()  # a model that is spread is read at once
        how["pipeline_group"] = group if self.settings.pipeline else None
        return load_on_ranks(path_of(name), adapter_path=adapter, **how)

    def _check_drafters(self, loaded: Loaded) -> None:
        """Make the default drafters for a model, and see that they fit it.

        Memories and tables are held to the tokenizer of the model that was given at the start; for
        others they are left out.
        """
        is_given = loaded.name == self.settings.model
        loaded.drafters |= self._made
        drafters = self._drafters(self._fitting(self._specs, loaded), loaded)
        parts = [as_given(part) for drafter in drafters for part in all_drafters(drafter)]
        options = [value for part in parts for value in getattr(part, "__dict__", {}).values()]
        for kept in (*options, self.flags.remembered):
            if isinstance(kept, PersistentStore):
                if is_given:
                    kept.check_tokenizer(loaded.tokenizer)
                kept.refuses_others = False
        context = DraftContext(tokenizer=loaded.tokenizer)
        for drafter in filter(None, drafters):
            drafter.check(context)

    def _fitting(self, names: Iterable[str], loaded: Loaded) -> dict[str, str]:
        """Drafters by their names, as they are made; no draft model sees what a model sees.

        Raises UnknownNameError.
        """
        specs = {name: self._specs.get(name, name) for name in names if name != NO_DRAFTER}
        for name in specs.keys() - self._specs.keys():
            if name not in registry.drafter_names():
                raise unknown("drafter", name, registry.drafter_names())
        sees = loaded.sight is not None
        return {name: one for name, one in specs.items() if not (sees and waits_for_model(one))}

    def loaded_for(self, request: TextRequest) -> Loaded | None:
        """The model for a request, if it is loaded; raises RequestError. Any thread may ask."""
        names, loaded = self.names_of(request), self.loaded
        return loaded if loaded is not None and loaded.names == names else None

    def sight_for(self, request: TextRequest) -> Sight | None:
        """How pictures are shown to the model for a request, if it is loaded so."""
        loaded = self.loaded_for(request)
        return None if loaded is None else loaded.sight

    def tokenizer_for(self, request: TextRequest) -> Any:
        """The tokenizer of the model for a request, which need not be loaded; raises RequestError.

        Any thread may ask.
        """
        if (loaded := self.loaded_for(request)) is not None:
            return loaded.tokenizer
        name = self.names_of(request)[0]
        with self._private(request), explained(name):
            return self._tokenizer_of(name)

    def drafter(self, request: TextRequest, loaded: Loaded) -> tuple[Drafter | None, str]:
        """Who drafts for a request, and its name; raises ValueError and MissingPackageError."""
        sees = loaded.sight is not None
        if not sees and request.draft_model not in (None, DEFAULT_MODEL, self.choice.model.name):
            if request.drafters is not None:
                raise RequestError("Give drafter or draft_model, not both.")
            if not can_be_looked_up(request.draft_model):
                raise ModelFolderError(f"draft_model: {NOT_HERE}")
            return self._own_drafter(str(request.draft_model), loaded), MODEL_DRAFTER
        names = self._specs if request.drafters is None else request.drafters
        specs = self._fitting(names, loaded)
        who = {USER: request.user, KEY: request.key}.get(self.flags.memory_for, "")
        # one for all, or nobody is named
        memory = self._memory_of(who) if who else None
        parts = self._drafters(specs, loaded, memory)
        return best_of(parts), "+".join(specs) or NO_DRAFTER

    def _drafters(
        self, specs: dict[str, str], loaded: Loaded, memory: Memory | None = None
    ) -> list[Drafter | None]:
        """The drafters of a model; those that remember, with a memory of somebody's own."""
        made, found = loaded.drafters, list[Drafter | None]()
        for name, spec in specs.items():
            if memory is not None and registry.takes(name, "memory"):
                found.append(self.choice.make(spec, memory=memory))
                continue
            if spec not in made:
                made[spec] = self.choice.make(spec, loaded.model)
            found.append(made[spec])
        return found

    def _own_drafter(self, name: str, loaded: Loaded) -> Drafter | None:
        """The drafter of a draft model, or trained head, that a request names; the latest is kept.

        A head's files are read as safetensors only: others are programs.
        """
        if loaded.named[0] != name:
            model = DraftModel(name)
            try:
                if not model.is_head:
                    with explained(name):
                        pass
                loaded.named = "", None  # it is freed before the next one is there
                drafter = (
                    load_head(name, loaded.model, torch_files=False)
                    if model.is_head
                    else model.make()
                )
            except (ValueError, OSError, RuntimeError) as error:
                logging.warning("The draft model of a request is not loaded: %s", error)
                raise ModelFolderError(f"draft_model: {NOT_HERE}") from error
            loaded.named = name, drafter
        return loaded.named[1]

    def reset(self) -> None:
        """Free the model that is loaded, and keep its tuning."""
        loaded, self.loaded = self.loaded, None
        if loaded is None:
            return
        loaded.closing.close()
        # some of which are kept with what is known of it
        for part in list(loaded.model.modules()):
            part.clear()
        gc.collect()
        mx.clear_cache()

    def unload(self) -> None:
        """Free the model and its draft models; the next request loads them again."""
        self.reset()
        self._made = {spec: made for spec, made in self._made.items() if not waits_for_model(spec)}
        self.choice.model.forget()
        gc.collect()
        mx.clear_cache()

    def keep(self) -> None:
        """Write what was learned, and the memory, to their files."""
        if (loaded := self.loaded) is not None:
            loaded.closing.close()
        self.flags.save_memory()

    def listed(self) -> list[dict[str, Any]]:
        """The models that a client may name: `id`, `created`, and `context_length` if loaded."""
        own = [self.settings.model, None if self.loaded is None else self.loaded.name]
        here = [name for name, folder in models_in(None) if has_files(folder)]
        names = [*map(public_name, filter(None, own)), *filter(self.settings.allows_model, here)]
        return [self._entry(name, name) for name in dict.fromkeys(names)]

    def _entry(self, name: str, own: str) -> dict[str, Any]:
        """The entry by a name; own: the model's, if it is another one."""
        loaded, entry = self.loaded, {"id": name, "created": self.created}
        if loaded is None or own not in (loaded.name, public_name(loaded.name)):
            return entry
        return {**entry, "context_length": loaded.longest_text}

    def named(self, name: str) -> dict[str, Any]:
        """The entry, by this name, of the model that a request with it gets.

        Raises RequestError and ModelFolderError for the name of no model that is here.
        """
        for entry in self.listed():
            if entry["id"].strip("/") == name.strip("/"):
                return entry
        own = self.names_of(TextRequest(model=name))[0]
        if own != self.settings.model and not is_in_cache(own):
            with self._private(TextRequest(model=name)):
                check_folder(Path(own).expanduser())
        return self._entry(name, own)


def drafter_name(spec: str) -> str:
    """The name of a drafter for clients; of a model's folder or repository the last part."""
    return Path(spec).name if is_place_of_model(spec) else name_in(spec)


def has_mlx_vlm() -> bool:
    """True if mlx-vlm is installed."""
    return find_spec("mlx_vlm") is not None


def is_vision_model(name: str) -> bool:
    """True for a vision model, in a folder or the Hugging Face cache, by its configuration.

    False for a model that brings code of its own: mlx-vlm runs that code without asking.
    """
    try:
        config = json.loads((folder_of(name) / "config.json").read_text("utf-8"))
        return "vision_config" in config and "model_file" not in config
    except (OSError, ValueError, TypeError):  # loading says what is wrong
        return False


def path_of(name: str) -> str:
    """What mlx-lm loads by a name: a folder that is there, or a Hugging Face name."""
    folder = Path(name).expanduser()
    return str(folder) if folder.exists() else name


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


def states_of_files(name: str) -> list[str]:
    """Name, size and time of each file that was loaded by a folder or a Hugging Face name."""
    folder = Path(name).expanduser()
    folder = folder if folder.exists() else hf_repo_to_path(name)
    return [f"{path} {state_of(str(path))}" for path in sorted(folder.iterdir())]
