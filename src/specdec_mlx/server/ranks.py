"""Requests on several ranks of `mx.distributed`: the first one takes them, and tells the others."""

from __future__ import annotations

import pickle
from typing import Any, TypeVar

import mlx.core as mx

T = TypeVar("T")

PATIENCE = 0.1  # seconds after which the first rank tells the others that no request has come


class ServerRanks:
    """This process among those that one model is spread over; alone if there is one."""

    def __init__(self) -> None:
        group = mx.distributed.init()
        self.is_first, self.are_several = group.rank() == 0, group.size() > 1

    def from_first(self, value: T) -> T:
        """The first rank's object, on every rank; called on all of them in one order."""
        if not self.are_several:
            return value
        data = list(pickle.dumps(value)) if self.is_first else []
        # MLX has no broadcast. A sum in which all other ranks have zeros does the same, once all
        # know the size.
        size: Any = mx.distributed.all_sum(mx.array(len(data))).item()
        sent = mx.array(data, mx.uint8) if self.is_first else mx.zeros(size, mx.uint8)
        received: Any = mx.distributed.all_sum(sent).tolist()
        shared: T = pickle.loads(bytes(received))
        return shared
