"""`Memory`: texts that were written, bounded, shared by generations and threads."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int

from specdec_mlx.memory.file import damaged, read_file, write_file
from specdec_mlx.memory.index import ContextIndex
from specdec_mlx.memory.kept import Kept, opened
from specdec_mlx.memory.packing import MAX_TOKEN, SEPARATOR, check_tokens
from specdec_mlx.options import whole, wrong

BYTES_PER_TOKEN = 52
"""In memory: token and place, 4 bytes each, the same as Python reads them, 8 and 4; 4 packs of 8.

Beside them an index takes 4 bytes for each id of the vocabulary."""

YOUNG = 8192
"""Tokens up to which an index is sorted anew for every text that joins it: 4 milliseconds."""

KEPT = 15 / 16
"""Share of the bound that is left after the oldest texts went, so that not every text evicts."""


class Memory(Kept):
    """What was written so far, for a `SuffixDrafter` to draft from; safe with many threads.

    Texts stand in a few immutable indexes, oldest first. A new text joins the youngest one, and
    an index that has grown as large as the one before it is merged with it, so that a token is
    sorted a logarithmic number of times, and a look-up asks a logarithmic number of indexes.

    max_tokens, max_bytes: bounds, of which the smaller holds; the oldest texts go first. A token
        takes 52 bytes.
    tokenizer: whose token ids these are, or its fingerprint; None: the first that drafts from it.
    remember_prompts: whether what a generation was given is kept beside what it wrote.
    sources: what `specdec-mlx memory build` has read, by name. path: where it was loaded from.
    """

    kind: ClassVar[str] = "texts"
    what: ClassVar[str] = "memory"

    def __init__(
        self,
        max_tokens: int = 1_000_000,
        max_bytes: int | None = None,
        *,
        tokenizer: Any = None,
        remember_prompts: bool = False,
    ) -> None:
        """Start empty."""
        max_tokens = whole("max_tokens", max_tokens, None, ". Memory.load(path) reads a file")
        if max_tokens < 1 or (max_bytes is not None and max_bytes < BYTES_PER_TOKEN):
            raise ValueError(
                f"Memory: max_tokens is {max_tokens} and max_bytes {max_bytes}, expected at least "
                f"1 token and {BYTES_PER_TOKEN} bytes. To remember nothing, leave the memory out."
            )
        super().__init__(tokenizer)
        self.remember_prompts = remember_prompts
        self.max_tokens = max_tokens
        if max_bytes is not None:
            self.max_tokens = min(max_tokens, max_bytes // BYTES_PER_TOKEN)
        self.sources: dict[str, tuple[Any, ...]] = {}
        self._indexes: tuple[ContextIndex, ...] = ()

    def __len__(self) -> int:
        """Tokens held, separators included."""
        return sum(len(index) for index in self._indexes)

    def __repr__(self) -> str:
        """How much it holds."""
        return f"<Memory of {len(self)} tokens>"

    @property
    def num_bytes(self) -> int:
        """Bytes held in memory, or mapped from a file."""
        return BYTES_PER_TOKEN * len(self)

    def indexes(self) -> tuple[ContextIndex, ...]:
        """The texts as they are now, indexed; what is added later does not change it."""
        return self._indexes

    def texts(self) -> list[Int[np.ndarray, " n"]]:
        """The texts, oldest first."""
        return [text for index in self._indexes for text in split(index.tokens)]

    @property
    def largest_token(self) -> int:
        """The largest token id, -1 where nothing is held."""
        return max((index.largest for index in self._indexes), default=-1)

    def add(self, tokens: Sequence[int]) -> None:
        """Remember a text [n]; nothing where n < 2, since nothing follows a single token.

        Raises:
            ValueError: for what is no token id.
        """
        text = check_tokens(tokens)
        if len(text) >= 2:
            with self._lock:
                self._extend([text.astype(np.int32)])
                self.save_now_and_then()

    def merge(self, other: Memory) -> None:
        """Take over the texts of another memory that this one lacks, as the younger ones.

        A text that both hold n and m times is held max(n, m) times afterwards, so that merging
        again changes nothing.

        Raises TokenizerMismatchError for the memory of another tokenizer.
        """
        if other.tokenizer is not None:
            self.check_tokenizer(other.tokenizer)
        theirs = other.texts()
        with self._lock:
            held = Counter(text_digest(text) for text in self.texts())
            new = [text for text in theirs if not _taken(held, text_digest(text))]
            if new:
                self._extend(new)
            self.sources |= other.sources

    def replace(self, lost: Counter[str], texts: Sequence[Int[np.ndarray, " n"]]) -> None:
        """Forget the texts of these digests, as often as they count, and add others [n], int32."""
        new = [text for text in texts if len(text) >= 2]
        with self._lock:
            if any(lost.values()):
                left = lost.copy()
                kept = [text for text in self.texts() if not _taken(left, text_digest(text))]
                self._indexes = (ContextIndex.build(join(kept)),) if kept else ()
            if new:
                self._extend(new)

    def prune(self, max_tokens: int) -> None:
        """Forget the oldest texts until at most `max_tokens` are left; one index for the rest."""
        with self._lock:
            self.max_tokens = max_tokens
            self._indexes = _bounded(self._indexes, max_tokens, max_tokens)
            self.compact()

    def compact(self) -> None:
        """One index instead of several: look-ups are faster, and a million tokens take seconds."""
        with self._lock:
            if len(self._indexes) > 1:
                together = np.concatenate([index.tokens for index in self._indexes])
                self._indexes = (ContextIndex.build(together),)

    def facts(self) -> Mapping[str, str]:
        """Numbers of texts and tokens."""
        return {"texts": f"{len(self.texts()):,}", "tokens": f"{len(self):,}"}

    def _write(self, path: Path, *, in_public: bool = False) -> str:
        header = {
            "tokenizer": self.tokenizer,
            "max_tokens": self.max_tokens,
            "remember_prompts": self.remember_prompts,
            "indexes": [[len(index.tokens), len(index.order)] for index in self._indexes],
            "sources": {} if in_public else self.sources,
        }
        arrays = [array for index in self._indexes for array in (index.tokens, index.order)]
        return write_file(path, self.kind, header, arrays)

    @classmethod
    def load(cls, path: Path | str) -> Memory:
        """The memory of a file, mapped: 8 bytes a token are read when they are looked up.

        Raises:
            MemoryFileError: it is no memory, is damaged, or is of a later version.
            FileNotFoundError: there is no such file.
        """
        if not isinstance(path, Path | str):
            raise wrong("path", path, "a path of a file")
        path = Path(path)
        header, data = read_file(path, cls.kind)
        try:
            memory = cls(
                int(header["max_tokens"]),
                tokenizer=header["tokenizer"],
                remember_prompts=bool(header["remember_prompts"]),
            )
            memory.sources = {name: tuple(found) for name, found in header["sources"].items()}
            memory._indexes = tuple(_mapped(header["indexes"], data))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise damaged(path, f"its header does not fit its content ({error!r})") from error
        memory.path, memory._saved_as = path, header["id"]
        return memory

    def _take_over(self, saved: Memory, *, is_own: bool) -> None:
        bound, sources = self.max_tokens, self.sources
        saved.max_tokens = bound
        saved.merge(self)
        self._indexes = _bounded(saved._indexes, bound)
        self.sources = saved.sources | sources

    def _extend(self, texts: Sequence[Int[np.ndarray, " n"]]) -> None:
        """Add texts to the youngest index, merge what has grown, and forget the oldest."""
        youngest = join([text[-self.max_tokens + 1 :] for text in texts])
        older = list(self._indexes)
        while older and len(older[-1]) <= max(YOUNG, 2 * len(youngest)):
            youngest = np.concatenate([older.pop().tokens, youngest])
        self._indexes = _bounded((*older, ContextIndex.build(youngest)), self.max_tokens)


PROCESS = "process"
"""Names a memory that ends with its process, where the name of a file could stand."""


def as_memory(memory: Memory | Path | str | None) -> Memory | None:
    """The memory that is meant: itself, or that of a file, one in a process for each file.

    `PROCESS` is an empty one of no file; see `opened` for those of files.
    """
    if memory is None or isinstance(memory, Memory):
        return memory
    return Memory() if memory == PROCESS else opened(memory, Memory, Memory)


def join(texts: Sequence[Int[np.ndarray, " n"]]) -> Int[np.ndarray, " m"]:
    """Texts one behind the other, int32, each with a separator at its end."""
    end = np.array([SEPARATOR], np.int32)
    return np.concatenate([part for text in texts for part in (text.astype(np.int32), end)])


def split(tokens: Int[np.ndarray, " n"]) -> list[Int[np.ndarray, " m"]]:
    """The texts that `join` has put together."""
    return [text[1:] if i else text for i, text in enumerate(np.split(tokens, _ends(tokens)))][:-1]


def _ends(tokens: Int[np.ndarray, " n"]) -> Int[np.ndarray, " texts"]:
    """Where the separators stand."""
    return np.flatnonzero(tokens == SEPARATOR)


def text_digest(text: Int[np.ndarray, " n"]) -> str:
    """What a text is recognised by: a digest of its token ids [n], int32."""
    return hashlib.sha256(text.tobytes()).hexdigest()[:16]


def _taken(held: Counter[str], digest: str) -> bool:
    """True if a text of this digest is counted, and not yet against another of the same."""
    held[digest] -= 1
    return held[digest] >= 0


def _bounded(
    indexes: tuple[ContextIndex, ...], bound: int, goal: int | None = None
) -> tuple[ContextIndex, ...]:
    """The youngest texts: all up to `bound` tokens, else the youngest `goal`, one at least."""
    total = sum(map(len, indexes))
    if total <= bound:
        return indexes
    excess = total - (int(KEPT * bound) if goal is None else goal)
    while len(indexes) > 1 and len(indexes[0]) <= excess:
        excess -= len(indexes[0])
        indexes = indexes[1:]
    oldest = indexes[0]
    starts = np.concatenate([[0], _ends(oldest.tokens) + 1])
    last = -1 if len(indexes) > 1 else -2  # the youngest text of all stays
    cut = int(starts[min(int(np.searchsorted(starts, excess)), len(starts) + last)])
    kept = oldest.order[oldest.order >= cut] - np.int32(cut)
    rest = (ContextIndex(oldest.tokens[cut:], kept),) if cut < len(oldest) else ()
    return (*rest, *indexes[1:])


def _mapped(sizes: Sequence[Sequence[int]], data: Int[np.ndarray, " n"]) -> Iterator[ContextIndex]:
    """The indexes of a file, of [tokens, places] each."""
    if min(map(min, sizes), default=0) < 0 or sum(map(sum, sizes)) != len(data):
        raise ValueError(f"{sizes} for {len(data)} integers")
    at = 0
    for n, m in sizes:
        tokens, order = data[at : at + n], data[at + n : at + n + m]
        if n and (tokens.min() < SEPARATOR or tokens.max() > MAX_TOKEN):
            raise ValueError("tokens out of range")
        if m and (order.min() < 0 or order.max() >= n or tokens[order].min() < 0):
            raise ValueError("places out of range")
        yield ContextIndex(tokens, order)
        at += n + m
