"""Draft models with a tokenizer of their own: the text is followed in their tokens.

What such a model drafts is handed over in one of two ways.

`TextDrafts`: the model writes its likeliest text, which is encoded with the target's tokenizer. A
draft of text follows from the text before it alone, so it is a point mass, whatever it is.

`SharedDrafts`: tokens are drawn from what the model says about those that both vocabularies have,
normalised. That is the very distribution q that each is drawn from, and rejection and block take
it as any other (Leviathan et al. 2023, section 2.3). A drawn token is fed as the model's own of the
same bytes, without a look at it: the model then reads tokens that it might have written otherwise,
which changes the q of later positions, but never whether they are drafted.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.drafters.alignment import MARGIN, DraftText, continuation
from specdec_mlx.drafters.drawing import Draws, draft_to
from specdec_mlx.drafters.shared_vocabulary import ENOUGH, SharedVocabulary
from specdec_mlx.sampling.distribution import Sampling
from specdec_mlx.target.model_pass import vocab_size_of
from specdec_mlx.target.rollback import Rollback
from specdec_mlx.target.strategies import leaves, strategy_for
from specdec_mlx.token_ids import to_ids, to_list
from specdec_mlx.types import Draft, DraftContext

SHORTER = 1.25
"""Draft tokens in one of the target's from which a draft often ends inside of one."""


class Retokenized(ABC):
    """The side of a draft model with another tokenizer in one generation.

    Its caches hold tokens of its own, `fed`, those of the last draft included. The text is encoded
    again at its end, and the caches go back to the longest common prefix of both.
    """

    def __init__(
        self,
        model: nn.Module,
        shared: SharedVocabulary,
        prompt: Sequence[int],
        context: DraftContext,
    ) -> None:
        """Start with the prompt as the text and empty caches, or those of the caller."""
        self.model = model
        self.shared = shared
        self.context = context
        self.callers_cache = context.draft_cache
        self.rollback = Rollback(self.callers_cache or make_prompt_cache(model))
        self.tokens = list(prompt)
        self.num_prompt = len(prompt)
        self.text = DraftText(shared, continues=_is_used(self.rollback.caches))
        self.fed: list[int] = []
        self.num_same = 0

    def propose(self, limit: int) -> Draft:
        """A draft of at most `limit` of the target's tokens."""
        room = self.rollback.widest_pass()
        if limit == 0 or (room is not None and room < MARGIN + limit):
            return Draft()
        pending = self.catch_up()
        return self.draft(pending, limit) if pending else Draft()

    @abstractmethod
    def draft(self, pending: list[int], limit: int) -> Draft:
        """A draft after the tokens that are still to be fed, at least one."""

    def observe(self, tokens: Sequence[int]) -> None:
        """Note what was emitted; it is read with the next proposal."""
        self.tokens += tokens

    def catch_up(self) -> list[int]:
        """Read the text but for its last tokens, which are returned.

        Caches that cannot be trimmed return to a checkpoint, so they get one where nothing
        changes any more, and read again what follows.
        """
        self.text.read(self.tokens[self.text.num_read :])
        ids = self.text.ids
        settled = max(0, min(self.text.settled, len(ids) - 1))
        position = self.go_back(ids)
        restores = any(strategy_for(c).must_restore for c in leaves(self.rollback.caches))
        if restores and position > settled:
            position = self.rollback.rewind_to(settled)
        del self.fed[position:]
        step = self.context.prefill_step_size
        while (left := settled - position) > (0 if restores else MARGIN):
            self.feed(ids[position : position + min(left, step)])
            mx.eval([cache.state for cache in self.rollback.caches])
            position = self.rollback.position
        self.rollback.checkpoint()
        self.num_same = min(position, settled)
        return ids[position:]

    def go_back(self, ids: Sequence[int]) -> int:
        """Go back to the longest common prefix of what was fed and the text; the position."""
        same = min(self.num_same, len(ids) - 1)
        longest = min(len(self.fed), len(ids) - 1)
        while same < longest and self.fed[same] == ids[same]:
            same += 1
        return self.rollback.rewind_to(min(self.rollback.position, max(0, same)))

    def feed(self, ids: list[int]) -> mx.array:
        """One pass of the draft model; logits [S, W]."""
        logits = self.rollback.forward(self.model, to_ids(ids))
        self.fed += ids
        return logits

    def close(self, length: int) -> None:
        """Bring the caller's caches to exactly the first `length` of the target's tokens."""
        if self.callers_cache is None:
            return
        del self.tokens[length:]
        self.text.cut(length)
        self.num_same = min(self.num_same, self.text.settled)
        if pending := self.catch_up():
            self.feed(pending)
        mx.async_eval([cache.state for cache in self.rollback.caches])


