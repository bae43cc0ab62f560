"""Text files, JSON lines and typed JSON, and the folder of the files that this package makes."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

Kind = TypeVar("Kind")
Count = Annotated[int, msgspec.Meta(ge=0)]


def cache_root() -> Path:
    """Folder of the files that this package makes. It may not exist yet."""
    if folder := os.environ.get("SPECDEC_MLX_CACHE"):
        return Path(folder).expanduser().absolute()
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if xdg.is_absolute():  # the XDG specification ignores relative paths
        return xdg / "specdec-mlx"
    caches = "Library/Caches" if sys.platform == "darwin" else ".cache"
    return Path.home() / caches / "specdec-mlx"


def read_text(path: Path | str) -> str:
    r"""Text of a UTF-8 file without a byte-order mark. Its lines end with "\n".

    Raises OSError, and ValueError for another encoding.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}). Convert it first.") from error


def text_lines(path: Path | str) -> Iterator[tuple[int, str]]:
    """Number and text of each line of a file that is not blank. Raises as `read_text`."""
    # `str.splitlines` would also split at characters that texts may contain, such as U+2028.
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            yield number, line


def json_lines(path: Path | str) -> Iterator[tuple[int, Any]]:
    """Number and value of each line of a file of JSON lines.

    Raises as `read_text`, and ValueError with the number of a line that is not JSON.
    """
    for number, line in text_lines(path):
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path}, line {number}: expected JSON, got {line[:60]!r} ({error})."
            ) from error


def parse(content: str | bytes, kind: type[Kind]) -> Kind:
    """JSON as a value of a type, such as a `msgspec.Struct`.

    Raises ValueError for text that is not JSON, and for a wrong or unknown field. The error has the
    field's name, its value and the expected values.
    """
    try:
        document = json.loads(content)
        return msgspec.convert(document, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise ValueError(_explanation(document, kind, *str(error).split(" - at `"))) from error
    except (RecursionError, OverflowError) as error:
        raise ValueError("nested too deeply, or a number too large") from error


def _explanation(document: Any, kind: Any, problem: str, place: str = "") -> str:
    """msgspec's problem, with the field and the value at its place, such as `$.costs[...][0]`."""
    value, field = document, ""
    if unknown := re.search("unknown field `(.*)`", problem):
        place = f"{place.strip('`')}.{unknown[1]}"
    for name, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", place):
        key: Any = name or index
        if index.isdigit():
            key = int(index)
        elif index:
            # msgspec does not name the key. Keep one item at a time to find the wrong value.
            items = value.copy()
            for key, item in items.items():
                value.clear()
                value[key] = item
                try:
                    msgspec.convert(document, kind, str_keys=True)
                except msgspec.ValidationError:
                    break
        value, field = value[key], f"{field}.{key}" if name else f"{field}[{key!r}]"
    where = f"{field.strip('.')} is " if field else ""
    return f"{where}{value!r:.60}: {problem}"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Path of a file to write. It replaces `path` at the end if the block succeeds.

    The folder is made, and the file has the suffix of `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".part-{os.getpid()}-{path.name}")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
