"""Drafters by name, through the entry-point group `specdec_mlx.drafters`.

The built-in drafters come in by the same door as anybody's: a package that declares

    [project.entry-points."specdec_mlx.drafters"]
    my-drafter = "my_package:MyDrafter"

gives its drafter a name in `make_drafter` and on the command line.
"""

from __future__ import annotations

import ast
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from specdec_mlx.errors import UnknownNameError
from specdec_mlx.types import Drafter

GROUP = "specdec_mlx.drafters"


def drafter_names() -> list[str]:
    """Names that `make_drafter` knows, those of installed packages included."""
    return sorted(_entries())


def make_drafter(spec: str, **options: Any) -> Drafter:
    """Drafter of a name, with options: `make_drafter("ngram:max_order=3,window=256")`.

    spec: NAME or NAME:key=value,...; values are Python literals, anything else is text. Options
    may also be given as keywords. Raises UnknownNameError, and ValueError for options that the
    drafter does not take.
    """
    name, _, rest = spec.partition(":")
    known = _entries()
    if name not in known:
        raise UnknownNameError(f"Unknown drafter {name!r}. Known: {', '.join(sorted(known))}.")
    kind = known[name].load()
    try:
        drafter: Drafter = kind(**parse_options(rest), **options)
    except TypeError as error:
        raise ValueError(f"Drafter {name!r}: {error}. See help({kind.__name__}).") from error
    return drafter


def parse_options(text: str) -> dict[str, Any]:
    """Options out of `key=value,key=value`."""
    options: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, separator, value = part.partition("=")
        if not separator:
            raise ValueError(f"Drafter option {part!r}: expected key=value.")
        options[key.strip().replace("-", "_")] = _literal(value.strip())
    return options


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text.capitalize() if text in ("true", "false", "none") else text)
    except (ValueError, SyntaxError):
        return text


def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}
