"""Several candidates for one position, verified in turn: iterative speculative sampling.

Each candidate is held against what the ones before it have left of the target's distribution
(SpecInfer, Miao et al. 2024, algorithm 2; Stratos, "Speculative Decoding", section 2). One of them
is kept, or none, and then the token is drawn from what is left; either way it is distributed as the
target's own. Pure functions, as in `arithmetic`; C is the number of candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from specdec_mlx.rules.arithmetic import (
    Array,
    acceptance_probability,
    draw,
    leading_run,
    namespace_of,
    residual,
)


@dataclass(frozen=True)
class Choice:
    """Which candidate was kept: its index, scalar int array, C for none; and the token."""

    index: mx.array
    token: mx.array


def choose(
    target_probs: mx.array,
    candidates: mx.array,
    draft_probs: mx.array,
    uniform: mx.array,
    gumbel: mx.array,
) -> Choice:
    """Token out of several candidates, or another; distributed as the target's own.

    target_probs: [V]. candidates: [C], tried in this order, which must not depend on them.
    draft_probs: [C, V], what each was drawn from *given those before it*: the same row C times for
    independent draws from one distribution, rows without the earlier candidates for draws without
    replacement (`without_replacement`), one-hots for a drafter that would always propose them.
    uniform: [C] in [0, 1); gumbel: [V] standard, independent of it.
    """
    left = remaining_laws(target_probs, draft_probs)
    coins = uniform < candidate_accept_probs(target_probs, candidates, draft_probs)
    index = leading_run(mx.logical_not(coins))
    tokens = mx.concatenate(
        [candidates.astype(mx.int32), draw(left[-1], gumbel).astype(mx.int32)[None]]
    )
    return Choice(index, tokens[index])


def candidate_accept_probs(target_probs: Array, candidates: Array, draft_probs: Array) -> Array:
    r"""Chance that each candidate is kept if none before it was, $\min(1, p_{k-1}/q_k)$; [C]."""
    left = remaining_laws(target_probs, draft_probs)
    return acceptance_probability(left[:-1], draft_probs, candidates)


def remaining_laws(target_probs: Array, draft_probs: Array) -> Array:
    r"""What is left of the target's distribution after k rejections, $p_k$; [C + 1, V].

    $p_0 = p$ and $p_k = \mathrm{norm}(\max(0, p_{k-1} - q_k))$. Where nothing is left,
    $p_{k-1} = q_k$, candidate k is kept for sure and $p_{k-1}$ stands.
    """
    left = [target_probs]
    for row in draft_probs:
        left.append(residual(left[-1], row))
    return namespace_of(target_probs).stack(left)


def without_replacement(draft_probs: Array, candidates: Array) -> Array:
    """Distribution of each candidate given that it differs from those before it; [C, V].

    draft_probs: [V], with mass on at least C tokens; candidates: [C] distinct tokens.
    """
    xp = namespace_of(draft_probs)
    rows = [draft_probs]
    for token in candidates[:-1]:
        left = xp.where(xp.arange(draft_probs.shape[-1]) == token, 0, rows[-1])
        rows.append(left / xp.sum(left))
    return xp.stack(rows)
