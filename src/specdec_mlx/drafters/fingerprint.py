"""Digests of models, from a few of their weights."""

from __future__ import annotations

import hashlib

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from specdec_mlx.models.loading import PerModel

NUM_SAMPLES = 4  # values read of each parameter: enough to tell fine-tuned models from each other


@PerModel
def fingerprint(model: nn.Module) -> str:
    """Digest of a model's class, and of its parameters' names, shapes, types and a few values.

    The digest is the same in every process. Similar models may have the same digest, so it is only
    for uses where a mistake costs speed, such as learned costs.
    """
    parameters = sorted(tree_flatten(model.parameters()))
    digest = hashlib.sha256(type(model).__module__.encode())
    for name, array in parameters:
        digest.update(f"{name} {array.shape} {array.dtype}\n".encode())
    samples = [_sample(array) for _, array in parameters if array.size]
    if samples:
        digest.update(np.array(mx.concatenate(samples)).tobytes())
    return digest.hexdigest()[:16]


def _sample(array: mx.array) -> mx.array:
    """Lazy values [n] in float32 from positions spread over a parameter."""
    array = array if array.ndim else array[None]
    places = np.linspace(0, array.size - 1, min(NUM_SAMPLES, array.size)).astype(np.int64)
    indices = np.unravel_index(places, array.shape)
    return array[tuple(mx.array(index) for index in indices)].astype(mx.float32)
