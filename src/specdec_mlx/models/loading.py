"""Loading models for the commands, and values that are kept with a loaded model or tokenizer."""

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
    """A value for each loaded model, tokenizer or combination of them, made at first use."""

    def __init__(self, make: Callable[..., T]) -> None:
        self._make = make
        self._values: dict[tuple[int, ...], T] = {}

    def __call__(self, *owners: Any) -> T:
        # A module is a dict and has no hash. Weak references below remove an id when it may be
        # used again.
        key = (*map(id, owners),)
        if key not in self._values:
            # A new wrapper of a tokenizer may be made for each call.
            key = (*map(id, map(unwrapped, owners)),)
        return self._values[key] if key in self._values else self.put(self._make(*owners), *owners)

    def put(self, value: T, *owners: Any) -> T:
        objects = [*map(unwrapped, owners)]
        key = (*map(id, objects),)
        with suppress(TypeError):  # a class with slots may not allow weak references
            for owner in objects if key not in self._values else ():
                weakref.finalize(owner, self._values.pop, key, None)
            self._values[key] = value
        return value


def unwrapped(owner: Any) -> Any:
    return owner._tokenizer if isinstance(owner, TokenizerWrapper) else owner


TOKENIZER_FILES = ("tokenizer.*", "vocab.*", "*.model", "*.tiktoken")
"""Any of these is a tokenizer. `tokenizer_config.json` is not enough."""


def load_model(name: Path | str, read: Callable[[str], Any] = load) -> tuple[nn.Module, Any]:
    """Model and tokenizer of a folder or a Hugging Face name. Raises ModelFolderError.

    read: loads them from a path, as mlx-lm's `load` does.
    """
    folder = Path(name).expanduser()
    with explained(name):
        loaded = read(str(folder if folder.exists() else name))
    return loaded[0], loaded[1]


def load_target(name: Path | str) -> tuple[nn.Module, Any]:
    """Like `load_model`. Under `mx.distributed`, spread over all ranks."""
    return load_model(name, load if mx.distributed.init().size() == 1 else load_on_ranks)


def load_on_ranks(
    path: str,
    tokenizer_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    return_config: bool = False,
    **options: Any,
) -> Any:
    """mlx-lm's `load` on several ranks, tensor-parallel or else pipelined, without adapters.

    options: `trust_remote_code`, and `pipeline_group`, which makes it pipelined.
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
    folder = Path(name).expanduser()
    if not folder.exists() and is_in_cache(str(name)):
        folder = Path(str(try_to_load_from_cache(str(name), "config.json"))).parent
    return folder


def is_in_cache(name: str) -> bool:
    try:
        # Raises ValueError for a text that cannot be a name.
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except ValueError:
        return False


def is_offline() -> bool:
    """True if the address of Hugging Face's host cannot be found, and there is no proxy."""
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
    """True for a name that can only be a path."""
    # Hugging Face names have at most one slash, and not at an end.
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or name.endswith("/")
