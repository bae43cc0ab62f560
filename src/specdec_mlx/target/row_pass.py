"""One pass of the target over the rows of several texts, each with a draft of its own."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.target.rollback import Rollback
from specdec_mlx.target.row_caches import RowCaches
from specdec_mlx.target.row_exactness import can_hold_rows
from specdec_mlx.target.verifier import LazyPass, RowByRowPass, Verifier
from specdec_mlx.token_ids import to_ids
from specdec_mlx.types import NO_DRAFT, Draft, PendingPass


@dataclass
class RowPlace(Rollback):
    """A row's place in its text, as its round sees it: it asks to go back, and all rows go at once.

    base: positions of the caches that were there before the text. wanted: where it asked to go;
    None if it stays.
    """

    base: int = 0
    wanted: int | None = None

    def rewind_to(self, position: int) -> int:
        """Note the position to go back to; `RowPasses.settle` goes there."""
        if position < self.position:
            self.wanted = position
        return position

    def moved(self, end: int) -> None:
        """The row's caches end here now."""
        self.position, self.wanted = end - self.base, None

    @property
    def end(self) -> int:
        """Where the row's caches are to end."""
        return self.base + (self.position if self.wanted is None else self.wanted)


class ToVerify(NamedTuple):
    """What a pass is to do for one row.

    pending: its tokens that are not in the caches yet, at least one. draft: what to verify after
    them. position: index of the next token among those generated.
    """

    pending: Sequence[int] | mx.array
    draft: Draft
    position: int


@dataclass
class RowPasses:
    """The target of several texts at once: their caches, and the passes over all of them.

    verifiers: how the tokens of each row are drawn, and what decides about its drafts. places:
    where the rows are in their texts.
    """

    model: nn.Module
    caches: RowCaches
    verifiers: list[Verifier] = field(default_factory=list)
    places: list[RowPlace] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module, max_kv_size: int | None) -> RowPasses | None:
        """No row yet; None, and a warning, for a model whose texts cannot be rows."""
        if not can_hold_rows(model):
            return None
        caches = RowCaches.like(make_prompt_cache(model, max_kv_size=max_kv_size))
        if caches is None:
            warnings.warn(
                "specdec_mlx: caches with max_kv_size cannot be held in rows, so the texts are "
                "written one by one. Leave it out to have them written together.",
                stacklevel=5,
            )
            return None
        return cls(model, caches)

    def add(self, verifier: Verifier) -> None:
        """Take over a text that was read alone; from now on it goes with the others."""
        alone = verifier.rollback
        self.caches.add(alone.caches, alone.end)
        place = RowPlace([], alone.position, base=alone.end - alone.position)
        verifier.model_pass.rollback = place
        self.verifiers.append(verifier)
        self.places.append(place)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, and drop the others."""
        self.caches.keep(rows)
        self.verifiers = [self.verifiers[row] for row in rows]
        self.places = [self.places[row] for row in rows]

    def read(self, texts: Sequence[Sequence[int]]) -> None:
        """Feed tokens to all rows for the caches alone, at least one to each; it is waited for."""
        rounds = [ToVerify(tokens, NO_DRAFT, 0) for tokens in texts]
        widths = [len(tokens) for tokens in texts]
        self.caches.begin(widths)
        self.model(_padded(rounds, (), max(widths)), cache=self.caches.caches)
        self.caches.finish()
        mx.eval([cache.state for cache in self.caches.caches])
        mx.clear_cache()
        for place, end in zip(self.places, self.caches.ends, strict=True):
            place.moved(end)

    def launch(self, rounds: Sequence[ToVerify]) -> list[PendingPass]:
        """Start a pass over all rows; what is to be read of each.

        Raises:
            DraftError: before anything is fed, for what cannot be a draft for this target.
        """
        both = zip(self.verifiers, rounds, strict=True)
        rounds = [round_._replace(draft=v.chain_of(round_.draft)) for v, round_ in both]
        drafted = [v.drafted_ids(r.draft) for v, r in zip(self.verifiers, rounds, strict=True)]
        widths = [len(r.pending) + len(r.draft) for r in rounds]
        self.caches.begin(widths)
        logits = self.model(_padded(rounds, drafted, max(widths)), cache=self.caches.caches)
        self.caches.finish()
        passes = []
        for row, (verifier, round_) in enumerate(zip(self.verifiers, rounds, strict=True)):
            first = len(round_.pending) - 1
            mine = logits[row, first : widths[row]]
            passes.append(
                verifier.judge(mine, round_.draft, drafted[row], round_.position, widths[row])
            )
        mx.async_eval([pass_.to_compute for pass_ in passes])
        for place, end in zip(self.places, self.caches.ends, strict=True):
            place.moved(end)
        return list(passes)

    def settle(self) -> None:
        """Go back where rows asked to."""
        ends = self.caches.go_back([place.end for place in self.places])
        for place, end in zip(self.places, ends, strict=True):
            place.moved(end)

    def extract(self, row: int) -> Rollback:
        """What the caches hold of a row, in caches of its own."""
        caches: list[Any] = self.caches.extract(row, make_prompt_cache(self.model))
        return Rollback(caches, self.places[row].position)


def wait_for(passes: Sequence[PendingPass]) -> None:
    """Wait for what is to be read of all rows, at once."""
    made = [pass_ for pass_ in passes if isinstance(pass_, LazyPass | RowByRowPass)]
    mx.eval([pass_.to_compute for pass_ in made])


def _padded(rounds: Sequence[ToVerify], drafted: Sequence[mx.array], width: int) -> mx.array:
    """What is fed, [rows, width]; padding is token 0. What the host knows is one array."""
    if not any(
        isinstance(tokens, mx.array) for r in rounds for tokens in (r.pending, r.draft.tokens)
    ):
        fed = np.zeros((len(rounds), width), np.uint32)
        for row, round_ in zip(fed, rounds, strict=True):
            known = [*round_.pending, *round_.draft.tokens]
            row[: len(known)] = known
        return mx.array(fed)
    rows = [
        mx.concatenate([to_ids(r.pending), tokens])
        for r, tokens in zip(rounds, drafted, strict=True)
    ]
    return mx.stack([mx.pad(row, (0, width - row.shape[0])) for row in rows])
