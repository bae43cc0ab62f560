"""The chance that a draft token is accepted, by online logistic regression on its evidence.

If all tokens before it are accepted, the chance of a token is 1 / (1 + exp(-z)). z is the sum of
one weight for the class of each feature. A copied token adds its own weight, and the weight of its
pair with the token before. Each weight is normally distributed around its prior, and moves as in
the extended Kalman filter.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from math import exp
from pathlib import Path
from typing import Any

from specdec_mlx.contracts import Draft, Evidence

EDGES: dict[str, Sequence[float]] = {
    "match": (1, 2, 3, 4, 5, 7, 10, 16, 32, 64),
    "share": range(1, 9),
    "places": range(1, 5),
    "rank": range(1, 8),
    "confidence": (of_shares := (0.0, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 0.995)),
    "of a draw": of_shares,
    "place": (1, 2, 4, 8, 16, 32),
    "recent": (0.2, 0.4, 0.6, 0.8, 0.95),
}
"""Features, and the lower bounds of their classes. Class 0 is below the first bound."""

*starts, NUM_WEIGHTS = accumulate((len(edges) + 1 for edges in EDGES.values()), initial=0)
START = dict(zip(EDGES, starts, strict=True))
"""Where the classes of each feature begin in the list of weights."""
RECENT_DECAY = 0.7  # of the moving average of "this token was right", per token
VARIANCE = 0.07  # of each weight around its prior, over models and kinds of text
TOKEN_VARIANCE = 1.0  # of the weight of a copied token, and of a pair
LEAST_VARIANCE = 0.015  # after any number of trials: texts change
MOST_TOKENS = 100_000  # latest tokens and pairs that are remembered, 24 MB


def class_of(feature: str, value: float) -> int:
    return START[feature] + bisect_right(EDGES[feature], value)


PLACES = [class_of("place", place) for place in range(33)]
"""Indices of the weights for positions in a draft. The last index is for all later positions."""


def _read_priors() -> dict[str, list[float]]:
    priors: dict[str, list[float]] = {}
    for line in Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8").splitlines()[2:]:
        kind, name, odds = line.split("\t")
        weights = priors.setdefault(kind, [0.0] * NUM_WEIGHTS)
        weights[START[name] : START[name] + len(EDGES[name]) + 1] = map(float, odds.split())
    return priors


PRIORS = _read_priors()
"""Initial weights for look-ups, for models with a known distribution, and for unseen tokens."""


@lru_cache(maxsize=4096)
def classes_of(evidence: Evidence | int) -> tuple[int, ...]:
    """Indices of the weights that a token's evidence selects. An int stands for a match."""
    full = evidence if isinstance(evidence, Evidence) else Evidence(evidence)
    classes = [class_of("match", full.match)]
    if full.confidence is not None:
        classes.append(class_of("of a draw" if full.is_drawn else "confidence", full.confidence))
    else:
        classes += [class_of("share", full.share), class_of("places", full.places)]
    return (*classes, class_of("rank", full.rank)) if full.rank else tuple(classes)


@dataclass
class Chances:
    """The chances of one drafter's tokens, for chains and trees.

    Attributes:
        weights: log-odds and variance of each weight.
        recent: moving average of right tokens.
        tokens: weights of copied tokens and of pairs. They come from the users' texts and are
            never saved.
    """

    weights: list[list[float]]
    recent: float = 0.5
    tokens: dict[int, list[float]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, kind: str) -> Chances:
        """Initial chances of a kind in `PRIORS`."""
        return cls([[odds, VARIANCE] for odds in PRIORS[kind]])

    def decay(self) -> None:
        """Move recent acceptance half way to 0.5, because the text is new."""
        self.recent += 0.5 * (0.5 - self.recent)

    def of_draft(
        self,
        evidence: Iterable[Evidence | int],
        tokens: Sequence[int] = (),
        before: int = -2,
        first: int = 0,
    ) -> list[float]:
        """Chance of each token of a draft, if all tokens before it are accepted.

        Args:
            evidence: evidence for each token.
            tokens: tokens [K] of a copied draft.
            before: the token before the draft.
            first: position of the first token in the draft.
        """
        weights, known, chances = self.weights, self.tokens, []
        recent = weights[START["recent"] + bisect_right(EDGES["recent"], self.recent)][0]
        latest: Evidence | int | None = None
        base = 0.0
        for place, each in enumerate(evidence, start=first):
            # Tokens of a copy often share one evidence object, so its sum is kept.
            if each is not latest:
                latest, base = each, recent
                for i in classes_of(each):
                    base += weights[i][0]
            z = base + weights[PLACES[place if place < 32 else 32]][0]
            if tokens:
                for key in (token := tokens[place - first], ~before << 32 | token):
                    if key in known:
                        # Keys of tokens are >= 0, and keys of pairs are negative.
                        z += known[key][0]
                before = token
            chances.append(1 / (1 + exp(-z)))
        return chances

    def learn(
        self,
        evidence: Sequence[Evidence | int],
        right: Sequence[bool],
        tokens: Sequence[int] = (),
        before: int = -2,
        first: int = 0,
    ) -> None:
        """Learn which tokens were `right`. The other arguments are as in `of_draft`."""
        for place, is_right in enumerate(right, start=first):
            recent = START["recent"] + bisect_right(EDGES["recent"], self.recent)
            classes = (*classes_of(evidence[place - first]), PLACES[min(place, 32)], recent)
            active = [*map(self.weights.__getitem__, classes)]
            if tokens:
                for key in (token := tokens[place - first], ~before << 32 | token):
                    # Moving the key to the end keeps the oldest keys first.
                    self.tokens[key] = self.tokens.pop(key, [0.0, TOKEN_VARIANCE])
                    active.append(self.tokens[key])
                before = token
            z = spread = 0.0
            for odds, variance in active:
                z, spread = z + odds, spread + variance
            chance = 1 / (1 + exp(-z))
            # Kalman filter: the gain of a weight is variance / (1 + p (1 - p) * sum of variances).
            information = chance * (1 - chance)
            gain = 1 / (1 + information * spread)
            for weight in active:
                variance = weight[1]
                weight[0] += variance * gain * (is_right - chance)
                # Weights never stop learning, because texts change.
                weight[1] = max(LEAST_VARIANCE, variance * (1 - variance * gain * information))
            self.recent += (1 - RECENT_DECAY) * (is_right - self.recent)
        while len(self.tokens) > MOST_TOKENS:
            del self.tokens[next(iter(self.tokens))]


def tokens_and_evidence(draft: Draft) -> tuple[list[int], Sequence[Evidence | int]]:
    tokens: Any = draft.tokens
    known = tokens.tolist() if hasattr(tokens, "tolist") else [*tokens]
    return known, draft.evidence or [0] * len(known)
