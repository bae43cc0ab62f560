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
from specdec_mlx.drafters.drawing import match_vocab, spread
from specdec_mlx.drafters.heads.block_parts import NoiseLevels, change_attention
from specdec_mlx.drafters.heads.drafter import Config, DraftVocabulary, Head, within
from specdec_mlx.drafters.heads.eagle import LayersHead, is_gemma4, layer_arguments
from specdec_mlx.drafters.heads.mtp import SLIDING, text_part
from specdec_mlx.drafters.heads.session import HeadReader, UnreadStates
from specdec_mlx.models.anatomy import Anatomy, top_tokens
from specdec_mlx.token_ids import to_ids
from specdec_mlx.window_cache import WindowCache


class BlockSource(HeadReader):
    """A source whose head makes the states and the logits of a whole draft in one pass.

    The head drafts at most `most_drafted` tokens. If it corrects the logits of a position by the
    token before it, tokens are drawn one by one.

    Attributes:
        states: states [n, D] of the drafted positions.
    """

    states: mx.array

    def __init__(self, head: Any, prompt: Sequence[int], context: DraftContext) -> None:
        super().__init__(head, prompt, context, [UnreadStates()])
        self.cache = head.make_cache()
        self.at_once = not head.corrects

    def begin_draft(self, limit: int) -> int:
        self.read()
        self.places = [0]
        length = min(limit, self.head.most_drafted) if self.waiting.start else 0
        if length:
            self.states = self.head.states(self.tokens[-1], length, self.cache)
            self.logits = self.head.logits(self.states, self.output_rows)
            if self.at_once:
                self.log_confidences = self.head.log_confidences(self.states, None)
        return length

    def next_logits(self, tokens: mx.array | None, parents: Parents = None) -> Any:
        before = to_ids(self.tokens[-1:]) if tokens is None else tokens
        # Row 0 is the position after the text. A token's own row follows its parent's row.
        rows = mx.array(places_after(self.places, tokens, parents))
        logits = self.logits[rows]
        if self.at_once:
            return logits
        states = self.states[rows]
        self.log_confidences = self.head.log_confidences(states, before)
        return self.head.corrected(logits, states, before)

    def read(self) -> list[Any]:
        if self.waiting.num_rows:
            self.head.read(self.waiting.take(self.waiting.num_rows), self.cache)
        return states_of(self.cache)


def block_options(config: Config) -> Config:
    """The entries of a config of z-lab or speculators, with nested entries."""
    return {**config, **(config.get("dflash_config") or {})}


