"""Heads that draft in one pass: DFlash, DFlash 2, DSpark and Medusa.

DFlash (z-lab, arXiv 2602.06036) is a small diffusion model that fills a block of masks after the
text's last token, attending to the block in both directions and to fused outputs of several layers
of the target, projected to keys and values only. DFlash 2 (package dflash 0.1.0) and DSpark
(deepseek-ai/DeepSpec) then correct each place of the block by the token drafted before it. Medusa
(arXiv 2401.10774): head i guesses the token i + 2 positions after a state by x + silu(W x + b) and
a matrix over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.contracts import FeatureRows
from specdec_mlx.drafters.drawing import match_vocab
from specdec_mlx.drafters.heads.drafter import Config, DraftVocabulary, Head, TargetEnds
from specdec_mlx.drafters.heads.eagle import (
    SLIDING,
    LayersConfig,
    LayersHead,
    is_gemma4,
)
from specdec_mlx.drafters.heads.session import HeadSession
from specdec_mlx.drafters.writing import AtOnceSession, Parents, places_after
from specdec_mlx.token_ids import to_ids


class BlockSession(HeadSession):
    """A session whose head drafts up to `most_drafted` tokens in one pass over what it has read."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.cache = self.head.make_cache()

    def begin_draft(self, limit: int) -> int:
        """Read all states; `limit`, or what the head can draft, 0 before it was shown any."""
        self.read()
        self.places = [0]
        return min(limit, self.head.most_drafted) if self.waiting.start else 0

    def read(self) -> list[Any]:
        """Add all states that wait to the head's caches."""
        if self.waiting.num_rows:
            self.head.read(self.waiting.take(self.waiting.num_rows), self.cache)
        return [getattr(kept, "state", kept) for kept in self.cache]


class OnePassSession(AtOnceSession, BlockSession):
    """All tokens at once, by the head's `guesses`."""

    def begin_draft(self, limit: int) -> int:
        """Run the head for all logits of the draft."""
        if length := super().begin_draft(limit):
            self.logits = self.head.guesses(self.tokens[-1], length, self.cache)
        return length


