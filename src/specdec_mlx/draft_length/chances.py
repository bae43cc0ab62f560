"""How likely a draft token is accepted, by what speaks for it: a logistic regression, online.

The chance of a token, given that those before it are accepted, is 1 / (1 + exp(-z)); z adds up one
weight for each feature: the class of its match, of its votes or its confidence, of its place in the
draft and of recent acceptance. Each weight is believed to be normally distributed around its prior;
an outcome moves mean and variance as the extended Kalman filter does, so that the first trials of a
class tell much and later ones less. Tokens that are copied have weights of their own beside these:
some are easy to guess, and after some anything may follow.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from specdec_mlx.draft_length.costs import finite
from specdec_mlx.token_ids import to_list
from specdec_mlx.types import Draft, Evidence

EDGES: dict[str, tuple[float, ...]] = {
    "match": (1, 2, 3, 4, 5, 7, 10, 16, 32, 64),
    "place": (1, 2, 4, 8, 16, 32),
    "recent": (0.2, 0.4, 0.6, 0.8, 0.95),
    "confidence": (0.0, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 0.995),
}
"""Lower ends of the classes of what is a number; class 0 is below the first."""

RECENT_MEMORY = 0.7
"""Decay of the moving average of "this token was right", a token: texts turn quickly."""

VARIANCE = 0.07
"""Of each prior log-odds around what it is for one model and one kind of text."""

TOKEN_VARIANCE = 1.0
"""The same of what a token that is copied says by itself, and with the one before it."""

LEAST_VARIANCE = 0.015
"""What is left of a variance after any number of trials: texts change."""

MOST_TOKENS = 100_000
"""Tokens and pairs that are remembered, 24 MB; those not seen for longest are forgotten."""

PRIORS: dict[str, dict[str, tuple[float, ...]]] = {
    "look-up": {
        "match": (0.0, -0.79, -0.54, -0.15, -0.04, -0.6, -0.27, -0.18, 0.39, 1.05, 1.66),
        "place": (-0.54, -0.12, 0.16, 0.42, 0.59, 1.65, 2.16),
        "recent": (-0.11, -0.11, -0.04, 0.19, 0.35, 0.25),
        "share": (0.4, -1.47, -0.88, -0.51, -0.02, 0.73, 0.75, 0.78, 1.16),
        "places": (0.0, -0.33, -0.12, 0.18, 0.81),
        "rank": (0.0, -1.5, -2.0, -2.3, -2.5, -2.8, -2.9, -3.0),
    },
    "model": {
        "match": (0.85,) * 11,
        "place": (0.42, 0.35, 0.46, 0.13, 0.15, 0.15, 0.15),
        "recent": (0.07, 0.18, 0.13, 0.2, 0.92, 0.92),
    },
    "confidence": {
        "match": (0.0, -0.45, -0.26, 0.1, 0.12, 0.12, 0.19, 0.62, 1.13, 1.6, 2.0),
        "place": (0.42, 0.35, 0.46, 0.13, 0.15, 0.15, 0.15),
        "recent": (0.07, 0.18, 0.13, 0.2, 0.92, 0.92),
        "confidence": (0.0, -1.8, -1.5, -0.9, -0.2, 0.35, 1.1, 2.0, 2.4, 3.3, 4.2),
        "of a draw": (0.0, 0.0, 0.1, 0.2, 0.3, 0.5, 0.9, 1.4, 1.9, 2.4, 3.0),
    },
    "one token later": {
        "match": (0.0, -0.45, -0.26, 0.1, 0.12, 0.12, 0.19, 0.62, 1.13, 1.6, 2.0),
        "place": (0.42, 0.35, 0.46, 0.13, 0.15, 0.15, 0.15),
        "recent": (0.07, 0.18, 0.13, 0.2, 0.92, 0.92),
        "confidence": (0.0, -1.2, -0.6, -0.3, 0.2, 0.4, 0.6, 0.8, 1.2, 2.0, 2.8),
        "of a draw": (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0, 1.2, 1.5),
    },
}
"""Log-odds by feature and class that are believed at first: of look-ups, of a draft model whose
distribution is not known, of one where it is, and of the token after that one."""

SIZES = {"match": 11, "share": 9, "places": 5, "rank": 8, "confidence": 11, "of a draw": 11}
"""Classes of what speaks for a token."""

PLACE = sum(SIZES.values())
RECENT = PLACE + 1 + len(EDGES["place"])
NUM_WEIGHTS = RECENT + 1 + len(EDGES["recent"])
"""Where the classes of the place and of recent acceptance begin in the list of weights; its end."""

START = {name: sum(list(SIZES.values())[:i]) for i, name in enumerate(SIZES)} | {
    "place": PLACE,
    "recent": RECENT,
}

PLACE_CLASSES = [PLACE + bisect_right(EDGES["place"], n) for n in range(33)]


@dataclass
class Chances:
    """How likely the tokens of one drafter are accepted; the same for chains and for trees.

    odds, variances: of the weights. tokens: key of a token or a pair -> [log-odds, variance]. They
    are of what users wrote, and kept in the process alone. recent: moving average of "right".
    """

    odds: list[float]
    variances: list[float] = field(default_factory=lambda: [VARIANCE] * NUM_WEIGHTS)
    tokens: dict[int, list[float]] = field(default_factory=dict, repr=False)
    recent: float = 0.5

    @classmethod
    def of(cls, kind: str) -> Chances:
        """What is believed at first; kind: out of `PRIORS`."""
        odds = [0.0] * NUM_WEIGHTS
        for name, prior in PRIORS[kind].items():
            odds[START[name] : START[name] + len(prior)] = prior
        return cls(odds)

    def begin_text(self) -> None:
        """Doubt how predictable the last text was."""
        self.recent = 0.5 + (self.recent - 0.5) / 2

    def idle(self) -> None:
        """Let a round go by in which nothing was tried."""
        self.recent += (1 - RECENT_MEMORY) / 2 * (0.5 - self.recent)

    def of_draft(
        self,
        evidence: Iterable[Evidence | int],
        tokens: Sequence[int] | None = None,
        before: int | None = None,
        first: int = 0,
    ) -> Iterator[float]:
        """The chance of each token of a draft, given those before it, as far as it is asked for.

        Args:
            evidence: [K] what speaks for each token.
            tokens: [K] of a draft that was copied; None: not to be looked at.
            before: the token that the draft continues.
            first: place of the first of them in the draft.
        """
        odds, exp, known = self.odds, math.exp, self.tokens.get
        recent = odds[RECENT + bisect_right(EDGES["recent"], self.recent)]
        latest: Evidence | int | None = None
        base = 0.0
        for place, told in enumerate(evidence, start=first):
            if told is not latest:
                latest = told
                base = recent + sum([odds[i] for i in classes_of(told)])
            z = base + odds[PLACE_CLASSES[place] if place < 32 else PLACE_CLASSES[32]]
            if tokens is not None:
                token = tokens[place - first]
                for key in (token, ~before << 32 | token) if before is not None else (token,):
                    if (effect := known(key)) is not None:
                        z += effect[0]
                before = token
            yield 1 / (1 + exp(-z))

    def learn(
        self,
        evidence: Evidence | int,
        place: int,
        right: bool,
        token: int | None = None,
        before: int | None = None,
    ) -> None:
        """Learn from a token that was verified, or could be scored afterwards.

        Args:
            evidence: what spoke for it.
            place: in its draft, from 0.
            right: whether it was the token that came.
            token: itself, where it was copied.
            before: the one before it.
        """
        odds, variances = self.odds, self.variances
        active = self.active(evidence, place)
        z, spread = sum([odds[i] for i in active]), sum([variances[i] for i in active])
        effects = [] if token is None else self._effects(token, before)
        for effect in effects:
            z += effect[0]
            spread += effect[1]
        chance = 1 / (1 + math.exp(-z))
        information = chance * (1 - chance)
        gain = 1 / (1 + information * spread)
        step, shrinkage = gain * (right - chance), gain * information
        for i in active:
            variance = variances[i]
            odds[i] += variance * step
            variances[i] = max(LEAST_VARIANCE, variance * (1 - variance * shrinkage))
        for effect in effects:
            variance = effect[1]
            effect[0] += variance * step
            effect[1] = max(LEAST_VARIANCE, variance * (1 - variance * shrinkage))
        self.recent += (1 - RECENT_MEMORY) * (right - self.recent)

    def active(self, evidence: Evidence | int, place: int) -> tuple[int, ...]:
        """The weights that count."""
        recent = RECENT + bisect_right(EDGES["recent"], self.recent)
        return (*classes_of(evidence), PLACE_CLASSES[min(place, 32)], recent)

    def _effects(self, token: int, before: int | None) -> list[list[float]]:
        """What is known of a token that was copied, and of it after another; held from now on."""
        found, tokens = [], self.tokens
        for key in (token, ~before << 32 | token) if before is not None else (token,):
            effect = tokens.pop(key, None)
            if effect is None:
                if len(tokens) >= MOST_TOKENS:
                    del tokens[next(iter(tokens))]
                effect = [0.0, TOKEN_VARIANCE]
            tokens[key] = effect  # the latest stand at the end
            found.append(effect)
        return found

    def as_dict(self) -> dict[str, Any]:
        """What was learned of evidence, ready for JSON."""
        return {"odds": self.odds, "variances": self.variances}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what `as_dict` gave; ValueError for other numbers of classes."""
        self.odds = numbers(saved["odds"], NUM_WEIGHTS)
        self.variances = numbers(saved["variances"], NUM_WEIGHTS)


