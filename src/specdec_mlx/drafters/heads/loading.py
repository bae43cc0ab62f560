"""Loading of heads: the published formats, the check that a head fits its target, its weights."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils

from specdec_mlx.arguments import (
    AUTO,
    argument_error,
    check_int,
    installed,
    load,
    make_with,
    split_spec,
)
from specdec_mlx.contracts import DraftContext, Drafter, FeatureRows, KeysValues
from specdec_mlx.drafters.drawing import check_draft_temp
from specdec_mlx.drafters.heads.drafter import (
    Config,
    Head,
    HeadDrafter,
    anatomy_for_head,
    is_norm,
)
from specdec_mlx.drafters.heads.eagle import Eagle3, LayersHead, eagle1_family
from specdec_mlx.drafters.heads.files import HeadFiles
from specdec_mlx.drafters.heads.gemma4_assistant import Gemma4Assistant, key_widths, layer_args
from specdec_mlx.drafters.heads.hydra import Hydra
from specdec_mlx.drafters.heads.mtp import (
    FAMILIES,
    OTHER_FORMULAS,
    MTPHead,
    layer_prefixes,
    less_one,
    mtp_weights,
    of_type,
    text_part,
)
from specdec_mlx.drafters.heads.one_pass import DFlash, Medusa, block_options
from specdec_mlx.drafters.heads.pard import PardDrafter
from specdec_mlx.drafters.model import ModelDrafter
from specdec_mlx.drafters.shortlist import check_draft_vocab
from specdec_mlx.errors import HeadError, ModelFolderError
from specdec_mlx.models.anatomy import Anatomy
from specdec_mlx.models.loading import load_model
from specdec_mlx.window_cache import check_window

Tensors = dict[str, mx.array]

# names of tensors that are not needed
IGNORED = re.compile(r"(^|.*\.)(rotary_emb\.|verifier_|t2d|d2t)")
# beginnings of names in a checkpoint that may be copies of the target's matrices
SHARED_WITH_TARGET = ("embed_tokens.", "shared_head.head.", "lm_head.")

GROUNDED = "grounded_heads"  # Hydra's key for heads that read the tokens drafted before them

TRAINED_LENGTH = "trained_length"  # key of the configs that `specdec-mlx train` writes

DEFAULT_BITS, UNQUANTIZED = 4, 16
"""Values of `draft_bits`: of large heads by default, and to leave the matrices as stored."""

BITS = (2, 3, 4, 5, 6, 8, UNQUANTIZED)

LARGE_HEAD = 50e6
"""Bytes of weights. A smaller head is read in a small part of a pass of its target."""

VOCABULARY_MARGIN, MOST_LAYERS = 512, 1000
"""Most tokens by which vocabularies differ through padding, and most layers or attention heads."""


class Variant(NamedTuple):
    """Options of `load_head` that describe a checkpoint. None leaves the choice to its config.

    Attributes:
        draft_bits: bits to quantize the head's matrices to, `UNQUANTIZED` to leave them. None
            quantizes large heads that are stored without quantization.
        layers: layers of the target that the head reads.
        pre_norm: the head reads the state before the target's final norm.
        norms_less_one: norms are stored as w - 1.
        window: number of latest positions that the head sees beside the first 4, 0 for all.
    """

    draft_bits: int | None = None
    layers: Sequence[int] | None = None
    pre_norm: bool | None = None
    norms_less_one: bool | None = None
    window: int | None = None


class HeadSource(NamedTuple):
    """Input of a format's `build`.

    Attributes:
        tensors: the tensors of the files, with this package's names.
        converted: MLX wrote the files.
    """

    files: HeadFiles
    anatomy: Anatomy
    tensors: Tensors
    variant: Variant
    converted: bool = False

    def rows(self, name: str) -> int:
        return self.tensors[name].shape[0] if name in self.tensors else 0


@dataclass(frozen=True)
class Format:
    """A published format of heads.

    Attributes:
        label: name of the format in messages.
        told_by: pattern that recognises the format. It is searched in the config's model types and
            keys, each key followed by "=", and in the names of the tensors, each on its own line.
        build: makes a head with random weights.
        renamed: patterns of the checkpoint's names, and the names in the head.
        weights: makes the tensors of the head, by default the tensors of its source.
        load: replaces all of these. Called with (files, target, variant, options), where `options`
            are the options of the drafter. Returns a drafter.
    """

    label: str
    told_by: str
    build: Callable[[HeadSource], Head] | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    weights: Callable[[Any, HeadSource], Tensors] = lambda head, source: source.tensors
    load: Callable[[HeadFiles, nn.Module, Variant, dict[str, Any]], Any] | None = None

    @property
    def loads(self) -> bool:
        return self.build is not None or self.load is not None


def kind_of(config: Config, names: Collection[str] = ()) -> str | None:
    """Name of a head's format, or None. "mtp" stands for prediction layers.

    Args:
        config: config of a head, or of a model with prediction layers.
        names: names of the tensors.
    """
    # Prediction layers may be in a model's own files, or in a repository of their own.
    # A block head may have its target's model type, and a matrix with a name of such a layer.
    is_block = re.search("dspark|dflash", str(config.get("architectures")).lower())
    if names and not is_block and layer_prefixes(config, names):
        return "mtp"
    keys = [*config, *(config.get("dflash_config") or ())]
    types = ("speculators_model_type", "model_type", "architectures")
    kinds = [str(config.get(key, "")) for key in types]
    config_text = " ".join([*kinds, *(f"{key}=" for key in keys)]).lower()
    description = "\n".join([config_text, *sorted(names)])
    return next(
        (name for name, form in formats().items() if re.search(form.told_by, description)), None
    )


def width_read(config: Config) -> int | None:
    """Width of the target's states that a head was trained on, or None if unknown."""
    width = config.get("target_hidden_size") or config.get("backbone_hidden_size")
    return width or text_part(config).get("hidden_size")


