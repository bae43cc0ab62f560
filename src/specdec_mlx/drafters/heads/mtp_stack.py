"""Several multi-token prediction layers, one for each token of a draft.

Layer k (from 0) makes, at every position t, a state for the token k + 2 positions further:

    s_k(t) = layer_k(h_t, embed(x_{t+1+k})),  logits of x_{t+2+k} = head_k(s_k(t))

Chained layers read s_{k-1}(t) in place of h_t (DeepSeek-V3, arXiv 2412.19437, equation 21); others
read the target's state like the first. A draft stays at the last position t that the target has
read: where one layer used again moves on, here the next layer takes the token just drafted. Layer k
can read a pair when x_{t+1+k} is known, so it is k positions behind the text, and reads those with
drafted tokens first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import mlx.core as mx

from specdec_mlx.drafters.heads.drafter import FinalStateHead
from specdec_mlx.drafters.heads.mtp import MTPHead
from specdec_mlx.drafters.heads.mtp_families import MTPFamily
from specdec_mlx.drafters.heads.session import SteppingSession, WaitingRows
from specdec_mlx.drafters.heads.target_ends import TargetEnds
from specdec_mlx.drafters.heads.variations import Variation, shifted_norms
from specdec_mlx.sampling.distribution import Sampling
from specdec_mlx.target.rollback import Rollback
from specdec_mlx.token_ids import to_ids
from specdec_mlx.types import DraftContext, FeatureRows


class _Level:
    """One layer's side of a generation.

    waiting: what takes the place of the target's states at positions that it has not read.
    num_read: positions that its caches hold, apart from what was drafted last.
    """

    def __init__(self, layer: MTPHead, waiting: WaitingRows) -> None:
        """Nothing was read yet."""
        self.layer = layer
        self.rollback = Rollback(layer.make_cache())
        self.waiting = waiting
        self.num_read = 0

    def step(self, rows: mx.array, tokens: mx.array) -> mx.array:
        """States [n, D] of n further positions."""
        made: mx.array = self.layer.step(rows, tokens, self.rollback.caches)
        self.rollback.advance(rows.shape[0])
        return made

    def logits(self, states: Any) -> mx.array:
        """Logits [n, V] of states [n, D] that `step` made."""
        return self.layer.logits(states)


class StackSession(SteppingSession):
    """Reads what is known of the text layer by layer, and drafts a token by each.

    Args:
        head: the layers.
        sampling: how drafts are drawn.
        prompt: [n] token ids.
        context: the generation's.

    levels: the layers, the first first. state: [1, D] what the first made at the last position,
    None before that. drafted: tokens of the draft under way. made: for the next layer of a chain,
    what the one before made of drafted tokens; nothing else.
    """

    def __init__(
        self, head: MTPStack, sampling: Sampling, prompt: Sequence[int], context: DraftContext
    ) -> None:
        """Nothing was read yet."""
        super().__init__(head, sampling, prompt, context)
        waiting = [self.waiting, *(WaitingRows() for _ in head.layers[1:])]
        self.levels = [_Level(*pair) for pair in zip(head.layers, waiting, strict=True)]
        self.state: mx.array | None = None
        self.drafted: list[mx.array] = []
        self.made: list[mx.array] = []

    def see(self, features: FeatureRows) -> None:
        """Take the rows of further positions; layers that are not chained all read them."""
        if not self.head.chained:
            rows = self.head.rows(features)
            for level in self.levels[1:]:
                level.waiting.add(rows)
        super().see(features)

    def begin_draft(self, limit: int) -> int:
        """As many as there are layers, at most `limit`; 0 before anything was read."""
        if limit == 0:
            return 0
        self.read()
        if self.state is None:
            return 0
        for level in self.levels:
            level.rollback.checkpoint()
        self.drafted, self.made = [], []
        return min(limit, len(self.levels))

    def next_logits(self, token: mx.array | None) -> mx.array:
        """Of the first layer's state at the last position; then of the next layer's there."""
        if token is None:
            return self.levels[0].logits(self.state)
        self.drafted.append(token)
        level = self.levels[len(self.drafted)]
        rows = mx.concatenate([*level.waiting.parts, *self.made])
        made = level.step(rows, mx.concatenate(self.drafted)[-rows.shape[0] :])
        self.made = [made] if self.head.chained else []
        return level.logits(made[-1:])

    def read(self) -> list[Any]:
        """Read the pairs that are complete at each layer; drops what was drafted."""
        computed: list[Any] = []
        for depth, level in enumerate(self.levels):
            level.rollback.rewind_to(level.num_read)
            while (count := min(self.num_pairs(depth), self.context.prefill_step_size)) > 0:
                first = level.waiting.start + 1 + depth
                tokens = to_ids(self.tokens[first : first + count])
                made = level.step(level.waiting.take(count), tokens)
                level.num_read += count
                if depth == 0:
                    self.state = made[-1:]
                if self.head.chained and level is not self.levels[-1]:
                    self.levels[depth + 1].waiting.add(made)
            computed += [cache.state for cache in level.rollback.caches]
        return [self.state, *computed]

    def num_pairs(self, depth: int) -> int:
        """How many rows wait at a layer whose token is known."""
        waiting = self.levels[depth].waiting
        return min(len(waiting), len(self.tokens) - 1 - depth - waiting.start)


class MTPStack(FinalStateHead):
    """Multi-token prediction layers that draft one token each.

    Args:
        family: how they are written.
        config: of the target, as in the original repository.
        ends: of the target.
        num_layers: how many there are.
    """

    kind = "layered multi-token prediction"
    session = StackSession
    grows_trees = False

    def __init__(
        self, family: MTPFamily, config: Mapping[str, Any], ends: TargetEnds, num_layers: int
    ) -> None:
        """Random weights."""
        super().__init__()
        self.family = family
        self.width = ends.width
        self.ends = ends
        self.chained = family.further == "chained"
        self.layers = [MTPHead(family, config, ends, depth) for depth in range(num_layers)]
        self.read_pre_norm(family.pre_norm)

    def variations(self) -> list[Variation]:
        """Norms, the state that they read, the order, and the first position."""
        of_layers = [layer.variations_inside() for layer in self.layers]
        together = [_together(same) for same in zip(*of_layers, strict=True)]
        return [*shifted_norms(self), *super().variations(), *together]

    def notes(self) -> list[str]:
        """How many layers of what kind, and what they read."""
        where = f"the state {'before' if self.pre_norm else 'after'} the final norm"
        layers = f"{len(self.layers)} {self.family.architecture} layers, one for each token"
        if self.chained:
            return [layers, f"the first reads {where}, the others what the one before made"]
        return [layers, f"all read {where}"]


def mtp_head(
    family: MTPFamily, config: Mapping[str, Any], ends: TargetEnds, num_layers: int = 1
) -> MTPHead | MTPStack:
    """What a family drafts with, random weights.

    Args:
        family: how its layers are written.
        config: of the target, as in the original repository.
        ends: of the target.
        num_layers: how many there are; where one is used again and again, it is the first.
    """
    if family.further == "again":
        return MTPHead(family, config, ends)
    return MTPStack(family, config, ends, num_layers)


def _together(variations: Sequence[Variation]) -> Variation:
    """The same variation of several layers."""

    @contextmanager
    def applied() -> Iterator[None]:
        with ExitStack() as stack:
            for variation in variations:
                stack.enter_context(variation.applied())
            yield

    return Variation(variations[0].name, variations[0].advice, applied)
