"""Training of what makes each prediction of the text alone: Medusa, early exits, draft models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from specdec_mlx.drafters.heads.early_exit import EXIT_LAYER, WINDOW, Exit, final_norm, first_layers
from specdec_mlx.drafters.heads.one_pass import Medusa
from specdec_mlx.drafters.heads.target_ends import TargetEnds
from specdec_mlx.errors import TrainingError
from specdec_mlx.models import explained
from specdec_mlx.training.features import Batch
from specdec_mlx.training.trainees import NORM_EPS, Prediction, Size, Trainee
from specdec_mlx.types import Features

EXIT_WINDOW = 8
"""Positions that an exit's convolution goes over; the first layers read the text before them."""


class MedusaTrainee(Trainee):
    """Medusa heads that share the target's matrix; they begin as that matrix itself.

    Args:
        ends: of the target.
        size: how many heads.
    """

    def __init__(self, ends: TargetEnds, size: Size) -> None:
        """See the class."""
        self.head = Medusa(size.guesses, 1, ends)
        for blocks in self.head.blocks:
            blocks[0].weight = mx.zeros_like(blocks[0].weight)
            blocks[0].bias = mx.zeros_like(blocks[0].bias)
        super().__init__(self.head, ends, self.head.features)
        self.num_steps = size.guesses
        self.config = {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "medusa_num_heads": size.guesses,
            "medusa_num_layers": 1,
            "hidden_size": ends.width,
            "vocab_size": ends.vocab_size,
        }

    def predictions(self, batch: Batch) -> Iterator[Prediction]:
        """Head i guesses what follows i + 1 tokens that it has not seen."""
        states = self.head.rows(batch.features)
        for i in range(len(self.head.blocks)):
            yield Prediction(self.head.state(states[:, : -1 - i], i), 1 + i)

    def files(self) -> tuple[dict[str, Any], dict[str, mx.array]]:
        """As Medusa's authors have it, without matrices of their own."""
        tensors = {}
        for name, value in tree_flatten(self.module.parameters()):
            _, head, layer, part = name.split(".")
            tensors[f"{head}.{layer}.linear.{part}"] = value
        return self.config, tensors


class ExitTrainee(Trainee):
    """An early exit: a convolution, an MLP and a norm behind the target's first layers.

    Args:
        target: the model.
        ends: its ends.
        num_layers: after how many layers it leaves.
        size: of the MLP.
    """

    reads_text = True

    def __init__(self, target: nn.Module, ends: TargetEnds, num_layers: int, size: Size) -> None:
        """It begins as the target's own norm."""
        norm = final_norm(first_layers(target, num_layers))
        self.num_layers = num_layers
        self.config = {
            "model_type": "early_exit",
            EXIT_LAYER: num_layers,
            "hidden_size": ends.width,
            "intermediate_size": size.mlp or ends.width,
            WINDOW: EXIT_WINDOW,
            "vocab_size": ends.vocab_size,
            "rms_norm_eps": getattr(norm, "eps", NORM_EPS),
        }
        self.exit = Exit(self.config)
        self.exit.norm.weight = norm.weight
        super().__init__(self.exit, ends, Features(layers=(num_layers - 1,)))

    def predictions(self, batch: Batch) -> Iterator[Prediction]:
        """After every position, the next token."""
        states = batch.features.layers[self.num_layers - 1]
        yield Prediction(self.exit(states), 0)

    def files(self) -> tuple[dict[str, Any], dict[str, mx.array]]:
        """All that is trained."""
        return self.config, dict(tree_flatten(self.module.parameters()))


class DraftTrainee(Trainee):
    """A draft model, which reads only the text.

    Args:
        model: to begin with.
        config: of its config.json.
        ends: of the target.
        tokenizer: the target's, as mlx-lm loads it.
    """

    reads_text = True

    def __init__(
        self, model: nn.Module, config: dict[str, Any], ends: TargetEnds, tokenizer: Any
    ) -> None:
        """See the class."""
        super().__init__(model, ends, Features())
        self.config = config
        self.tokenizer = tokenizer

    @classmethod
    def new(cls, ends: TargetEnds, size: Size, tokenizer: Any) -> DraftTrainee:
        """A small Llama with random weights."""
        size = size.for_width(size.width or max(64, ends.width // 2))
        config = {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": size.layers[0] if size.layers else 2,
            **size.llama(ends.vocab_size),
            "tie_word_embeddings": True,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        }
        model = llama.Model(llama.ModelArgs.from_dict(config))
        return cls(model, config, ends, tokenizer)

    @classmethod
    def of(cls, name: str, ends: TargetEnds) -> DraftTrainee:
        """A model that exists, to learn more; raises TrainingError if it is quantized."""
        with explained(name):
            loaded: Any = mlx_lm.load(name, return_config=True)
        model, tokenizer, config = loaded
        if "quantization" in config:
            raise TrainingError(
                f"{name} is quantized, and such weights cannot be trained. Give the original."
            )
        return cls(model, config, ends, tokenizer)

    def predictions(self, batch: Batch) -> Iterator[Prediction]:
        """After every position, the next token."""
        yield Prediction(self.module(batch.tokens), 0)

    def logits(self, states: mx.array) -> mx.array:
        """They are the states: as a whole, since models do more with them behind their heads."""
        return states

    def files(self) -> tuple[dict[str, Any], dict[str, mx.array]]:
        """A model of mlx-lm's."""
        return self.config, dict(tree_flatten(self.module.parameters()))

    def save(self, folder: Path, dtype: str) -> None:
        """The tokenizer too."""
        super().save(folder, dtype)
        self.tokenizer.save_pretrained(str(folder))