def trained_window(config: Config, *, is_of_target: bool) -> int | None:
    """Positions that a head looked back in its training, or None if its config does not say.

    is_of_target: the other entries of the config may describe the target.
    """
    if type(length := config.get(TRAINED_LENGTH)) is int and length > 1:
        return length
    most = None if is_of_target else text_part(config).get("max_position_embeddings")
    return most if type(most) is int and most > 0 else None


def check_sizes(files: HeadFiles, anatomy: Anatomy) -> None:
    """Raise HeadError for impossible sizes in the config, or another vocabulary size."""
    part, size = text_part(files.config), anatomy.vocab_size
    limits = {"mask_token_id": (0, size - 1), "block_size": (2, 1024)}
    limits["num_hidden_layers"] = 1, MOST_LAYERS
    for section in (files.config, part, files.config.get("dflash_config") or {}):
        for key, value in section.items():
            # MLX's attention divides by the number of heads.
            is_number = key.endswith("_heads") and key != GROUNDED
            default = (1, MOST_LAYERS) if is_number else None
            expected = limits.get(key, default)
            if expected is not None and value is not None:
                files.check_number(key, value, *expected)
    if abs((part.get("vocab_size") or size) - size) > VOCABULARY_MARGIN:
        raise HeadError(
            f"{files.name} was trained for a vocabulary of {part['vocab_size']} tokens, and this "
            f"target has {size}. Use a head that was trained for this target."
        )


def check_width(files: HeadFiles, anatomy: Anatomy, width: int | None) -> None:
    if width not in (None, anatomy.width):
        raise HeadError(
            f"{files.name} was trained for a target whose states have {width} numbers, but this "
            f"target's states have {anatomy.width}. Use a head that was trained for this target."
        )


def _eagle3(source: HeadSource) -> Head:
    head = Eagle3(source.files.config, source.anatomy, source.variant.layers)
    head.add_weights(source.rows("embed_tokens.weight"), source.rows("lm_head.weight"))
    return head


def _eagle(source: HeadSource) -> Head:
    # EAGLE-1 configs do not say whether there are biases.
    has_biases = "body.layers.0.self_attn.q_proj.bias" in source.tensors
    config = source.files.config | {"qkv_bias": has_biases}
    has_bias = "projection.bias" in source.tensors
    head = MTPHead(eagle1_family(config), config, source.anatomy, has_bias=has_bias)
    head.add_weights(source.rows("embed_tokens.weight"))
    return head


