"""From a target and texts to a folder that holds a trained drafter."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from specdec_mlx.drafters.heads.loading import TRAINED_LENGTH, load_head
from specdec_mlx.errors import TrainingError
from specdec_mlx.lab.training import features, texts
from specdec_mlx.lab.training.features import FeatureStore
from specdec_mlx.lab.training.fitting import CHECKPOINT, Acceptance, Updates, fit, within_memory
from specdec_mlx.lab.training.trainees import KINDS, Recipe, Size, Trainee

PLAN, REPORT = "plan.json", "training.json"

ANSWERING = 0.4  # part of a given time in which the target begins new answers


@dataclass(frozen=True)
class Data:
    """Files to learn from.

    Attributes:
        texts: files with text to learn.
        prompts: files with prompts that the target answers.
        held_out: files to measure on. By default a part of the others is held out.
        window: tokens of a window.
        temps: temperatures of the answers.
        seed: of answers, and of the held-out part.
    """

    texts: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()
    window: int = 512
    temps: tuple[float, ...] = (0.0, 1.0)
    seed: int = 0


@dataclass(frozen=True)
class Plan:
    """Settings of a training.

    Attributes:
        model: name or folder of the target.
        kind: a key of KINDS.
        data: files to learn from.
        size: of a new module.
        schedule: number and size of updates.
        num_steps: draft length of a recursive head.
        init: draft model, or folder of a recursive head, to begin with.
        dtype: of the saved weights.
    """

    model: str
    kind: str
    data: Data
    size: Size = field(default_factory=Size)
    schedule: Updates = field(default_factory=Updates)
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
    """Train a drafter and save its folder. An interrupted training continues.

    Args:
        plan: the settings.
        target: as mlx-lm loads it.
        tokenizer: the target's.
        out: folder for the result, with the curve and the acceptance in `training.json`.
        work: folder for tokens and features, which trainings on the same data may share. None for
            `out`/work.
        keep_work: do not delete `work` at the end.

    Returns:
        The acceptance on held-out text. For a training that has ended, the stored acceptance.

    Raises:
        TrainingError: the texts cannot be used, an update does not fit into memory, or `out` was
            begun with other settings.
        UnreadableError: the target does not show the states that this kind of head reads.
    """
    work = out / "work" if work is None else work
    features.begin_or_resume(out / PLAN, asdict(plan))
    if (out / REPORT).exists():
        return Acceptance(**features.load_json(out / REPORT)["acceptance"])
    features.begin_or_resume(work / "data.json", {"model": plan.model, **asdict(plan.data)})
    clock = features.Clock(out / "seconds.json")
    path = work / "tokens.safetensors"
    if not path.exists():
        of_prompts, inputs = plan.data.prompts, (plan, target, tokenizer, work, clock)
        rows = _of_prompts(*inputs) if of_prompts else _of_texts(plan.data, tokenizer)
        arrays = zip(("trained", "held_out"), map(mx.array, rows), strict=True)
        features.save_arrays(path, dict(arrays))
    stored: Any = mx.load(str(path))
    trained, held_out = np.array(stored["trained"]), np.array(stored["held_out"])
    # A training that stopped before its first checkpoint begins with the same weights.
    mx.random.seed(plan.schedule.seed)
    tokens = trained[..., 0][trained[..., 1] > 0]
    recipe = Recipe(target, plan.size, plan.num_steps, tokens, tokenizer, plan.init)
    trainee = (
        KINDS[plan.kind](recipe)
        if plan.init is None or plan.kind == "draft"
        else begun_with(plan.init, plan.kind, recipe)
    )
    learnable, measured = (
        FeatureStore(target, work / name, windows, trainee.features)
        for name, windows in (("trained", trained), ("held-out", held_out))
    )
    schedule = within_memory(trainee, learnable, plan.schedule)
    curve, acceptance, same = fit(trainee, learnable, measured, schedule, out, clock)
    trainee.config[TRAINED_LENGTH] = plan.data.window
    trainee.save(out, plan.dtype)
    report = {"curve": curve, "acceptance": asdict(acceptance), "trained": asdict(same)}
    features.save_json(out / REPORT, {"plan": asdict(plan), **report})
    for path in (out / CHECKPOINT, clock.path):
        path.unlink(missing_ok=True)
    if not keep_work:
        shutil.rmtree(work)
    return acceptance


def _of_texts(data: Data, tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Windows to train on and to hold out. Held-out windows are measured in their second half."""
    half = data.window // 2
    trained = texts.windows_of(data.texts, tokenizer, data.window, data.window)
    held_out = texts.windows_of(data.held_out, tokenizer, data.window, half)
    if not data.held_out:
        trained, held_out = (trained[rows] for rows in texts.split(len(trained), data.seed))
    if not len(trained) or not len(held_out):
        raise TrainingError(
            f"The texts are too short for a window of {data.window} tokens to train on and one "
            "that is held out. Give more text, or smaller windows."
        )
    # Held-out windows may overlap by half. Only the half with a context is measured.
    held_out[:, :half, 1] = 0
    return trained, held_out


