"""A head of each kind, from its files: configuration to module, the checkpoint's names to ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from specdec_mlx.drafters.heads.dflash import DFlash, DFlashConfig
from specdec_mlx.drafters.heads.drafter import FinalStateHead, Head
from specdec_mlx.drafters.heads.eagle import Eagle1, Eagle3, Eagle3Config
from specdec_mlx.drafters.heads.files import HeadFiles
from specdec_mlx.drafters.heads.gemma4_assistant import AssistantConfig, Gemma4Assistant
from specdec_mlx.drafters.heads.medusa import Medusa
from specdec_mlx.drafters.heads.mtp import MTPHead, mtp_weights
from specdec_mlx.drafters.heads.mtp_families import FAMILIES, MTPFamily, family_of
from specdec_mlx.drafters.heads.mtp_stack import mtp_head
from specdec_mlx.drafters.heads.target_ends import TargetEnds
from specdec_mlx.drafters.heads.vocabulary import DraftVocabulary
from specdec_mlx.errors import HeadError

IGNORED = ("rotary_emb.", "verifier_", "t2d", "d2t")
"""Tensors that a head may come with and does not need; by the beginning of a part of the name."""

MEDUSA_NAME = re.compile(
    r"(medusa_head\.)?(?P<head>\d+)\.(?P<layer>\d+)\.(?P<linear>linear\.)?(?P<part>\w+)"
)

SHARED_ENDS = ("embed_tokens.", "shared_head.head.", "lm_head.")
"""Copies of the target's ends that a multi-token prediction layer may come with."""


@dataclass(frozen=True)
class Variant:
    """What a head may be told about itself where its files are wrong or say nothing.

    layers: whose outputs of the target it reads. pre_norm: whether it reads the state before the
        target's final norm; None: as its family does. norms_less_one: whether its norms are stored
        as w - 1; None: as its family does, unless the file was converted for MLX.
    """

    layers: Sequence[int] | None = None
    pre_norm: bool | None = None
    norms_less_one: bool | None = None


Built = tuple[Head, dict[str, mx.array]]
"""A head with random weights, and the weights that it is to have, by its own names."""


def build_head(kind: str, files: HeadFiles, ends: TargetEnds, variant: Variant) -> Built:
    """A head of a kind, and its weights.

    Args:
        kind: a key of BUILDERS.
        files: where it is.
        ends: of the target.
        variant: what it is told about itself.

    Raises:
        HeadError: it was trained for another vocabulary or width, or tensors are missing.
    """
    check_sizes(files, ends)
    head, weights = BUILDERS[kind](files, ends, variant)
    for layer in head.features.layers:
        expect(files, "a layer that it reads", layer, 0, ends.num_layers - 1)
    if variant.pre_norm is not None and isinstance(head, FinalStateHead):
        head.read_pre_norm(variant.pre_norm)
    return head, weights


VOCABULARY_MARGIN = 512
"""Rows by which vocabularies may differ, since models pad them to round numbers."""


MOST_LAYERS, MOST_TOKENS = 1000, 1024
"""Most layers or heads, and most tokens of a block, that a config may ask for."""


def check_sizes(files: HeadFiles, ends: TargetEnds) -> None:
    """Raise HeadError for a head whose config names another vocabulary, or endless layers."""
    config = files.config
    part = config.get("transformer_layer_config") or config.get("text_config") or config
    size = part.get("vocab_size")
    for said in (config, part):
        counts = {key: n for key, n in said.items() if key.endswith("_heads") and n is not None}
        counts["num_hidden_layers"] = said.get("num_hidden_layers") or 1
        for key, count in counts.items():  # MLX's attention divides by heads
            expect(files, key, count, 1, MOST_LAYERS)
    if size is not None and abs(size - ends.vocab_size) > VOCABULARY_MARGIN:
        raise HeadError(
            f"{files.name} was trained for a vocabulary of {size} tokens, and this target has "
            f"{ends.vocab_size}. Use a head that was trained for this target."
        )


def expect(files: HeadFiles, name: str, value: Any, low: int, high: int) -> None:
    """Raise HeadError for a number of the files that is not within bounds."""
    if not (isinstance(value, int) and low <= value <= high):
        raise HeadError(
            f"{files.name}: {name} is {value!r}, expected {low} to {high}. Fetch it again, or use "
            "a head that was trained for this target."
        )


