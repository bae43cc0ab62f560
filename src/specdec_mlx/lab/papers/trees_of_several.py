"""The drafts of several drafters as one tree (SpecInfer, Miao et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specdec_mlx.contracts import DraftContext, Session
from specdec_mlx.drafters.first_of import FirstOf, context_for
from specdec_mlx.drafters.ngram import NGramDrafter
from specdec_mlx.drafters.suffix import SuffixDrafter
from specdec_mlx.duck_typed import begin_session
from specdec_mlx.lab.papers.recycling import RecyclingDrafter, kept_recyclers
from specdec_mlx.lab.papers.suffix_trees import offering_all
from specdec_mlx.lab.papers.tree_drafts import TreeSession
from specdec_mlx.memory.store import Memory


@dataclass(frozen=True, init=False)
class TreeOf(FirstOf):
    """The drafts of several drafters as one tree (SpecInfer, Miao et al. 2024, section 3).

    Equal tokens of look-ups are merged. The automatic draft length keeps the tokens that are worth
    their rows, and a fixed length takes the proposals of all drafters. Draft models and heads share
    a draft's tokens evenly. Their tokens are merged too, unless they are drawn at random. In that
    case each drafter writes a branch from its own draws. If trees are not exact on a model, it gets
    the first drafter's chain.

    Do not use it if one of two models is rarely right where the other is wrong.

    Args:
        drafters: one or more, the likeliest first. Otherwise raises ValueError.
    """

    def begin(self, prompt: Sequence[int], context: DraftContext) -> TreeSession:
        """Begin with all drafters. ValueError for a drafter that drafts on every rank."""
        noise = None if context.coupled else context.noise
        keyed: list[tuple[str, Session]] = []
        for i, drafter in enumerate(self.drafters):
            if drafter.on_every_rank:
                raise ValueError(
                    f"TreeOf: {drafter.class_name} drafts on every rank. Leave that out."
                )
            if noise is not None:
                # Siblings need independent draws. Small seeds belong to other sequences.
                branch_noise = replace(noise, seed=noise.seed + (i << 48))
                context = replace(context, noise=branch_noise)
            session = begin_session(drafter, list(prompt), context_for(drafter, context))
            keyed.append((drafter.key, offering_all(session)))
        return TreeSession(self.key, keyed, is_coupled=context.coupled)


def default_trees(memory: Memory | str | None = None, recycling: bool = False) -> TreeOf:
    """Prompt lookup, n-grams and Token Recycling share a tree where this pays.

    Args:
        memory: as for `SuffixDrafter`.
        recycling: True if the recycling tables outlive generations.
    """
    recyclers = kept_recyclers() if recycling else [RecyclingDrafter()]
    return TreeOf(SuffixDrafter(memory), NGramDrafter(), *recyclers)
