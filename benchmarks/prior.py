"""Fits what is believed of look-ups before anything was learned to recorded texts.

    python -m benchmarks.prior texts.json --sessions sessions.jsonl

The texts are replayed with the automatic draft length, and every draft token that could be scored
is a trial: its evidence, its place, how predictable the text had been, and whether it was right.
A logistic regression on these gives the log-odds that `draft_length.chances` begins with.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from specdec_mlx.contracts import Evidence
from specdec_mlx.draft_length.chances import (
    NUM_WEIGHTS,
    PLACES,
    START,
    Chances,
    class_of,
    classes_of,
)
from specdec_mlx.draft_length.store import Learned, Tuning
from specdec_mlx.draft_length.value import make_draft_length
from specdec_mlx.drafters.choosing.registry import make_drafter
from specdec_mlx.lab.bench.cost import CostCurve, linear_cost
from specdec_mlx.lab.bench.record import Record, load_record
from specdec_mlx.lab.bench.replay import record_of_sessions, replay_text

DEFAULT_DRAFTERS = ("prompt-lookup", "suffix:memory=process", "ngram")

RIDGE = 3.0  # weight of the squares of the log-odds: a class that is seldom seen stays near 0
NUM_STEPS = 30  # newton steps, far more than are needed
Counts = dict[tuple[int, ...], list[float]]  # weights that counted -> [wrong, right], how often


@dataclass
class Trials(Chances):
    """Chances that also note what they learn from."""

    noted: Counts = field(default_factory=dict)

    def learn(
        self,
        evidence: Sequence[Evidence | int],
        right: Sequence[bool],
        tokens: Sequence[int] = (),
        before: int = -2,
        first: int = 0,
    ) -> None:
        """Note the trials, and learn from them."""
        for i, is_right in enumerate(right):
            recent, place = class_of("recent", self.recent), PLACES[min(first + i, 32)]
            key = (*classes_of(evidence[i]), place, recent)
            self.noted.setdefault(key, [0.0, 0.0])[is_right] += 1
            super().learn(evidence[i : i + 1], [is_right], tokens[i : i + 1], before, first + i)
            before = tokens[i] if tokens else before


@dataclass
class NotingTuning(Tuning):
    """A tuning whose drafters note their trials."""

    noted: Counts = field(default_factory=dict)

    def of(self, key: str, look_up: bool = False) -> Learned:
        """What was learned with a drafter, with chances that note."""
        learned = super().of(key, look_up)
        if not isinstance(learned.chances, Trials):
            learned.chances = Trials(learned.chances.weights, noted=self.noted)
        return learned


def trials(records: Iterable[Record], drafters: Sequence[str], cost: CostCurve) -> Counts:
    """How often drafted tokens were wrong and right, by what spoke for them.

    Args:
        records: recorded texts, which weigh the same.
        drafters: names of look-ups, which weigh the same, too.
        cost: c(m), which decides how long drafts are.
    """
    total: Counts = {}
    for record in records:
        for name in drafters:
            tuning, drafter = NotingTuning(), make_drafter(name)
            for text in record.texts:
                replay_text(
                    text,
                    drafter,
                    make_draft_length("auto", tuning),
                    cost,
                    max_tokens=record.settings.max_tokens,
                    vocab_size=record.settings.vocab_size,
                )
            scale = 10_000 / (sum(map(sum, tuning.noted.values())) or 1)
            for key, (wrong, right) in tuning.noted.items():
                so_far = total.setdefault(key, [0.0, 0.0])
                so_far[0] += wrong * scale
                so_far[1] += right * scale
    return total


def fit(counts: Mapping[tuple[int, ...], Sequence[float]]) -> dict[str, tuple[float, ...]]:
    """Log-odds by feature and class that make the trials likeliest, held near 0 by a ridge."""
    rows = np.zeros((len(counts), NUM_WEIGHTS))
    for row, key in zip(rows, counts, strict=True):
        row[list(key)] = 1.0
    outcomes = np.array(list(counts.values()))
    total, right = outcomes.sum(axis=1), outcomes[:, 1]
    weights = np.zeros(NUM_WEIGHTS)
    for _ in range(NUM_STEPS):
        chance = 1 / (1 + np.exp(-rows @ weights))
        gradient = rows.T @ (right - total * chance) - RIDGE * weights
        curvature = (rows.T * (total * chance * (1 - chance))) @ rows
        weights = weights + np.linalg.solve(curvature + RIDGE * np.eye(NUM_WEIGHTS), gradient)
    ends = [*list(START.values())[1:], NUM_WEIGHTS]
    return {
        name: tuple(round(float(w), 2) for w in weights[start:end])
        for (name, start), end in zip(START.items(), ends, strict=True)
    }


def main() -> None:
    """Fit, and print the lines of `chances.tsv`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("record", nargs="+", help="what specdec-mlx bench --json wrote")
    parser.add_argument("--sessions", action="append", default=[], metavar="FILE")
    parser.add_argument(
        "--every-second", action="store_true", help="of the sessions, from the first"
    )
    parser.add_argument("--model", help="for --sessions: whose tokenizer (default: a small one)")
    parser.add_argument("--drafter", action="append", metavar="NAME[:KEY=VALUE,...]")
    args = parser.parse_args()
    records = [load_record(path) for path in args.record]
    for path in args.sessions:
        record = record_of_sessions(path, args.model)
        if args.every_second:
            names = list(dict.fromkeys(text.session for text in record.texts))[::2]
            record.texts[:] = [text for text in record.texts if text.session in names]
        records.append(record)
    cost = records[0].cost or linear_cost(0.05)
    counts = trials(records, args.drafter or DEFAULT_DRAFTERS, cost)
    for name, odds in fit(counts).items():
        if any(odds):
            print("look-up", name, " ".join(f"{odd:g}" for odd in odds), sep="\t")


if __name__ == "__main__":
    main()
