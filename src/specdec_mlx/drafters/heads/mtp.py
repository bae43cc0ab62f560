"""Multi-token prediction: extra layers of a model, trained to predict the token after the next.

    in(t) = projection [embedding_norm(embed(x_{t+1})), hidden_norm(h_t)]
    s(t)  = norm(decoder_layer(in(t))),  logits of x_{t+2} = head(s(t))

(DeepSeek-V3, arXiv 2412.19437, equations 21 to 23.) h_t is the target's state after its final norm;
s(t) takes its place further on. The decoder layer is a model of mlx-lm's with one layer. mlx-lm
drops these tensors, so they are read from the original repository, or from where conversions keep
them (`files.BESIDE`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, product, takewhile
from typing import Any, Literal, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache

from specdec_mlx.drafters.heads.drafter import Config, RecurrentHead, Variation, is_norm
from specdec_mlx.models.anatomy import Anatomy

T = TypeVar("T")
Further = Literal["again", "chained", "side by side"]
SLIDING = "sliding_attention"


@dataclass(frozen=True)
class MTPFamily:
    """The prediction layers of a family of models.

    Attributes:
        architecture: module of mlx_lm.models that has the decoder layer.
        prefix: prefix of its tensors in the original repository. {layer} counts all layers of the
            target, and {depth} counts prediction layers.
        names: names in this package and in the checkpoint. {last} is the last decoder layer.
            A norm without a name does not exist. With "lm_head" the layer has its own matrix.
        layer: prefix of the decoder layer in the checkpoint.
        here: prefix of the decoder layer in mlx-lm's model.
        renamed: beginnings of names in the decoder layer, and mlx-lm's names.
        changes: changes of the config, for a model of this layer only.
        adapted: changes that model.
        make_cache: makes the caches of that model.
        body: mlx-lm's name of the layers in that model.
        final_norm: mlx-lm's name of the final norm.
        attributes: attributes to set on the body.
        hidden_first: the state comes before the embedding.
        norms_less_one: norms are stored as w - 1.
        pre_norm: the layer reads states before the final norm, and its own final norm belongs to
            the output layer.
        further: the layer for more tokens. "again" uses the same layer. "chained" has a layer for
            each token, which reads the states of the layer before it. "side by side" has a layer
            for each token, which reads the target's states.
        label: name of the kind in messages.
    """

    architecture: str
    prefix: str
    names: Mapping[str, str]
    layer: str = ""
    here: str = "layers.0."
    renamed: Mapping[str, str] = field(default_factory=dict)
    changes: Config | Callable[[Config, int], Config] = field(default_factory=dict)
    adapted: Callable[[nn.Module], None] = lambda model: None
    make_cache: Callable[[nn.Module], list[Any]] = make_prompt_cache
    body: str = "model"
    final_norm: str = "norm"
    attributes: Mapping[str, Any] = field(default_factory=dict)
    hidden_first: bool = False
    norms_less_one: bool = False
    pre_norm: bool = False
    further: Further = "again"
    label: str = "multi-token prediction"

    def prefix_at(self, config: Config, depth: int = 0, form: str | None = None) -> str:
        layer = int(config.get("num_hidden_layers") or 0) + depth
        form = self.prefix if form is None else form
        return form.format(layer=layer, depth=depth)

    def prefixes_in(self, names: Collection[str], config: Config) -> list[str]:
        """Prefixes of the layers among these tensors, in order."""
        # Prefixes in the original, in conversions, and in a repository with only the layer
        forms = (self.prefix, "mtp.layers.{depth}.", "mtp.", "")
        for outer, form in product(("", "language_model.", "model."), forms):
            at = partial(self.prefix_at, config, form=outer + form)
            if f"{at(0)}{self.names['projection']}.weight" in names:
                depths = count() if self.further != "again" and "{" in form else [0]
                return [
                    *takewhile(
                        lambda prefix: any(name.startswith(prefix) for name in names),
                        map(at, depths),
                    )
                ]
        return []

    def ours(self, num_layers: int = 1) -> dict[str, str]:
        """Map from beginnings of the checkpoint's names, without prefix, to names in `MTPHead`.

        The first beginning that fits counts. `num_layers` is the number of decoder layers.
        """
        ours = {} if self.pre_norm else {"norm": f"body.{self.final_norm}"}
        renames = dict[str, str]()
        for part, name in self.names.items():
            old, new = name.format(last=num_layers - 1), f"{ours.get(part, part)}."
            renames |= {f"{old}.": new, f"{old.removeprefix('transformer.')}.": new}
        for old, new in {**self.renamed, "": ""}.items():
            renames[self.layer + old] = f"body.{self.here}{new}"
        return renames


def _names(theirs: str) -> dict[str, str]:
    ours = ("embedding_norm", "hidden_norm", "projection", "norm", "lm_head")
    return dict(zip(ours, theirs.split(), strict=False))


_QWEN = _names("pre_fc_norm_embedding pre_fc_norm_hidden fc norm")
_DEEPSEEK = _names("enorm hnorm eh_proj shared_head.norm")
_LING = _names("enorm hnorm eh_proj final_layernorm")
_MIMO = _names("token_layernorm hidden_layernorm input_proj final_layernorm")
_ERNIE = _names("mtp_emb_norm.0 mtp_hidden_norm.0 mtp_linear_proj.0")
_HALVED = ("input_layernorm", "self_attn", "post_attention_layernorm")


def _deepseek(architecture: str, names: Mapping[str, str] = _DEEPSEEK, **changes: Any) -> MTPFamily:
    """DeepSeek's kind: a layer with experts, stored after the target's last layer."""
    changes = {"first_k_dense_replace": 0, **changes}
    return MTPFamily(architecture, "model.layers.{layer}.", names, changes=changes)


def _exaone_moe(config: Config, depth: int) -> Config:
    """The layer's kind of attention, and the kinds in the target."""
    kind, *_ = config.get("mtp_layer_types") or ["full_attention"]
    windows = config.get("mtp_sliding_windows")
    # mlx-lm decides on rotation by the target's kinds, so these stay in the list.
    window = {"sliding_window": windows[0]} if kind == SLIDING and windows else {}
    return {"is_moe_layer": [False], "layer_types": [kind, *config["layer_types"]], **window}


