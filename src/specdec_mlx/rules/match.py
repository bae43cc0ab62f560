"""Rules that emit the target's own draws: match, and match with shared noise."""

from __future__ import annotations

from dataclasses import dataclass

from specdec_mlx.contracts import Agreement, Draft, Randomness, TargetRows


@dataclass(frozen=True)
class Match:
    """Keep the draft as far as it equals the target's own tokens; the next token is the target's.

    Lossless for any sampler, since the target's own draw is always emitted.
    """

    name = "match"
    needs_distribution = False

    def decide(
        self, target: TargetRows, draft: Draft, randomness: Randomness
    ) -> Agreement:
        """Compare with the target's own draws."""
        return Agreement(target.tokens)


@dataclass(frozen=True)
class Coupled(Match):
    """Match, with drafts drawn from the noise of the target's tokens, equal far more often.

    A seed gives one text with any drafter and draft length (Daliri et al. 2024, arXiv 2408.07978).
    """

    name = "coupled"
    needs_distribution = True
    shares_noise = True
