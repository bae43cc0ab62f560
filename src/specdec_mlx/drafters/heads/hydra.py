"""Hydra heads, each of which reads the tokens that the heads before it drafted.

Ankner et al. 2024 (arXiv 2402.05109). Head i guesses the token i + 2 positions after a state s(t):

    x = [s(t), embed(x_{t+1}), ..., embed(x_{t+1+i})],  x := R x + silu(W x + b),  logits = M x + c

Further blocks keep the width, so R is the identity in these. s is the target's state after its
final norm, or in Hydra++ a decoder layer's state over all of these ("prefix-mlp").
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from specdec_mlx.caches import states_of
from specdec_mlx.drafters.draft_sources import Parents
from specdec_mlx.drafters.heads.drafter import Config, Head
from specdec_mlx.drafters.heads.eagle import layer_arguments
from specdec_mlx.drafters.heads.mtp import model_of
from specdec_mlx.drafters.heads.one_pass import BlockSource
from specdec_mlx.memory.drafter_states import LatestFeatures
from specdec_mlx.models.anatomy import Anatomy
from specdec_mlx.token_ids import to_ids


class HydraSource(BlockSource):
    """Drafts token by token. Each head reads the inputs of the head before it, and one more token.

    Attributes:
        state: the state [1, D] of the last position, or None before the first row.
        inputs: what a head reads [1, (i + 2) D] after the text and after each node of the draft.
    """

    num_open = 1  # the last position is read again, because its state is not among the caches
    state: mx.array | None = None
    inputs: list[mx.array]

    def begin_draft(self, limit: int) -> int:
        self.read()
        if self.state is None:
            return 0
        last = self.head.embed(to_ids(self.tokens[-1:]))
        self.inputs = [mx.concatenate([self.state, last], axis=-1)]
        most: int = self.head.most_drafted
        return min(limit, most)

    def next_logits(self, tokens: mx.array | None, parents: Parents = None) -> Any:
        new = self.inputs
        if tokens is not None:
            # Entry 0 is the end of the text, and ROOT is -1.
            above = [len(new) - 1] if parents is None else [parent + 1 for parent in parents]
            before = mx.concatenate([self.inputs[node] for node in above])
            read = mx.concatenate([before, self.head.embed(tokens)], axis=-1)
            new = list(mx.split(read, len(above)))
            self.inputs += new
        return self.head.logits(mx.concatenate(new), self.output_rows)

    def read(self) -> list[Any]:
        if self.waiting.num_rows:
            self.state = self.head.read(self.waiting.take(self.waiting.num_rows), self.cache)
        return states_of(self.cache)

    def take_state(
        self, caches: list[Any], latest: LatestFeatures, end: int, has_rows: bool
    ) -> bool:
        self.cache = caches
        self.waiting.reset(end - 1, latest.rows[-1:] if has_rows else None)
        return True

    def finish(self, end: int, rows: mx.array) -> tuple[list[Any], list[mx.array]]:
        return super().finish(end - 1, rows)


class HydraBlock(nn.Module):  # type: ignore[misc]
    """R x + silu(W x + b) of `num_read` vectors of width D, with R = 1 for a single vector."""

    def __init__(self, num_read: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_read * width, width)
        if num_read > 1:
            self.res_connection = nn.Linear(num_read * width, width)

    def __call__(self, x: mx.array) -> Any:
        residual = self.res_connection(x) if "res_connection" in self else x
        return residual + nn.silu(self.linear(x))


class Hydra(Head):
    """Hydra heads.

    Args:
        num_heads: number of heads.
        places: places of the blocks in a head's list. Dropout has the other places in a file.
        rows: rows of the heads' output matrices.
        layer: config of the target, for Hydra++'s decoder layer, or None for no layer.
    """

    kind = "Hydra"
    source = HydraSource
    corrects = True

    def __init__(
        self,
        num_heads: int,
        places: Collection[int],
        rows: int,
        anatomy: Anatomy,
        layer: Config | None = None,
    ) -> None:
        super().__init__()
        self.anatomy, self.width = anatomy, anatomy.width
        self.most_drafted, self.has_state = num_heads, layer is not None
        if layer is not None:
            shell = model_of(layer_arguments({**layer, "num_hidden_layers": 1}))
            self.prefix, self.norm = shell.layers[0], shell.model.norm

        def block(index: int, place: int) -> nn.Module:
            if place not in places:
                return nn.Identity()
            return HydraBlock(index + 2 if place == min(places) else 1, self.width)

        self.blocks = [[block(i, j) for j in range(max(places) + 1)] for i in range(num_heads)]
        self.lm_heads = [nn.Linear(self.width, rows) for _ in range(num_heads)]

    def full_caches(self) -> list[Any]:
        return [KVCache()] if "prefix" in self else []

    def read(self, rows: mx.array, cache: list[Any]) -> Any:
        """The state [1, D] of the last of n more positions, from the target's states [n, D]."""
        if "prefix" not in self:
            return rows[-1:]
        h = self.prefix(rows[None], create_attention_mask(rows[None], cache[0]), cache[0])
        return self.norm(h[0, -1:])

    def draft_logits(self, states: mx.array) -> Any:
        """Logits [n, V] of the head that reads [n, (i + 2) D]."""
        index = states.shape[-1] // self.width - 2
        for block in self.blocks[index]:
            states = block(states)
        return self.lm_heads[index](states)

    @property
    def output_modules(self) -> list[nn.Module]:
        return list(self.lm_heads)

    @property
    def tokens_a_pass(self) -> int:
        return self.most_drafted

    def notes(self) -> list[str]:
        layers = ["a decoder layer before them"] if "prefix" in self else []
        return [f"{len(self.blocks)} heads", *layers, *super().notes()]
