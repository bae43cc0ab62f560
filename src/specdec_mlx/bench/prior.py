"""Fits what is believed of look-ups before anything was learned to recorded texts.

    python -m specdec_mlx.bench.prior texts.json --sessions sessions.jsonl

The texts are replayed with the automatic draft length, and every draft token that could be scored
is a trial: its evidence, its place, how predictable the text had been, and whether it was right.
A logistic regression on these gives the log-odds that `draft_length.acceptance` begins with. Of
several drafters that look up in the same way, the trials are put together.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from specdec_mlx.bench.cost import CostCurve, linear_cost
from specdec_mlx.bench.record import Record, load_record
from specdec_mlx.bench.recorded import replay_text
from specdec_mlx.bench.replay import record_of_sessions
from specdec_mlx.draft_length.acceptance import SIZES as ALL_SIZES
from specdec_mlx.draft_length.acceptance import AcceptanceHistory
from specdec_mlx.draft_length.guesses import MOST_RANKS, GuessHistory
from specdec_mlx.draft_length.policy import make_draft_length
from specdec_mlx.draft_length.store import Learned, Tuning, class_named
from specdec_mlx.drafters.registry import make_drafter
from specdec_mlx.types import Drafter, Evidence, Guess

DEFAULT_DRAFTERS = ("prompt-lookup", "auto")

FEATURES = (
    *("match", "position", "recent", "after one", "after two", "agreement"),
    *("share", "places", "distance", "surroundings"),
)
"""What look-ups have for evidence."""

SIZES = {name: ALL_SIZES[name] for name in FEATURES}
"""Classes of each."""

NAMES = tuple((name, i) for name, size in ALL_SIZES.items() for i in range(size))
"""Feature and class of each weight of a history."""

GUESS_SIZES = {"rank": MOST_RANKS} | {name: SIZES[name] for name in FEATURES[:5]}
"""Those of guesses in a tree."""

RIDGE = 3.0
"""Weight of the squares of the log-odds: a class that is seldom seen stays near 0."""

CHEAP = 0.01
"""Cost of a position, in plain passes, at which the trees grow whose guesses are tried."""

NUM_STEPS = 30
"""Newton steps, far more than are needed."""

Classes = tuple[tuple[str, int], ...]
"""The features that count for a trial, each with its class."""


@dataclass
class Trials(AcceptanceHistory):
    """An acceptance history that also notes what it learns from.

    noted: classes -> [wrong, right], how often.
    """

    noted: Counts = field(default_factory=dict)

    def learn(
        self,
        evidence: Evidence | int,
        position: int,
        accepted: bool,
        token: int | None = None,
        before: int | None = None,
    ) -> None:
        """Note the trial, and learn from it."""
        key = tuple(NAMES[i] for i in self._active(evidence, position))
        self.noted.setdefault(key, [0.0, 0.0])[accepted] += 1
        super().learn(evidence, position, accepted, token, before)


Counts = dict[Classes, list[float]]
"""Classes -> [wrong, right], how often."""


@dataclass
class GuessTrials(GuessHistory):
    """A history of guesses that also notes what it learns from; see `Trials`."""

    noted: Counts = field(default_factory=dict)

    def learn(self, guesses: Sequence[Guess], depth: int, token: int) -> None:
        """Note the trials, and learn from them."""
        for rank, (guess, evidence) in enumerate(guesses[:MOST_RANKS]):
            key = self._active(rank, evidence, depth)
            self.noted.setdefault(key, [0.0, 0.0])[guess == token] += 1
        super().learn(guesses, depth, token)


@dataclass
class NotingTuning(Tuning):
    """A tuning whose drafters note their trials, by class of drafter."""

    noted: dict[str, Counts] = field(default_factory=dict)
    guessed: dict[str, Counts] = field(default_factory=dict)

    def of(self, key: str, budget: float = 0.3, look_up: bool = False) -> Learned:
        """What was learned with a drafter, with a history that notes."""
        learned = super().of(key, budget, look_up)
        if not isinstance(learned.acceptance, Trials):
            noted = self.noted.setdefault(class_named(key), {})
            learned.acceptance = Trials(learned.acceptance.odds, noted=noted)
            guessed = self.guessed.setdefault(class_named(key), {})
            learned.guesses = GuessTrials(learned.guesses.weights, noted=guessed)
        return learned


def trials(
    records: Iterable[Record],
    make: Callable[[], Drafter | None],
    cost: CostCurve,
    of_trees: bool = False,
) -> dict[str, Counts]:
    """How often each drafter's tokens were wrong and right, by classes; records weigh the same.

    Args:
        records: recorded texts.
        make: makes the look-up, anew for each record.
        cost: c(m), which decides how long drafts are.
        of_trees: whether to give the trials of guesses in trees, instead of those of chains.
    """
    total: dict[str, Counts] = {}
    for record in records:
        tuning = NotingTuning()
        drafter = make()
        for text in record.texts:
            replay_text(
                text,
                drafter,
                make_draft_length("auto", tuning),
                cost,
                max_tokens=int(record.settings["max_tokens"]),
                vocab_size=int(record.settings["vocab_size"]),
            )
        for kind, noted in (tuning.guessed if of_trees else tuning.noted).items():
            size = sum(map(sum, noted.values())) or 1
            scale = 10_000 / size
            scaled = {key: [wrong * scale, right * scale] for key, (wrong, right) in noted.items()}
            _add(total.setdefault(kind, {}), scaled)
    return total


def fit(counts: Counts, sizes: Mapping[str, int] = SIZES) -> dict[str, tuple[float, ...]]:
    """Log-odds by feature and class that make the trials likeliest, held near 0 by a ridge.

    Args:
        counts: the trials.
        sizes: classes of each feature.
    """
    starts = dict(zip(sizes, np.cumsum([0, *sizes.values()]), strict=False))
    rows = np.zeros((len(counts), sum(sizes.values())))
    for row, key in zip(rows, counts, strict=True):
        for name, index in key:
            if name in starts:
                row[starts[name] + index] = 1.0
    outcomes = np.array(list(counts.values()))
    total, right = outcomes.sum(axis=1), outcomes[:, 1]
    weights = np.zeros(rows.shape[1])
    for _ in range(NUM_STEPS):
        chance = 1 / (1 + np.exp(-rows @ weights))
        gradient = rows.T @ (right - total * chance) - RIDGE * weights
        curvature = (rows.T * (total * chance * (1 - chance))) @ rows
        weights = weights + np.linalg.solve(curvature + RIDGE * np.eye(len(weights)), gradient)
    return {
        name: tuple(round(float(w), 2) for w in weights[starts[name] : starts[name] + size])
        for name, size in sizes.items()
    }


def main() -> None:
    """Fit, and print the table as Python."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("record", nargs="+", help="what specdec-mlx bench --json wrote")
    parser.add_argument("--sessions", action="append", default=[], metavar="FILE")
    parser.add_argument(
        "--every-second", action="store_true", help="of the sessions, from the first"
    )
    parser.add_argument("--model", help="for --sessions: whose tokenizer (default: a small one)")
    parser.add_argument("--drafter", action="append", metavar="NAME[:KEY=VALUE,...]")
    parser.add_argument("--trees", action="store_true", help="guesses in trees, not chains")
    args = parser.parse_args()
    records = [load_record(path) for path in args.record]
    for path in args.sessions:
        record = record_of_sessions(path, args.model)
        if args.every_second:
            names = list(dict.fromkeys(text.session for text in record.texts))[::2]
            record.texts[:] = [text for text in record.texts if text.session in names]
        records.append(record)
    specs = args.drafter or DEFAULT_DRAFTERS
    cost = records[0].cost or linear_cost(0.05)
    if args.trees:
        cost = linear_cost(CHEAP)
    sizes = GUESS_SIZES if args.trees else SIZES
    total: dict[str, Counts] = {}
    for spec in specs:
        make = functools.partial(make_drafter, spec)
        for kind, counts in trials(records, make, cost, args.trees).items():
            _add(total.setdefault(kind, {}), counts)
    for kind, counts in total.items():
        print(f'    "{kind}": {{')
        for name, odds in fit(counts, sizes).items():
            if any(odds):
                print(f'        "{name}": {odds},')
        print("    },")


def _add(total: Counts, counts: Counts) -> None:
    """Add trials of the same class of drafters."""
    for key, (wrong, right) in counts.items():
        so_far = total.setdefault(key, [0.0, 0.0])
        so_far[0] += wrong
        so_far[1] += right


if __name__ == "__main__":
    main()
