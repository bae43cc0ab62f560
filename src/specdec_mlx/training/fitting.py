"""The training itself: batches in an order of their own, AdamW, checkpoints to go on from."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from tqdm import tqdm

from specdec_mlx.errors import TrainingError
from specdec_mlx.training.features import FeatureStore
from specdec_mlx.training.files import Clock, save_arrays
from specdec_mlx.training.losses import LOSSES, Divergence, loss_and_gradients
from specdec_mlx.training.measuring import Acceptance, measure
from specdec_mlx.training.trainees import Trainee

WARM_UP = 0.05
"""Share of the updates in which the learning rate rises; after that it falls along a cosine."""

MEMORY_SHARE = 0.75
"""Part of the machine's memory that a training may take."""

CHECKPOINT = "checkpoint.safetensors"
SECONDS = 120.0
"""Between two checkpoints."""

MUCH = 1.5
"""Times as much kept on texts that it is trained on as on others, from which on it overfits."""

MEASUREMENTS = 8
"""On held-out text, in a training."""


@dataclass(frozen=True)
class Schedule:
    """How long and with what a drafter is trained.

    steps: updates. minutes: of all, the target's work included, in place of `steps`. batch: windows
    of an update. learning_rate: its peak. loss: see `losses.LOSSES`.
    """

    steps: int = 2000
    batch: int = 4
    learning_rate: float = 1e-3
    loss: str = "forward-kl"
    seed: int = 0
    minutes: int | None = None


@dataclass
class Progress:
    """Where a training stands.

    step: updates done. tokens: that were learnt in them, each time counted. began: seconds at its
    first update. curve: what was measured, and the mean loss since the measurement before.
    """

    step: int = 0
    tokens: int = 0
    began: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)


