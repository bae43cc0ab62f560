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
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.drafters.heads.drafter import FinalStateHead
from specdec_mlx.drafters.heads.mtp_families import MTPFamily
from specdec_mlx.drafters.heads.recurrent import RecurrentHead
from specdec_mlx.drafters.heads.target_ends import TargetEnds
from specdec_mlx.drafters.heads.variations import (
    Variation,
    is_norm,
    otherwise,
    shifted_norms,
)
from specdec_mlx.drafters.heads.vocabulary import DraftVocabulary
from specdec_mlx.target.strategies import leaves

LAYER = "layers.0."
EMBEDDINGS = ("embed_tokens", "word_embeddings", "embeddings")
"""What mlx-lm's models call them."""


class MTPHead(FinalStateHead, RecurrentHead):
    """A multi-token prediction layer.

    Args:
        family: how it is written.
        config: of the target, as in the original repository.
        ends: of the target.
        depth: how many such layers draft before it.
    """

    kind = "multi-token prediction"
    vocabulary: DraftVocabulary | None = None

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
        self.skips_first = False
        self.embedding_norm = nn.RMSNorm(width, eps)
        self.hidden_norm = nn.RMSNorm(width, eps)
        self.projection = nn.Linear(2 * width, width, bias=False)
        self.body = body
        if "head" in family.names:
            self.head = nn.Linear(width, ends.vocab_size, bias=False)
        self.read_pre_norm(family.pre_norm)
        self._make_cache: Callable[[], list[Any]] = lambda: list(make_prompt_cache(shell))

    def step(self, states: mx.array, tokens: mx.array, cache: list[Any]) -> mx.array:
        """States [n, D] in place of the target's after its final norm."""
        return self.forward(states[None], tokens[None], cache)[0]

    def forward(self, states: mx.array, tokens: mx.array, cache: list[Any]) -> mx.array:
        """`step` on texts side by side: states [batch, n, D], tokens [batch, n]."""
        embedded = self.ends.embed(tokens)
        if self.skips_first and next(leaves(cache)).offset == 0:
            embedded = mx.where(mx.arange(tokens.shape[-1])[:, None] > 0, embedded, 0)
        parts = [self.embedding_norm(embedded), self.hidden_norm(states)]
        if self.family.hidden_first:
            parts.reverse()
        made: mx.array = self.body(self.projection(mx.concatenate(parts, -1)), cache)
        return made

    def logits(self, states: mx.array) -> mx.array:
        """Logits [n, V] of the target's head, or of its own."""
        logits = self.draft_logits(states)
        return logits if self.vocabulary is None else self.vocabulary.widen(logits)

    def draft_logits(self, states: mx.array) -> mx.array:
        """Logits [..., Vd] over the draft vocabulary, of states [..., D]."""
        states = self.norm(states)
        return self.head(states) if "head" in self else self.ends.logits(states)

    def choose_among(self, vocabulary: DraftVocabulary) -> None:
        """Propose only these of the target's tokens, so that there are fewer logits to make."""
        self.vocabulary = vocabulary
        self.ends = self.ends.narrowed(vocabulary.ids)

    def make_cache(self) -> list[Any]:
        """As the target makes it for such a layer."""
        return self._make_cache()

    def variations(self) -> list[Variation]:
        """Norms, the state that it reads, the order, and the first position."""
        return [*shifted_norms(self), *super().variations(), *self.variations_inside()]

    def variations_inside(self) -> list[Variation]:
        """The order, and the first position."""
        family = replace(self.family, hidden_first=not self.family.hidden_first)
        return [
            otherwise(
                "the other order of state and embedding",
                "its projection looks written for the other order, which is another family's",
                self,
                family=family,
            ),
            otherwise(
                "no embedding at position 0",
                "it looks trained without the embedding at position 0, as some engines run it",
                self,
                skips_first=not self.skips_first,
            ),
        ]

    def notes(self) -> list[str]:
        """What kind of layer, and what it reads."""
        where = "before" if self.pre_norm else "after"
        notes = [f"{self.family.architecture} layer", f"reads the state {where} the final norm"]
        if self.vocabulary is not None:
            notes.append(f"{self.vocabulary.ids.size} of {self.ends.vocab_size} tokens")
        return notes + (["the state comes first"] if self.family.hidden_first else [])


def one_layer_model(family: MTPFamily, config: Mapping[str, Any], depth: int = 0) -> nn.Module:
    """A model of the family's architecture with the decoder layer alone, random weights.

    Args:
        family: how the layer is written.
        config: of the target.
        depth: how many such layers draft before it.
    """
    module = importlib.import_module(f"mlx_lm.models.{family.architecture}")
    alone = {**family.changes, **family.derived(config, depth)}
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
    shell = one_layer_model(family, config)
    ours = _own_names(family, len(getattr(shell, family.body).layers))
    weights, layer = {}, {}
    for name, value in tensors.items():
        rest = name.removeprefix(prefix)
        known = next((old for old in ours if rest.startswith(old)), None)
        if known is not None:
            weights[ours[known] + rest.removeprefix(known)] = value
        elif rest.startswith(family.layer):
            layer[family.name_in_layer(rest.removeprefix(family.layer))] = value
    norms = {name for name, value in layer.items() if is_norm(name, value)}
    weights |= {f"body.{family.here}{name}": layer[name] for name in norms}
    there = f"{family.body}.{family.here}"
    convert = {f"{there}{name}": x for name, x in layer.items() if name not in norms}
    if hasattr(shell, "sanitize"):
        convert = shell.sanitize(convert)
    for name, value in convert.items():
        weights[f"body.{family.here}{name.partition(family.here)[2]}"] = value
    if add_one:
        weights = {n: x + 1 if is_norm(n, x) else x for n, x in weights.items()}
    return weights


def _own_names(family: MTPFamily, num_layers: int) -> dict[str, str]:
    """Beginnings of the checkpoint's names outside the decoder layer -> ours."""
    ours = {part: f"{part}." for part in family.names}
    if not family.pre_norm:
        ours["norm"] = f"body.{family.final_norm}."
    return {f"{old.format(last=num_layers - 1)}.": ours[p] for p, old in family.names.items()}
