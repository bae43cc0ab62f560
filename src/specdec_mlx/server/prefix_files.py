"""Caches of conversations in a folder, for a server that starts again, and beyond its memory.

A file is whole or not there, and its name has a digest of its content: one that was damaged is seen
before it is used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx.utils import tree_flatten
from mlx_lm.models import cache as mlx_lm_caches
from mlx_lm.models.cache import ArraysCache, load_prompt_cache, save_prompt_cache

from specdec_mlx.caches import leaves, wait_for
from specdec_mlx.contracts import DrafterStates
from specdec_mlx.drafters.heads.drafter import Head
from specdec_mlx.files import read_text
from specdec_mlx.memory.drafter_states import LatestFeatures, num_common
from specdec_mlx.models.loading import PerModel
from specdec_mlx.server.prefixes import Prefix, Prefixes, States, stateful
from specdec_mlx.window_cache import WindowCache

if TYPE_CHECKING:
    from specdec_mlx.server.flags import ServerSettings
    from specdec_mlx.server.loading import LoadedModel

OURS = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}\.safetensors(\.damaged)?")
PART = ".part-"  # begins the name of a file that is being written
HEADER = "prefix"  # name of our metadata in a file


class Header(msgspec.Struct, forbid_unknown_fields=True):
    """The metadata of a file.

    Attributes:
        key: of the model or the head that made the caches.
        tokens: of the whole text.
        points: ascending positions of the stored states; None if the caches can go back to any.
        layers: number of the text's own caches, which come before the states.
        of_head: the last of these caches holds the latest rows that a head has read.
        oldest: the caches can go back to any position from here on; None if only to `points`.
    """

    key: str
    tokens: Annotated[list[int], msgspec.Meta(min_length=1)]
    points: list[int] | None
    layers: Annotated[int, msgspec.Meta(ge=1)]
    of_head: bool = False
    oldest: int | None = None

    @classmethod
    def of(cls, path: Path) -> Header:
        """Read it; raises whatever MLX and Python do for what is no file of ours."""
        loaded: Any = mx.load(str(path), return_metadata=True)
        header = msgspec.json.decode(loaded[1][f"0.{HEADER}"], type=cls)
        ascending = (0, *(header.points or ()), len(header.tokens) + 1)
        if any(a >= b for a, b in pairwise(ascending)):
            raise ValueError(f"its states are at {header.points} of {len(header.tokens)} tokens")
        return header

    def reach(self, tokens: list[int]) -> int:
        """How many of the tokens its caches can go back to."""
        common = num_common(self.tokens, tokens)
        if self.points is None or (self.oldest is not None and common >= self.oldest):
            return common
        return max((p for p in (*self.points, len(self.tokens)) if p <= common), default=0)


class PrefixFiles:
    """Caches that one model made, a safetensors file for each conversation.

    Args:
        folder: an existing folder.
        key: of the model and everything its caches depend on, 16 hexadecimal digits.
        most_bytes: of all files in the folder; the oldest are deleted.
    """

    def __init__(self, folder: Path, key: str, most_bytes: int) -> None:
        self.folder, self.key, self.most_bytes = folder, key, most_bytes
        self._headers = dict[Path, Header]()
        for part in folder.glob(f"{PART}*"):  # of a process that was killed
            with suppress(OSError):  # of a folder that is only read
                part.unlink(missing_ok=True)
        for path in folder.glob(f"{key}-*.safetensors"):
            try:
                header = Header.of(path)
                if header.key != key:
                    raise ValueError(f"it is of another model or head, {header.key}")
                self._headers[path] = header
            # whatever MLX says of what is no file of its own
            except Exception as error:
                self._put_aside(path, error)

    def longer(self, tokens: list[int], least: int) -> tuple[list[int], list[Any], States] | None:
        """Tokens, caches and states of the file that saves most of reading `tokens`.

        None if it saves no more than the first `least`, or is damaged.
        """
        saved = {path: header.reach(tokens) for path, header in self._headers.items()}
        path = max(saved, key=lambda path: saved[path], default=None)
        if path is None or saved[path] <= least:
            return None
        header = self._headers[path]
        try:
            if path.stem != f"{self.key}-{_digest(path)}":
                # Damaged caches would change the text without an error.
                raise ValueError("its content has changed since it was written")
            flat = load_prompt_cache(str(path))
            wait_for(flat)
            caches, rest = flat[: header.layers], iter(flat[header.layers :])
            if header.of_head:
                *caches, rows = caches
                caches = [*map(window_of_file, caches), latest_rows(rows, len(header.tokens))]
            of_point = stateful(caches)
            at = {p: [next(rest) for _ in of_point] for p in header.points or ()}
            # The time of its last use: `_delete_oldest` sorts by it.
            with suppress(OSError):
                os.utime(path)
        except Exception as error:
            del self._headers[path]
            self._put_aside(path, error)
            return None
        return header.tokens, caches, at

    def save(self, prefix: Prefix) -> None:
        """Write the caches of a text, in the place of those of a part of it."""
        tokens, points = prefix.tokens, sorted(prefix.at)
        caches, of_head = prefix.caches, isinstance(prefix.caches[-1], LatestFeatures)
        if of_head:
            *caches, rows = caches
            caches = [*map(stored_window, caches), stored_rows(rows)]
        flat = [*caches, *chain.from_iterable(prefix.at[p] for p in points)]
        if not all(hasattr(mlx_lm_caches, type(cache).__name__) for cache in leaves(flat)):
            return  # of a class that mlx-lm does not read
        header = Header(
            self.key,
            tokens,
            points if stateful(prefix.caches) else None,
            len(prefix.caches),
            of_head,
            oldest_position(prefix.caches),
        )
        part = self.folder / f"{PART}{os.getpid()}.safetensors"
        try:
            # Created with its rights, because the caches tell what was said.
            os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
            save_prompt_cache(str(part), flat, {HEADER: msgspec.json.encode(header).decode()})
            # A rename is atomic, so that no reader sees half a file.
            path = part.rename(self.folder / f"{self.key}-{_digest(part)}.safetensors")
            for old, known in list(self._headers.items()):
                if old != path and tokens[: len(known.tokens)] == known.tokens:
                    del self._headers[old]
                    old.unlink(missing_ok=True)
            self._headers[path] = header
            self._delete_oldest()
        except (OSError, RuntimeError) as error:
            logging.warning(f"Prompt cache: {self.folder} cannot be written: {error}")
        finally:  # a part takes room on a full disk
            with suppress(OSError):
                part.unlink(missing_ok=True)

    def _delete_oldest(self) -> None:
        files = list[tuple[int, int, Path]]()
        for path in filter(lambda path: OURS.fullmatch(path.name), self.folder.iterdir()):
            with suppress(FileNotFoundError):  # deleted by another server
                files.append((path.stat().st_mtime_ns, path.stat().st_size, path))
        excess = sum(size for _, size, _ in files) - self.most_bytes
        for _, size, path in sorted(files):
            if excess > 0:
                excess -= size
                path.unlink(missing_ok=True)

    def _put_aside(self, path: Path, error: Exception) -> None:
        """Rename a file that cannot be used; one that is gone was the oldest."""
        if not isinstance(error, FileNotFoundError):
            logging.warning(f"Prompt cache: {path.name} is put aside: {error}")
        with suppress(OSError):
            path.rename(f"{path}.damaged")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def oldest_position(caches: Sequence[Any]) -> int | None:
    """The first position that caches can go back to without a stored state, or None."""
    restored = stateful(caches)
    if not restored or not all(isinstance(cache, WindowCache) for cache in restored):
        return None
    oldest: int = max(cache.oldest for cache in restored)
    return oldest


def stored_rows(latest: LatestFeatures) -> ArraysCache:
    """The rows in a cache of mlx-lm's, for a file."""
    stored = ArraysCache(2 + len(latest.states))
    # MLX does not write empty arrays.
    rows = mx.concatenate([latest.rows, mx.zeros((1, latest.rows.shape[1]), latest.rows.dtype)])
    stored.cache = [rows, mx.array([latest.num_skipped]), *latest.states]
    return stored


