"""How many draft tokens would be accepted, by their position in the draft, on held-out text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from specdec_mlx.training.features import FeatureStore
from specdec_mlx.training.trainees import Trainee


@dataclass(frozen=True)
class Acceptance:
    """Chance of acceptance of each token of a draft, those before it being those of the text.

    Over the second half of each held-out window, so that all have read at least half a window, and
    all kinds are measured at the same positions.

    greedy: share where the likeliest token is the target's. sampled: mean of sum(min(p, q)), the
    chance at temperature 1 (Leviathan et al. 2023, corollary 3.6). num_positions: of the text.
    """

    greedy: tuple[float, ...]
    sampled: tuple[float, ...]
    num_positions: int

    def __str__(self) -> str:
        """Both by position."""
        greedy, sampled = (" ".join(f"{x:.3f}" for x in row) for row in (self.greedy, self.sampled))
        return f"accepted by position, greedy {greedy}; at temperature 1 {sampled}"

    def to_json(self) -> dict[str, Any]:
        """As a dictionary."""
        return asdict(self)


def measure(trainee: Trainee, held_out: FeatureStore) -> Acceptance:
    """Measure on held-out windows."""
    sums: list[np.ndarray] = []
    count = 0
    for i in range(len(held_out)):
        batch = held_out.batch([i])
        window = batch.tokens.shape[1]
        begin = window // 2
        target_logits = target_logits_of(trainee, batch.features.head_input)
        rows = []
        for logits, first in trainee.predictions(batch):
            wide = widened(logits[0, max(0, begin - first) :], trainee)
            rows.append(_compare(target_logits[0, max(begin, first) :][: wide.shape[0]], wide))
        sums.append(np.array(mx.stack(rows)))
        count += window - begin
    total = np.sum(sums, axis=0) / max(1, count)
    return Acceptance(tuple(total[:, 0].tolist()), tuple(total[:, 1].tolist()), count)


def target_logits_of(trainee: Trainee, head_input: mx.array | None) -> mx.array:
    """The target's own logits [..., V], of the input of its head."""
    assert head_input is not None
    return trainee.ends.logits(head_input).astype(mx.float32)


def widened(logits: mx.array, trainee: Trainee) -> mx.array:
    """Logits [n, V] of logits [n, Vd]: -inf for what cannot be proposed."""
    if trainee.vocabulary is None:
        return logits
    wide = mx.full((logits.shape[0], trainee.ends.vocab_size), -mx.inf, logits.dtype)
    wide[:, trainee.vocabulary] = logits
    return wide


def _compare(target_logits: mx.array, draft_logits: mx.array) -> mx.array:
    """[2]: how often the likeliest token is the same, and the sum of sum(min(p, q))."""
    size = min(target_logits.shape[-1], draft_logits.shape[-1])
    same = mx.argmax(target_logits, axis=-1) == mx.argmax(draft_logits, axis=-1)
    p, q = (mx.exp(nn.log_softmax(x))[:, :size] for x in (target_logits, draft_logits))
    overlap = mx.minimum(p, q).sum()
    return mx.stack([same.sum().astype(mx.float32), overlap])
