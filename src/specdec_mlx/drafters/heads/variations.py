"""Ways in which a head's files may have been meant otherwise.

A wrong norm, layer, order or state still gives the target's own text, only later. So each kind of
head names what its files may mean as well; `check` measures what acceptance each would have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten


@dataclass(frozen=True)
class Variation:
    """Another reading of a head's files.

    name: in a few words. advice: what to say, and what to load it with, if it does better. heads:
    modules whose attributes are these instead. norm_shift: added to the scale of all their norms.
    """

    name: str
    advice: str
    heads: Sequence[nn.Module]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    norm_shift: float = 0.0

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The heads so read, while the context lasts."""
        norms = [_norms(head) if self.norm_shift else {} for head in self.heads]
        before = [{key: getattr(head, key) for key in self.attributes} for head in self.heads]
        shifted = [{name: x + self.norm_shift for name, x in scales.items()} for scales in norms]
        try:
            self._set([self.attributes] * len(self.heads), shifted)
            yield
        finally:
            self._set(before, norms)

    def _set(
        self, attributes: Sequence[Mapping[str, Any]], norms: Sequence[Mapping[str, mx.array]]
    ) -> None:
        for head, values, scales in zip(self.heads, attributes, norms, strict=True):
            for key, value in values.items():
                setattr(head, key, value)
            head.update(tree_unflatten(list(scales.items())))


def _norms(head: nn.Module) -> dict[str, mx.array]:
    return {name: x for name, x in tree_flatten(head.parameters()) if is_norm(name, x)}


def is_norm(name: str, value: mx.array) -> bool:
    """True for the scale of a norm."""
    return "norm" in name and value.ndim == 1


def shifted_norms(head: nn.Module) -> list[Variation]:
    """Readings in which norms stored as w - 1 were not shifted, or others were."""
    less = "this file looks already shifted; load it with norms_less_one=False"
    more = "its norms look stored as w - 1; load it with norms_less_one=True"
    return [
        Variation("norms less one", less, [head], norm_shift=-1.0),
        Variation("norms plus one", more, [head], norm_shift=1.0),
    ]


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
            found.append(Variation(name, advice, [head], {"config": changed}))
    return found