class TextDrafts(Retokenized):
    """Drafts the likeliest text, in the target's tokens; logits processors have no say in it."""

    def draft(self, pending: list[int], limit: int) -> Draft:
        """As many steps as `limit` tokens usually take; one synchronisation, to encode them."""
        per_token = len(self.text.ids) / len(self.tokens)
        num_steps = math.ceil(limit * per_token) + (per_token > SHORTER)
        drafted: list[mx.array] = []
        logits = self.feed(pending)[-1:]
        for step in range(num_steps):
            if step:
                logits = self.rollback.forward(self.model, drafted[-1])[-1:]
            drafted.append(mx.argmax(logits, axis=-1).astype(mx.uint32))
            mx.async_eval(drafted[-1])  # the device drafts while the rest of the graph is made
        ids = to_list(mx.concatenate(drafted))
        self.fed += ids[:-1]
        return Draft(list(takewhile(self.exists, self.in_targets_tokens(ids)[:limit])))

    def exists(self, token: int) -> bool:
        """True if the target has logits for a token of its tokenizer."""
        return self.context.vocab_size is None or token < self.context.vocab_size

    def in_targets_tokens(self, ids: Sequence[int]) -> list[int]:
        """What was drafted, up to what has no text; a last token that may go on is left out."""
        draft, target = self.shared.draft, self.shared.target
        words: list[bytes] = []
        for index in ids:
            if index not in draft.spelled:
                break
            words.append(draft.spelled[index])
        tokens = continuation(target, self.tokens, b"".join(words)) if words else []
        if len(words) < len(ids):
            end = self.shared.to_target.get(ids[len(words)])
            return tokens if end is None else [*tokens, end]
        last = target.spelled[tokens[-1]] if tokens else b""
        if len(tokens) > 1 and last != words[-1] and target.may_go_on(tokens[-1]):
            tokens.pop()
        return tokens


class SharedDrafts(Retokenized):
    """Draws from the common tokens, under the target's sampling."""

    def __init__(
        self,
        model: nn.Module,
        shared: SharedVocabulary,
        prompt: Sequence[int],
        context: DraftContext,
        sampling: Sampling,
    ) -> None:
        """sampling: how to draw, not greedy."""
        super().__init__(model, shared, prompt, context)
        assert context.vocab_size is not None
        self.sampling = sampling
        self.common = shared.ids(context.vocab_size, vocab_size_of(model)).on_device()
        self.drafted: mx.array | None = None

    def draft(self, pending: list[int], limit: int) -> Draft:
        """`limit` tokens, as one lazy graph: no synchronisation between them."""

        def next_logits(token: mx.array | None) -> mx.array:
            if token is None:
                logits = self.feed(pending)
            else:
                logits = self.rollback.forward(self.model, self.common.own(token))
            common: mx.array = self.common.logits(logits[-1:])
            return common

        draws = Draws(self.context, self.sampling, self.tokens, self.num_prompt, limit)
        draft = draft_to(limit, draws, next_logits)
        self.drafted = to_ids(draft.tokens)
        return draft

    def catch_up(self) -> list[int]:
        """Read the text; what was drafted is known by now, and is looked at only here."""
        if self.drafted is not None:
            self.fed += [self.shared.to_draft[token] for token in to_list(self.drafted)[:-1]]
            self.drafted = None
        return super().catch_up()


def session_for(
    model: nn.Module,
    shared: SharedVocabulary,
    prompt: Sequence[int],
    context: DraftContext,
    sampling: Sampling,
    drafts: str,
) -> Retokenized:
    """The session that drafts best for a target with another tokenizer.

    Args:
        model: the draft model.
        shared: both tokenizers.
        prompt: [n] of the target's tokens.
        context: of the generation.
        sampling: how drafts are drawn, greedy for point masses.
        drafts: "text" or "shared", or "any" for the latter where enough tokens are common.
    """
    enough = drafts == "shared" or (drafts == "any" and shared.coverage >= ENOUGH)
    if enough and not sampling.greedy and shared.to_draft:
        return SharedDrafts(model, shared, prompt, context, sampling)
    return TextDrafts(model, shared, prompt, context)


def _is_used(caches: Sequence[Any]) -> bool:
    """True if something was fed before."""
    return any(getattr(cache, "offset", 0) for cache in leaves(caches))
