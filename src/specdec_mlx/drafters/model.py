"""A small model drafts for the large one."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import can_trim_prompt_cache

from specdec_mlx.arguments import shown, wrong
from specdec_mlx.caches import Rollback, check_caches_fit, states_of, wait_for
from specdec_mlx.contracts import (
    NO_DRAFT,
    Checks,
    Closes,
    Draft,
    DraftContext,
    Drafter,
    GoesOn,
    ReadsTarget,
    Step,
    key_of,
    optional,
)
from specdec_mlx.drafters.drawing import (
    DRAWN_AT_ONCE,
    ChainDraws,
    worth_it,
)
from specdec_mlx.drafters.fingerprint import fingerprint
from specdec_mlx.drafters.retokenized import Retokenized
from specdec_mlx.drafters.shared_vocabulary import (
    SharedVocabulary,
    check_same_tokenizer,
    log_foreign,
    shared_between,
)
from specdec_mlx.drafters.writing import (
    Parents,
    WritingSession,
    check_way_of_writing,
    way_of_writing,
)
from specdec_mlx.exactness.probe import first_inexact
from specdec_mlx.models.anatomy import vocab_size_of
from specdec_mlx.token_ids import to_ids, to_list
from specdec_mlx.trees.passes import TreeLayout, next_level, takes_trees, tree_pass

MOST_PENDING = 16  # tokens of the text that a draft may begin with in one pass

TOKENIZERS = ("any", "same")
"""What may be said about the tokenizer of a draft model."""


@dataclass(frozen=True, eq=False)
class ModelDrafter:
    """Draft with any mlx-lm model.

    Args:
        model: the draft model; may equal the target.
        tokenizer: its tokenizer, None for the target's; compared with the target's by content.
        greedy: propose the model's argmax, a point mass, whatever the target's sampling.
        draft_temp: temperature of the drafts, None for the target's own, 0 for greedy.
        tokenizers: what to do if they differ. "any" carries drafts over as text, "same" raises
            TokenizerMismatchError with the first difference.
        branches: most tokens at a place; with more than one it proposes trees, if it has the
            target's tokenizer; see `drafters.growing`.
        on_every_rank: each machine of a target that is spread over several runs the draft model; by
            default the first does, and sends its distributions.
        drafter: guesses what the model will draft, so that one pass of it checks several tokens (a
            vertical cascade: Leviathan et al. 2023, section 6; Chen et al. 2023): a look-up, or its
            name, or a smaller `ModelDrafter`. The drafts are those of the model alone. Not worth it
            where the draft model's own text repeats nothing.

    Draws come from its logits under the target's processors, temperature and filters (Leviathan et
    al. 2023, section 2.2), and are declared as drawn; greedy targets and opaque samplers get the
    argmax.
    """

    model: nn.Module
    tokenizer: Any = None
    greedy: bool = False
    draft_temp: float | None = None
    tokenizers: str = "any"
    branches: int = 1
    on_every_rank: bool = False
    drafter: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise wrong(
                "model", self.model, "a loaded model: ModelDrafter(*mlx_lm.load(...))"
            )
        if self.tokenizers not in TOKENIZERS:
            raise wrong("tokenizers", self.tokenizers, f"one of {TOKENIZERS}")
        check_way_of_writing(self)
        if isinstance(self.drafter, str):  # names are known above this module
            named: Any = import_module("specdec_mlx.drafters.choosing.registry")
            object.__setattr__(self, "drafter", named.make_drafter(self.drafter))
        if self.drafter is not None:
            object.__setattr__(self, "drafter", guesser_for(self))

    @property
    def key(self) -> str:
        """The model by its content, and how it drafts."""
        way = way_of_writing(self)
        if self.drafter is not None:
            way = f"{way}, drafter={key_of(self.drafter)}"
        return f"ModelDrafter({fingerprint(self.model)}, {way})"

    def check(self, context: DraftContext) -> None:
        """Raise TokenizerMismatchError for a target with a tokenizer that is not taken.

        ValueError for caches of another model in `context.draft_cache`.
        """
        if isinstance(self.drafter, Checks):
            self.drafter.check(context)
        if (shared := self.shared_with(context)) is not None:
            log_foreign(shared)
        elif context.draft_cache is not None:
            check_caches_fit(self.model, context.draft_cache)

    def keeps_draft_cache(self, context: DraftContext) -> bool:
        """True for a model with the target's tokenizer."""
        return self.shared_with(context) is None

    def shared_with(self, context: DraftContext) -> SharedVocabulary | None:
        """What the model shares with a target of another tokenizer, None for the same one."""
        if self.tokenizer is None or context.tokenizer is None:
            return None
        # guesses are tokens of the target's
        if self.tokenizers == "same" or self.drafter is not None:
            check_same_tokenizer(context.tokenizer, self.tokenizer)
            return None
        return shared_between(context.tokenizer, self.tokenizer)

    def begin(
        self, prompt: Sequence[int], context: DraftContext
    ) -> ModelSession | Retokenized:
        """Start a generation; the draft model reads the prompt with its first proposal."""
        shared = self.shared_with(context)
        if shared is None:
            return self.session(prompt, context)
        return Retokenized(self.model, shared, list(prompt), context)

    def session(self, prompt: Sequence[int], context: DraftContext) -> ModelSession:
        """The model's side of a generation."""
        if self.drafter is not None:
            return GuessedSession(self, prompt, context)
        begin = ModelSession if context.shared_drafts is None else context.shared_drafts
        return begin(self, prompt, context)


