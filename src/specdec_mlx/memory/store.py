"""`Memory`: earlier texts, bounded, and shared by generations and threads."""

from __future__ import annotations

import hashlib
import os
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from msgspec import Meta

from specdec_mlx.arguments import PROCESS as PROCESS
from specdec_mlx.arguments import argument_error, check_int
from specdec_mlx.files import Count
from specdec_mlx.memory.file import FileHeader, Integers
from specdec_mlx.memory.index import MAX_TOKEN, SEPARATOR, ContextIndex
from specdec_mlx.memory.persistent import PersistentStore, opened
from specdec_mlx.progress import progress_bar

SKIPPED_FOLDERS = {"__pycache__", "node_modules", "venv", "site-packages"}  # and hidden folders
LARGEST_FILE = 2_000_000  # bytes; larger files are data and not texts
LOOKED_AT = 8192  # first bytes of a file; a zero byte among them means that it is no text


def texts_of(paths: Sequence[Path | str], tokenizer: Any) -> Iterator[list[int] | None]:
    for path in paths:
        for file in files_in(Path(path).expanduser().absolute()):
            yield tokens_of(str(file), tokenizer)


def files_in(root: Path) -> Iterator[Path]:
    """A file itself, or the regular files in a folder, in order, without skipped names."""
    if root.is_file():
        yield root
        return
    if not root.is_dir():
        raise FileNotFoundError(f"There is no file or folder {root}. Name what is to be read.")
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f[0] != "." and f not in SKIPPED_FOLDERS)
        for name in sorted(names):
            file = Path(folder, name)
            if name[0] != "." and file.is_file() and not file.is_symlink():
                yield file


def state_of(name: str) -> str:
    """Size and time of a file, by which changes are noticed."""
    status = os.stat(name)
    return f"{status.st_size}:{status.st_mtime_ns}"


def tokens_of(name: str, tokenizer: Any) -> list[int] | None:
    """Token ids of a file. None for a file that is too large, or no text."""
    if os.stat(name).st_size > LARGEST_FILE:
        return None
    content = Path(name).read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    if b"\x00" in content[:LOOKED_AT]:
        return None
    return list(tokenizer.encode(text, add_special_tokens=False)) if text else []


BYTES_PER_TOKEN = 80  # token and place take 4 bytes each, a key 64, and its address 8
YOUNG = 8192  # tokens up to which an index is sorted again for every new text, in 6 ms
ROOM_AFTER = 15 / 16  # share of the bound that stays, so that not every new text evicts


@dataclass(frozen=True)
class Update:
    """Numbers of files.

    Attributes:
        read: read now.
        unchanged: known, and not changed.
        gone: known, and no longer there.
        skipped: no texts.
    """

    read: int
    unchanged: int
    gone: int
    skipped: int


class TextsHeader(FileHeader, kw_only=True):
    """Header of a memory's file.

    Attributes:
        max_tokens: limit of the memory.
        remember_prompts: whether prompts are kept as well.
        indexes: [tokens, places] of each index.
        sources: state and digest of each file that was read.
    """

    max_tokens: Annotated[int, Meta(ge=1)]
    remember_prompts: bool
    indexes: list[tuple[Count, Count]]
    sources: dict[str, tuple[str, str]]


