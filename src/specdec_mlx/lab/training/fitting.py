"""Fitting: batches in a random order, AdamW, checkpoints to go on from."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from jaxtyping import Float
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from tqdm.auto import tqdm

from specdec_mlx.errors import TrainingError
from specdec_mlx.lab.training.features import Batch, Clock, FeatureStore, save_arrays
from specdec_mlx.lab.training.trainees import Trainee
from specdec_mlx.progress import progress_bar

DECAY = 0.8  # weight of a draft's position relative to the one before: later ones matter less

Logprobs = Float[mx.array, "*n vocab"]
Divergence = Callable[[mx.array, mx.array], mx.array]
"""Log-probabilities [..., V] of p and of q -> a number [...] for each position."""


def forward_kl(target_logprobs: Logprobs, draft_logprobs: Logprobs) -> Float[mx.array, "*n"]:
    """KL(p || q) in nats, which makes q cover all of p. It teaches fast, and is the default."""
    probs = mx.exp(target_logprobs)
    # 0 log 0 = 0, so that the loss and its gradients stay finite
    logs = mx.where(probs > 0, target_logprobs - draft_logprobs, 0)
    return mx.sum(probs * logs, axis=-1)


def total_variation(target_logprobs: Logprobs, draft_logprobs: Logprobs) -> Float[mx.array, "*n"]:
    """Half of sum(|p - q|), the rejection probability (Leviathan et al. 2023, corollary 3.6)."""
    difference = mx.exp(target_logprobs) - mx.exp(draft_logprobs)
    return 0.5 * mx.sum(mx.abs(difference), axis=-1)


LOSSES: dict[str, Divergence] = {
    "forward-kl": forward_kl,
    "tv": total_variation,
    "forward-kl+tv": lambda p, q: forward_kl(p, q) + total_variation(p, q),
}


def loss_and_gradients(
    trainee: Trainee, batch: Batch, compare: Divergence, most: int | None = None
) -> tuple[Any, Any]:
    """Mean divergence of the first `most` draft positions, weighted by DECAY, and its gradients.

    Logits take most of the memory, so they are made a few rows at a time. This gives the gradients
    of the states first, and then the gradients of the layers below in a single step.
    """
    module, parameters = trainee.module, trainee.module.trainable_parameters()
    head = {name: parameters[name] for name in trainee.head_names if name in parameters}
    states, inside = drafted(trainee, batch, most)
    decay = DECAY ** np.arange(len(inside))
    # Each position is a mean over its places, and the weights of all positions add up to 1.
    shares = inside.T / np.maximum(1, inside.sum(axis=1)) * decay / decay.sum()
    weights = mx.array(shares.T, mx.float32)
    assert batch.features.head_input is not None
    read = batch.features.head_input[tuple(map(mx.array, batch.counted.nonzero()))]
    total, of_head, slopes = mx.array(0.0), tree_map(mx.zeros_like, head), []
    mx.eval(states, read)

    def loss_of(inputs: Any, target: mx.array, weights: mx.array) -> mx.array:
        module.update(inputs["head"])
        logits = trainee.logits(inputs["states"]).astype(mx.float32)
        # Files may pad the vocabulary of one side.
        size = min(logits.shape[-1], target.shape[-1])
        q = nn.log_softmax(logits[..., :size])
        p = mx.broadcast_to(nn.log_softmax(target[:, :size]), q.shape)
        return mx.sum(weights * compare(p, q))

    num_rows = max(1, trainee.rows_at_once // len(inside))
    for start in range(0, len(read), num_rows):
        part = slice(start, start + num_rows)
        target = trainee.target_logits(read[part]).astype(mx.float32)
        inputs = {"states": states[:, part], "head": head}
        value, slope = mx.value_and_grad(loss_of)(inputs, target, weights[:, part])
        total, of_head = total + value, tree_map(mx.add, of_head, slope["head"])
        slopes.append(slope["states"])
        mx.eval(total, of_head, slopes)
    module.update(head)

    # The chain rule: the gradient of <slopes, states> is the gradient of the loss below them.
    def rest() -> mx.array:
        return mx.sum(mx.concatenate(slopes, axis=1) * drafted(trainee, batch, most)[0])

    gradients = nn.value_and_grad(module, rest)()[1]
    for name, slope in of_head.items():
        gradients[name] = tree_map(mx.add, gradients[name], slope)
    return total, gradients


def drafted(trainee: Trainee, batch: Batch, most: int | None) -> tuple[mx.array, np.ndarray]:
    """States [k, n, D] of the first `most` draft positions at the n counted places.

    The second result is a bool array [k, n] that says which of them exist.
    """
    row, place = batch.counted.nonzero()
    states, inside = [], []
    for x, first in islice(trainee.predictions(batch), most):
        # Places before the first prediction are masked by `inside`.
        index = np.clip(place - first, 0, x.shape[1] - 1)
        states.append(x[mx.array(row), mx.array(index)])
        inside.append(index == place - first)
    return mx.stack(states), np.stack(inside)


WARM_UP = 0.05  # share of the updates in which the learning rate rises
MEMORY_SHARE = 0.75  # part of the machine's memory that a training may take
CHECKPOINT = "checkpoint.safetensors"
SECONDS = 120.0  # between two checkpoints
ONE_STEP = 0.8  # share of a training in which a head drafts one token from each place
MUCH = 1.5  # overfitting: so many times as much kept on texts that it is trained on as on others
MEASUREMENTS = 8  # on held-out text, in a training


@dataclass(frozen=True)
class Updates:
    """Schedule of a training.

    Attributes:
        steps: updates, if `minutes` is None.
        batch: windows of an update.
        learning_rate: its peak.
        loss: a key of LOSSES.
        seed: of the order of the windows.
        minutes: duration, in place of `steps`.
    """

    steps: int = 4000
    batch: int = 2
    learning_rate: float = 1e-3
    loss: str = "forward-kl"
    seed: int = 0
    minutes: int | None = None


@dataclass
class Progress:
    """State of a training.

    Attributes:
        step: updates so far.
        tokens: tokens learnt so far.
        began: seconds of the training before its first update.
        curve: measurements on held-out text.
    """

    step: int = 0
    tokens: int = 0
    began: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)


def fit(
    trainee: Trainee,
    trained: FeatureStore,
    held_out: FeatureStore,
    schedule: Updates,
    work: Path,
    clock: Clock,
) -> tuple[list[dict[str, Any]], Acceptance, Acceptance]:
    """Train in place, from the last checkpoint in `work`.

    Returns the curve, the acceptance on held-out text, and the acceptance on trained text.
    """
    optimizer = optim.AdamW(0.0, betas=[0.9, 0.95], weight_decay=0.01)
    optimizer.init(trainee.module.trainable_parameters())
    progress = resume(work / CHECKPOINT, trainee.module, optimizer)
    progress.began = progress.began or clock.seconds()
    total = schedule.steps
    if schedule.minutes is not None:  # The schedule counts seconds in place of updates.
        total = max(1, int(60 * schedule.minutes - progress.began))
    every = max(1, total // MEASUREMENTS)
    rate, compare = rates(schedule.learning_rate, total), LOSSES[schedule.loss]

    def so_far() -> int:
        return progress.step if schedule.minutes is None else int(clock.seconds() - progress.began)

    done, saved_at, acceptance, losses = so_far(), clock.seconds(), None, list[float]()
    options: Any = {"desc": "training", "unit": "", "mininterval": 1, "miniters": 0}
    with progress_bar(total=total, initial=done, **options) as bar:
        while done < total:
            indices = batch_indices(progress.step, schedule.batch, len(trained), schedule.seed)
            batch = trained.batch(indices)
            optimizer.learning_rate = rate(mx.array(done))
            # Later steps read states of the first step, so it is trained first.
            most = 1 if trainee.is_recursive and done < ONE_STEP * total else None
            losses.append(update(trainee, optimizer, batch, compare, most))
            progress.step += 1
            progress.tokens += int(batch.counted.sum())
            before, done = done, so_far()
            bar.set_postfix(loss=f"{losses[-1]:.3f}", tokens=progress.tokens, refresh=False)
            bar.update(min(done, total) - bar.n)
            # Several updates may pass at once when the schedule counts seconds.
            if done // every > before // every or done >= total:
                acceptance = measure(trainee, held_out, len(held_out))
                loss, losses = float(np.mean(losses)), []
                point = {"step": progress.step, "tokens": progress.tokens, "loss": loss}
                progress.curve.append(point | asdict(acceptance))
                bar.write(
                    f"{progress.step} updates, {progress.tokens} tokens"
                    f": loss {loss:.3f}, held-out text: {acceptance}"
                )
            if clock.seconds() - saved_at > SECONDS:
                keep(work / CHECKPOINT, trainee.module, optimizer, progress)
                clock.keep()
                saved_at = clock.seconds()
    acceptance = acceptance or measure(trainee, held_out, len(held_out))
    same = measure(trainee, trained, len(held_out))
    tqdm.write(f"On text that it is trained on: {same}.")
    if same.accepted_share > MUCH * acceptance.accepted_share:
        tqdm.write("It overfits: more texts would help, and more updates would not.")
    return progress.curve, acceptance, same


def update(
    trainee: Trainee, optimizer: Any, batch: Batch, compare: Divergence, most: int | None = None
) -> float:
    """Update the weights once. Returns the loss, or NaN if the gradients are not finite."""
    value, gradients = loss_and_gradients(trainee, batch, compare, most)
    gradients, norm = optim.clip_grad_norm(gradients, 1.0)
    if not math.isfinite(norm.item()):
        return math.nan
    optimizer.update(trainee.module, gradients)
    mx.eval(trainee.module.parameters(), optimizer.state)
    return float(value.item())


def within_memory(trainee: Trainee, trained: FeatureStore, schedule: Updates) -> Updates:
    """Check that an update fits into memory.

    A schedule with a duration gets smaller updates if needed. Otherwise raises TrainingError.
    """
    first, further = memory_of_updates(trainee, trained, LOSSES[schedule.loss])
    there = MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed = first + (schedule.batch - 1) * further
    fits = 1 + int((there - first) // max(1, further))
    takes = f"An update of {schedule.batch} windows takes about {needed / 1e9:.1f} GB of memory"
    tqdm.write(f"{takes}.")
    if fits >= schedule.batch or (fits > 0 and schedule.minutes is not None):
        return replace(schedule, batch=min(fits, schedule.batch))
    lower = f"--batch to {fits}" if fits > 0 else "--window or --draft-vocab"
    raise TrainingError(f"{takes}, and {there / 1e9:.1f} GB may be used. Lower {lower}.")


def memory_of_updates(
    trainee: Trainee, trained: FeatureStore, compare: Divergence
) -> tuple[int, int]:
    """Measured bytes for an update of the longest window, and for each additional window."""
    longest = np.argsort(-trained.lengths, kind="stable").tolist()
    peaks = []
    # The difference of two peaks is the cost of another window.
    for num in (1, 2):
        batch = trained.batch((longest * 2)[:num])
        mx.reset_peak_memory()
        mx.eval(loss_and_gradients(trainee, batch, compare))
        peaks.append(mx.get_peak_memory())
    weights = sum(x.nbytes for _, x in tree_flatten(trainee.module.trainable_parameters()))
    # AdamW keeps two moments for each weight.
    return peaks[0] + 2 * weights, peaks[1] - peaks[0]


def batch_indices(step: int, batch: int, count: int, seed: int) -> list[int]:
    return [
        int(np.random.default_rng([seed, turn]).permutation(count)[i])
        for turn, i in (divmod(step * batch + k, count) for k in range(batch))
    ]


def rates(peak: float, steps: int) -> Callable[[mx.array], mx.array]:
    """Learning rate of each update: a linear rise to `peak`, then a cosine down to 0."""
    rise = max(1, math.ceil(WARM_UP * steps))
    up = optim.linear_schedule(peak / rise, peak + peak / rise, rise)
    down = optim.cosine_decay(peak, max(1, steps - rise))
    rate: Callable[[mx.array], mx.array] = optim.join_schedules([up, down], [rise])
    return rate


def keep(path: Path, module: nn.Module, optimizer: optim.Optimizer, progress: Progress) -> None:
    parts: Any = {"weights": module.trainable_parameters(), "state": optimizer.state}
    save_arrays(path, dict(tree_flatten(parts)), {"progress": json.dumps(vars(progress))})


def resume(path: Path, module: nn.Module, optimizer: optim.Optimizer) -> Progress:
    if not path.exists():
        return Progress()
    loaded: Any = mx.load(str(path), return_metadata=True)
    arrays, metadata = loaded
    parts: Any = tree_unflatten(list(arrays.items()))
    module.update(parts["weights"])
    optimizer.state = parts["state"]
    mx.eval(module.parameters(), optimizer.state)
    return Progress(**json.loads(metadata["progress"]))


@dataclass(frozen=True)
class Acceptance:
    """Share of drafts whose tokens were accepted up to each position.

    Drafts follow each other along the learnt part of a text, and are compared with the target's
    likeliest tokens.

    Attributes:
        greedy: share by position.
        num_drafts: drafts that were measured.
    """

    greedy: tuple[float, ...]
    num_drafts: int

    @property
    def accepted_share(self) -> float:
        return sum(self.greedy) / len(self.greedy)

    def __str__(self) -> str:
        text = f"{self.accepted_share:.3f} of the drafted tokens kept"
        by_position = " ".join(f"{x:.3f}" for x in self.greedy)
        return f"{text} ({by_position}), {1 + sum(self.greedy):.2f} a pass"


def measure(trainee: Trainee, store: FeatureStore, most: int) -> Acceptance:
    runs: list[int] = []
    for i in progress_bar(range(min(most, len(store))), "measuring", leave=False, mininterval=1):
        runs += kept_of_drafts(trainee, store.batch([i]))
    shares = [sum(run > i for run in runs) / max(1, len(runs)) for i in range(trainee.num_steps)]
    return Acceptance(tuple(shares), len(runs))


def kept_of_drafts(trainee: Trainee, batch: Batch) -> list[int]:
    answered, counted, best = batch.answered[0], batch.counted[0], batch.best[0]
    is_right = np.zeros((trainee.num_steps, len(best)), bool)
    num_rows = trainee.rows_at_once
    for step, (states, first) in enumerate(trainee.predictions(batch)):
        parts = (states[0, i : i + num_rows] for i in range(0, states.shape[1], num_rows))
        tokens = np.concatenate([np.array(mx.argmax(trainee.logits(x), axis=-1)) for x in parts])
        if trainee.vocabulary is not None:
            tokens = np.array(trainee.vocabulary.ids)[tokens]
        places = slice(first, first + len(tokens))
        # A prediction beyond the window has no target.
        is_right[step, places] = tokens[: len(best) - first] == best[places]
    if trainee.reads_text:
        is_right[:] = is_right[0]
    runs, place = [], 0
    while place < len(counted):
        run = 0
        if answered[place] and counted[place]:
            while run < len(is_right) and counted[place + run] and is_right[run, place + run]:
                run += 1
            runs.append(run)
        # A round emits the accepted tokens and one token of the target.
        place += run + 1
    return runs
