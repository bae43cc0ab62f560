"""Heads that torch has run, as checkpoints to load, and targets whose states are made up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

import tiny
from specdec_mlx.drafters.heads.drafter import HeadDrafter
from specdec_mlx.types import FeatureRows

FIXTURES = Path(__file__).parent / "fixtures"
WIDTH, VOCAB, NUM_LAYERS = 32, 97, 8
CORRECTION = 23
"""What is emitted in place of the second draft token; see fixtures/make_references.py."""


@dataclass(frozen=True)
class Reference:
    """A fixture: a checkpoint, a text with the target's states, and what torch made of them."""

    config: dict[str, Any]
    weights: Mapping[str, np.ndarray[Any, Any]]
    arrays: Mapping[str, np.ndarray[Any, Any]]

    @property
    def prompt(self) -> list[int]:
        """The tokens before the first draft."""
        return [int(token) for token in self.arrays["prompt"]]

    def write(self, folder: Path, fmt: str = "pt", **changes: Any) -> Path:
        """As a folder that can be loaded. changes: entries of the configuration."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config | changes))
        tensors = {name: mx.array(value) for name, value in self.weights.items()}
        mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": fmt})
        return folder

    def target(self) -> nn.Module:
        """A model with the ends of the fixture's target."""
        model = target()
        for part, name in ((model.model.embed_tokens, "embed"), (model.lm_head, "head")):
            if name in self.arrays:
                part.weight = mx.array(self.arrays[name])
        return model


@cache
def reference(name: str) -> Reference:
    """A fixture by name."""
    with np.load(FIXTURES / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files if key != "config"}
        config = json.loads(str(file["config"]))
    weights = {key[2:]: value for key, value in arrays.items() if key.startswith("w.")}
    return Reference(config, weights, {k: v for k, v in arrays.items() if not k.startswith("w.")})


def target(width: int = WIDTH, vocab: int = VOCAB, layers: int = NUM_LAYERS) -> nn.Module:
    """A Llama with these sizes, whose head is not tied to its embeddings."""
    return tiny.build(
        "llama",
        hidden_size=width,
        vocab_size=vocab,
        num_hidden_layers=layers,
        layer_types=["full_attention"] * layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        head_dim=8,
        tie_word_embeddings=False,
    )


def features(
    drafter: HeadDrafter, rows: Any, *, read: tuple[int, ...] | None = None
) -> FeatureRows:
    """Rows [n, W] as the target would show them; what a head should not read is another state.

    read: the layers that the rows are of, those that the drafter reads if None; for a head that
    reads the state after the final norm the rows are that.
    """
    rows = mx.array(rows)
    wanted = drafter.features.layers if read is None else read
    parts: list[mx.array] = mx.split(rows, len(wanted), axis=-1) if wanted else []
    layers = {i: rows[:, :WIDTH] * 0.5 + i for i in range(-1, NUM_LAYERS)}
    layers |= dict(zip(wanted, parts, strict=True))
    return FeatureRows(layers=layers, head_input=rows[:, :WIDTH])