class Memory(PersistentStore):
    """Texts for a `SuffixDrafter` to draft from; safe with many threads.

    The texts are in a few immutable indexes, oldest first. A new text joins the youngest index, and
    an index is merged with its older neighbour when it has reached the same size. A token is
    therefore sorted a logarithmic number of times, and it takes 80 bytes.

    Attributes:
        max_tokens, max_bytes: limits. The smaller limit counts, and the oldest texts go first.
        tokenizer: the tokenizer of the token ids, or its fingerprint. None takes the first
            tokenizer that drafts from the memory. Texts of other tokenizers are kept apart (`of`)
            and not saved.
        remember_prompts: also keep the prompt of a generation.
        indexes: the current texts, indexed. Later texts make new indexes.
        sources: files that `specdec-mlx memory build` has read.
        path: path of the memory's file.
    """

    kind: ClassVar[str] = "texts"
    header = TextsHeader
    what: ClassVar[str] = "memory"

    def __init__(
        self,
        max_tokens: int = 1_000_000,
        max_bytes: int | None = None,
        *,
        tokenizer: Any = None,
        remember_prompts: bool = False,
    ) -> None:
        super().__init__(tokenizer)
        self.remember_prompts = remember_prompts
        self.max_tokens = check_int("max_tokens", max_tokens, 1, ". Memory.load(path) reads a file")
        if max_bytes is not None:
            most = check_int("max_bytes", max_bytes, BYTES_PER_TOKEN) // BYTES_PER_TOKEN
            self.max_tokens = min(self.max_tokens, most)
        self.sources: dict[str, tuple[str, str]] = {}
        self.indexes: tuple[ContextIndex, ...] = ()

    @classmethod
    def from_files(
        cls, paths: Path | str | Sequence[Path | str], tokenizer: Any, max_tokens: int = 4_000_000
    ) -> Memory:
        """A memory of files and folders, such as your own code; see `update`."""
        memory = cls(max_tokens)
        memory.update(paths, tokenizer)
        memory.compact()
        return memory

    def empty(self) -> Memory:
        return Memory(self.max_tokens, remember_prompts=self.remember_prompts)

    def __len__(self) -> int:
        """Number of tokens, separators included."""
        return sum(map(len, self.indexes))

    def __repr__(self) -> str:
        return f"<Memory of {len(self)} tokens>"

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        return BYTES_PER_TOKEN * len(self)

    def texts(self) -> list[Integers]:
        """The texts, oldest first."""
        id_arrays = [np.array(index.ids) for index in self.indexes]
        return [
            part[:-1] for ids in id_arrays for part in np.split(ids, _separators_in(ids) + 1)[:-1]
        ]

    @property
    def largest_token(self) -> int:
        """The largest token id, -1 in an empty memory."""
        return max((int(np.max(index.ids)) for index in self.indexes), default=SEPARATOR)

    def add(self, tokens: Sequence[int]) -> None:
        """Remember a text [n]. A single token is ignored. Raises ValueError."""
        text = _checked(tokens)
        if len(text) >= 2:
            with self._lock:
                self._extend([text])
                self.save_now_and_then()

    def _merge(self, other: Memory) -> None:
        """Add the texts that this memory lacks, as younger texts."""
        theirs = other.texts()
        with self._lock:
            counts = Counter(map(text_digest, self.texts()))
            self._extend([text for text in theirs if not _taken(counts, text)])
            self.sources |= other.sources

    def update(self, paths: Path | str | Sequence[Path | str], tokenizer: Any) -> Update:
        """Bring the memory up to date with files and folders. Only changed files are tokenized.

        A file is one text. A file that has changed, or is gone from a folder, is forgotten first.
        In a folder, hidden and large files, files that are not UTF-8, and folders of installed
        packages are skipped. Raises FileNotFoundError, and TokenizerMismatchError for another
        tokenizer.
        """
        self.check_tokenizer(tokenizer)
        listed = [paths] if isinstance(paths, Path | str) else paths
        roots = [Path(path).expanduser().absolute() for path in listed]
        there = {str(file) for root in roots for file in files_in(root)}
        known = self.sources
        missing = known.keys() - there
        gone = {name for name in missing if any(map(Path(name).is_relative_to, roots))}
        changed = [name for name in sorted(there) if known.get(name, (None,))[0] != state_of(name)]
        lost = Counter(known[name][1] for name in {*gone, *changed} & known.keys())
        sources = {name: source for name, source in known.items() if name not in gone}
        texts, skipped = [], 0
        for name in progress_bar(changed, "reading", unit="file", delay=1, leave=False):
            state, tokens = state_of(name), tokens_of(name, tokenizer)
            skipped += tokens is None
            text = np.array(tokens or [], np.int32)
            sources[name] = (state, text_digest(text) if len(text) >= 2 else "")
            texts.append(text)
        with self._lock:
            # Texts in an index have no names: those of lost files are found by their digests.
            if any(lost.values()):
                texts_left = [text for text in self.texts() if not _taken(lost, text)]
                self.indexes = (ContextIndex(join(texts_left)),) if texts_left else ()
            self._extend([text for text in texts if len(text) >= 2])
        self.sources = sources
        return Update(len(changed) - skipped, len(there) - len(changed), len(gone), skipped)

    def prune(self, max_tokens: int) -> None:
        """Forget the oldest texts until at most `max_tokens` tokens are left."""
        with self._lock:
            self.max_tokens = max_tokens
            self.indexes = _bounded(self.indexes, max_tokens, max_tokens)
            self.compact()

    def compact(self) -> None:
        """Make one index of all. Look-ups get faster; a million tokens take seconds."""
        with self._lock:
            if len(self.indexes) > 1:
                together = sum((index.ids for index in self.indexes), array("i"))
                self.indexes = (ContextIndex(together),)

    def _content(self, in_public: bool) -> tuple[FileHeader, Sequence[Any]]:
        header = TextsHeader(
            kind=self.kind,
            tokenizer=self.tokenizer,
            max_tokens=self.max_tokens,
            remember_prompts=self.remember_prompts,
            indexes=[(len(index.ids), len(index.places)) for index in self.indexes],
            sources={} if in_public else self.sources,
        )
        return header, [a for index in self.indexes for a in (index.ids, index.places)]

    @classmethod
    def _of(cls, header: TextsHeader, data: Integers) -> Memory:
        remembers = header.remember_prompts
        memory = cls(header.max_tokens, tokenizer=header.tokenizer, remember_prompts=remembers)
        memory.sources = header.sources
        memory.indexes = tuple(_read(header.indexes, data))
        return memory

    def _take_over(self, saved: Memory, *, is_own: bool) -> None:
        saved.max_tokens = self.max_tokens
        saved.merge(self)
        self.indexes = _bounded(saved.indexes, self.max_tokens)
        self.sources = saved.sources | self.sources

    def _extend(self, texts: Sequence[Integers]) -> None:
        if not texts:
            return
        # A text longer than the bound keeps its end.
        youngest = join([text[-self.max_tokens + 1 :] for text in texts])
        older = list(self.indexes)
        # Merging only indexes of similar size sorts each token a logarithmic number of times.
        while older and len(older[-1]) <= max(YOUNG, 2 * len(youngest)):
            youngest = older.pop().ids + youngest
        self.indexes = _bounded((*older, ContextIndex(youngest)), self.max_tokens)