def latest_rows(stored: ArraysCache, num_tokens: int) -> LatestFeatures:
    """The reverse of `stored_rows`, for a text of `num_tokens`."""
    rows, num_skipped, *states = stored.cache
    return LatestFeatures(rows[:-1], num_tokens, num_skipped.item(), states)


def stored_window(cache: Any) -> Any:
    """A window in a cache of mlx-lm's, for a file. Other caches stay as they are."""
    if type(cache) is not WindowCache:
        return cache
    keys, values, *numbers = cache.state
    stored = ArraysCache(3)
    stored.cache = [keys, values, mx.array(numbers)]
    return stored


def window_of_file(stored: Any) -> Any:
    """The reverse of `stored_window`."""
    if type(stored) is not ArraysCache:
        return stored
    keys, values, numbers = stored.cache
    cache = WindowCache(1)
    cache.state = keys, values, *numbers.tolist()
    return cache


def files_for_head(head: Head, files: PrefixFiles | None) -> PrefixFiles | None:
    """The files of a head's states, beside the files of its target's caches."""
    if files is None:
        return None
    key = content_digest(head, [files.key, head.kind, *head.notes()])[:16]
    return PrefixFiles(files.folder, key, files.most_bytes)


_objects: PerModel[object] = PerModel(lambda owner: object())


