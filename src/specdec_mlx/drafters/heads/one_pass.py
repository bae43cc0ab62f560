"""Heads that draft in one pass: DFlash, DFlash 2, DSpark and Medusa.

DFlash (z-lab, arXiv 2602.06036) is a small diffusion model that fills a block of masks after the
text's last token, attending to the block in both directions and to fused outputs of several layers
of the target, projected to keys and values only. DFlash 2 (package dflash 0.1.0) and DSpark
(deepseek-ai/DeepSpec) then correct each place of the block by the token drafted before it. Medusa
(arXiv 2401.10774): head i guesses the token i + 2 positions after a state by x + silu(W x + b) and
a matrix over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from specdec_mlx.caches import states_of
from specdec_mlx.contracts import DraftContext, FeatureRows
from specdec_mlx.drafters.draft_sources import Parents, places_after
from specdec_mlx.drafters.drawing import match_vocab
from specdec_mlx.drafters.heads.drafter import Config, Head, spread, within
from specdec_mlx.drafters.heads.eagle import LayersHead, is_gemma4
from specdec_mlx.drafters.heads.mtp import SLIDING, text_part
from specdec_mlx.drafters.heads.session import HeadReader, Unread
from specdec_mlx.models.anatomy import Anatomy, top_tokens
from specdec_mlx.token_ids import to_ids


class BlockSource(HeadReader):
    """A source whose head makes the states and the logits of a whole draft in one pass.

    Its head drafts up to `most_drafted` tokens, from what it has read. Where it `corrects` their
    logits by the token before, they are drawn one after the other.
    """

    states: mx.array

    def __init__(self, head: Any, prompt: Sequence[int], context: DraftContext) -> None:
        super().__init__(head, prompt, context, [Unread()])
        self.cache = head.make_cache()
        self.at_once = not head.corrects

    def begin_draft(self, limit: int) -> int:
        """Read all states and run the head; 0 before it was shown any."""
        self.read()
        self.places = [0]
        length = min(limit, self.head.most_drafted) if self.waiting.start else 0
        if length:
            self.states = self.head.states(self.tokens[-1], length, self.cache)
            self.logits = self.head.logits(self.states)
        return length

    def next_logits(self, tokens: mx.array | None, parents: Parents = None) -> Any:
        """Logits of the places after these tokens, maybe corrected."""
        before = to_ids(self.tokens[-1:]) if tokens is None else tokens
        rows = mx.array(places_after(self.places, tokens, parents))
        logits = self.logits[rows]
        if self.at_once:
            return logits
        return self.head.corrected(logits, self.states[rows], before)

    def read(self) -> list[Any]:
        """Add all states that wait to the head's caches."""
        if self.waiting.num_rows:
            self.head.read(self.waiting.take(self.waiting.num_rows), self.cache)
        return states_of(self.cache)


def block_options(config: Config) -> Config:
    """The entries of a config of z-lab or speculators, nested ones too."""
    return {**config, **(config.get("dflash_config") or {})}


