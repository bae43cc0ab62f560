"""A loaded model, and the reading of models and tokenizers as the server's flags say."""

from __future__ import annotations

import json
import logging
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.utils import load_config, load_tokenizer

from specdec_mlx import vision
from specdec_mlx.caches import leaves_of
from specdec_mlx.contracts import Drafter
from specdec_mlx.errors import ModelFolderError
from specdec_mlx.exactness.probe import can_hold_rows
from specdec_mlx.memory.store import state_of
from specdec_mlx.mlx_lm_plugin.flags import check_adapter
from specdec_mlx.mlx_lm_plugin.generation_config import ARGUMENTS, described, recommended_sampling
from specdec_mlx.models.loading import explained, folder_of, load_on_ranks
from specdec_mlx.server.flags import ServerSettings
from specdec_mlx.server.pictures import Sight
from specdec_mlx.server.prefix_files import PrefixFiles
from specdec_mlx.server.prefixes import stateful

# Names of the most positions of a text in configurations
POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "n_ctx",
)
LONGEST_TEXT = 2**20  # positions for models whose configuration names none


@dataclass(eq=False)
class LoadedModel:
    """A loaded model.

    Attributes:
        files: name, size and time of each file that was read.
        sampling: arguments of `Sampling` that its generation config recommends.
        sight: how pictures are shown to it; None for a model that was loaded without its vision.
        drafters: the drafters that were made for it, by their specs.
        requested_draft_model: name and drafter of the draft model that a request named last.
        has_rows: its texts can be rows of one batch.
        prefix_files: files of the caches of its texts.
        head_files: files of the states of heads, by the place of the head among the prefixes.
        closing: closed when the model is freed.
    """

    name: str
    adapter: str | None
    model: nn.Module
    tokenizer: Any
    config: dict[str, Any]
    files: tuple[str, ...]
    sampling: dict[str, Any] = field(default_factory=dict)
    sight: Sight | None = None
    drafters: dict[str, Drafter | None] = field(default_factory=dict)
    requested_draft_model: tuple[str, Drafter | None] = ("", None)
    has_rows: bool = False
    prefix_files: PrefixFiles | None = None
    head_files: dict[Any, PrefixFiles | None] = field(default_factory=dict)
    closing: ExitStack = field(default_factory=ExitStack)

    @property
    def names(self) -> tuple[str, str | None]:
        return self.name, self.adapter

    @property
    def place(self) -> tuple[Any, ...]:
        """Key of its caches: no other model, and no other content of its files, has it."""
        return *self.names, self.files, self.sight is not None

    def fits(self, names: tuple[str, str | None], *, has_pictures: bool) -> bool:
        """True if a request for a model of these names is served without another one."""
        return self.names == names and (self.sight is not None or not has_pictures)

    @cached_property
    def is_stateful(self) -> bool:
        """True if its caches cannot be shortened, so that states are stored to go back to."""
        return bool(stateful(leaves_of(self.model)))

    @cached_property
    def longest_text(self) -> int:
        """Positions that its configuration gives a text, or `LONGEST_TEXT`."""
        config = {**self.config, **(self.config.get("text_config") or {})}
        sizes: list[int] = [config[name] for name in POSITIONS if isinstance(config.get(name), int)]
        if not sizes:
            return LONGEST_TEXT
        # Scaled rotary positions reach further than the model was trained first.
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
        original = scaling.get("original_max_position_embeddings") or sizes[0]
        return max(sizes[0], int(original * (scaling.get("factor") or 1)))


