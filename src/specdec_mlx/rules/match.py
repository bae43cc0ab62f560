"""Rules that emit the target's own draws: match, and match with shared noise."""

from __future__ import annotations

from dataclasses import dataclass

from specdec_mlx.types import Agreement, Draft, Randomness, TargetRows


@dataclass(frozen=True)
class Match:
    """Keep the draft as far as it equals the target's own tokens; the next token is the target's.

    Lossless for any way of drawing them, since what is emitted is always the target's own draw; so
    it takes samplers that can only be called.
    """

    name = "match"
    needs_distribution = False

    def decide(self, target: TargetRows, draft: Draft, randomness: Randomness) -> Agreement:
        """Compare with the target's own draws; what they were drawn with decides."""
        return Agreement(target.tokens)


@dataclass(frozen=True)
class Coupled(Match):
    """Match, with draft tokens drawn from the noise that the target's tokens are drawn from.

    What is accepted follows as in `Match`, and is equal far more often; a seed gives one text with
    any drafter and draft length (Daliri et al. 2024, arXiv 2408.07978).
    """

    name = "coupled"
    needs_distribution = True
    shares_noise = True
