"""A trained head as a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.drafters.fingerprint import fingerprint
from specdec_mlx.drafters.growing import check_branches
from specdec_mlx.drafters.heads.session import HeadSession
from specdec_mlx.drafters.heads.target_ends import TargetEnds
from specdec_mlx.drafters.heads.variations import Variation, otherwise
from specdec_mlx.errors import HeadError
from specdec_mlx.sampling.distribution import Sampling
from specdec_mlx.sampling.drafts import check_draft_temp, sampling_of_drafts
from specdec_mlx.types import DraftContext, FeatureRows, Features


class Head(nn.Module):  # type: ignore[misc]
    """A head's weights, and what it reads of the target.

    kind: what it is called. session: its side of a generation. features: what it reads.
    grows_trees: whether its drafts may fork.
    """

    kind = ""
    session: type[HeadSession]
    features = Features()
    grows_trees = True

    def notes(self) -> list[str]:
        """What else is to be known about it, each in a few words."""
        return []

    def variations(self) -> list[Variation]:
        """What its files may mean as well."""
        return []


class FinalStateHead(Head):
    """A head that reads the target's state after its final norm.

    ends: of the target. pre_norm: whether it reads the state before that norm instead.
    """

    features = Features(head_input=True)
    ends: TargetEnds
    pre_norm = False

    def rows(self, features: FeatureRows) -> mx.array:
        """[n, D] the target's states."""
        last = self.ends.num_layers - 1
        rows = features.layers[last] if self.pre_norm else features.head_input
        assert rows is not None
        return rows

    def notes(self) -> list[str]:
        """Where it reads, if not where it is usual."""
        return ["reads the state before the final norm"] if self.pre_norm else []

    def read_pre_norm(self, pre_norm: bool) -> None:
        """Read the state before the final norm, or after it."""
        self.pre_norm, self.features = pre_norm, self._features_for(pre_norm=pre_norm)

    def variations(self) -> list[Variation]:
        """The state on the other side of the norm."""
        other = not self.pre_norm
        where = "before" if other else "after"
        return [
            otherwise(
                f"state {where} the final norm",
                f"it looks trained on the state {where} the final norm; load it with "
                f"pre_norm={other}",
                self,
                pre_norm=other,
                features=self._features_for(pre_norm=other),
            )
        ]

    def _features_for(self, *, pre_norm: bool) -> Features:
        layers = (self.ends.num_layers - 1,) if pre_norm else ()
        return replace(self.features, layers=layers, head_input=not pre_norm)


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
        session = self.head.session(self.head, sampling, prompt, context)
        session.branches = self.branches
        return session
