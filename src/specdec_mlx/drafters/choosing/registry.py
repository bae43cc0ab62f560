"""Drafters by name, through the entry-point group `specdec_mlx.drafters`.

A package that declares `my-drafter = "my_package:MyDrafter"` there gives its drafter a name in
`make_drafter`, on the command line and in requests to the server. A drafter with an argument
`model` gets the draft model. A built-in name stays with the built-in drafter, any other with the
first package by name.
"""

from __future__ import annotations

import functools
import inspect
from importlib.metadata import EntryPoint
from typing import Any

import mlx.nn as nn

from specdec_mlx.arguments import DEFAULT_DRAFTER as DEFAULT_DRAFTER
from specdec_mlx.arguments import DRAFTER_GROUP as GROUP
from specdec_mlx.arguments import MODEL_DRAFTER as MODEL_DRAFTER
from specdec_mlx.arguments import NO_DRAFTER as NO_DRAFTER
from specdec_mlx.arguments import PLACES, help_on, installed, load, make_with, split_spec, unknown
from specdec_mlx.contracts import Drafter
from specdec_mlx.duck_typed import as_drafter


def drafter_names() -> list[str]:
    """Names that `make_drafter` knows, "none" and those of installed packages included."""
    return sorted({*_entries(), NO_DRAFTER})


def describe_drafters(with_model: bool = True) -> dict[str, str]:
    """The first line of each drafter's docstring, by name; with those that need a draft model."""
    texts = {NO_DRAFTER: "Plain decoding."} if with_model else {}
    for name, entry in sorted(_entries().items()):
        if not with_model and takes_model(name):
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
        spec: NAME or NAME:key=value,...; values are numbers, true, false or none, else text. None
            comes of the name "none", which is plain decoding.
        draft_model: the model of the names that `takes_model`; other names need none.
        draft_tokenizer: the draft model's, to be compared with the target's.
        options: more options, as keywords.

    Raises:
        UnknownNameError: no drafter has this name.
        ValueError: an option that the drafter does not take, or one of these without a model.
        MissingPackageError: the package that brings the drafter cannot be imported.
    """
    name, given = split_spec(spec)
    if name not in drafter_names():
        _entries.cache_clear()  # it may have been installed a moment ago
    if name not in drafter_names():
        raise unknown("drafter", name, drafter_names(), PLACES)
    options = given | options
    if name == NO_DRAFTER:
        if options:
            raise ValueError(f"Drafter {spec!r}: {NO_DRAFTER} takes no options.")
        return None
    kind = load(_entries()[name], "drafter")
    if takes_model(name):
        if draft_model is not None:
            options = {"model": draft_model, "tokenizer": draft_tokenizer} | options
        if "model" not in options:
            raise ValueError(
                f"Drafter {name!r}: it needs --draft-model MODEL, or in Python draft_model=. "
                f"{help_on(kind)}"
            )
    drafter: Drafter = as_drafter(make_with("drafter", name, kind, options))
    return drafter


def takes(name: str, argument: str) -> bool:
    """True for the name of a drafter with such an argument: `model`, or `memory`."""
    entry = _entries().get(name)
    try:
        return entry is not None and argument in inspect.signature(entry.load()).parameters
    except Exception:  # somebody's package; who asks for this drafter is told
        return False


def takes_model(name: str) -> bool:
    """True for the name of a drafter with a draft model, or a trained head, as its `model`."""
    return takes(name, "model")


@functools.cache
def _entries() -> dict[str, EntryPoint]:
    return installed(GROUP, "drafter")
