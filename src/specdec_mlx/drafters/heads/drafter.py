"""A trained head as a drafter, and the ends of its target that it shares."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import KVCache

from specdec_mlx.contracts import DraftContext, Drafter, FeatureRows, Features, Session
from specdec_mlx.drafters.draft_sources import WritingSession, check_way_of_writing, way_of_writing
from specdec_mlx.drafters.fingerprint import fingerprint
from specdec_mlx.drafters.heads.session import RecurrentSource
from specdec_mlx.drafters.reduced_models import HEADS, some_rows
from specdec_mlx.errors import HeadError
from specdec_mlx.models.anatomy import Anatomy, anatomy_of


class DraftVocabulary:
    """The target's tokens that the Vd rows of a head stand for; ids: [Vd]."""

    def __init__(self, ids: mx.array, ends: Anatomy) -> None:
        """Raise ValueError for ids beyond V."""
        self.ids, self.ends = ids.astype(mx.int32), ends
        low, high, size = int(ids.min()), int(ids.max()), ends.vocab_size
        if low < 0 or high >= size:
            raise ValueError(f"d2t names tokens {low} to {high}, and the target has {size}")
        head = ends.head_tap().module
        # of other modules it is not known how to take rows
        self.head = some_rows(head, ids) if isinstance(head, HEADS) else None

    def logits(self, states: mx.array) -> Any:
        """Logits [..., Vd] of the target's head for the head's input [..., D]."""
        if self.head is None:
            return self.ends.logits(states)[..., self.ids]
        return getattr(self.head, "as_linear", self.head)(states)

    def widen(self, logits: mx.array) -> mx.array:
        """Logits [n, V] from [n, Vd]: -inf for tokens that the head cannot propose."""
        ids = mx.broadcast_to(self.ids, logits.shape)
        return spread(logits, ids, self.ends.vocab_size)


def spread(logits: mx.array, ids: mx.array, vocab_size: int) -> mx.array:
    """Logits [n, V] from those [n, k] of tokens [n, k]: -inf for all others."""
    wide = mx.full((logits.shape[0], vocab_size), -mx.inf, logits.dtype)
    return mx.put_along_axis(wide, ids, logits, axis=-1)


def within(ids: mx.array, table: mx.array) -> mx.array:
    """Ids of rows of a table, the last for those beyond: targets pad their vocabularies.

    MLX does not check bounds.
    """
    return mx.minimum(ids, table.shape[0] - 1)


def target_ends(model: nn.Module) -> Anatomy:
    """The parts of a loaded model; HeadError without embedding and head, which a head shares."""
    anatomy = anatomy_of(model)
    if anatomy.embedding is None or isinstance(anatomy.head, str):
        missing = "embeds its tokens" if anatomy.embedding is None else "makes its logits"
        raise HeadError(
            f"No module was found in {type(model).__module__} that {missing}, so a head cannot "
            "share it. Use a draft model, or a drafter that works on tokens."
        )
    return anatomy


Config = Mapping[str, Any]  # of a head or a target: a config.json, or a part of one


class Head(nn.Module):  # type: ignore[misc]
    """A head's weights, and how they are run.

    grows_trees: it can draft trees. levels: its layers, where it drafts token by token. vocabulary:
    tokens of its logits, None for the target's. width: of its own states. pre_norm: it reads the
    state before the final norm.
    """

    kind = ""
    source: type[Any]
    grows_trees = True
    levels: Sequence[RecurrentHead] = ()
    ends: Anatomy
    width: int
    vocabulary: DraftVocabulary | None = None
    pre_norm = False

    def own(self, embeddings: int = 0, logits: int = 0, tokens: mx.array | None = None) -> None:
        """Give it an embedding, or a matrix that makes its logits, of so many rows; 0 for none.

        tokens: [Vd] that its logits are of, None for the target's; ValueError for ids beyond V.
        """
        if embeddings:
            self.embed_tokens = nn.Embedding(embeddings, self.width)
        if logits:
            self.lm_head = nn.Linear(self.width, logits, bias=False)
        if tokens is not None:
            self.vocabulary = DraftVocabulary(tokens, self.ends)

    def read_state(self, *, before_norm: bool) -> None:
        """Read the target's state before its final norm, or after it."""
        self.pre_norm = before_norm

    @property
    def features(self) -> Features:
        """States of the target that it reads: the input of its head, or of its final norm."""
        last = self.ends.num_layers - 1
        return Features(layers=(last,)) if self.pre_norm else Features(head_input=True)

    def rows(self, features: FeatureRows) -> Any:
        """[n, W] of n positions that the target has read, as the session keeps them."""
        last = self.ends.num_layers - 1
        return features.layers[last] if self.pre_norm else features.head_input

    def make_cache(self) -> list[Any]:
        """New caches, one for each layer."""
        return [KVCache() for _ in self.layers]

    def embed(self, tokens: mx.array) -> Any:
        """States [..., D] of tokens, by its own embeddings, or else the target's."""
        own = self.get("embed_tokens")
        if own is None:
            return self.ends.embed(tokens)
        return own(within(tokens, own.weight))

    def logits(self, states: mx.array) -> mx.array:
        """Logits [n, V] of states [n, D]; -inf for tokens outside the draft vocabulary."""
        logits = self.draft_logits(states)
        return logits if self.vocabulary is None else self.vocabulary.widen(logits)

    def draft_logits(self, states: mx.array) -> Any:
        """Logits [..., Vd] of states [..., D], by its own head, or else the target's."""
        if "lm_head" in self:
            return self.lm_head(states)
        return (self.vocabulary or self.ends).logits(states)

    def notes(self) -> list[str]:
        """Its variant, for `describe` and `key`."""
        notes = ["reads the state before the final norm"] if self.pre_norm else []
        if self.vocabulary is not None:
            notes.append(f"{self.vocabulary.ids.size} of {self.ends.vocab_size} tokens")
        return notes

    def variations(self) -> Iterator[Variation]:
        """Other readings of its files: the state on the other side of the norm."""
        other = not self.pre_norm
        name = f"state {'before' if other else 'after'} the final norm"
        advice = f"it looks trained on the {name}; load it with pre_norm={other}"
        yield Variation(name, advice, self.otherwise(pre_norm=other))

    def otherwise(self, norm_shift: float = 0.0, **changes: Any) -> Head:
        """A copy on the same arrays with other attributes; norm_shift: added to its norms."""
        # all that is no weight is shared
        attributes = (vars(part).values() for part in (self, *self.levels))
        other = copy.deepcopy(self, {id(one): one for some in attributes for one in some})
        for part in (other, *other.levels):
            for name, value in changes.items():
                setattr(part, name, value)
        named: list[tuple[str, mx.array]] = tree_flatten(self.parameters())
        norms = [(name, x + norm_shift) for name, x in named if is_norm(name, x)]
        other.update(tree_unflatten(norms))
        return other


