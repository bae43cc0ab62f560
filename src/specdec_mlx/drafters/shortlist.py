"""A shortlist: the tokens that a head or a draft model may propose for now.

A draft token costs a pass over every row of the output matrix. With a shortlist, n rows are copied
out once, and drafts are computed from these rows alone. The other tokens have q = 0, so that every
rule stays exact. The list has the tokens of the text, the tokens that follow them in a file of
counts, and the most frequent tokens. It changes between two drafts only, because q has to be the
distribution that a token was drawn from.

Fixed lists: FR-Spec (Zhao et al. 2025, arXiv 2502.14856), VocabTrim (Goel et al. 2025, 2506.22694).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from jaxtyping import Int
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from specdec_mlx.arguments import AUTO, DRAFT_VOCABS, OFF, argument_error
from specdec_mlx.contracts import DraftContext
from specdec_mlx.drafters.drawing import spread
from specdec_mlx.drafters.reduced_models import HEADS, some_rows
from specdec_mlx.errors import TokenizerMismatchError
from specdec_mlx.memory.file import N_GRAMS, TableHeader, damaged, read_file, read_front
from specdec_mlx.memory.persistent import fingerprint_of
from specdec_mlx.memory.store import Memory
from specdec_mlx.models.anatomy import anatomy_of, standing_in

SMALLEST, SHARE = 4096, 16
"""Size of a list by default: 4,096 tokens, or a 16th of the vocabulary if that is more.

4,096 of SmolLM2's 49,152 tokens keep 0.98 of the accepted tokens (`benchmarks.shortlist`)."""

LEAST_SAVED = 0.5
"""Share of a draft step's bytes that a list has to save by default.

A list loses about 2% of the accepted tokens. Half of a step is worth more than that from steps of a
hundredth of the target's pass on."""

REFRESH = 16  # tokens of the text after which the list is chosen again
SUCCESSORS = 8  # tokens that are taken for each token of the text, from a file of counts

Ids = Int[np.ndarray, " _"]


def shortlist_size(num_tokens: int) -> int:
    """Default size of a list for a vocabulary."""
    return max(SMALLEST, num_tokens // SHARE)


def check_draft_vocab(value: Any) -> None:
    """Raise ValueError for a wrong value of the option `draft_vocab`."""
    if isinstance(value, str | Path):
        is_right = value in (AUTO, OFF) or Path(value).expanduser().is_file()
    else:
        is_right = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not is_right:
        raise argument_error("draft_vocab", value, DRAFT_VOCABS)


@dataclass(frozen=True, eq=False)
class OutputLayer:
    """The modules that make a drafter's logits. Each has a row for each token.

    Attributes:
        modules: the modules, none if rows cannot be taken.
        step_bytes: bytes that a draft step reads, with all rows.
        width: V of the drafter's logits.
        ids: token of each row, None for row i of token i.
        tokens: number of draft tokens that a step makes.
    """

    modules: Sequence[Any]
    step_bytes: int
    width: int
    ids: mx.array | None = None
    tokens: int = 1

    @property
    def num_rows(self) -> int:
        return int(self.modules[0].weight.shape[0])

    def saved_bytes(self, size: int) -> int:
        """Bytes that a draft step saves with a list of `size` tokens."""
        share = max(0, self.num_rows - size) / self.num_rows
        return int(sum(map(bytes_of, self.modules)) * share)

    @cached_property
    def row_of(self) -> Ids:
        """Row of each token, -1 for a token that has none."""
        rows = np.arange(self.num_rows)
        if self.ids is None:
            return rows
        row_of = np.full(self.width, -1)
        row_of[np.array(self.ids)] = rows
        return row_of


def shortlist_of(model: nn.Module, draft_vocab: int | str | Path) -> Shortlist | None:
    """The shortlist of a draft model, or None for all tokens. Errors as in `make_shortlist`."""
    tables = [module for module in model.modules() if isinstance(module, HEADS)]
    if draft_vocab == AUTO and all(table.weight.shape[0] <= SMALLEST for table in tables):
        return None
    return make_shortlist(draft_vocab, partial(output_layer_of, model))


def bytes_of(module: nn.Module) -> int:
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))


def bytes_read(module: nn.Module) -> int:
    """Bytes that a step of one token reads: of experts, only those that are chosen."""
    parts = module.modules()
    names = ("top_k", "num_experts_per_tok", "n_activated_experts")
    chosen = [x for part in parts for name in names if isinstance(x := vars(part).get(name), int)]
    total = bytes_of(module)
    for part in parts:
        if chosen and isinstance(part, SwitchLinear | QuantizedSwitchLinear):
            num_experts = part.weight.shape[0]
            total -= bytes_of(part) * max(0, num_experts - max(chosen)) // num_experts
    return total


