"""Reduced draft models: the first layers of a model, on the same arrays."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.caches import leaves
from specdec_mlx.errors import DraftModelError

HEADS = (nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding)
"""Classes of output layers, with a row of weights for each token."""

PROBE_TOKENS = 4  # tokens of the passes that a cut model is checked with

TOLERANCE = 0.2
"""Largest difference of the same logits computed in two ways, in their standard deviations.

Rounding in 16 bits makes a few hundredths, and a wrong mask makes several."""


def first_layers(model: nn.Module, num_layers: int) -> nn.Module:
    """Keep the first layers of a model and its output layer, as an early exit. Two passes check it.

    Raises DraftModelError for an impossible number of layers, or a model that cannot be cut.
    """
    new = _copy(model)
    owner, name = _layer_list(new)
    total = len(owner[name])
    if not 1 <= num_layers <= total:
        raise DraftModelError(
            f"A draft model of {num_layers} layers: expected a number from 1 to {total}."
        )
    owner[name] = owner[name][:num_layers]
    # Some models index their list of caches by the layers of the original model.
    for num_places in (0, len(make_prompt_cache(model))):
        try:
            short = FirstLayers(new, num_places)
            _check_caches(short)
            return short
        except Exception as error:  # whatever a model does without its last layers
            reason = error
    raise DraftModelError(
        f"A {_kind(model)} does not run on its first {num_layers} layers: {reason} Give "
        "another number, or leave it out."
    ) from reason


class FirstLayers(nn.Module):  # type: ignore[misc]
    """A model whose list of layers was cut, with the caches of the layers that are left.

    Attributes:
        num_places: length of the list of caches that the model expects. Missing caches are None.
        num_caches: number of caches that the layers fill.
    """

    def __init__(self, model: nn.Module, num_places: int) -> None:
        """Take the cut model; its list of caches is filled up with None to so many places."""
        super().__init__()
        self.model = model
        self.num_places = num_places
        caches = make_prompt_cache(model)
        # The pass is lazy. It shows which caches the remaining layers fill.
        model(_probe_tokens(), cache=self._filled_up(caches))
        fed = [i for i, cache in enumerate(caches) if not all(c.empty() for c in leaves([cache]))]
        self.num_caches = 1 + fed[-1] if fed else len(caches)

    @property
    def layers(self) -> Any:
        return self.model.layers

    def make_cache(self) -> list[Any]:
        caches: list[Any] = make_prompt_cache(self.model)
        return caches[: self.num_caches]

    def __call__(self, inputs: mx.array, cache: Any = None, **others: Any) -> mx.array:
        caches = self.make_cache() if cache is None else cache
        logits: mx.array = self.model(inputs, cache=self._filled_up(caches), **others)
        return logits

    def _filled_up(self, caches: list[Any]) -> list[Any]:
        return [*caches, *[None] * (self.num_places - len(caches))]


def some_rows(module: nn.Module, tokens: mx.array) -> nn.Module:
    """A copy of a layer or an embedding with some of its rows. Quantized rows stay quantized."""
    narrowed = copy.copy(module)
    for name in ("weight", "scales", "biases", "bias"):
        if name in narrowed:
            narrowed[name] = narrowed[name][tokens]
    return narrowed


def _layer_list(model: nn.Module) -> tuple[nn.Module, str]:
    """The module that has the list `model.layers`, and the name of the list there."""
    layers = [id(layer) for layer in getattr(model, "layers", ())]
    for module in model.modules():
        for name, value in module.items():
            # `model.layers` may be a property, so the list is found by its contents.
            if isinstance(value, list) and layers and [id(item) for item in value] == layers:
                return module, name
    raise DraftModelError(
        f"A {_kind(model)} has no single list of layers that could be cut. Leave the number of "
        "layers out."
    )


def _check_caches(model: nn.Module) -> None:
    """Raise ValueError unless a text read in two parts has the logits of the text in one pass."""
    tokens, half = _probe_tokens(), PROBE_TOKENS // 2
    caches = make_prompt_cache(model)
    parts = [model(part, cache=caches) for part in (tokens[:, :half], tokens[:, half:])]
    in_two_passes = mx.concatenate(parts, axis=1).astype(mx.float32)
    in_one_pass = model(tokens, cache=make_prompt_cache(model)).astype(mx.float32)
    if not (
        mx.abs(in_two_passes - in_one_pass).max()
        <= TOLERANCE * mx.maximum(mx.std(in_one_pass), 1e-6)
    ).item():
        raise ValueError("a text in two parts gives other logits than the whole.")


def _copy(model: nn.Module) -> nn.Module:
    """A copy of the modules, which share their arrays and their groups of ranks with the model."""
    shared: list[Any] = [x for _, x in tree_flatten(model) if isinstance(x, mx.array)]
    attributes = (value for part in model.modules() for value in vars(part).values())
    shared += [value for value in attributes if isinstance(value, mx.distributed.Group)]
    return copy.deepcopy(model, {id(value): value for value in shared})


def _probe_tokens() -> mx.array:
    return mx.arange(PROBE_TOKENS)[None]


def _kind(model: nn.Module) -> str:
    return f"model of {type(model).__module__}"
