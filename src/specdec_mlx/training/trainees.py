"""What can be trained: a module, what it reads of the target, and what it predicts of a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.drafters.heads.target_ends import TargetEnds
from specdec_mlx.training.features import Batch
from specdec_mlx.training.files import save_arrays, save_json
from specdec_mlx.types import Features

NORM_EPS = 1e-5
ROPE_THETA = 10000.0
HEAD_DIM = 64
"""Width of an attention head where the number of heads is not said."""

AT_ONCE = 2**22
"""Logits that are made at a time, 16 MB for each position of a draft."""

TYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}
"""Name -> type of the weights in a file."""


class Prediction(NamedTuple):
    """States whose logits are for the next draft token of many drafts at once.

    states: [batch, n, D]. first: position in the window after which the first of the n stands:
    row i is held against the target's own logits at position first + i.
    """

    states: mx.array
    first: int


@dataclass(frozen=True)
class Size:
    """How large something new becomes; None for a default that fits the target.

    width: of the states inside, for EAGLE-3 and draft models. mlp: width of the MLP. heads,
    kv_heads: of attention. head_dim: width of each of them. layers: of the target that EAGLE-3
    reads, from 0; as a number, the layer after which an early exit leaves, or the depth of a draft
    model. draft_vocab: tokens that EAGLE-3 or a prediction layer can propose. guesses: Medusa
    heads.
    """

    width: int | None = None
    mlp: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    layers: tuple[int, ...] | None = None
    draft_vocab: int | None = None
    guesses: int = 3

    def for_width(self, width: int) -> Size:
        """Defaults for states of this width, those of Llama models."""
        heads = self.heads or max(1, width // HEAD_DIM)
        return replace(
            self,
            width=width,
            mlp=self.mlp or 3 * width,
            heads=heads,
            kv_heads=self.kv_heads or heads,
        )

    def llama(self, vocab_size: int) -> dict[str, Any]:
        """Configuration of a decoder layer of this size, in Hugging Face's words."""
        head_dim = {} if self.head_dim is None else {"head_dim": self.head_dim}
        return {
            **head_dim,
            "hidden_size": self.width,
            "intermediate_size": self.mlp,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": vocab_size,
            "hidden_act": "silu",
            "rms_norm_eps": NORM_EPS,
            "rope_theta": ROPE_THETA,
            "max_position_embeddings": 2048,
            "attention_bias": False,
            "mlp_bias": False,
        }


class Trainee(ABC):
    """Something that is trained for a target.

    Args:
        module: what has the weights; float32.
        ends: of the target.
        features: what it reads of the target.

    vocabulary: ids [Vd] of the tokens that its logits are over, None for all of them. num_steps:
    tokens of the drafts that it is measured on. reads_text: whether it reads a draft's tokens like
    others, so that its one prediction is for all places of a draft.
    """

    vocabulary: mx.array | None = None
    num_steps = 3
    reads_text = False

    def __init__(self, module: nn.Module, ends: TargetEnds, features: Features) -> None:
        """Training begins with these weights."""
        module.set_dtype(mx.float32)
        self.module = module
        self.ends = ends
        self.features = features
        vocabulary = self.vocabulary
        self.target_logits = (ends if vocabulary is None else ends.narrowed(vocabulary)).logits
        """[..., Vd] the target's own, of the input of its head."""
        self.rows_at_once = max(
            1, AT_ONCE // (ends.vocab_size if vocabulary is None else vocabulary.size)
        )

    @abstractmethod
    def predictions(self, batch: Batch) -> Iterator[Prediction]:
        """What it predicts as the first token of a draft, as the second, and so on."""

    def logits(self, states: mx.array) -> mx.array:
        """[..., Vd] of states [..., D] that it predicts from."""
        return self.target_logits(states)

    def head_parameters(self) -> Any:
        """Those of its parameters that `logits` uses, by the module's names."""
        return {}

    @abstractmethod
    def files(self) -> tuple[dict[str, Any], dict[str, mx.array]]:
        """Configuration and tensors, by the names that other programs read."""

    def save(self, folder: Path, dtype: str) -> None:
        """Write `config.json` and `model.safetensors`, weights in a type of TYPES."""
        config, _ = self.files()
        save_json(folder / "config.json", config | {"torch_dtype": dtype})
        self.save_weights(folder, dtype)

    def save_weights(self, folder: Path, dtype: str) -> None:
        """Write `model.safetensors` alone: the file before is there until the new one is whole."""
        _, tensors = self.files()
        cast = {name: _as(x, TYPES[dtype]) for name, x in tensors.items()}
        save_arrays(folder / "model.safetensors", cast, {"format": "mlx"})


def _as(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """Weights in a type; ids as they are."""
    return x.astype(dtype) if mx.issubdtype(x.dtype, mx.floating) else x
