"""Lighter draft models: fewer bits, fewer layers, fewer tokens to choose from.

Each of these makes another model out of one, on the same arrays where they stay the same; the
model that was given is left as it was. What is new is lazy: of a model that is quantized and then
cut, only the layers that are left are ever computed. So quantize first, cut then, and choose the
tokens last.

None of this changes what is emitted: a draft model may be as wrong as it likes, and the
distribution that is handed over with its drafts is the one that they were drawn from.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.drafters.fingerprint import fingerprint
from specdec_mlx.errors import DraftModelError
from specdec_mlx.target.model_pass import vocab_size_of
from specdec_mlx.target.strategies import leaves

BITS = (2, 3, 4, 5, 6, 8)
"""Bits that MLX packs weights into."""

GROUP_SIZES = (64, 32)
"""Weights that share a scale; the first that divides a layer's width is taken."""

HEADS = (nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding)
"""Modules that make logits, a row of their weights for each token."""

OUTSIDE = -200.0
"""Logit of a token outside a sub-vocabulary: at temperature 1 its probability is 0 in float32.

It is finite, so that a logits processor which forbids the whole sub-vocabulary leaves something to
draw from; and small enough for what is left to be normalised without much rounding.
"""

PROBE_TOKENS = 4
"""Tokens of the passes that a new model is checked with."""

TOLERANCE = 0.2
"""Most that two ways to the same logits may differ, in standard deviations of the logits.

Rounding in 16 bits comes to a few hundredths; a wrong mask or a wrong head to several."""


# Fewer bits -------------------------------------------------------------------------------------


def quantized(model: nn.Module, bits: int) -> nn.Module:
    """The model with weights of `bits` bits.

    Layers that the model itself wants otherwise, as mlx-lm's `quant_predicate` says, are as it
    says; a layer whose width no group size divides keeps its weights.

    Raises:
        DraftModelError: a number of bits that there is not, a model that is quantized already, or
            one whose widths do not fit.
    """
    if bits not in BITS:
        known = ", ".join(map(str, BITS))
        raise DraftModelError(f"A draft model of {bits} bits: expected one of {known}.")
    for path, module in model.named_modules():
        if "scales" in module and hasattr(module, "bits"):
            raise DraftModelError(
                f"The draft model is quantized already ({path}: {module.bits} bits). Leave the "
                "bits out, or give the model that it was made from."
            )
    new = _copy(model)
    choice = _Quantization(bits, getattr(new, "quant_predicate", None))
    nn.quantize(new, class_predicate=choice)
    if choice.num_left >= choice.num_packed:
        raise DraftModelError(
            f"The draft model cannot be quantized: {choice.misfit or 'it has no layer for it'}. "
            f"Widths must be multiples of {GROUP_SIZES[-1]}. Leave the bits out."
        )
    return new


class _Quantization:
    """How to quantize each layer of a model: what `nn.quantize` asks for.

    num_packed, num_left: weights of layers that are quantized, and of those that do not fit.
    misfit: the latter's latest, in words.
    """

    def __init__(self, bits: int, own: Callable[[str, nn.Module], Any] | None) -> None:
        """Take what the model itself says of its layers, if it does."""
        self.bits = bits
        self.own = own or (lambda path, module: True)
        self.num_packed = self.num_left = 0
        self.misfit = ""

    def __call__(self, path: str, module: nn.Module) -> dict[str, Any] | bool:
        """Arguments of `to_quantized`, or False to leave the layer alone."""
        if not hasattr(module, "to_quantized"):
            return False
        own = self.own(path, module)
        if not own:
            return False
        width = module.weight.shape[-1]
        how = {"group_size": _group_size(width), "bits": self.bits}
        how |= own if isinstance(own, dict) else {}
        if how["group_size"] is None or width % how["group_size"]:
            self.num_left += module.weight.size
            self.misfit = f"{path} is {width} wide"
            return False
        self.num_packed += module.weight.size
        return how


def _group_size(width: int) -> int | None:
    """The largest group size that fits."""
    return next((size for size in GROUP_SIZES if width % size == 0), None)


# Fewer layers -----------------------------------------------------------------------------------


def first_layers(model: nn.Module, num_layers: int) -> nn.Module:
    """The model's first layers and its head: an early exit.

    The layers are those of `model.layers`; the list that they stand in is looked for among the
    attributes of its modules. Two passes see to it that the model runs without the others, and
    that its caches hold what it needs.

    Raises:
        DraftModelError: a number of layers that there is not, or a model that cannot be cut.
    """
    new = _copy(model)
    owner, name = _layer_list(new)
    total = len(owner[name])
    if not 1 <= num_layers <= total:
        raise DraftModelError(
            f"A draft model of {num_layers} layers: expected a number from 1 to {total}."
        )
    owner[name] = owner[name][:num_layers]
    for num_places in (0, len(make_prompt_cache(model))):
        try:
            short = FirstLayers(new, num_places)
            _check_caches(short)
            return short
        except Exception as error:  # whatever a model does without its last layers
            reason = error
    raise DraftModelError(
        f"A {_kind(model)} does not run on its first {num_layers} layers alone: {reason} Give "
        "another number, or leave it out."
    ) from reason


