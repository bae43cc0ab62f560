"""How often a draft token is accepted, by what speaks for it: a logistic regression, online."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec_mlx.draft_length.agreement import NUM_CLASSES
from specdec_mlx.draft_length.priors import LOOK_UPS
from specdec_mlx.draft_length.token_effects import TokenEffects, behind, pair
from specdec_mlx.types import Evidence

MATCH_EDGES = (1, 2, 3, 4, 5, 7, 10, 16, 32, 64)
"""Lower ends of the classes of matches, in tokens."""

POSITION_EDGES = (1, 2, 4, 8, 16, 32)
"""Lower ends of the classes of positions in a draft."""

RECENT_EDGES = (0.2, 0.4, 0.6, 0.8, 0.95)
"""Lower ends of the classes of recent acceptance."""

CONFIDENCE_EDGES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 0.995)
"""Lower ends of the classes of a draft model's largest probability; class 0 is "not known"."""

UNKNOWN = 0.5
"""Recent acceptance at the beginning of a text."""

RECENT_MEMORY = 0.7
"""Decay of the moving average of "this draft token was right": texts turn quickly."""

VARIANCE = 0.1
"""Of each prior log-odds around what it is for one model and one kind of text."""

FITTED_VARIANCE = 0.05
"""The same of look-ups, whose priors were fitted on texts of many kinds."""

LEAST_VARIANCE = 0.015
"""What is left of it after any number of trials: texts change."""

PRIOR_LOG_ODDS: dict[str, tuple[float, ...]] = {
    "match": (0.0, -0.45, -0.26, 0.1, 0.12, 0.12, 0.19, 0.62, 1.13, 1.13, 1.13),
    "position": (0.42, 0.35, 0.46, 0.13, 0.15, 0.15, 0.15),
    "recent": (0.07, 0.18, 0.13, 0.2, 0.92, 0.92),
    "after one": (0.0, 0.02, 0.96, 1.02, -0.01, -0.49),
    "after two": (0.0, 0.64, 1.34, 0.44, -0.09, -0.82),
    "agreement": (0.0,) * NUM_CLASSES,
    "confidence in a draw": (0.0, 0.0, 0.1, 0.2, 0.3, 0.5, 0.9, 1.4, 1.9, 2.4, 3.0),
    "confidence": (0.0, -1.8, -1.5, -0.9, -0.2, 0.35, 1.1, 2.0, 2.4, 3.3, 4.2),
}
"""What is believed before anything was learned, by feature and class."""


ONE_TOKEN_LATER = (0.0, -1.2, -0.6, -0.3, 0.2, 0.4, 0.6, 0.8, 1.2, 2.0, 2.8)
"""Prior log-odds of a token by the confidence in the one before it, by class."""

ONE_TOKEN_AFTER_A_DRAW = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0, 1.2, 1.5)
"""The same where tokens are drawn: a flat distribution is accepted as often as it overlaps."""

GOOD_PAIR = 0.85
"""Log-odds by which a token of a draft model is likelier than one that nothing is known of."""


def class_of(value: float, edges: Sequence[float]) -> int:
    """Number of edges at or below the value."""
    return bisect_right(edges, value)


LARGEST_MATCH = MATCH_EDGES[-1]
MATCH_CLASSES = tuple(class_of(n, MATCH_EDGES) for n in range(LARGEST_MATCH + 1))
FARTHEST = POSITION_EDGES[-1]
POSITION_CLASSES = tuple(class_of(n, POSITION_EDGES) for n in range(FARTHEST + 1))