def numbers(values: Sequence[Any], length: int) -> list[float]:
    """`length` finite numbers. Raises ValueError for anything else."""
    if len(values) != length:
        raise ValueError(f"expected {length} numbers, got {len(values)}")
    return finite(values)


def classes_of(evidence: Evidence | int) -> tuple[int, ...]:
    """The weights of what speaks for a token; a plain int is its match."""
    if not isinstance(evidence, Evidence):
        return _classes(evidence)
    confidence = evidence.confidence
    if confidence is None:
        return _classes(evidence.match, evidence.share, evidence.places, evidence.rank)
    known = bisect_right(EDGES["confidence"], confidence)
    return _classes(evidence.match, confidence=known, is_drawn=evidence.is_drawn)


@lru_cache(maxsize=4096)
def _classes(
    match: int,
    share: int = 0,
    places: int = 0,
    rank: int = 0,
    confidence: int = 0,
    is_drawn: bool = False,
) -> tuple[int, ...]:
    found = [bisect_right(EDGES["match"], match)]
    if confidence:
        return (found[0], START["of a draw" if is_drawn else "confidence"] + confidence)
    found += [START["share"] + share, START["places"] + places]
    return tuple([*found, START["rank"] + min(rank, 7)] if rank else found)


@dataclass(slots=True)
class Scored:
    """A draft, verified or not, that is held against what comes.

    before: the token before the one at `place`. copied: whether its tokens may be looked at.
    """

    tokens: Sequence[int]
    evidence: Sequence[Evidence | int]
    chances: Chances
    before: int | None = None
    copied: bool = True
    place: int = 0

    def is_through(self, emitted: Sequence[int]) -> bool:
        """Learn from tokens that came; True when the draft was wrong, or is at its end."""
        for token in emitted:
            if self.place == len(self.tokens):
                return True
            own = self.tokens[self.place]
            told = self.evidence[self.place]
            copied = own if self.copied else None
            self.chances.learn(told, self.place, own == token, copied, self.before)
            self.before = token
            self.place += 1
            if own != token:
                return True
        return self.place == len(self.tokens)


def told(draft: Draft) -> tuple[list[int], Sequence[Evidence | int]]:
    """The tokens of a draft, and what speaks for each."""
    return to_list(draft.tokens), draft.evidence or [0] * len(draft)