@dataclass(frozen=True)
class ServedStates(DrafterStates):
    """States among the stored prefixes of a server. Those of heads are in files too.

    Attributes:
        prefixes: where the states are stored.
        loaded: the target. Without one there are no files.
        tokens, keys: of the prompt. Its keys tell pictures apart.
    """

    prefixes: Prefixes
    loaded: LoadedModel | None = None
    tokens: Sequence[int] = ()
    keys: Sequence[int] = ()

    def keys_of(self, text: Sequence[int]) -> list[int]:
        """The keys of a text, which begins as the prompt does."""
        tokens = list(text)
        common = num_common(self.tokens, tokens)
        return [*self.keys[:common], *tokens[common:]]

    def fetch(self, owner: nn.Module, tokens: Sequence[int]) -> tuple[list[Any] | None, int]:
        # `fetch_nearest_cache` leaves the last token to be fed.
        known, files = [*self.keys_of(tokens), 0], self.files(owner)
        caches, rest = self.prefixes.fetch_nearest_cache(place_of(owner), known, files)
        return caches, len(known) - len(rest)

    def store(self, owner: nn.Module, tokens: Sequence[int], caches: list[Any]) -> None:
        files = self.files(owner)
        self.prefixes.insert_cache(place_of(owner), self.keys_of(tokens), caches, files)

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


def files_for(loaded: LoadedModel, settings: ServerSettings) -> PrefixFiles | None:
    """The files of a model that is loaded, whole on this rank and without what sees; else None.

    Files do not tell where pictures are.
    """
    if settings.prompt_cache is None or loaded.sight or mx.distributed.init().size() > 1:
        return None
    about: Sequence[Any] = [
        loaded.config,
        loaded.adapter and json.loads(read_text(Path(loaded.adapter) / "adapter_config.json")),
        loaded.files if loaded.config.get("model_file") else (),  # code of its own
        (settings.kv_bits, settings.kv_group_size, settings.quantized_kv_start),
        f"{version('mlx-lm')}-{version('mlx')}-{platform.platform()}",
        mx.device_info()["architecture"],
    ]
    folder = settings.prompt_cache.expanduser().absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = content_digest(loaded.model, about)[:16]
    return PrefixFiles(folder, key, settings.prompt_cache_limit)


def content_digest(model: nn.Module, about: Any) -> str:
    """Digest of every bit of a model's parameters, and of other facts about it.

    The values are read, because copies and archives may keep the times of other files. This takes
    about a second for a gigabyte, once for a loaded model.

    Args:
        about: facts that can be written as JSON, such as the configuration.
    """
    description = json.dumps([type(model).__module__, about], sort_keys=True, default=str)
    digest = hashlib.sha256(description.encode())
    for name, array in sorted(tree_flatten(model.parameters())):
        checksum = zlib.crc32(memoryview(array.reshape(-1).view(mx.uint8)))
        digest.update(f"{name} {array.shape} {array.dtype} {checksum}\n".encode())
    return digest.hexdigest()
