"""`ties="plain"`: a plain pass decides where rounding could exchange two tokens.

On many devices a pass over several positions rounds otherwise than a pass over a single position.
A row whose leading two tokens are nearly tied may then have another winner. With this option a
round ends before the token of this row. The last token before the row is fed once more in a pass of
its own, as in plain decoding, and this pass decides.

Keys and values still come from wide passes, so that the bound is statistical and no proof.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.arguments import argument_error
from specdec_mlx.caches import Rollback
from specdec_mlx.contracts import AcceptanceRule, Outcome, TargetRows
from specdec_mlx.errors import LogitsError
from specdec_mlx.exactness.probe import (
    NUM_TEXTS,
    WIDTHS,
    kernels_around,
    places_of,
    prefilled,
    random_tokens,
)
from specdec_mlx.exactness.recurrent_states import recurrent_states_of
from specdec_mlx.kernels.contract import Kernels, within
from specdec_mlx.models.anatomy import group_of
from specdec_mlx.models.loading import PerModel
from specdec_mlx.sampling import Sampling
from specdec_mlx.token_ids import read_all

if TYPE_CHECKING:
    from specdec_mlx.target import NextToken, Verifier

SAFETY = 2.0
"""Measured shifts between two tokens that still count as a tie. A heuristic: other texts may round
a little more than the measured ones, and so do caches that wide passes have written."""

NUM_LIKELIEST = 16  # tokens of a row whose distance from the likeliest is measured


def check_ties(target: Verifier) -> None:
    """Raise ValueError where `ties="plain"` has no meaning."""
    sampling, rule = target.next_token.sampling, target.rule
    instead = None
    if group_of(target.model) is not None:
        instead = "None on several machines, where passes are shared"
    elif sampling is None or target.next_token.by_row:
        instead = "None with a sampler or processor of your own, whose draws have no known margin"
    elif not (sampling.greedy or target.next_token.noise.is_given):
        instead = "None without a seed: above temperature 0 no text is expected then. Give seed="
    elif not emits_own_draws(rule, sampling):
        instead = f"None under rule={rule.name!r}, whose tokens depend on drafts. Use rule='match'"
    if instead is not None:
        raise argument_error("ties", "plain", instead)


def emits_own_draws(rule: AcceptanceRule, sampling: Sampling) -> bool:
    """True if each token of the text is the target's own draw at its position."""
    names = ("match", "coupled", "auto") if sampling.greedy else ("match", "coupled")
    return rule.name in names or (sampling.greedy and getattr(rule, "matches_greedy", False))


@PerModel
def bounds_of(model: nn.Module) -> dict[str, float]:
    """The measured bounds, by active kernels."""
    return {}


def tie_bound(model: nn.Module, kernels: Kernels | None = None) -> float:
    """Distance of two log-probabilities below which a wide pass may exchange them.

    0 if the measured wide passes move no distance, as on kernels that compute each row alike.
    Nothing is a tie then.

    kernels: of wide passes, None for MLX's own.
    """
    bounds, key = bounds_of(model), kernels.active(model) if kernels else ""
    if key not in bounds:
        bounds[key] = SAFETY * largest_shift(model, kernels)
    return bounds[key]


def largest_shift(model: nn.Module, kernels: Kernels | None = None) -> float:
    """How far wide passes move the distances between a row's likeliest tokens, at most.

    Measured at the model's start on three texts, against single passes.
    """
    states, context = recurrent_states_of(model), places_of(model)[0].context
    shifts = [mx.array(0.0)]
    for text in range(NUM_TEXTS):
        tokens = random_tokens(model, context + max(WIDTHS), text)
        start = prefilled(model, tokens[:context])
        caches = Rollback(copy.deepcopy(start))
        rows = [caches.forward(model, token[None]) for token in tokens[context:]]
        single = log_probabilities(mx.concatenate(rows))
        likeliest = mx.argsort(-single, axis=-1)[:, :NUM_LIKELIEST]
        for width in WIDTHS:
            caches = Rollback(copy.deepcopy(start), states=states)
            around = kernels_around(kernels, model, width, context)
            run = partial(caches.forward, model, tokens[context : context + width])
            wide = log_probabilities(within(around, run))
            moved = mx.take_along_axis(wide - single[:width], likeliest[:width], axis=-1)
            shifts.append(mx.max(moved, axis=-1).max() - mx.min(moved, axis=-1).min())
    return float(mx.stack(shifts).max())