class HalfLayer(nn.Module):  # type: ignore[misc]
    """One of two attentions and dense networks of a LongCat-Flash layer (arXiv 2509.01322)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for part in (*_HALVED, "mlps"):
            self[part] = layer[part][:1]

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> Any:
        x = x + self.self_attn[0](self.input_layernorm[0](x), mask=mask, cache=cache[0])
        return x + self.mlps[0](self.post_attention_layernorm[0](x))


def keep_half_of_its_layer(model: nn.Module) -> None:
    # A prediction layer of LongCat-Flash is half of a decoder layer.
    model.model.layers = [HalfLayer(model.model.layers[0])]


def _step(config: Config, depth: int) -> Config:
    """The layer's own entries of the lists that have an entry for each layer."""
    at = config["num_hidden_layers"] + depth
    names = "layer_types rope_theta partial_rotary_factors swiglu_limits swiglu_limits_shared"
    changes: dict[str, Any] = {"moe_layers_enum": None, "layer_types": [SLIDING]}
    for name in names.split():
        values = config.get(name)
        if values and isinstance(values, list):
            # Some lists end with the target; the last entry then serves the prediction layers.
            changes[name] = values[at : at + 1] or values[-1:]
    return changes


def _nemotron_h(config: Config, depth: int) -> Config:
    kinds = {"hybrid_override_pattern": None, "layer_types": None}
    if config.get("mtp_layers_block_type"):
        return kinds | {"layers_block_type": config["mtp_layers_block_type"]}
    pattern = config.get("mtp_hybrid_override_pattern") or "*E"
    return kinds | {"hybrid_override_pattern": list(pattern)}