def output_layer_of(model: nn.Module) -> OutputLayer:
    """The output layer of a draft model."""
    anatomy = anatomy_of(model)
    modules = [] if isinstance(anatomy.head, str) else [anatomy.head.module]
    table = anatomy.embedding
    # A step reads one row of the embeddings, unless they also make the logits.
    is_tied = table is None or any(table is module for module in modules)
    step_bytes = bytes_read(model) - (0 if is_tied or table is None else bytes_of(table))
    can_narrow = all(_narrows(model, module, anatomy.vocab_size) for module in modules)
    return OutputLayer(modules if can_narrow else [], step_bytes, anatomy.vocab_size)


def _narrows(model: nn.Module, module: Any, vocab_size: int) -> bool:
    """True if a pass on two rows of its output layer makes two logits."""
    if not isinstance(module, HEADS) or module.weight.shape[0] != vocab_size:
        return False
    two = some_rows(module, mx.array([0, 1]))
    try:
        with standing_in([(module, two)]):
            # The pass is lazy. It is never computed, but it has the shape of the logits.
            logits = model(mx.array([[0]]), cache=make_prompt_cache(model))
    except ValueError:  # of shapes that do not fit, as where a model adds a bias of its own
        return False
    return bool(logits.shape[-1] == 2)


@dataclass(frozen=True, eq=False)
class Shortlist:
    """The choice of rows of a drafter. `begin` starts a text.

    Attributes:
        layer: the drafter's output layer.
        size: number of tokens.
        counts: counts of pairs of tokens.
    """

    layer: OutputLayer
    size: int
    counts: PairCounts

    def begin(self, context: DraftContext) -> TextShortlist:
        return TextShortlist(self, sorted(getattr(context.tokenizer, "eos_token_ids", None) or ()))

    def check(self, context: DraftContext) -> None:
        """Raise TokenizerMismatchError for a file of another tokenizer's counts."""
        ours, theirs = self.counts.tokenizer, fingerprint_of(context.tokenizer)
        if None not in (ours, theirs) and ours != theirs:
            raise TokenizerMismatchError(
                f"draft_vocab: the file holds token ids of tokenizer {ours}, and the target's is "
                f"{theirs}. Give a file that was written with this model's tokenizer."
            )

    def describe(self) -> str:
        return f"drafts {self.size} of {self.layer.num_rows} tokens at a time"

    def choose(self, latest: Ids, first: Sequence[int] = ()) -> Ids:
        """Tokens [n] in ascending order, each with a row.

        Args:
            latest: the text's tokens [m], the latest first.
            first: tokens that come before all others.
        """
        is_left = self.layer.row_of >= 0
        chosen, room = list[Ids](), self.size
        for ids in (np.array(first, int), latest, self.counts.after(latest), self.frequent):
            ids = ids[ids < len(is_left)]
            ids = ids[is_left[ids]][:room]
            is_left[ids] = False
            chosen.append(ids)
            room -= len(ids)
        return np.sort(np.concatenate(chosen))

    @cached_property
    def frequent(self) -> Ids:
        """All tokens, the most frequent first."""
        # Tokenizers give small ids to the frequent tokens, which were merged first.
        times = np.zeros(len(self.layer.row_of), int)
        ids, sums = self.counts.totals()
        times[ids[ids < len(times)]] = sums[ids < len(times)]
        return np.argsort(-times, kind="stable")


def make_shortlist(
    draft_vocab: int | str | Path, find_layer: Callable[[], OutputLayer]
) -> Shortlist | None:
    """The shortlist for the option `draft_vocab`, or None for all tokens.

    Args:
        draft_vocab: the option.
        find_layer: finds the output layer of the draft model or the head.

    Raises:
        ValueError: a list was asked for, and rows cannot be taken.
        MemoryFileError: the file holds no counts.
    """
    if draft_vocab == OFF:
        return None
    layer = find_layer()
    if not layer.modules:
        if draft_vocab == AUTO:
            return None
        raise ValueError(
            f"draft_vocab={draft_vocab!r}: the rows of its output layer cannot be taken one by "
            "one. Leave draft_vocab out."
        )
    num_tokens = int((layer.row_of >= 0).sum())
    size = draft_vocab if isinstance(draft_vocab, int) else shortlist_size(num_tokens)
    pays = layer.saved_bytes(size) >= LEAST_SAVED * layer.step_bytes
    if size >= num_tokens or (draft_vocab == AUTO and not pays):
        return None
    is_file = draft_vocab != AUTO and not isinstance(draft_vocab, int)
    counts = PairCounts.load(Path(str(draft_vocab))) if is_file else PairCounts()
    return Shortlist(layer, size, counts)