def as_memory(memory: Memory | Path | str | None) -> Memory | None:
    """A memory itself, the memory of a file (`opened`), a new memory for "process", or None."""
    if memory is None or isinstance(memory, Memory):
        return memory
    return Memory() if memory == PROCESS else opened(memory, Memory, Memory)


def join(texts: Sequence[Integers]) -> array[int]:
    """Texts in a row, each followed by a separator."""
    joined = array("i")
    for text in texts:
        joined.frombytes(text.astype(np.int32).tobytes())
        joined.append(SEPARATOR)
    return joined


def _separators_in(tokens: Integers) -> Integers:
    return np.flatnonzero(tokens == SEPARATOR)


def text_digest(text: Integers) -> str:
    return hashlib.sha256(text.tobytes()).hexdigest()[:16]


def _taken(counts: Counter[str], text: Integers) -> bool:
    """True if this text is counted. Its count then falls by one."""
    digest = text_digest(text)
    counts[digest] -= 1
    return counts[digest] >= 0


def _bounded(
    indexes: tuple[ContextIndex, ...], bound: int, goal: int | None = None
) -> tuple[ContextIndex, ...]:
    """The youngest texts: all up to `bound` tokens, else about `goal` tokens, at least one text."""
    total = sum(map(len, indexes))
    if total <= bound:
        return indexes
    excess = total - (int(ROOM_AFTER * bound) if goal is None else goal)
    while len(indexes) > 1 and len(indexes[0]) <= excess:
        excess -= len(indexes[0])
        indexes = indexes[1:]
    oldest = indexes[0]
    starts = [0, *(_separators_in(np.array(oldest.ids)) + 1).tolist()]
    last = -1 if len(indexes) > 1 else -2  # the youngest text of all stays
    cut = starts[min(bisect_left(starts, excess), len(starts) + last)]
    # Cutting whole texts leaves the order of the other places as it is: no sort.
    places = [place - cut for place in oldest.places if place >= cut]
    rest = (ContextIndex(oldest.ids[cut:], places),) if cut < len(oldest) else ()
    return (*rest, *indexes[1:])


def _read(sizes: Sequence[Sequence[int]], data: Integers) -> Iterator[ContextIndex]:
    """The indexes of a file, each with [tokens, places]."""
    if sum(map(sum, sizes)) != len(data):
        raise ValueError(f"{sizes} for {len(data)} integers")
    at = 0
    for n, m in sizes:
        tokens, places = data[at : at + n], data[at + n : at + n + m]
        if n and (tokens.min() < SEPARATOR or tokens.max() > MAX_TOKEN):
            raise ValueError("tokens out of range")
        if m and (places.min() < 0 or places.max() >= n or tokens[places].min() < 0):
            raise ValueError("places out of range")
        yield ContextIndex(array("i", tokens.tobytes()), array("i", places.tobytes()))
        at += n + m


def _checked(text: Sequence[int]) -> Integers:
    tokens: Integers = np.array(text)
    if tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
        raise argument_error("tokens", text, "token ids [n], ints. Tokenize a text first")
    extremes = tokens.min(initial=0), tokens.max(initial=0)
    for token in (token for token in extremes if not 0 <= token <= MAX_TOKEN):
        raise ValueError(
            f"A memory got token {token}, expected ids from 0 to {MAX_TOKEN}. "
            "Tokenize the text with the target's tokenizer."
        )
    return tokens
