"""Learning on while a drafter is used: after each generation, from what the target just wrote.

Online speculative decoding (Liu et al. 2023, arXiv 2310.07177): the texts of one user are alike,
and a drafter that learns them is accepted more often as it goes. What is emitted keeps the target's
distribution, whatever the drafter learns: its weights change between generations, and with a draft
goes the distribution that it was drawn from. Work and memory are bounded: a few updates a
generation, on a few windows that are remembered.
"""

from __future__ import annotations

import copy
import json
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

from specdec_mlx.drafters.fingerprint import fingerprint
from specdec_mlx.drafters.heads.drafter import Head, HeadDrafter
from specdec_mlx.drafters.heads.loading import is_head
from specdec_mlx.drafters.heads.target_ends import target_ends
from specdec_mlx.drafters.model import ModelDrafter
from specdec_mlx.errors import TrainingError
from specdec_mlx.models import load_model
from specdec_mlx.target.ranks import group_of
from specdec_mlx.training.features import live_batch
from specdec_mlx.training.files import load_arrays
from specdec_mlx.training.losses import LOSSES, loss_and_gradients
from specdec_mlx.training.one_pass import DraftTrainee
from specdec_mlx.training.run import KINDS, PLAN, Data, Plan, begin_with
from specdec_mlx.training.trainees import Size, Trainee
from specdec_mlx.types import DraftContext, DraftSession, Features

SHORTEST = 8
"""Tokens of a text from which something can be learnt."""

