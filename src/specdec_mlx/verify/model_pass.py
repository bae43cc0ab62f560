"""A pass of the target: its model, its caches, and how wide a pass may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import maybe_quantize_kv_cache

from specdec_mlx.contracts import FeatureRows, Features, KeysValues
from specdec_mlx.models import PerModel
from specdec_mlx.verify.exactness import first_inexact, warn_of_chains
from specdec_mlx.verify.inputs import CacheOptions
from specdec_mlx.verify.recurrent_states import recurrent_states_of
from specdec_mlx.verify.rollback import Rollback
from specdec_mlx.verify.tree_passes import TreeLayout, takes_trees, tree_pass
from specdec_mlx.verify.watching import Taps, anatomy_of, check_readable, keys_values_of

vocab_size_of = PerModel(lambda model: anatomy_of(model).vocab_size)
"""V of a loaded model: how wide its logits are."""


@dataclass(eq=False)
class ModelPass:
    """The target model and its caches.

    options: when they are quantized. probe: measure once if the model is exact for several
    positions at once. taps: reads states of its passes, or None.
    """

    model: nn.Module
    rollback: Rollback
    options: CacheOptions = field(default_factory=CacheOptions)
    probe: bool = field(default=True, kw_only=True)
    taps: Taps | None = field(default=None, init=False)

    def tap(self, wanted: Features) -> None:
        """Have every pass from now on bring these features; UnreadableError if it cannot."""
        for index in wanted.caches:
            check_readable(self.rollback.caches, index)
        self.taps = Taps(self.model, wanted, self.keys_values)

    def vocab_size(self) -> int:
        """V."""
        return vocab_size_of(self.model)

    @property
    def position(self) -> int:
        """Positions that were fed."""
        return self.rollback.position

    def keys_values(self, index: int) -> KeysValues:
        """Contents of a cache now; UnreadableError for one without keys and values."""
        return keys_values_of(self.rollback.caches, index)

    def fed_features(self) -> tuple[FeatureRows, int]:
        """Rows of the latest `feed`, and how many positions it had."""
        assert self.taps is not None
        assert self.taps.features is not None, "asked for rows before a pass"
        return self.taps.features, self.taps.num_rows

    def feed(
        self,
        tokens: mx.array,
        embeddings: mx.array | None = None,
        parents: Sequence[int] | None = None,
        *,
        in_round: bool = False,
    ) -> mx.array:
        """One pass over tokens [S], or embeddings [S, D] in their place; logits [S, V], lazy.

        parents: [K] of the last K tokens, where they are a tree. in_round: it verifies; from the
        first wide one of these on, recurrences go step by step, as plain decoding would.
        """
        if in_round and self.probe and tokens.shape[0] > 1:
            self.rollback.states = recurrent_states_of(self.model)
        if self.options.kv_bits is not None:
            self.quantize()
        call = None
        if parents is not None:
            rows = TreeLayout.after(tokens.shape[0] - len(parents), parents)
            call = partial(tree_pass, rows=rows)
        inputs = {} if embeddings is None else {"input_embeddings": embeddings[None]}

        run = partial(self.rollback.forward, self.model, tokens, call, **inputs)
        return run() if self.taps is None else self.taps.read(run)

    def quantize(self) -> None:
        """Quantize caches, in the caller's list, that are long enough; after a rollback."""
        if self.options.kv_bits is not None and self.rollback.position > 0:
            maybe_quantize_kv_cache(
                self.rollback.caches,
                self.options.quantized_kv_start,
                self.options.kv_group_size,
                self.options.kv_bits,
            )

    def widest_pass(self) -> int | None:
        """Most positions that the next pass may have, as measured; None for any number.

        No pass may reach across `quantized_kv_start`, after which plain decoding quantizes caches.
        """
        limits = [self.rollback.widest_pass()]
        if self.probe:
            end = self.rollback.end
            until = first_inexact(self.model, end)
            limits.append(None if until is None else max(1, until - end))
        if self.options.kv_bits is not None:
            start = self.options.quantized_kv_start
            limits += [
                start - cache.offset
                for cache in self.rollback.caches
                if hasattr(cache, "to_quantized") and cache.offset < start
            ]
        return min((limit for limit in limits if limit is not None), default=None)

    def takes_trees(self) -> bool:
        """True if a tree may be verified now, in one pass; a warning, once a model, if not."""
        if not self.probe:
            return False
        end = self.rollback.end
        if (
            takes_trees(self.rollback)
            and first_inexact(self.model, end, on_trees=True) is None
        ):
            return True
        if self.taps is None:
            warn_of_chains(self.model)
        return False
