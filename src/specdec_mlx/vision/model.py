"""A vision model of mlx-vlm as the library sees it: its language model, and its image state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from threading import RLock
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.arguments import argument_error
from specdec_mlx.caches import STRATEGIES, Rollback, leaves
from specdec_mlx.errors import MissingPackageError
from specdec_mlx.trees.tree_pass import VIEWS, view_class

_one_pass = RLock()
"""Locked while a pass is built: the language model then has the state of one text."""


@dataclass
class ImagePositions:
    """Image state of one text. It is an attribute of a cache, and is copied with the cache.

    Attributes:
        saved: private arrays of the language model, by name.
        reading: inputs of the prompt, while it is read.
    """

    saved: dict[str, mx.array | None]
    reading: dict[str, Any] = field(default_factory=dict)


class VisionModel(nn.Module):  # type: ignore[misc]
    """A vision model of mlx-vlm as `speculate` takes it: its language model over given caches.

    After an image, positions of the text and of the caches differ. mlx-vlm keeps the difference
    (Qwen's `rope_deltas`) on the model. Here the caches of each text keep it: every pass uses the
    difference of its own text, and leaves the model as it was.

    Args:
        model: the model that `mlx_vlm.load` returns. Make one VisionModel of it and keep that,
            because measurements belong to the object.

    Raises:
        MissingPackageError: mlx-vlm is not installed.
        ValueError: the model has no language model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        if not isinstance(getattr(model, "language_model", None), nn.Module):
            raise argument_error("model", model, "a vision model: model, _ = mlx_vlm.load(...)")
        mlx_vlm()
        self.model = model

    @property
    def language_model(self) -> Any:
        return self.model.language_model

    @property
    def layers(self) -> Any:
        return self.language_model.layers

    def make_cache(self) -> Any:
        """New caches, as mlx-vlm makes them."""
        return mlx_vlm().models.cache.make_prompt_cache(self.language_model)

    def __call__(
        self, inputs: mx.array, cache: list[Any], input_embeddings: mx.array | None = None
    ) -> Any:
        """Logits [1, S, V] of tokens [1, S], or of the prompt's embeddings [1, S, D]."""
        model, is_new = self.language_model, holds_nothing(cache)
        positions = self.positions_of(cache, may_be_read=is_new)
        more: dict[str, Any] = {}
        if input_embeddings is not None:
            more = {**positions.reading, "inputs_embeds": input_embeddings}
        else:
            # The first pass over tokens ends the reading of the prompt.
            positions.reading = {}
        if is_new and not more and hasattr(model, "get_rope_index"):
            # A prompt without images must not use positions of an earlier prompt's images.
            indices = model.get_rope_index(inputs, None, None, None)
            more = dict(zip(("position_ids", "rope_deltas"), indices, strict=True))
        with self.keeping(positions):
            return model(inputs, cache=cache, **more).logits

    def positions_of(self, caches: list[Any], may_be_read: bool) -> ImagePositions:
        """Image state in a text's caches. New caches take the model's present state."""
        first = next(leaves(caches))
        if not hasattr(first, "image_positions"):
            if not may_be_read:
                how = "caches that vision.read_prompt was given, and never kv_bits"
                raise argument_error("prompt_cache", caches, how)
            first.image_positions = ImagePositions(private_arrays_of(self.language_model))
        positions: ImagePositions = first.image_positions
        return positions

    @contextmanager
    def keeping(self, positions: ImagePositions) -> Iterator[None]:
        """Restore this text's image state while the block runs, and save it again afterwards."""
        model = self.language_model
        # Passes of several texts may be built in several threads, and the model has room for one
        # state.
        with _one_pass:
            before = private_arrays_of(model)
            set_private_arrays(model, positions.saved)
            try:
                yield
                positions.saved = private_arrays_of(model)
            finally:
                set_private_arrays(model, before)


@cache
def mlx_vlm() -> Any:
    """The package mlx-vlm. Registers its caches. Raises MissingPackageError."""
    try:
        package, theirs = map(import_module, ("mlx_vlm", "mlx_vlm.models.cache"))
    except ImportError as error:
        raise MissingPackageError(
            f"Vision models need mlx-vlm: pip install 'specdec-mlx[vision]' ({error})."
        ) from error
    # Its cache classes have the names of mlx-lm's and work alike.
    for kind, strategy in list(STRATEGIES.items()):
        twin = getattr(theirs, kind.__name__, kind)
        STRATEGIES[twin] = strategy
        if kind in VIEWS:
            VIEWS[twin] = view_class(twin)
    return package


def holds_nothing(caches: list[Any]) -> bool:
    """True for new caches, and for caches from which a failed reading was taken back."""
    return next(leaves(caches)).empty() or Rollback(caches).end == 0


def private_arrays_of(module: Any) -> dict[str, mx.array | None]:
    """Arrays with a leading underscore, which a module keeps between passes."""
    attributes = {**vars(module), **module}
    return {
        name: value
        for name, value in attributes.items()
        if name.startswith("_") and (value is None or isinstance(value, mx.array))
    }


def set_private_arrays(module: nn.Module, arrays: dict[str, mx.array | None]) -> None:
    for name in {**private_arrays_of(module), **arrays}:
        setattr(module, name, arrays.get(name))
