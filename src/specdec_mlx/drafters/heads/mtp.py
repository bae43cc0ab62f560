"""Multi-token prediction: the layer that a model was trained with to see one token further.

    in(t) = projection [embedding_norm(embed(x_{t+1})), hidden_norm(h_t)]
    s(t)  = norm(decoder_layer(in(t))),  logits of x_{t+2} = head(s(t))

(DeepSeek-V3, arXiv 2412.19437, equations 21 to 23.) h_t is the target's state after its final norm,
and s(t) takes its place when the layer drafts further. Step reads states before that norm, and its
own norm belongs to the head. The decoder layer is a model of mlx-lm's with one layer, whose
embedding passes on what it is given: its attention, experts, masks and caches are the target's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.drafters.heads.drafter import FinalStateHead, Head
from specdec_mlx.drafters.heads.mtp_families import MTPFamily
from specdec_mlx.drafters.heads.recurrent import RecurrentHead
from specdec_mlx.drafters.heads.target_ends import DraftVocabulary, TargetEnds
from specdec_mlx.drafters.heads.variations import Variation, is_norm, shifted_norms
from specdec_mlx.target.strategies import leaves

LAYER = "layers.0."
EMBEDDINGS = ("embed_tokens", "word_embeddings", "embeddings")
"""What mlx-lm's models call them."""


class MTP(FinalStateHead, RecurrentHead):
    """One or several such layers.

    family: how they are written. levels: those that draft, each an `MTPHead`.
    """

    family: MTPFamily

    def variations(self) -> list[Variation]:
        """Norms, the state that it reads, the order, and the first position."""
        order = replace(self.family, hidden_first=not self.family.hidden_first)
        return [
            *shifted_norms(self),
            *super().variations(),
            Variation(
                "the other order of state and embedding",
                "its projection looks written for the other order, which is another family's",
                self.levels,
                {"family": order},
            ),
            Variation(
                "no embedding at position 0",
                "it looks trained without the embedding at position 0, as some engines run it",
                self.levels,
                {"skips_first": True},
            ),
        ]


class MTPHead(MTP):
    """A multi-token prediction layer.

    Args:
        family: how it is written.
        config: of the target, as in the original repository.
        ends: of the target.
        depth: how many such layers draft before it.

    skips_first: True if it does not read the embedding at position 0.
    """

    kind = "multi-token prediction"
    skips_first = False

    def __init__(
        self, family: MTPFamily, config: Mapping[str, Any], ends: TargetEnds, depth: int = 0
    ) -> None:
        """Random weights."""
        super().__init__()
        shell = one_layer_model(family, config, depth)
        body = getattr(shell, family.body)
        width, eps = ends.width, body[family.final_norm].eps
        body[next(name for name in EMBEDDINGS if name in body)] = nn.Identity()
        for name, value in family.attributes.items():
            setattr(body, name, value)
        self.norm = nn.RMSNorm(width, eps) if family.pre_norm else nn.Identity()
        if family.pre_norm or not family.has_final_norm:
            body[family.final_norm] = nn.Identity()
        self.family = family
        self.width = width
        self.ends = ends
        self.embedding_norm = nn.RMSNorm(width, eps)
        self.hidden_norm = nn.RMSNorm(width, eps)
        self.projection = nn.Linear(2 * width, width, bias=False)
        self.body = body
        if "head" in family.names:
            self.head = nn.Linear(width, ends.vocab_size, bias=False)
        self.pre_norm = family.pre_norm
        self._make_cache: Callable[[], list[Any]] = lambda: list(make_prompt_cache(shell))

    def forward(self, states: mx.array, tokens: mx.array, cache: list[Any]) -> mx.array:
        """States [batch, n, D] in place of the target's after its final norm."""
        embedded = self.ends.embed(tokens)
        if self.skips_first and next(leaves(cache)).offset == 0:
            embedded = mx.where(mx.arange(tokens.shape[-1])[:, None] > 0, embedded, 0)
        parts = [self.embedding_norm(embedded), self.hidden_norm(states)]
        if self.family.hidden_first:
            parts.reverse()
        made: mx.array = self.body(self.projection(mx.concatenate(parts, -1)), cache)
        return made

    def draft_logits(self, states: mx.array) -> mx.array:
        """Logits [..., Vd] of states [..., D], by the target's head or its own."""
        states = self.norm(states)
        return self.head(states) if "head" in self else self.ends.logits(states)

    def choose_among(self, vocabulary: DraftVocabulary) -> None:
        """Propose only these of the target's tokens, so that there are fewer logits to make."""
        self.vocabulary = vocabulary
        self.ends = self.ends.narrowed(vocabulary.ids)

    def make_cache(self) -> list[Any]:
        """As the target makes it for such a layer."""
        return self._make_cache()

    def notes(self) -> list[str]:
        """What kind of layer, and what it reads."""
        where = "before" if self.pre_norm else "after"
        notes = [f"{self.family.architecture} layer", f"reads the state {where} the final norm"]
        notes += Head.notes(self)
        return notes + (["the state comes first"] if self.family.hidden_first else [])


