"""A vision model of mlx-vlm as the library sees it: its language model, and what images moved."""

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
from specdec_mlx.trees.passes import VIEWS, view_class

_one_pass = RLock()
"""Held while a pass is built: the language model then has the state of one text."""


@dataclass
class ImagePositions:
    """Of one text: what the language model keeps of its images, and the inputs of its prompt.

    A cache holds it, so that it goes where the cache goes, into copies too.
    """

    kept: dict[str, mx.array | None]
    reading: dict[str, Any] = field(default_factory=dict)


class VisionModel(nn.Module):  # type: ignore[misc]
    """A vision model of mlx-vlm as `speculate` takes it: its language model over given caches.

    After an image the positions of a text are no longer those of the caches, and mlx-vlm keeps
    by how much (Qwen's `rope_deltas`) on the model. Here each text's caches keep it: every pass
    has that of its own text, and leaves the model as it was.

    Args:
        model: as `mlx_vlm.load` gives it. Keep the one that is made of it: so is what is measured.

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
        """The part that writes text."""
        return self.model.language_model

    @property
    def layers(self) -> Any:
        """Its decoder layers."""
        return self.language_model.layers

    def make_cache(self) -> Any:
        """New caches, as mlx-vlm makes them."""
        return mlx_vlm().models.cache.make_prompt_cache(self.language_model)

    def __call__(
        self, inputs: mx.array, cache: list[Any], input_embeddings: mx.array | None = None
    ) -> Any:
        """Logits [1, S, V] of tokens [1, S], or of the prompt's embeddings [1, S, D] for them."""
        model, is_new = self.language_model, holds_nothing(cache)
        positions = self.positions_of(cache, may_be_read=is_new)
        more: dict[str, Any] = {}
        if input_embeddings is not None:
            more = {**positions.reading, "inputs_embeds": input_embeddings}
        else:
            positions.reading = {}
        if is_new and not more and hasattr(model, "get_rope_index"):
            # of no image, whatever the model keeps from an earlier prompt
            indices = model.get_rope_index(inputs, None, None, None)
            more = dict(zip(("position_ids", "rope_deltas"), indices, strict=True))
        with self.keeping(positions):
            return model(inputs, cache=cache, **more).logits

    def positions_of(self, caches: list[Any], may_be_read: bool) -> ImagePositions:
        """What a text's caches hold of its images; if nothing yet, what the model keeps now."""
        first = next(leaves(caches))
        if not hasattr(first, "image_positions"):
            if not may_be_read:
                how = "caches that vision.read_prompt was given, and never kv_bits"
                raise argument_error("prompt_cache", caches, how)
            first.image_positions = ImagePositions(kept_by(self.language_model))
        positions: ImagePositions = first.image_positions
        return positions

    @contextmanager
    def keeping(self, positions: ImagePositions) -> Iterator[None]:
        """Have the language model keep in here what it did for this text, and then what it does."""
        model = self.language_model
        with _one_pass:
            before = kept_by(model)
            keep(model, positions.kept)
            try:
                yield
                positions.kept = kept_by(model)
            finally:
                keep(model, before)


@cache
def mlx_vlm() -> Any:
    """The package, whose caches are known from then on; MissingPackageError without it."""
    try:
        package, theirs = map(import_module, ("mlx_vlm", "mlx_vlm.models.cache"))
    except ImportError as error:
        raise MissingPackageError(
            f"Vision models need mlx-vlm: pip install 'specdec-mlx[vision]' ({error})."
        ) from error
    # named as mlx-lm's, and alike
    for kind, strategy in list(STRATEGIES.items()):
        twin = getattr(theirs, kind.__name__, kind)
        STRATEGIES[twin] = strategy
        if kind in VIEWS:
            VIEWS[twin] = view_class(twin)
    return package


def holds_nothing(caches: list[Any]) -> bool:
    """True of new caches, and of those that a failed reading was taken out of again."""
    return next(leaves(caches)).empty() or Rollback(caches).end == 0


def kept_by(module: Any) -> dict[str, mx.array | None]:
    """What a module keeps between passes, parameters apart: arrays with a _ before the name."""
    attributes = {**vars(module), **module}
    return {
        name: value
        for name, value in attributes.items()
        if name.startswith("_") and (value is None or isinstance(value, mx.array))
    }


def keep(module: nn.Module, kept: dict[str, mx.array | None]) -> None:
    """Have a module keep this, and nothing else."""
    for name in {**kept_by(module), **kept}:
        setattr(module, name, kept.get(name))
