"""A trained head as a drafter, and the parts of the target that it shares."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import KVCache

from specdec_mlx.arguments import AUTO
from specdec_mlx.contracts import DraftContext, Drafter, FeatureRows, Features, Session
from specdec_mlx.drafters.draft_sources import WritingSession, check_way_of_writing, way_of_writing
from specdec_mlx.drafters.drawing import spread
from specdec_mlx.drafters.fingerprint import fingerprint
from specdec_mlx.drafters.heads.session import RecurrentSource
from specdec_mlx.drafters.reduced_models import HEADS, some_rows
from specdec_mlx.drafters.shortlist import (
    NarrowOutput,
    OutputLayer,
    Shortlist,
    bytes_of,
    bytes_read,
    make_shortlist,
)
from specdec_mlx.errors import HeadError
from specdec_mlx.models.anatomy import Anatomy, anatomy_of
from specdec_mlx.window_cache import limit_to_window


class DraftVocabulary:
    """The tokens [Vd] of the target that a head can propose. Raises ValueError for ids beyond V.

    Attributes:
        ids: id in the target's vocabulary of each row of the head's logits.
        anatomy: parts of the target.
        head: the target's head with these rows only, or None if its rows cannot be taken.
    """

    def __init__(self, ids: mx.array, anatomy: Anatomy) -> None:
        self.ids, self.anatomy = ids.astype(mx.int32), anatomy
        low, high, size = int(ids.min()), int(ids.max()), anatomy.vocab_size
        if low < 0 or high >= size:
            raise ValueError(f"d2t names tokens {low} to {high}, and the target has {size}")
        head = anatomy.head_tap().module
        # A module of another class may keep its rows in another layout. The full logits are
        # computed then, and `logits` selects from them.
        self.head = some_rows(head, ids) if isinstance(head, HEADS) else None

    def logits(self, states: mx.array) -> Any:
        """Logits [..., Vd] from the input [..., D] of the target's head."""
        if self.head is None:
            return self.anatomy.logits(states)[..., self.ids]
        return getattr(self.head, "as_linear", self.head)(states)

    def widen(self, logits: mx.array) -> mx.array:
        """Logits [n, V] from [n, Vd]. Tokens that the head cannot propose get -inf."""
        ids = mx.broadcast_to(self.ids, logits.shape)
        return spread(logits, ids, self.anatomy.vocab_size)


def within(ids: mx.array, table: mx.array) -> mx.array:
    """Limit ids to the rows of a table."""
    # MLX does not check bounds. Targets pad their vocabularies, so an id may be beyond the head's
    # table.
    return mx.minimum(ids, table.shape[0] - 1)


