"""Tensors of a file that torch saved, read without torch.

Such a file is an archive with a pickle, which names the tensors, and one entry of raw numbers for
each storage. The pickle may build tensors and dictionaries, and nothing else: anything that it
names besides is refused, so that no code of the file's choosing runs.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from specdec_mlx.errors import HeadError

TYPES = {
    "FloatStorage": mx.float32,
    "HalfStorage": mx.float16,
    "BFloat16Storage": mx.bfloat16,
    "LongStorage": mx.int64,
    "IntStorage": mx.int32,
    "BoolStorage": mx.bool_,
    "ByteStorage": mx.uint8,
}
"""Classes of torch's storages -> the type of their numbers."""


class _StorageType(NamedTuple):
    """Stands for a class of storages that the pickle names."""

    dtype: mx.Dtype


def read_torch_file(path: Path) -> dict[str, mx.array]:
    """Tensors by name, of a dictionary that was saved with `torch.save`.

    Raises:
        HeadError: the file is written otherwise, or names something that is no tensor.
    """
    if not zipfile.is_zipfile(path):
        raise HeadError(f"{path} is not an archive of torch 1.6 or later. Save it as safetensors.")
    with zipfile.ZipFile(path) as archive:
        listing = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        with archive.open(listing) as file:
            unpickler = _Unpickler(file, archive, listing.removesuffix("data.pkl"))
            try:
                saved = unpickler.load()
            except pickle.UnpicklingError as error:
                raise HeadError(f"{path}: {error} Save it as safetensors.") from error
    tensors = {name: value for name, value in saved.items() if isinstance(value, mx.array)}
    if not tensors:
        raise HeadError(f"{path} has no dictionary of tensors. Save it as safetensors.")
    return tensors


class _Unpickler(pickle.Unpickler):
    """Builds arrays where the pickle would have tensors."""

    def __init__(self, file: Any, archive: zipfile.ZipFile, folder: str) -> None:
        super().__init__(file)
        self._archive = archive
        self._folder = folder

    def find_class(self, module: str, name: str) -> Any:
        """What a name of the pickle stands for; few are allowed."""
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _strided
        if module == "torch" and name in TYPES:
            return _StorageType(TYPES[name])
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a tensor.")

    def persistent_load(self, pid: Any) -> mx.array:
        """The numbers [n] of a storage: ("storage", type, key, device, count)."""
        _, kind, key, _, _ = pid
        raw = np.frombuffer(self._archive.read(f"{self._folder}data/{key}"), np.uint8)
        return mx.view(mx.array(raw), kind.dtype)


def _strided(
    storage: mx.array, offset: int, shape: Sequence[int], strides: Sequence[int], *_: Any
) -> mx.array:
    """A tensor of a storage, from `offset` on, with strides in numbers."""
    return mx.contiguous(mx.as_strided(storage, list(shape), list(strides), offset))
