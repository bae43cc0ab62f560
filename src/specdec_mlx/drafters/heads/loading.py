"""Loading of heads: the published formats, the check that a head fits its target, its weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils

from specdec_mlx.contracts import DraftContext, Drafter, FeatureRows, KeysValues
from specdec_mlx.drafters.heads.drafter import (
    Config,
    DraftVocabulary,
    Head,
    HeadDrafter,
    TargetEnds,
    target_ends,
)
from specdec_mlx.drafters.heads.eagle import (
    Eagle3,
    Eagle3Config,
    LayersHead,
    eagle1_family,
)
from specdec_mlx.drafters.heads.early_exit import ExitDrafter, load_exit
from specdec_mlx.drafters.heads.files import HeadFiles
from specdec_mlx.drafters.heads.gemma4_assistant import (
    Gemma4Assistant,
    key_widths,
    layer_args,
)
from specdec_mlx.drafters.heads.mtp import (
    MTPHead,
    family_of,
    layer_prefixes,
    less_one,
    mtp_weights,
    other_formula,
    text_part,
)
from specdec_mlx.drafters.heads.one_pass import (
    DFlash,
    DFlash2,
    DFlashConfig,
    DSpark,
    Medusa,
)
from specdec_mlx.drafters.heads.parallel_sampling import load_pass
from specdec_mlx.drafters.heads.pard import PardDrafter
from specdec_mlx.errors import HeadError, ModelFolderError
from specdec_mlx.models import load_model
from specdec_mlx.options import make_with, split_spec, whole
from specdec_mlx.sampling.distribution import check_draft_temp

Tensors = dict[str, mx.array]

IGNORED = re.compile(
    r"(^|.*\.)(rotary_emb\.|verifier_|t2d|d2t|confidence_head\.)"
)  # tensors that are not needed
# copies of the target's ends
SHARED_ENDS = ("embed_tokens.", "shared_head.head.", "lm_head.")

VOCABULARY_MARGIN, MOST_LAYERS = 512, 1000
"""Most tokens by which vocabularies differ through padding, and most layers or attention heads."""


class HeadSource(NamedTuple):
    """Input of a format's `build`: files, tensors by our names, and the options of `load_head`."""

    files: HeadFiles
    ends: TargetEnds
    tensors: Tensors
    layers: Sequence[int] | None
    pre_norm: bool | None
    norms_less_one: bool | None

    def rows(self, name: str) -> int:
        """Rows of a matrix; 0 if it is missing."""
        return self.tensors[name].shape[0] if name in self.tensors else 0

    def vocabulary(self) -> DraftVocabulary | None:
        """The draft vocabulary, None for the target's own tokens; d2t: how far ids stand apart."""
        apart = self.tensors.get("d2t")
        if apart is None:
            return None
        return DraftVocabulary(apart + mx.arange(apart.shape[0]), self.ends.vocab_size)

    def read_config(self, kind: Any) -> Any:
        """Config of a head that reads several layers, with the `layers` that the caller named."""
        config = kind.read(self.files.config, self.ends.num_layers)
        if self.layers is not None:
            config = replace(config, layers=tuple(self.layers))
        self.check_width(self.columns("fc") / len(config.layers))
        return config

    def columns(self, name: str) -> int:
        """Columns of a matrix, unpacked if it is quantized."""
        columns, bits = self.tensors[f"{name}.weight"].shape[-1], 32
        if f"{name}.scales" in self.tensors:
            written = self.files.config["quantization"]
            own = written.get(name) or written.get(f"model.{name}") or {}
            bits = int({**written, **own}["bits"])
        return columns * 32 // bits

    def check_width(self, width: float) -> None:
        """Raise HeadError for a head that reads states of another width."""
        if width != self.ends.width:
            raise HeadError(
                f"{self.files.name} was trained for a target whose states have {width:g} numbers, "
                f"and those of this one have {self.ends.width}. Use a head that was trained for "
                "this target."
            )