class MTPStack(MTP):
    """Multi-token prediction layers that draft one token each.

    Args:
        family: how they are written.
        config: of the target, as in the original repository.
        ends: of the target.
        num_layers: how many there are.
    """

    kind = "layered multi-token prediction"
    grows_trees = False
    moves_on = False

    def __init__(
        self, family: MTPFamily, config: Mapping[str, Any], ends: TargetEnds, num_layers: int
    ) -> None:
        """Random weights."""
        super().__init__()
        self.family = family
        self.ends = ends
        self.chained = family.further == "chained"
        self.pre_norm = family.pre_norm
        self.layers = [MTPHead(family, config, ends, depth) for depth in range(num_layers)]

    @property
    def levels(self) -> Sequence[RecurrentHead]:
        """The layers."""
        return list(self.layers)

    def notes(self) -> list[str]:
        """How many layers of what kind, and what they read."""
        where = f"the state {'before' if self.pre_norm else 'after'} the final norm"
        layers = f"{len(self.layers)} {self.family.architecture} layers, one for each token"
        if self.chained:
            return [layers, f"the first reads {where}, the others what the one before made"]
        return [layers, f"all read {where}"]


def mtp_head(
    family: MTPFamily, config: Mapping[str, Any], ends: TargetEnds, num_layers: int = 1
) -> MTPHead | MTPStack:
    """What a family drafts with, random weights; see the classes."""
    if family.further == "again":
        return MTPHead(family, config, ends)
    return MTPStack(family, config, ends, num_layers)


def one_layer_model(family: MTPFamily, config: Mapping[str, Any], depth: int = 0) -> nn.Module:
    """A model of the family's architecture with the decoder layer alone, random weights.

    Args:
        family: how the layer is written.
        config: of the target.
        depth: how many such layers draft before it.
    """
    module = importlib.import_module(f"mlx_lm.models.{family.architecture}")
    alone = {"num_hidden_layers": 1, **family.changes, **family.derived(config, depth)}
    model = module.Model(
        module.ModelArgs.from_dict({**config, **alone, "model_type": family.architecture})
    )
    family.adapted(model)
    return model


def mtp_weights(
    family: MTPFamily,
    config: Mapping[str, Any],
    tensors: Mapping[str, mx.array],
    prefix: str,
    *,
    add_one: bool,
) -> dict[str, mx.array]:
    """A head's weights by the names of `MTPHead`.

    mlx-lm's own conversion splits and stacks what the decoder layer needs. Norms do not go through
    it: some conversions add one to those that they know, and a norm must get its one exactly once.

    Args:
        family: how the layer is written.
        config: of the target.
        tensors: those of the layer, by the checkpoint's names.
        prefix: what comes before its names.
        add_one: whether norms are stored as w - 1 here.
    """
    shell, inside = one_layer_model(family, config), f"body.{family.here}"
    last = len(getattr(shell, family.body).layers) - 1
    ours = {f"{old.format(last=last)}.": f"{part}." for part, old in family.names.items()}
    if not family.pre_norm and "norm" in family.names:
        ours[f"{family.names['norm'].format(last=last)}."] = f"body.{family.final_norm}."
    ours |= {family.layer + old: inside + new for old, new in family.renamed.items()}
    ours.setdefault(family.layer, inside)
    weights, convert = {}, {}
    for name, value in tensors.items():
        rest = name.removeprefix(prefix)
        old = next(old for old in ours if rest.startswith(old))
        new = ours[old] + rest.removeprefix(old)
        if new.startswith(inside) and not is_norm(new, value):
            convert[family.body + new.removeprefix("body")] = value
        else:
            weights[new] = value
    if hasattr(shell, "sanitize"):
        convert = shell.sanitize(convert)
    weights |= {inside + name.partition(family.here)[2]: x for name, x in convert.items()}
    if add_one:
        weights = {n: x + 1 if is_norm(n, x) else x for n, x in weights.items()}
    return weights