_EXPERTS = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa")

_QWEN_LAYER = MTPFamily("llama", "mtp.", _QWEN, layer="layers.0.")

# The layer has full attention, although most layers of the target are recurrent.
_QWEN3_5 = replace(
    _QWEN_LAYER,
    architecture="qwen3_5_moe",
    changes={"full_attention_interval": 1},
    norms_less_one=True,
    attributes={"ssm_idx": None},
)
_DENSE = {"full_attention_interval": 1, "mlp_only_layers": [], "decoder_sparse_step": 1}

FAMILIES: dict[str, MTPFamily] = {
    "qwen3_next": replace(_QWEN3_5, architecture="qwen3_next", changes=_DENSE),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), _QWEN3_5),
    **{name: _deepseek(name, moe_layer_freq=1) for name in _EXPERTS},
    "bailing_moe": _deepseek("bailing_moe", _LING),
    "bailing_hybrid": _deepseek("bailing_hybrid", _LING, layer_group_size=1),
    "bailing_moe_v3": _deepseek("bailing_moe_v3", _LING, layer_group_size=1),
    "llama_mtp": _QWEN_LAYER,
    "mimo": MTPFamily("mimo", "model.mtp_layers.0.", _MIMO, hidden_first=True),
    "ernie4_5_moe": MTPFamily("ernie4_5", "model.", _ERNIE, layer="mtp_block.0."),
    "exaone_moe": replace(_QWEN_LAYER, architecture="exaone_moe", changes=_exaone_moe),
    "longcat_flash": MTPFamily(
        "longcat_flash",
        "model.mtp.",
        _names("layers.0.enorm.m layers.0.hnorm.m layers.0.eh_proj norm"),
        layer="layers.0.",
        renamed={"transformer_layer.mlp.": "mlps.0.", **{f"{n}.": f"{n}.0." for n in _HALVED}},
        changes={"num_layers": 1},
        adapted=keep_half_of_its_layer,
        make_cache=lambda model: [CacheList(KVCache())],
    ),
    "step3p5": MTPFamily(
        "step3p5",
        "model.layers.{layer}.",
        _names("enorm hnorm eh_proj transformer.shared_head.norm transformer.shared_head.output"),
        changes=_step,
        norms_less_one=True,
        pre_norm=True,
        further="chained",
    ),
    "nemotron_h": MTPFamily(
        "nemotron_h",
        "mtp.",
        _names("layers.0.enorm layers.0.hnorm layers.0.eh_proj layers.{last}.final_layernorm"),
        layer="layers.",
        here="layers.",
        changes=_nemotron_h,
        body="backbone",
        final_norm="norm_f",
        # No cache belongs to a recurrent layer here, so none gives a mask for such layers.
        attributes={"ssm_idx": slice(0)},
    ),
    "mimo_v2_flash": MTPFamily(
        "mimo_v2_flash",
        "model.mtp.layers.{depth}.",
        _LING,
        renamed={"pre_mlp_layernorm.": "post_attention_layernorm."},
        # mlx-lm makes caches for both kinds of attention.
        changes={"hybrid_layer_pattern": [1, 0], "moe_layer_freq": [0]},
        attributes={"ga_idx": 0},
        further="side by side",
    ),
}
"""Model type -> its layer. "llama_mtp" was trained for a model that has none itself."""

OTHER_FORMULAS = {
    "longcat_flash_ngram": "reads embeddings of several tokens, in a way that is not known here",
    "kimi_linear": "is not in its repository",
    "kimi_k3": "is not in its repository",
    "deepseek_v4": "carries four streams of states, and mlx-lm has no deepseek_v4 to make it of",
    "qwen4_exp": "reads all streams of its states, and mlx-lm has no qwen4_exp to make it of",
    "glm5_next": "needs layers of glm5_next, which mlx-lm does not have",
    "hy_v4": "needs layers of hy_v4 (Hunyuan V4), which mlx-lm does not have",
    "inkling": "needs layers of inkling, which mlx-lm does not have",
    "deepseek_v41": "is DSpark, which drafts a block and corrects it by a Markov chain",
}
"""Model type -> why its multi-token prediction is refused."""


