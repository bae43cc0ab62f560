"""From a target and texts to a folder that holds a trained drafter."""

from __future__ import annotations

import json
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
from specdec_mlx.training.answers import answers
from specdec_mlx.training.features import FeatureStore
from specdec_mlx.training.files import (
    Clock,
    begin_or_resume,
    load_arrays,
    save_arrays,
    save_json,
)
from specdec_mlx.training.fitting import CHECKPOINT, Schedule, fit, within_memory
from specdec_mlx.training.measuring import Acceptance
from specdec_mlx.training.one_pass import DraftTrainee, ExitTrainee, MedusaTrainee
from specdec_mlx.training.recursive import Eagle3Trainee, MTPTrainee
from specdec_mlx.training.texts import (
    learnt,
    padded,
    read_documents,
    read_prompts,
    split,
    stream_of,
    windows_of,
)
from specdec_mlx.training.trainees import Size, Trainee

PLAN, REPORT = "plan.json", "training.json"
"""What was asked for, and what came of it."""

ANSWERING = 0.4
"""Part of a given time in which the target begins new answers."""


@dataclass(frozen=True)
class Data:
    """What is learnt from.

    prompts: files of prompts that the target answers, see `texts.read_prompts`. texts: files of
    texts instead, see `texts.read_documents`. held_out: others of the kind to measure on; without
    them a part is held out. window: tokens. temps: at which each prompt is answered.
    """

    texts: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()
    window: int = 512
    temps: tuple[float, ...] = (0.0, 1.0)
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
        The acceptance on held-out text; that of a training which has ended is not found anew.

    Raises:
        TrainingError: the texts cannot be used, an update does not fit into memory, or `out` holds
            a training with other settings.
        UnreadableError: the target does not show what such a head reads.
    """
    work = out / "work" if work is None else work
    begin_or_resume(out / PLAN, asdict(plan))
    if (out / REPORT).exists():
        return Acceptance(**json.loads((out / REPORT).read_text(encoding="utf-8"))["acceptance"])
    begin_or_resume(work / "data.json", {"model": plan.model, **asdict(plan.data)})
    clock = Clock(out / "seconds.json")
    trained, held_out = windows(plan, target, tokenizer, work, clock)
    mx.random.seed(plan.schedule.seed)
    trainee = KINDS[plan.kind](plan, target, tokenizer, trained[..., 0][trained[..., 1] > 0])
    if plan.init is not None and plan.kind != "draft":
        begin_with(plan.init, trainee, target)
    learnt = FeatureStore(work / "trained", trained, trainee.features)
    measured = FeatureStore(work / "held-out", held_out, trainee.features)
    measured.fill(target)
    learnt.fill(target)
    schedule = within_memory(trainee, learnt, plan.schedule)
    curve, acceptance, same = fit(trainee, learnt, measured, schedule, out, clock)
    trainee.save(out, plan.dtype)
    report = {"curve": curve, "acceptance": asdict(acceptance), "trained": asdict(same)}
    save_json(out / REPORT, {"plan": asdict(plan), **report})
    for path in (out / CHECKPOINT, clock.path):
        path.unlink(missing_ok=True)
    if not keep_work:
        shutil.rmtree(work)
    return acceptance


def windows(
    plan: Plan, target: nn.Module, tokenizer: Any, work: Path, clock: Clock
) -> tuple[np.ndarray, np.ndarray]:
    """Windows [n, window, 2] to train on, and those held out; see `texts` and `answers`."""
    path = work / "tokens.safetensors"
    if not path.exists():
        if plan.data.prompts:
            trained, held_out = _of_prompts(plan, target, tokenizer, work, clock)
        else:
            trained, held_out = _of_texts(plan.data, tokenizer)
        save_arrays(path, {"trained": mx.array(trained), "held_out": mx.array(held_out)})
    stored = load_arrays(path)
    return np.array(stored["trained"]), np.array(stored["held_out"])


def _of_texts(data: Data, tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Windows of the texts; those held out are measured in their second half."""

    def read(paths: Sequence[str], stride: int) -> np.ndarray:
        stream = stream_of(read_documents(paths, tokenizer), tokenizer.eos_token_id)
        rows = windows_of(stream, data.window, stride)
        return rows[rows[:, 1:, 1].any(axis=1)]

    trained, held_out = read(data.texts, data.window), read(data.held_out, data.window // 2)
    if not data.held_out:
        trained, held_out = (trained[rows] for rows in split(len(trained), data.seed))
    if not len(trained) or not len(held_out):
        raise TrainingError(
            f"The texts are too short for a window of {data.window} tokens to train on and one "
            "that is held out. Give more text, or smaller windows."
        )
    held_out[:, : data.window // 2, 1] = 0
    return trained, held_out


def _of_prompts(
    plan: Plan, target: nn.Module, tokenizer: Any, work: Path, clock: Clock
) -> tuple[np.ndarray, np.ndarray]:
    """The target's answers; those that are held out come first, and are greedy."""
    data, minutes = plan.data, plan.schedule.minutes
    held_out, prompts = (read_prompts(x, tokenizer) for x in (data.held_out, data.prompts))
    chosen, others = split(len(prompts), data.seed)
    chosen += others if held_out else []
    held_out = held_out or [prompts[i] for i in others]
    prompts = held_out + [prompts[i] for i in chosen]
    short = [i for i, prompt in enumerate(prompts) if len(prompt) <= data.window // 2]

    def is_time() -> bool:
        clock.keep()
        return minutes is not None and clock.seconds() > ANSWERING * 60 * minutes

    turns = [(0, i, 0.0) for i in short if i < len(held_out)]
    for number, temp in enumerate(data.temps):
        turns += [(number, i, temp) for i in short if i >= len(held_out)]
    mx.random.seed(data.seed)
    path = work / "answers.jsonl"
    found = answers(target, tokenizer, prompts, data.window, turns, path, is_time)
    rows: tuple[list[np.ndarray], list[np.ndarray]] = [], []
    for (_, i, _), answer in found.items():
        document = learnt(prompts[i] + answer, len(prompts[i]))
        rows[i < len(held_out)].append(padded(document, data.window))
    if not all(rows):
        raise TrainingError(
            f"Of {len(prompts)} prompts {len(short)} are no longer than half a window, and "
            f"{len(rows[0])} were answered to train on and {len(rows[1])} to hold out. "
            "Give more prompts, a larger window, or more time."
        )
    return np.stack(rows[0]), np.stack(rows[1])


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


def _mtp(plan: Plan, target: nn.Module, tokenizer: Any, trained: np.ndarray) -> Trainee:
    return MTPTrainee(target_ends(target), plan.size, plan.num_steps, trained)


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
"""Name -> what makes it, of the plan, the target, its tokenizer and the tokens that are learnt."""
