"""Reading a prompt into caches: the one way for a text, a text of a batch, and several of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.token_ids import to_ids
from specdec_mlx.verify.rollback import Rollback, wait_for


@dataclass
class PromptReader:
    """Reads a prompt but for its last token, which the first round feeds.

    prompt: [n] token ids. caches: hold the prompt's first `num_read` tokens, and may hold earlier
    texts. feed: feeds so many of the next tokens. step_size: most of one pass. stops: ascending
    positions at which a pass ends. on_progress: takes positions read, and in all. seconds: of
    reading.
    """

    prompt: Sequence[int]
    caches: Rollback
    feed: Callable[[int], object]
    step_size: int = 2048
    stops: Sequence[int] = ()
    on_progress: Callable[[int, int], None] = lambda done, total: None
    stream: Any = None
    seconds: float = 0.0

    @classmethod
    def of_model(
        cls, model: nn.Module, prompt: Sequence[int], caches: Rollback, **options: Any
    ) -> PromptReader:
        """A reader that runs a model, where no generation is under way yet."""

        def feed(size: int) -> mx.array:
            return caches.forward(model, to_ids(prompt[caches.position :][:size]))

        return cls(prompt, caches, feed, **options)

    @property
    def num_read(self) -> int:
        """Tokens that the caches hold."""
        return self.caches.position

    @property
    def num_left(self) -> int:
        """Tokens that are still to be read."""
        return len(self.prompt) - 1 - self.num_read

    def read(self) -> int:
        """Read the next part, and wait for it; returns how many tokens."""
        stop = next(
            (stop for stop in self.stops if stop > self.num_read), len(self.prompt)
        )
        size = min(self.num_left, self.step_size, stop - self.num_read)
        if size <= 0:
            return 0
        started = perf_counter()
        with mx.stream(self.stream):
            self.feed(size)
            wait_for(self.caches.caches)
            mx.clear_cache()
        self.on_progress(self.num_read, len(self.prompt))
        self.seconds += perf_counter() - started
        return size

    def read_all(self) -> None:
        """Read all that is left."""
        while self.read():
            pass
