"""Formats of published heads: how each is told, what its tensors are called, what is made of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx

from specdec_mlx.drafters.heads.dflash import DFlash, DFlashConfig
from specdec_mlx.drafters.heads.drafter import Head
from specdec_mlx.drafters.heads.eagle import Eagle1, Eagle3, Eagle3Config, LayersConfig
from specdec_mlx.drafters.heads.files import HeadFiles
from specdec_mlx.drafters.heads.gemma4_assistant import Gemma4Assistant, key_widths, layer_args
from specdec_mlx.drafters.heads.medusa import Medusa
from specdec_mlx.drafters.heads.mtp import MTPHead, mtp_head, mtp_weights
from specdec_mlx.drafters.heads.mtp_families import FAMILIES, MTPFamily, family_of
from specdec_mlx.drafters.heads.target_ends import DraftVocabulary, TargetEnds
from specdec_mlx.errors import HeadError

Tensors = dict[str, mx.array]

IGNORED = re.compile(r"(^|.*\.)(rotary_emb\.|verifier_|t2d|d2t)")
"""Tensors that a head may come with and does not need."""

SHARED_ENDS = ("embed_tokens.", "shared_head.head.", "lm_head.")
"""Copies of the target's ends that a multi-token prediction layer may come with."""

VOCABULARY_MARGIN = 512
"""Rows by which vocabularies may differ, since models pad them to round numbers."""

MOST_LAYERS, MOST_TOKENS = 1000, 1024
"""Most layers or heads, and most tokens of a block, that a config may ask for."""


class Variant(NamedTuple):
    """What a head may be told about itself where its files are wrong or say nothing: see
    `load_head`; None for what its files or its family say.
    """

    layers: Sequence[int] | None = None
    pre_norm: bool | None = None
    norms_less_one: bool | None = None


Built = tuple[Head, Tensors]
"""A head with random weights, and the weights that it is to have, by its own names."""


@dataclass(frozen=True)
class Format:
    """One way in which heads are published.

    label: what people call it. named: pattern of what a config calls it. keys: of a config, any of
    which tells it. renamed: patterns of the checkpoint's names -> ours. build: makes a head of the
    files and of all their tensors by our names; None where it is no head, or cannot be loaded.
    loads: False where it is recognised only.
    """

    label: str
    named: str = "(?!)"
    keys: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    build: Callable[[HeadFiles, Tensors, TargetEnds, Variant], Built] | None = None
    loads: bool = True


def known_kind(config: Mapping[str, Any]) -> str | None:
    """The format that a configuration alone gives away, a key of FORMATS; None where it does not.

    "mtp" is then a repository of just that layer.
    """
    said = [config.get(k, "") for k in ("speculators_model_type", "model_type", "architectures")]
    named = " ".join(map(str, said)).lower()
    return next(
        (
            kind
            for kind, one in FORMATS.items()
            if re.search(one.named, named) or any(key in config for key in one.keys)
        ),
        None,
    )


def kind_of(config: Mapping[str, Any], names: Collection[str]) -> str | None:
    """The format, the names of the tensors considered too; also "eagle" and "mtp" of a model.

    A whole model whose repository still has its multi-token prediction layer counts as "mtp".
    """
    kind = known_kind(config)
    if kind is not None:
        return kind
    found = family_of(config)
    text = config.get("text_config") or config
    if found is not None and found[1].prefixes_in(names, text):
        return "mtp"
    if any(re.fullmatch(r"(medusa_head\.)?\d+\.\d+\.linear\.weight", name) for name in names):
        return "medusa"
    if "fc.weight" in names and any(name.startswith(("layers.0.", "midlayer.")) for name in names):
        return "eagle3" if any("hidden_norm" in name for name in names) else "eagle"
    return None


def build_head(kind: str, files: HeadFiles, ends: TargetEnds, variant: Variant) -> Built:
    """A head of a format that has a `build`, and its weights.

    Args:
        kind: a key of FORMATS.
        files: where it is.
        ends: of the target.
        variant: what it is told about itself.

    Raises:
        HeadError: it was trained for another vocabulary or width, or tensors are missing.
    """
    check_sizes(files, ends)
    form = FORMATS[kind]
    assert form.build is not None
    tensors = files.read(files.names)[0] if form.renamed else {}
    for old, new in form.renamed.items():
        tensors = {re.sub(old, new, name): value for name, value in tensors.items()}
    head, weights = form.build(files, tensors, ends, variant)
    for layer in head.features.layers:
        files.expect("a layer that it reads", layer, 0, ends.num_layers - 1)
    if variant.pre_norm is not None and hasattr(head, "pre_norm"):
        head.pre_norm = variant.pre_norm
    return head, {name: x for name, x in weights.items() if not IGNORED.match(name)}


