"""Values that are kept with a loaded model for as long as it lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

import mlx.nn as nn

T = TypeVar("T")


class PerModel(Generic[T]):
    """A value for each loaded model, made when it is first asked for."""

    def __init__(self, make: Callable[[nn.Module], T]) -> None:
        self._make = make
        self._values: dict[int, T] = {}

    def __call__(self, model: nn.Module) -> T:
        """The model's value."""
        if id(model) not in self._values:
            self.put(model, self._make(model))
        return self._values[id(model)]

    def put(self, model: nn.Module, value: T) -> None:
        """Give the model another value."""
        key = id(model)  # a module is a dict and has no hash
        if key not in self._values:
            weakref.finalize(model, self._values.pop, key, None)
        self._values[key] = value
