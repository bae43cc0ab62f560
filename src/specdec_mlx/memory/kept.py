"""What a file keeps: of one tokenizer, and saved by several processes."""

from __future__ import annotations

import atexit
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import RLock
from typing import Any, ClassVar, TypeVar

from specdec_mlx.errors import MemoryFileError, TokenizerMismatchError
from specdec_mlx.memory.file import check_folder_of, file_id, locked, other_kind
from specdec_mlx.memory.tokenizer import fingerprint_of

SAVE_EVERY = 60.0
"""Seconds between two savings of an opened file: what a killed process loses."""


K = TypeVar("K", bound="Kept")


class Kept(ABC):
    """A memory of texts, or a table of counts; safe with many threads.

    kind: of its files. what: its name in messages. tokenizer: fingerprint of the tokenizer whose
    token ids these are; None: of the first that is checked. path: of its file.
    """

    kind: ClassVar[str]
    what: ClassVar[str]

    def __init__(self, tokenizer: Any) -> None:
        """Of a tokenizer, or of its fingerprint; of no file."""
        self.tokenizer = fingerprint_of(tokenizer)
        self.path: Path | None = None
        self._saved_as = ""
        self._save_at = float("inf")
        self._lock = RLock()

    @classmethod
    @abstractmethod
    def load(cls: type[K], path: Path | str) -> K:
        """Read a file; MemoryFileError for one of another kind, or damaged."""

    @abstractmethod
    def merge(self: K, other: K) -> None:
        """Take over what another one holds; TokenizerMismatchError for another tokenizer's."""

    @abstractmethod
    def facts(self) -> Mapping[str, str]:
        """Counts of its content, by name, for people to read."""

    @abstractmethod
    def _write(self, path: Path, *, in_public: bool = False) -> str:
        """Write a file under its lock, in public without the names of files; returns its id."""

    @abstractmethod
    def _take_over(self: K, saved: K, *, is_own: bool) -> None:
        """Put what a file holds before what this one has added.

        Args:
            saved: loaded from it.
            is_own: True for the file that this one was loaded from or saved to.
        """

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Raise TokenizerMismatchError unless it is of this tokenizer, or of none yet."""
        found = fingerprint_of(tokenizer)
        if self.tokenizer is None:
            self.tokenizer = found
        if self.tokenizer != found:
            raise TokenizerMismatchError(
                f"The {self.what} holds token ids of tokenizer {self.tokenizer}, the target's is "
                f"{found}. Give a {self.what} that was written with this model's tokenizer, or "
                "make one: specdec-mlx memory build --tokenizer MODEL FILES."
            )

    def save(self, path: Path | str | None = None) -> None:
        """Replace the file; what other processes saved there meanwhile is merged first.

        Args:
            path: of the file; None: the one that it was loaded from.

        Raises:
            MemoryFileError: what stands there is of another kind, damaged, or of another tokenizer.
            ValueError: no path was given, and it was loaded from none.
        """
        path = path or self.path
        if path is None:
            raise ValueError(f"This {self.what} was loaded from no file. Give save(path).")
        path = Path(path)
        with self._lock, locked(path):
            if path.exists() and file_id(path) != self._saved_as:
                saved = type(self).load(path)
                if saved.tokenizer != self.tokenizer and None not in (
                    saved.tokenizer,
                    self.tokenizer,
                ):
                    raise MemoryFileError(
                        f"{path} is the {self.what} of tokenizer {saved.tokenizer}, this one is of "
                        f"{self.tokenizer}: it was left as it is. Save to another file."
                    )
                self._take_over(saved, is_own=path == self.path)
                self.tokenizer = self.tokenizer or saved.tokenizer
            self._saved_as = self._write(path)
            self.path = path

    def save_now_and_then(self) -> None:
        """Save, if the file was named by its path and the latest saving is `SAVE_EVERY` ago."""
        if self.path is not None and time.monotonic() >= self._save_at:
            self._save_at = time.monotonic() + SAVE_EVERY
            self.save()

    def export(self, path: Path) -> int:
        """Write a new file without the names of files that were read; returns its size, bytes."""
        with self._lock, locked(path):
            self._write(path, in_public=True)
        return path.stat().st_size


def opened(path: Path | str, kind: type[K], make: Callable[[], K]) -> K:
    """Load a file, once in a process; it is saved once a minute, and when the process ends.

    Args:
        path: of the file, in a folder that exists.
        kind: of its content.
        make: makes an empty one where there is no file.

    Raises:
        MemoryFileError: the file is of another kind or damaged, or its folder is not there.
    """
    path = Path(path).expanduser().absolute()
    check_folder_of(path)
    with _opening:
        found = _open.get(path)
        if found is None:
            found = kind.load(path) if path.exists() else make()
            found.path, found._save_at = path, time.monotonic() + SAVE_EVERY
            atexit.register(found.save)
            _open[path] = found
    if not isinstance(found, kind):
        raise other_kind(path, found.kind, kind.kind)
    return found


_open: dict[Path, Kept] = {}
_opening = RLock()