def fit(
    trainee: Trainee,
    trained: FeatureStore,
    held_out: FeatureStore,
    schedule: Schedule,
    work: Path,
    clock: Clock,
) -> tuple[list[dict[str, Any]], Acceptance, Acceptance]:
    """Train, from the last checkpoint on if there is one.

    Args:
        trainee: what is trained, in place.
        trained: windows to train on.
        held_out: windows to measure on.
        schedule: how long.
        work: folder of the checkpoint.
        clock: of the training.

    Returns:
        The curve, and the acceptance at the end, on held-out text and on what it is trained on.
    """
    optimizer = optim.AdamW(0.0, betas=[0.9, 0.95], weight_decay=0.01)
    optimizer.init(trainee.module.trainable_parameters())
    progress = resume(work / CHECKPOINT, trainee.module, optimizer)
    progress.began = progress.began or clock.seconds()
    total = schedule.steps
    if schedule.minutes is not None:  # a second takes the place of an update
        total = max(1, int(60 * schedule.minutes - progress.began))
    every = max(1, total // MEASUREMENTS)
    rate, compare = rates(schedule.learning_rate, total), LOSSES[schedule.loss]

    def so_far() -> int:
        return progress.step if schedule.minutes is None else int(clock.seconds() - progress.began)

    done = so_far()
    acceptance = None
    losses: list[float] = []
    kept = clock.seconds()
    with tqdm(
        total=total, initial=done, desc="training", unit="", mininterval=1, miniters=0
    ) as bar:
        while done < total:
            step = progress.step
            batch = trained.batch(batch_indices(step, schedule.batch, len(trained), schedule.seed))
            optimizer.learning_rate = rate(mx.array(done))
            value, gradients = loss_and_gradients(trainee, batch, compare)
            gradients, _ = optim.clip_grad_norm(gradients, 1.0)
            optimizer.update(trainee.module, gradients)
            mx.eval(trainee.module.parameters(), optimizer.state)
            losses.append(value.item())
            progress.step += 1
            progress.tokens += int(batch.counted.sum())
            before, done = done, so_far()
            bar.set_postfix(loss=f"{losses[-1]:.3f}", updates=progress.step, refresh=False)
            bar.update(min(done, total) - bar.n)
            if done // every > before // every or done >= total:
                acceptance = measure(trainee, held_out, len(held_out))
                loss = float(np.mean(losses))
                point = {"step": progress.step, "tokens": progress.tokens, "loss": loss}
                progress.curve.append(point | asdict(acceptance))
                done_so_far = f"{progress.step} updates, {progress.tokens} tokens"
                bar.write(f"{done_so_far}: loss {loss:.3f}, held-out text: {acceptance}")
                losses = []
            if clock.seconds() - kept > SECONDS:
                keep(work / CHECKPOINT, trainee.module, optimizer, progress)
                clock.keep()
                kept = clock.seconds()
    acceptance = acceptance or measure(trainee, held_out, len(held_out))
    same = measure(trainee, trained, len(held_out))
    tqdm.write(f"On text that it is trained on: {same}.")
    if same.kept > MUCH * acceptance.kept:
        tqdm.write("It overfits: more texts would help, and more updates would not.")
    return progress.curve, acceptance, same


def within_memory(trainee: Trainee, trained: FeatureStore, schedule: Schedule) -> Schedule:
    """The schedule, with smaller updates if it is for a time and they do not fit into memory.

    Raises:
        TrainingError: they do not fit.
    """
    first, further = memory_of_updates(trainee, trained, LOSSES[schedule.loss])
    there = MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed = first + (schedule.batch - 1) * further
    fits = 1 + int((there - first) // max(1, further))
    what = f"An update of {schedule.batch} windows takes about {needed / 1e9:.1f} GB of memory"
    tqdm.write(f"{what}.")
    if fits >= schedule.batch or (fits > 0 and schedule.minutes is not None):
        return replace(schedule, batch=min(fits, schedule.batch))
    lower = f"--batch to {fits}" if fits > 0 else "--window or --draft-vocab"
    raise TrainingError(f"{what}, and {there / 1e9:.1f} GB may be used. Lower {lower}.")


def memory_of_updates(
    trainee: Trainee, trained: FeatureStore, compare: Divergence
) -> tuple[int, int]:
    """Bytes in use for an update of the longest window, and for each further one, as measured.

    The latter by updates with a single token to learn, since logits are not held for all rows.
    """
    longest = np.argsort(-trained.lengths, kind="stable").tolist()
    one, two = (trained.batch((longest * 2)[:count]) for count in (1, 2))
    last = np.arange(one.answered.shape[1]) == one.answered.shape[1] - 1
    peaks = []
    for batch in (one, *(replace(x, answered=x.answered & last) for x in (one, two))):
        mx.reset_peak_memory()
        mx.eval(loss_and_gradients(trainee, batch, compare))
        peaks.append(mx.get_peak_memory())
    weights = sum(x.nbytes for _, x in tree_flatten(trainee.module.trainable_parameters()))
    return peaks[0] + 2 * weights, peaks[2] - peaks[1]  # AdamW notes as much as two of each


def batch_indices(step: int, batch: int, count: int, seed: int) -> list[int]:
    """Windows of an update: every window once before any comes again."""
    indices = []
    for place in range(step * batch, (step + 1) * batch):
        order = np.random.default_rng([seed, place // count]).permutation(count)
        indices.append(int(order[place % count]))
    return indices


def rates(peak: float, steps: int) -> Callable[[mx.array], mx.array]:
    """Learning rate by update: up to `peak` in a line, down to 0 along a cosine."""
    rise = max(1, math.ceil(WARM_UP * steps))

    def rate(step: mx.array) -> mx.array:
        done = step.astype(mx.float32)  # unsigned otherwise
        fall = mx.clip((done - rise) / max(1, steps - rise), 0, 1)
        return peak * mx.minimum((done + 1) / rise, 0.5 * (1 + mx.cos(math.pi * fall)))

    return rate


def keep(path: Path, module: nn.Module, optimizer: optim.Optimizer, progress: Progress) -> None:
    """Write what a training needs to go on."""
    weights = {f"weights.{name}": x for name, x in tree_flatten(module.trainable_parameters())}
    state = {f"state.{name}": x for name, x in tree_flatten(optimizer.state)}
    save_arrays(path, weights | state, {"progress": json.dumps(vars(progress))})


def resume(path: Path, module: nn.Module, optimizer: optim.Optimizer) -> Progress:
    """Go on from where `keep` left off; from the beginning if there is nothing."""
    if not path.exists():
        return Progress()
    loaded: Any = mx.load(str(path), return_metadata=True)
    arrays, metadata = loaded
    named = {
        part: [(n.removeprefix(part), x) for n, x in arrays.items() if n.startswith(part)]
        for part in ("weights.", "state.")
    }
    module.update(tree_unflatten(named["weights."]))
    optimizer.state = tree_unflatten(named["state."])
    mx.eval(module.parameters(), optimizer.state)
    return Progress(**json.loads(metadata["progress"]))