def _dflash(source: HeadSource) -> Head:
    config = source.files.config
    if "muse_glimmer" in str(config.get("model_type")):
        # Muse's own head sees `sliding_window` positions on both sides, and the position itself.
        config = {**config, "sliding_window": config["sliding_window"] + 1}
        config |= {"model_type": "qwen3", "sliding_window_non_causal": True}
    head = DFlash(config, source.anatomy, source.variant.layers)
    # Most files with embeddings hold copies of the target's. The config says which are their own.
    rows = source.rows("embed_tokens.weight") if config.get("has_embed_tokens") else 0
    head.add_weights(rows, logits=source.rows("d2t"))
    if source.rows("confidence_head.proj.weight"):
        with_code = block_options(config).get("confidence_head_with_markov", True)
        head.add_confidence(
            with_code=with_code and "markov_head" in head,
            has_bias=source.rows("confidence_head.proj.bias") > 0,
        )
    return head


def _block_weights(head: Head, source: HeadSource) -> Tensors:
    """Weights of a block head. Norms of layers in the way of Qwen 3.5 are stored as w - 1."""
    files, add_one = source.files, source.variant.norms_less_one
    if add_one is None:
        types = [files.config.get("model_type"), *(files.config.get("architectures") or ())]
        # Heads of DeepSpec repeat their target's config, so the whole names count.
        may_be = not {"qwen3_5", "Qwen35DSparkModel"}.isdisjoint(types)
        add_one = may_be and (not source.converted or less_one(source.tensors))
    return {n: x + 1 if add_one and is_norm(n, x) else x for n, x in source.tensors.items()}


def _gemma4(source: HeadSource) -> Head:
    files, anatomy = source.files, source.anatomy
    for kind, width in key_widths(layer_args(files.config)).items():
        cache = anatomy.last_caches.get(kind)
        if cache is None or cache.width != width:
            has = "no such cache" if cache is None else f"keys of {cache.width} numbers"
            raise HeadError(
                f"{files.name} attends to keys of {width} numbers of the target's last layer with "
                f"{kind.replace('_', ' ')}, and this target has {has}. Use an assistant that was "
                "trained for this target."
            )
    # MLX does not check the bounds of these ids.
    order = source.tensors.get("masked_embedding.token_ordering", mx.zeros(1, mx.int32))
    last = files.config["text_config"]["vocab_size"] - 1
    for token in (order.min().item(), order.max().item()):
        files.check_number("a token of token_ordering", token, 0, last)
    return Gemma4Assistant(files.config, anatomy)


def _pard(
    files: HeadFiles, target: nn.Module, variant: Variant, options: dict[str, Any]
) -> PardDrafter:
    _check_options(files, variant, {"window"})
    # The published PARD-2 models draft from the text alone. Their training files also read states.
    if any("target_proj" in name for name in files.weight_map):
        raise HeadError(
            f"{files.name} projects the target's states into its embeddings, which is not read "
            "yet. Give the model without target_proj, as it is published."
        )
    model, tokenizer = load_model(files.name)
    mask = files.config["pard_token"]
    files.check_number("pard_token", mask, 0, anatomy_for_head(model).vocab_size - 1)
    if variant.draft_bits not in (None, UNQUANTIZED):
        _quantize(model, variant.draft_bits, files.name)
    return PardDrafter(model, tokenizer, mask_token=mask, window=variant.window, **options)


def _medusa(source: HeadSource) -> Head:
    check_width(source.files, source.anatomy, source.rows("blocks.0.0.weight"))
    blocks = [name.split(".") for name in source.tensors if name.startswith("blocks.")]
    heads, layers = (len({block[i] for block in blocks}) for i in (1, 2))
    rows = source.rows("lm_heads.0.weight")
    return Medusa(heads, layers, source.anatomy, own_heads=rows)


def _hydra(source: HeadSource) -> Head:
    files, anatomy, tensors = source.files, source.anatomy, source.tensors
    variants = {"hydra_head_arch": "mlp", GROUNDED: False, "hidden_state_offset": 0}
    known = {"hydra_head_arch": ("mlp", "prefix-mlp"), GROUNDED: (True,)}
    for key, default in variants.items():
        if (value := files.config.get(key, default)) not in known.get(key, (default,)):
            raise HeadError(
                f"{files.name} holds Hydra heads with {key} {value!r}, which cannot be loaded yet. "
                "Use heads that read each other's tokens, of the kind mlp or prefix-mlp."
            )
    check_width(files, anatomy, source.rows("blocks.0.0.linear.weight") or None)
    blocks = [name.split(".") for name in tensors if name.startswith("blocks.")]
    heads, places = ({int(block[i]) for block in blocks} for i in (1, 2))
    layer = None
    if files.config.get("hydra_head_arch") == "prefix-mlp":
        # The file does not say the sizes of this layer, which are the target's.
        modules: Iterator[Any] = (reference() for reference in anatomy.modules)
        layer = vars(next(part.args for part in modules if hasattr(part, "args")))
    return Hydra(len(heads), places, source.rows("lm_heads.0.weight"), anatomy, layer)


