"""The training itself: batches in an order of their own, AdamW, checkpoints to go on from."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from tqdm import tqdm

from specdec_mlx.training.features import Batch, FeatureStore
from specdec_mlx.training.files import save_arrays
from specdec_mlx.training.losses import divergence
from specdec_mlx.training.measuring import Acceptance, measure, target_logits_of
from specdec_mlx.training.trainees import Trainee

WARM_UP = 0.05
"""Share of the updates in which the learning rate rises; after that it falls along a cosine."""

DECAY = 0.8
"""Weight of a draft's next position, of that of the one before: later tokens matter less often."""

CHECKPOINT = "checkpoint.safetensors"


@dataclass(frozen=True)
class Schedule:
    """How long and with what a drafter is trained.

    steps: updates. batch: windows of an update. learning_rate: its peak. loss: see
    `losses.divergence`. on_policy: share of the updates on text that the drafter itself wrote.
    evaluate: updates between two measurements on held-out text. checkpoint: between two snapshots.
    """

    steps: int = 2000
    batch: int = 4
    learning_rate: float = 1e-3
    loss: str = "forward-kl"
    on_policy: float = 0.0
    evaluate: int = 500
    checkpoint: int = 100
    seed: int = 0


@dataclass
class Progress:
    """Where a training stands.

    step: updates done. curve: (updates, loss since the last measurement, acceptance).
    """

    step: int = 0
    curve: list[dict[str, Any]] = field(default_factory=list)


Write = Callable[[mx.array, int], Batch]
"""Windows [batch, window] and a seed -> a batch that the drafter wrote itself."""


def fit(
    trainee: Trainee,
    trained: FeatureStore,
    held_out: FeatureStore,
    schedule: Schedule,
    work: Path,
    write: Write | None = None,
) -> tuple[Progress, Acceptance]:
    """Train, from the last checkpoint on if there is one.

    Args:
        trainee: what is trained, in place.
        trained: windows to train on.
        held_out: windows to measure on.
        schedule: how long.
        work: folder of the checkpoint.
        write: makes the drafter's own text, if some is asked for.

    Returns:
        The progress with its curve, and the acceptance at the end.
    """
    optimizer = optim.AdamW(
        rates(schedule.learning_rate, schedule.steps), betas=[0.9, 0.95], weight_decay=0.01
    )
    optimizer.init(trainee.module.trainable_parameters())
    progress = resume(work / CHECKPOINT, trainee.module, optimizer)
    compare = divergence(schedule.loss)
    step = nn.value_and_grad(trainee.module, lambda batch: loss_of(trainee, batch, compare))
    bar = tqdm(total=schedule.steps, initial=progress.step, desc="training", mininterval=2)
    losses: list[float] = []
    acceptance = None
    for batch in batches(trained, schedule, progress.step, write):
        value, gradients = step(batch)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        optimizer.update(trainee.module, gradients)
        mx.eval(value, trainee.module.parameters(), optimizer.state)
        progress.step += 1
        losses.append(value.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
        bar.update()
        done = progress.step == schedule.steps
        if progress.step % schedule.evaluate == 0 or done:
            acceptance = measure(trainee, held_out)
            bar.write(f"{progress.step}: loss {np.mean(losses):.3f}, {acceptance}")
            progress.curve.append(
                {"step": progress.step, "loss": float(np.mean(losses)), **acceptance.to_json()}
            )
            losses = []
        if progress.step % schedule.checkpoint == 0 or done:
            keep(work / CHECKPOINT, trainee.module, optimizer, progress)
    bar.close()
    return progress, acceptance or measure(trainee, held_out)


def loss_of(
    trainee: Trainee, batch: Batch, compare: Callable[[mx.array, mx.array], mx.array]
) -> mx.array:
    """Mean divergence of each draft position, weighted by DECAY."""
    target = mx.stop_gradient(target_logits_of(trainee, batch.features.head_input))
    if trainee.vocabulary is not None:
        target = target[..., trainee.vocabulary]
    total, weight, weights = mx.array(0.0), 1.0, 0.0
    for logits, first in trainee.predictions(batch):
        size = min(logits.shape[-1], target.shape[-1])
        rows = target[:, first : first + logits.shape[1], :size]
        each = compare(nn.log_softmax(rows), nn.log_softmax(logits[..., :size]))
        total = total + weight * mx.mean(each)
        weights += weight
        weight *= DECAY
    return total / weights


def batches(
    trained: FeatureStore, schedule: Schedule, done: int, write: Write | None
) -> Iterator[Batch]:
    """The batches of all updates but the first `done`; each depends on the seed and its number."""
    for step in range(done, schedule.steps):
        indices = batch_indices(step, schedule.batch, len(trained), schedule.seed)
        draw = np.random.default_rng([schedule.seed, step]).random()
        if write is not None and draw < schedule.on_policy:
            yield write(mx.array(trained.windows[indices]), step)
        else:
            yield trained.batch(indices)


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
