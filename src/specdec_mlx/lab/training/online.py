"""Learning on while a drafter is used: after each generation, from what the target just wrote.

Online speculative decoding (Liu et al. 2023, arXiv 2310.07177). The text keeps the target's
distribution: weights change between generations, and drafts declare what they were drawn from.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakSet

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from huggingface_hub.constants import HF_HUB_CACHE
from mlx.utils import tree_map

from specdec_mlx.contracts import DraftContext, Drafter, Features
from specdec_mlx.drafters.draft_sources import DraftSource
from specdec_mlx.drafters.fingerprint import fingerprint
from specdec_mlx.drafters.heads.drafter import HeadDrafter
from specdec_mlx.drafters.heads.loading import is_head
from specdec_mlx.drafters.model import ModelDrafter
from specdec_mlx.errors import TrainingError
from specdec_mlx.lab.training.features import live_batch, load_json
from specdec_mlx.lab.training.fitting import forward_kl, update
from specdec_mlx.lab.training.run import PLAN, begun_with
from specdec_mlx.lab.training.trainees import KINDS, Recipe, Size, Trainee
from specdec_mlx.models.anatomy import group_of
from specdec_mlx.models.loading import load_model

SHORTEST = 8  # tokens of a text from which something can be learnt

LEARNING_KINDS = ("mtp", "eagle3", "medusa", "draft")  # of `specdec-mlx train`


@dataclass(frozen=True)
class Bounds:
    """Limits of online learning.

    Attributes:
        updates: updates after each generation.
        window: tokens of a window.
        windows: number of recent windows to learn from.
        learning_rate: of all updates.
    """

    updates: int = 4
    window: int = 256
    windows: int = 32
    learning_rate: float = 1e-4


class OnlineTrainer:
    """Improves a drafter's weights in place, from recent texts of its target.

    Attributes:
        under_way: sessions that have not ended. The weights stay the same until all have ended,
            because cached keys depend on them.
    """

    def __init__(self, trainee: Trainee, target: nn.Module, bounds: Bounds = Bounds()) -> None:
        self.trainee = trainee
        self.target = target
        self.bounds = bounds
        self.windows: deque[np.ndarray] = deque(maxlen=bounds.windows)
        self.num_updates = 0
        self.lock = Lock()
        self.under_way: WeakSet[Any] = WeakSet()
        self.has_new_text = False
        self._optimizer = optim.AdamW(bounds.learning_rate, weight_decay=0)
        self._optimizer.init(trainee.module.trainable_parameters())
        self._rng = np.random.default_rng(0)

    def add(self, tokens: Sequence[int], num_prompt: int = 0) -> None:
        """Remember a text [n], with at most half a window of its prompt."""
        size = self.bounds.window
        # The answer is learnt. Half a window of the prompt gives it a context.
        begin = max(0, num_prompt - size // 2, len(tokens) - size * self.bounds.windows)
        recent = np.array(tokens[begin:], np.int32)
        starts = range(0, len(recent) - SHORTEST + 1, size)
        windows = [recent[start : start + size] for start in starts]
        self.windows += windows
        self.has_new_text |= bool(windows)

    def learn(self) -> float | None:
        """Make the updates after a generation. Returns the mean loss, or None without a text."""
        self.has_new_text, losses = False, []
        for _ in range(self.bounds.updates if self.windows else 0):
            window = self.windows[int(self._rng.integers(len(self.windows)))]
            batch = live_batch(self.target, self.trainee.features.layers, mx.array(window)[None])
            losses.append(update(self.trainee, self._optimizer, batch, forward_kl))
        # An update with infinite gradients was dropped.
        losses = [loss for loss in losses if not math.isnan(loss)]
        self.num_updates += len(losses)
        return float(np.mean(losses)) if losses else None


@dataclass(eq=False)
class OnlineDrafter(Drafter):
    """A drafter that learns from each text when the text has ended.

    Attributes:
        drafter: the drafter with the weights in use.
        trainer: improves the weights.
        folder: where the weights are saved.
        dtype: of the saved weights, a key of TYPES.
    """

    drafter: ModelDrafter | HeadDrafter
    trainer: OnlineTrainer
    folder: Path
    dtype: str

    @property
    def features(self) -> Features | None:
        return self.drafter.features

    @property
    def key(self) -> str:
        """The drafter's key with the folder in place of the weights, which change."""
        # The weights change, so the folder identifies the drafter.
        content = fingerprint(self.drafter.model)
        return f"Online({self.drafter.key.replace(content, str(self.folder.resolve()))})"

    @property
    def model(self) -> Any:
        return self.drafter.model

    def models(self) -> Sequence[nn.Module]:
        return [self.model]

    def check(self, context: DraftContext) -> None:
        self.drafter.check(context)

    def describe(self) -> str:
        return f"{self.drafter.describe() or f'{self.folder}: draft model'}; learns on"

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Any:
        session: Any = self.drafter.begin(
            prompt, replace(context, on_close=self._take, drafter_states=None)
        )
        self.trainer.under_way.add(session.source)
        return session

    def _take(self, source: DraftSource, tokens: Sequence[int]) -> None:
        trainer = self.trainer
        trainer.under_way.discard(source)
        trainer.add(tokens, source.num_prompt)
        # Cached keys of an open session were made with the old weights.
        if trainer.has_new_text and not trainer.under_way:
            self.learn()

    def learn(self) -> None:
        """Make the updates after a generation, and draft with the result.

        A draft model learns in a float32 copy, where small updates are not lost.
        """
        with self.trainer.lock:
            self.trainer.learn()
        # A draft model learns in a float32 copy, and drafts in its own dtype.
        learner = self.trainer.trainee.module
        if learner is not self.model:
            both = self.model.parameters(), learner.parameters()
            self.model.update(tree_map(lambda old, new: new.astype(old.dtype), *both))
            mx.eval(self.model.parameters())

    def drafting_as(self, drafter: ModelDrafter) -> OnlineDrafter:
        """This drafter with the options of another, and with the same weights and learning."""
        return replace(self, drafter=replace(drafter, tokenizers="same"))

    def save(self) -> None:
        """Save the weights if they have changed. The file is complete at any time."""
        with self.trainer.lock:
            if self.trainer.num_updates:
                self.trainer.trainee.save_weights(self.folder, self.dtype)


