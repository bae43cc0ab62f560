"""Loading a model for the commands, and values kept with a loaded model or tokenizer."""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import constants, try_to_load_from_cache
from mlx_lm import load
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import sharded_load

from specdec_mlx.errors import ModelFolderError

T = TypeVar("T")


class PerModel(Generic[T]):
    """A value for each loaded model, or tokenizer, or several together; made when first asked for.

    A tokenizer is known by what its wrapper holds: a new wrapper may be made at each call.
    """

    def __init__(self, make: Callable[..., T]) -> None:
        self._make = make
        self._values: dict[tuple[int, ...], T] = {}

    def __call__(self, *owners: Any) -> T:
        """The value of these."""
        # a module is a dict and has no hash
        key = (*map(id, owners),)
        if key not in self._values:
            key = (*map(id, map(unwrapped, owners)),)
        return self._values[key] if key in self._values else self.put(self._make(*owners), *owners)

    def put(self, value: T, *owners: Any) -> T:
        """Give these another value, which is returned."""
        held = [*map(unwrapped, owners)]
        key = (*map(id, held),)
        with suppress(TypeError):  # of a class that cannot be referred to weakly
            for owner in held if key not in self._values else ():
                weakref.finalize(owner, self._values.pop, key, None)
            self._values[key] = value
        return value


def unwrapped(owner: Any) -> Any:
    """The tokenizer inside mlx-lm's wrapper; anything else is returned as it is."""
    return owner._tokenizer if isinstance(owner, TokenizerWrapper) else owner


TOKENIZER_FILES = ("tokenizer.*", "vocab.*", "*.model", "*.tiktoken")
"""Any of these makes a tokenizer; `tokenizer_config.json` alone does not."""


def load_model(name: Path | str, read: Callable[[str], Any] = load) -> tuple[nn.Module, Any]:
    """Model and tokenizer of a folder or a Hugging Face name; ModelFolderError without them.

    read: loads them from a path, as mlx-lm's `load` does.
    """
    folder = Path(name).expanduser()
    with explained(name):
        loaded = read(str(folder if folder.exists() else name))
    return loaded[0], loaded[1]


def load_target(name: Path | str) -> tuple[nn.Module, Any]:
    """Like `load_model`; under `mx.distributed`, spread over all ranks."""
    return load_model(name, load if mx.distributed.init().size() == 1 else load_on_ranks)


def load_on_ranks(
    path: str,
    tokenizer_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    return_config: bool = False,
    **options: Any,
) -> Any:
    """mlx-lm's `load` on several ranks: tensor-parallel, else pipelined; no adapters.

    options: trust_remote_code; pipeline_group, which has it pipelined.
    """
    if adapter_path is not None:
        raise ValueError(
            "An adapter cannot be loaded on several ranks. Fuse it into the model first."
        )
    return sharded_load(
        path,
        options.get("pipeline_group"),
        return_config=return_config,
        tokenizer_config=tokenizer_config,
        trust_remote_code=bool(options.get("trust_remote_code")),
    )


@contextmanager
def explained(name: Path | str) -> Iterator[None]:
    """Raise ModelFolderError, with the next step, where the block cannot load the model `name`."""
    folder = Path(name).expanduser()
    if folder.exists():
        check_folder(folder)
        yield
        return
    if is_path(str(name)):
        raise ModelFolderError(
            f"There is no folder {folder}. Give the folder of a mlx-lm model, or a Hugging Face "
            "name such as mlx-community/SmolLM2-135M-Instruct."
        )
    if not is_in_cache(str(name)) and is_offline():
        raise ModelFolderError(
            f"you seem to be offline: {name} is no folder here and not in the Hugging Face cache, "
            f"and {constants.ENDPOINT} cannot be reached. Connect and try again, or give a folder."
        )
    try:
        yield
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelFolderError(
            f"{name} is no folder here, and could not be loaded from Hugging Face: {reason[0]} "
            "Look at the name and at the network, or give a folder."
        ) from error


def folder_of(name: Path | str) -> Path:
    """Folder of a model that was loaded by its folder or Hugging Face name."""
    folder = Path(name).expanduser()
    if not folder.exists() and is_in_cache(str(name)):
        folder = Path(str(try_to_load_from_cache(str(name), "config.json"))).parent
    return folder


def is_in_cache(name: str) -> bool:
    """True for a model in the Hugging Face cache, False for what can be no name there."""
    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except ValueError:
        return False


def is_offline() -> bool:
    """True if Hugging Face's host has no address here, and no proxy would know one."""
    if constants.HF_HUB_OFFLINE:
        return True
    if getproxies().keys() & {"https", "all"}:
        return False
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None)
    except OSError:
        return True
    return False


def check_folder(folder: Path) -> None:
    """Raise ModelFolderError, with the next step, unless the folder has all parts of a model."""
    if not folder.is_dir():
        raise ModelFolderError(f"{folder} is a file, expected a folder. Give the folder it is in.")
    if not (folder / "config.json").is_file():
        raise ModelFolderError(
            f"{folder} has no config.json, so it is not a model folder. Give the folder of a "
            "mlx-lm model; mlx_lm.convert makes one."
        )
    if not any(folder.glob("model*.safetensors")):
        raise ModelFolderError(
            f"{folder} has no weights (model*.safetensors). Fetch them, or convert the model with "
            "mlx_lm.convert."
        )
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        raise ModelFolderError(
            f"{folder} has no tokenizer. Copy tokenizer.json and tokenizer_config.json there, from "
            "the model that it was made from."
        )


def is_path(name: str) -> bool:
    """True if a name can only be a path: Hugging Face's have at most one slash, within."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or name.endswith("/")