def _check_width(files: HeadFiles, ends: TargetEnds, width: float) -> None:
    """Raise HeadError for a head that reads states of another width."""
    if width != ends.width:
        raise HeadError(
            f"{files.name} was trained for a target whose states have {width:g} numbers, and those "
            f"of this one have {ends.width}. Use a head that was trained for this target."
        )


def _tensors(files: HeadFiles) -> dict[str, mx.array]:
    """All tensors of a repository that has nothing else, by one style of names."""
    tensors, _ = files.read(files.names)
    return {
        name.removeprefix("model.").replace("midlayer.", "layers.0."): value
        for name, value in tensors.items()
    }


def _kept(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Without what no head needs."""
    return {
        name: value
        for name, value in tensors.items()
        if not any(name.startswith(i) or f".{i}" in name for i in IGNORED)
    }


def _vocabulary(tensors: Mapping[str, mx.array], ends: TargetEnds) -> DraftVocabulary | None:
    """What a head's logits are over; None for the target's own tokens."""
    return DraftVocabulary(tensors["d2t"], ends.vocab_size) if "d2t" in tensors else None


def _need(files: HeadFiles, tensors: Mapping[str, mx.array], name: str) -> mx.array:
    """A tensor by name; raises HeadError if it is not there."""
    if name not in tensors:
        raise HeadError(f"{files.name} has no tensor {name}. Fetch it again, or give another.")
    return tensors[name]


def _eagle3(files: HeadFiles, ends: TargetEnds, variant: Variant) -> Built:
    tensors = _tensors(files)
    config = Eagle3Config.read(files.config, ends.num_layers)
    if variant.layers is not None:
        config = replace(config, layers=tuple(variant.layers))
    _check_width(files, ends, _columns(files, tensors) / len(config.layers))
    weights = {n.replace("layers.0.hidden_norm", "hidden_norm"): x for n, x in tensors.items()}
    head = Eagle3(
        config,
        ends,
        _vocabulary(tensors, ends),
        own_embeddings=_rows(tensors, "embed_tokens.weight"),
        own_head=_rows(tensors, "lm_head.weight"),
    )
    return head, _kept(weights)


def _columns(files: HeadFiles, tensors: Mapping[str, mx.array]) -> int:
    """Numbers that the matrix `fc` takes, unpacked if it is quantized."""
    columns = _need(files, tensors, "fc.weight").shape[-1]
    if "fc.scales" not in tensors:
        return int(columns)
    written = files.config["quantization"]
    own = written.get("fc") or written.get("model.fc") or {}
    return int(columns * 32 // {**written, **own}["bits"])


def _rows(tensors: Mapping[str, mx.array], name: str) -> int:
    """Rows of a matrix; 0 if it is not there."""
    return tensors[name].shape[0] if name in tensors else 0


def _eagle(files: HeadFiles, ends: TargetEnds, variant: Variant) -> Built:
    tensors = _tensors(files)
    _check_width(files, ends, _columns(files, tensors) / 2)
    config = files.config | {"qkv_bias": "layers.0.self_attn.q_proj.bias" in tensors}
    head = Eagle1(
        config,
        ends,
        own_embeddings=_rows(tensors, "embed_tokens.weight"),
        has_bias="fc.bias" in tensors,
    )
    return head, _kept(tensors)


def _dflash(files: HeadFiles, ends: TargetEnds, variant: Variant) -> Built:
    tensors = _tensors(files)
    config = DFlashConfig.read(files.config, ends.num_layers)
    if variant.layers is not None:
        config = replace(config, layers=tuple(variant.layers))
    _check_width(files, ends, _columns(files, tensors) / len(config.layers))
    expect(files, "mask_token_id", config.mask_token, 0, ends.vocab_size - 1)
    expect(files, "block_size", config.block_size, 2, MOST_TOKENS)
    vocabulary = _vocabulary(tensors, ends)
    shared = ("embed_tokens.",) if vocabulary is not None else ("embed_tokens.", "lm_head.")
    weights = {n: x for n, x in _kept(tensors).items() if not n.startswith(shared)}
    return DFlash(config, ends, vocabulary), weights


def _gemma4_assistant(files: HeadFiles, ends: TargetEnds, variant: Variant) -> Built:
    config = AssistantConfig.read(files.config)
    width = files.config.get("backbone_hidden_size", ends.width)
    _check_width(files, ends, width)
    _check_caches(files, ends, config)
    tensors = _kept(_tensors(files))
    order = tensors.get("masked_embedding.token_ordering", mx.zeros(1, mx.int32))
    for token in (order.min().item(), order.max().item()):
        expect(files, "a token of token_ordering", token, 0, config.text["vocab_size"] - 1)
    return Gemma4Assistant(config, ends), {
        n: x for n, x in tensors.items() if not n.startswith("lm_head.")
    }


def _check_caches(files: HeadFiles, ends: TargetEnds, config: AssistantConfig) -> None:
    """Raise HeadError for a target without the keys and values that the assistant attends to."""
    for kind, width in config.key_widths().items():
        cache = ends.last_caches.get(kind)
        if cache is None or cache.width != width:
            has = "no such cache" if cache is None else f"keys of {cache.width} numbers"
            raise HeadError(
                f"{files.name} attends to keys of {width} numbers of the target's last layer with "
                f"{kind.replace('_', ' ')}, and this target has {has}. Use an assistant that was "
                "trained for this target."
            )


def _medusa(files: HeadFiles, ends: TargetEnds, variant: Variant) -> Built:
    tensors, _ = files.read(files.names)
    weights, heads, layers = {}, 0, 0
    for name, value in tensors.items():
        parts = MEDUSA_NAME.fullmatch(name)
        if parts is None:
            weights[name] = value  # refused by this name
            continue
        head, layer = int(parts["head"]), int(parts["layer"])
        heads = max(heads, head + 1)
        if parts["linear"]:
            layers = max(layers, layer + 1)
            weights[f"blocks.{head}.{layer}.{parts['part']}"] = value
        else:
            weights[f"lm_heads.{head}.{parts['part']}"] = value
    _check_width(files, ends, _need(files, weights, "blocks.0.0.weight").shape[0])
    rows = _rows(weights, "lm_heads.0.weight")
    return Medusa(heads, layers, ends, own_heads=rows), weights


def _mtp(files: HeadFiles, ends: TargetEnds, variant: Variant) -> Built:
    found = family_of(files.config)
    if found is None:
        raise HeadError(
            f"{files.name}: the multi-token prediction layer of {files.config.get('model_type')} "
            f"is not known. Known: {', '.join(FAMILIES)}."
        )
    model_type, family = found
    config = files.config.get("text_config") or files.config
    prefixes = family.prefixes_in(files.names, config)
    if not prefixes:
        raise HeadError(without_its_layer(files, model_type, family))
    _check_width(files, ends, config["hidden_size"])
    layers = [_mtp_layer(files, family, config, prefix, variant) for prefix in prefixes]
    head = mtp_head(family, config, ends, len(layers))
    if isinstance(head, MTPHead):
        vocabulary = _vocabulary(files.read(files.names & {"d2t"})[0], ends)
        if vocabulary is not None:
            head.choose_among(vocabulary)
        return head, layers[0]
    return head, {f"layers.{i}.{n}": x for i, layer in enumerate(layers) for n, x in layer.items()}


def _mtp_layer(
    files: HeadFiles, family: MTPFamily, config: Mapping[str, Any], prefix: str, variant: Variant
) -> dict[str, mx.array]:
    """The weights of one layer, whose tensors have this prefix, by the names of `MTPHead`."""
    names = [n for n in files.names if _is_part(n.removeprefix(prefix), n, prefix, family)]
    tensors, converted = files.read(names)
    add_one = family.norms_less_one and not converted
    if variant.norms_less_one is not None:
        add_one = variant.norms_less_one
    return _kept(mtp_weights(family, config, tensors, prefix, add_one=add_one))


def without_its_layer(files: HeadFiles, model_type: str, family: MTPFamily) -> str:
    """What is said of a model without its multi-token prediction layer."""
    prefix = family.prefix_at(files.config.get("text_config") or files.config)
    return (
        f"{files.name} is a {model_type} model without the tensors of its multi-token prediction "
        f"layer ({prefix}...), which conversions leave out. Give the original repository, or one "
        "that has just this layer."
    )


def _is_part(rest: str, name: str, prefix: str, family: MTPFamily) -> bool:
    """Whether a tensor belongs to the layer, and is no copy of the target's ends."""
    begins = (*(f"{theirs}." for theirs in family.names.values()), family.layer)
    return name.startswith(prefix) and rest.startswith(begins) and not rest.startswith(SHARED_ENDS)


BUILDERS: dict[str, Callable[[HeadFiles, TargetEnds, Variant], Built]] = {
    "eagle3": _eagle3,
    "eagle": _eagle,
    "dflash": _dflash,
    "gemma4_assistant": _gemma4_assistant,
    "medusa": _medusa,
    "mtp": _mtp,
}
"""Kind, as `recognition.kind_of` names it -> what builds it."""