@dataclass(frozen=True)
class Format:
    """A published format of heads.

    told_by: pattern of a config's model types and keys, each key with a "=" after it. build: makes
    a head with random weights. renamed: patterns of the checkpoint's names -> ours. loads: False
    where it is recognised only.
    """

    label: str
    told_by: str
    build: Callable[[HeadSource], Head] | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    loads: bool = True


def known_kind(config: Config) -> str | None:
    """Key of FORMATS, by a config alone; "mtp" for a repository of the layer alone."""
    keys = [*config, *(config.get("dflash_config") or ())]
    named = [
        config.get(k, "")
        for k in ("speculators_model_type", "model_type", "architectures")
    ]
    said = " ".join([*map(str, named), *(f"{key}=" for key in keys)]).lower()
    return next(
        (kind for kind, one in FORMATS.items() if re.search(one.told_by, said)), None
    )


def kind_of(config: Config, names: Collection[str]) -> str | None:
    """Key of FORMATS, by config and tensors; "mtp" for a model with its prediction layer, too."""
    kind = known_kind(config)
    if kind is not None:
        return kind
    if layer_prefixes(config, names):
        return "mtp"
    if any(
        re.fullmatch(r"(medusa_head\.)?\d+\.\d+\.linear\.weight", name)
        for name in names
    ):
        return "medusa"
    if "fc.weight" in names and any(
        name.startswith(("layers.0.", "midlayer.")) for name in names
    ):
        return "eagle3" if any("hidden_norm" in name for name in names) else "eagle"
    return None


def check_sizes(files: HeadFiles, ends: TargetEnds) -> None:
    """Raise HeadError for impossible sizes in the config, and for another vocabulary size."""
    config, size = files.config, ends.vocab_size
    part = config.get("transformer_layer_config") or text_part(config)
    for said in (config, part):
        files.expect(
            "num_hidden_layers", said.get("num_hidden_layers") or 1, 1, MOST_LAYERS
        )
        for key, count in said.items():
            # MLX's attention divides by them
            if key.endswith("_heads") and count is not None:
                files.expect(key, count, 1, MOST_LAYERS)
    if abs((part.get("vocab_size") or size) - size) > VOCABULARY_MARGIN:
        raise HeadError(
            f"{files.name} was trained for a vocabulary of {part['vocab_size']} tokens, and this "
            f"target has {size}. Use a head that was trained for this target."
        )


def _eagle3(source: HeadSource) -> Head:
    config = source.read_config(Eagle3Config)
    embeddings, head = source.rows("embed_tokens.weight"), source.rows("lm_head.weight")
    return Eagle3(config, source.ends, source.vocabulary(), embeddings, head)


def _eagle(source: HeadSource) -> Head:
    source.check_width(source.files.config["hidden_size"])
    has_biases = "body.layers.0.self_attn.q_proj.bias" in source.tensors
    config = source.files.config | {"qkv_bias": has_biases}
    rows, bias = source.rows("embed_tokens.weight"), "projection.bias" in source.tensors
    family = eagle1_family(config)
    return MTPHead(family, config, source.ends, own_embeddings=rows, has_bias=bias)


def _dflash(source: HeadSource, head: type[DFlash] = DFlash) -> Head:
    config = source.read_config(DFlashConfig)
    source.files.expect(
        "mask_token_id", config.mask_token, 0, source.ends.vocab_size - 1
    )
    source.files.expect("block_size", config.block_size, 2, 1024)
    return head(config, source.ends, source.vocabulary())


def _gemma4(source: HeadSource) -> Head:
    files, ends = source.files, source.ends
    source.check_width(files.config.get("backbone_hidden_size", ends.width))
    for kind, width in key_widths(layer_args(files.config)).items():
        cache = ends.last_caches.get(kind)
        if cache is None or cache.width != width:
            has = "no such cache" if cache is None else f"keys of {cache.width} numbers"
            raise HeadError(
                f"{files.name} attends to keys of {width} numbers of the target's last layer with "
                f"{kind.replace('_', ' ')}, and this target has {has}. Use an assistant that was "
                "trained for this target."
            )
    order = source.tensors.get("masked_embedding.token_ordering", mx.zeros(1, mx.int32))
    last = files.config["text_config"]["vocab_size"] - 1
    for token in (order.min().item(), order.max().item()):
        files.expect("a token of token_ordering", token, 0, last)
    return Gemma4Assistant(files.config, ends)