LEARNING_KINDS = ("mtp", "eagle3", "medusa", "draft")
"""Kinds of `specdec-mlx train` that can learn on."""


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

    Generations may share one drafter. Its weights stay as they are while one of them is under way,
    since what it keeps of its text was computed with them.

    Args:
        trainee: what is trained.
        target: what wrote the texts.
        loss: see `losses.LOSSES`.
        bounds: what it may cost.

    num_updates: made so far.
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
        self.num_updates = 0
        self.lock = Lock()
        self._under_way: WeakSet[Lesson] = WeakSet()
        self._has_new_text = False
        self._optimizer = optim.AdamW(bounds.learning_rate, weight_decay=0)
        self._optimizer.init(trainee.module.trainable_parameters())
        self._compare = LOSSES[loss]
        self._rng = np.random.default_rng(0)

    def begin(self, lesson: Lesson) -> None:
        """Note a generation that is under way; one that is dropped without an end is forgotten."""
        self._under_way.add(lesson)

    def end(self, lesson: Lesson, tokens: Sequence[int]) -> bool:
        """Take the text [n], prompt included, of a generation; whether it is time to learn."""
        self._under_way.discard(lesson)
        self.add(tokens, lesson.num_prompt)
        return self._has_new_text and not self._under_way

    def add(self, tokens: Sequence[int], num_prompt: int = 0) -> None:
        """Remember what was written, with half a window before it, as the last windows.

        Args:
            tokens: [n] prompt and what was written, of which no more than may be remembered counts.
            num_prompt: tokens of the prompt.
        """
        begin = max(0, num_prompt - self.bounds.window // 2)
        begin = max(begin, len(tokens) - self.bounds.window * self.bounds.windows)
        kept = np.array(tokens[begin:], np.int32)
        for start in range(0, len(kept), self.bounds.window):
            window = kept[start : start + self.bounds.window]
            if len(window) >= SHORTEST:
                self.windows.append(window)
                self._has_new_text = True

    def learn(self) -> float | None:
        """Make the updates that one generation is allowed; the mean loss, None without a text.

        An update that is not finite is left out.
        """
        self._has_new_text = False
        losses = []
        for _ in range(self.bounds.updates if self.windows else 0):
            window = self.windows[int(self._rng.integers(len(self.windows)))]
            batch = live_batch(self.target, self.trainee.features.layers, mx.array(window)[None])
            value, gradients = loss_and_gradients(self.trainee, batch, self._compare)
            gradients, norm = optim.clip_grad_norm(gradients, 1.0)
            if math.isfinite(norm.item()):
                self._optimizer.update(self.trainee.module, gradients)
                mx.eval(self.trainee.module.parameters(), self._optimizer.state)
                self.num_updates += 1
                losses.append(value.item())
        return float(np.mean(losses)) if losses else None


class Lesson:
    """One generation, as its session's `on_close`: its text is learnt from when it has ended.

    Args:
        drafter: of the session.
        num_prompt: tokens of the prompt.
    """

    def __init__(self, drafter: OnlineDrafter, num_prompt: int) -> None:
        """It is under way."""
        self.drafter = drafter
        self.num_prompt = num_prompt
        drafter.trainer.begin(self)

    def __call__(self, tokens: Sequence[int]) -> None:
        """The end: the text [n], prompt included."""
        if self.drafter.trainer.end(self, tokens):
            self.drafter.learn()


class OnlineDrafter:
    """A drafter that learns from each text when it has ended, before the next one begins.

    Args:
        drafter: of the weights that `trainer` trains.
        trainer: see there.
        folder: that they were loaded from, and are saved in.
        dtype: of the weights when they are saved.
    """

    def __init__(
        self, drafter: HeadDrafter | ModelDrafter, trainer: OnlineTrainer, folder: Path, dtype: str
    ) -> None:
        """Nothing was generated yet."""
        self.drafter = drafter
        self.trainer = trainer
        self.folder = folder
        self.dtype = dtype

    @property
    def key(self) -> str:
        """The drafter's, with its folder for its content, which changes.

        So what an automatic draft length has learnt of it goes on with it, in the next command too.
        """
        content = fingerprint(self.drafter.model)
        return f"Online({self.drafter.key.replace(content, str(self.folder.resolve()))})"

    @property
    def model(self) -> nn.Module:
        """The weights that draft."""
        return self.drafter.model

    def check(self, context: DraftContext) -> None:
        """Raise HeadError or TokenizerMismatchError for another target."""
        self.drafter.check(context)

    def describe(self) -> str:
        """What it is, in a line."""
        return f"{self.folder}: draft model; learns on"

    def begin(self, prompt: Sequence[int], context: DraftContext) -> DraftSession:
        """Start a generation; its text is learnt from when it ends."""
        session = self.drafter.begin(prompt, context)
        own: Any = session
        own.on_close = Lesson(self, len(prompt))
        return session

    def learn(self) -> None:
        """Make the updates of one generation."""
        with self.trainer.lock:
            self.trainer.learn()

    def save(self) -> None:
        """Write the weights to where they were loaded from; nothing, if nothing was learnt.

        The file is there whole at any time, as it was or as it is now.
        """
        with self.trainer.lock:
            if self.trainer.num_updates:
                self.trainer.trainee.save_weights(self.folder, self.dtype)


class OnlineHead(OnlineDrafter):
    """A head that learns on; see `OnlineDrafter`."""

    drafter: HeadDrafter

    @property
    def features(self) -> Features:
        """What it reads of the target."""
        return self.drafter.features

    def describe(self) -> str:
        """What was recognised, in a line."""
        return f"{self.drafter.describe()}; learns on"


class OnlineDraftModel(OnlineDrafter):
    """A draft model that learns on; see `OnlineDrafter`.

    It drafts with the type of weights that its file has, as the same folder does without learning;
    what is trained is a copy in float32, in which small updates are not lost. Keys and values of
    earlier weights are no use to it: the server keeps none of its caches between turns. Draft
    caches that a caller keeps are drafted from all the same, which may cost acceptance.
    """

    drafter: ModelDrafter

    def learn(self) -> None:
        """Make the updates of one generation, and draft with what came of them."""
        super().learn()
        new = self.trainer.trainee.module.parameters()
        self.model.update(
            tree_map(lambda old, x: x.astype(old.dtype), self.model.parameters(), new)
        )
        mx.eval(self.model.parameters())

    def drafting_as(self, drafter: ModelDrafter) -> OnlineDraftModel:
        """The same weights and the same learning, with other options.

        Args:
            drafter: of `model`, with these options; it has the target's tokenizer.
        """
        other = copy.copy(self)
        other.drafter = replace(drafter, tokenizers="same")
        return other


def learning_on(
    folder: Path | str, target: nn.Module, bounds: Bounds = Bounds()
) -> OnlineHead | OnlineDraftModel:
    """A drafter of a trained head, or a draft model, that learns on while it is used.

    Args:
        folder: of what `train` made; its `save` may write there.
        target: the loaded model that it was trained for.
        bounds: what learning may cost.

    Raises:
        TrainingError: `train` did not make it, or it cannot learn, or not with this target.
        HeadError: it does not fit the target.
        ModelFolderError: the training has not come to its end.
        UnreadableError: the target does not show what it would learn from.
    """
    folder = Path(folder).expanduser()
    stored = stored_plan(folder)
    if group_of(target) is not None:
        raise TrainingError(
            "The target is spread over several ranks, which would all have to learn alike. Leave "
            "online learning out there, or run the target on one machine."
        )
    ends = target_ends(target)
    if stored["kind"] == "draft":
        model, tokenizer = load_model(folder)
        trainer = OnlineTrainer(DraftTrainee.of(str(folder), ends), target, bounds=bounds)
        drafts = ModelDrafter(model, tokenizer, tokenizers="same")
        return OnlineDraftModel(drafts, trainer, folder, stored["dtype"])
    plan = Plan("", stored["kind"], Data(()), _size(stored["size"]), num_steps=stored["num_steps"])
    trainee = KINDS[plan.kind](*_with_its_vocabulary(plan, folder, target))
    assert isinstance(trainee.module, Head)
    begin_with(str(folder), trainee, target)
    drafter = HeadDrafter(trainee.module, name=str(folder), vocab_size=ends.vocab_size)
    return OnlineHead(
        drafter, OnlineTrainer(trainee, target, bounds=bounds), folder, stored["dtype"]
    )


def stored_plan(folder: Path) -> dict[str, Any]:
    """What a head or a draft model was trained by, if it can learn on.

    Raises:
        TrainingError: it cannot, with what to do about that.
    """
    if not folder.is_dir() or Path(HF_HUB_CACHE).resolve() in folder.resolve().parents:
        raise TrainingError(
            f"{folder} is no folder of yours: what learns on is saved where it was loaded from, "
            f"and the Hub's cache is left as it is. {_make_one_of(str(folder))}"
        )
    config = folder / "config.json"
    if config.is_file() and "quantization" in json.loads(config.read_text(encoding="utf-8")):
        raise TrainingError(
            f"{folder} is quantized, and such weights cannot be trained. {_make_one_of('ORIGINAL')}"
        )
    if not (folder / PLAN).is_file():
        raise TrainingError(
            f"{folder} has no {PLAN}: only heads and draft models that `specdec-mlx train` made "
            f"can learn on. {_make_one_of('NAME' if is_head(folder) else str(folder))}"
        )
    stored: dict[str, Any] = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    if stored["kind"] not in LEARNING_KINDS:
        raise TrainingError(
            f"{folder} holds a {stored['kind']}; only {', '.join(LEARNING_KINDS)} learn on. Train "
            "one of those, or leave online learning out."
        )
    return stored


def _make_one_of(name: str) -> str:
    """How to come by a draft model that learns on."""
    return (
        "Make a draft model that learns on: specdec-mlx train --kind draft "
        f"--init {name} --model TARGET --texts FILE --out FOLDER."
    )


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
        return plan, target, None, np.zeros(0, np.int32)
    ids = np.array(offsets) + np.arange(offsets.shape[0])
    size = replace(plan.size, draft_vocab=len(ids))
    return replace(plan, size=size), target, None, ids
