"""One pass of the target over the rows of several texts, each with its own draft."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.batch_caches import BatchCaches
from specdec_mlx.caches import Rollback, leaves, wait_for
from specdec_mlx.contracts import Draft, Drafter, all_drafters
from specdec_mlx.exactness.probe import can_hold_rows
from specdec_mlx.exactness.recurrent_states import in_steps, padded
from specdec_mlx.models.anatomy import Call, watching
from specdec_mlx.options import Options
from specdec_mlx.target import LazyPass, StepwisePass, Verifier
from specdec_mlx.token_ids import to_ids


class ToVerify(NamedTuple):
    """One row of a pass.

    Attributes:
        pending: tokens to feed before the draft, at least one.
        draft: a draft that was checked.
        position: index of the next token among those generated.
    """

    pending: Sequence[int] | mx.array
    draft: Draft
    position: int


@dataclass
class BatchPasses(ABC):
    """Passes over several texts, with a verifier for each.

    Attributes:
        verifiers: of the texts, in the order of the rows.
        is_together: one pass covers all texts.
    """

    verifiers: list[Verifier] = field(default_factory=list, kw_only=True)
    is_together: ClassVar[bool]

    def check(self, caches: Sequence[Any]) -> None:  # noqa: B027  # optional
        """Raise ValueError for caches that a text cannot go on from."""

    @abstractmethod
    def add(self, verifier: Verifier) -> None:
        """Add a text whose prompt was read alone, with its caches."""

    @abstractmethod
    def keep(self, rows: Sequence[int]) -> None:
        """Keep these texts, in this order."""

    @abstractmethod
    def launch(self, rounds: Sequence[ToVerify]) -> list[LazyPass | StepwisePass]:
        """Start a pass over each text's pending tokens and draft."""

    @abstractmethod
    def apply_rewinds(self) -> None:
        """Take the rejected positions of all texts out of the caches."""

    @abstractmethod
    def extract(self, row: int) -> Rollback:
        """Caches of one text."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of the caches of all texts."""


@dataclass
class SharedPasses(BatchPasses):
    """One pass over all texts as rows. A text's `Rollback` has a position and no caches."""

    model: nn.Module
    caches: BatchCaches
    is_together: ClassVar[bool] = True

    @property
    def places(self) -> list[Rollback]:
        return [verifier.rollback for verifier in self.verifiers]

    @property
    def num_bytes(self) -> int:
        return self.caches.num_bytes

    def check(self, caches: Sequence[Any]) -> None:
        if not self.caches.takes(caches):
            kinds = sorted({type(cache).__name__ for cache in leaves(caches)})
            raise ValueError(
                f"prompt_caches holds {', '.join(kinds)}, which texts that are written together "
                "cannot go on from. Give the max_kv_size or kv_bits of these caches, and the texts "
                "are written one by one."
            )

    def add(self, verifier: Verifier) -> None:
        alone = verifier.rollback
        self.caches.add(alone.caches, alone.end)
        base = alone.end - alone.position
        # A text that rewinds moves only this position. `apply_rewinds` then moves all rows.
        verifier.rollback = Rollback([], alone.position, base=base)
        self.verifiers.append(verifier)

    def keep(self, rows: Sequence[int]) -> None:
        self.caches.keep(rows)
        self.verifiers = [self.verifiers[row] for row in rows]

    def read(self, texts: Sequence[Sequence[int]]) -> None:
        """Feed at least one token to each row, to fill the caches, and wait."""
        with padded(self.model):
            self.caches.feed(self.model, texts)
        wait_for(self.caches.caches)
        mx.clear_cache()
        self._move()

    def launch(self, rounds: Sequence[ToVerify]) -> list[LazyPass | StepwisePass]:
        drafted, fed = [], []
        for verifier, round_ in zip(self.verifiers, rounds, strict=True):
            drafted.append(verifier.drafted_ids(round_.draft))
            fed.append(_joined(round_.pending, round_.draft, drafted[-1]))
        watched = [
            module
            for verifier in self.verifiers
            if verifier.state_reader is not None
            for module in verifier.state_reader.modules
        ]
        calls: list[Call] = []
        # A text alone runs its recurrences step by step, so that rows must do so too to give the
        # same bits.
        width = max(map(len, fed))
        kernels = self.kernels_around(len(fed) * width)
        with in_steps(self.model, width), watching(watched, calls.append), kernels:
            logits = self.caches.feed(self.model, fed)
        passes = []
        for row, (verifier, round_) in enumerate(zip(self.verifiers, rounds, strict=True)):
            num_fed = len(fed[row])
            # Rows are padded at the right to the longest text, and padding is not judged.
            mine = logits[row, len(round_.pending) - 1 : num_fed]
            pass_ = verifier.judge(mine, round_.draft, drafted[row], round_.position, num_fed)
            if (reader := verifier.state_reader) is not None:
                pass_.features = reader.rows(calls, logits[row, :num_fed], row)
            passes.append(pass_)
        # One call for all rows, which share the graph of the pass.
        mx.async_eval([pass_.to_compute for pass_ in passes])
        self._move()
        return list(passes)

    def kernels_around(self, rows: int) -> AbstractContextManager[object]:
        if self.verifiers[0].kernels is None:
            return nullcontext()
        longest = max(self.verifiers, key=lambda verifier: verifier.rollback.end)
        return longest.kernels_around(rows)

    def apply_rewinds(self) -> None:
        self.caches.go_back([place.end for place in self.places])
        self._move()

    def _move(self) -> None:
        for place, end in zip(self.places, self.caches.lengths, strict=True):
            place.position = end - place.base

    def extract(self, row: int) -> Rollback:
        caches: list[Any] = self.caches.extract(row, make_prompt_cache(self.model))
        return Rollback(caches, self.places[row].position)


