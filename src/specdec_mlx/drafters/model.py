"""A small model drafts for the large one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, KVCache, can_trim_prompt_cache, make_prompt_cache

from specdec_mlx.arguments import AUTO, argument_error
from specdec_mlx.caches import (
    READABLE,
    Rollback,
    leaves,
    refused_after_failure,
    states_of,
    wait_for,
)
from specdec_mlx.contracts import DraftContext, Drafter, DrafterStates, Session
from specdec_mlx.drafters.draft_sources import (
    DraftSource,
    Parents,
    WritingSession,
    check_way_of_writing,
    way_of_writing,
)
from specdec_mlx.drafters.fingerprint import fingerprint
from specdec_mlx.drafters.retokenized import Retokenized
from specdec_mlx.drafters.shared_vocabulary import (
    SharedVocabulary,
    check_same_tokenizer,
    log_foreign,
    shared_between,
)
from specdec_mlx.drafters.shortlist import Shortlist, shortlist_of
from specdec_mlx.errors import CacheRollbackError
from specdec_mlx.exactness.probe import first_inexact
from specdec_mlx.models.anatomy import vocab_size_of
from specdec_mlx.token_ids import to_ids
from specdec_mlx.trees.tree_pass import TreeLayout, next_level, takes_trees, tree_pass
from specdec_mlx.window_cache import check_window, has_window, limit_to_window

MOST_PENDING = 16  # tokens of the text that a draft may begin with in one pass

TOKENIZERS = ("any", "same")
"""Values of `ModelDrafter.tokenizers`."""


@dataclass(frozen=True, eq=False)
class ModelDrafter(Drafter):
    """Draft with any mlx-lm model.

    Args:
        model: the draft model. It may be the target.
        tokenizer: its tokenizer, None for the target's. Their contents are compared.
        greedy: always propose the model's argmax, a deterministic draft.
        draft_temp: temperature of the drafts, None for the target's temperature, 0 for greedy.
        tokenizers: "any" carries drafts over as text if the tokenizers differ. "same" raises
            TokenizerMismatchError with the first difference.
        branches: most tokens at one position. With more than 1, drafts are trees if the model has
            the target's tokenizer (see `drafters.tree_drafts`).
        on_every_rank: each machine of a target that is spread over several machines runs the draft
            model. By default the first machine runs it and sends its distributions.
        draft_vocab: tokens that a draft may contain, chosen again as the text grows (see
            `drafters.shortlist`). A number, "off" for all tokens, or the file of a memory or of a
            table of n-grams, whose counts help to choose. "auto" decides by the bytes that it
            saves.
        window: number of latest positions that the model sees beside the first positions, None
            for all. Layers that have windows or recurrent states of their own stay as they are.

    Tokens are drawn from the model's logits under the target's processors, temperature and filters
    (Leviathan et al. 2023, section 2.2). Greedy targets and opaque samplers get the argmax.
    """

    model: nn.Module
    tokenizer: Any = None
    greedy: bool = False
    draft_temp: float | None = None
    tokenizers: str = "any"
    branches: int = 1
    on_every_rank: bool = False
    draft_vocab: int | str | Path = AUTO
    window: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise argument_error(
                "model", self.model, "a loaded model: ModelDrafter(*mlx_lm.load(...))"
            )
        if self.tokenizers not in TOKENIZERS:
            raise argument_error("tokenizers", self.tokenizers, f"one of {TOKENIZERS}")
        check_window(self.window)
        check_way_of_writing(self)

    @property
    def key(self) -> str:
        """Digest of the model, and its options."""
        window = f", window={self.window}" if self.window else ""
        return f"ModelDrafter({fingerprint(self.model)}, {way_of_writing(self)}{window})"

    def make_cache(self) -> list[Any]:
        """Empty caches of the draft model, which keep its window."""
        return limit_to_window(make_prompt_cache(self.model), self.window)

    def models(self) -> Sequence[nn.Module]:
        return [self.model]

    def check(self, context: DraftContext) -> None:
        """Raise TokenizerMismatchError for a target whose tokenizer cannot be used.

        Raise ValueError for another model's caches in `context.draft_cache`.
        """
        if (shared := self.shared_with(context)) is not None:
            log_foreign(shared)
            return
        if context.draft_cache is not None:
            check_caches_fit(self.model, context.draft_cache)
        if self.shortlist is not None:
            self.shortlist.check(context)

    @cached_property
    def shortlist(self) -> Shortlist | None:
        """The tokens that it may draft, or None for all. Raises ValueError."""
        return shortlist_of(self.model, self.draft_vocab)

    def keeps_draft_cache(self, context: DraftContext) -> bool:
        return self.shared_with(context) is None

    def shared_with(self, context: DraftContext) -> SharedVocabulary | None:
        """The tokens shared with a target that has another tokenizer, else None."""
        if self.tokenizer is None or context.tokenizer is None:
            return None
        if self.tokenizers == "same":
            check_same_tokenizer(context.tokenizer, self.tokenizer)
            return None
        return shared_between(context.tokenizer, self.tokenizer)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Session:
        """Start a generation. The draft model reads the prompt before its first draft."""
        shared = self.shared_with(context)
        if shared is not None:
            # Drafts in other tokens are deterministic, so they come from a session of their own.
            return Retokenized(self.model, shared, list(prompt), context, self.make_cache())
        if context.shared_drafts is not None:
            return context.shared_drafts(self, prompt, context)
        return WritingSession(self, self.source(prompt, context))

    def source(self, prompt: Sequence[int], context: DraftContext) -> DraftSource:
        """The source of a generation's logits."""
        return ModelSource(self, prompt, context)

    def fill(self, source: ModelReader) -> None:
        """Fill the caches where that needs no reading. By default nothing is filled."""