def _mtp(source: HeadSource) -> Head:
    files, prefixes = source.files, source.files.own_layers()
    family = of_type(files.config, FAMILIES)
    if family is None or not prefixes:
        raise HeadError(refusal(files))
    return MTPHead(family, text_part(files.config), source.anatomy, num_layers=len(prefixes))


def _mtp_weights(head: MTPHead, source: HeadSource) -> Tensors:
    files, family, weights = source.files, head.family, dict(source.tensors)
    for depth, (layer, prefix) in enumerate(zip(head.levels, files.own_layers(), strict=True)):
        own_prefixes, shared = (
            tuple(prefix + start for start in starts)
            for starts in (family.ours(), SHARED_WITH_TARGET)
        )
        tensors, converted = files.read(
            name
            for name in files.weight_map
            if name.startswith(own_prefixes) and not name.startswith(shared)
        )
        add_one = source.variant.norms_less_one
        # Original files of these families store w - 1. Conversions of a layer without its model
        # have added the 1. For all other files the values decide.
        if add_one is None:
            is_alone = converted and not prefix
            is_original = not (converted or files.is_apart or "quantization" in files.config)
            may_be = family.norms_less_one and not is_alone
            add_one = may_be and (is_original or less_one(tensors))
        ours = f"further.{depth - 1}." if depth else ""
        made = mtp_weights(layer, tensors, prefix, add_one=add_one)
        weights |= {ours + name: x for name, x in made.items()}
    return weights


def refusal(files: HeadFiles, kind: str | None = None) -> str:
    config, model_type = files.config, files.config.get("model_type")
    if kind is not None:
        return f"{files.name} holds {formats()[kind].label}. That cannot be loaded yet."
    if (family := of_type(config, FAMILIES)) is not None:
        prefix = family.prefix_at(text_part(config))
        where = ", which conversions leave out"
        if files.is_apart:
            where = f" in {files.list_file}, which has {min(files.weight_map, default='none')}"
        return (
            f"{files.name} is a {model_type} model without the tensors of its multi-token "
            f"prediction layer ({prefix}...){where}. Give the original repository, or one that "
            "has just this layer."
        )
    if (other := of_type(config, OTHER_FORMULAS)) is not None:
        return (
            f"{files.name}: the multi-token prediction of {model_type} {other}. It cannot be "
            "loaded yet; use a draft model, or a drafter that needs none, such as 'prompt-lookup'."
        )
    known = ", ".join(kind for kind, form in formats().items() if form.loads)
    return (
        f"{files.name} is no head of a known kind ({known}): its config.json has model_type "
        f"{model_type!r}. A small model with the target's tokenizer is loaded by mlx_lm.load and "
        "drafts with ModelDrafter."
    )


_STYLE = {r"^model\.": "", r"midlayer\.": "layers.0."}
_MUSE = _STYLE | {r"^encoder\.output_norm_enc\.": "hidden_norm.", r"^encoder\.": ""}
_EAGLE = _STYLE | {r"^fc\.": "projection.", r"^layers\.": "body.layers."}
_EAGLE3 = _STYLE | {r"layers\.0\.hidden_norm": "hidden_norm"}
_MEDUSA = {
    r"^(medusa_head\.)?(\d+)\.(\d+)\.linear\.(\w+)$": r"blocks.\2.\3.\4",
    r"^(medusa_head\.)?(\d+)\.\d+\.(\w+)$": r"lm_heads.\2.\3",
}
_HYDRA = {
    r"^prefix_embeding_layer\.layers\.0\.": "prefix.",
    r"^prefix_embeding_layer\.": "",
    "^hydra_mlp": "blocks",
    r"^hydra_lm_head\.(\d+)\.(1\.)?(\w+)$": r"lm_heads.\1.\3",
}