def check_sizes(files: HeadFiles, ends: TargetEnds) -> None:
    """Raise HeadError for a head whose config names another vocabulary, or endless layers."""
    config = files.config
    part = config.get("transformer_layer_config") or config.get("text_config") or config
    size = part.get("vocab_size")
    for said in (config, part):
        counts = {key: n for key, n in said.items() if key.endswith("_heads") and n is not None}
        counts["num_hidden_layers"] = said.get("num_hidden_layers") or 1
        for key, count in counts.items():  # MLX's attention divides by heads
            files.expect(key, count, 1, MOST_LAYERS)
    if size is not None and abs(size - ends.vocab_size) > VOCABULARY_MARGIN:
        raise HeadError(
            f"{files.name} was trained for a vocabulary of {size} tokens, and this target has "
            f"{ends.vocab_size}. Use a head that was trained for this target."
        )


def _check_width(files: HeadFiles, ends: TargetEnds, width: float) -> None:
    """Raise HeadError for a head that reads states of another width."""
    if width != ends.width:
        raise HeadError(
            f"{files.name} was trained for a target whose states have {width:g} numbers, and those "
            f"of this one have {ends.width}. Use a head that was trained for this target."
        )


def _fused_width(files: HeadFiles, tensors: Tensors, number: int) -> float:
    """Width of each of the states that the matrix `fc` takes, unpacked if it is quantized."""
    columns = _need(files, tensors, "fc.weight").shape[-1]
    if "fc.scales" in tensors:
        written = files.config["quantization"]
        own = written.get("fc") or written.get("model.fc") or {}
        columns = columns * 32 // {**written, **own}["bits"]
    return float(columns / number)


def _need(files: HeadFiles, tensors: Tensors, name: str) -> mx.array:
    """A tensor by name; raises HeadError if it is not there."""
    if name not in tensors:
        raise HeadError(f"{files.name} has no tensor {name}. Fetch it again, or give another.")
    return tensors[name]


def _rows(tensors: Tensors, name: str) -> int:
    """Rows of a matrix; 0 if it is not there."""
    return tensors[name].shape[0] if name in tensors else 0


def _vocabulary(tensors: Tensors, ends: TargetEnds) -> DraftVocabulary | None:
    """What a head's logits are over; None for the target's own tokens."""
    return DraftVocabulary(tensors["d2t"], ends.vocab_size) if "d2t" in tensors else None


Config = TypeVar("Config", bound=LayersConfig)


def _checked(
    config: Config, files: HeadFiles, tensors: Tensors, ends: TargetEnds, variant: Variant
) -> Config:
    """What a head's config says, with the layers that it is told; raises HeadError as `build`."""
    if variant.layers is not None:
        config = replace(config, layers=tuple(variant.layers))
    _check_width(files, ends, _fused_width(files, tensors, len(config.layers)))
    return config


def _eagle3(files: HeadFiles, tensors: Tensors, ends: TargetEnds, variant: Variant) -> Built:
    said = Eagle3Config.read(files.config, ends.num_layers)
    head = Eagle3(
        _checked(said, files, tensors, ends, variant),
        ends,
        _vocabulary(tensors, ends),
        own_embeddings=_rows(tensors, "embed_tokens.weight"),
        own_head=_rows(tensors, "lm_head.weight"),
    )
    return head, tensors


def _eagle(files: HeadFiles, tensors: Tensors, ends: TargetEnds, variant: Variant) -> Built:
    _check_width(files, ends, _fused_width(files, tensors, 2))
    head = Eagle1(
        files.config | {"qkv_bias": "layers.0.self_attn.q_proj.bias" in tensors},
        ends,
        own_embeddings=_rows(tensors, "embed_tokens.weight"),
        has_bias="fc.bias" in tensors,
    )
    return head, tensors


def _dflash(files: HeadFiles, tensors: Tensors, ends: TargetEnds, variant: Variant) -> Built:
    said = DFlashConfig.read(files.config, ends.num_layers)
    config = _checked(said, files, tensors, ends, variant)
    files.expect("mask_token_id", config.mask_token, 0, ends.vocab_size - 1)
    files.expect("block_size", config.block_size, 2, MOST_TOKENS)
    vocabulary = _vocabulary(tensors, ends)
    shared = ("embed_tokens.",) if vocabulary is not None else ("embed_tokens.", "lm_head.")
    weights = {name: x for name, x in tensors.items() if not name.startswith(shared)}
    return DFlash(config, ends, vocabulary), weights


