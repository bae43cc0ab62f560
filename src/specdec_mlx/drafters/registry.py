"""Drafters by name, through the entry-point group `specdec_mlx.drafters`.

The built-in drafters come in by the same door as anybody's: a package that declares

    [project.entry-points."specdec_mlx.drafters"]
    my-drafter = "my_package:MyDrafter"

gives its drafter a name in `make_drafter` and on the command line. A name that is taken stays with
who had it: a built-in drafter, or else the package whose name comes first.
"""

from __future__ import annotations

import warnings
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from specdec_mlx.errors import UnknownNameError
from specdec_mlx.options import parse_options as parse_options
from specdec_mlx.types import Drafter

GROUP = "specdec_mlx.drafters"
OWN_PACKAGE = "specdec-mlx"
MODEL_DRAFTER = "model"


def drafter_names() -> list[str]:
    """Names that `make_drafter` knows, those of installed packages included."""
    return sorted(_entries())


def describe_drafters() -> dict[str, str]:
    """What each drafter that needs no model does, by name: the first line of its docstring."""
    texts: dict[str, str] = {}
    for name, entry in sorted(_entries().items()):
        if name == MODEL_DRAFTER:
            continue
        try:
            texts[name] = ((entry.load().__doc__ or "").strip().splitlines() or [""])[0]
        except Exception as error:  # somebody's package, which breaks only itself
            texts[name] = f"cannot be loaded: {error}"
    return texts


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


def _entries() -> dict[str, EntryPoint]:
    """Entry points by name; a UserWarning names the packages that want the same one."""
    known: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=GROUP), key=_precedence):
        first = known.setdefault(entry.name, entry)
        if _package(entry) != _package(first):
            warnings.warn(
                f"specdec_mlx: drafter {entry.name!r} of {_package(entry)} is left out, since "
                f"{_package(first)} has one of that name. Uninstall one of them, or give the "
                "drafter itself instead of its name.",
                stacklevel=2,
            )
    return known


def _precedence(entry: EntryPoint) -> tuple[bool, str]:
    """Built-in drafters come first, then packages by name."""
    return _package(entry) != OWN_PACKAGE, _package(entry)


def _package(entry: EntryPoint) -> str:
    """Name of the distribution that an entry point came with."""
    return entry.dist.name if entry.dist is not None else entry.module
