"""Heads that draft in one pass: DFlash and Medusa.

DFlash (z-lab, arXiv 2602.06036) is a small diffusion model that fills a block of masks after the
text's last token, attending to the block in both directions and to fused outputs of several layers
of the target, projected to keys and values only. Medusa (arXiv 2401.10774): head i guesses the
token i + 2 positions after a state by x + silu(W x + b) and a matrix over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.contracts import DraftContext, FeatureRows
from specdec_mlx.drafters.heads.drafter import Head
from specdec_mlx.drafters.heads.eagle import SLIDING, LayersConfig, LayersHead
from specdec_mlx.drafters.heads.session import HeadSession
from specdec_mlx.drafters.heads.target_ends import DraftVocabulary, TargetEnds
from specdec_mlx.drafters.model import ModelDrafter, ModelSession
from specdec_mlx.drafters.writing import WritesAtOnce
from specdec_mlx.token_ids import to_ids


class OnePassSession(WritesAtOnce, HeadSession):
    """Drafts at most the head's `most_drafted` tokens at once, by its `read` and `guesses`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.cache = self.head.make_cache()

    def all_logits(self, limit: int) -> mx.array | None:
        """Logits [n, V] of the next n <= limit tokens; None before the prompt was read."""
        self.read()
        length = min(limit, self.head.most_drafted)
        if length == 0 or self.waiting.start == 0:
            return None
        logits: mx.array = self.head.guesses(self.tokens[-1], length, self.cache)
        return logits

    def read(self) -> list[Any]:
        """Read all rows."""
        if self.waiting.num_rows:
            self.head.read(self.waiting.take(self.waiting.num_rows), self.cache)
        return [getattr(kept, "state", kept) for kept in self.cache]


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(LayersConfig):
    """Config of a DFlash head.

    block_size: with the known first token. causal: by layer, a place does not see later ones of its
    block. logit_cap: logits are cap * tanh(logits / cap).
    """

    mask_token: int
    block_size: int = 16
    causal: tuple[bool, ...] = ()
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None

    @classmethod
    def read(cls, config: Mapping[str, Any], num_layers: int) -> DFlashConfig:
        """From a config.json of z-lab or speculators; num_layers: the target's."""
        nested = {**config, **(config.get("dflash_config") or {})}
        layer = {"model_type": "qwen3", **(config.get("transformer_layer_config") or config)}
        depth = layer["num_hidden_layers"]
        slides = [kind == SLIDING for kind in layer.get("layer_types") or ()]
        causal = slides if not config.get("sliding_window_non_causal") else []
        if config.get("is_causal") is not None:
            causal = [bool(config["is_causal"])] * depth
        ids, layers = config.get("aux_hidden_state_layer_ids"), nested.get("target_layer_ids")
        if ids is not None:  # of speculators: Hugging Face's states, the first the embedding
            layers = [i - 1 for i in ids]
        if not layers:  # evenly spread, from the second to the third last
            most = config.get("num_target_layers", num_layers)
            spread = [round(1 + i * (most - 4) / max(depth - 1, 1)) for i in range(depth)]
            layers = spread if depth > 1 else [most // 2]
        return cls(
            layer,
            tuple(layers),
            tuple(layer.get("sliding_window") if slide else None for slide in slides),
            mask_token=nested["mask_token_id"],
            block_size=nested.get("block_size", cls.block_size),
            causal=tuple(causal),
            embedding_scale=nested.get("input_embedding_scale", 1.0),
            logit_scale=nested.get("output_multiplier", 1.0),
            logit_cap=nested.get("final_logit_softcapping") or None,
        )


class DFlash(LayersHead):
    """A DFlash head; with a draft vocabulary it has a matrix of its own over that."""

    kind = "DFlash"
    session = OnePassSession

    def __init__(
        self, config: DFlashConfig, ends: TargetEnds, vocabulary: DraftVocabulary | None = None
    ) -> None:
        rows = 0 if vocabulary is None else vocabulary.ids.size
        super().__init__(config, ends, vocabulary, own_head=rows)
        self.most_drafted = config.block_size - 1

    def rows(self, features: FeatureRows) -> Any:
        """[n, D] the outputs of the target's layers, fused and normed."""
        return self.hidden_norm(super().rows(features))

    def read(self, rows: mx.array, cache: list[Any]) -> None:
        """Add n rows [n, D] to the context: their keys and values in every layer."""
        for layer, kept in zip(self.layers, cache, strict=True):
            layer.self_attn(rows[None], None, kept)  # lazy: attention itself is never computed

    def guesses(self, token: int, number: int, cache: list[Any]) -> mx.array:
        """Logits [n, V] of the n tokens after `token`, by a block that is not kept."""
        tokens = to_ids([token, *[self.config.mask_token] * self.most_drafted])
        h = self.ends.embed(tokens)[None] * self.config.embedding_scale
        for i, (layer, kept) in enumerate(zip(self.layers, cache, strict=True)):
            h = layer(h, self.mask(i, kept.offset, tokens.shape[0]), kept)
            kept.trim(tokens.shape[0])
        return self.logits(self.norm(h[0]))[1 : number + 1]

    def mask(self, layer: int, start: int, size: int) -> mx.array | None:
        """[B, start + B] places that each of a block of B sees in a layer; None for all."""
        window = self.config.windows[layer] if self.config.windows else None
        causal = self.config.causal[layer] if self.config.causal else False
        if window is None and not causal:
            return None
        back = mx.arange(start, start + size)[:, None] - mx.arange(start + size)
        seen = back >= 0 if causal else back == back
        return seen if window is None else seen & (mx.abs(back) < window)

    def draft_logits(self, states: mx.array) -> Any:
        """Logits [..., Vd] of normed states [..., D], scaled and capped."""
        logits = super().draft_logits(states) * self.config.logit_scale
        cap: float | None = self.config.logit_cap
        return logits if cap is None else cap * mx.tanh(logits / cap)

    def notes(self) -> list[str]:
        """Layers, block, vocabulary, windows."""
        layers, *others = super().notes()
        return [layers, f"blocks of {self.config.block_size}", *others]


class Medusa(Head):
    """Heads of some blocks each; own_heads: rows of their own matrices, 0 for the target's head."""

    kind = "Medusa"
    session = OnePassSession

    def __init__(
        self, num_heads: int, num_layers: int, ends: TargetEnds, *, own_heads: int = 0
    ) -> None:
        super().__init__()
        self.ends, width = ends, ends.width
        self.most_drafted = num_heads
        layers, heads = range(num_layers), range(num_heads)
        self.blocks = [[nn.Linear(width, width) for _ in layers] for _ in heads]
        if own_heads:
            self.lm_heads = [nn.Linear(width, own_heads, bias=False) for _ in heads]

    def make_cache(self) -> list[Any]:
        """Space for the last state."""
        return []

    def read(self, rows: mx.array, cache: list[Any]) -> None:
        """Keep the last of the target's states [n, D]."""
        cache[:] = [rows[-1:]]

    def guesses(self, token: int, number: int, cache: list[Any]) -> mx.array:
        """Logits [n, V] of the first n heads."""
        states = [self.state(cache[0], i) for i in range(number)]
        if "lm_heads" not in self:
            return self.ends.logits(mx.concatenate(states))
        return mx.concatenate([self.lm_heads[i](state) for i, state in enumerate(states)])

    def state(self, state: mx.array, index: int) -> mx.array:
        """A head's state [..., D] below its matrix, from the target's [..., D]."""
        for block in self.blocks[index]:
            state = state + nn.silu(block(state))
        return state

    def notes(self) -> list[str]:
        """Number of heads."""
        return [f"{len(self.blocks)} heads", *super().notes()]


@dataclass(frozen=True, eq=False)
class PardDrafter(ModelDrafter):
    """Draft with a model trained to draft in parallel; mask_token: `pard_token` in its config."""

    tokenizers: str = "same"
    mask_token: int = 0

    @property
    def key(self) -> str:
        """The model by its content, and how it drafts."""
        return f"PARD {super().key}"

    def describe(self) -> str:
        """Kind and mask token."""
        return f"PARD; mask token {self.mask_token}"

    def session(self, prompt: Sequence[int], context: DraftContext) -> PardSession:
        """The model's side of a generation."""
        return PardSession(self, prompt, context)


class PardSession(WritesAtOnce, ModelSession):
    """A generation of the draft model; its caches never hold more than the text."""

    def __init__(self, drafter: PardDrafter, prompt: Sequence[int], context: DraftContext) -> None:
        super().__init__(drafter, prompt, context)
        self.mask_token = drafter.mask_token

    @property
    def forks(self) -> bool:
        """True if its drafts are trees; these take no pass of their own."""
        return self.branches > 1

    def all_logits(self, limit: int) -> mx.array | None:
        """Logits [n, V] of the next n <= limit tokens; None for a limit of 0."""
        if limit == 0:
            return None
        self.catch_up()
        room = self.rollback.widest_pass()
        pending = self.tokens[self.rollback.position :]
        length = limit if room is None else min(limit, 1 + room - len(pending))
        self.rollback.checkpoint()
        masks = [self.mask_token] * (length - 1)
        logits = self.feed(to_ids([*pending, *masks]))[-length:]
        self.rollback.rewind_to(len(self.tokens))
        return logits