def text_part(config: Config) -> Config:
    """The part of a config that describes layers of text."""
    # Speculators keeps the config of a head's layers apart.
    part = config.get("transformer_layer_config")
    return part or config.get("text_config") or config


def of_type(config: Config, table: Mapping[str, T]) -> T | None:
    for part in (config, text_part(config)):
        name = str(part.get("model_type"))
        # A prediction layer, or the text part of a model with images, may have a type of its own.
        for known in (name, name.removesuffix("_mtp").removesuffix("_text")):
            if known in table:
                return table[known]
    return None


def layer_prefixes(config: Config, names: Collection[str]) -> list[str]:
    """Prefixes of the prediction layers among a model's tensors."""
    family = of_type(config, FAMILIES)
    return [] if family is None else family.prefixes_in(names, text_part(config))


@dataclass(frozen=True)
class Shell:
    """The mlx-lm model that a layer was made in. It makes caches and converts weights."""

    model: nn.Module


class MTPHead(RecurrentHead):
    """A multi-token prediction layer, and the layers for more tokens.

    Args:
        family: the family of the model.
        config: config of the target, as in the original repository.
        anatomy: parts of the target.
        depth: number of prediction layers before this layer.
        num_layers: number of prediction layers.
        has_bias: the projection has a bias.
    """

    def __init__(
        self,
        family: MTPFamily,
        config: Config,
        anatomy: Anatomy,
        depth: int = 0,
        num_layers: int = 1,
        *,
        has_bias: bool = False,
    ) -> None:
        super().__init__()
        shell = one_layer_model(family, config, depth)
        body = getattr(shell, family.body)
        width, eps = anatomy.width, body[family.final_norm].eps
        embeddings = ("embed_tokens", "word_embeddings", "embeddings")
        # The decoder layer gets `in(t)` in place of token ids.
        body[next(name for name in embeddings if name in body)] = nn.Identity()
        for name, value in family.attributes.items():
            setattr(body, name, value)
        self.family, self.pre_norm = family, family.pre_norm
        self.width, self.anatomy = width, anatomy
        around = {"embedding_norm", "hidden_norm"} & family.names.keys()
        if self.pre_norm:
            around.add("norm")
        for name in ("embedding_norm", "hidden_norm", "norm"):
            self[name] = nn.RMSNorm(width, eps) if name in around else nn.Identity()
        # With `pre_norm` the next step reads s(t) before the norm, so `draft_logits` applies it.
        if self.pre_norm or "norm" not in family.names:
            body[family.final_norm] = nn.Identity()
        self.projection = nn.Linear(2 * width, width, bias=has_bias)
        self.body = body
        if "lm_head" in family.names:
            self.add_weights(logits=anatomy.vocab_size)
        # A dataclass hides the model's other parts from the head's parameters.
        self.shell = Shell(shell)
        self.moves_on = self.grows_trees = family.further == "again"
        self.chained = family.further != "side by side"
        depths = range(depth + 1, depth + num_layers)
        self.further = [MTPHead(family, config, anatomy, depth) for depth in depths]
        self.kind = family.label if self.moves_on else f"layered {family.label}"

    def forward(self, states: mx.array, tokens: mx.array, cache: list[Any]) -> Any:
        """States [batch, n, D], which replace the target's states after its final norm."""
        parts = [self.embedding_norm(self.embed(tokens)), self.hidden_norm(states)]
        if self.family.hidden_first:
            parts.reverse()
        # in(t) = projection [embedding_norm(embed(x_{t+1})), hidden_norm(h_t)]
        return self.body(self.projection(mx.concatenate(parts, -1)), cache)

    def draft_logits(self, states: mx.array) -> Any:
        return super().draft_logits(self.norm(states))

    def full_caches(self) -> list[Any]:
        return self.family.make_cache(self.shell.model)

    def notes(self) -> list[str]:
        notes = [f"{self.family.architecture} layer"]
        if not self.moves_on:
            notes = [f"{len(self.levels)} {notes[0]}s, one for each token"]
        notes += [] if self.pre_norm else ["reads the state after the final norm"]
        notes += super().notes()
        return [*notes, "the state comes first"] if self.family.hidden_first else notes

    def variations(self) -> Iterator[Variation]:
        less = "this file looks already shifted; load it with norms_less_one=False"
        more = "its norms look stored as w - 1; load it with norms_less_one=True"
        order = "its projection looks written for the other order, which is another family's"
        other = replace(self.family, hidden_first=not self.family.hidden_first)
        if "hidden_norm" in self.family.names:
            yield Variation("norms less one", less, self.otherwise(-1.0))
            yield Variation("norms plus one", more, self.otherwise(1.0))
        yield from super().variations()
        head = self.otherwise(family=other)
        yield Variation("the other order of state and embedding", order, head)