class RecurrentHead(Head):
    """A head that drafts token by token from its own states, or one of its layers.

    moves_on: its one layer drafts any number of tokens. chained: a layer reads the states of the
    layer before it, not the target's.
    """

    source = RecurrentSource
    moves_on = True
    chained = True

    @property
    def levels(self) -> Sequence[RecurrentHead]:  # type: ignore[override]
        """The layers that draft a token each, or the one that drafts all."""
        return [self, *self.get("further", ())]

    def step(self, states: mx.array, tokens: mx.array, cache: list[Any]) -> mx.array:
        """States [n, D] of n further positions, by states [n, D] and the tokens [n] after them."""
        return self.forward(states[None], tokens[None], cache)[0]

    @abstractmethod
    def forward(self, states: mx.array, tokens: mx.array, cache: list[Any]) -> mx.array:
        """`step` of a batch: states [batch, n, D], tokens [batch, n]."""


class Variation(NamedTuple):
    """Another reading of a head's files, which `check` compares by acceptance.

    advice: for the user, if it does better.
    """

    name: str
    advice: str
    head: Head


def is_norm(name: str, value: mx.array) -> bool:
    """True for the scale of a norm."""
    return "norm" in name and value.ndim == 1


@dataclass(frozen=True, eq=False, repr=False)
class HeadDrafter(Drafter):
    """Draft with a trained head, which reads the states of the target that it was loaded for.

    Greedy targets and opaque samplers get the argmax; others draws from its logits under the
    target's own sampling (Leviathan et al. 2023, section 2.2), with the distribution of each.
    greedy: always the argmax. draft_temp: of the drafts, None for the target's. name: folder or
    repository. branches: most tokens at a place; more than one makes trees. on_every_rank: see
    `ModelDrafter`.
    """

    head: Head
    greedy: bool = False
    draft_temp: float | None = None
    name: str = ""
    branches: int = 1
    on_every_rank: bool = False

    def __post_init__(self) -> None:
        check_way_of_writing(self)
        if self.branches > 1 and not self.head.grows_trees:
            raise HeadError(f"{self.head.kind} heads draft chains. Leave branches out.")

    @property
    def model(self) -> nn.Module:
        """The head."""
        return self.head

    def models(self) -> Sequence[nn.Module]:
        """The head."""
        return [self.head]

    @property
    def features(self) -> Features:
        """States of the target that its sessions read."""
        return self.head.features

    @property
    def key(self) -> str:
        """The head by its content, and how it drafts."""
        content = "; ".join([self.head.kind, fingerprint(self.head), *self.head.notes()])
        return f"HeadDrafter({content}, {way_of_writing(self)})"

    def describe(self) -> str:
        """Kind and variant that were recognised, in a line."""
        return "; ".join([f"{self.name or 'a head'}: {self.head.kind}", *self.head.notes()])

    def __repr__(self) -> str:
        """`describe` in brackets."""
        return f"<HeadDrafter {self.describe()}>"

    def check(self, context: DraftContext) -> None:
        """Raise HeadError for a target with another vocabulary than the one it was loaded for."""
        size = self.head.ends.vocab_size
        if context.vocab_size not in (None, size):
            raise HeadError(
                f"{self.describe()} was loaded for a target with {size} tokens, and "
                f"this one has {context.vocab_size}. Load it for this target."
            )

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Session:
        """Start a generation; the head reads the prompt as the target's rows come."""
        if context.shared_drafts is not None:
            return context.shared_drafts(self, prompt, context)
        return WritingSession(self, self.head.source(self.head, prompt, context))