@dataclass(frozen=True, eq=False)
class NarrowOutput:
    """Rows of an output layer, in a copy.

    Attributes:
        ids: token [n] of each row.
        pairs: each module of the layer, and the module with its rows.
        width: V.
    """

    ids: mx.array
    pairs: Sequence[tuple[nn.Module, nn.Module]]
    width: int

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Multiply by these rows alone in the block, so that logits are [..., n]."""
        with standing_in(self.pairs):
            yield

    def widen(self, logits: mx.array) -> mx.array:
        """Logits [..., V] from [..., n]. All other tokens get -inf."""
        return spread(logits, mx.broadcast_to(self.ids, logits.shape), self.width)

    def logits(self, compute: Callable[[], mx.array]) -> mx.array:
        """Logits [..., V] of a function that runs the layer."""
        with self.in_use():
            logits = compute()
        return self.widen(logits)


class TextShortlist:
    """The rows for the drafts of a text, or of the texts of a batch.

    Attributes:
        shortlist: the choice of rows.
        end_tokens: tokens that are always in the list.
    """

    def __init__(self, shortlist: Shortlist, end_tokens: Sequence[int] = ()) -> None:
        self.shortlist = shortlist
        self.end_tokens = end_tokens
        self._unread: list[int] = []
        self._num_read = 0
        self._last_seen = np.zeros(len(shortlist.layer.row_of), int)  # number of the token, from 1
        self._is_listed = shortlist.layer.row_of < 0  # a token without a row cannot be added
        self._rows: NarrowOutput | None = None

    def read(self, tokens: Sequence[int]) -> None:
        """Take more tokens of a text. They are in the list from the next `refresh` on."""
        self._unread += tokens

    def refresh(self, num_texts: int = 1) -> NarrowOutput:
        """The rows for the next draft. They are chosen again after `REFRESH` tokens of each text.

        num_texts: number of texts that are being written.
        """
        if self._rows is None or len(self._unread) >= REFRESH * num_texts:
            new = np.array(self._unread, int)
            places = self._num_read + 1 + np.arange(len(new))
            self._unread, self._num_read = [], self._num_read + len(new)
            can_have_row = (new >= 0) & (new < len(self._last_seen))
            new, places = new[can_have_row], places[can_have_row]
            self._last_seen[new] = places
            if self._rows is None or not self._is_listed[new].all():
                self._rows = self._choose()
        return self._rows

    def _choose(self) -> NarrowOutput:
        layer, text = self.shortlist.layer, np.flatnonzero(self._last_seen)
        latest = text[np.argsort(-self._last_seen[text])]
        ids = self.shortlist.choose(latest, self.end_tokens)
        self._is_listed = layer.row_of < 0
        self._is_listed[ids] = True
        rows = mx.array(layer.row_of[ids])
        pairs = [(module, some_rows(module, rows)) for module in layer.modules]
        # The rows are copied now. A lazy copy would be made again for each draft.
        mx.async_eval([module.parameters() for _, module in pairs])
        return NarrowOutput(mx.array(ids, mx.int32), pairs, layer.width)


def no_ids() -> Ids:
    return np.zeros(0, int)


@dataclass(frozen=True, eq=False)
class PairCounts:
    """Counts of tokens that follow each other, [m] each, sorted by first token and count.

    Attributes:
        tokenizer: fingerprint of the tokenizer of the ids, or None.
    """

    firsts: Ids = field(default_factory=no_ids)
    seconds: Ids = field(default_factory=no_ids)
    times: Ids = field(default_factory=no_ids)
    tokenizer: str | None = None

    @classmethod
    def load(cls, path: Path) -> PairCounts:
        """The pairs in a table of n-grams, or in a memory of texts. Raises MemoryFileError."""
        path = path.expanduser()
        if read_front(path)[0].kind == Memory.kind:
            memory = Memory.load(path)
            pairs = [np.stack([text[:-1], text[1:]], axis=1) for text in memory.texts()]
            return cls.of(np.concatenate([np.zeros((0, 2), int), *pairs]), 1, memory.tokenizer)
        header, numbers = read_file(path, N_GRAMS, TableHeader)
        start = 0
        # The n-grams of the smallest order come first.
        for order, num_ngrams in header.orders:
            end = start + num_ngrams * (order + 1)
            if end > len(numbers):
                raise damaged(path, f"{len(numbers)} numbers, expected {end} or more")
            if order > 1:
                ngrams = numbers[start:end].reshape(num_ngrams, order + 1)
                return cls.of(ngrams[:, -3:-1], ngrams[:, -1], header.tokenizer)
            start = end
        return cls(tokenizer=header.tokenizer)

    @classmethod
    def of(cls, pairs: Any, times: Any, tokenizer: str | None) -> PairCounts:
        """Counts of pairs [m, 2], each of which came a number of times."""
        unique, places = np.unique(pairs, axis=0, return_inverse=True)
        weights = np.broadcast_to(times, len(pairs))
        sums = np.bincount(places.reshape(-1), weights, len(unique)).astype(int)
        order = np.lexsort((-sums, unique[:, 0]))
        return cls(unique[order, 0], unique[order, 1], sums[order], tokenizer)

    def after(self, tokens: Ids) -> Ids:
        """The tokens that follow these tokens most often, without repetitions."""
        starts = np.searchsorted(self.firsts, tokens, "left")
        stops = np.searchsorted(self.firsts, tokens, "right")
        places = starts[:, None] + np.arange(SUCCESSORS)
        return np.unique(self.seconds[places[places < stops[:, None]]])

    def totals(self) -> tuple[Ids, Ids]:
        """Tokens [n], and how often each token came second."""
        ids, places = np.unique(self.seconds, return_inverse=True)
        return ids, np.bincount(places, self.times, len(ids)).astype(int)