class ModelReader(DraftSource):
    """A model that reads the text into its own caches, which are rewound after each verdict.

    Attributes:
        callers_cache: caches that the caller keeps, or None.
        rollback: the caches, and the number of tokens that they hold.
    """

    def __init__(self, drafter: ModelDrafter, prompt: Sequence[int], context: DraftContext) -> None:
        super().__init__(prompt, context)
        self.drafter = drafter
        self.model = drafter.model
        self.callers_cache = context.draft_cache
        caches, num_held = self.callers_cache, 0
        if caches is None and context.drafter_states is not None:
            caches, num_held = context.drafter_states.fetch(self.model, prompt[:-1])
            if not has_window(caches or (), drafter.window):
                caches, num_held = None, 0
        caches = limit_to_window(caches or make_prompt_cache(self.model), drafter.window)
        # The caller's caches are in step with the target's, or empty.
        if self.callers_cache is not None and not all(c.empty() for c in leaves(caches)):
            num_held = min(context.num_unseen, Rollback(caches, context.num_unseen).end)
        self.rollback = Rollback(caches, num_held)

    @property
    def keeps(self) -> bool:
        """True if its caches outlive the generation."""
        return self.callers_cache is not None or self.store is not None

    @property
    def store(self) -> DrafterStates | None:
        """Where its caches are kept. None if they are the caller's or the target's."""
        is_own = self.context.draft_cache is None and not self.is_lent
        return self.context.drafter_states if is_own else None

    @cached_property
    def most_id(self) -> int | None:
        """The model's last id if the target may have more ids, since MLX does not check bounds."""
        width, of_target = vocab_size_of(self.model), self.context.vocab_size
        return width - 1 if of_target is None or width < of_target else None

    @property
    def is_lent(self) -> bool:
        """True if the caches are the target's, which the loop rewinds."""
        lent = self.context.target_caches
        return lent is not None and lent.rollback is self.rollback

    def observe(self, tokens: Sequence[int]) -> None:
        if not self.is_lent:
            # The last emitted token is the rule's own, so the draft model has not read it.
            self.rollback.rewind_to(len(self.tokens) + len(tokens) - 1)
        super().observe(tokens)

    def catch_up(self) -> None:
        """Read the text except its last tokens, which a draft's first pass reads."""
        self.drafter.fill(self)
        if self.num_unread <= 2:
            return
        trims = self.drafter.branches > 1 or can_trim_prompt_cache(self.rollback.caches)
        most = MOST_PENDING if trims else 2
        self.read_to(len(self.tokens) - 1, most - 1)

    def read_to(self, end: int, leave: int = 0) -> None:
        """Read the text up to `end` in chunks, until at most `leave` tokens are left."""
        step = self.context.prefill_step_size
        while (left := end - self.rollback.position) > leave:
            chunk = self.tokens[self.rollback.position :][: min(left, step)]
            self.feed(to_ids(chunk))
            # Waiting for each chunk bounds the memory of a long prompt.
            if left > step:
                wait_for(self.rollback.caches)

    def in_one_pass(self, limit: int) -> tuple[list[int], int]:
        """The unread tokens, and the longest draft that fits behind them in one pass."""
        pending, room = self.tokens[self.rollback.position :], self.rollback.widest_pass()
        # The pass feeds the pending tokens and K - 1 more.
        return pending, limit if room is None else min(limit, 1 + room - len(pending))

    def feed(self, ids: mx.array, tree: TreeLayout | None = None) -> mx.array:
        """Run one pass over a chain or a tree. Returns logits [S, W] of the model."""
        if self.most_id is not None:
            ids = mx.minimum(ids, self.most_id)
        call = None if tree is None else partial(tree_pass, rows=tree)
        if self.output_rows is None:
            return self.rollback.forward(self.model, ids, call)
        return self.output_rows.logits(partial(self.rollback.forward, self.model, ids, call))

    def close(self, length: int) -> None:
        """Bring the caller's caches to exactly the first `length` tokens, or keep the model's."""
        if self.callers_cache is not None:
            with refused_after_failure(self.callers_cache):
                self.rollback.rewind_to(length)
                self.read_to(length)
                mx.async_eval(states_of(self.callers_cache))
        elif self.store is not None:
            self.keep(length, self.store)
        super().close(length)

    def keep(self, length: int, store: DrafterStates) -> None:
        """Store the caches up to the last of the first `length` tokens that the model has read."""
        # Caches that cannot go back are not worth keeping.
        with suppress(CacheRollbackError):
            self.rollback.rewind_to(length)
            if num_read := self.rollback.position:
                caches = self.rollback.caches
                mx.async_eval(states_of(caches))
                store.store(self.model, self.tokens[:num_read], caches)

    def hand_over(self) -> Rollback:
        """Read the text and give the caches to a batch. After this the reader only counts."""
        self.catch_up()
        handed = self.rollback
        self.rollback = Rollback([], handed.position, base=handed.base)
        return handed

    def take_back(self, caches: list[Any], length: int) -> None:
        """Take the caches back from a batch, with at most `length` tokens."""
        if self.callers_cache is not None:
            self.callers_cache[:] = caches
            caches, self.callers_cache = self.callers_cache, None
        self.rollback = Rollback(caches, self.rollback.position)
        self.rollback.rewind_to(length)

    @property
    def num_held(self) -> int:
        """Number of valid positions in its row, with earlier texts."""
        return self.rollback.end

    @property
    def num_unread(self) -> int:
        return len(self.tokens) - self.rollback.position

    def unread(self, count: int) -> tuple[list[int], None]:
        """The next unread tokens [n]. A model has no states."""
        most = vocab_size_of(self.model) - 1  # an id that the target alone has
        start = self.rollback.position
        return [min(token, most) for token in self.tokens[start : start + count]], None

    def count_read(self, count: int) -> None:
        self.rollback.advance(count)

    def hold_draft(self, num_tokens: int) -> None:
        """Count the text and a draft's first tokens in its row."""
        self.rollback.rewind_to(len(self.tokens))
        self.rollback.advance(num_tokens)


