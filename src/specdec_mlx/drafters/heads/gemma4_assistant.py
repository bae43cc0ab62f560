"""Gemma 4 assistants: a few layers that attend to the keys and values of the target.

    x(i) = pre_projection [embed(token i) * sqrt(D), h(i)],  s(i) = norm(layers(x(i)))
    logits of token i + 1 = head(s(i)),                      h(i + 1) = post_projection s(i)

Token 0 is the last one of the text, and h(0) the target's state after its final norm at the token
before. The layers have queries only: each reads the cache of the target's last layer of its kind of
attention, always from the position of the text's last token. (transformers, `Gemma4Assistant`.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4_text

from specdec_mlx.contracts import (
    MOST_WAITING,
    DraftContext,
    FeatureRows,
    Features,
    KeysValues,
    ReadsCache,
)
from specdec_mlx.drafters.draft_sources import DraftSource, Parents
from specdec_mlx.drafters.drawing import spread
from specdec_mlx.drafters.heads.drafter import Config, Head
from specdec_mlx.drafters.shortlist import NarrowOutput
from specdec_mlx.models.anatomy import Anatomy, top_tokens
from specdec_mlx.token_ids import to_ids


def layer_args(config: Config) -> gemma4_text.ModelArgs:
    text = config["text_config"]
    others = {"hidden_size_per_layer_input": 0, "use_double_wide_mlp": False}
    # In mlx-lm a layer that shares keys and values has no projections for them.
    queries_only = {"num_kv_shared_layers": text["num_hidden_layers"], **others}
    return gemma4_text.ModelArgs.from_dict({**text, **queries_only})


def key_widths(args: gemma4_text.ModelArgs) -> dict[str, int]:
    """Map from the kind of attention to the width of its keys."""
    wide = {"full_attention": args.global_head_dim or args.head_dim}
    return {kind: wide.get(kind, args.head_dim) for kind in args.layer_types}


class AssistantSource(DraftSource):
    """Keeps the target's last state, and reads the target's caches for each draft.

    Attributes:
        state: the target's state [1, D] before the text's last token.
        next_state: the state [1, D] that the next step starts from.
        read_caches: keys and values of each kind of attention, while a draft is made.
        keys_values: the function that reads the target's caches.
    """

    state: mx.array | None = None
    next_state: Any = None
    read_caches: Mapping[str, KeysValues]
    keys_values: ReadsCache | None = None

    def __init__(self, head: Any, prompt: Sequence[int], context: DraftContext) -> None:
        super().__init__(prompt, context, context.num_unseen)
        self.head = head

    def see(self, features: FeatureRows) -> None:
        self.keys_values = features.keys_values
        rows = self.head.rows(features)
        if rows.shape[0]:
            self.state = rows[-1:]
        # A lazy slice would keep all rows of a long prompt in memory.
        if rows.shape[0] >= MOST_WAITING:
            mx.async_eval(self.state)

    def begin_draft(self, limit: int) -> int:
        if limit == 0 or self.state is None or self.keys_values is None:
            return 0
        self.next_state = self.state
        self.read_caches = {kind: self.keys_values(c.index) for kind, c in self.head.reads.items()}
        return limit

    def end_draft(self) -> None:
        # A reference to the buffers would make the next pass copy them, because they could not grow
        # in place.
        self.read_caches, self.next_state = {}, self.state

    def next_logits(self, tokens: mx.array | None, parents: Parents = None) -> Any:
        last = to_ids(self.tokens[-1:]) if tokens is None else tokens
        logits, self.next_state = self.head.step(
            self.next_state, last, self.read_caches, self.output_rows
        )
        return logits


class Gemma4Assistant(Head):
    """An assistant. With `use_ordered_embeddings`, only tokens of some groups get logits."""

    kind = "Gemma 4 assistant"
    source = AssistantSource
    grows_trees = False

    def __init__(self, config: Config, anatomy: Anatomy) -> None:
        super().__init__()
        args = layer_args(config)
        width = args.hidden_size
        self.anatomy = anatomy
        self.reads = {kind: anatomy.last_caches[kind] for kind in key_widths(args)}
        self.embed_tokens = nn.Embedding(args.vocab_size, width)
        self.layers = [gemma4_text.DecoderLayer(args, i) for i in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(width, args.rms_norm_eps)
        self.pre_projection = nn.Linear(2 * anatomy.width, width, bias=False)
        self.post_projection = nn.Linear(width, anatomy.width, bias=False)
        if config.get("use_ordered_embeddings"):
            groups = self.masked_embedding = nn.Module()
            groups.centroids = nn.Linear(width, config.get("num_centroids", 2048), bias=False)
            groups.token_ordering = mx.arange(args.vocab_size, dtype=mx.int32)
            self.num_chosen = config.get("centroid_intermediate_top_k", 32)

    @property
    def features(self) -> Features:
        caches = tuple(sorted(kind.index for kind in self.reads.values()))
        return replace(super().features, caches=caches)

    def step(
        self,
        state: mx.array,
        token: mx.array,
        read: Mapping[str, KeysValues],
        rows: NarrowOutput | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Logits [1, V] after a state [1, D] and a token [1], and the next state."""
        # x(i) = pre_projection [embed(token i) * sqrt(D), h(i)]
        embedded = self.anatomy.embed(token) * self.anatomy.width**0.5
        h = self.pre_projection(mx.concatenate([embedded, state], axis=-1))[None]
        for layer in self.layers:
            keys, values, offset = read[layer.layer_type]
            # The offset stays at the last token of the text, however long the draft is.
            h, _, _ = layer(h, shared_kv=(keys, values), offset=offset)
        normed = self.norm(h[0])
        # logits of token i + 1 = head(s(i)), h(i + 1) = post_projection s(i)
        return self.logits(normed, rows), self.post_projection(normed)

    def draft_logits(self, states: mx.array) -> Any:
        return self.embed_tokens.as_linear(states)

    @property
    def output_modules(self) -> list[nn.Module]:
        # A step computes the rows of a few groups only.
        return [] if "masked_embedding" in self else [self.embed_tokens]

    def logits(self, states: mx.array, rows: NarrowOutput | None = None) -> Any:
        """Logits [n, V] of states [n, d]. Tokens of other groups get -inf."""
        if "masked_embedding" not in self:
            return super().logits(states, rows)
        groups = self.masked_embedding
        scores, order = groups.centroids(states), groups.token_ordering
        chosen = top_tokens(scores, self.num_chosen)
        # A group is a row of `token_ordering`: the same number of token ids for each centroid.
        ids = order.reshape(scores.shape[-1], -1)[chosen].reshape(states.shape[0], -1)
        logits = (self.embed_tokens(ids) @ states[..., None]).squeeze(-1)
        return spread(logits, ids, order.size)

    def notes(self) -> list[str]:
        read = ", ".join(f"{cache.index} ({kind})" for kind, cache in self.reads.items())
        notes = [f"reads the target's caches {read}"]
        if "masked_embedding" in self:
            count = self.masked_embedding.centroids.weight.shape[0]
            notes.append(f"{self.num_chosen} of {count} groups of tokens")
        return notes + super().notes()
