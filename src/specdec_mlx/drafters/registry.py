"""Drafters by name, through the entry-point group `specdec_mlx.drafters`.

The built-in drafters come in by the same door as anybody's: a package that declares

    [project.entry-points."specdec_mlx.drafters"]
    my-drafter = "my_package:MyDrafter"

gives its drafter a name in `make_drafter`, on the command line and in requests to the server. A
name that is taken stays with who had it: a built-in drafter, or else the package whose name comes
first.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from types import NoneType, UnionType
from typing import Any, get_args

import mlx.nn as nn

from specdec_mlx.drafters.first_of import FirstOf
from specdec_mlx.errors import MissingPackageError, UnknownNameError
from specdec_mlx.options import did_you_mean, split_spec
from specdec_mlx.types import Drafter

GROUP = "specdec_mlx.drafters"
OWN_PACKAGE = "specdec-mlx"
DEFAULT_DRAFTER = "auto"
"""What commands draft with if they are told nothing."""
MODEL_DRAFTER = "model"
"""The name of a draft model, wherever it comes from."""
WITH_MODEL = (MODEL_DRAFTER, "cascade")
"""Names of drafters that a draft model, or a trained head, is a part of."""
REMEMBERING = (DEFAULT_DRAFTER, "suffix")
"""Names of drafters that take `memory=`; the first is what is drafted with where one is given."""
NO_DRAFTER = "none"
"""The name of plain decoding."""


def drafter_names() -> list[str]:
    """Names that `make_drafter` knows, "none" and those of installed packages included."""
    return sorted({*_entries(), NO_DRAFTER})


def describe_drafters() -> dict[str, str]:
    """What each drafter that needs no model does, by name: the first line of its docstring."""
    texts: dict[str, str] = {}
    for name, entry in sorted(_entries().items()):
        if name in WITH_MODEL:
            continue
        try:
            texts[name] = ((entry.load().__doc__ or "").strip().splitlines() or [""])[0]
        except Exception as error:  # somebody's package, which breaks only itself
            texts[name] = f"cannot be loaded: {error}"
    return texts


def make_drafter(
    spec: str,
    *,
    draft_model: nn.Module | Drafter | None = None,
    draft_tokenizer: Any = None,
    **options: Any,
) -> Drafter | None:
    """Drafter of a name, with options: `make_drafter("ngram:max_order=3,num_draft=8")`.

    Args:
        spec: NAME or NAME:key=value,...; values are numbers, true, false or none, else text.
        draft_model: what the names "model" and "cascade" draft with; other names need none.
        draft_tokenizer: the draft model's, to be compared with the target's.
        options: more options, as keywords.

    Returns:
        The drafter; None for the name "none", which is plain decoding.

    Raises:
        UnknownNameError: no drafter has this name.
        ValueError: an option that the drafter does not take, or one of these without a model.
        MissingPackageError: the package that brings the drafter cannot be imported.
    """
    name, given = split_spec(spec)
    if name not in drafter_names():
        raise UnknownNameError(f"Unknown drafter {name!r}. Known: {', '.join(drafter_names())}.")
    options = given | options
    if name == NO_DRAFTER:
        if options:
            raise ValueError(f"Drafter {spec!r}: {NO_DRAFTER} takes no options.")
        return None
    if name in WITH_MODEL and draft_model is not None:
        options = {"model": draft_model, "tokenizer": draft_tokenizer} | options
    kind = _load(name)
    if name in WITH_MODEL and "model" not in options:
        raise ValueError(
            f"Drafter {name!r}: it needs --draft-model MODEL, or in Python draft_model=. "
            f"{_where(kind)}"
        )
    return make_with(name, kind, options)


def first_of(drafters: Sequence[Drafter | None]) -> Drafter | None:
    """One drafter that asks several in order; None if there is none among them."""
    some = [drafter for drafter in drafters if drafter is not None]
    if len(some) > 1:
        return FirstOf(*some)
    return some[0] if some else None


def _load(name: str) -> Callable[..., Drafter]:
    """The class that a name stands for."""
    entry = _entries()[name]
    try:
        kind: Callable[..., Drafter] = entry.load()
    except (ImportError, AttributeError) as error:
        raise MissingPackageError(
            f"Drafter {name!r} of {_package(entry)} cannot be loaded: {error}"
        ) from error
    return kind


def make_with(name: str, kind: Callable[..., Drafter], options: dict[str, Any]) -> Drafter:
    """What `kind` makes with options that were typed.

    Args:
        name: of the drafter, for the error.
        kind: a class, or a function that returns a drafter; what it raises goes on.
        options: its arguments.

    Raises:
        ValueError: an option that it does not take, or of another type.
    """
    hints = _annotations(kind)
    try:
        return kind(**{key: _fitted(key, value, hints.get(key)) for key, value in options.items()})
    except TypeError as error:
        near = "".join(did_you_mean(option, hints) for option in options if option not in hints)
        raise ValueError(f"Drafter {name!r}: {error}.{near} {_where(kind)}") from error


def _where(kind: Callable[..., Drafter]) -> str:
    """Where its options are explained."""
    made_by = kind.func if isinstance(kind, functools.partial) else kind
    return f"See help({getattr(made_by, '__name__', made_by)})."


def _annotations(kind: Callable[..., Drafter]) -> dict[str, Any]:
    """What a drafter's options are annotated with, as far as that can be read."""
    try:
        parameters = inspect.signature(kind, eval_str=True).parameters.values()
    except Exception:  # names that are there for type checkers only
        return {}
    return {parameter.name: parameter.annotation for parameter in parameters}


def _fitted(option: str, value: Any, hint: Any) -> Any:
    """A value of the annotated type, an int for a float too; else a TypeError that names both.

    Only numbers and text are looked at; what else there is the drafter knows best.
    """
    kinds = set(get_args(hint)) if isinstance(hint, UnionType) else {hint}
    if not kinds <= {int, float, bool, str, NoneType} or type(value) in kinds:
        return value
    if type(value) is int and float in kinds:
        return float(value)
    raise TypeError(f"{option} is {value!r}, expected {inspect.formatannotation(hint)}")


@functools.cache
def _entries() -> dict[str, EntryPoint]:
    """Entry points by name, looked up once in a process, since that reads the metadata of every
    installed package; a UserWarning names the packages that want the same one.
    """
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
