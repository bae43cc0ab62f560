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

    Look-ups' drafts are merged where they agree; the automatic draft length keeps the tokens that
    are worth their rows, a fixed one takes what each proposes. Draft models and heads share a
    draft's tokens evenly, and theirs are merged unless they are drawn: then each writes a branch
    from draws of its own. A model on which trees are not exact gets the first one's chain. Not
    worth it where one of two models is seldom right when the other is wrong. drafters: at least
    one, the likelier first, else ValueError.
    """

    def begin(self, prompt: Sequence[int], context: DraftContext) -> TreeSession:
        """Begin with each of them; ValueError for one that drafts on every rank."""
        noise = None if context.coupled else context.noise
        keyed: list[tuple[str, Session]] = []
        for i, drafter in enumerate(self.drafters):
            if drafter.on_every_rank:
                raise ValueError(
                    f"TreeOf: {drafter.class_name} drafts on every rank. Leave that out."
                )
            if noise is not None:
                # siblings are independent draws; the next seeds are those of other texts
                own = replace(noise, seed=noise.seed + (i << 48))
                context = replace(context, noise=own)
            session = begin_session(drafter, list(prompt), context_for(drafter, context))
            keyed.append((drafter.key, offering_all(session)))
        return TreeSession(self.key, keyed, is_coupled=context.coupled)


def default_trees(memory: Memory | str | None = None, recycling: bool = False) -> TreeOf:
    """The default's look-up, n-grams and Token Recycling share a tree where that pays.

    memory: as `SuffixDrafter` takes it. recycling: with tables kept from generation to generation.
    """
    recyclers = kept_recyclers() if recycling else [RecyclingDrafter()]
    return TreeOf(SuffixDrafter(memory), NGramDrafter(), *recyclers)