class FirstLayers(nn.Module):  # type: ignore[misc]
    """A model whose list of layers was cut, with the caches of those that are left.

    Some models make a cache for every layer that their configuration counts, and some look at the
    cache of a layer that is gone, for a mask that nobody needs.
    """

    def __init__(self, model: nn.Module, num_places: int) -> None:
        """Take the cut model; its list of caches is filled up with None to so many places."""
        super().__init__()
        self.model = model
        self.num_places = num_places
        caches = make_prompt_cache(model)
        model(_probe_tokens(), cache=self.filled_up(caches))
        fed = [i for i, cache in enumerate(caches) if not _is_empty(cache)]
        self.num_caches = 1 + fed[-1] if fed else len(caches)

    @property
    def layers(self) -> Any:
        """Those that are left."""
        return self.model.layers

    def make_cache(self) -> list[Any]:
        """Caches of the layers that are left."""
        caches: list[Any] = make_prompt_cache(self.model)
        return caches[: self.num_caches]

    def __call__(self, inputs: mx.array, cache: Any = None, **others: Any) -> mx.array:
        """Logits [B, S, V]."""
        caches = self.make_cache() if cache is None else cache
        logits: mx.array = self.model(inputs, cache=self.filled_up(caches), **others)
        return logits

    def filled_up(self, caches: list[Any]) -> list[Any]:
        """The list that the model is shown."""
        return [*caches, *[None] * (self.num_places - len(caches))]


def _layer_list(model: nn.Module) -> tuple[nn.Module, str]:
    """The module that has the list of layers, and the list's name there."""
    layers = [id(layer) for layer in getattr(model, "layers", ())]
    for module in model.modules():
        for name, value in module.items():
            if isinstance(value, list) and layers and [id(item) for item in value] == layers:
                return module, name
    raise DraftModelError(
        f"A {_kind(model)} has no single list of layers that could be cut. Leave the number of "
        "layers out."
    )


def _is_empty(cache: Any) -> bool:
    """True if nothing was fed to a cache."""
    return all(leaf.empty() for leaf in leaves([cache]))


def _check_caches(model: nn.Module) -> None:
    """Raise ValueError unless a text in two parts gives the logits of the text as a whole."""
    tokens, half = _probe_tokens(), PROBE_TOKENS // 2
    caches = make_prompt_cache(model)
    parts = [model(part, cache=caches) for part in (tokens[:, :half], tokens[:, half:])]
    if not _alike(mx.concatenate(parts, axis=1), model(tokens, cache=make_prompt_cache(model))):
        raise ValueError("a text in two parts gives other logits than the whole.")


# Fewer tokens -----------------------------------------------------------------------------------


class SubVocabulary(nn.Module):  # type: ignore[misc]
    """A model that chooses among some tokens only: a head of Vd rows instead of V.

    The head, in small models a third of all weights, is read row by row for every token; most of
    its rows are words that hardly ever come up (FR-Spec, Zhao et al. 2025; EAGLE-3, Li et al.
    2025). All tokens are still read. Logits are as wide as before, [B, S, V], so that whoever draws
    from them knows of nothing: tokens outside have no probability, and q is a distribution over
    the others.
    """

    def __init__(self, model: nn.Module, token_ids: Iterable[int]) -> None:
        """Narrow the head of `model`, which may stand for itself or be tied to the embeddings.

        Raises DraftModelError for ids that the model does not have, for none at all, and for a
        model whose head is not found.
        """
        super().__init__()
        vocab_size = vocab_size_of(model)
        tokens = sorted({int(token) for token in token_ids})
        if not tokens or tokens[0] < 0 or tokens[-1] >= vocab_size:
            got = f"ids {tokens[0]} to {tokens[-1]}" if tokens else "no token"
            raise DraftModelError(
                f"A draft vocabulary of {got}: expected ids from 0 to {vocab_size - 1}."
            )
        places = np.full(vocab_size, len(tokens), np.int32)
        places[tokens] = np.arange(len(tokens))
        self.model = _with_narrow_head(model, mx.array(tokens), vocab_size)
        self.places = mx.array(places)
        """[V] which of the Vd logits is a token's; Vd for those outside."""
        content = hashlib.sha256(f"{fingerprint(model)} {tokens}".encode())
        fingerprint.put(self, content.hexdigest()[:16])

    @property
    def layers(self) -> Any:
        """Those of the model."""
        return self.model.layers

    def make_cache(self) -> list[Any]:
        """Caches of the model."""
        caches: list[Any] = make_prompt_cache(self.model)
        return caches

    def __call__(self, inputs: mx.array, cache: Any = None, **others: Any) -> mx.array:
        """Logits [B, S, V]."""
        logits = self.model(inputs, cache=cache, **others)
        outside = mx.full((*logits.shape[:-1], 1), OUTSIDE, logits.dtype)
        return mx.take(mx.concatenate([logits, outside], axis=-1), self.places, axis=-1)


