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

    odds: by key, where anything was learned: the drafted token's id, `behind` the token before, and
    the `pair` of both; they add up. variances: of the same.
    """

    odds: dict[int, float] = field(default_factory=dict)
    variances: dict[int, float] = field(default_factory=dict)

    def known(self, before: int | None, token: int) -> list[int]:
        """The keys that count for a token behind another; from now on all of them are held."""
        keys = [token]
        if before is not None:
            keys += [behind(before), pair(before, token)]
        for key in keys:
            if key in self.odds:
                self.odds[key] = self.odds.pop(key)  # the latest stand at the end
            else:
                if len(self.odds) >= MOST_EFFECTS:
                    oldest = next(iter(self.odds))
                    del self.odds[oldest], self.variances[oldest]
                self.odds[key] = 0.0
                self.variances[key] = PAIR_VARIANCE if key >> PAIR > 0 else TOKEN_VARIANCE
        return keys