def _medusa(source: HeadSource) -> Head:
    source.check_width(source.rows("blocks.0.0.weight"))
    blocks = [name.split(".") for name in source.tensors if name.startswith("blocks.")]
    heads, layers = (
        len({block[1] for block in blocks}),
        len({block[2] for block in blocks}),
    )
    return Medusa(
        heads, layers, source.ends, own_heads=source.rows("lm_heads.0.weight")
    )


def _mtp(source: HeadSource) -> Head:
    files, found = source.files, family_of(source.files.config)
    config, prefixes = text_part(files.config), files.own_layers()
    if found is None or not prefixes:
        raise HeadError(refusal(files))
    source.check_width(config["hidden_size"])
    family = found[1]
    head = MTPHead(family, config, source.ends, num_layers=len(prefixes))
    if (vocabulary := source.vocabulary()) is not None:
        head.choose_among(vocabulary)
    begins = (*(f"{theirs}." for theirs in family.names.values()), family.layer)
    for depth, prefix in enumerate(prefixes):
        rests = {
            n: n.removeprefix(prefix) for n in files.weight_map if n.startswith(prefix)
        }
        wanted = [n for n, rest in rests.items() if rest.startswith(begins)]
        tensors, converted = files.read(
            n for n in wanted if not rests[n].startswith(SHARED_ENDS)
        )
        add_one = source.norms_less_one
        if add_one is None:
            # conversions of a layer alone add the one
            is_alone = converted and not prefix
            is_original = not (
                converted or files.is_apart or "quantization" in files.config
            )
            may_be = family.norms_less_one and not is_alone
            add_one = may_be and (is_original or less_one(tensors))
        weights = mtp_weights(family, config, tensors, prefix, add_one=add_one)
        ours = f"further.{depth - 1}." if depth else ""
        source.tensors.update({ours + name: x for name, x in weights.items()})
    return head


def refusal(files: HeadFiles, kind: str | None = None) -> str:
    """The error for files that cannot be loaded; kind: key of FORMATS, None for none."""
    config, model_type = files.config, files.config.get("model_type")
    if kind is not None:
        return f"{files.name} holds {FORMATS[kind].label}. That cannot be loaded yet."
    if (found := family_of(config)) is not None:
        prefix = found[1].prefix_at(text_part(config))
        where = ", which conversions leave out"
        if files.is_apart:
            where = f" in {files.list_file}, which has {min(files.weight_map, default='none')}"
        return (
            f"{files.name} is a {found[0]} model without the tensors of its multi-token prediction "
            f"layer ({prefix}...){where}. Give the original repository, or one that has just this "
            "layer."
        )
    if (other := other_formula(config)) is not None:
        return (
            f"{files.name}: the multi-token prediction of {model_type} {other}. It cannot be "
            "loaded yet; use a draft model, or a drafter that needs none, such as 'prompt-lookup'."
        )
    known = ", ".join(kind for kind, one in FORMATS.items() if one.loads)
    return (
        f"{files.name} is no head of a known kind ({known}): its config.json has model_type "
        f"{model_type!r}. A small model with the target's tokenizer is loaded by mlx_lm.load and "
        "drafts with ModelDrafter."
    )


_STYLE = {r"^model\.": "", r"midlayer\.": "layers.0."}
_EAGLE = _STYLE | {r"^fc\.": "projection.", r"^layers\.": "body.layers."}
_EAGLE3 = _STYLE | {r"layers\.0\.hidden_norm": "hidden_norm"}
_MEDUSA = {
    r"^(medusa_head\.)?(\d+)\.(\d+)\.linear\.(\w+)$": r"blocks.\2.\3.\4",
    r"^(medusa_head\.)?(\d+)\.\d+\.(\w+)$": r"lm_heads.\2.\3",
}

