"""The files of a head: a local folder, or a repository of which only what is needed is fetched."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from specdec_mlx.drafters.heads.torch_files import read_torch_file
from specdec_mlx.errors import HeadError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = (
    "model.safetensors",
    "medusa_lm_head.safetensors",
    "pytorch_model.bin",
    "medusa_lm_head.pt",
)
"""Where tensors are if there is no index, the first that exists."""

MLX_FORMAT = "mlx"


class HeadFiles:
    """A head's configuration, the names of its tensors, and the tensors themselves.

    Args:
        path_or_repo: a folder, or a Hugging Face name.

    Raises:
        HeadError: there is no such folder or repository, or no config.json that can be read.
    """

    def __init__(self, path_or_repo: str | Path) -> None:
        """Read the configuration."""
        self.name = str(path_or_repo)
        folder = Path(path_or_repo).expanduser()
        self.folder = folder if folder.is_dir() else None
        path = self.path(CONFIG)
        if path is None:
            raise HeadError(f"{self.name} has no {CONFIG}, which says what kind of head it is.")
        self.config = self._configuration(path)

    def _configuration(self, path: Path) -> dict[str, Any]:
        try:
            config = json.loads(path.read_text())
        except ValueError as error:
            raise HeadError(f"{self.name}: {CONFIG} cannot be read: {error}") from error
        if not isinstance(config, dict):
            raise HeadError(f"{self.name}: {CONFIG} holds a {type(config).__name__}, no object.")
        return config

    def path(self, name: str) -> Path | None:
        """Where a file is now, fetched if it has to be; None if there is no such file."""
        if self.folder is not None:
            path = self.folder / name
            return path if path.is_file() else None
        try:
            return Path(hf_hub_download(self.name, name))
        except LocalEntryNotFoundError as error:
            raise HeadError(f"{self.name}: {name} is not here, and cannot be fetched.") from error
        except EntryNotFoundError:
            return None
        except (HFValidationError, RepositoryNotFoundError) as error:
            raise HeadError(
                f"There is no folder {self.name}, and no Hugging Face repository of that name."
            ) from error

    @cached_property
    def weight_map(self) -> Mapping[str, str]:
        """Name of each tensor -> the file that holds it; of an index, without fetching any."""
        index = self.path(INDEX)
        if index is not None:
            return dict(json.loads(index.read_text())["weight_map"])
        files = [name for name in SINGLE if self.path(name)][:1]
        if self.folder is not None and not files:
            files = sorted(path.name for path in self.folder.glob("*.safetensors"))
        return {tensor: file for file in files for tensor in self._tensors(file)[0]}

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self.weight_map)

    def read(self, names: Iterable[str]) -> tuple[dict[str, mx.array], bool]:
        """These tensors, and whether they were converted for MLX.

        Only the files that hold them are fetched.
        """
        wanted = list(names)
        read: dict[str, mx.array] = {}
        converted = False
        for file in sorted({self.weight_map[name] for name in wanted}):
            tensors, is_mlx = self._tensors(file)
            read |= {name: tensors[name] for name in wanted if name in tensors}
            converted |= is_mlx
        return read, converted

    def _tensors(self, file: str) -> tuple[Mapping[str, mx.array], bool]:
        """Tensors of a file, computed when they are used, and whether it was written for MLX."""
        path = self.path(file)
        if path is None:
            raise HeadError(f"{self.name} has no {file}, which its index names.")
        if path.suffix != ".safetensors":
            return read_torch_file(path), False
        loaded: Any = mx.load(str(path), return_metadata=True)
        tensors, metadata = loaded
        return tensors, metadata.get("format") == MLX_FORMAT
