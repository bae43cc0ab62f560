"""What a token says about itself: some are easy to guess, and after some anything may come.

Random effects of a mixed model: the log-odds of each token and of each pair are drawn around 0 with
a known variance, so that one that was seen seldom says little.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TOKEN_VARIANCE = 1.0
"""Of the log-odds of a token, as the drafted one and as the one before it."""

PAIR_VARIANCE = 0.6
"""Of what the two together say beside that."""

MOST_EFFECTS = 50_000
"""Tokens and pairs that are remembered, 12 MB; those not seen for longest are forgotten."""

PAIR = 32
"""Bits to the left of the drafted token, where a pair has the token before it, + 1."""


NO_EFFECT = (0.0, 0.0)
"""Of a token of which nothing was learned: log-odds, and a variance that is not looked at."""


def behind(token: int) -> int:
    """The key of what a token does to the one that is drafted behind it; no id is negative."""
    return ~token


def pair(before: int, token: int) -> int:
    """The key of two tokens together."""
    return (before + 1) << PAIR | token


@dataclass
class TokenEffects:
    """Log-odds by drafted token, by the token before it, and by both.

    They are of what users wrote: kept in the process, and in no file.

    effects: [log-odds, variance] by key, where anything was learned: the drafted token's id,
    `behind` the token before, and the `pair` of both; the log-odds add up.
    """

    effects: dict[int, list[float]] = field(default_factory=dict)

    def known(self, before: int | None, token: int) -> list[list[float]]:
        """The effects that count for a token behind another; from now on all of them are held."""
        keys = [token]
        if before is not None:
            keys += [behind(before), pair(before, token)]
        effects, found = self.effects, []
        for key in keys:
            effect = effects.pop(key, None)
            if effect is None:
                if len(effects) >= MOST_EFFECTS:
                    del effects[next(iter(effects))]
                effect = [0.0, PAIR_VARIANCE if key >> PAIR > 0 else TOKEN_VARIANCE]
            effects[key] = effect  # the latest stand at the end
            found.append(effect)
        return found