@dataclass
class OneByOne(BatchPasses):
    is_together: ClassVar[bool] = False

    @property
    def num_bytes(self) -> int:
        caches = (cache for v in self.verifiers for cache in v.rollback.caches)
        return sum(int(cache.nbytes) for cache in caches)

    def add(self, verifier: Verifier) -> None:
        self.verifiers.append(verifier)

    def keep(self, rows: Sequence[int]) -> None:
        self.verifiers = [self.verifiers[row] for row in rows]

    def launch(self, rounds: Sequence[ToVerify]) -> list[LazyPass | StepwisePass]:
        both = zip(self.verifiers, rounds, strict=True)
        return [verifier.launch(r.pending, r.draft, r.position) for verifier, r in both]

    def apply_rewinds(self) -> None:
        """Do nothing: each text went back by itself."""

    def extract(self, row: int) -> Rollback:
        return self.verifiers[row].rollback


def _joined(pending: Any, draft: Draft, drafted: mx.array) -> list[int] | mx.array:
    """All tokens of a round, on the host if they are known there.

    drafted: [K] ids of the draft, on the device.
    """
    if isinstance(pending, mx.array) or isinstance(draft.tokens, mx.array):
        return mx.concatenate([to_ids(pending), drafted])
    return [*pending, *draft.tokens]


def reads_caches(drafter: Drafter) -> bool:
    """True for a drafter that reads the target's keys and values. Rows do not expose them."""
    return drafter.features is not None and bool(drafter.features.caches)


def make_passes(model: nn.Module, options: Options, drafter: Drafter | None) -> BatchPasses:
    """Passes over several texts. `OneByOne` with a warning if they cannot be rows."""
    readers = [part for part in all_drafters(drafter) if reads_caches(part)]
    if readers:
        reason = f"{readers[0].class_name} reads the target's caches, of one text at a time"
    elif not can_hold_rows(model):
        return OneByOne()
    else:
        name = "max_kv_size" if options.kv_bits is None else "kv_bits"
        new = make_prompt_cache(model, max_kv_size=options.max_kv_size)
        caches = BatchCaches.like(new) if options.kv_bits is None else None
        if caches is not None:
            return SharedPasses(model, caches)
        reason = f"caches with {name} cannot be rows; leave it out to write texts together"
    warnings.warn(f"specdec_mlx: {reason}. The texts are written one by one.", stacklevel=5)
    return OneByOne()
