"""Base of everything that is saved in one file, for one tokenizer, by several processes."""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import RLock
from typing import Any, ClassVar, TypeVar

from specdec_mlx.arguments import argument_error
from specdec_mlx.contracts import DraftContext
from specdec_mlx.errors import MemoryFileError, TokenizerMismatchError
from specdec_mlx.memory import file
from specdec_mlx.memory.file import FileHeader, Integers, check_folder_of, locked
from specdec_mlx.models.loading import PerModel

SAVE_EVERY = 60.0  # seconds between two savings of an opened file: what a killed process loses


K = TypeVar("K", bound="PersistentStore")


class PersistentStore(ABC):
    """A memory of texts, or a table of counts, with a file. Safe with many threads.

    Attributes:
        kind, header: of its files.
        what: its name in messages.
        tokenizer: fingerprint of the tokenizer of its token ids. None until the first drafter.
        path: of its file, or None.
        refuses_others: raise for another tokenizer. Set once a file or tokenizer was named.
    """

    kind: ClassVar[str]
    header: ClassVar[type[FileHeader]]
    what: ClassVar[str]

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = fingerprint_of(tokenizer)
        self.refuses_others = tokenizer is not None
        self._vocab_size: int | None = None
        self._others: dict[Any, Any] = {}
        self.path: Path | None = None
        self._saved_as = ""
        self._save_at = float("inf")
        self._lock = RLock()

    @abstractmethod
    def empty(self: K) -> K:
        """A new object with the same bounds, for any tokenizer."""

    @abstractmethod
    def _content(self, in_public: bool) -> tuple[FileHeader, Sequence[Any]]:
        """Header and int32 arrays [n] for a file. In public without names of files."""

    @classmethod
    @abstractmethod
    def _of(cls: type[K], header: Any, data: Integers) -> K:
        """The object in a file. ValueError if the content does not fit the header."""

    @abstractmethod
    def _merge(self: K, other: K) -> None:
        """Add the content of another object."""

    @abstractmethod
    def _take_over(self: K, saved: K, *, is_own: bool) -> None:
        """Put the content of a file, its own or another, before the content added since."""

    @classmethod
    def load(cls: type[K], path: Path | str) -> K:
        """Read a file. Raises MemoryFileError."""
        if not isinstance(path, Path | str):
            raise argument_error("path", path, "a path of a file")
        path = Path(path)
        header, data = file.read_file(path, cls.kind, cls.header)
        try:
            loaded = cls._of(header, data)
        except ValueError as error:
            raise file.damaged(path, f"its header does not fit its content ({error})") from error
        loaded.path, loaded._saved_as, loaded.refuses_others = path, header.id, True
        return loaded

    def of(self: K, context: DraftContext) -> K:
        """The object for a target's tokenizer: itself for the first, else another without a file.

        Unknown tokenizers are distinguished by the size of the vocabulary. Raises
        TokenizerMismatchError for another tokenizer if it `refuses_others`.
        """
        if self.refuses_others:
            if context.tokenizer is not None:
                self.check_tokenizer(context.tokenizer)
            return self
        whose = fingerprint_of(context.tokenizer)
        with self._lock:
            self.tokenizer = self.tokenizer or whose
            self._vocab_size = self._vocab_size or context.vocab_size
            known: Any = self._vocab_size if whose is None else self.tokenizer
            identity = whose or context.vocab_size
            if identity in (None, known):
                return self
            others: dict[Any, K] = self._others
            if identity not in others:
                others[identity] = self.empty()
                if self.path is not None:
                    text = "%s is left out: it has another tokenizer's token ids than this model."
                    logging.getLogger(__name__).warning(text, self.path)
            return others[identity]

    def merge(self: K, other: K) -> None:
        """Add the content of another object. Raises TokenizerMismatchError."""
        if other.tokenizer is not None:
            self.check_tokenizer(other.tokenizer)
        self._merge(other)

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Raise TokenizerMismatchError for another tokenizer. The first one is accepted."""
        theirs, self.refuses_others = fingerprint_of(tokenizer), True
        if self.tokenizer is None:
            self.tokenizer = theirs
        if self.tokenizer != theirs:
            raise TokenizerMismatchError(
                f"The {self.what} {self.path or 'that was given'} holds token ids of tokenizer "
                f"{self.tokenizer}, the target's is {theirs}. Give a {self.what} that was "
                "written with this model's tokenizer, or make one: specdec-mlx memory build "
                "--tokenizer MODEL FILES."
            )

    def leave_out_others(self) -> None:
        """From now on, a target with another tokenizer gets no drafts of this, and no error."""
        self.refuses_others = False

    def save(self, path: Path | str | None = None) -> None:
        """Replace the file. Content that other processes saved meanwhile is merged first.

        path: None for the file that it was loaded from. Raises ValueError if there is none, and
        MemoryFileError for a file of another kind or tokenizer, or a damaged file.
        """
        path = path or self.path
        if path is None:
            raise ValueError(f"This {self.what} was loaded from no file. Give save(path).")
        path = Path(path)
        with self._lock, locked(path):
            # The id of the saving tells whether somebody else has written the file.
            if path.exists() and file.read_front(path)[0].id != self._saved_as:
                saved = type(self).load(path)
                if len({saved.tokenizer, self.tokenizer} - {None}) > 1:
                    raise MemoryFileError(
                        f"{path} is the {self.what} of tokenizer {saved.tokenizer}, this one is of "
                        f"{self.tokenizer}: it was left as it is. Save to another file."
                    )
                # The file is older content: its texts come before those that this process has
                # added.
                self._take_over(saved, is_own=path == self.path)
                self.tokenizer = self.tokenizer or saved.tokenizer
            self._saved_as = file.write_file(path, *self._content(in_public=False))
            self.path = path

    def save_now_and_then(self) -> None:
        """Save if it was opened by path, and the latest saving is `SAVE_EVERY` ago."""
        if self.path is not None and time.monotonic() >= self._save_at:
            self._save_at = time.monotonic() + SAVE_EVERY
            self.save()

    def export(self, path: Path) -> int:
        """Write a new file without the names of files that were read. Returns its bytes."""
        with self._lock, locked(path):
            file.write_file(path, *self._content(in_public=True))
        return path.stat().st_size


def opened(path: Path | str, kind: type[K], make: Callable[[], K]) -> K:
    """The object of a file, one for each process. It is saved every minute and at the end.

    The file may not exist yet. Raises MemoryFileError.
    """
    path = Path(path).expanduser().absolute()
    check_folder_of(path)
    with _opening:
        loaded = _open.get(path)
        if loaded is None:
            loaded = kind.load(path) if path.exists() else make()
            loaded.path, loaded._save_at = path, time.monotonic() + SAVE_EVERY
            loaded.refuses_others = True
            # At most a minute of texts is lost if the process is killed.
            atexit.register(loaded.save)
            _open[path] = loaded
    if not isinstance(loaded, kind):
        raise file.other_kind(path, loaded.kind, kind.kind)
    return loaded


_open: dict[Path, PersistentStore] = {}
_opening = RLock()


PROBES = (
    "The quick brown fox jumps over the lazy dog; the other animals, 23 of them, were sleeping.",
    "def f(x):\n    return {'a': [1, 22, 333], \"b\": x ** 2}  # ok?\n",
    "Two  spaces,\na new line\n\nand UPPER or CamelCase: a <b> & `c` = 3.14159e-10.",
)
"""Samples that any tokenizer can encode and decode without loss."""

SAMPLES = (*PROBES, "naïve café – Zürich, 東京, Привет, 😀", "  two  spaces\tand\ttabs\n\n\n")


def fingerprint_of(tokenizer: Any) -> str | None:
    """Digest of a tokenizer's vocabulary and encoding, equal in every process.

    A fingerprint, and None, are returned unchanged. It takes 0.1 s for 50,000 tokens, once.
    """
    if tokenizer is None or isinstance(tokenizer, str):
        return tokenizer
    return _digest(tokenizer)


@PerModel
def _digest(tokenizer: Any) -> str:
    samples = [list(tokenizer.encode(text, add_special_tokens=False)) for text in SAMPLES]
    content = [sorted(tokenizer.get_vocab().items()), samples]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
