"""A small model drafts for the large one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.drafters.fingerprint import fingerprint
from specdec_mlx.drafters.retokenized import Retokenized, session_for
from specdec_mlx.drafters.shared_vocabulary import SharedVocabulary, say_once, shared_between
from specdec_mlx.drafters.tokenizers import check_same_tokenizer
from specdec_mlx.per_model import PerModel
from specdec_mlx.sampling.distribution import Sampling
from specdec_mlx.target.rollback import Rollback
from specdec_mlx.token_ids import to_ids
from specdec_mlx.types import Draft, DraftContext

TOKENIZERS = ("any", "same", "text", "shared")
"""What may be said about the tokenizer of a draft model."""


@dataclass(frozen=True, eq=False)
class ModelDrafter:
    """Draft with any mlx-lm model.

    model: the draft model; may equal the target. tokenizer: its tokenizer, None for the target's;
    where both are known they are compared by content. tokenizers: what if they differ. "any" has
    drafts carried over as text or, where they are drawn and enough tokens are in both, drawn from
    those; "text" and "shared" have it always one way; "same" raises TokenizerMismatchError with the
    first difference, and so do all where a tokenizer does not give back what it encodes. greedy:
    propose the model's argmax, a point mass, whatever the target's sampling. draft_temp:
    temperature of the drafts, None for the target's own, 0 for greedy; what is emitted has the
    target's law all the same, since the drafts' own law is handed over.

    Draws come from the draft model's logits under the same law as the target's (processors,
    temperature, filters; Leviathan et al. 2023, section 2.2), and the law of each is handed over
    as it was drawn from. With greedy targets and opaque samplers the argmax is proposed.
    """

    model: nn.Module
    tokenizer: Any = None
    greedy: bool = False
    draft_temp: float | None = None
    tokenizers: str = "any"

    def __post_init__(self) -> None:
        """Refuse a temperature that is none, and what nobody knows about tokenizers."""
        if self.tokenizers not in TOKENIZERS:
            raise ValueError(f"tokenizers={self.tokenizers!r}: expected one of {TOKENIZERS}.")
        if self.draft_temp is not None and not self.draft_temp >= 0:
            raise ValueError(f"draft_temp={self.draft_temp!r}: expected a number >= 0, or None.")

    @property
    def key(self) -> str:
        """The model by its content, and how it drafts."""
        content = fingerprint(self.model)
        forced = f", tokenizers={self.tokenizers}" if self.tokenizers in TOKENIZERS[2:] else ""
        return (
            f"ModelDrafter({content}, greedy={self.greedy}, draft_temp={self.draft_temp}{forced})"
        )

    def sampling_for(self, target: Sampling | None) -> Sampling:
        """How to draw for a target: its filters, at the drafts' temperature."""
        if self.greedy or target is None or target.greedy:
            return Sampling()
        return target if self.draft_temp is None else replace(target, temp=self.draft_temp)

    def check(self, context: DraftContext) -> None:
        """Raise TokenizerMismatchError for a target with a tokenizer that is not taken."""
        shared = self.shared_with(context)
        if shared is not None:
            say_once(shared)

    def shared_with(self, context: DraftContext) -> SharedVocabulary | None:
        """What the model shares with a target of another tokenizer, None for the same one."""
        if self.tokenizer is None or context.tokenizer is None:
            return None
        if self.tokenizers == "same":
            check_same_tokenizer(context.tokenizer, self.tokenizer)
            return None
        return shared_between(context.tokenizer, self.tokenizer)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> ModelSession | Retokenized:
        """Start a generation; the draft model reads the prompt with its first proposal."""
        shared = self.shared_with(context)
        if shared is None:
            return ModelSession(self, prompt, context)
        sampling = self.sampling_for(context.sampling)
        return session_for(self.model, shared, prompt, context, sampling, self.tokenizers)