FORMATS: dict[str, Format] = {
    "dspark": Format(
        "DSpark, a block with a Markov chain",
        # dspark_... are keys of a target that contains such a head
        r"dspark(?!_)|\bmarkov_rank=",
        _dflash,
        _STYLE,
        _block_weights,
    ),
    "dflash2": Format("DFlash 2", r"dflash2|\bselector_rank=", _dflash, _STYLE),
    "dflash": Format("DFlash", "dflash|muse_glimmer_assistant", _dflash, _MUSE),
    "eagle4": Format("EAGLE-4, which drafts trees in a way of its own", "eagle[-_]?4"),
    "peagle": Format(
        "P-EAGLE, which drafts in parallel",
        r"(?m)p[-_]?eagle|\b(ptd_token_id|parallel_drafting)=|^(model\.)?mask_hidden$",
    ),
    "eagle3": Format(
        "EAGLE-3", r"(?ms)eagle3|\bdraft_vocab_size=|^fc\.weight$.*hidden_norm", _eagle3, _EAGLE3
    ),
    "gemma4_assistant": Format("Gemma 4 assistant", "gemma4_?assistant", _gemma4, _STYLE),
    "pard2": Format("PARD-2", r"\bpard2_target_layers=", load=_pard),
    "pard": Format("PARD", r"\bpard_token=", load=_pard),
    "hydra": Format("Hydra", r"\bhydra_num_heads=", _hydra, _HYDRA),
    "medusa": Format("Medusa", r"(?m)medusa|^\d+\.\d+\.linear\.weight$", _medusa, _MEDUSA),
    "mtp": Format("multi-token prediction", "_mtp ", _mtp, weights=_mtp_weights),
    # recognised by its tensors only
    "eagle": Format("EAGLE", r"(?ms)^fc\.weight$.*^(layers\.0|midlayer)\.", _eagle, _EAGLE),
}
"""Name of a format -> how it is read; the first that a config matches counts."""

GROUP = "specdec_mlx.heads"  # entry points by which packages add formats, each a `Format`


@cache
def formats() -> dict[str, Format]:
    from_packages: dict[str, Any] = {
        name: load(entry, "head format")
        for name, entry in installed(GROUP, "head format", FORMATS).items()
    }
    return FORMATS | from_packages


def load_head(
    path_or_repo: str | Path,
    target: nn.Module,
    *,
    draft_bits: int | None = None,
    greedy: bool = False,
    draft_temp: float | None = None,
    branches: int = 1,
    layers: Sequence[int] | None = None,
    pre_norm: bool | None = None,
    norms_less_one: bool | None = None,
    draft_vocab: int | str | Path = AUTO,
    window: int | None = None,
    torch_files: bool = True,
) -> HeadDrafter | ModelDrafter:
    """Load a trained head as a drafter for a loaded target. `describe()` names its format.

    Args:
        path_or_repo: folder or Hugging Face name of a head, or of a target with its multi-token
            prediction layer (the original repository, or a conversion that kept the layer). A file
            in the folder works too. Only files that hold the head are fetched.
        target: the model to draft for. The head uses its embedding and its output layer.
        draft_bits: quantize the head's matrices to this number of bits, 16 to leave them as they
            are stored. None stands for 4 bits if the head has more than 50 MB of weights and is not
            stored in quantized form. `describe()` and a line in the log name the bits. A PARD model
            is quantized only on request.
        greedy: always propose the argmax, a deterministic draft.
        draft_temp: temperature of the drafts, None for the target's temperature.
        branches: most tokens at one position. With more than 1, drafts are trees.
        layers: layers of the target, from 0, whose outputs the head reads, if its config is wrong.
        pre_norm: the head reads the state before the final norm. None takes its family's default.
        norms_less_one: its norms are stored as w - 1. None takes its family's default.
        draft_vocab: tokens that a draft may contain, chosen again as the text grows. A number,
            "off" for all tokens, or the file of a memory or of a table of n-grams, whose counts
            help to choose. "auto" takes 4,096 tokens or a 16th of the vocabulary if this saves half
            of the bytes of a draft token.
        window: number of latest positions of a text that the head sees, beside the first 4. 0
            stands for the whole text. None takes what the head looked back in its training, if its
            config says how long its texts were. Layers that have windows of their own keep them.
        torch_files: read files of `torch.save` with torch if there are no safetensors.

    Raises:
        HeadError: the head is unknown or incomplete, or does not fit the target.
    """
    check_draft_temp(draft_temp)
    check_int("branches", branches, 1)
    check_draft_vocab(draft_vocab)
    options: dict[str, Any] = {"greedy": greedy, "draft_temp": draft_temp}
    options |= {"branches": branches, "draft_vocab": draft_vocab}
    check_window(window)
    if draft_bits is not None and draft_bits not in BITS:
        raise argument_error("draft_bits", draft_bits, f"one of {BITS}")
    variant = Variant(draft_bits, layers, pre_norm, norms_less_one, window)
    files = HeadFiles(path_or_repo, torch_files=torch_files)
    with _explained(files):
        kind = kind_of(files.config, files.weight_map)
        form = formats().get(kind or "")
        if form is not None and form.load is not None:
            loaded: HeadDrafter | ModelDrafter = form.load(files, target, variant, options)
            return loaded
        if not files.weight_map:
            raise HeadError(f"{files.name} has no tensors. Fetch its safetensors too.")
        if form is None or form.build is None:
            raise HeadError(refusal(files, kind))
        anatomy = anatomy_for_head(target)
        head = _load(form, files, anatomy, variant)
        choose_bits(head, draft_bits, files.name)
        drafter = HeadDrafter(head, name=files.name, **options)
        mx.eval(head.parameters())
        _try_out(drafter, anatomy)
        return drafter


