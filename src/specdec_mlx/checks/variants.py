"""Named faults, and the texts that each would emit: what the tests here can find.

Each gives, for p and q after a text, three arrays [V] of mass over the next token: drafted and
kept; emitted otherwise, where a new round begins; and of the token after a whole draft.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specdec_mlx.checks.subject import Probs

Masses = tuple[Probs, Probs, Probs]
Variant = Callable[[Probs, Probs], Masses]

RARE = 0.2
SHARPER = 0.7


def rejecting(p: Probs, q: Probs, kept: Probs) -> Masses:
    """Draft tokens kept with these masses, and else a token of the residual."""
    return kept, (1 - kept.sum()) * normalised(np.maximum(0, p - q), p), p


def lossless(p: Probs, q: Probs) -> Masses:
    """Token-level rejection as it should be."""
    return rejecting(p, q, np.minimum(p, q))


def swapped(p: Probs, q: Probs) -> Masses:
    """P and q in each other's place."""
    kept = q * np.divide(q, p, out=np.ones_like(q), where=p > q)
    return kept, (1 - kept.sum()) * normalised(np.maximum(0, q - p), q), p


def misdeclared(p: Probs, q: Probs) -> Masses:
    """The distribution handed over is that of temperature 0.7, relative to the one drawn from."""
    chance = np.divide(p, q, out=np.ones_like(q), where=q > p)
    return rejecting(p, q, at_temperature(q, 1 / SHARPER) * chance)


def dropped(p: Probs, q: Probs) -> Masses:
    """A token drawn with a chance below 0.2 is taken back, and the round has no draft."""
    often = q >= RARE
    kept = np.where(often, np.minimum(p, q), 0)
    rejected = float((q * often).sum() - kept.sum())
    again = rejected * normalised(np.maximum(0, p - q), p) + (q * ~often).sum() * p
    return kept, again, p


VARIANTS: dict[str, Variant] = {
    "residual replaced by p": lambda p, q: (lossless(p, q)[0], (1 - np.minimum(p, q).sum()) * p, p),
    "bonus at temperature 0.5": lambda p, q: (*lossless(p, q)[:2], at_temperature(p, 0.5)),
    "p and q swapped": swapped,
    "lenience 1.2": lambda p, q: rejecting(p, q, np.minimum(1.2 * p, q)),
    "declared q other than the drawn": misdeclared,
    "a drawn token dropped": dropped,
}


def at_temperature(probs: Probs, temp: float) -> Probs:
    """The distribution sharper (temp < 1) or flatter."""
    powers = np.power(probs, 1 / temp, out=np.zeros_like(probs), where=probs > 0)
    return normalised(powers, probs)


def normalised(mass: Probs, otherwise: Probs) -> Probs:
    """Mass as a distribution; where there is none, another one."""
    total = float(mass.sum())
    return mass / total if total > 0 else otherwise