FORMATS: dict[str, Format] = {
    "dspark": Format(
        "DSpark, a block with a Markov chain",
        # dspark_... are keys of a target that contains one
        r"dspark(?!_)|\bmarkov_rank=",
        partial(_dflash, head=DSpark),
        _STYLE,
    ),
    "dflash2": Format(
        "DFlash 2", r"dflash2|\bselector_rank=", partial(_dflash, head=DFlash2), _STYLE
    ),
    "dflash": Format("DFlash", "dflash", _dflash, _STYLE),
    "peagle": Format(
        "P-EAGLE, which drafts in parallel", "peagle|p_eagle", loads=False
    ),
    "eagle3": Format("EAGLE-3", r"eagle3|\bdraft_vocab_size=", _eagle3, _EAGLE3),
    "eagle": Format("EAGLE", "(?!)", _eagle, _EAGLE),  # told by its tensors alone
    "gemma4_assistant": Format(
        "Gemma 4 assistant", "gemma4_?assistant", _gemma4, _STYLE
    ),
    "pard2": Format(
        "PARD-2, which reads the target", r"\bpard2_target_layers=", loads=False
    ),
    "pard": Format("PARD", r"\bpard_token="),
    "hydra": Format(
        "Hydra heads, which see each other", r"\bhydra_num_heads=", loads=False
    ),
    "medusa": Format("Medusa", "medusa", _medusa, _MEDUSA),
    "exit": Format("trained exit", r"\bexit_layer="),
    "pass": Format("PaSS, look-ahead embeddings", r"\blook_ahead="),
    "mtp": Format("multi-token prediction", r"_mtp( |$)", _mtp),
}
"""Name of a format -> how it is read; the first that a config matches counts."""


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
    torch_files: bool = True,
) -> HeadDrafter | PardDrafter | ExitDrafter:
    """A trained head as a drafter for a loaded target; `describe()` says what was recognised.

    Args:
        path_or_repo: folder or Hugging Face name, of a head, or of a target with its multi-token
            prediction layer: the original repository, or a conversion that kept it; or a file in
            such a folder. Only files that hold the head are fetched.
        target: the model to draft for, which lends it embeddings and head.
        draft_bits: quantize the head's matrices to so many bits.
        greedy: propose the argmax, a point mass, whatever the target's sampling.
        draft_temp: temperature of the drafts, None for the target's own.
        branches: most tokens at a place; with more than one its drafts are trees.
        layers: of the target, from 0, whose outputs it reads, where its config is wrong.
        pre_norm: it reads the state before the final norm; None: its family's default.
        norms_less_one: its norms are stored as w - 1; None: its family's default.
        torch_files: read files of `torch.save`, by torch, where there are no safetensors.

    Raises:
        HeadError: it is not known, not complete, or does not fit the target.
    """
    check_draft_temp(draft_temp)
    whole("branches", branches, 1)
    options = {"greedy": greedy, "draft_temp": draft_temp, "branches": branches}
    files = HeadFiles(path_or_repo, torch_files=torch_files)
    try:
        return _load(
            files, target, draft_bits, (layers, pre_norm, norms_less_one), options
        )
    except (HeadError, ModelFolderError):
        raise
    # tensors that do not fit; a damaged file may fail anywhere
    # it may name every tensor
    except Exception as error:
        fault = shorten(f"{type(error).__name__}: {error}", 400)
        raise HeadError(
            f"{files.name}: its config.json and its tensors make no head that runs on this target "
            f"({fault}). It is another variant, was trained for another target, or is damaged."
        ) from error


