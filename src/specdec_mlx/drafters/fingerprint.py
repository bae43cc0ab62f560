"""Digests of models: from a few of their weights, or from all."""

from __future__ import annotations

import hashlib
import json
import zlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from specdec_mlx.models.loading import PerModel

NUM_SAMPLES = 4  # values read of each parameter: enough to tell fine-tuned models from each other


@PerModel
def fingerprint(model: nn.Module) -> str:
    """Digest of a model's class, and of its parameters' names, shapes, types and a few values.

    Computed once for each loaded model; the same in every process. Models that differ in little may
    share one: for what costs speed alone, such as what was learned.
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
    """Values [n] in float32 from places spread over a parameter; lazy."""
    array = array if array.ndim else array[None]
    places = np.linspace(0, array.size - 1, min(NUM_SAMPLES, array.size)).astype(np.int64)
    indices = np.unravel_index(places, array.shape)
    return array[tuple(mx.array(index) for index in indices)].astype(mx.float32)


def content_digest(model: nn.Module, about: Any) -> str:
    """Digest into which every bit of a model's parameters goes, and what else is said of it.

    For what changes the text, such as caches on disk. about: ready for JSON, as the configuration.
    The values themselves, since copies and archives may leave files' times as they were; a second
    or less for a gigabyte, once for a loaded model.
    """
    told = json.dumps([type(model).__module__, about], sort_keys=True, default=str)
    digest = hashlib.sha256(told.encode())
    for name, array in sorted(tree_flatten(model.parameters())):
        checksum = zlib.crc32(memoryview(array.reshape(-1).view(mx.uint8)))
        digest.update(f"{name} {array.shape} {array.dtype} {checksum}\n".encode())
    return digest.hexdigest()