class ModelSession(WritingSession):
    """The draft model's side of one generation."""

    def __init__(
        self, drafter: ModelDrafter, prompt: Sequence[int], context: DraftContext
    ) -> None:
        super().__init__(drafter, prompt, context)
        self.model = drafter.model
        self.callers_cache = context.draft_cache
        self.rollback = Rollback.of(self.model, self.callers_cache)
        if self.callers_cache is not None:  # in step with the target's
            self.rollback.position = min(context.num_unseen, self.rollback.end)

    def begin_draft(self, limit: int) -> int:
        """Feed what was missed; all that is asked for, unless passes have to be narrow."""
        if limit == 0:
            return 0
        self.catch_up()
        room = self.rollback.widest_pass()
        self.rollback.checkpoint()
        self.fed_parents: list[int] = []
        return limit if room is None else min(limit, 1 + room)

    @property
    def forks(self) -> bool:
        """True if drafts are to fork, and the model drafts the same in a tree as in chains."""
        rollback = self.rollback  # a level of a tree is wider than narrow passes may be
        may_fork = (
            super().forks and takes_trees(rollback) and rollback.widest_pass() is None
        )
        return may_fork and first_inexact(self.model, 0, on_trees=True) is None

    def next_logits(self, tokens: mx.array | None, parents: Parents = None) -> mx.array:
        """Logits of a pass over further tokens, or over those of the text that were not read."""
        if tokens is None:
            return self.feed(to_ids(self.tokens[self.rollback.position :]))[-1:]
        return self.feed(
            tokens, None if parents is None else next_level(self.fed_parents, parents)
        )

    def end_draft(self) -> None:
        """Drop a tree from the caches: its rows are not in the order of the text."""
        if self.tree is not None:
            self.rollback.rewind_to(len(self.tokens))

    def observe(self, tokens: Sequence[int]) -> None:
        """Keep the accepted part of the last proposal in the caches."""
        self.rollback.rewind_to(len(self.tokens) + len(tokens) - 1)
        super().observe(tokens)

    def propose_after(self, tokens: Sequence[int], limit: int) -> Draft:
        """A chain after the text and `tokens` that may be rejected: few, for one pass to check."""
        end = len(self.tokens)
        if limit <= 0 or not end:
            return NO_DRAFT
        # a way back from what is read now, which may not be handed out
        self.rollback.checkpoint()
        self.catch_up()
        with self.rollback.undone(end - 1):
            self.tokens += tokens
            draft = self.propose(min(limit, DRAWN_AT_ONCE))
            del self.tokens[end:]
        return draft

    def fork(self) -> ModelSession:
        """Copy the caches; what cannot be trimmed in the copy is read again."""
        other, caches = copy.copy(self), self.rollback.caches
        other.tokens = list(self.tokens)
        other.chances = copy.deepcopy(self.chances)
        if can_trim_prompt_cache(caches):
            other.rollback = Rollback(copy.deepcopy(caches), self.rollback.position)
        else:
            other.rollback = Rollback.of(self.model)
        return other

    def catch_up(self) -> None:
        """Feed the text, in chunks, but for its last tokens, which a draft's first pass feeds."""
        trims = self.branches > 1 or can_trim_prompt_cache(self.rollback.caches)
        most = MOST_PENDING if trims else 2
        self.read_to(len(self.tokens) - 1, most - 1)

    def read_to(self, end: int, leave: int = 0) -> None:
        """Feed the text up to `end`, in chunks, until so many or fewer tokens are left."""
        step = self.context.prefill_step_size
        while (left := end - self.rollback.position) > leave:
            chunk = self.tokens[self.rollback.position :][: min(left, step)]
            self.feed(to_ids(chunk))
            if left > step:
                wait_for(self.rollback.caches)

    def feed(self, ids: mx.array, tree: TreeLayout | None = None) -> mx.array:
        """One pass of the draft model over a chain or a tree; logits [S, W], its own."""
        width = vocab_size_of(self.model)
        if self.context.vocab_size is None or width < self.context.vocab_size:
            ids = mx.minimum(ids, width - 1)
        call = None if tree is None else partial(tree_pass, rows=tree)
        return self.rollback.forward(self.model, ids, call)

    def close(self, length: int) -> None:
        """Bring the caller's caches to exactly the first `length` tokens."""
        if self.callers_cache is not None:
            self.rollback.rewind_to(length)
            self.read_to(length)
            mx.async_eval(states_of(self.rollback.caches))
        super().close(length)


