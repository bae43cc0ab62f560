r"""Do drafts follow the distribution that the drafter declares?

The tokens are lined up, the likeliest first, so that each takes a piece of [0, 1) as long as its
declared chance; where a token is drawn from that distribution, a uniform point in its piece is
uniform on [0, 1) (Rosenblatt 1952). Every drafted token of every text gives one such point,
whatever came before it, and one chi-square test of them all holds for all distributions at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from specdec_mlx.checks.chi_square import FALSE_ALARM, ChiSquare, Counts, power
from specdec_mlx.checks.one_step import RARE, SHARPER, at_temperature, normalised
from specdec_mlx.checks.report import Part, judge_power
from specdec_mlx.checks.stand_ins import PassesOn
from specdec_mlx.checks.subject import Probs, probabilities
from specdec_mlx.contracts import Draft, DraftContext, Drafter
from specdec_mlx.token_ids import to_list

NAME = "declared distribution"
NUM_BINS = 10
FEWEST_DRAWS = 100
DISTRIBUTIONS_KEPT = 200
EDGES = np.linspace(0, 1, NUM_BINS + 1)


@dataclass
class Draws:
    """Points in [0, 1) of drafted tokens under their declared distributions.

    proposals, cut: drafts, and those shorter than asked for. distributions: some of those declared,
    chances falling. random: draws each point within its token's piece.
    """

    points: list[float] = field(default_factory=list)
    proposals: int = 0
    cut: int = 0
    distributions: list[Probs] = field(default_factory=list)
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def add(self, draft: Draft, limit: int) -> None:
        """Note a proposal that up to `limit` tokens were asked for."""
        self.proposals += 1
        self.cut += len(draft) < limit
        if draft.logprobs is None or not len(draft):
            return
        for token, row in zip(to_list(draft.tokens), draft.logprobs, strict=True):
            q = probabilities(row)
            before = q[q > q[token]].sum() + q[:token][q[:token] == q[token]].sum()
            self.points.append(float(before + self.random.random() * q[token]))
            if len(self.distributions) < DISTRIBUTIONS_KEPT:
                self.distributions.append(np.sort(q[q > 0])[::-1])

    def seen(self) -> Counts:
        """Points in each of the bins."""
        clipped = np.clip(self.points, 0, np.nextafter(1, 0))
        return np.histogram(clipped, EDGES)[0].astype(float)


@dataclass(frozen=True, eq=False)
class Recording:
    """A drafter whose draws are noted, all those of one place as one."""

    drafter: Drafter
    draws: Draws

    def begin(self, prompt: Sequence[int], context: DraftContext) -> PassesOn:
        """Start a generation."""
        return PassesOn(self.drafter.begin(prompt, context), self.draws.add)


def check_declared(draws: Draws) -> Part:
    """Chi-square of all points; needs no further draws."""
    if draws.proposals and not draws.points:
        verdict = "The drafter declares no distribution: its drafts are taken as point masses, and "
        verdict += "verified as such no token can come out of proportion."
        return Part(NAME, "not applicable", verdict, {"proposals": draws.proposals})
    num_draws = len(draws.points)
    if num_draws < FEWEST_DRAWS:
        verdict = f"Only {num_draws} tokens were drafted in the time there was; {FEWEST_DRAWS} are "
        verdict += "needed. Give more time (--budget)."
        return Part(NAME, "not run", verdict, {"draws": num_draws})
    seen, even = draws.seen(), np.full(NUM_BINS, num_draws / NUM_BINS)
    test = ChiSquare.of(seen, even)
    powers = {}
    for name, fault in FAULTS.items():
        shares = np.mean([_bin_shares(q, fault(q)) for q in draws.distributions], axis=0)
        powers[name] = power([num_draws * shares], [even])
    numbers = {
        "draws": num_draws,
        **test.numbers(),
        "share_in_each_tenth": [round(float(share), 4) for share in seen / num_draws],
        "proposals_cut_short": draws.cut,
        "power": powers,
    }
    if test.p_value < FALSE_ALARM:
        return Part(NAME, "failed", _diagnosis(draws, test.p_value), numbers)
    samples = f"{num_draws} drafted tokens, of distributions such as these,"
    same = f"{num_draws} drafted tokens follow the distributions declared for them"
    return judge_power(NAME, samples, same, numbers)


def _diagnosis(draws: Draws, p_value: float) -> str:
    verdict = f"Drafted tokens do not follow the distribution declared for them (p = {p_value:.1g})"
    rare = float(np.mean(np.array(draws.points) > EDGES[-3]))
    is_sharper = float(np.mean(draws.points)) < 0.5
    if is_sharper and draws.cut and rare < 0.2:
        return (
            f"{verdict}: only {rare:.0%} of the draws are in the last fifth of their distribution, "
            f"and {draws.cut} of {draws.proposals} drafts are shorter than asked for: tokens are "
            "dropped after they were drawn. Decide whether to draft a token before drawing it."
        )
    return (
        f"{verdict}: they come from another one, which is {'sharper' if is_sharper else 'flatter'}."
        " Hand over, as Draft.logprobs, the distribution that each token is really drawn from, "
        "after temperature and filters."
    )


FAULTS: dict[str, Callable[[Probs], Probs]] = {
    "declared at temperature 0.7": lambda q: at_temperature(q, 1 / SHARPER),
    "a drawn token dropped": lambda q: normalised(np.where(q >= RARE, q, 0), q),
}
"""Declared distribution -> the distribution that the tokens at hand would really follow."""


def _bin_shares(declared: Probs, drawn: Probs) -> Probs:
    """Mass in each bin of the one distribution if tokens come from the other; both sorted alike."""
    ends, mass = (np.concatenate([[0.0], np.cumsum(q)]) for q in (declared, drawn))
    return np.diff(np.interp(EDGES, ends / ends[-1], mass / mass[-1]))
