"""Learning on while a head is used: after each generation, from what the target just wrote.

Online speculative decoding (Liu et al. 2023, arXiv 2310.07177): the texts of one user are alike,
and a drafter that learns them is accepted more often as it goes. What is emitted keeps the target's
distribution, whatever the head learns. Work and memory are bounded: a few updates a generation, on
a few windows that are remembered.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

from specdec_mlx.drafters.heads.drafter import Head, HeadDrafter
from specdec_mlx.drafters.heads.target_ends import target_ends
from specdec_mlx.errors import TrainingError
from specdec_mlx.training.features import live_batch
from specdec_mlx.training.files import load_arrays
from specdec_mlx.training.fitting import loss_of
from specdec_mlx.training.losses import divergence
from specdec_mlx.training.run import KINDS, PLAN, Data, Plan, begin_with
from specdec_mlx.training.trainees import Size, Trainee
from specdec_mlx.types import DraftContext, DraftSession, Features

SHORTEST = 8
"""Tokens of a text from which something can be learnt."""


@dataclass(frozen=True)
class Bounds:
    """What learning may cost.

    updates: of the weights after a generation; each takes a pass of the target over one
    window. window: most tokens of one. windows: most that are remembered. learning_rate: constant.
    """

    updates: int = 4
    window: int = 256
    windows: int = 32
    learning_rate: float = 1e-4


class OnlineTrainer:
    """Improves a drafter's weights in place, from the last texts.

    Args:
        trainee: what is trained.
        target: what wrote the texts.
        loss: see `losses.divergence`.
        bounds: what it may cost.
    """

    def __init__(
        self,
        trainee: Trainee,
        target: nn.Module,
        loss: str = "forward-kl",
        bounds: Bounds = Bounds(),
    ) -> None:
        """Nothing was learnt yet."""
        self.trainee = trainee
        self.target = target
        self.bounds = bounds
        self.windows: deque[np.ndarray] = deque(maxlen=bounds.windows)
        self._optimizer = optim.AdamW(bounds.learning_rate, weight_decay=0)
        self._optimizer.init(trainee.module.trainable_parameters())
        self._compare = divergence(loss)
        self._rng = np.random.default_rng(0)

    def add(self, tokens: Sequence[int]) -> None:
        """Remember a text, prompt included: its last windows, as many as may be remembered."""
        most = self.bounds.window * self.bounds.windows
        kept = np.array(tokens[-most:], np.int32)
        for start in range(0, len(kept), self.bounds.window):
            window = kept[start : start + self.bounds.window]
            if len(window) >= SHORTEST:
                self.windows.append(window)

    def learn(self) -> float | None:
        """Make the updates that one generation is allowed; the mean loss, None without a text.

        An update that is not finite is left out.
        """
        losses = []
        step = nn.value_and_grad(self.trainee.module, self._loss)
        for _ in range(self.bounds.updates if self.windows else 0):
            window = self.windows[int(self._rng.integers(len(self.windows)))]
            value, gradients = step(mx.array(window)[None])
            gradients, norm = optim.clip_grad_norm(gradients, 1.0)
            if math.isfinite(norm.item()):
                self._optimizer.update(self.trainee.module, gradients)
                mx.eval(self.trainee.module.parameters(), self._optimizer.state)
                losses.append(value.item())
        return float(np.mean(losses)) if losses else None

    def _loss(self, tokens: mx.array) -> mx.array:
        batch = live_batch(self.target, tuple(self.trainee.features.layers), tokens)
        return loss_of(self.trainee, batch, self._compare)


class OnlineDrafter:
    """A head that learns from each text when it has ended, so that the next does not wait for it.

    Args:
        drafter: of the head that `trainer` trains.
        trainer: see there.
        dtype: of the weights when they are saved.
    """

    def __init__(self, drafter: HeadDrafter, trainer: OnlineTrainer, dtype: str) -> None:
        """Nothing was generated yet."""
        self.drafter = drafter
        self.trainer = trainer
        self.dtype = dtype
        self.features: Features = drafter.features
        self.key = f"Online({drafter.key})"

    @property
    def model(self) -> nn.Module:
        """The head's weights."""
        return self.drafter.model

    def check(self, context: DraftContext) -> None:
        """Raise HeadError for another target."""
        self.drafter.check(context)

    def describe(self) -> str:
        """What was recognised, in a line."""
        return f"{self.drafter.describe()}; learns on"

    def begin(self, prompt: Sequence[int], context: DraftContext) -> DraftSession:
        """Start a generation; its text is learnt from when it ends."""
        session = self.drafter.begin(prompt, context)
        session.on_close = self.learn
        return session

    def learn(self, tokens: Sequence[int]) -> None:
        """Learn from a text [n], prompt included."""
        self.trainer.add(tokens)
        self.trainer.learn()

    def save(self) -> None:
        """Write the head to where it was loaded from."""
        self.trainer.trainee.save(Path(self.drafter.name), self.dtype)


def learning_on(folder: Path | str, target: nn.Module, bounds: Bounds = Bounds()) -> OnlineDrafter:
    """A drafter of a head that learns on while it is used.

    Args:
        folder: of a head that `train` made; its `save` may write there.
        target: the loaded model that it was trained for.
        bounds: what learning may cost.

    Raises:
        TrainingError: `train` did not make it, or it is no head.
    """
    folder = Path(folder)
    if not (folder / PLAN).is_file():
        raise TrainingError(
            f"{folder} has no {PLAN}: only heads that `specdec-mlx train` made can learn on."
        )
    stored = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    plan = Plan("", stored["kind"], Data(()), _size(stored["size"]), num_steps=stored["num_steps"])
    trainee = KINDS[plan.kind](*_with_its_vocabulary(plan, folder, target))
    if not isinstance(trainee.module, Head):
        raise TrainingError(f"{folder} holds a {plan.kind}; only mtp, eagle3 and medusa learn on.")
    begin_with(str(folder), trainee, target)
    size = target_ends(target).vocab_size
    drafter = HeadDrafter(trainee.module, name=str(folder), vocab_size=size)
    return OnlineDrafter(drafter, OnlineTrainer(trainee, target, bounds=bounds), stored["dtype"])


def _size(stored: dict[str, Any]) -> Size:
    """As it was before it was JSON."""
    layers = stored["layers"]
    return Size(**{**stored, "layers": tuple(layers) if layers else None})


def _with_its_vocabulary(
    plan: Plan, folder: Path, target: nn.Module
) -> tuple[Plan, nn.Module, None, np.ndarray]:
    """What makes the trainee, with the tokens that the head proposes in place of windows."""
    offsets = load_arrays(folder / "model.safetensors").get("d2t")
    if offsets is None:
        return plan, target, None, np.zeros((0, 0), np.int32)
    ids = np.array(offsets) + np.arange(offsets.shape[0])
    size = replace(plan.size, draft_vocab=len(ids))
    return replace(plan, size=size), target, None, ids[None]