def begin_ahead(
    asked_by: Drafter, drafter: Drafter, prompt: Sequence[int], context: DraftContext
) -> Any:
    """A session that can be asked what follows a draft; ValueError for one that cannot."""
    session = drafter.begin(list(prompt), context)
    if optional(session, "propose_after") is None:
        raise ValueError(
            f"{type(asked_by).__name__}: {type(drafter).__name__} cannot be asked what follows a "
            "draft; expected one whose sessions have propose_after, such as 'suffix'."
        )
    return session


def guesser_for(drafter: ModelDrafter) -> Any:
    """The drafter of a draft model; ValueError for one that cannot guess for it."""
    guesser, what = drafter.drafter, f"ModelDrafter: drafter={shown(drafter.drafter)}"
    if (
        type(drafter) is not ModelDrafter
        or drafter.branches > 1
        or drafter.on_every_rank
    ):
        raise ValueError(
            f"{what} guesses for a draft model that writes chains on one rank; leave it out of "
            "early exits, PARD models, branches= and on_every_rank=."
        )
    if isinstance(guesser, ReadsTarget) or optional(guesser, "branches") > 1:
        raise ValueError(
            f"{what} reads the target, or drafts trees; expected a look-up, such as 'suffix', or a "
            "smaller ModelDrafter."
        )
    if isinstance(guesser, ModelDrafter):
        return replace(guesser, tokenizers="same")
    return guesser


@dataclass
class DraftNoise:
    """The noise of a draft model's own draws, to a model that guesses these, by their positions."""

    session: ModelSession

    def gumbels(self, places: Sequence[tuple[str, int]], vocab_size: int) -> mx.array:
        """[n, V] of consecutive positions; of drafts, where these have other noise."""
        start = len(self.session.tokens) - self.session.num_prompt
        first = places[0][1] - start
        return self.session.context.draft_gumbels(start, len(places), first)


class GuessedSession(ModelSession):
    """The side of a draft model whose next tokens another session guesses.

    Tokens are drawn from the model's own rows with its own noise, so that guesses only decide in
    which pass. guesser: has seen the first `num_shown` tokens of the text.
    """

    def __init__(
        self, drafter: ModelDrafter, prompt: Sequence[int], context: DraftContext
    ) -> None:
        super().__init__(drafter, prompt, context)
        noise: Any = DraftNoise(self)
        own = {"sampling": self.sampling, "noise": noise, "coupled": True}
        alone = replace(context, draft_cache=None, shared_drafts=None, **own)
        self.guesser = begin_ahead(drafter, drafter.drafter, prompt, alone)
        self.num_shown = len(self.tokens)

    def propose(self, limit: int) -> Draft:
        """`limit` tokens, in as few passes as the guesses allow."""
        return self.propose_while(limit, lambda evidence: Step.GO_ON)

    def propose_while(self, limit: int, goes_on: GoesOn) -> Draft:
        """Up to `limit` tokens, as long as they are worth it, by confidences alone."""
        length, draws = self.begin_draft(limit), self.draws(at_once=1)
        return worth_it(draws, self.confidences(length, draws), goes_on)

    def confidences(self, length: int, draws: ChainDraws) -> Iterator[float]:
        """Draw when asked, in one pass all that was guessed; the largest probability at each."""
        drafted: list[int] = []
        while len(drafted) < length:
            after, position = [*self.tokens, *drafted], self.rollback.position
            ahead, pending = after[self.num_shown :], after[position:]
            most = self.num_guesses(length - len(drafted) - 1, len(pending))
            guessed = self.guesser.propose_after(ahead, most) if most else NO_DRAFT
            guesses = to_list(guessed.tokens)[:most]
            rows = self.feed(to_ids([*pending, *guesses]))[len(pending) - 1 :]
            new = draws.draw_guessed(rows, guesses)
            drafted += new
            self.rollback.rewind_to(len(self.tokens) + len(drafted) - 1)
            logs: Any = draws.log_confidences()[-len(new) :].tolist()
            yield from map(math.exp, logs)

    def num_guesses(self, most: int, num_pending: int) -> int:
        """Most guesses that a pass may check besides the pending tokens."""
        if self.guesser is None:
            return 0
        room, end = self.rollback.widest_pass(), self.rollback.end
        if room is None and (until := first_inexact(self.model, end)) is not None:
            room = until - end
        return most if room is None else max(0, min(most, room - num_pending))

    def observe(self, tokens: Sequence[int]) -> None:
        """Show the guesser what was emitted, too."""
        if self.guesser is not None:
            self.guesser.observe(tokens)
        super().observe(tokens)
        self.num_shown = len(self.tokens)

    def fork(self) -> ModelSession:
        """A copy that nobody guesses for."""
        other = super().fork()
        vars(other)["guesser"] = None
        return other

    def close(self, length: int) -> None:
        """End both."""
        if isinstance(self.guesser, Closes):
            self.guesser.close(length)
        super().close(length)
