"""Files of a head, from a folder or a repository; only those with its tensors are fetched."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from safetensors import safe_open

from specdec_mlx.drafters.heads.gguf_files import dequantized, read_gguf
from specdec_mlx.drafters.heads.mtp import layer_prefixes
from specdec_mlx.errors import HeadError
from specdec_mlx.models.loading import is_offline

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
# if there is no index, the first
SINGLE = ("model.safetensors", "medusa_lm_head.safetensors", "hydra_lm_head.safetensors")
TORCH = ("pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt")
# where conversions for MLX keep a model's prediction layer, apart from its own tensors
BESIDE = (
    *("mtp.safetensors.index.json", "mtp.safetensors", "mtp/weights.safetensors"),
    *("mtp/model.safetensors", "model-mtp.safetensors", "optiq/mtp.safetensors"),
    "mtp-drafter/model.safetensors",
)
FOREIGN = re.compile(r"\.(weight_scale|weight_packed|qweight)$")  # compressed-tensors, GPTQ


class HeadFiles:
    """The config and the tensors of a head. Raises HeadError if its config.json cannot be read.

    Args:
        path_or_repo: a folder, a repository, or a file or an index with tensors. The config.json
            is in the file's folder or in the folder above. A GGUF file, also as
            "owner/repository/file.gguf", needs none.
        torch_files: read files that `torch.save` wrote if there are no safetensors.
    """

    def __init__(self, path_or_repo: str | Path, *, torch_files: bool = True) -> None:
        self.name = self.repository = str(path_or_repo)
        self.torch_files, self.gguf = torch_files, dict[str, Any]()
        folder, self.chosen_file = Path(path_or_repo).expanduser(), None
        if folder.suffix == ".gguf":
            self.repository = str(folder.parent)
            self.folder = folder.parent if folder.parent.is_dir() else None
            if (file := self.path(folder.name)) is None:
                raise HeadError(
                    f"There is no file {self.name}. Give the path of a GGUF file, or "
                    "owner/repository/file.gguf."
                )
            self.config, self.gguf = read_gguf(file)
            return
        if folder.is_file() and folder.suffix in (".safetensors", ".json"):
            file, folder = folder, folder.parent
            # Conversions keep the layer in a subfolder such as mtp/, next to the config.json of the
            # model.
            folder = folder if (folder / CONFIG).is_file() else folder.parent
            self.chosen_file = str(file.relative_to(folder))
        self.folder = folder if folder.is_dir() else None
        self.config = self._read_json(CONFIG, "says what kind of head it is")
        for section in (self.config, self.config.get("mlx_lm_extra_tensors")):
            if self.chosen_file is None and isinstance(section, dict) and "mtp_file" in section:
                self.chosen_file = str(section["mtp_file"])

    def _require(self, name: str, use: str) -> Path:
        if (path := self.path(name)) is None:
            raise HeadError(f"{self.name} has no {name}, which {use}.")
        return path

    def _read_json(self, name: str, use: str) -> dict[str, Any]:
        path = self._require(name, use)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise HeadError(f"{self.name}: {name} cannot be read: {error}") from error
        if not isinstance(content, dict):
            kind = type(content).__name__
            raise HeadError(f"{self.name}: {name} holds a {kind}, no object.")
        return content

    def check_number(self, name: str, value: Any, low: int, high: int) -> None:
        """Raise HeadError unless a number of the config is an int from `low` to `high`."""
        if not (isinstance(value, int) and low <= value <= high):
            raise HeadError(
                f"{self.name}: {name} is {value!r}, expected {low} to {high}. Fetch it again, or "
                "use a head that was trained for this target."
            )

    def path(self, name: str) -> Path | None:
        """Path of a file, fetched if needed, or None if it does not exist. Raises HeadError."""
        path = self.folder / name if self.folder is not None else None
        if path is not None and not path.is_file():
            return None
        is_of_torch = not name.endswith((".json", ".safetensors", ".gguf"))
        if is_of_torch and not (self.torch_files and find_spec("torch")):
            way = "Start the server with it as --draft-model"
            if self.torch_files:
                way = "Install torch"
            raise HeadError(
                f"{self.name} has no safetensors, and what torch.save wrote is not read here. "
                f"{way}, or convert it: safetensors.torch.save_file({{n: x.clone() for n, x in "
                f'torch.load("{name}").items()}}, "{SINGLE[0]}").'
            )
        if path is not None:
            return path
        try:
            return Path(hf_hub_download(self.repository, name))
        except LocalEntryNotFoundError as error:
            why = "you seem to be offline: " if is_offline() else ""
            raise HeadError(
                f"{why}{self.name}: {name} is not here, and cannot be fetched."
            ) from error
        except EntryNotFoundError:
            return None
        except (HFValidationError, RepositoryNotFoundError) as error:
            raise HeadError(
                f"There is no folder {self.name}, and no Hugging Face repository of that name that "
                "can be read from here."
            ) from error
        except Exception as error:  # each version of the Hub's client raises others
            raise HeadError(f"{self.name}: {name} was not fetched whole: {error}") from error

    @cached_property
    def list_file(self) -> str | None:
        """The file or index that lists the tensors, or None. Raises HeadError if it is missing.

        A file that the user or the config names comes first, then one beside the model's own files,
        then the model's index, then a single file.
        """
        if self.chosen_file is None:
            # In a repository each of these names would cost a request.
            beside = BESIDE if self.folder is not None else ()
            return next(filter(self.path, (*beside, INDEX, *SINGLE)), None)
        if self.path(self.chosen_file) is None:
            raise HeadError(
                f"{self.name}: its {CONFIG} names {self.chosen_file} for its prediction layer, "
                "which is not here. Fetch it with hf download."
            )
        return self.chosen_file

    @property
    def is_apart(self) -> bool:
        return self.list_file not in (None, INDEX, *SINGLE)

    @cached_property
    def weight_map(self) -> Mapping[str, str]:
        """Map from the name of each tensor to its file."""
        if self.gguf:
            return dict.fromkeys(self.gguf, Path(self.name).name)
        listed = self.list_file
        if listed is not None and listed.endswith(".json"):
            files = self._read_json(listed, "lists its tensors").get("weight_map")
            if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
                raise HeadError(f"{self.name}: {listed} does not name a file for each tensor.")
            return files
        here = [] if self.folder is None else self.folder.glob("*.safetensors")
        files = [listed] if listed else sorted(path.name for path in here)
        # `path` raises for a file of torch that may not be read, so these names are tried last.
        files = files or list(islice(filter(self.path, TORCH), 1))
        return {tensor: file for file in files for tensor in self._tensors(file)[0]}

    def own_layers(self) -> list[str]:
        """Prefixes of the prediction layers in a model's files. Raises HeadError."""
        prefixes = layer_prefixes(self.config, self.weight_map)
        self.check_quantization(*prefixes)
        return prefixes

    def check_quantization(self, *prefixes: str) -> None:
        """Raise HeadError if tensors with these prefixes are quantized in a way that MLX lacks."""
        for name in self.weight_map:
            if name.startswith(prefixes) and FOREIGN.search(name):
                raise HeadError(
                    f"{self.name} is quantized in a way that mlx-lm does not read ({name}). Give "
                    "the original repository, or a conversion for MLX."
                )

    def read(self, names: Iterable[str]) -> tuple[dict[str, mx.array], bool]:
        """Read these tensors. Returns them, and True if MLX wrote one of their files."""
        wanted = list(names)
        if self.gguf:
            return {name: dequantized(self.gguf[name]) for name in wanted}, False
        files = [self._tensors(file) for file in sorted({self.weight_map[name] for name in wanted})]
        read = {name: x for tensors, _ in files for name, x in tensors.items()}
        return {n: read[n] for n in wanted if n in read}, any(is_mlx for _, is_mlx in files)

    def load_into(self, module: nn.Module, dtype: mx.Dtype) -> None:
        """Load all tensors into a module. Raises ValueError if they do not fit."""
        tensors, _ = self.read(self.weight_map)
        module.load_weights([(name, x.astype(dtype)) for name, x in tensors.items()])

    def _tensors(self, file: str) -> tuple[Mapping[str, mx.array], bool]:
        """Read a file lazily. Returns its tensors, and True if it was written for MLX."""
        path = self._require(file, "its index names. Fetch it too")
        try:
            if path.suffix != ".safetensors":
                return _read_torch(path), False
            # This checks that every tensor lies within the file, and mx.load does not.
            with safe_open(path, "numpy"):
                loaded: Any = mx.load(str(path), return_metadata=True)
        # safetensors, MLX, torch and the file system may raise anything.
        except Exception as error:
            raise HeadError(
                f"{self.name}: {file} cannot be read: {error}. Fetch it again, or give another."
            ) from error
        tensors, metadata = loaded
        return tensors, metadata.get("format") == "mlx"


def _read_torch(path: Path) -> dict[str, mx.array]:
    """Tensors that `torch.save` wrote, as float32."""
    torch: Any = importlib.import_module("torch")
    # Older versions may run code from the file in spite of `weights_only` (CVE-2025-32434).
    if [int(part) for part in torch.__version__.split(".")[:2]] < [2, 6]:
        raise ValueError(f"torch {torch.__version__} may run code that it holds; install 2.6")
    saved = torch.load(path, weights_only=True, map_location="cpu")
    tensors = {name: x for name, x in saved.items() if torch.is_tensor(x)}
    # NumPy has no bfloat16.
    floats = {name: x.float() for name, x in tensors.items() if x.is_floating_point()}
    return {name: mx.array(x.numpy()) for name, x in {**tensors, **floats}.items()}
