"""Base classes of sessions that draw their drafts from logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from specdec_mlx.contracts import ROOT, Draft, DraftContext, GoesOn
from specdec_mlx.draft_length.chances import Chances
from specdec_mlx.drafters.drawing import DRAWN_AT_ONCE, Draws, cut_while, draw_rows
from specdec_mlx.drafters.growing import Tree, TreeDraws
from specdec_mlx.sampling.distribution import Sampling


class Writes:
    """A session that draws its drafts from logits.

    text: `tokens`, of which `num_prompt` are the prompt. branches: most tokens at a place. nodes:
    chances by rank. tree: the draft that is being verified, if it forked.
    """

    context: DraftContext
    sampling: Sampling
    tokens: list[int]
    num_prompt: int
    branches: int
    nodes: Chances
    tree: Tree | None

    def draws(self, at_once: int = DRAWN_AT_ONCE) -> Draws:
        """An empty draft after the text; `at_once` tokens share an operation for their noise."""
        return Draws(self.context, self.sampling, self.tokens, self.num_prompt, at_once)

    def tree_draws(self) -> TreeDraws:
        """An empty draft that forks."""
        draws = TreeDraws(
            self.context, self.sampling, self.tokens, self.num_prompt, self.branches, self.nodes
        )
        self.tree = draws.tree
        return draws


class WritesAtOnce(Writes, ABC):
    """A session that has the logits of a whole draft from one pass."""

    def propose(self, limit: int) -> Draft:
        """At most `limit` tokens, a chain or a tree; none before anything was read."""
        if self.branches == 1:
            return self.drawn(limit).draft()
        logits = self.all_logits(limit)
        if logits is None:
            return Draft()
        return self.tree_draws().write(
            logits[:1], Marginals(logits).logits_after, limit, len(logits)
        )

    def propose_while(self, limit: int, goes_on: GoesOn) -> Draft:
        """The part that is worth verifying; see `cut_while`."""
        return cut_while(self.drawn(limit), goes_on)

    def drawn(self, limit: int) -> Draws:
        """All tokens of a draft, drawn."""
        logits = self.all_logits(limit)
        return self.draws() if logits is None else draw_rows(self.draws(len(logits)), logits)

    @abstractmethod
    def all_logits(self, limit: int) -> mx.array | None:
        """Logits [n, V] of the next n <= limit tokens; None where nothing can be drafted."""


@dataclass
class Marginals:
    """Logits [n, V] by place alone, as of heads that draft at once."""

    logits: mx.array
    _depths: list[int] = field(default_factory=list)

    def logits_after(self, tokens: mx.array, parents: Sequence[int]) -> mx.array:
        """Those of the place after each token; see `growing.NextRows`."""
        depths = [1 if parent == ROOT else self._depths[parent] + 1 for parent in parents]
        self._depths += depths
        return self.logits[mx.array(depths)]
