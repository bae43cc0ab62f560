"""The target as the loop sees it: it verifies drafts, can go back, and may be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import mlx.core as mx

from specdec_mlx.contracts.drafting import Draft
from specdec_mlx.contracts.verdicts import Outcome

if TYPE_CHECKING:
    from specdec_mlx.verify.rollback import Rollback


@dataclass(frozen=True)
class Features:
    """Features of the target's passes that a drafter wants to read, or gets.

    layers: indices of decoder layers whose outputs are wanted. head_input: the state after the
    final norm. top: how many of the likeliest tokens. caches: indices of the target's caches,
    nested ones counted one by one, whose keys and values are wanted.
    """

    layers: tuple[int, ...] = ()
    head_input: bool = False
    top: int = 0
    caches: tuple[int, ...] = ()


class KeysValues(NamedTuple):
    """Contents of one of the target's caches for the text read so far; all lazy.

    keys, values: [1, heads, n, d], rotated, of the last n positions in any order: all, or the
    window's. offset: positions read.
    """

    keys: mx.array
    values: mx.array
    offset: int


ReadsCache = Callable[[int], KeysValues]
"""Reads one of the target's caches, by its index, as it is when it is called."""


@dataclass(frozen=True)
class FeatureRows:
    """Rows of the target's passes at n positions in the text, one after the other; all lazy.

    layers: index -> output [n, D], several streams of a layer side by side [n, streams * D].
    head_input: [n, D]. top_tokens: [n, top] by the raw logits, the likeliest first. keys_values:
    the way to the caches, or None; call it in `propose`, and keep nothing of what it gives, or the
    next pass has to copy the cache.
    """

    layers: Mapping[int, mx.array]
    head_input: mx.array | None = None
    top_tokens: mx.array | None = None
    keys_values: ReadsCache | None = None

    def rows(self, indices: Sequence[int]) -> FeatureRows:
        """Some of the rows, in this order."""
        first = indices[0] if indices else 0
        end = first + len(indices)
        is_run = list(indices) == list(range(first, end))
        which = slice(first, end) if is_run else mx.array(list(indices), mx.int32)
        return self.joined([self], lambda parts: parts[0][which])

    def only(self, wanted: Features) -> FeatureRows:
        """The wanted ones; all of them have to be there."""
        top = None if self.top_tokens is None else self.top_tokens[:, : wanted.top]
        return FeatureRows(
            layers={layer: self.layers[layer] for layer in wanted.layers},
            head_input=self.head_input if wanted.head_input else None,
            top_tokens=top if wanted.top else None,
            keys_values=self.keys_values if wanted.caches else None,
        )

    @classmethod
    def joined(
        cls,
        parts: Sequence[FeatureRows],
        join: Callable[[list[mx.array]], mx.array] = mx.concatenate,
    ) -> FeatureRows:
        """Rows of several passes of the same features, at least one, one after the other."""

        def together(arrays: Sequence[mx.array | None]) -> mx.array | None:
            there = [array for array in arrays if array is not None]
            return join(there) if there else None

        return cls(
            layers={
                layer: join([part.layers[layer] for part in parts])
                for layer in parts[0].layers
            },
            head_input=together([part.head_input for part in parts]),
            top_tokens=together([part.top_tokens for part in parts]),
            keys_values=parts[-1].keys_values,
        )


class PendingPass(Protocol):
    """A pass of the target that is under way.

    draft: what it verifies. num_fed: positions computed. logprobs: K+1 times [1, V], processed,
    before temperature and filters, as mlx-lm reports them; who keeps one keeps no other. features:
    rows for a drafter that reads, or None.
    """

    draft: Draft
    num_fed: int
    logprobs: Any
    features: FeatureRows | None

    @property
    def next_token(self) -> Any:
        """Token after an empty draft, uint32 [1], not computed yet."""

    def wait(self) -> None:
        """Wait until it is computed."""

    def read(self) -> Outcome:
        """The outcome; the only host synchronisation of a round."""


class Target(Protocol):
    """The target of one generation, as the loop sees it: it verifies drafts and can go back.

    remembers: a logits processor may keep what it was shown.
    """

    remembers: bool

    @property
    def rollback(self) -> Rollback:
        """Its caches, and how many positions of the text they hold."""

    def launch(
        self,
        pending: Sequence[int] | mx.array,
        draft: Draft,
        position: int,
        embeddings: mx.array | None = None,
    ) -> PendingPass:
        """Start a pass over the pending tokens, at least one, and a draft, which may be empty.

        position: index of the next token among those generated. embeddings: of the pending, [S, D].
        """

    def feed(self, tokens: mx.array, embeddings: mx.array | None = None) -> mx.array:
        """One pass for the caches alone; logits [S, V], lazy."""

    def extend_history(self, tokens: Sequence[int] | mx.array) -> None:
        """Add tokens of the text to what logits processors see."""

    def show_end(self, logprobs: mx.array) -> None:
        """Show them the text when no pass comes after it; logprobs: [1, V], any."""

    def vocab_size(self) -> int:
        """V."""

    def widest_pass(self) -> int | None:
        """Most positions that the next pass may have; None for any number."""

    def takes_trees(self) -> bool:
        """True if a tree may be verified now, in one pass."""

    def quantize(self) -> None:
        """Replace caches by quantized ones, if that was asked for and is due."""

    def tap(self, wanted: Features) -> None:
        """Have every pass from now on bring these features. Raises UnreadableError."""

    def fed_features(self) -> tuple[FeatureRows, int]:
        """Rows of the latest `feed`, and its number of positions."""
