"""Ways in which a head's files may have been meant otherwise.

A wrong norm, layer, order or state still gives the target's own text, only later. So each kind of
head names what its files may mean as well; `check` measures what acceptance each would have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from specdec_mlx.types import Features


@dataclass(frozen=True)
class Variation:
    """Another reading of a head's files.

    name: in a few words. advice: what to say, and what to load it with, if it does better. applied:
        the head so read, while the context lasts.
    """

    name: str
    advice: str
    applied: Callable[[], AbstractContextManager[None]]


def otherwise(name: str, advice: str, head: nn.Module, **attributes: Any) -> Variation:
    """A reading in which a head has other attributes.

    Args:
        name: in a few words.
        advice: if it does better.
        head: whose.
        attributes: what they are then.
    """

    @contextmanager
    def applied() -> Iterator[None]:
        before = {key: getattr(head, key) for key in attributes}
        try:
            for key, value in attributes.items():
                setattr(head, key, value)
            yield
        finally:
            for key, value in before.items():
                setattr(head, key, value)

    return Variation(name, advice, applied)


def shifted_norms(head: nn.Module) -> list[Variation]:
    """Readings in which norms stored as w - 1 were not shifted, or others were."""

    def by(step: float) -> Callable[[], AbstractContextManager[None]]:
        @contextmanager
        def applied() -> Iterator[None]:
            norms = [(n, x) for n, x in tree_flatten(head.parameters()) if is_norm(n, x)]
            try:
                head.update(tree_unflatten([(name, value + step) for name, value in norms]))
                yield
            finally:
                head.update(tree_unflatten(norms))

        return applied

    return [
        Variation(
            "norms less one",
            "this file looks already shifted; load it with norms_less_one=False",
            by(-1.0),
        ),
        Variation(
            "norms plus one",
            "its norms look stored as w - 1; load it with norms_less_one=True",
            by(1.0),
        ),
    ]


def is_norm(name: str, value: mx.array) -> bool:
    """Whether a parameter is the scale of a norm."""
    return "norm" in name and value.ndim == 1


def shifted_layers(head: Any) -> list[Variation]:
    """Readings of the target's outputs one layer later and one earlier, where it has them.

    Args:
        head: its `config.layers` are those that it reads.
    """
    found = []
    for name, by in (("one layer later", 1), ("one layer earlier", -1)):
        layers = tuple(layer + by for layer in head.config.layers)
        if min(layers) >= 0 and max(layers) < head.ends.num_layers:
            advice = f"its ids of layers look meant otherwise; load it with layers={list(layers)}"
            changed = replace(head.config, layers=layers)
            features = Features(layers=layers)
            found.append(otherwise(name, advice, head, config=changed, features=features))
    return found