def log_probabilities(logits: mx.array) -> mx.array:
    """Float32 log-probabilities, rounded as those that tokens are drawn from."""
    return (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).astype(mx.float32)


def margins(rows: TargetRows, position: int, next_token: NextToken, bound: float) -> mx.array:
    """Distance [n] of each row's draw from the next candidate, in units of a logit.

    Args:
        rows: n rows.
        position: index of the first row's token among those generated.
        next_token: has drawn the tokens.
        bound: distance that counts as a tie. Filters are moved by as much: if another token is
            drawn with the filters moved, the margin is 0.
    """
    sampling, logprobs = next_token.sampling, rows.logprobs
    assert sampling is not None, "check_ties refuses other samplers"
    if sampling.greedy:
        return lead(logprobs.astype(mx.float32))
    gumbel, nearest = next_token.gumbels.at(position, *logprobs.shape), []
    for law in moved_filters(sampling, bound, logprobs.shape[-1]):
        noisy = law.log_distribution(logprobs) + gumbel
        is_same = mx.argmax(noisy, axis=-1) == rows.tokens
        nearest.append(mx.where(is_same, sampling.temp * lead(noisy), 0))
    return mx.stack(nearest).min(axis=0)


def lead(rows: mx.array) -> mx.array:
    """Distance [n] between the two largest numbers of each row [n, V]."""
    top = mx.topk(rows, 2, axis=-1)
    return mx.abs(top[:, 1] - top[:, 0])


def moved_filters(sampling: Sampling, bound: float, vocab_size: int) -> Sequence[Sampling]:
    """The sampling with looser and with stricter filters, or itself if it filters nothing."""
    if sampling == Sampling(sampling.temp):
        return [sampling]
    moved = []
    for sign in (-1, 1):
        factor = math.exp(sign * bound)
        how: dict[str, Any] = {
            "min_p": min(1.0, sampling.min_p * factor),
            "xtc_threshold": min(0.5, sampling.xtc_threshold * factor),
        }
        if 0 < sampling.top_p < 1:
            how["top_p"] = min(max(1 - (1 - sampling.top_p) * factor, 1e-6), 1.0)
        if sampling.top_k:
            how["top_k"] = min(max(1, sampling.top_k - sign), vocab_size - 1)
        moved.append(replace(sampling, **how))
    return moved


@dataclass(frozen=True)
class TieBreak:
    """Ends one round at its first tie, and has a plain pass decide.

    Attributes:
        target: the target.
        bound: margin below which a row is a tie.
        start: positions in the caches before the pass.
        fed: [n + K] tokens of the pass, which end with the draft.
        position: index of the first new token among those generated.
    """

    target: Verifier
    bound: float
    start: int
    fed: mx.array
    position: int

    def decide(
        self, outcome: Outcome, nearest: Sequence[float], logprobs: list[mx.array]
    ) -> Outcome:
        """The outcome up to its first tie, and the token of a plain pass there.

        Args:
            outcome: of the wide pass.
            nearest: [K+1] margins of its rows.
            logprobs: the pass's rows. The row of the plain pass replaces the tied row.
        """
        rows = range(len(outcome.tokens))
        tied = next((row for row in rows if nearest[row] < self.bound), None)
        if tied is None:
            return outcome
        target, before = self.target, outcome.tokens[:tied]
        # The token before the tie leaves the caches, and is fed again.
        end = self.start + len(self.fed) - (len(nearest) - 1) + tied
        reached = target.rollback.rewind_to(end - 1)
        again = self.fed[reached - self.start : end - self.start]
        alone = target.feed_alone(again, before, self.position + tied)
        (token,), ((scale,),) = read_all(alone.tokens, alone.scales)
        if not math.isfinite(scale):
            raise LogitsError(
                "The target's logits in the plain pass that decides a tie are not finite. Check "
                "the weights, the dtype and the logits processors."
            )
        logprobs[tied] = alone.logprobs
        return Outcome(range(tied), [*before, token], is_tied=True)