class CorrectedSession(BlockSession):
    """A block in one pass, whose logits the head corrects token by token (`corrected`)."""

    def begin_draft(self, limit: int) -> int:
        """Run the head for the states and logits of the block."""
        if length := super().begin_draft(limit):
            self.states = self.head.states(self.tokens[-1], length, self.cache)
            self.logits = self.head.logits(self.states)
        return length

    def next_logits(self, tokens: mx.array | None, parents: Parents = None) -> Any:
        """Logits of the places after these tokens, corrected."""
        before = to_ids(self.tokens[-1:]) if tokens is None else tokens
        return self.at(places_after(self.places, tokens, parents), before)

    def at(self, places: list[int], before: mx.array) -> Any:
        """Corrected logits [n, V] of n places of the block, after tokens [n]."""
        rows = mx.array(places)
        return self.head.corrected(self.logits[rows], self.states[rows], before)


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(LayersConfig):
    """Config of a DFlash head.

    block_size: with the known first token. causal: by layer, a place does not see later ones of its
    block. logit_cap: logits are cap * tanh(logits / cap). from_anchor: the known token's own place
    drafts as well. options: all entries, for a variant's own.
    """

    mask_token: int
    block_size: int = 16
    causal: tuple[bool, ...] = ()
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    from_anchor: bool = False
    options: Config = field(default_factory=dict)

    @classmethod
    def read(cls, config: Config, num_layers: int) -> DFlashConfig:
        """From a config.json of z-lab or speculators; num_layers: the target's."""
        nested = {**config, **(config.get("dflash_config") or {})}
        layer = {
            "model_type": "qwen3",
            **(config.get("transformer_layer_config") or config),
        }
        depth = layer["num_hidden_layers"]
        slides = [kind == SLIDING for kind in layer.get("layer_types") or ()]
        causal = slides if not config.get("sliding_window_non_causal") else []
        if config.get("is_causal") is not None:
            causal = [bool(config["is_causal"])] * depth
        ids, layers = (
            config.get("aux_hidden_state_layer_ids"),
            nested.get("target_layer_ids"),
        )
        # of speculators: Hugging Face's states, the first the embedding
        if ids is not None:
            layers = [i - 1 for i in ids]
        if not layers:  # evenly spread, from the second to the third last
            most = config.get("num_target_layers", num_layers)
            spread = [
                round(1 + i * (most - 4) / max(depth - 1, 1)) for i in range(depth)
            ]
            layers = spread if depth > 1 else [most // 2]
        # of Gemma's embeddings
        scale = layer["hidden_size"] ** 0.5 if is_gemma4(layer) else 1.0
        return cls(
            layer,
            tuple(layers),
            tuple(layer.get("sliding_window") if slide else None for slide in slides),
            mask_token=nested["mask_token_id"],
            block_size=nested.get("block_size", cls.block_size),
            causal=tuple(causal),
            embedding_scale=nested.get("input_embedding_scale", scale),
            logit_scale=nested.get("output_multiplier", 1.0),
            logit_cap=nested.get("final_logit_softcapping") or None,
            from_anchor=bool(config.get("sample_from_anchor", "markov_rank" in config)),
            options=nested,
        )


class DFlash(LayersHead):
    """A DFlash head; with a draft vocabulary it has a matrix of its own over that."""

    kind = "DFlash"
    session: type[HeadSession] = OnePassSession

    def __init__(
        self,
        config: DFlashConfig,
        ends: TargetEnds,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        rows = 0 if vocabulary is None else vocabulary.ids.size
        super().__init__(config, ends, vocabulary, own_head=rows)
        self.most_drafted = config.block_size - (not config.from_anchor)

    def rows(self, features: FeatureRows) -> Any:
        """[n, D] the outputs of the target's layers, fused and normed."""
        return self.hidden_norm(super().rows(features))

    def read(self, rows: mx.array, cache: list[Any]) -> None:
        """Add n rows [n, D] to the context: their keys and values in every layer."""
        for layer, kept in zip(self.layers, cache, strict=True):
            # lazy: attention itself is never computed
            layer.self_attn(rows[None], None, kept)

    def guesses(self, token: int, number: int, cache: list[Any]) -> mx.array:
        """Logits [n, V] of the n tokens after `token`, by a block that is not kept."""
        return self.logits(self.states(token, number, cache))

    def states(self, token: int, number: int, cache: list[Any]) -> Any:
        """Normed states [n, D] of the places of these tokens."""
        tokens = to_ids(
            [token, *[self.config.mask_token] * (self.config.block_size - 1)]
        )
        h = self.ends.embed(tokens)[None] * self.config.embedding_scale
        for i, (layer, kept) in enumerate(zip(self.layers, cache, strict=True)):
            h = self.run(layer, h, self.mask(i, kept.offset, tokens.shape[0]), kept)
            kept.trim(tokens.shape[0])
        first = 0 if self.config.from_anchor else 1
        return self.norm(h[0, first : first + number])

    def run(
        self, layer: nn.Module, h: mx.array, mask: mx.array | None, kept: Any
    ) -> Any:
        """States [1, B, D] of a block after a layer."""
        made = layer(h, mask, kept)
        # Gemma's layers give their keys, too
        return made[0] if isinstance(made, tuple) else made

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


class GroupedConvolution(nn.Module):  # type: ignore[misc]
    """DFlash 2's causal convolutions before and after a part of a layer.

    A kernel is `base_kernel` [2, taps, D] and, by group of channels, a projection of the part's
    input (`GroupedDynamicCausalConv` of the package dflash).
    """

    def __init__(self, width: int, taps: int, group: int) -> None:
        super().__init__()
        self.base_kernel = mx.zeros((2, taps, width))
        self.kernel_projection = nn.Linear(
            width, 2 * taps * (width // group), bias=False
        )

    def around(self, part: Callable[[mx.array], Any], x: mx.array) -> mx.array:
        """Run a part of a layer on states [1, B, D], with a convolution before and after it."""
        _, taps, width = self.base_kernel.shape
        dynamic = self.kernel_projection(x).reshape(*x.shape[:2], 2, taps, -1)
        kernels = (
            mx.repeat(dynamic, width // dynamic.shape[-1], axis=-1) + self.base_kernel
        )

        def convolved(x: mx.array, side: int) -> mx.array:
            size = x.shape[1]
            earlier = [
                mx.pad(x, [(0, 0), (back, 0), (0, 0)])[:, :size] for back in range(taps)
            ]
            return (kernels[:, :, side] * mx.stack(earlier, axis=2)).sum(axis=2)

        return convolved(part(convolved(x, 0)), 1)


class Selector(nn.Module):  # type: ignore[misc]
    """DFlash 2's choice among each place's `top` tokens, by the token before them."""

    def __init__(self, width: int, rank: int, vocab_size: int, top: int) -> None:
        super().__init__()
        self.top = top
        self.predecessor_codebook = mx.zeros((vocab_size, rank))
        self.successor_codebook = mx.zeros((vocab_size, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)

    def scores(self, logits: mx.array, states: mx.array, before: mx.array) -> mx.array:
        """Logits [n, V]: the top ones with the score of the pair added, -inf of others."""
        ids = mx.argpartition(-logits, self.top - 1, axis=-1)[:, : self.top]
        asked = rows_of(self.predecessor_codebook, before) * self.hidden_projection(
            states
        )
        pairs = rows_of(self.successor_codebook, ids) @ asked[..., None]
        scores = mx.take_along_axis(logits, ids, axis=-1) + pairs[..., 0]
        return mx.put_along_axis(
            mx.full(logits.shape, -mx.inf, scores.dtype), ids, scores, axis=-1
        )


def rows_of(table: mx.array, ids: mx.array) -> mx.array:
    """Rows [..., r] of a table [V, r]; MLX does not check bounds, and targets pad vocabularies."""
    return table[mx.minimum(ids, table.shape[0] - 1)]


class DFlash2(DFlash):
    """A DFlash 2 head: convolutions within the block, and a choice among the top tokens.

    The authors' sampler knows the temperature alone; here drafts keep to the target's filters.
    """

    kind = "DFlash 2"
    session = CorrectedSession

    def __init__(self, config: DFlashConfig, ends: TargetEnds, *args: Any) -> None:
        super().__init__(config, ends, *args)
        said = config.options
        for layer in self.layers:
            for name in ("attention_conv", "mlp_conv"):
                sizes = said["conv_kernel_size"], said["conv_group_size"]
                layer[name] = GroupedConvolution(self.width, *sizes)
        rank, top = said["selector_rank"], min(said["selector_top_k"], ends.vocab_size)
        self.candidate_selector = Selector(self.width, rank, said["vocab_size"], top)

    def run(
        self, layer: nn.Module, h: mx.array, mask: mx.array | None, kept: Any
    ) -> Any:
        """States [1, B, D] of a block after a layer."""
        attend = lambda x: layer.self_attn(x, mask, kept)  # noqa: E731
        h = h + layer.attention_conv.around(attend, layer.input_layernorm(h))
        return h + layer.mlp_conv.around(layer.mlp, layer.post_attention_layernorm(h))

    def corrected(
        self, logits: mx.array, states: mx.array, before: mx.array
    ) -> mx.array:
        """Logits [n, V] after tokens [n], from those of the places alone and their states."""
        return self.candidate_selector.scores(logits, states, before)

    def notes(self) -> list[str]:
        """Layers, block, windows, candidates."""
        return [*super().notes(), f"chooses among {self.candidate_selector.top} tokens"]


class Markov(nn.Module):  # type: ignore[misc]
    """DSpark's bias by the token before, of low rank; gated: by the place's state as well."""

    def __init__(self, width: int, rank: int, vocab_size: int, *, gated: bool) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        if gated:
            self.gate_proj = nn.Linear(width + rank, rank)

    def bias(self, states: mx.array, before: mx.array) -> Any:
        """Bias [n, V] of n places with states [n, D] after tokens [n]."""
        made = self.markov_w1(mx.minimum(before, self.markov_w1.weight.shape[0] - 1))
        if "gate_proj" in self:
            made = made * mx.sigmoid(
                self.gate_proj(mx.concatenate([states, made], axis=-1))
            )
        return self.markov_w2(made)


class DSpark(DFlash):
    """A DSpark head, for Qwen3 or Gemma 4. Its estimate of confidence is not read."""

    kind = "DSpark"
    session = CorrectedSession

    def __init__(self, config: DFlashConfig, ends: TargetEnds, *args: Any) -> None:
        super().__init__(config, ends, *args)
        said = config.options
        self.rank, kind = said["markov_rank"], said.get("markov_head_type", "vanilla")
        if self.rank:
            if kind not in ("vanilla", "gated"):
                raise ValueError(
                    f"markov_head_type {kind!r}, expected vanilla or gated"
                )
            vocab_size = said.get("vocab_size") or config.layer["vocab_size"]
            gated = kind == "gated"
            self.markov_head = Markov(self.width, self.rank, vocab_size, gated=gated)

    def corrected(
        self, logits: mx.array, states: mx.array, before: mx.array
    ) -> mx.array:
        """Logits [n, V] after tokens [n], from those of the places alone and their states."""
        if not self.rank:
            return logits
        return logits + match_vocab(
            self.markov_head.bias(states, before), logits.shape[-1]
        )

    def notes(self) -> list[str]:
        """Layers, block, rank."""
        return [*super().notes(), f"pairs of rank {self.rank}"]


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
        """An empty list, for the last state."""
        return []

    def read(self, rows: mx.array, cache: list[Any]) -> None:
        """Keep the last of the target's states [n, D]."""
        cache[:] = [rows[-1:]]

    def guesses(self, token: int, number: int, cache: list[Any]) -> mx.array:
        """Logits [n, V] of the first n heads."""
        states = [self.state(cache[0], i) for i in range(number)]
        if "lm_heads" not in self:
            return self.ends.logits(mx.concatenate(states))
        return mx.concatenate(
            [self.lm_heads[i](state) for i, state in enumerate(states)]
        )

    def state(self, state: mx.array, index: int) -> mx.array:
        """A head's state [..., D] below its matrix, from the target's [..., D]."""
        for block in self.blocks[index]:
            state = state + nn.silu(block(state))
        return state

    def notes(self) -> list[str]:
        """Number of heads."""
        return [f"{len(self.blocks)} heads", *super().notes()]
