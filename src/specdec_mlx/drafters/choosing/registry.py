"""Drafters by name, through the entry-point group `specdec_mlx.drafters`.

A package that declares `my-drafter = "my_package:MyDrafter"` there gives its drafter a name in
`make_drafter`, on the command line and in requests to the server. A drafter with an argument
`model` gets the draft model. Built-in names cannot be replaced. If two
packages use a name, the first package in alphabetical order gets it.
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
    """Names that `make_drafter` knows, with "none" and the names of installed packages."""
    return sorted({*_entries(), NO_DRAFTER})


def describe_drafters(with_model: bool = True) -> dict[str, str]:
    """First line of each drafter's docstring. `with_model` includes drafters that need a model."""
    texts = {NO_DRAFTER: "Plain decoding."} if with_model else {}
    for name, entry in sorted(_entries().items()):
        if not with_model and takes_model(name):
            continue
        try:
            texts[name] = ((entry.load().__doc__ or "").strip().splitlines() or [""])[0]
        except Exception as error:  # another package's fault, which affects only its drafter
            texts[name] = f"cannot be loaded: {error}"
    return texts


def make_drafter(
    spec: str,
    *,
    draft_model: nn.Module | Drafter | None = None,
    draft_tokenizer: Any = None,
    **options: Any,
) -> Drafter | None:
    """Make a drafter by its name, with options: `make_drafter("ngram:max_order=3,num_draft=8")`.

    Args:
        spec: NAME or NAME:key=value,... Values are numbers, true, false or none, or else text.
            The name "none" stands for plain decoding and gives None.
        draft_model: the model, for drafters that need one (see `takes_model`).
        draft_tokenizer: the draft model's tokenizer, which is compared with the target's.
        options: more options, as keywords.

    Raises:
        UnknownNameError: no drafter has this name.
        ValueError: an unknown option, or a drafter that needs a model without a model.
        MissingPackageError: the package that brings the drafter cannot be imported.
    """
    name, typed = split_spec(spec)
    if name not in drafter_names():
        # A package may have been installed since.
        _entries.cache_clear()
    if name not in drafter_names():
        raise unknown("drafter", name, drafter_names(), PLACES)
    options = typed | options
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
    """True if the drafter of this name has an argument, such as `model` or `memory`."""
    entry = _entries().get(name)
    try:
        return entry is not None and argument in inspect.signature(entry.load()).parameters
    except Exception:  # another package's fault; `make_drafter` reports it
        return False


def takes_model(name: str) -> bool:
    return takes(name, "model")


@functools.cache
def _entries() -> dict[str, EntryPoint]:
    return installed(GROUP, "drafter")
