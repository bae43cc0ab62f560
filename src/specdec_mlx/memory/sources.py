"""Files and folders as texts of a memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SKIPPED_FOLDERS = {"__pycache__", "node_modules", "venv", "site-packages"}  # beside hidden ones
LARGEST_FILE = 2_000_000  # bytes; larger ones are data rather than something written
LOOKED_AT = 8192  # bytes in which a zero means that a file is no text


def texts_of(paths: Sequence[Path | str], tokenizer: Any) -> Iterator[list[int] | None]:
    """Token ids of each file; None for one that is skipped."""
    for path in paths:
        for file in files_in(Path(path).expanduser().absolute()):
            yield tokens_of(str(file), tokenizer)


def files_in(root: Path) -> Iterator[Path]:
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


def state_of(name: str) -> str:
    """Size and time of a file, which change when it is written."""
    found = os.stat(name)
    return f"{found.st_size}:{found.st_mtime_ns}"


def tokens_of(name: str, tokenizer: Any) -> list[int] | None:
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