class Loader:
    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self._blind = set[str]()  # vision models that could not be read with their vision
        self._latest_tokenizer: tuple[str, Any] = ("", None)

    def may_see(self, name: str, adapter: str | None) -> bool:
        """True for a vision model that mlx-vlm may read, with these settings."""
        is_whole = adapter is None and mx.distributed.init().size() == 1
        is_plain = self.settings.kv_bits is None and name not in self._blind
        return is_whole and is_plain and has_mlx_vlm() and is_vision_model(name)

    def open(self, name: str, adapter: str | None, *, sees: bool) -> LoadedModel:
        """A model whose files are all there. Its weights are read when they are evaluated.

        A model that is spread over ranks is read at once.

        Args:
            sees: read a vision model with its vision, if mlx-vlm can.

        Raises:
            ModelFolderError: parts of a model are missing, or are no model's.
            ValueError, OSError: other reasons of mlx-lm.
        """
        check_adapter(adapter)
        with explained(name):
            try:
                model, tokenizer, config, sight = self._read(name, adapter, sees)
            # These say what to do. Other errors mean files that are no model's.
            except (ValueError, OSError):
                raise
            except Exception as error:  # of files that only look like a model's
                logging.error("%s cannot be loaded.", name, exc_info=error)
                raise ModelFolderError(f"{name} is no model that mlx-lm loads.") from error
        folders = map(folder_of, filter(None, (name, adapter)))
        paths = [path for folder in folders for path in sorted(folder.iterdir())]
        files = tuple(f"{path} {state_of(str(path))}" for path in paths)
        tokenizer, sampling = self._with_template(tokenizer), self._sampling_of(name)
        return LoadedModel(name, adapter, model, tokenizer, config, files, sampling, sight)

    def _read(self, name: str, adapter: str | None, sees: bool) -> Any:
        """Model, tokenizer, configuration and sight.

        A vision model is read without its vision until a request has a picture, because its texts
        are written sooner then, and together. If mlx-lm does not know the model, it is read with
        its vision at once.
        """
        if sees and self.may_see(name, adapter):
            logging.info(f"{name} is loaded by mlx-vlm: a request has pictures.")
            try:
                return self._read_with_vision(name)
            except Exception as error:  # as where a conversion left out the vision
                self._blind.add(name)
                logging.warning(f"{name} is shown no pictures: {error}")
        try:
            read = self._read_text_model(name, adapter)
        except ValueError:
            if not self.may_see(name, adapter):
                raise
            return self._read_with_vision(name)
        if is_vision_model(name) and not has_mlx_vlm():
            logging.info(
                f"{name} is a vision model. Pictures are named, and not shown to it, until mlx-vlm "
                "is installed: pip install 'specdec-mlx[vision]'"
            )
        return *read, None

    def _read_with_vision(self, name: str) -> Any:
        trusts = self.settings.trust_remote_code
        model, processor = vision.load(name, lazy=True, trust_remote_code=trusts)
        config = load_config(folder_of(name))
        options = self._tokenizer_config
        if isinstance(template := getattr(processor, "chat_template", None), str):
            options = {"chat_template": template, **options}
        tokenizer = load_tokenizer(path_of(name), options, config.get("eos_token_id"))
        return model, tokenizer, config, Sight(model, processor, tokenizer)

    def _read_text_model(self, name: str, adapter: str | None) -> Any:
        options: dict[str, Any] = {
            "tokenizer_config": self._tokenizer_config,
            "adapter_path": adapter,
            "return_config": True,
            "trust_remote_code": self.settings.trust_remote_code,
        }
        group = mx.distributed.init()
        if group.size() == 1:
            # Lazy, because the weights of two models may not fit into memory together.
            return mlx_lm.load(path_of(name), lazy=True, **options)
        pipeline_group = group if self.settings.pipeline else None
        return load_on_ranks(path_of(name), pipeline_group=pipeline_group, **options)

    def tokenizer(self, name: str) -> Any:
        """The tokenizer of a model that is not loaded; any thread may ask. The latest is kept."""
        latest, tokenizer = self._latest_tokenizer
        if latest != name:
            tokenizer = self._with_template(load_tokenizer(path_of(name), self._tokenizer_config))
            self._latest_tokenizer = name, tokenizer
        return tokenizer

    @property
    def _tokenizer_config(self) -> dict[str, Any]:
        template = self.settings.chat_template
        config: dict[str, Any] = {"trust_remote_code": self.settings.trust_remote_code}
        return {**config, "chat_template": template} if template else config

    def _with_template(self, tokenizer: Any) -> Any:
        if self.settings.use_default_chat_template and tokenizer.chat_template is None:
            tokenizer.chat_template = tokenizer.default_chat_template
        return tokenizer

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

    def can_hold_rows(self, model: nn.Module) -> bool:
        """Measure whether a model's texts can be rows of one batch; the log says if they cannot."""
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


def has_mlx_vlm() -> bool:
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
