"""Files and folders as texts of a memory."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdec_mlx.memory.store import Memory, text_digest

SKIPPED_FOLDERS = {"__pycache__", "node_modules", "venv", "site-packages"}  # beside hidden ones
LARGEST_FILE = 2_000_000  # bytes; larger ones are data rather than something written
LOOKED_AT = 8192  # bytes in which a zero means that a file is no text


@dataclass(frozen=True)
class Update:
    """Numbers of files: read now, known and unchanged, gone, and skipped as no text."""

    read: int
    unchanged: int
    gone: int
    skipped: int


def update(memory: Memory, paths: Sequence[Path | str], tokenizer: Any) -> Update:
    """Bring a memory up to date with files and folders: only what has changed is tokenized.

    A file is one text; one that has changed, or is gone from a folder, is forgotten first. Of a
    folder hidden and large files, what is not UTF-8, and folders of what others wrote are skipped.
    Raises FileNotFoundError, and TokenizerMismatchError for another tokenizer's memory.
    """
    memory.check_tokenizer(tokenizer)
    roots = [Path(path).expanduser().absolute() for path in paths]
    there = {str(file) for root in roots for file in _files(root)}
    known = memory.sources
    missing = [name for name in known if name not in there]
    gone = {name for name in missing if any(Path(name).is_relative_to(r) for r in roots)}
    changed = [name for name in sorted(there) if known.get(name, (None,))[0] != _state(name)]
    lost = Counter(known[name][1] for name in {*gone, *changed} & known.keys())
    sources = {name: found for name, found in known.items() if name not in gone}
    texts, skipped = [], 0
    for name in changed:
        state, tokens = _state(name), _tokens(name, tokenizer)
        skipped += tokens is None
        text = np.array(tokens or [], np.int32)
        sources[name] = (state, text_digest(text) if len(text) >= 2 else "")
        texts.append(text)
    memory.replace(lost, texts)
    memory.sources = sources
    return Update(len(changed) - skipped, len(there) - len(changed), len(gone), skipped)


def texts_of(paths: Sequence[Path | str], tokenizer: Any) -> Iterator[list[int] | None]:
    """Token ids of each file, as `update` reads them; None for one that is skipped."""
    for path in paths:
        for file in _files(Path(path).expanduser().absolute()):
            yield _tokens(str(file), tokenizer)


def _files(root: Path) -> Iterator[Path]:
    """A file itself; of a folder all regular files in order, without what is skipped by name."""
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


def _state(name: str) -> str:
    """Size and time of a file, which change when it is written."""
    found = os.stat(name)
    return f"{found.st_size}:{found.st_mtime_ns}"


def _tokens(name: str, tokenizer: Any) -> list[int] | None:
    """Token ids of a file; None for what is too large, or no text."""
    if os.stat(name).st_size > LARGEST_FILE:
        return None
    content = Path(name).read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return None
    if b"\x00" in content[:LOOKED_AT]:
        return None
    return list(tokenizer.encode(text, add_special_tokens=False)) if text else []
