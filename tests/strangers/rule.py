"""A rule that is slow to trust: it keeps a draft token less often than it might."""

from dataclasses import dataclass

from specdec_mlx.rules.arithmetic import (
    acceptance_probability,
    namespace_of,
    residual,
    row,
    with_zero_row,
)
from specdec_mlx.rules.coins import CoinRule


@dataclass(frozen=True)
class Reluctant(CoinRule):
    """Keeps x with chance s min(1, p/q); what that leaves of p, norm(p - s min(p, q)), follows."""

    name = "reluctant"
    share: float = 0.5

    def accept_probs(self, target_probs, draft_tokens, draft_probs):
        """Chance of each draft token; [K]."""
        return self.share * acceptance_probability(target_probs[:-1], draft_probs, draft_tokens)

    def next_probs(self, target_probs, draft_tokens, draft_probs, num_accepted):
        """Distribution of the token after the kept ones; [V]."""
        kept = self.share * namespace_of(draft_probs).minimum(target_probs[:-1], draft_probs)
        return residual(row(target_probs, num_accepted), row(with_zero_row(kept), num_accepted))