@dataclass
class AcceptanceHistory:
    """How often a draft token was accepted, given that all before it were: a logistic regression.

    The chance of acceptance is 1 / (1 + exp(-z)), z the sum of one weight for each feature: the
    evidence, the position in the draft and the recent acceptance. Each weight is believed to be
    normally distributed, independently of the others, around what is in `weights`; a trial moves
    both, mean and variance, as the extended Kalman filter does. So the first trials of a class tell
    much, later ones less and less, and none of them nothing.

    weights: feature -> log-odds by class. variances: of the same. tokens: what tokens that were
    copied add to that, which no draft that was drawn at random may look at. recent: share of the
    tokens tried lately that were accepted; the same evidence means more in a text that has been
    predictable.
    """

    weights: dict[str, list[float]] = field(
        default_factory=lambda: {name: list(odds) for name, odds in PRIOR_LOG_ODDS.items()}
    )
    variances: dict[str, list[float]] = field(
        default_factory=lambda: {
            name: [VARIANCE] * len(odds) for name, odds in PRIOR_LOG_ODDS.items()
        }
    )
    tokens: TokenEffects = field(default_factory=TokenEffects)
    recent: float = UNKNOWN

    @classmethod
    def of_look_ups(cls, kind: str = "") -> AcceptanceHistory:
        """What is believed of a look-up before it was tried; kind: its class, if it is known."""
        fitted = {name: [FITTED_VARIANCE] * len(odds) for name, odds in PRIOR_LOG_ODDS.items()}
        history = cls(variances=fitted)
        odds_of_kind = LOOK_UPS.get(kind, LOOK_UPS["PromptLookupDrafter"])
        history.weights.update({name: list(odds) for name, odds in odds_of_kind.items()})
        return history

    @classmethod
    def of_draft_models(cls) -> AcceptanceHistory:
        """What is believed of a draft model before it was tried: 0.8, as of good pairs."""
        history = cls()
        history.weights["match"][0] += GOOD_PAIR
        return history

    @classmethod
    def one_token_later(cls) -> AcceptanceHistory:
        """What is believed of the token after one of which the confidence is known."""
        history = cls()
        history.weights["confidence"] = list(ONE_TOKEN_LATER)
        history.weights["confidence in a draw"] = list(ONE_TOKEN_AFTER_A_DRAW)
        return history

    def as_dict(self) -> dict[str, dict[str, list[float]]]:
        """What was learned, by its names in a file."""
        return {"log-odds": self.weights, "variances": self.variances}

    def begin_text(self) -> None:
        """Forget how predictable the last text was; what was learned of evidence stays."""
        self.recent = UNKNOWN

    def learn(
        self,
        evidence: Evidence | int,
        position: int,
        accepted: bool,
        token: int | None = None,
        before: int | None = None,
    ) -> None:
        """Learn from one token of a draft that was tried or could be scored afterwards.

        Args:
            evidence: what spoke for the token; a plain int is `Evidence.match`.
            position: place of the token in its draft, from 0.
            accepted: whether it was the token that came.
            token: itself, where it was copied; None: not known.
            before: the token before it; None: not known.
        """
        active: list[tuple[Any, Any, Any]] = [
            (self.weights[name], self.variances[name], index)
            for name, index in self._active(evidence, position)
        ]
        if token is not None:
            effects = self.tokens
            active += [(effects.odds, effects.variances, k) for k in effects.known(before, token)]
        log_odds = spread = 0.0
        for odds, variances, key in active:
            log_odds += odds[key]
            spread += variances[key]
        chance = _logistic(log_odds)
        information = chance * (1 - chance)
        gain = 1 / (1 + information * spread)
        step, shrinkage = gain * (accepted - chance), gain * information
        for odds, variances, key in active:
            variance = variances[key]
            odds[key] += variance * step
            reduced = variance * (1 - variance * shrinkage)
            variances[key] = reduced if reduced > LEAST_VARIANCE else LEAST_VARIANCE
        self.recent = RECENT_MEMORY * self.recent + (1 - RECENT_MEMORY) * accepted

    def chance(self, evidence: Evidence | int, position: int) -> float:
        """Chance that the token at a position is accepted if those before it were."""
        return _logistic(
            sum([self.weights[name][index] for name, index in self._active(evidence, position)])
        )

    def chances(
        self,
        evidence: Iterable[Evidence | int],
        tokens: Sequence[int] | None = None,
        before: int | None = None,
        first: int = 0,
    ) -> Iterator[float]:
        """`chance` of each token of a draft, in a fifth of the time: asked in every round.

        Args:
            evidence: what speaks for each token.
            tokens: of a draft that was copied; None: not to be looked at.
            before: the token that they follow; None: not known.
            first: place of the first of them in its draft.
        """
        weights, exp, effect_of = self.weights, math.exp, self.tokens.odds.get
        by_position, by_match = weights["position"], weights["match"]
        by_one, by_two = weights["after one"], weights["after two"]
        by_agreement = weights["agreement"]
        recent = weights["recent"][class_of(self.recent, RECENT_EDGES)]
        latest: Evidence | int | None = None
        others = 0.0
        for position, kind in enumerate(evidence, start=first):
            if kind is not latest:
                latest = kind
                match, one, two, confidence, is_drawn, agreement = (
                    kind if isinstance(kind, Evidence) else Evidence(kind)
                )
                others = recent + by_one[one] + by_two[two] + by_agreement[agreement]
                others += by_match[MATCH_CLASSES[match if match < LARGEST_MATCH else LARGEST_MATCH]]
                if confidence is not None:
                    name, index = _of_confidence(confidence, is_drawn)
                    others += weights[name][index]
            place = POSITION_CLASSES[position if position < FARTHEST else FARTHEST]
            log_odds = others + by_position[place]
            if tokens is not None:
                token = tokens[position - first]
                log_odds += effect_of(token, 0.0)
                if before is not None:
                    log_odds += effect_of(behind(before), 0.0) + effect_of(pair(before, token), 0.0)
                before = token
            yield 1 / (1 + exp(-log_odds))

    def _active(self, evidence: Evidence | int, position: int) -> list[tuple[str, int]]:
        """The weights that count, by feature and class."""
        if not isinstance(evidence, Evidence):
            evidence = Evidence(evidence)
        active = [
            ("position", POSITION_CLASSES[min(position, FARTHEST)]),
            ("match", MATCH_CLASSES[min(evidence.match, LARGEST_MATCH)]),
            ("recent", class_of(self.recent, RECENT_EDGES)),
            ("after one", evidence.after_one),
            ("after two", evidence.after_two),
            ("agreement", evidence.agreement),
        ]
        if evidence.confidence is not None:
            active.append(_of_confidence(evidence.confidence, evidence.is_drawn))
        return active


def _of_confidence(confidence: float, is_drawn: bool) -> tuple[str, int]:
    """Feature and class of a draft model's largest probability."""
    name = "confidence in a draw" if is_drawn else "confidence"
    return name, 1 + class_of(confidence, CONFIDENCE_EDGES)


def _logistic(log_odds: float) -> float:
    """A chance by its log-odds."""
    return 1 / (1 + math.exp(-log_odds))