def model_of(arguments: Config) -> nn.Module:
    module = importlib.import_module(f"mlx_lm.models.{arguments['model_type']}")
    return module.Model(module.ModelArgs.from_dict(arguments))


def one_layer_model(family: MTPFamily, config: Config, depth: int = 0) -> nn.Module:
    """A model of the family's architecture with the prediction layer only, and random weights."""
    changes = family.changes(config, depth) if callable(family.changes) else family.changes
    alone = {**config, "num_hidden_layers": 1, **changes}
    model = model_of(alone | {"model_type": family.architecture})
    family.adapted(model)
    return model


def mtp_weights(
    head: MTPHead, tensors: Mapping[str, mx.array], prefix: str, *, add_one: bool
) -> dict[str, mx.array]:
    """A layer's weights by the head's names. With `add_one`, norms are stored as w - 1."""
    family, shell = head.family, head.shell.model
    inside, ours = f"body.{family.here}", family.ours(len(head.body.layers))
    weights, convert = {}, {}
    for name, value in tensors.items():
        rest = name.removeprefix(prefix)
        old = next(old for old in ours if rest.startswith(old))
        new = ours[old] + rest.removeprefix(old)
        # mlx-lm's own conversion takes the decoder layer. Norms go around it, because some
        # conversions add 1 to them.
        if new.startswith(inside) and not is_norm(new, value):
            convert[family.body + new.removeprefix("body")] = value
        else:
            weights[new] = value
    if hasattr(shell, "sanitize"):
        convert = shell.sanitize(convert)
    for name, value in convert.items():
        weights[inside + name.partition(family.here)[2]] = value
    stack_experts(weights)
    return {n: x + 1 if add_one and is_norm(n, x) else x for n, x in weights.items()}


def stack_experts(weights: dict[str, mx.array]) -> None:
    """Stack experts that are stored one by one, quantized experts too."""
    for first in [name for name in weights if ".experts.0." in name]:
        names = (first.replace(".experts.0.", f".experts.{i}.") for i in count())
        each = [weights.pop(name) for name in takewhile(weights.__contains__, names)]
        weights[first.replace(".experts.0.", ".switch_mlp.")] = mx.stack(each)


def less_one(tensors: Mapping[str, mx.array]) -> bool:
    """Guess from their means whether norms are stored as w - 1."""
    suffixes = ("layernorm.weight", "q_norm.weight", "k_norm.weight")
    means = [x.astype(mx.float32).mean() for name, x in tensors.items() if name.endswith(suffixes)]
    # Means in heads published for Qwen 3.5 and 3.6 are up to 0.6, or from 1.3 (MTPLX, issue 301).
    return bool(means) and bool(mx.stack(means).mean() < 0.95)