class TiedHead(nn.Module):  # type: ignore[misc]
    """Embeddings that are also the head: all of them to read, some rows to choose from."""

    def __init__(self, embedding: nn.Module, tokens: mx.array) -> None:
        """Take the embeddings [V, D], and the rows that are left [Vd]."""
        super().__init__()
        self.embedding = embedding
        self.head = some_rows(embedding, tokens)

    @property
    def weight(self) -> mx.array:
        """Of the embeddings."""
        weight: mx.array = self.embedding.weight
        return weight

    def __call__(self, ids: mx.array) -> mx.array:
        """Embeddings [..., D] of token ids [...]."""
        embedded: mx.array = self.embedding(ids)
        return embedded

    def as_linear(self, states: mx.array) -> mx.array:
        """Logits [..., Vd] of states [..., D]."""
        logits: mx.array = self.head.as_linear(states)
        return logits


def most_frequent(token_ids: Iterable[int], num: int | None = None) -> list[int]:
    """The `num` most frequent tokens of a text, the most frequent first; None for all."""
    counts = Counter(token_ids)
    return sorted(counts, key=lambda token: (-counts[token], token))[:num]


def _with_narrow_head(model: nn.Module, tokens: mx.array, vocab_size: int) -> nn.Module:
    """The model with logits of these tokens [Vd] only; what gives the logits is found by trying.

    All rows are tried first, each in the place of the one before it: logits that a model reads or
    writes at fixed ids do not move along. With fewer rows it would write past the end of its
    logits, into memory of others, since MLX checks no bounds.
    """
    logits = _probe_logits(model)
    moved = (mx.arange(vocab_size) + 1) % vocab_size
    for path, narrowed in _possible_heads(model, vocab_size):
        try:
            for rows in (moved, tokens):
                new = _copy(model)
                head = dict(new.named_modules())[path]
                _replace(new, head, narrowed(head, rows))
                if not _alike(_probe_logits(new), logits[..., rows]):
                    break
            else:
                return new
        except Exception:  # not the head, and the model cannot do without what was taken
            continue
    raise DraftModelError(
        f"The head of a {_kind(model)} is not found: no layer or embedding of {vocab_size} rows "
        "gives its logits, all of them by the same rule. Leave the draft vocabulary out."
    )


def _possible_heads(
    model: nn.Module, vocab_size: int
) -> Iterator[tuple[str, Callable[[nn.Module, mx.array], nn.Module]]]:
    """What may be the head, each by its path and with how to take some rows; embeddings last.

    A model with a head of its own has embeddings of V rows as well.
    """
    for kinds, narrowed in (
        (nn.Linear | nn.QuantizedLinear, some_rows),
        (nn.Embedding | nn.QuantizedEmbedding, TiedHead),
    ):
        for path, module in model.named_modules():
            if isinstance(module, kinds) and module.weight.shape[0] == vocab_size:
                yield path, narrowed


def some_rows(module: nn.Module, tokens: mx.array) -> nn.Module:
    """A layer or an embedding with some of its rows, quantized as it was."""
    narrowed = copy.copy(module)
    for name in ("weight", "scales", "biases", "bias"):
        if name in narrowed:
            narrowed[name] = narrowed[name][tokens]
    return narrowed


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put one module in the place of another, wherever that stands."""
    for module in model.modules():
        for name, value in list(module.items()):
            if value is old:
                module[name] = new


# Copies and checks ------------------------------------------------------------------------------


def _copy(model: nn.Module) -> nn.Module:
    """The same model, module by module, on the same arrays and with the same ranks."""
    shared: list[Any] = [x for _, x in tree_flatten(model) if isinstance(x, mx.array)]
    attributes = (value for part in model.modules() for value in vars(part).values())
    shared += [value for value in attributes if isinstance(value, mx.distributed.Group)]
    return copy.deepcopy(model, {id(value): value for value in shared})


def _probe_tokens() -> mx.array:
    return mx.arange(PROBE_TOKENS)[None]


def _probe_logits(model: nn.Module) -> mx.array:
    logits: mx.array = model(_probe_tokens(), cache=make_prompt_cache(model))
    return logits


def _alike(logits: mx.array, others: mx.array) -> bool:
    """True if logits are the same but for rounding."""
    if logits.shape != others.shape:
        return False
    one, other = logits.astype(mx.float32), others.astype(mx.float32)
    return bool((mx.abs(one - other).max() <= TOLERANCE * mx.maximum(mx.std(other), 1e-6)).item())


def _kind(model: nn.Module) -> str:
    """What a model is called in an error."""
    return f"model of {type(model).__module__}"
