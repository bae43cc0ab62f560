"""How likely a draft token is accepted, by what speaks for it: a logistic regression, online.

The chance of a token, given that those before it are accepted, is 1 / (1 + exp(-z)); z adds up one
weight for each feature: the class of its match, of its votes or its confidence, of its rank, of its
place in the draft and of recent acceptance. Each weight is believed to be normally distributed
around its prior; an outcome moves mean and variance as the extended Kalman filter does, so that the
first trials of a class tell much and later ones less. Copied tokens have weights of their own
beside these: some are easy to guess, and after some anything may follow.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import exp
from pathlib import Path
from typing import Any

from specdec_mlx.draft_length.costs import finite
from specdec_mlx.token_ids import to_list
from specdec_mlx.types import Draft, Evidence

EDGES: dict[str, tuple[float, ...]] = {
    "match": (1, 2, 3, 4, 5, 7, 10, 16, 32, 64),
    "share": tuple(range(1, 9)),
    "places": tuple(range(1, 5)),
    "rank": tuple(range(1, 8)),
    "confidence": (0.0, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 0.995),
    "of a draw": (0.0, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 0.995),
    "place": (1, 2, 4, 8, 16, 32),
    "recent": (0.2, 0.4, 0.6, 0.8, 0.95),
}
"""Features, and the lower ends of their classes; class 0 is below the first one."""

START = {name: sum(len(EDGES[n]) + 1 for n in list(EDGES)[:i]) for i, name in enumerate(EDGES)}
"""Where the classes of each feature begin in the list of weights."""

NUM_WEIGHTS = START["recent"] + len(EDGES["recent"]) + 1

RECENT_DECAY = 0.7
"""Decay of the moving average of "this token was right", per token: texts turn quickly."""

VARIANCE = 0.07
"""Variance of each weight around its prior, over models and kinds of text."""

TOKEN_VARIANCE = 1.0
"""Variance of the weight of a copied token, and of it after the one before it."""

LEAST_VARIANCE = 0.015
"""Variance after any number of trials: texts change."""

MOST_TOKENS = 100_000
"""Tokens and pairs that are remembered, 24 MB; the least recently seen are dropped."""


def class_of(feature: str, value: float) -> int:
    """Index of the weight for a feature's value."""
    return START[feature] + bisect_right(EDGES[feature], value)


PLACES = [class_of("place", place) for place in range(33)]
"""The same for places in a draft; the last one is of all further ones."""


def _read_priors() -> dict[str, list[float]]:
    priors: dict[str, list[float]] = {}
    for line in Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8").splitlines()[2:]:
        kind, name, odds = line.split("\t")
        weights = priors.setdefault(kind, [0.0] * NUM_WEIGHTS)
        weights[START[name] : START[name] + len(EDGES[name]) + 1] = map(float, odds.split())
    return priors


PRIORS = _read_priors()
"""First weights of look-ups, of models whose distribution is known, and of tokens yet unseen."""


@lru_cache(maxsize=4096)
def classes_of(evidence: Evidence | int) -> tuple[int, ...]:
    """Indices of the weights that what speaks for a token selects; a plain int is its match."""
    told = evidence if isinstance(evidence, Evidence) else Evidence(evidence)
    found = [class_of("match", told.match)]
    if told.confidence is not None:
        found.append(class_of("of a draw" if told.is_drawn else "confidence", told.confidence))
    else:
        found += [class_of("share", told.share), class_of("places", told.places)]
    return (*found, class_of("rank", told.rank)) if told.rank else tuple(found)


