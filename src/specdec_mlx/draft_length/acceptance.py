"""How often a draft token is accepted, by what speaks for it: a logistic regression, online."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any

from specdec_mlx.draft_length.agreement import NUM_CLASSES
from specdec_mlx.draft_length.priors import LOOK_UPS
from specdec_mlx.draft_length.token_effects import NO_EFFECT, TokenEffects, behind, pair
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

IDLE_MEMORY = 0.8
"""Decay of what that average is away from the usual, in a round in which nothing was tried."""

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
    "share": (0.0,) * 9,
    "places": (0.0,) * 5,
    "distance": (0.0,) * 8,
    "surroundings": (0.0,) * 6,
    "confidence in a draw": (0.0, 0.0, 0.1, 0.2, 0.3, 0.5, 0.9, 1.4, 1.9, 2.4, 3.0),
    "confidence": (0.0, -1.8, -1.5, -0.9, -0.2, 0.35, 1.1, 2.0, 2.4, 3.3, 4.2),
}
"""What is believed before anything was learned, by feature and class."""

SIZES = {name: len(odds) for name, odds in PRIOR_LOG_ODDS.items()}
"""Classes of each feature."""

START = dict(zip(SIZES, accumulate(SIZES.values(), initial=0), strict=False))
"""Where the classes of each feature begin in the list of all."""

POSITION, RECENT = START["position"], START["recent"]

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
    normally distributed, independently of the others, around what is in `odds`; a trial moves both,
    mean and variance, as the extended Kalman filter does. So the first trials of a class tell much,
    later ones less and less, and none of them nothing.

    odds: the log-odds of all classes of all features, those of one beginning at `START`. variances:
    of the same. tokens: what tokens that were copied add to that, which no draft that was drawn at
    random may look at. recent: share of the tokens tried lately that were accepted; the same
    evidence means more in a text that has been predictable. memory: decay of that. usual: what that
    share is taken for where nothing was tried lately; settling: how far a trial moves it.
    """

    odds: list[float] = field(default_factory=lambda: in_a_row(PRIOR_LOG_ODDS))
    variances: list[float] = field(default_factory=lambda: [VARIANCE] * sum(SIZES.values()))
    tokens: TokenEffects = field(default_factory=TokenEffects)
    recent: float = UNKNOWN
    memory: float = RECENT_MEMORY
    usual: float = UNKNOWN
    settling: float = 0.0

    @classmethod
    def of_look_ups(cls, kind: str = "") -> AcceptanceHistory:
        """What is believed of a look-up before it was tried; kind: its class, if it is known."""
        fitted = LOOK_UPS.get(kind, LOOK_UPS["PromptLookupDrafter"])
        history = cls(in_a_row(PRIOR_LOG_ODDS | fitted))
        history.variances = [FITTED_VARIANCE] * len(history.odds)
        return history

    @classmethod
    def of_draft_models(cls) -> AcceptanceHistory:
        """What is believed of a draft model before it was tried: 0.8, as of good pairs."""
        history = cls()
        history.odds[START["match"]] += GOOD_PAIR
        return history

    @classmethod
    def one_token_later(cls) -> AcceptanceHistory:
        """What is believed of the token after one of which the confidence is known."""
        later: dict[str, tuple[float, ...]] = {
            "confidence": ONE_TOKEN_LATER,
            "confidence in a draw": ONE_TOKEN_AFTER_A_DRAW,
        }
        return cls(in_a_row(PRIOR_LOG_ODDS | later))

    def as_dict(self) -> dict[str, Any]:
        """What was learned, by its names in a file."""
        odds, variances = by_feature(self.odds), by_feature(self.variances)
        return {"log-odds": odds, "variances": variances, "usual": self.usual}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what `as_dict` gave, in this version or an earlier one.

        Raises:
            KeyError: for a feature that is missing.
            ValueError: for other numbers of classes.
        """
        for numbers, told in ((self.odds, "log-odds"), (self.variances, "variances")):
            known = {name: list(map(float, saved[told][name])) for name in SIZES}
            if any(len(known[name]) != size for name, size in SIZES.items()):
                raise ValueError(f"{told}: expected as many classes as in {SIZES}")
            numbers[:] = in_a_row(known)
        self.usual = float(saved.get("usual", UNKNOWN))

    def begin_text(self) -> None:
        """Forget how predictable the last text was; what was learned of evidence stays."""
        self.recent = self.usual

    def pass_by(self) -> None:
        """Let a round go by in which nothing was tried: what was recent is less so."""
        self.recent = self.usual + IDLE_MEMORY * (self.recent - self.usual)

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
        odds, variances = self.odds, self.variances
        active = self._active(evidence, position)
        log_odds = sum(map(odds.__getitem__, active))
        spread = sum(map(variances.__getitem__, active))
        effects = [] if token is None else self.tokens.known(before, token)
        for effect in effects:
            log_odds += effect[0]
            spread += effect[1]
        chance = 1 / (1 + math.exp(-log_odds))
        information = chance * (1 - chance)
        gain = 1 / (1 + information * spread)
        step, shrinkage = gain * (accepted - chance), gain * information
        for i in active:
            variance = variances[i]
            odds[i] += variance * step
            reduced = variance * (1 - variance * shrinkage)
            variances[i] = reduced if reduced > LEAST_VARIANCE else LEAST_VARIANCE
        for effect in effects:
            variance = effect[1]
            effect[0] += variance * step
            reduced = variance * (1 - variance * shrinkage)
            effect[1] = reduced if reduced > LEAST_VARIANCE else LEAST_VARIANCE
        self.recent += (1 - self.memory) * (accepted - self.recent)
        self.usual += self.settling * (accepted - self.usual)

    def chance(self, evidence: Evidence | int, position: int) -> float:
        """Chance that the token at a position is accepted if those before it were."""
        odds = self.odds
        return 1 / (1 + math.exp(-sum([odds[i] for i in self._active(evidence, position)])))

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
        odds, exp, effect_of = self.odds, math.exp, self.tokens.effects.get
        recent = odds[RECENT + class_of(self.recent, RECENT_EDGES)]
        latest: Evidence | int | None = None
        others = 0.0
        for position, kind in enumerate(evidence, start=first):
            if kind is not latest:
                latest = kind
                others = recent + sum(map(odds.__getitem__, classes_of(kind)))
            place = POSITION_CLASSES[position if position < FARTHEST else FARTHEST]
            log_odds = others + odds[POSITION + place]
            if tokens is not None:
                token = tokens[position - first]
                log_odds += effect_of(token, NO_EFFECT)[0]
                if before is not None:
                    log_odds += effect_of(behind(before), NO_EFFECT)[0]
                    log_odds += effect_of(pair(before, token), NO_EFFECT)[0]
                before = token
            yield 1 / (1 + exp(-log_odds))

    def _active(self, evidence: Evidence | int, position: int) -> tuple[int, ...]:
        """The weights that count, by their places in the list of all."""
        return (
            *classes_of(evidence),
            POSITION + POSITION_CLASSES[position if position < FARTHEST else FARTHEST],
            RECENT + bisect_right(RECENT_EDGES, self.recent),
        )


def in_a_row(by_feature: Mapping[str, Sequence[float]]) -> list[float]:
    """Numbers of all classes of all features, in the order of `START`."""
    return [number for name in SIZES for number in by_feature[name]]


def by_feature(in_a_row: Sequence[float]) -> dict[str, list[float]]:
    """The same, by feature and class."""
    return {name: list(in_a_row[START[name] : START[name] + n]) for name, n in SIZES.items()}


CONFIDENCE = Evidence._fields.index("confidence")
"""Its place among the fields."""


def classes_of(evidence: Evidence | int) -> tuple[int, ...]:
    """The weights of what speaks for a token, by their places in the list of all."""
    if not isinstance(evidence, Evidence):
        return _classes((evidence,), None)
    confidence = evidence.confidence
    if confidence is None:
        return _classes(evidence, None)
    others = evidence[:CONFIDENCE] + evidence[CONFIDENCE + 1 :]
    return _classes(others, bisect_right(CONFIDENCE_EDGES, confidence))


@lru_cache(maxsize=1 << 16)
def _classes(known: tuple[Any, ...], confidence: int | None) -> tuple[int, ...]:
    """The same few come up over and over.

    Args:
        known: the fields of an `Evidence`, those behind the last one at their defaults; without the
            confidence, if that is given.
        confidence: its class.
    """
    if confidence is not None:
        known = (*known[:CONFIDENCE], None, *known[CONFIDENCE:])
    evidence = Evidence(*known)
    classes = {
        "match": MATCH_CLASSES[min(evidence.match, LARGEST_MATCH)],
        "after one": evidence.after_one,
        "after two": evidence.after_two,
        "agreement": evidence.agreement,
    }
    told = {
        "share": evidence.share,
        "places": evidence.places,
        "distance": evidence.distance,
        "surroundings": evidence.surroundings,
    }
    classes |= {name: kind for name, kind in told.items() if kind}
    if confidence is not None:
        name = "confidence in a draw" if evidence.is_drawn else "confidence"
        classes[name] = 1 + confidence
    return tuple(START[name] + kind for name, kind in classes.items())