def block_layers(said: Config, depth: int, num_layers: int) -> Sequence[int]:
    """Layers of the target that are read, from 0; depth, num_layers: of the head, of the target."""
    # of speculators: Hugging Face's states, the first the embedding
    if (ids := said.get("aux_hidden_state_layer_ids")) is not None:
        return [i - 1 for i in ids]
    if layers := said.get("target_layer_ids"):
        return list(layers)
    # evenly spread, from the second to the third last
    most = said.get("num_target_layers", num_layers)
    if depth == 1:
        return [most // 2]
    return [round(1 + i * (most - 4) / (depth - 1)) for i in range(depth)]


class GroupedConvolution(nn.Module):  # type: ignore[misc]
    """DFlash 2's causal convolutions before and after a part of a layer.

    A kernel is `base_kernel` [2, taps, D] and, by group of channels, a projection of the part's
    input (`GroupedDynamicCausalConv` of the package dflash).
    """

    def __init__(self, width: int, config: Config) -> None:
        super().__init__()
        taps, group = config["conv_kernel_size"], config["conv_group_size"]
        self.base_kernel = mx.zeros((2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // group), bias=False)

    def around(self, part: Callable[[mx.array], Any], x: mx.array) -> mx.array:
        """Run a part of a layer on states [1, B, D], with a convolution before and after it."""
        _, taps, width = self.base_kernel.shape
        dynamic = self.kernel_projection(x).reshape(*x.shape[:2], 2, taps, -1)
        kernels = mx.repeat(dynamic, width // dynamic.shape[-1], axis=-1) + self.base_kernel

        def convolved(x: mx.array, side: int) -> mx.array:
            size = x.shape[1]
            earlier = [mx.pad(x, [(0, 0), (back, 0), (0, 0)])[:, :size] for back in range(taps)]
            return (kernels[:, :, side] * mx.stack(earlier, axis=2)).sum(axis=2)

        return convolved(part(convolved(x, 0)), 1)


class CandidateSelector(nn.Module):  # type: ignore[misc]
    """DFlash 2's choice: a score is added to each of a place's `top` tokens, by the token before.

    The authors' sampler knows the temperature alone; here drafts keep to the target's filters.
    """

    def __init__(self, width: int, config: Config) -> None:
        super().__init__()
        table = config["vocab_size"], config["selector_rank"]
        self.top = config["selector_top_k"]
        self.note = f"chooses among {self.top} tokens"
        self.predecessor_codebook = mx.zeros(table)
        self.successor_codebook = mx.zeros(table)
        self.hidden_projection = nn.Linear(width, config["selector_rank"], bias=False)

    def __call__(self, logits: mx.array, states: mx.array, before: mx.array) -> mx.array:
        """Logits [n, V] after tokens [n]: of each place's top ones, with their scores."""
        ids = top_tokens(logits, min(self.top, logits.shape[-1]))
        first, second = self.predecessor_codebook, self.successor_codebook
        asked = first[within(before, first)] * self.hidden_projection(states)
        scores = (second[within(ids, second)] @ asked[..., None])[..., 0]
        scores = scores + mx.take_along_axis(logits, ids, axis=-1)
        return spread(scores, ids, logits.shape[-1])


class MarkovHead(nn.Module):  # type: ignore[misc]
    """DSpark's bias of low rank, by the token before; a gated one by the state as well.

    DSpark's estimate of confidence is not read.
    """

    def __init__(self, width: int, config: Config) -> None:
        """Raise ValueError for a kind that is not known."""
        super().__init__()
        rank, kind = config["markov_rank"], config.get("markov_head_type", "vanilla")
        if kind not in ("vanilla", "gated"):
            raise ValueError(f"markov_head_type {kind!r}, expected vanilla or gated")
        self.note = f"pairs of rank {rank}"
        self.markov_w1 = nn.Embedding(config["vocab_size"], rank)
        self.markov_w2 = nn.Linear(rank, config["vocab_size"], bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)

    def __call__(self, logits: mx.array, states: mx.array, before: mx.array) -> mx.array:
        """Logits [n, V] after tokens [n], with their bias."""
        made = self.markov_w1(within(before, self.markov_w1.weight))
        if "gate_proj" in self:
            made = made * mx.sigmoid(self.gate_proj(mx.concatenate([states, made], axis=-1)))
        return logits + match_vocab(self.markov_w2(made), logits.shape[-1])


class DFlash(LayersHead):
    """A DFlash head; with a draft vocabulary it has a matrix of its own over that.

    block_size: with the known first token. causal: by layer, a place does not see later ones of its
    block. logit_cap: logits are cap * tanh(logits / cap). from_anchor: the known token's own place
    drafts as well. layers: in place of those that the config names. DFlash 2 adds convolutions and
    a `candidate_selector`, DSpark a `markov_head`.
    """

    source = BlockSource

    def __init__(self, config: Config, ends: Anatomy, layers: Sequence[int] | None = None) -> None:
        said = block_options(config)
        layer = {"model_type": "qwen3", **text_part(config)}
        depth = layer["num_hidden_layers"]
        fused = layers or block_layers(said, depth, ends.num_layers)
        super().__init__(layer, fused, ends)
        kinds = layer.get("layer_types") or [""] * depth
        slides = [kind == SLIDING for kind in kinds]
        window = layer.get("sliding_window")
        self.windows = tuple(window if slide else None for slide in slides)
        causal = [] if said.get("sliding_window_non_causal") else slides
        if said.get("is_causal") is not None:
            causal = [said["is_causal"]] * depth
        self.causal = {i for i, is_causal in enumerate(causal) if is_causal}
        self.mask_token = said["mask_token_id"]
        self.block_size = said.get("block_size", 16)
        # of Gemma's embeddings
        scale = self.width**0.5 if is_gemma4(layer) else 1.0
        self.embedding_scale = said.get("input_embedding_scale", scale)
        self.logit_scale = said.get("output_multiplier", 1.0)
        self.logit_cap = said.get("final_logit_softcapping") or None
        self.from_anchor = said.get("sample_from_anchor", "markov_rank" in said)
        self.most_drafted = self.block_size - (not self.from_anchor)
        self.kind = "DFlash"
        sizes = {"vocab_size": layer.get("vocab_size"), **said}
        if "selector_rank" in said:
            self.kind = "DFlash 2"
            for own in self.layers:
                own.attention_conv = GroupedConvolution(self.width, said)
                own.mlp_conv = GroupedConvolution(self.width, said)
            self.candidate_selector = CandidateSelector(self.width, sizes)
        if "markov_rank" in said:
            self.kind = "DSpark"
            if said["markov_rank"]:
                self.markov_head = MarkovHead(self.width, sizes)

    @property
    def correctors(self) -> list[Any]:
        """The parts that correct the logits of a place by the token before it."""
        return [self[name] for name in ("candidate_selector", "markov_head") if name in self]

    @property
    def corrects(self) -> bool:
        """True if it has any."""
        return bool(self.correctors)

    def rows(self, features: FeatureRows) -> Any:
        """[n, D] the outputs of the target's layers, fused and normed."""
        return self.hidden_norm(super().rows(features))

    def read(self, rows: mx.array, cache: list[Any]) -> None:
        """Add n rows [n, D] to the context: their keys and values in every layer."""
        for layer, kept in zip(self.layers, cache, strict=True):
            # lazy: attention itself is never computed
            layer.self_attn(rows[None], None, kept)

    def states(self, token: int, number: int, cache: list[Any]) -> Any:
        """Normed states [n, D] of the n tokens after `token`, by a block that is not kept."""
        size = self.block_size
        tokens = to_ids([token, *[self.mask_token] * (size - 1)])
        h = self.ends.embed(tokens)[None] * self.embedding_scale
        for i, (layer, kept) in enumerate(zip(self.layers, cache, strict=True)):
            h = self.run(layer, h, self.mask(i, kept.offset, size), kept)
            kept.trim(size)
        first = size - self.most_drafted
        return self.norm(h[0, first : first + number])

    def run(self, layer: nn.Module, h: mx.array, mask: mx.array | None, kept: Any) -> Any:
        """States [1, B, D] of a block after a layer."""
        if "attention_conv" in layer:
            attend = lambda x: layer.self_attn(x, mask, kept)  # noqa: E731
            h = h + layer.attention_conv.around(attend, layer.input_layernorm(h))
            return h + layer.mlp_conv.around(layer.mlp, layer.post_attention_layernorm(h))
        made = layer(h, mask, kept)
        # Gemma's layers give their keys, too
        return made[0] if isinstance(made, tuple) else made

    def mask(self, layer: int, start: int, size: int) -> mx.array | None:
        """[B, start + B] places that each of a block of B sees in a layer; None for all."""
        window, is_causal = self.windows[layer], layer in self.causal
        if window is None and not is_causal:
            return None
        back = mx.arange(start, start + size)[:, None] - mx.arange(start + size)
        near = mx.abs(back) < (start + size if window is None else window)
        return near & (back >= 0) if is_causal else near

    def draft_logits(self, states: mx.array) -> Any:
        """Logits [..., Vd] of normed states [..., D], scaled and capped."""
        logits, cap = super().draft_logits(states) * self.logit_scale, self.logit_cap
        return logits if cap is None else cap * mx.tanh(logits / cap)

    def corrected(self, logits: mx.array, states: mx.array, before: mx.array) -> mx.array:
        """Logits [n, V] after tokens [n], from those of the places and their states [n, D]."""
        for part in self.correctors:
            logits = part(logits, states, before)
        return logits

    def notes(self) -> list[str]:
        """Layers, block, vocabulary, windows, corrections."""
        layers, *others = super().notes()
        more = [part.note for part in self.correctors]
        return [layers, f"blocks of {self.block_size}", *others, *more]


class Medusa(Head):
    """Heads of some blocks each; own_heads: rows of their own matrices, 0 for the target's head."""

    kind = "Medusa"
    source = BlockSource
    corrects = False

    def __init__(
        self, num_heads: int, num_layers: int, ends: Anatomy, *, own_heads: int = 0
    ) -> None:
        super().__init__()
        self.ends, width = ends, ends.width
        self.most_drafted = num_heads
        layers, heads = range(num_layers), range(num_heads)
        self.blocks = [[nn.Linear(width, width) for _ in layers] for _ in heads]
        if own_heads:
            self.lm_heads = [nn.Linear(width, own_heads, bias=False) for _ in heads]

    def make_cache(self) -> list[Any]:
        """A place for the last state."""
        return [ArraysCache(1)]

    def read(self, rows: mx.array, cache: list[Any]) -> None:
        """Keep the last of the target's states [n, D]."""
        cache[0][0] = rows[-1:]

    def states(self, token: int, number: int, cache: list[Any]) -> mx.array:
        """States [n, D] of the first n heads."""
        return mx.concatenate([self.state(cache[0][0], i) for i in range(number)])

    def draft_logits(self, states: mx.array) -> Any:
        """Logits [n, V] of the first n heads, from the state of each."""
        if "lm_heads" not in self:
            return super().draft_logits(states)
        each = zip(self.lm_heads, mx.split(states, states.shape[0]), strict=False)
        return mx.concatenate([matrix(state) for matrix, state in each])

    def state(self, state: mx.array, index: int) -> mx.array:
        """A head's state [..., D] below its matrix, from the target's [..., D]."""
        for block in self.blocks[index]:
            state = state + nn.silu(block(state))
        return state

    def notes(self) -> list[str]:
        """Number of heads."""
        return [f"{len(self.blocks)} heads", *super().notes()]