class ModelSession:
    """The draft model's side of one generation.

    Like the target's, its state is the tokens and its caches: what is not in the caches yet is fed
    with the next proposal. That is the last token, or two when all K drafts were accepted, since
    the last of them was proposed and never fed.
    """

    def __init__(self, drafter: ModelDrafter, prompt: Sequence[int], context: DraftContext) -> None:
        """Start with the prompt as the text and empty caches, or those of the caller."""
        self.model = drafter.model
        self.context = context
        self.callers_cache = context.draft_cache
        self.rollback = Rollback(self.callers_cache or make_prompt_cache(self.model))
        self.tokens = list(prompt)
        self.num_prompt = len(prompt)
        self.sampling = drafter.sampling_for(context.sampling)

    def propose(self, limit: int) -> Draft:
        """`limit` tokens, as one lazy graph: no synchronisation between them."""
        if limit == 0:
            return Draft()
        self.catch_up()
        room = self.rollback.widest_pass()
        self.rollback.checkpoint()
        ids = to_ids(self.tokens[self.rollback.position :])
        seen = to_ids(self.tokens) if self.context.logits_processors else None
        tokens: list[mx.array] = []
        laws: list[mx.array] = []
        length = limit if room is None else min(limit, 1 + room)
        noise = self.noise(length)
        for i in range(length):
            logits = self.feed(ids)[-1:]
            for processor in self.context.logits_processors:
                logits = processor(seen, logits)
            ids = self.draw(logits, laws, None if noise is None else noise[i : i + 1])
            mx.async_eval(ids)  # the device drafts while the rest of the graph is made
            tokens.append(ids)
            seen = None if seen is None else mx.concatenate([seen, ids])
        return Draft(mx.concatenate(tokens), mx.concatenate(laws) if laws else None)

    def noise(self, length: int) -> mx.array | None:
        """Gumbel noise [length, V] of a whole draft; None where nothing is drawn."""
        if self.sampling.greedy:
            return None
        return self.context.draft_gumbels(len(self.tokens) - self.num_prompt, length)

    def draw(self, logits: mx.array, laws: list[mx.array], noise: mx.array | None) -> mx.array:
        """A token [1], from logits [1, V] and Gumbel noise [1, V]; its law is added to `laws`."""
        if noise is None:
            return mx.argmax(logits, axis=-1).astype(mx.uint32)
        law = self.sampling.log_distribution(logits)
        laws.append(law)
        return mx.argmax(law + noise, axis=-1).astype(mx.uint32)

    def observe(self, tokens: Sequence[int]) -> None:
        """Keep the accepted part of the last proposal in the caches, and note what was emitted."""
        self.rollback.rewind_to(min(self.rollback.position, len(self.tokens) + len(tokens) - 1))
        self.tokens += tokens

    def catch_up(self) -> None:
        """Feed the text, in chunks, but for the last one or two tokens, which `propose` feeds.

        Caches that cannot be trimmed return to its checkpoint and read again what follows.
        """
        step = self.context.prefill_step_size
        while (left := len(self.tokens) - self.rollback.position) > 2:
            self.feed_text(min(left - 1, step))
            if left - 1 > step:
                mx.eval([cache.state for cache in self.rollback.caches])

    def feed_text(self, size: int) -> None:
        """Feed the next `size` tokens of the text, for the caches alone."""
        start = self.rollback.position
        self.feed(to_ids(self.tokens[start : start + size]))

    def feed(self, ids: mx.array) -> mx.array:
        """One pass of the draft model; logits [S, V], as wide as the target's.

        A token that only the target has is read as another one: reading past the end of the draft
        model's embeddings is a crash, and a draft may be as wrong as it likes.
        """
        width = logit_width(self.model)
        if self.context.vocab_size is None or width < self.context.vocab_size:
            ids = mx.minimum(ids, width - 1)
        logits = self.rollback.forward(self.model, ids)
        return fit_width(logits, self.context.vocab_size)

    def close(self, length: int) -> None:
        """Bring the caller's caches to exactly the first `length` tokens."""
        self.rollback.rewind_to(min(self.rollback.position, length))
        if self.callers_cache is not None:
            while (left := length - self.rollback.position) > 0:
                self.feed_text(min(left, self.context.prefill_step_size))
            mx.async_eval([cache.state for cache in self.rollback.caches])


logit_width = PerModel(
    lambda model: int(model(mx.array([[0]]), cache=make_prompt_cache(model)).shape[-1])
)
"""V of a model, from the shape of logits that are never computed."""


def fit_width(logits: mx.array, vocab_size: int | None) -> mx.array:
    """Logits [S, V] of a draft model whose vocabulary is padded otherwise than the target's.

    Ids that the target does not have are cut off; ids that only the target has get -inf.
    """
    width = logits.shape[-1]
    if vocab_size is None or width == vocab_size:
        return logits
    if width > vocab_size:
        return logits[:, :vocab_size]
    return mx.pad(logits, [(0, 0), (0, vocab_size - width)], constant_values=-mx.inf)
