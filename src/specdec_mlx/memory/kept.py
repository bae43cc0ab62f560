"""What a file keeps: of one tokenizer, and saved by several processes."""

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


K = TypeVar("K", bound="KeptFile")


class KeptFile(ABC):
    """A memory of texts, or a table of counts; safe with many threads.

    kind, header: of its files. what: its name in messages. tokenizer: fingerprint of the tokenizer
    whose token ids these are; None: of the first that drafts from it. path: of its file.
    refuses_others: raise for another tokenizer, as where a file was named, or what was made for
    one.
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
        """A new one with the same bounds, of no tokenizer yet."""

    @abstractmethod
    def _content(self, in_public: bool) -> tuple[FileHeader, Sequence[Any]]:
        """FileHeader and int32 arrays [n] of a file; in public without the names of files read."""

    @classmethod
    @abstractmethod
    def _of(cls: type[K], header: Any, data: Integers) -> K:
        """What a file holds; raises ValueError for content that does not fit its header."""

    @abstractmethod
    def _merge(self: K, other: K) -> None:
        """Take over what another one holds."""

    @abstractmethod
    def _take_over(self: K, saved: K, *, is_own: bool) -> None:
        """Put the content of a file, its own or another one, before what this one has added."""

    @classmethod
    def load(cls: type[K], path: Path | str) -> K:
        """Read a file; MemoryFileError for another kind, a damaged or later one."""
        if not isinstance(path, Path | str):
            raise argument_error("path", path, "a path of a file")
        path = Path(path)
        header, data = file.read_file(path, cls.kind, cls.header)
        try:
            kept = cls._of(header, data)
        except ValueError as error:
            raise file.damaged(path, f"its header does not fit its content ({error})") from error
        kept.path, kept._saved_as, kept.refuses_others = path, header.id, True
        return kept

    def of(self: K, context: DraftContext) -> K:
        """The part of a target's tokenizer: itself for the first one, else one of no file.

        Tokenizers that are unknown are told apart by the size of the vocabulary. Raises
        TokenizerMismatchError for another one, where it `refuses_others`.
        """
        if self.refuses_others:
            if context.tokenizer is not None:
                self.check_tokenizer(context.tokenizer)
            return self
        whose = fingerprint_of(context.tokenizer)
        with self._lock:
            self.tokenizer = self.tokenizer or whose
            self._vocab_size = self._vocab_size or context.vocab_size
            own: Any = self._vocab_size if whose is None else self.tokenizer
            asked = whose or context.vocab_size
            if asked in (None, own):
                return self
            others: dict[Any, K] = self._others
            if asked not in others:
                others[asked] = self.empty()
                if self.path is not None:
                    told = "%s is left out: it has another tokenizer's token ids than this model."
                    logging.getLogger(__name__).warning(told, self.path)
            return others[asked]

    def merge(self: K, other: K) -> None:
        """Take over what another one holds; TokenizerMismatchError for another tokenizer's."""
        if other.tokenizer is not None:
            self.check_tokenizer(other.tokenizer)
        self._merge(other)

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Raise TokenizerMismatchError unless it is of this tokenizer, or of none yet."""
        found, self.refuses_others = fingerprint_of(tokenizer), True
        if self.tokenizer is None:
            self.tokenizer = found
        if self.tokenizer != found:
            raise TokenizerMismatchError(
                f"The {self.what} {self.path or 'that was given'} holds token ids of tokenizer "
                f"{self.tokenizer}, the target's is {found}. Give a {self.what} that was written "
                "with this model's tokenizer, or make one: specdec-mlx memory build --tokenizer "
                "MODEL FILES."
            )

    def save(self, path: Path | str | None = None) -> None:
        """Replace the file; what other processes saved there meanwhile is merged first.

        path: None: the one that it was loaded from, else ValueError. Raises MemoryFileError for a
        file of another kind or tokenizer, or a damaged one.
        """
        path = path or self.path
        if path is None:
            raise ValueError(f"This {self.what} was loaded from no file. Give save(path).")
        path = Path(path)
        with self._lock, locked(path):
            if path.exists() and file.read_front(path)[0].id != self._saved_as:
                saved = type(self).load(path)
                if len({saved.tokenizer, self.tokenizer} - {None}) > 1:
                    raise MemoryFileError(
                        f"{path} is the {self.what} of tokenizer {saved.tokenizer}, this one is of "
                        f"{self.tokenizer}: it was left as it is. Save to another file."
                    )
                self._take_over(saved, is_own=path == self.path)
                self.tokenizer = self.tokenizer or saved.tokenizer
            self._saved_as = file.write_file(path, *self._content(in_public=False))
            self.path = path

    def save_now_and_then(self) -> None:
        """Save, if the file was named by its path and the latest saving is `SAVE_EVERY` ago."""
        if self.path is not None and time.monotonic() >= self._save_at:
            self._save_at = time.monotonic() + SAVE_EVERY
            self.save()

    def export(self, path: Path) -> int:
        """Write a new file without the names of files that were read; returns its size, bytes."""
        with self._lock, locked(path):
            file.write_file(path, *self._content(in_public=True))
        return path.stat().st_size


def opened(path: Path | str, kind: type[K], make: Callable[[], K]) -> K:
    """Load a file, or make an empty one, once in a process; saved each minute and at the end.

    Raises MemoryFileError for another kind, a damaged file, and a folder that is not there.
    """
    path = Path(path).expanduser().absolute()
    check_folder_of(path)
    with _opening:
        found = _open.get(path)
        if found is None:
            found = kind.load(path) if path.exists() else make()
            found.path, found._save_at = path, time.monotonic() + SAVE_EVERY
            found.refuses_others = True
            atexit.register(found.save)
            _open[path] = found
    if not isinstance(found, kind):
        raise file.other_kind(path, found.kind, kind.kind)
    return found


_open: dict[Path, KeptFile] = {}
_opening = RLock()


PROBES = (
    "The quick brown fox jumps over the lazy dog; the other animals, 23 of them, were sleeping.",
    "def f(x):\n    return {'a': [1, 22, 333], \"b\": x ** 2}  # ok?\n",
    "Two  spaces,\na new line\n\nand UPPER or CamelCase: a <b> & `c` = 3.14159e-10.",
)
"""Samples that any tokenizer can give back as they were."""

SAMPLES = (*PROBES, "naïve café – Zürich, 東京, Привет, 😀", "  two  spaces\tand\ttabs\n\n\n")


def fingerprint_of(tokenizer: Any) -> str | None:
    """Digest of a tokenizer's vocabulary and of how it encodes samples; equal in every process.

    A fingerprint, and None, are returned as they are. 0.1 s for 50,000 tokens, once for each.
    """
    if tokenizer is None or isinstance(tokenizer, str):
        return tokenizer
    return _digest(tokenizer)


@PerModel
def _digest(tokenizer: Any) -> str:
    samples = [list(tokenizer.encode(text, add_special_tokens=False)) for text in SAMPLES]
    content = [sorted(tokenizer.get_vocab().items()), samples]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