@contextmanager
def _explained(files: HeadFiles) -> Iterator[None]:
    """Raise HeadError for every error in the block."""
    try:
        yield
    except (HeadError, ModelFolderError):
        raise
    except Exception as error:
        # MLX's error may name every tensor.
        fault = shorten(f"{type(error).__name__}: {error}", 400)
        if isinstance(error, KeyError):
            fault = f"{error} is missing"
        raise HeadError(
            f"{files.name}: its config.json and its tensors make no head that runs on this target "
            f"({fault}). It is another variant, was trained for another target, or is damaged. "
            "Fetch it again, or use a head that was trained for this target."
        ) from error


def _check_options(files: HeadFiles, variant: Variant, apply: Collection[str]) -> None:
    for name in ("layers", "pre_norm", "norms_less_one", "window"):
        if name not in apply and getattr(variant, name) is not None:
            known = ", ".join(sorted(apply)) or "none of these options"
            raise HeadError(
                f"{files.name}: {name} has no meaning for this format, which takes {known}. "
                f"Leave {name} out."
            )


def _load(form: Format, files: HeadFiles, anatomy: Anatomy, variant: Variant) -> Head:
    check_sizes(files, anatomy)
    check_width(files, anatomy, width_read(files.config))
    if form.renamed:
        files.check_quantization("")
    tensors, converted = files.read(n for n in files.weight_map if form.renamed or n == "d2t")
    for old, new in form.renamed.items():
        # In order: a later pattern sees the names that an earlier pattern made.
        tensors = {re.sub(old, new, name): value for name, value in tensors.items()}
    source = HeadSource(files, anatomy, tensors, variant, converted)
    assert form.build is not None
    head = form.build(source)
    apply = {"layers"} if isinstance(head, LayersHead) else {"pre_norm"}
    has_own_cache = not isinstance(head, Gemma4Assistant | Medusa) and head.full_caches()
    if has_own_cache:
        apply.add("window")
    if form.weights in (_mtp_weights, _block_weights):
        apply.add("norms_less_one")
    _check_options(files, variant, apply)
    # d2t holds the distance from the id in the draft vocabulary to the id in the target.
    if (offsets := tensors.get("d2t")) is not None:
        ids = offsets + mx.arange(offsets.shape[0])
        head.add_weights(tokens=ids)
    elif (size := files.config.get("draft_vocab_size")) == source.rows("lm_head.weight") and (
        size < (text_part(files.config).get("vocab_size") or size)
    ):
        raise HeadError(
            f"{files.name} drafts {size} of {anatomy.vocab_size} tokens, and its tensor d2t, which "
            "names these, is missing. Fetch it again."
        )
    for layer in head.features.layers:
        files.check_number("a layer that it reads", layer, 0, anatomy.num_layers - 1)
    window = variant.window
    if window is None and "window" in apply:
        is_mtp = form.weights is _mtp_weights
        window = trained_window(files.config, is_of_target=is_mtp)
    for layer in {id(part): part for part in (head, *head.levels)}.values():
        layer.window = window
    if variant.pre_norm is not None:
        head.read_state(before_norm=variant.pre_norm)
    _set_weights(head, form.weights(head, source), anatomy.dtype)
    return head