def _load(
    files: HeadFiles,
    target: nn.Module,
    bits: int | None,
    variant: Any,
    options: dict[str, Any],
) -> HeadDrafter | PardDrafter | ExitDrafter:
    kind = kind_of(files.config, files.weight_map)
    if kind == "exit":
        return load_exit(files, target, **options)
    if kind == "pard":
        model, tokenizer = load_model(files.name)
        mask = files.config["pard_token"]
        files.expect("pard_token", mask, 0, target_ends(model).vocab_size - 1)
        _quantize(model, bits)
        return PardDrafter(model, tokenizer, mask_token=mask, **options)
    if kind == "pass":
        check_sizes(files, target_ends(target))
        return load_pass(files, target, (bits, *variant), **options)
    form = FORMATS.get(kind or "")
    if form is None or form.build is None:
        raise HeadError(refusal(files, kind))
    ends = target_ends(target)
    check_sizes(files, ends)
    tensors, _ = files.read(n for n in files.weight_map if form.renamed or n == "d2t")
    for old, new in form.renamed.items():
        tensors = {re.sub(old, new, name): value for name, value in tensors.items()}
    source = HeadSource(files, ends, tensors, *variant)
    head = form.build(source)
    for layer in head.features.layers:
        files.expect("a layer that it reads", layer, 0, ends.num_layers - 1)
    if source.pre_norm is not None and not isinstance(head, LayersHead):
        head.pre_norm = source.pre_norm
    _set_weights(head, tensors, ends.dtype)
    _quantize(head, bits)
    drafter = HeadDrafter(head, name=files.name, **options)
    mx.eval(head.parameters())
    _try_out(drafter, ends)
    return drafter


def _try_out(drafter: HeadDrafter, ends: TargetEnds) -> None:
    """Draft once after states of zeros: some contradictions of a config show in a pass only."""
    head: Any = drafter.head
    blank = mx.zeros((3, ends.width), ends.dtype)
    held = {}
    for cache in head.get("reads", {}).values():
        nothing = mx.zeros(
            (1, head.layers[0].self_attn.n_kv_heads, 1, cache.width), ends.dtype
        )
        held[cache.index] = KeysValues(nothing, nothing, 1)
    rows = dict.fromkeys(head.features.layers, blank)
    session = drafter.begin([0] * 4, DraftContext(vocab_size=ends.vocab_size))
    session.see(FeatureRows(rows, blank, keys_values=held.__getitem__))
    mx.eval(session.propose(3).tokens)


def named_head(spec: str, path_or_repo: str | Path, target: nn.Module) -> Drafter:
    """`load_head` with typed options, as `model:branches=4`; ValueError for unknown ones."""
    name, options = split_spec(spec)
    return make_with("drafter", name, partial(load_head, path_or_repo, target), options)


def config_of(path_or_repo: str | Path) -> dict[str, Any]:
    """The config of a folder or repository; empty if it cannot be read."""
    try:
        return HeadFiles(path_or_repo).config
    except HeadError:
        return {}


def is_head(path_or_repo: str | Path) -> bool:
    """True for a folder or repository with a head's config, and for a file in a model's folder."""
    try:
        files = HeadFiles(path_or_repo)
        return (
            known_kind(files.config) is not None
            or Path(files.name).expanduser().is_file()
        )
    except HeadError:
        return False


def _set_weights(head: Head, tensors: Tensors, dtype: mx.Dtype) -> None:
    """Give a head its weights, in the target's type; ValueError if they do not fit."""
    unused = tuple(name for name in SHARED_ENDS if name.partition(".")[0] not in head)
    weights = {
        n: x
        for n, x in tensors.items()
        if not (IGNORED.match(n) or n.startswith(unused))
    }

    def stored(path: str, part: nn.Module) -> Any:
        is_packed = hasattr(part, "to_quantized") and f"{path}.scales" in weights
        # not before mlx-lm 0.32
        infer = getattr(mlx_lm_utils, "infer_quant_config", None)
        return is_packed and (infer is None or infer(path, part, weights))

    nn.quantize(head, class_predicate=stored)
    keeps_type = "e_score_correction_bias"  # a sum that chooses experts
    for name, x in weights.items():
        if mx.issubdtype(x.dtype, mx.floating) and not name.endswith(keeps_type):
            weights[name] = x.astype(dtype)
    head.load_weights(list(weights.items()))


def _quantize(head: nn.Module, bits: int | None) -> None:
    """Quantize the matrices, but not the routers of experts."""
    if bits is None:
        return

    def how(path: str, part: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(part, "to_quantized") or path.endswith(
            ("gate", "router", "classifier")
        ):
            return False
        width = part.weight.shape[-1]
        size = next((size for size in (64, 32) if width % size == 0), None)
        return size is not None and {"group_size": size, "bits": bits}

    nn.quantize(head, class_predicate=how)