def _gemma4(files: HeadFiles, tensors: Tensors, ends: TargetEnds, variant: Variant) -> Built:
    _check_width(files, ends, files.config.get("backbone_hidden_size", ends.width))
    for kind, width in key_widths(layer_args(files.config)).items():
        cache = ends.last_caches.get(kind)
        if cache is None or cache.width != width:
            has = "no such cache" if cache is None else f"keys of {cache.width} numbers"
            raise HeadError(
                f"{files.name} attends to keys of {width} numbers of the target's last layer with "
                f"{kind.replace('_', ' ')}, and this target has {has}. Use an assistant that was "
                "trained for this target."
            )
    order = tensors.get("masked_embedding.token_ordering", mx.zeros(1, mx.int32))
    for token in (order.min().item(), order.max().item()):
        files.expect(
            "a token of token_ordering", token, 0, files.config["text_config"]["vocab_size"] - 1
        )
    weights = {name: x for name, x in tensors.items() if not name.startswith("lm_head.")}
    return Gemma4Assistant(files.config, ends), weights


def _medusa(files: HeadFiles, tensors: Tensors, ends: TargetEnds, variant: Variant) -> Built:
    _check_width(files, ends, _need(files, tensors, "blocks.0.0.weight").shape[0])
    parts = [name.split(".") for name in tensors if name.startswith(("blocks.", "lm_heads."))]
    heads = 1 + max(int(part[1]) for part in parts)
    layers = 1 + max(int(part[2]) for part in parts if part[0] == "blocks")
    return Medusa(heads, layers, ends, own_heads=_rows(tensors, "lm_heads.0.weight")), tensors


def _mtp(files: HeadFiles, tensors: Tensors, ends: TargetEnds, variant: Variant) -> Built:
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
) -> Tensors:
    """The weights of one layer, whose tensors have this prefix, by the names of `MTPHead`."""
    begins = (*(f"{theirs}." for theirs in family.names.values()), family.layer)
    rests = {n: n.removeprefix(prefix) for n in files.names if n.startswith(prefix)}
    tensors, converted = files.read(
        name
        for name, rest in rests.items()
        if rest.startswith(begins) and not rest.startswith(SHARED_ENDS)
    )
    add_one = family.norms_less_one and not converted
    if variant.norms_less_one is not None:
        add_one = variant.norms_less_one
    return mtp_weights(family, config, tensors, prefix, add_one=add_one)


def without_its_layer(files: HeadFiles, model_type: str, family: MTPFamily) -> str:
    """What is said of a model without its multi-token prediction layer."""
    prefix = family.prefix_at(files.config.get("text_config") or files.config)
    return (
        f"{files.name} is a {model_type} model without the tensors of its multi-token prediction "
        f"layer ({prefix}...), which conversions leave out. Give the original repository, or one "
        "that has just this layer."
    )


_STYLE = {r"^model\.": "", r"midlayer\.": "layers.0."}
_MEDUSA = {
    r"^(medusa_head\.)?(\d+)\.(\d+)\.linear\.(\w+)$": r"blocks.\2.\3.\4",
    r"^(medusa_head\.)?(\d+)\.\d+\.(\w+)$": r"lm_heads.\2.\3",
}

FORMATS: dict[str, Format] = {
    "dspark": Format(
        "DSpark, which corrects a DFlash block by a Markov chain",
        "dspark",
        ("markov_rank",),
        loads=False,
    ),
    "dflash2": Format(
        "DFlash 2, with its convolutions and selectors",
        "dflash2",
        ("selector_rank",),
        loads=False,
    ),
    "dflash": Format("DFlash", "dflash", ("dflash_config",), _STYLE, _dflash),
    "peagle": Format("P-EAGLE, which drafts in parallel", "peagle|p_eagle", loads=False),
    "eagle3": Format(
        "EAGLE-3",
        "eagle3",
        ("draft_vocab_size",),
        _STYLE | {r"layers\.0\.hidden_norm": "hidden_norm"},
        _eagle3,
    ),
    "eagle": Format("EAGLE", renamed=_STYLE, build=_eagle),
    "gemma4_assistant": Format(
        "Gemma 4 assistant", "gemma4.*assistant", renamed=_STYLE, build=_gemma4
    ),
    "pard2": Format("PARD-2, which reads the target", keys=("pard2_target_layers",), loads=False),
    "pard": Format("PARD", keys=("pard_token",)),
    "hydra": Format(
        "Hydra heads, which see each other's guesses", keys=("hydra_num_heads",), loads=False
    ),
    "medusa": Format("Medusa", "medusa", ("medusa_num_heads",), _MEDUSA, _medusa),
    "exit": Format("trained exit", keys=("exit_layer",)),
    "mtp": Format("multi-token prediction", r"_mtp( |$)", build=_mtp),
}
"""Name of a format -> how it is read; the first that a config gives away is meant."""