def _try_out(drafter: HeadDrafter, anatomy: Anatomy) -> None:
    """Draft once from states of zeros, on which some contradictions in a config show."""
    head: Any = drafter.head
    # The shapes of a contradictory config may still load, and then the first pass fails.
    blank = mx.zeros((3, anatomy.width), anatomy.dtype)

    def keys_values(index: int) -> KeysValues:
        width = next(c.width for c in head.reads.values() if c.index == index)
        sizes = (1, head.layers[0].self_attn.n_kv_heads, 1, width)
        nothing = mx.zeros(sizes, anatomy.dtype)
        return KeysValues(nothing, nothing, 1)

    rows = dict.fromkeys(head.features.layers, blank)
    session = drafter.begin([0] * 4, DraftContext(vocab_size=anatomy.vocab_size))
    session.see(FeatureRows(rows, blank, keys_values=keys_values))
    mx.eval(session.propose(3).tokens)


def named_head(spec: str, path_or_repo: str | Path, target: nn.Module) -> Drafter:
    name, options = split_spec(spec)
    return make_with("drafter", name, partial(load_head, path_or_repo, target), options)


def config_of(path_or_repo: str | Path) -> dict[str, Any]:
    try:
        return HeadFiles(path_or_repo).config
    except HeadError:
        return {}


def is_head(path_or_repo: str | Path) -> bool:
    """True for a folder or repository with a head's config, and for a file in a model's folder."""
    if str(path_or_repo).endswith(".gguf"):
        return True
    config = config_of(path_or_repo)
    is_file = Path(path_or_repo).expanduser().is_file()
    return bool(config) and (is_file or kind_of(config) is not None)


def _set_weights(head: Head, tensors: Tensors, dtype: mx.Dtype) -> None:
    """Load the weights in the target's type. Raises ValueError if they do not fit."""
    # A checkpoint may hold copies of matrices that this head takes from the target, or parts that
    # its format does not use.
    optional = (*SHARED_WITH_TARGET, "confidence_head.")
    unused = tuple(name for name in optional if name.partition(".")[0] not in head)
    keeps_type = "e_score_correction_bias"
    weights = {}
    for name, x in tensors.items():
        if IGNORED.match(name) or name.startswith(unused):
            continue
        # The sum that chooses experts keeps its type, because rounding would choose others.
        is_cast = mx.issubdtype(x.dtype, mx.floating) and not name.endswith(keeps_type)
        weights[name] = x.astype(dtype) if is_cast else x

    def stored(path: str, part: nn.Module) -> Any:
        is_packed = hasattr(part, "to_quantized") and f"{path}.scales" in weights
        # Since mlx-lm 0.32
        infer = getattr(mlx_lm_utils, "infer_quant_config", None)
        return is_packed and (infer is None or infer(path, part, weights))

    nn.quantize(head, class_predicate=stored)
    head.load_weights(list(weights.items()))


def choose_bits(head: Head, bits: int | None, name: str) -> None:
    """Quantize a head to `bits`, or a large head to `DEFAULT_BITS` and say so in the log."""
    if bits == UNQUANTIZED:
        return
    if bits is None:
        size = sum(x.nbytes for _, x in tree_flatten(head.parameters()))
        # A head that is stored in few bits keeps them.
        if size <= LARGE_HEAD or any("scales" in part for part in head.modules()):
            return
        bits = DEFAULT_BITS
        logging.getLogger(__name__).warning(
            "specdec_mlx: %s has %.0f MB of weights, which are quantized to %d bits. "
            "draft_bits=%d leaves them as they are stored.",
            name,
            size / 1e6,
            bits,
            UNQUANTIZED,
        )
    _quantize(head, bits, name)
    head.bits = bits


def _quantize(head: nn.Module, bits: int, name: str) -> None:
    if any("scales" in part for part in head.modules()):
        raise HeadError(
            f"{name} is stored in quantized form, so draft_bits={bits} has no effect. Leave it out."
        )

    def how(path: str, part: nn.Module) -> bool | dict[str, Any]:
        routers = ("gate", "router", "classifier", "confidence_head.proj")
        # A router of experts stays exact, because rounding would choose other experts. So does
        # an estimate of confidence, which is a single row.
        if not hasattr(part, "to_quantized") or path.endswith(routers):
            return False
        width = part.weight.shape[-1]
        # MLX's group sizes divide the width of a matrix.
        size = 64 if width % 64 == 0 else 32
        return width % size == 0 and {"group_size": size, "bits": bits}

    nn.quantize(head, class_predicate=how)