def anatomy_for_head(model: nn.Module) -> Anatomy:
    """The parts of a target. Raises HeadError without an embedding and a head to share."""
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
    """The weights of a trained head, and the way to run them.

    Attributes:
        kind: name of the format, for messages.
        source: class that follows a text with this head.
        grows_trees: the head can draft trees.
        levels: layers of a head that drafts token by token.
        anatomy: parts of the target.
        width: numbers in one of the head's own states.
        vocabulary: tokens of its logits, or None for the target's vocabulary.
        pre_norm: the head reads the target's state before the final norm.
        window: number of latest positions that its caches keep beside the first 4, None for all.
        bits: bits that its matrices were quantized to when it was loaded, or None.
    """

    kind = ""
    source: type[Any]
    grows_trees = True
    levels: Sequence[RecurrentHead] = ()
    anatomy: Anatomy
    width: int
    vocabulary: DraftVocabulary | None = None
    pre_norm = False
    window: int | None = None
    bits: int | None = None

    def add_weights(
        self, embeddings: int = 0, logits: int = 0, tokens: mx.array | None = None
    ) -> None:
        """Give the head an embedding, a matrix for its logits, or a draft vocabulary.

        Args:
            embeddings: rows of the embedding, 0 for the target's embedding.
            logits: rows of the matrix, 0 for the target's head.
            tokens: ids [Vd] of the draft vocabulary, None for the target's vocabulary. Ids beyond V
                raise ValueError.
        """
        if embeddings:
            self.embed_tokens = nn.Embedding(embeddings, self.width)
        if logits:
            self.lm_head = nn.Linear(self.width, logits, bias=False)
        if tokens is not None:
            self.vocabulary = DraftVocabulary(tokens, self.anatomy)

    def read_state(self, *, before_norm: bool) -> None:
        self.pre_norm = before_norm

    @property
    def features(self) -> Features:
        last = self.anatomy.num_layers - 1
        # The output of the last layer is the input of the final norm, and the norm's output is the
        # input of the target's head.
        return Features(layers=(last,)) if self.pre_norm else Features(head_input=True)

    def rows(self, features: FeatureRows) -> Any:
        """Rows [n, W] of n positions that the target has read, for the session to keep."""
        last = self.anatomy.num_layers - 1
        return features.layers[last] if self.pre_norm else features.head_input

    def make_cache(self) -> list[Any]:
        """Empty caches, which keep the head's window."""
        return limit_to_window(self.full_caches(), self.window)

    def full_caches(self) -> list[Any]:
        """Empty caches of the whole text."""
        return [KVCache() for _ in self.layers]

    def embed(self, tokens: mx.array) -> Any:
        table = self.get("embed_tokens")
        if table is None:
            return self.anatomy.embed(tokens)
        return table(within(tokens, table.weight))

    def logits(self, states: mx.array, rows: NarrowOutput | None = None) -> mx.array:
        """Logits [n, V] of states [n, D]. Tokens outside the draft vocabulary get -inf.

        rows: the rows to compute, None for all. All other tokens get -inf too.
        """
        if rows is not None:
            return rows.logits(lambda: self.draft_logits(states))
        logits = self.draft_logits(states)
        return logits if self.vocabulary is None else self.vocabulary.widen(logits)

    def draft_logits(self, states: mx.array) -> Any:
        """Logits [..., Vd] of states [..., D], by the head's own matrix or the target's head."""
        if "lm_head" in self:
            return self.lm_head(states)
        return (self.vocabulary or self.anatomy).logits(states)

    @property
    def output_modules(self) -> list[nn.Module]:
        """The modules that make its logits, with a row for each token, or none."""
        if "lm_head" in self:
            return [level.lm_head for level in self.levels or [self]]
        if self.vocabulary is not None:
            return [] if self.vocabulary.head is None else [self.vocabulary.head]
        return [self.anatomy.head_tap().module]

    @property
    def tokens_a_pass(self) -> int:
        """Draft tokens for which all of its weights are read once."""
        return 1

    def output_layer(self) -> OutputLayer:
        modules, known = self.output_modules, [id(part) for part in self.modules()]
        width, ids = self.anatomy.vocab_size, None
        if self.vocabulary is not None:
            ids = self.vocabulary.ids
        elif modules:
            width = modules[0].weight.shape[0] if isinstance(modules[0], HEADS) else width
        table = self.get("embed_tokens")
        # A step reads one row of the embeddings, unless they also make the logits.
        is_read = table is None or any(table is module for module in modules)
        shared = [module for module in modules if id(module) not in known]
        step_bytes = bytes_read(self) + sum(map(bytes_of, shared))
        step_bytes -= 0 if is_read else bytes_of(table)
        can_narrow = all(isinstance(module, HEADS) for module in modules)
        return OutputLayer(
            modules if can_narrow else [], step_bytes, width, ids, self.tokens_a_pass
        )

    def log_confidences(self, states: mx.array, before: mx.array | None) -> mx.array | None:
        """Log of the chances [n] that the tokens of states [n, D] are accepted, or None if unknown.

        before: the tokens [n] before them. None if the head does not read these.
        """
        return None

    def notes(self) -> list[str]:
        notes = ["reads the state before the final norm"] if self.pre_norm else []
        if self.window:
            notes.append(f"looks back {self.window} positions")
        if self.bits:
            notes.append(f"quantized to {self.bits} bits")
        if self.vocabulary is not None:
            notes.append(f"{self.vocabulary.ids.size} of {self.anatomy.vocab_size} tokens")
        return notes

    def variations(self) -> Iterator[Variation]:
        other = not self.pre_norm
        name = f"state {'before' if other else 'after'} the final norm"
        advice = f"it looks trained on the {name}; load it with pre_norm={other}"
        yield Variation(name, advice, self.otherwise(pre_norm=other))

    def otherwise(self, norm_shift: float = 0.0, **changes: Any) -> Head:
        """A copy on the same arrays with other attributes, and `norm_shift` added to its norms."""
        attributes = (vars(part).values() for part in (self, *self.levels))
        # The weights are the module's own entries, and everything in `vars` is shared with the
        # copy.
        other = copy.deepcopy(self, {id(value): value for values in attributes for value in values})
        for part in (other, *other.levels):
            for name, value in changes.items():
                setattr(part, name, value)
        weights: list[tuple[str, mx.array]] = tree_flatten(self.parameters())
        norms = [(name, x + norm_shift) for name, x in weights if is_norm(name, x)]
        other.update(tree_unflatten(norms))
        return other


