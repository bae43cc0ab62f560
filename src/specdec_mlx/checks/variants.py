"""Named ways to be wrong, and the law of what each would emit: what the tests here would find.

Each gives, for the target's law p and the drafter's q after a text, three laws of mass over the
next token [V]: drafted and kept; emitted otherwise, after which a new round begins; and the law of
the token after a draft that was kept whole.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specdec_mlx.checks.subject import Law

Masses = tuple[Law, Law, Law]
Variant = Callable[[Law, Law], Masses]

RARE = 0.2
SHARPER = 0.7


def lossless(p: Law, q: Law) -> Masses:
    """Token-level rejection as it should be."""
    return np.minimum(p, q), np.maximum(0, p - q), p


def residual_is_target(p: Law, q: Law) -> Masses:
    """After a rejection a token of p."""
    kept = np.minimum(p, q)
    return kept, (1 - kept.sum()) * p, p


def sharp_bonus(p: Law, q: Law) -> Masses:
    """The bonus token at temperature 0.5."""
    return np.minimum(p, q), np.maximum(0, p - q), at_temperature(p, 0.5)


def swapped(p: Law, q: Law) -> Masses:
    """P and q in each other's place."""
    chance = np.divide(q, p, out=np.ones_like(q), where=p > q)
    kept = q * chance
    return kept, (1 - kept.sum()) * normalised(np.maximum(0, q - p), q), p


def lenient(p: Law, q: Law) -> Masses:
    """A fifth more is kept than is due."""
    kept = np.minimum(1.2 * p, q)
    return kept, (1 - kept.sum()) * normalised(np.maximum(0, p - q), p), p


def misdeclared(p: Law, q: Law) -> Masses:
    """The law handed over is that of temperature 0.7, relative to the one drawn from."""
    chance = np.divide(p, q, out=np.ones_like(q), where=q > p)
    kept = at_temperature(q, 1 / SHARPER) * chance
    return kept, (1 - kept.sum()) * normalised(np.maximum(0, p - q), p), p


def dropped(p: Law, q: Law) -> Masses:
    """A token that was drawn by a chance below 0.2 is taken back, and the round has no draft."""
    often = q >= RARE
    kept = np.where(often, np.minimum(p, q), 0)
    rejected = float((q * often).sum() - kept.sum())
    again = rejected * normalised(np.maximum(0, p - q), p) + (q * ~often).sum() * p
    return kept, again, p


VARIANTS: dict[str, Variant] = {
    "residual replaced by p": residual_is_target,
    "bonus at temperature 0.5": sharp_bonus,
    "p and q swapped": swapped,
    "lenience 1.2": lenient,
    "declared q other than the drawn": misdeclared,
    "a drawn token dropped": dropped,
}


def at_temperature(law: Law, temp: float) -> Law:
    """The law sharper (temp < 1) or flatter."""
    powers = np.power(law, 1 / temp, out=np.zeros_like(law), where=law > 0)
    return normalised(powers, law)


def normalised(mass: Law, otherwise: Law) -> Law:
    """Mass as a law; where there is none, another one."""
    total = float(mass.sum())
    return mass / total if total > 0 else otherwise
