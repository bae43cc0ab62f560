"""What drafting would keep: tokens of a draft accepted in a row, greedy, along a text."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from tqdm import tqdm

from specdec_mlx.training.features import Batch, FeatureStore
from specdec_mlx.training.trainees import Trainee


@dataclass(frozen=True)
class Acceptance:
    """What is kept of the drafts, if they are made one after the other along a text.

    As in greedy drafting each begins behind the token that the target made where the one before
    ended. Prompts are read, and not drafted; along a text that the target did not write greedily,
    what counts is its likeliest token at each place.

    greedy: share of the drafts whose token at a position was kept, which takes that all before it
    were. num_drafts: that were made.
    """

    greedy: tuple[float, ...]
    num_drafts: int

    @property
    def kept(self) -> float:
        """Share of the drafted tokens."""
        return sum(self.greedy) / len(self.greedy)

    def __str__(self) -> str:
        """The share, by position too, and what it brings."""
        by_position = " ".join(f"{x:.3f}" for x in self.greedy)
        tokens = 1 + sum(self.greedy)
        return f"{self.kept:.3f} of the drafted tokens kept ({by_position}), {tokens:.2f} a pass"


def measure(trainee: Trainee, store: FeatureStore, most: int) -> Acceptance:
    """Measure on the first windows."""
    runs: list[int] = []
    length = 1
    for i in tqdm(range(min(most, len(store))), "measuring", leave=False, mininterval=1):
        batch = store.batch([i])
        hits = hits_of(trainee, batch)
        length = len(hits)
        runs += accepted_in_a_row(hits, batch.answered[0], batch.counted[0])
    kept = [sum(run > i for run in runs) / max(1, len(runs)) for i in range(length)]
    return Acceptance(tuple(kept), len(runs))


def hits_of(trainee: Trainee, batch: Batch) -> np.ndarray:
    """[k, window] whether the token that is drafted k-th, behind each position, is the target's."""
    hits = []
    for states, first in trainee.predictions(batch):
        ids = []
        for start in range(0, states.shape[1], trainee.rows_at_once):
            logits = trainee.logits(states[0, start : start + trainee.rows_at_once])
            ids.append(np.array(mx.argmax(logits, axis=-1)))
        drafted = np.concatenate(ids)
        if trainee.vocabulary is not None:
            drafted = np.array(trainee.vocabulary)[drafted]
        behind = batch.best.shape[1] - first - len(drafted)
        hits.append(np.pad(drafted == batch.best[0, first:][: len(drafted)], (first, behind)))
    return np.stack(hits * (trainee.num_steps if trainee.reads_text else 1))


def accepted_in_a_row(hits: np.ndarray, answered: np.ndarray, counted: np.ndarray) -> list[int]:
    """How many tokens of each draft are kept.

    Args:
        hits: [k, window] see `hits_of`.
        answered: [window] tokens that the target wrote, behind which drafts may begin.
        counted: [window] positions behind which it wrote one more.
    """
    runs = []
    place = 0
    while place < len(counted):
        run = 0
        if answered[place] and counted[place]:
            while run < len(hits) and counted[place + run] and hits[run, place + run]:
                run += 1
            runs.append(run)
        place += run + 1
    return runs
