"""The contract of kernels, which are other ways to compute a pass over several rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

import mlx.nn as nn

T = TypeVar("T")


class Kernels(ABC):
    """A context manager around the passes that verify drafts.

    Within it, functions of MLX or modules of the model may be replaced. The rows of a pass must get
    the values that they get alone, up to rounding, and a probe checks this for each model.

    Attributes:
        name: shown to users. Saved tunings keep the costs of each name apart.
    """

    name: str

    @abstractmethod
    def around(
        self, model: nn.Module, rows: int, context: int
    ) -> AbstractContextManager[object, bool | None]:
        """Entered while a pass is built, after which everything must be as it was before.

        Args:
            model: the target.
            rows: rows of the pass, at least 2. In a batch, these are the rows of all texts.
            context: positions in the caches before the pass.
        """

    def measure(self) -> None:  # noqa: B027  # optional
        """Measure now what earlier passes left to measure. No first token waits for it.

        By default nothing is measured.
        """

    def active(self, model: nn.Module) -> str:
        """Kernels that the passes of this model need a probe for; "" for none. By default `name`.

        The answer may change after `measure`.
        """
        return self.name

    def report(self) -> str:
        """Words for `specdec-mlx doctor`: whether these kernels can run here, or why not."""
        return "can run"


def within(around: AbstractContextManager[object, bool | None], run: Callable[[], T]) -> T:
    with around:
        return run()
