"""What several texts that are written together still take, and what tokens save of it.

A pass over R rows takes 1 + s (R - 1) passes over one, s < 1: a further row costs little as long as
reading the weights limits a pass. So with l_r tokens left in row r, the plain batch still takes

    s * (l_1 + .. + l_R) + (1 - s) * max l_r

passes over one row: a token of the row that ends last is worth nearly a whole pass, and one of the
others the s that their row costs. Drafting for a row that is ahead only slows the last one.

When a text ends is not known, only when it will at the latest. So the maximum is a soft one,
tau * log(sum exp(l_r / tau)), and what tokens save is worth less the more of them one row gets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

SHARPEST = 2.0
"""tau, in tokens, where all texts are about to end."""

LIKELY_END = 1000
"""Tokens after which a text without a limit is likely to have ended."""


def progress(left: Sequence[int] | None, tokens: Sequence[float], row_cost: float) -> float:
    """What a pass saves of the time left, in tokens: R where each of R rows gets one token.

    Args:
        left: most tokens that each row may still get; None where all tokens are worth the same,
            since other texts wait for a place, or no end is known.
        tokens: what each row gets.
        row_cost: s.
    """
    total = sum(tokens)
    if left is None or len(left) == 1:
        return total
    longest = max(left)
    tau = SHARPEST + longest * longest / (longest + 2 * LIKELY_END)
    now = [math.exp((most - longest) / tau) for most in left]
    then = sum(x * math.exp(-n / tau) for x, n in zip(now, tokens, strict=True))
    saved = row_cost * total + (1 - row_cost) * tau * math.log(sum(now) / then)
    return len(left) * saved / (1 + row_cost * (len(left) - 1))