class ModelSource(ModelReader):
    """Drafts of a model: one pass for each token, or for each level of a tree."""

    def __init__(self, drafter: ModelDrafter, prompt: Sequence[int], context: DraftContext) -> None:
        super().__init__(drafter, prompt, context)
        self.fed_parents: list[int] = []

    def begin_draft(self, limit: int) -> int:
        if limit == 0:
            return 0
        self.catch_up()
        room = self.rollback.widest_pass()
        self.rollback.checkpoint()
        self.fed_parents = []
        return limit if room is None else min(limit, 1 + room)

    @property
    def takes_trees(self) -> bool:
        """True if the model drafts the same in a tree as in chains."""
        rollback = self.rollback  # a level of a tree is wider than narrow passes may be
        may_fork = takes_trees(rollback) and rollback.widest_pass() is None
        return may_fork and first_inexact(self.model, 0, on_trees=True) is None

    def next_logits(self, tokens: mx.array | None, parents: Parents = None) -> mx.array:
        if tokens is None:
            return self.feed(to_ids(self.tokens[self.rollback.position :]))[-1:]
        return self.feed(tokens, None if parents is None else next_level(self.fed_parents, parents))

    def end_draft(self) -> None:
        # The rows of a tree are in the order of its nodes, not in the order of the text.
        if self.fed_parents:
            self.rollback.rewind_to(len(self.tokens))


def check_caches_fit(model: nn.Module, caches: Sequence[Any]) -> None:
    """Raise ValueError for a draft model's caches that another model made or filled."""
    fresh = make_prompt_cache(model)
    # The pass is lazy. It is never computed, but it sets the kinds and the sizes.
    model(mx.array([[0]]), cache=fresh)
    actual, expected = ([_about(cache) for cache in leaves(x)] for x in (caches, fresh))
    if len(caches) == len(fresh) and len(actual) == len(expected):
        pairs = zip(actual, expected, strict=True)
        if all(
            kind is other and (sizes is None or sizes == right)
            for (kind, sizes), (other, right) in pairs
        ):
            return
    raise ValueError(
        f"prompt_cache holds {len(caches)} caches behind the target's that are not the draft "
        f"model's. Expected {len(fresh)} caches that mlx_lm.models.cache.make_prompt_cache(model) "
        "made for the draft model, and that only the draft model has filled."
    )


def _about(cache: Any) -> tuple[type, list[Any] | None]:
    """The class of a cache, and the sizes of its contents, None if it is empty."""
    if isinstance(cache, ArraysCache):
        is_filled = all(slot is not None for slot in cache.cache)
        # The second axis of a slot may grow with the text.
        return type(cache), [slot.shape[2:] for slot in cache.cache] if is_filled else None
    keys: Any = getattr(cache, "keys", None)
    is_array = isinstance(keys, mx.array)
    sizes = [keys.shape[1], keys.shape[-1]] if is_array else None
    # Classes in `READABLE` count as one kind.
    return KVCache if isinstance(cache, READABLE) else type(cache), sizes
