"""From a target and texts to a folder that holds a trained drafter."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from specdec_mlx.drafters.heads.drafter import HeadDrafter
from specdec_mlx.drafters.heads.early_exit import ExitDrafter
from specdec_mlx.drafters.heads.loading import load_head
from specdec_mlx.drafters.heads.target_ends import target_ends
from specdec_mlx.errors import TrainingError
from specdec_mlx.training.continuations import continuations, write
from specdec_mlx.training.features import Batch, FeatureStore, live_batch
from specdec_mlx.training.files import begin_or_resume, load_arrays, save_arrays, save_json
from specdec_mlx.training.fitting import Schedule, Write, fit
from specdec_mlx.training.measuring import Acceptance
from specdec_mlx.training.one_pass import DraftTrainee, ExitTrainee, MedusaTrainee
from specdec_mlx.training.recursive import Eagle3Trainee, MTPTrainee
from specdec_mlx.training.texts import read_documents, split, stream_of, windows_of
from specdec_mlx.training.trainees import Size, Trainee

PLAN, REPORT = "plan.json", "training.json"
"""What was asked for, and what came of it."""

LEAST_WINDOWS = 2
"""Windows without which there is nothing to train on and nothing to hold out."""


@dataclass(frozen=True)
class Data:
    """What is learnt from.

    texts, held_out: files, see `texts.read_documents`; without held-out ones a part of the windows
    is held out. window: tokens. continuations: windows of text that the target writes. temps: its
    temperatures, taken in turn. opening: tokens of the texts before what it writes.
    """

    texts: tuple[str, ...]
    held_out: tuple[str, ...] = ()
    window: int = 512
    continuations: int = 0
    temps: tuple[float, ...] = (1.0, 0.5)
    opening: int = 64
    seed: int = 0


@dataclass(frozen=True)
class Plan:
    """All that a training is told.

    model: name or folder of the target. kind: a key of KINDS. data, size, schedule: see there.
    num_steps: tokens of the drafts that recursive heads are trained on. init: what to begin with, a
    draft model or the folder of a head of this kind and size. dtype: of the weights in the file.
    """

    model: str
    kind: str
    data: Data
    size: Size = field(default_factory=Size)
    schedule: Schedule = field(default_factory=Schedule)
    num_steps: int = 3
    init: str | None = None
    dtype: str = "float16"


def train(
    plan: Plan,
    target: nn.Module,
    tokenizer: Any,
    out: Path,
    *,
    work: Path | None = None,
    keep_work: bool = False,
) -> Acceptance:
    """Train a drafter and write its folder; goes on where it was interrupted.

    Args:
        plan: what is trained, and on what.
        target: the loaded model.
        tokenizer: its tokenizer, as mlx-lm loads it.
        out: folder for the result, with the curve and the acceptance in `training.json`.
        work: folder for tokens, features and checkpoints, `out`/work if None. Trainings on the
            same data may share it.
        keep_work: whether it stays afterwards.

    Returns:
        The acceptance by position on held-out text.

    Raises:
        TrainingError: the texts cannot be used, or `out` holds a training with other settings.
        UnreadableError: the target does not show what such a head reads.
    """
    work = out / "work" if work is None else work
    begin_or_resume(out / PLAN, asdict(plan))
    begin_or_resume(work / "data.json", {"model": plan.model, **asdict(plan.data)})
    trained, held_out = windows(plan.data, target, tokenizer, work)
    mx.random.seed(plan.schedule.seed)
    trainee = KINDS[plan.kind](plan, target, tokenizer, trained)
    if plan.init is not None and plan.kind != "draft":
        begin_with(plan.init, trainee, target)
    writes = own_text(trainee, target, plan)
    learnt = FeatureStore(work / "trained", trained, trainee.features)
    measured = FeatureStore(work / "held-out", held_out, trainee.features)
    learnt.fill(target)
    measured.fill(target)
    progress, acceptance = fit(trainee, learnt, measured, plan.schedule, out, writes)
    trainee.save(out, plan.dtype)
    report = {"plan": asdict(plan), "curve": progress.curve, "acceptance": acceptance.to_json()}
    save_json(out / REPORT, report)
    if not keep_work:
        shutil.rmtree(work)
    return acceptance


def windows(
    data: Data, target: nn.Module, tokenizer: Any, work: Path
) -> tuple[np.ndarray, np.ndarray]:
    """Windows [n, window] to train on, continuations behind the texts, and those held out."""
    path = work / "tokens.safetensors"
    if not path.exists():
        save_arrays(path, {k: mx.array(x) for k, x in _of_texts(data, tokenizer).items()})
    stored = {name: np.array(x) for name, x in load_arrays(path).items()}
    trained, openings = stored["trained"], stored["openings"]
    if len(openings):
        own = continuations(target, openings, data.window, data.temps, work)
        trained = np.concatenate([trained, own])
    return trained, stored["held_out"]


def _of_texts(data: Data, tokenizer: Any) -> dict[str, np.ndarray]:
    """Windows of the texts, and openings for the target to go on from."""
    end = tokenizer.eos_token_id

    def read(paths: Sequence[str]) -> np.ndarray:
        return stream_of(read_documents([Path(path) for path in paths], tokenizer), end)

    stream = read(data.texts)
    trained = windows_of(stream, data.window, data.window)
    if data.held_out:
        held_out = windows_of(read(data.held_out), data.window, max(1, data.window // 2))
    else:
        trained, held_out = split(trained, data.seed)
        stream = trained.ravel()
    if len(trained) < LEAST_WINDOWS or not len(held_out):
        raise TrainingError(
            f"The texts have {len(stream)} tokens, too few for {LEAST_WINDOWS} windows of "
            f"{data.window} and one that is held out. Give more text, or smaller windows."
        )
    rng = np.random.default_rng(data.seed)
    starts = rng.integers(0, len(stream) - data.opening, size=data.continuations)
    openings = np.array([stream[i : i + data.opening] for i in starts], np.int32)
    return {
        "trained": trained,
        "held_out": held_out,
        "openings": openings.reshape(-1, data.opening),
    }


def begin_with(folder: str, trainee: Trainee, target: nn.Module) -> None:
    """Give a head the weights of one that was trained before.

    Args:
        folder: of that one, or its Hugging Face name.
        trainee: the head.
        target: what it is trained for.

    Raises:
        TrainingError: it is of another kind or size.
        HeadError: it does not fit the target.
    """
    loaded = load_head(folder, target)
    before: Any = nn.Module()
    if isinstance(loaded, HeadDrafter):
        before = loaded.head
    elif isinstance(loaded, ExitDrafter) and loaded.exit is not None:
        before = loaded.exit
    theirs = dict(tree_flatten(before.parameters()))
    ours = dict(tree_flatten(trainee.module.parameters()))
    differ = [n for n, x in ours.items() if n not in theirs or theirs[n].shape != x.shape]
    differ += sorted(theirs.keys() - ours.keys())
    if not differ and trainee.vocabulary is not None:
        same = mx.array_equal(before.vocabulary.ids, trainee.vocabulary).item()
        differ += [] if same else ["d2t"]
    if differ:
        raise TrainingError(
            f"{folder} is no head of this kind and size, which the training could begin with: "
            f"{differ[0]} differs. Give the flags that it was made with."
        )
    trainee.module.update(before.parameters())
    trainee.module.set_dtype(mx.float32)


def own_text(trainee: Trainee, target: nn.Module, plan: Plan) -> Write | None:
    """What has the drafter write its own text at temperature 1, if some is asked for.

    Raises:
        TrainingError: it is asked for of a head, which has no text of its own.
    """
    if not plan.schedule.on_policy:
        return None
    model = trainee.writer()
    if model is None:
        raise TrainingError(
            f"On-policy text of kind {plan.kind}: such a head reads states of what the target has "
            "read, and writes nothing alone. Leave it out, or train a draft or an exit."
        )
    opening, layers = plan.data.opening, tuple(trainee.features.layers)

    def make(tokens: mx.array, seed: int) -> Batch:
        openings = np.array(tokens[:, :opening])
        own = write(model, openings, tokens.shape[1], [1.0] * len(openings), seed=seed)
        return live_batch(target, layers, own)

    return make


def _mtp(plan: Plan, target: nn.Module, tokenizer: Any, trained: np.ndarray) -> Trainee:
    return MTPTrainee(target_ends(target), plan.size, plan.num_steps)


def _eagle3(plan: Plan, target: nn.Module, tokenizer: Any, trained: np.ndarray) -> Trainee:
    return Eagle3Trainee(target_ends(target), plan.size, plan.num_steps, trained)


def _medusa(plan: Plan, target: nn.Module, tokenizer: Any, trained: np.ndarray) -> Trainee:
    return MedusaTrainee(target_ends(target), plan.size)


def _exit(plan: Plan, target: nn.Module, tokenizer: Any, trained: np.ndarray) -> Trainee:
    layers = plan.size.layers or (max(1, len(target.layers) // 2),)
    return ExitTrainee(target, target_ends(target), layers[0], plan.size)


def _draft(plan: Plan, target: nn.Module, tokenizer: Any, trained: np.ndarray) -> Trainee:
    if plan.init is not None:
        return DraftTrainee.of(plan.init, target_ends(target))
    return DraftTrainee.new(target_ends(target), plan.size, tokenizer)


KINDS: Mapping[str, Callable[[Plan, nn.Module, Any, np.ndarray], Trainee]] = {
    "mtp": _mtp,
    "eagle3": _eagle3,
    "medusa": _medusa,
    "exit": _exit,
    "draft": _draft,
}
"""Name -> what makes it, of the plan, the target, its tokenizer and the windows."""