@dataclass
class Chances:
    """How likely the tokens of one drafter are accepted; the same for chains and for trees.

    odds, variances: of the weights. tokens: a token, or one after another, -> [log-odds, variance];
    they are of what users wrote, and stay in the process. recent: moving average of "right".
    """

    odds: list[float]
    variances: list[float] = field(default_factory=lambda: [VARIANCE] * NUM_WEIGHTS)
    tokens: dict[int, list[float]] = field(default_factory=dict, repr=False)
    recent: float = 0.5

    @classmethod
    def of(cls, kind: str) -> Chances:
        """The prior; kind: out of `PRIORS`."""
        return cls(list(PRIORS[kind]))

    def doubt(self) -> None:
        """Move recent acceptance half way to 0.5: another text, or nothing was seen for long."""
        self.recent += 0.5 * (0.5 - self.recent)

    def of_draft(
        self,
        evidence: Iterable[Evidence | int],
        tokens: Sequence[int] = (),
        before: int | None = None,
        first: int = 0,
    ) -> list[float]:
        """Chance of each token of a draft, given those before it.

        Args:
            evidence: [K] what speaks for each token.
            tokens: [K] of a copied draft; () if they may not be looked at.
            before: the token that the draft continues.
            first: place of the first token in the draft.
        """
        odds, known, chances = self.odds, self.tokens, []
        recent = odds[START["recent"] + bisect_right(EDGES["recent"], self.recent)]
        latest: Evidence | int | None = None
        base = 0.0
        for place, told in enumerate(evidence, start=first):
            if told is not latest:
                latest, base = told, recent
                for i in classes_of(told):
                    base += odds[i]
            z = base + odds[PLACES[place if place < 32 else 32]]
            if tokens:
                token = tokens[place - first]
                if token in known:
                    z += known[token][0]
                if before is not None and (pair := ~before << 32 | token) in known:
                    z += known[pair][0]
                before = token
            chances.append(1 / (1 + exp(-z)))
        return chances

    def learn(
        self,
        evidence: Sequence[Evidence | int],
        right: Sequence[bool],
        tokens: Sequence[int] = (),
        before: int | None = None,
        first: int = 0,
    ) -> None:
        """Learn from tokens that were verified, or scored afterwards, in order.

        Args:
            evidence: [n] what spoke for each.
            right: [n] True if it was the token that came.
            tokens: [n] themselves, where they were copied.
            before: the token before them.
            first: place of the first one in its draft.
        """
        odds, variances = self.odds, self.variances
        for place, is_right in enumerate(right, start=first):
            recent = START["recent"] + bisect_right(EDGES["recent"], self.recent)
            active = (*classes_of(evidence[place - first]), PLACES[min(place, 32)], recent)
            effects = []
            if tokens:
                token = tokens[place - first]
                for key in (token, ~before << 32 | token) if before is not None else (token,):
                    effect = self.tokens[key] = self.tokens.pop(key, [0.0, TOKEN_VARIANCE])
                    effects.append(effect)
                before = token
            z = spread = 0.0
            for i in active:
                z, spread = z + odds[i], spread + variances[i]
            for effect in effects:
                z, spread = z + effect[0], spread + effect[1]
            chance = 1 / (1 + exp(-z))
            information = chance * (1 - chance)
            gain = 1 / (1 + information * spread)
            step, shrinkage = gain * (is_right - chance), gain * information
            for i in active:
                variance = variances[i]
                odds[i] += variance * step
                variances[i] = max(LEAST_VARIANCE, variance * (1 - variance * shrinkage))
            for effect in effects:
                variance = effect[1]
                effect[0] += variance * step
                effect[1] = max(LEAST_VARIANCE, variance * (1 - variance * shrinkage))
            self.recent += (1 - RECENT_DECAY) * (is_right - self.recent)
        while len(self.tokens) > MOST_TOKENS:
            del self.tokens[next(iter(self.tokens))]

    def as_dict(self) -> dict[str, Any]:
        """Weights and variances, ready for JSON."""
        return {"odds": self.odds, "variances": self.variances}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what `as_dict` gave. Raises ValueError for other numbers of classes."""
        self.odds = finite(saved["odds"], NUM_WEIGHTS)
        self.variances = finite(saved["variances"], NUM_WEIGHTS)


@dataclass(slots=True)
class Scored:
    """A copied draft, verified or not, that is compared with the tokens that come.

    before: the token before the one at `place`.
    """

    tokens: Sequence[int]
    evidence: Sequence[Evidence | int]
    chances: Chances
    before: int | None = None
    place: int = 0

    def is_through(self, emitted: Sequence[int]) -> bool:
        """Learn from tokens that came; True when the draft was wrong, or is at its end."""
        place = self.place
        own = self.tokens[place : place + len(emitted)]
        right = [mine == token for mine, token in zip(own, emitted, strict=False)]
        if False in right:
            del right[right.index(False) + 1 :]
        self.chances.learn(self.evidence[place:], right, own, self.before, place)
        self.place += len(right)
        self.before = emitted[-1] if emitted else self.before
        return False in right or self.place == len(self.tokens)


def told(draft: Draft) -> tuple[list[int], Sequence[Evidence | int]]:
    """The tokens of a draft, and what speaks for each."""
    return to_list(draft.tokens), draft.evidence or [0] * len(draft)