def block_layers(settings: Config, depth: int, num_layers: int) -> Sequence[int]:
    """Layers of the target, from 0, that the head reads.

    Args:
        settings: config of the head.
        depth: layers of the head.
        num_layers: layers of the target.
    """
    # speculators numbers Hugging Face's hidden states, and the first of these is the embedding.
    if (ids := settings.get("aux_hidden_state_layer_ids")) is not None:
        return [i - 1 for i in ids]
    if layers := settings.get("target_layer_ids"):
        return list(layers)
    # Evenly spaced, from the second layer to the third last.
    most = settings.get("num_target_layers", num_layers)
    if depth == 1:
        return [most // 2]
    return [round(1 + i * (most - 4) / (depth - 1)) for i in range(depth)]


def drafts_from_anchor(settings: Config) -> bool:
    """True if the position of the known token drafts as well."""
    is_dspark = settings.get("markov_rank") is not None
    proposals = (settings.get("speculators_config") or {}).get("proposal_methods") or [{}]
    number = proposals[0].get("speculative_tokens")
    # Early configs of speculators do not name the first position, but they count the drafts.
    if is_dspark and number:
        return bool(number >= settings["block_size"])
    return bool(settings.get("sample_from_anchor", is_dspark))


class GroupedConvolution(nn.Module):  # type: ignore[misc]
    """DFlash 2's causal convolutions before and after a part of a layer.

    A kernel is the sum of `base_kernel` [2, taps, D] and a projection of the part's input for each
    group of channels (`GroupedDynamicCausalConv` in the package dflash).
    """

    def __init__(self, width: int, config: Config) -> None:
        super().__init__()
        taps, group = config["conv_kernel_size"], config["conv_group_size"]
        self.base_kernel = mx.zeros((2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // group), bias=False)

    def around(self, part: Callable[[mx.array], Any], x: mx.array) -> mx.array:
        """Run a part of a layer on states [1, B, D], with a convolution before and after."""
        _, taps, width = self.base_kernel.shape
        # kernel(t) = base_kernel + projection(x(t)), y(t) = sum over taps k of kernel_k(t) x(t - k)
        dynamic = self.kernel_projection(x).reshape(*x.shape[:2], 2, taps, -1)
        kernels = mx.repeat(dynamic, width // dynamic.shape[-1], axis=-1) + self.base_kernel

        def convolved(x: mx.array, side: int) -> mx.array:
            size = x.shape[1]
            earlier = [mx.pad(x, [(0, 0), (back, 0), (0, 0)])[:, :size] for back in range(taps)]
            return (kernels[:, :, side] * mx.stack(earlier, axis=2)).sum(axis=2)

        return convolved(part(convolved(x, 0)), 1)


class CandidateSelector(nn.Module):  # type: ignore[misc]
    """DFlash 2's choice: the `top` tokens at a position get a score by the token before.

    The authors' sampler knows only the temperature. Here drafts also follow the target's filters.
    """

    def __init__(self, width: int, config: Config) -> None:
        super().__init__()
        table = config["vocab_size"], config["selector_rank"]
        self.top = config["selector_top_k"]
        self.note = f"chooses among {self.top} tokens"
        self.predecessor_codebook = mx.zeros(table)
        self.successor_codebook = mx.zeros(table)
        self.hidden_projection = nn.Linear(width, config["selector_rank"], bias=False)

    def __call__(
        self,
        logits: mx.array,
        states: mx.array,
        before: mx.array,
        vocabulary: DraftVocabulary | None = None,
    ) -> mx.array:
        """Logits [n, V] after tokens [n]. All except the top tokens get -inf."""
        ids = top_tokens(logits, min(self.top, logits.shape[-1]))
        first, second = self.predecessor_codebook, self.successor_codebook
        # score(token) = successor(token) . (predecessor(token before) * W state)
        query = first[within(before, first)] * self.hidden_projection(states)
        scores = (second[within(ids, second)] @ query[..., None])[..., 0]
        scores = scores + mx.take_along_axis(logits, ids, axis=-1)
        return spread(scores, ids, logits.shape[-1])


class MarkovHead(nn.Module):  # type: ignore[misc]
    """DSpark's bias of low rank by the token before, or by the state as well if it is gated.

    Raises ValueError for an unknown kind.
    """

    def __init__(self, width: int, config: Config) -> None:
        super().__init__()
        rank, kind = config["markov_rank"], config.get("markov_head_type", "vanilla")
        if kind not in ("vanilla", "gated"):
            raise ValueError(f"markov_head_type {kind!r}, expected vanilla or gated")
        self.note = f"pairs of rank {rank}"
        self.markov_w1 = nn.Embedding(config["vocab_size"], rank)
        # The token before may be any token, and the bias is for the draft vocabulary.
        rows = config.get("draft_vocab_size") or config["vocab_size"]
        self.markov_w2 = nn.Linear(rank, rows, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)

    def __call__(
        self,
        logits: mx.array,
        states: mx.array,
        before: mx.array,
        vocabulary: DraftVocabulary | None = None,
    ) -> mx.array:
        # bias = W2 W1(token before), and with a gate W2 (W1(token before) * sigmoid(W [state,
        # W1(...)]))
        code = self.code(before)
        if "gate_proj" in self:
            code = code * mx.sigmoid(self.gate_proj(mx.concatenate([states, code], axis=-1)))
        bias = self.markov_w2(code)
        if vocabulary is not None:
            return logits + vocabulary.widen(bias)
        return logits + match_vocab(bias, logits.shape[-1])

    def code(self, tokens: mx.array) -> Any:
        """Codes [n, rank] of tokens [n]."""
        return self.markov_w1(within(tokens, self.markov_w1.weight))


class ConfidenceHead(nn.Module):  # type: ignore[misc]
    """DSpark's estimate of the chance that a token is accepted, before the token is drawn."""

    def __init__(self, num_inputs: int, *, has_bias: bool) -> None:
        super().__init__()
        self.proj = nn.Linear(num_inputs, 1, bias=has_bias)

    def __call__(self, inputs: mx.array) -> Any:
        """Log of the chances [n], from inputs [n, num_inputs]."""
        # chance = sigmoid(w [state, W1(token before)] + b)
        return nn.log_sigmoid(self.proj(inputs)[..., 0].astype(mx.float32))


class DFlash(LayersHead):
    """A DFlash head, a DFlash 2 head with convolutions, or a DSpark head with a Markov chain.

    Attributes:
        block_size: positions of a block, with the known first token.
        causal: layers in which a position does not see later positions of its block.
        from_anchor: the position of the known token drafts as well.
        most_drafted: most tokens of a draft.
        embedding_scale: factor of the embeddings.
        logit_scale: factor of the logits.
        logit_cap: cap of the logits, or None.
    """

    source = BlockSource

    def __init__(
        self, config: Config, anatomy: Anatomy, layers: Sequence[int] | None = None
    ) -> None:
        settings = block_options(config)
        layer = {"model_type": "qwen3", **text_part(config)}
        depth = layer["num_hidden_layers"]
        fused = layers or block_layers(settings, depth, anatomy.num_layers)
        super().__init__(layer, fused, anatomy)
        for block_layer in self.layers:
            change_attention(block_layer, settings, layer_arguments(layer))
        kinds = layer.get("layer_types") or [""] * depth
        slides = [kind == SLIDING for kind in kinds]
        window = layer.get("sliding_window")
        self.windows = tuple(window if slide else None for slide in slides)
        causal = [] if settings.get("sliding_window_non_causal") else slides
        flags = [settings.get(key) for key in ("is_causal", "causal", "dflash_query_causal")]
        if any(flag is not None for flag in flags):
            causal = [any(flags)] * depth
        self.causal = {i for i, is_causal in enumerate(causal) if is_causal}
        self.mask_token = settings["mask_token_id"]
        self.block_size = settings.get("block_size", 16)
        # Gemma scales its embeddings by sqrt(D), and `anatomy.embed` does not.
        scale = self.width**0.5 if is_gemma4(layer) else 1.0
        self.embedding_scale = settings.get("input_embedding_scale", scale)
        self.logit_scale = settings.get("output_multiplier", 1.0)
        self.logit_cap = settings.get("final_logit_softcapping") or None
        self.from_anchor = drafts_from_anchor(settings)
        self.most_drafted = self.block_size - (not self.from_anchor)
        self.kind = "DFlash"
        sizes = {"vocab_size": layer.get("vocab_size"), **settings}
        if "selector_rank" in settings:
            self.kind = "DFlash 2"
            for block_layer in self.layers:
                block_layer.attention_conv = GroupedConvolution(self.width, settings)
                block_layer.mlp_conv = GroupedConvolution(self.width, settings)
            self.candidate_selector = CandidateSelector(self.width, sizes)
        if settings.get("markov_rank") is not None:
            self.kind = "DSpark"
            if settings["markov_rank"]:
                self.markov_head = MarkovHead(self.width, sizes)
        if settings.get("log_snr_conditioning"):
            self.log_snr_embed = NoiseLevels(self.width)

    @property
    def tokens_a_pass(self) -> int:
        return int(self.most_drafted)

    @property
    def correctors(self) -> list[Any]:
        return [self[name] for name in ("candidate_selector", "markov_head") if name in self]

    @property
    def corrects(self) -> bool:
        return bool(self.correctors)

    def rows(self, features: FeatureRows) -> Any:
        return self.hidden_norm(super().rows(features))

    def read(self, rows: mx.array, cache: list[Any]) -> None:
        """Add the keys and values of n rows [n, D] to every layer."""
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            # The call fills the cache. Its output is not used, so MLX never computes the attention.
            layer.self_attn(rows[None], None, layer_cache)

    def states(self, token: int, number: int, cache: list[Any]) -> Any:
        """Normed states [n, D] of the n tokens after `token`."""
        size = self.block_size
        tokens = to_ids([token, *[self.mask_token] * (size - 1)])
        h = self.embed(tokens)[None] * self.embedding_scale
        if "log_snr_embed" in self:
            h = h + self.log_snr_embed(size)
        for i, (layer, layer_cache) in enumerate(zip(self.layers, cache, strict=True)):
            h = self.run(layer, h, self.mask(i, layer_cache, size), layer_cache)
            # The block holds masks, so it is dropped. The context has only rows of the target.
            layer_cache.trim(size)
        # The known token's own state predicts a token only if the head drafts from its anchor.
        first = size - self.most_drafted
        return self.norm(h[0, first : first + number])

    def run(self, layer: nn.Module, h: mx.array, mask: mx.array | None, layer_cache: Any) -> Any:
        if "attention_conv" in layer:
            attend = lambda x: layer.self_attn(x, mask, layer_cache)  # noqa: E731
            h = h + layer.attention_conv.around(attend, layer.input_layernorm(h))
            return h + layer.mlp_conv.around(layer.mlp, layer.post_attention_layernorm(h))
        output = layer(h, mask, layer_cache)
        # Gemma's layers also return their keys and values.
        return output[0] if isinstance(output, tuple) else output

    def mask(self, layer: int, cache: Any, size: int) -> mx.array | None:
        """Rows [B, n + B] of the cache and the block that each position sees, or None for all."""
        is_causal, has_window = layer in self.causal, isinstance(cache, WindowCache)
        if not (is_causal or has_window):
            return None
        end = cache.offset + size
        positions = cache.positions(size) if has_window else mx.arange(end)
        back = mx.arange(cache.offset, end)[:, None] - positions
        near, first = (cache.window, cache.sinks) if has_window else (end, 0)
        seen: mx.array = (mx.abs(back) < near) | (positions < first)
        return seen & (back >= 0) if is_causal else seen

    def draft_logits(self, states: mx.array) -> Any:
        logits, cap = super().draft_logits(states) * self.logit_scale, self.logit_cap
        # cap * tanh(logits / cap)
        return logits if cap is None else cap * mx.tanh(logits / cap)

    def corrected(self, logits: mx.array, states: mx.array, before: mx.array) -> mx.array:
        """Logits [n, V] after tokens [n], from the logits and states [n, D] of their positions."""
        for part in self.correctors:
            logits = part(logits, states, before, self.vocabulary)
        return logits

    def add_confidence(self, *, with_code: bool, has_bias: bool) -> None:
        """Give the head an estimate of confidence.

        with_code: the estimate also reads the Markov head's code of the token before.
        """
        rank = self.markov_head.markov_w1.weight.shape[-1] if with_code else 0
        self.with_code = with_code
        self.confidence_head = ConfidenceHead(self.width + rank, has_bias=has_bias)

    def log_confidences(self, states: mx.array, before: Any) -> Any:
        if "confidence_head" not in self:
            return None
        inputs = states
        if self.with_code:
            inputs = mx.concatenate([states, self.markov_head.code(before)], axis=-1)
        return self.confidence_head(inputs)

    def notes(self) -> list[str]:
        layers, *others = super().notes()
        more = [part.note for part in self.correctors]
        if "confidence_head" in self:
            more.append("estimates its confidence")
        return [layers, f"blocks of {self.block_size}", *others, *more]


class Medusa(Head):
    """Medusa heads. `own_heads` is the number of rows of their own matrices, 0 for none."""

    kind = "Medusa"
    source = BlockSource
    corrects = False

    def __init__(
        self, num_heads: int, num_layers: int, anatomy: Anatomy, *, own_heads: int = 0
    ) -> None:
        super().__init__()
        self.anatomy, width = anatomy, anatomy.width
        self.most_drafted = num_heads
        layers, heads = range(num_layers), range(num_heads)
        self.blocks = [[nn.Linear(width, width) for _ in layers] for _ in heads]
        if own_heads:
            self.lm_heads = [nn.Linear(width, own_heads, bias=False) for _ in heads]

    def full_caches(self) -> list[Any]:
        return [ArraysCache(1)]

    def read(self, rows: mx.array, cache: list[Any]) -> None:
        # The heads draft from the last state only, so the cache is one slot.
        cache[0][0] = rows[-1:]

    def states(self, token: int, number: int, cache: list[Any]) -> mx.array:
        return mx.concatenate([self.state(cache[0][0], i) for i in range(number)])

    def draft_logits(self, states: mx.array) -> Any:
        if "lm_heads" not in self:
            return super().draft_logits(states)
        each = zip(self.lm_heads, mx.split(states, states.shape[0]), strict=False)
        return mx.concatenate([matrix(state) for matrix, state in each])

    @property
    def output_modules(self) -> list[nn.Module]:
        return list(self.get("lm_heads", ())) or super().output_modules

    @property
    def tokens_a_pass(self) -> int:
        return self.most_drafted

    def state(self, state: mx.array, index: int) -> mx.array:
        """State [..., D] of one head, from the target's state [..., D]."""
        for block in self.blocks[index]:
            # x + silu(W x + b) for each block
            state = state + nn.silu(block(state))
        return state

    def notes(self) -> list[str]:
        return [f"{len(self.blocks)} heads", *super().notes()]
