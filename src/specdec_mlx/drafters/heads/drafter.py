"""A trained head as a drafter."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from specdec_mlx.drafters.fingerprint import fingerprint
from specdec_mlx.drafters.growing import check_branches
from specdec_mlx.drafters.heads.session import HeadSession
from specdec_mlx.drafters.heads.target_ends import DraftVocabulary, TargetEnds
from specdec_mlx.drafters.heads.variations import Variation
from specdec_mlx.errors import HeadError
from specdec_mlx.sampling.distribution import Sampling
from specdec_mlx.sampling.drafts import check_draft_temp, sampling_of_drafts
from specdec_mlx.types import DraftContext, FeatureRows, Features


class Head(nn.Module):  # type: ignore[misc]
    """A head's weights, and what it reads of the target.

    kind: what it is called. session: its side of a generation. grows_trees: True if its drafts may
    fork. ends: of the target. vocabulary: what its logits are over, None for the target's tokens.
    """

    kind = ""
    session: type[HeadSession]
    grows_trees = True
    ends: TargetEnds
    vocabulary: DraftVocabulary | None = None

    @property
    @abstractmethod
    def features(self) -> Features:
        """What it reads of the target."""

    @abstractmethod
    def rows(self, features: FeatureRows) -> mx.array:
        """[n, W] what it keeps of n positions that the target has read."""

    @abstractmethod
    def variations(self) -> list[Variation]:
        """What its files may mean as well."""

    def make_cache(self) -> list[Any]:
        """New caches, one for each layer."""
        return [KVCache() for _ in self.layers]

    def logits(self, states: mx.array) -> mx.array:
        """Logits [n, V] of states [n, D], -inf for tokens that are not in the draft vocabulary."""
        logits = self.draft_logits(states)
        return logits if self.vocabulary is None else self.vocabulary.widen(logits)

    def draft_logits(self, states: mx.array) -> mx.array:
        """Logits [..., Vd] over the draft vocabulary, of states [..., D]; by the target's head."""
        return self.ends.logits(states)

    def notes(self) -> list[str]:
        """What else is to be known about it, each in a few words."""
        if self.vocabulary is None:
            return []
        return [f"{self.vocabulary.ids.size} of {self.ends.vocab_size} tokens"]


class FinalStateHead(Head):
    """A head that reads the target's state after its final norm.

    pre_norm: True if it reads the state before that norm instead.
    """

    pre_norm = False

    @property
    def features(self) -> Features:
        """The input of the target's head, or the output of its last layer."""
        layers = (self.ends.num_layers - 1,) if self.pre_norm else ()
        return Features(layers=layers, head_input=not self.pre_norm)

    def rows(self, features: FeatureRows) -> mx.array:
        """[n, D] the target's states."""
        last = self.ends.num_layers - 1
        rows = features.layers[last] if self.pre_norm else features.head_input
        assert rows is not None
        return rows

    def notes(self) -> list[str]:
        """Where it reads, if not where it is usual."""
        return ["reads the state before the final norm"] if self.pre_norm else []

    def variations(self) -> list[Variation]:
        """The state on the other side of the norm."""
        other = not self.pre_norm
        where = "before" if other else "after"
        return [
            Variation(
                f"state {where} the final norm",
                f"it looks trained on the state {where} the final norm; load it with "
                f"pre_norm={other}",
                [self],
                {"pre_norm": other},
            )
        ]


@dataclass(frozen=True, eq=False, repr=False)
class HeadDrafter:
    """Draft with a trained head, which reads the states of the target that it was loaded for.

    What is emitted has the target's distribution, whatever the head proposes. Greedy targets and
    opaque samplers get the head's argmax, others draws from its logits under the target's own
    sampling (Leviathan et al. 2023, section 2.2), with the distribution of each handed over.

    Args:
        head: as `load_head` makes it.
        greedy: propose the argmax, a point mass, whatever the target's sampling.
        draft_temp: temperature of the drafts, None for the target's own.
        name: what it was loaded from.
        vocab_size: V of the target that it was loaded for, None for any.
        branches: most tokens at a place. With more than one it proposes trees; see
            `drafters.growing`.
        on_every_rank: see `ModelDrafter`.
    """

    head: Head
    greedy: bool = False
    draft_temp: float | None = None
    name: str = ""
    vocab_size: int | None = None
    branches: int = 1
    on_every_rank: bool = False

    def __post_init__(self) -> None:
        """Refuse a temperature and a number of branches that are none."""
        check_draft_temp(self.draft_temp)
        check_branches(self.branches)
        if self.branches > 1 and not self.head.grows_trees:
            raise HeadError(f"{self.head.kind} heads draft chains. Leave branches out.")

    @property
    def model(self) -> nn.Module:
        """The head's weights, which are kept wired while it drafts."""
        return self.head

    @property
    def features(self) -> Features:
        """What its sessions read of the target."""
        return self.head.features

    @property
    def key(self) -> str:
        """The head by its content, and how it drafts."""
        content = "; ".join([self.head.kind, fingerprint(self.head), *self.head.notes()])
        branches = f", branches={self.branches}" if self.branches > 1 else ""
        options = f"greedy={self.greedy}, draft_temp={self.draft_temp}{branches}"
        return f"HeadDrafter({content}, {options})"

    def describe(self) -> str:
        """What was recognised, in a line."""
        return "; ".join([f"{self.name or 'a head'}: {self.head.kind}", *self.head.notes()])

    def __repr__(self) -> str:
        """What was recognised."""
        return f"<HeadDrafter {self.describe()}>"

    def sampling_for(self, target: Sampling | None) -> Sampling:
        """How to draw for a target: its filters, at the drafts' temperature."""
        return sampling_of_drafts(target, greedy=self.greedy, draft_temp=self.draft_temp)

    def check(self, context: DraftContext) -> None:
        """Raise HeadError for a target with another vocabulary than the one it was loaded for."""
        sizes = (self.vocab_size, context.vocab_size)
        if None not in sizes and sizes[0] != sizes[1]:
            raise HeadError(
                f"{self.describe()} was loaded for a target with {self.vocab_size} tokens, and "
                f"this one has {context.vocab_size}. Load it for this target."
            )

    def begin(self, prompt: Sequence[int], context: DraftContext) -> HeadSession:
        """Start a generation; the head reads the prompt as the target's rows come."""
        sampling = self.sampling_for(context.sampling)
        return self.head.session(self.head, sampling, prompt, context, self.branches)
