"""Prompts on their way into a batch: read a step at a time, between the passes of the others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import mlx.core as mx

from specdec_mlx.batch.rows import Passes, Row

MOST_AT_ONCE = 8
"""Prompts that are read at the same time, as in mlx-lm's batches."""


@dataclass
class Reading:
    """Prompts that are being read, each alone.

    A step is what one pass may have of a prompt. So those that are written wait for a new prompt no
    longer than in mlx-lm, however long it is.
    """

    stream: Any
    rows: list[Row] = field(default_factory=list)

    @property
    def has_room(self) -> bool:
        """True if another prompt may be begun."""
        return len(self.rows) < MOST_AT_ONCE

    def begin(self, row: Row) -> None:
        """Take up a text of which nothing is read."""
        row.generation.drafting.begin(row.context)
        self.rows.append(row)

    def go_on(
        self, passes: Passes, alone: Callable[[int, Row], AbstractContextManager[None]]
    ) -> list[Row]:
        """Read a step of each; the texts that are rows of `passes` from now on.

        Args:
            passes: over the rows that are there.
            alone: keeps to one text what goes wrong with it, which then has a finish reason.
        """
        done, left = [], []
        for row in self.rows:
            left.append(row)
            with alone(row.uid, row), mx.stream(self.stream):
                if row.finish_reason is not None:
                    left.pop()
                    row.generation.drafting.close(0)
                elif _is_read(row):
                    passes.add(row.verifier)
                    done.append(left.pop())
        self.rows = left
        return done

    def read_together(self, passes: Passes, slope: float) -> list[Row]:
        """Read all prompts in one padded pass, where that is the cheapest; [] where it is not.

        Args:
            passes: over no rows yet.
            slope: cost of a position, in passes over one: padding costs as much as other tokens,
                and every prompt that is read alone costs a pass more.
        """
        lengths = [row.generation.sequence.prompt_length - 1 for row in self.rows]
        padding = max(lengths, default=0) * len(lengths) - sum(lengths)
        is_cheapest = len(lengths) > 1 and padding * slope <= len(lengths) - 1
        if not is_cheapest or not all(map(_is_short, self.rows)):
            return []
        started = perf_counter()
        with mx.stream(self.stream):
            for row in self.rows:
                passes.add(row.verifier)
            passes.read([row.generation.sequence.tokens[:-1] for row in self.rows])
        for row in self.rows:
            row.generation.prefill()
            row.generation.stats.prefill_seconds = (perf_counter() - started) / len(self.rows)
        rows, self.rows = self.rows, []
        return rows


def _is_short(row: Row) -> bool:
    """True if a prompt of which nothing is read is one step, and more than its last token."""
    generation = row.generation
    is_new = generation.target.rollback.position == 0 and row.finish_reason is None
    return is_new and 1 < generation.sequence.prompt_length <= generation.prefill_step_size


def _is_read(row: Row) -> bool:
    """Read a step; whether it was the last one."""
    generation = row.generation
    caches = generation.target.rollback
    left = generation.sequence.prompt_length - 1 - caches.position
    if left > generation.prefill_step_size:
        started = perf_counter()
        generation.feed(left)
        mx.eval([cache.state for cache in caches.caches])
        mx.clear_cache()
        row.reading_seconds += perf_counter() - started
        return False
    generation.prefill()
    generation.stats.prefill_seconds += row.reading_seconds
    return True