class RecurrentHead(Head):
    """A head that drafts token by token from its own states, or one layer of such a head.

    Attributes:
        moves_on: its only layer drafts any number of tokens.
        chained: each layer reads the states of the layer before it, not the target's.
    """

    source = RecurrentSource
    moves_on = True
    chained = True

    @property
    def levels(self) -> Sequence[RecurrentHead]:  # type: ignore[override]
        return [self, *self.get("further", ())]

    @property
    def tokens_a_pass(self) -> int:
        return 1 if self.moves_on else len(self.levels)

    def step(self, states: mx.array, tokens: mx.array, cache: list[Any]) -> mx.array:
        """States [n, D] of n more positions, from states [n, D] and the tokens [n] after them."""
        return self.forward(states[None], tokens[None], cache)[0]

    @abstractmethod
    def forward(self, states: mx.array, tokens: mx.array, cache: list[Any]) -> mx.array:
        """Run `step` for a batch: states [batch, n, D], tokens [batch, n]."""


class Variation(NamedTuple):
    """Another way to read a head's files.

    Attributes:
        advice: tells the user what to change if this variation is accepted more often.
    """

    name: str
    advice: str
    head: Head


def is_norm(name: str, value: mx.array) -> bool:
    return "norm" in name and value.ndim == 1


@dataclass(frozen=True, eq=False, repr=False)
class HeadDrafter(Drafter):
    """Draft with a trained head, which reads the states of the target that it was loaded for.

    Greedy targets and opaque samplers get the argmax. For other targets, tokens are drawn from the
    head's logits under the target's own sampling, and each token's distribution is kept
    (Leviathan et al. 2023, section 2.2).

    Attributes:
        head: the head.
        greedy: always propose the argmax.
        draft_temp: temperature of the drafts, None for the target's temperature.
        name: folder or repository.
        branches: most tokens at one position. With more than 1, drafts are trees.
        on_every_rank: see `ModelDrafter`.
        draft_vocab: see `load_head`.
    """

    head: Head
    greedy: bool = False
    draft_temp: float | None = None
    name: str = ""
    branches: int = 1
    on_every_rank: bool = False
    draft_vocab: int | str | Path = AUTO

    def __post_init__(self) -> None:
        check_way_of_writing(self)
        # A step of these heads goes on from one state, so two nodes cannot share a pass.
        if self.branches > 1 and not self.head.grows_trees:
            raise HeadError(f"{self.head.kind} heads draft chains. Leave branches out.")

    @property
    def model(self) -> nn.Module:
        return self.head

    def models(self) -> Sequence[nn.Module]:
        return [self.head]

    @property
    def features(self) -> Features:
        return self.head.features

    @cached_property
    def shortlist(self) -> Shortlist | None:
        """The tokens that it may draft, or None for all. Raises ValueError."""
        return make_shortlist(self.draft_vocab, self.head.output_layer)

    @property
    def key(self) -> str:
        content = "; ".join([self.head.kind, fingerprint(self.head), *self.head.notes()])
        return f"HeadDrafter({content}, {way_of_writing(self)})"

    def describe(self) -> str:
        """The kind and the variant of the head, in one line."""
        notes = self.head.notes()
        if self.shortlist is not None:
            notes.append(self.shortlist.describe())
        return "; ".join([f"{self.name or 'a head'}: {self.head.kind}", *notes])

    def __repr__(self) -> str:
        return f"<HeadDrafter {self.describe()}>"

    def check(self, context: DraftContext) -> None:
        """Raise HeadError for a target with a different vocabulary size."""
        size = self.head.anatomy.vocab_size
        if context.vocab_size not in (None, size):
            raise HeadError(
                f"{self.describe()} was loaded for a target with {size} tokens, and "
                f"this one has {context.vocab_size}. Load it for this target."
            )
        if self.shortlist is not None:
            self.shortlist.check(context)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Session:
        if context.shared_drafts is not None:
            # The texts of a batch share the passes of the head.
            return context.shared_drafts(self, prompt, context)
        return WritingSession(self, self.head.source(self.head, prompt, context))