def _of_prompts(
    plan: Plan, target: nn.Module, tokenizer: Any, work: Path, clock: features.Clock
) -> tuple[np.ndarray, np.ndarray]:
    """Windows of the target's answers. Held-out prompts are answered first, and greedily."""
    data, minutes = plan.data, plan.schedule.minutes
    held_out, prompts = (texts.read_prompts(x, tokenizer) for x in (data.held_out, data.prompts))
    if not held_out:
        chosen, others = texts.split(len(prompts), data.seed)
        held_out, prompts = [prompts[i] for i in others], [prompts[i] for i in chosen]
    first, prompts = len(held_out), held_out + prompts
    short = [i for i, prompt in enumerate(prompts) if len(prompt) <= data.window // 2]

    def is_time() -> bool:
        clock.keep()
        return minutes is not None and clock.seconds() > ANSWERING * 60 * minutes

    # If the time ends early, there is at least something to measure on.
    turns = [(0, i, 0.0) for i in short if i < first]
    for number, temp in enumerate(data.temps):
        turns += [(number, i, temp) for i in short if i >= first]
    mx.random.seed(data.seed)
    path = work / "answers.jsonl"
    answers = texts.answers(target, tokenizer, prompts, data.window, turns, path, is_time)
    rows: tuple[list[np.ndarray], list[np.ndarray]] = [], []
    for (_, i, _), answer in answers.items():
        document = texts.learnt(prompts[i] + answer, len(prompts[i]))
        rows[i < first].append(texts.padded(document, data.window))
    if not all(rows):
        raise TrainingError(
            f"Of {len(prompts)} prompts {len(short)} are no longer than half a window, and "
            f"{len(rows[0])} were answered to train on and {len(rows[1])} to hold out. "
            "Give more prompts, a larger window, or more time."
        )
    return np.stack(rows[0]), np.stack(rows[1])


def begun_with(folder: str, kind: str, recipe: Recipe) -> Trainee:
    """A trainee with the weights of a trained head.

    Raises TrainingError for another kind, size or target.
    """
    loaded: Any = load_head(folder, recipe.target)
    before = getattr(loaded, "head", None) or getattr(loaded, "exit", None) or nn.Module()
    vocabulary = getattr(before, "vocabulary", None)
    trainee = KINDS[kind](replace(recipe, vocabulary=vocabulary))
    try:
        trainee.module.load_weights(tree_flatten(before.parameters()))
    except ValueError as error:
        raise TrainingError(
            f"{folder} is no head of this kind and size, which the training could begin with: "
            f"{shorten(str(error), 200).rstrip('.')}. Give the flags that it was made with."
        ) from error
    trainee.module.set_dtype(mx.float32)
    return trainee
