"""Over which ranks of `mx.distributed` a model is spread."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.per_model import PerModel


def _group_of(model: nn.Module) -> mx.distributed.Group | None:
    """The group of a tensor-parallel or pipelined model; None for one whole on each rank."""
    for module in model.modules():
        for group in (getattr(module, "group", None), getattr(module, "sharding_group", None)):
            if isinstance(group, mx.distributed.Group) and group.size() > 1:
                return group
        if getattr(module, "pipeline_size", 1) > 1:
            return mx.distributed.init()
    return None


group_of: Any = PerModel(_group_of)
"""The ranks that a loaded model is spread over, None where it is whole; asked for once."""