def learning_on(folder: Path | str, target: nn.Module, bounds: Bounds = Bounds()) -> OnlineDrafter:
    """A drafter from a folder of `train`, which learns while it is used.

    Args:
        folder: result of `train` for this target.
        target: the target.
        bounds: limits of learning.

    Raises:
        TrainingError: `train` did not make the folder, or this kind cannot learn online.
        ModelFolderError: the training has not ended.
        HeadError: the head belongs to another target.
        UnreadableError: the target does not show the states that the head learns from.
    """
    folder = Path(folder).expanduser()
    stored = stored_plan(folder)
    if group_of(target) is not None:
        raise TrainingError(
            "The target is spread over several ranks, which would all have to learn alike. Run it "
            "on one machine, or leave online learning out."
        )
    if stored["kind"] == "draft":
        drafts = ModelDrafter(*load_model(folder), tokenizers="same")
        trainer = OnlineTrainer(KINDS["draft"](Recipe(target, init=str(folder))), target, bounds)
        return OnlineDrafter(drafts, trainer, folder, stored["dtype"])
    recipe = Recipe(target, Size(**stored["size"]), stored["num_steps"])
    trainee = begun_with(str(folder), stored["kind"], recipe)
    head = HeadDrafter(trainee.module, name=str(folder))
    return OnlineDrafter(head, OnlineTrainer(trainee, target, bounds), folder, stored["dtype"])


def stored_plan(folder: Path) -> dict[str, Any]:
    """Settings of the training that made a folder. TrainingError if it cannot learn online."""
    config, plan, name = folder / "config.json", folder / PLAN, str(folder)
    if not folder.is_dir() or Path(HF_HUB_CACHE).resolve() in folder.resolve().parents:
        fault = "is no folder of yours to save it in, and the Hub's cache is left as it is"
    elif config.is_file() and "quantization" in load_json(config):
        fault, name = "is quantized, and quantized weights cannot be trained", "ORIGINAL"
    elif not plan.is_file():
        fault = f"has no {PLAN}: only what `specdec-mlx train` made can learn on"
        name = "NAME" if is_head(folder) else name
    else:
        stored: dict[str, Any] = load_json(plan)
        if stored["kind"] in LEARNING_KINDS:
            return stored
        fault = f"holds a {stored['kind']}; only {', '.join(LEARNING_KINDS)} learn on"
        name = "NAME"
    raise TrainingError(
        f"{folder} {fault}. Make a draft model that learns on: specdec-mlx train --kind draft "
        f"--init {name} --model TARGET --texts FILE --out FOLDER."
    )
