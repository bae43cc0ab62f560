"""The target's side of a round: one pass over the pending tokens and the draft, and its verdict.

With callables that are known to be pure (ours and mlx-lm's own) the pass, the law, the verdict and
the next token are one lazy graph, read by one host synchronisation. A sampler or logits processor
of the caller's may remember what it saw, so it is called row by row, as plain decoding would, and
no further than the first rejected token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.errors import DraftError, LogitsError
from specdec_mlx.rules.acceptance import (
    COUPLED,
    RULES,
    Lenient,
    decide,
    leading_run,
    make_rule,
    match,
    point_mass,
)
from specdec_mlx.sampling.distribution import Sampler, Sampling
from specdec_mlx.sampling.mlx_lm_samplers import law_of, max_window
from specdec_mlx.sampling.noise import Noise
from specdec_mlx.stats.counterfactual import Counterfactual, chances
from specdec_mlx.target.exactness import is_exact
from specdec_mlx.target.rollback import Rollback
from specdec_mlx.token_ids import read_all, to_ids, to_list
from specdec_mlx.types import AcceptanceRule, Draft, DraftContext, LogitsProcessor

LAW_TOLERANCE = 1e-3
"""How far a draft's law may be from summing to 1, in float32."""

WINDOW_MARGIN = 32
"""Positions before a window is full at which to ask whether passes across its end are exact."""


class Block(Protocol):
    """A pass under way. `read` waits for it and tells what was accepted.

    draft: what was verified. logprobs: [K+1, V] the target's log-probabilities, processed, before
    temperature and filters, as mlx-lm reports them.
    """

    draft: Draft
    num_fed: int
    logprobs: mx.array

    @property
    def next_token(self) -> mx.array:
        """Token after an empty draft, uint32 [1], not computed yet."""
        ...

    def read(self) -> tuple[list[int], int]:
        """Tokens [n + 1] of this round, and n. The only host synchronisation of a round."""
        ...


@dataclass
class LazyBlock:
    """A round as one graph; `results` is what `read` waits for, a few small arrays.

    Under match that is the target's own token at every position, and the comparison is made on the
    host: the fewer small operations wait behind a pass, the better. Else it is the rule's verdict.
    """

    draft: Draft
    num_fed: int
    logprobs: mx.array
    results: dict[str, mx.array]
    counterfactual: Counterfactual | None = None

    @property
    def next_token(self) -> mx.array:
        """Token after an empty draft, not computed yet."""
        return self.results["target_tokens"].astype(mx.uint32)

    def read(self) -> tuple[list[int], int]:
        """Tokens [n + 1] of this round, and n."""
        numbers = dict(zip(self.results, read_all(*self.results.values()), strict=True))
        drafted = numbers.get("drafted", self.draft.tokens)
        if "target_tokens" in numbers:
            num_accepted, next_token = match(numbers["target_tokens"], drafted)
        else:
            num_accepted, next_token = numbers["verdict"]
        _check_logits(numbers["scales"][: num_accepted + 1])
        if "masses" in numbers:
            _check_law(numbers["masses"], numbers["own"])
        if self.counterfactual is not None and len(self.draft):
            self.counterfactual.record(np.array(numbers["chances"]), num_accepted)
        return [*drafted[:num_accepted], next_token], num_accepted


@dataclass
class SteppedBlock:
    """A round whose rows go through callables of the caller's one at a time.

    choose: row index and the draft tokens before it -> the target's token [1], whether its logits
    are not finite [1], its log-probabilities [1, V]; called once a row, in order.
    """

    draft: Draft
    num_fed: int
    logprobs: mx.array
    choose: Callable[[int, list[int]], tuple[mx.array, mx.array, mx.array]]

    @cached_property
    def _first_row(self) -> tuple[mx.array, mx.array, mx.array]:
        return self.choose(0, [])

    @property
    def next_token(self) -> mx.array:
        """Token after an empty draft, not computed yet."""
        return self._first_row[0].astype(mx.uint32)

    def read(self) -> tuple[list[int], int]:
        """Tokens [n + 1] of this round, and n."""
        drafted = to_list(self.draft.tokens)
        tokens: list[int] = []
        rows: list[mx.array] = []
        while not tokens or tokens == drafted[: len(tokens)]:
            row = len(tokens)
            chosen = self._first_row if row == 0 else self.choose(row, drafted[:row])
            token, bad, logprobs = chosen
            token_id, is_bad = to_list(mx.concatenate([token, bad]))
            if is_bad:
                raise _logits_error(row)
            tokens.append(token_id)
            rows.append(logprobs)
            if row == len(drafted):
                break
        self.logprobs = mx.concatenate(rows)
        return tokens, len(tokens) - 1


class Verifier:
    """The target model, its caches, and the way its tokens are drawn.

    model: a mlx-lm model. tape: its caches. sampler: a `Sampling`, or any mlx-lm sampler; the law
    of those that `make_sampler` made is read back from them.
    processors: mlx-lm logits processors. rule: what `make_rule` takes.
    kv_bits, kv_group_size, quantized_kv_start: as in mlx-lm's `generate_step`. probe: whether to
    measure, once, if the model is exact for several positions at once. counterfactual: an account
    to keep of what each rule would have accepted.
    """

    def __init__(
        self,
        model: nn.Module,
        tape: Rollback,
        *,
        sampler: Sampler | Sampling,
        processors: Sequence[LogitsProcessor],
        rule: str | AcceptanceRule,
        noise: Noise,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
        quantized_kv_start: int = 0,
        probe: bool = True,
        counterfactual: Counterfactual | None = None,
    ) -> None:
        """Check that rule and sampler go together."""
        self.model = model
        self.tape = tape
        self.sampler = law_of(sampler) or sampler
        self.processors = list(processors)
        self.rule = make_rule(rule)
        self.noise = noise
        self.kv_bits = kv_bits
        self.kv_group_size = kv_group_size
        self.quantized_kv_start = quantized_kv_start
        self.probe = probe
        self.counterfactual = counterfactual
        self.history: mx.array | None = None
        self.window = max_window(self.processors)
        self.vocab_size: int | None = None
        self.stepped = not all(is_pure(f) for f in (self.sampler, *self.processors))
        no_law = self.stepped or not isinstance(self.sampler, Sampling)
        if no_law and (not isinstance(self.rule, str) or self.rule == COUPLED):
            raise ValueError(
                f"rule={rule!r} needs the target's law, and a sampler or processor of your own "
                "gives none. Use rule='auto', and specdec_mlx.Sampling(...) as the sampler."
            )
        if no_law and counterfactual is not None:
            raise ValueError(
                "counterfactual=True needs the target's law, and a sampler or processor of your "
                "own gives none. Use specdec_mlx.Sampling(...) as the sampler."
            )

    @property
    def sampling(self) -> Sampling | None:
        """The law of the next token, None if only a sampler is known."""
        return self.sampler if isinstance(self.sampler, Sampling) else None

    def draft_context(
        self, tokenizer: Any, draft_cache: list[Any] | None, prefill_step_size: int
    ) -> DraftContext:
        """What a drafter may know of this target; V is filled in once it is known."""
        return DraftContext(
            sampling=self.sampling,
            noise=self.noise,
            coupled=self.rule == COUPLED,
            logits_processors=[f for f in self.processors if is_pure(f)],
            tokenizer=tokenizer,
            draft_cache=draft_cache,
            prefill_step_size=prefill_step_size,
        )

    def widest_pass(self) -> int | None:
        """Most positions that the next pass may have; None for any number.

        Single tokens where the model was measured not to be exact otherwise. Plain decoding
        quantizes the caches right after position `quantized_kv_start`, so no pass may reach across
        it.
        """
        limits = [self.tape.widest_pass(), self._widest_exact_pass()]
        if self.kv_bits is not None:
            limits += [
                self.quantized_kv_start - cache.offset
                for cache in self.tape.caches
                if hasattr(cache, "to_quantized") and cache.offset < self.quantized_kv_start
            ]
        return min((limit for limit in limits if limit is not None), default=None)

    def _widest_exact_pass(self) -> int | None:
        if not self.probe:
            return None
        if not is_exact(self.model, past_window=False):
            return 1
        room = self.tape.room_in_window()
        if room is None or room > WINDOW_MARGIN or is_exact(self.model, past_window=True):
            return None
        return max(1, room)

    def feed(self, tokens: mx.array, embeddings: mx.array | None = None) -> mx.array:
        """One pass over tokens [S], or their embeddings [S, D]; logits [S, V], lazy."""
        self.quantize()
        inputs = {} if embeddings is None else {"input_embeddings": embeddings[None]}
        logits: mx.array = self.model(tokens[None], cache=self.tape.caches, **inputs)[0]
        self.tape.fed(logits.shape[0])
        self.vocab_size = logits.shape[-1]
        return logits

    def find_vocab_size(self) -> int:
        """V, from the shape of the logits of a pass; of one that is never computed if need be."""
        if self.vocab_size is None:
            logits = self.model(mx.array([[0]]), cache=make_prompt_cache(self.model))
            self.vocab_size = logits.shape[-1]
        return self.vocab_size

    def quantize(self) -> None:
        """Replace caches, in the tape's list, by quantized ones once they are long enough.

        mlx-lm does so after each pass; here it waits until rejected tokens have been taken back.
        """
        if self.tape.position > 0:
            maybe_quantize_kv_cache(
                self.tape.caches, self.quantized_kv_start, self.kv_group_size, self.kv_bits
            )

    def observe(self, tokens: Sequence[int] | mx.array) -> None:
        """Add emitted tokens to what the processors see, which need not be the whole text."""
        if self.processors and len(tokens):
            new = to_ids(tokens)
            seen = new if self.history is None else mx.concatenate([self.history, new])
            self.history = seen if self.window is None else seen[-self.window :]

    def launch(
        self,
        pending: Sequence[int] | mx.array,
        draft: Draft,
        position: int,
        embeddings: mx.array | None = None,
    ) -> Block:
        """Start a round: feed the pending tokens and the draft, and let the device run.

        pending: tokens emitted but not yet in the caches, at least one. position: index of the
        round's first token among those generated. embeddings: of the pending tokens, if the
        caller gave any. Raises DraftError, before anything is fed, for tokens that the target
        does not have and for a law of another shape than [K, V].
        """
        self._check_draft(draft)
        pending = to_ids(pending)
        while pending.shape[0] > 1:
            room = self.widest_pass()
            if room is None or pending.shape[0] <= room:
                break
            self.feed(pending[:room])
            pending = pending[room:]
        if len(draft):
            self.tape.mark()
        fed = mx.concatenate([pending, to_ids(draft.tokens)]) if len(draft) else pending
        logits = self.feed(fed, embeddings)
        if logits.shape[0] > len(draft) + 1:
            logits = logits[-len(draft) - 1 :]
        if self.stepped:
            mx.async_eval(logits)
            return SteppedBlock(draft, fed.shape[0], logits, self._chooser(logits, position))
        block = self._decide(logits, draft, position, fed.shape[0])
        mx.async_eval(block.results, block.logprobs)
        return block

    def _check_draft(self, draft: Draft) -> None:
        """Refuse what can be seen to be wrong before anything is computed."""
        if not len(draft):
            return
        vocab_size = self.find_vocab_size()
        for token in () if isinstance(draft.tokens, mx.array) else draft.tokens:
            if not 0 <= token < vocab_size:
                raise DraftError(
                    f"The drafter proposed token {token}; the target has 0 to {vocab_size - 1}. "
                    "Use a drafter for the same tokenizer."
                )
        if draft.logprobs is not None and draft.logprobs.shape != (len(draft), vocab_size):
            raise DraftError(
                f"The drafter's law has shape {draft.logprobs.shape}; expected [K, V] = "
                f"{(len(draft), vocab_size)}. Hand over one row a draft token."
            )

    def _decide(self, logits: mx.array, draft: Draft, position: int, num_fed: int) -> LazyBlock:
        """Law, verdict and what is to be checked of a round, as one graph."""
        drafted = to_ids(draft.tokens)
        logits = self._process(logits, drafted)
        scales = mx.logsumexp(logits, axis=-1, keepdims=True)
        logprobs = logits - scales
        probs = None if draft.logprobs is None or not len(draft) else mx.exp(draft.logprobs)
        results = {"scales": scales, **self._outcome(logprobs, drafted, probs, position)}
        if isinstance(draft.tokens, mx.array):
            results["drafted"] = drafted
        if draft.logprobs is not None and probs is not None:
            results["masses"] = mx.sum(probs, axis=-1)
            results["own"] = mx.take_along_axis(draft.logprobs, drafted[:, None], axis=-1)
        if self.counterfactual is not None and len(draft) and self.sampling is not None:
            like = logprobs.astype(mx.float32)
            known = point_mass(drafted, like) if probs is None else probs
            results["chances"] = chances(mx.exp(self.sampling.law(logprobs)), drafted, known)
        return LazyBlock(draft, num_fed, logprobs, results, self.counterfactual)

    def _process(self, logits: mx.array, drafted: mx.array) -> mx.array:
        """Run pure processors over every row, each with the history that it would have."""
        if not self.processors:
            return logits
        assert self.history is not None
        seen = mx.concatenate([self.history, drafted])
        start = self.history.shape[0]
        rows = []
        for i in range(logits.shape[0]):
            row = logits[i : i + 1]
            for processor in self.processors:
                row = processor(seen[: start + i], row)
            rows.append(row)
        return mx.concatenate(rows)

    def _outcome(
        self, logprobs: mx.array, drafted: mx.array, draft_probs: mx.array | None, position: int
    ) -> dict[str, mx.array]:
        """What decides: the rule's verdict, or under match the target's own tokens [K+1].

        draft_probs: [K, V] the law of the draft, None for a point mass.
        """
        sampling = self.sampling
        drawn = draft_probs is not None
        rule = RULES["block"] if self.rule == "auto" and drawn else self.rule
        if isinstance(rule, str) or sampling is None or sampling.greedy or not drafted.size:
            own = self._draw(logprobs, position)
            if not (isinstance(rule, Lenient) and drafted.size):
                return {"target_tokens": own}
            kept = leading_run(rule.nearly_matches(logprobs, drafted))
            return {"verdict": mx.stack([kept, own[kept].astype(mx.int32)])}
        verdict = decide(
            rule,
            mx.exp(sampling.law(logprobs)),
            drafted,
            draft_probs,
            self.noise.uniform("accept", position, drafted.size),
            self.noise.gumbel("next", position, logprobs.shape[-1]),
        )
        return {"verdict": mx.stack([verdict.num_accepted, verdict.next_token])}

    def _draw(self, logprobs: mx.array, position: int) -> mx.array:
        """The target's own token at each row [K+1]."""
        if self.sampling is None:
            return mx.concatenate([self.sampler(row[None]) for row in logprobs])
        if self.sampling.greedy:
            return self.sampling.draw(logprobs, None)
        places = [("target", position + row) for row in range(logprobs.shape[0])]
        return self.sampling.draw(logprobs, self.noise.gumbels(places, logprobs.shape[-1]))

    def _chooser(
        self, logits: mx.array, position: int
    ) -> Callable[[int, list[int]], tuple[mx.array, mx.array, mx.array]]:
        """What `SteppedBlock` calls for each row of logits [K+1, V]."""
        history = self.history

        def choose(row: int, drafted: list[int]) -> tuple[mx.array, mx.array, mx.array]:
            row_logits = logits[row : row + 1]
            if history is not None:
                seen = mx.concatenate([history, to_ids(drafted)]) if drafted else history
                for processor in self.processors:
                    row_logits = processor(seen, row_logits)
            scale = mx.logsumexp(row_logits, axis=-1, keepdims=True)
            logprobs = row_logits - scale
            token = self._draw(logprobs, position + row).astype(mx.int32)
            return token, ~mx.isfinite(scale[0]).astype(mx.bool_), logprobs

        return choose


def is_pure(f: Any) -> bool:
    """Whether calling `f` on a row that is thrown away afterwards does no harm.

    True for `Sampling`, for what mlx-lm's `make_sampler` and `make_logits_processors` return, and
    for callables that say so themselves with a true attribute `pure`.
    """
    known = getattr(f, "__module__", None) == "mlx_lm.sample_utils"
    return isinstance(f, Sampling) or known or bool(getattr(f, "pure", False))


def _logits_error(row: int) -> LogitsError:
    return LogitsError(
        f"The target's logits are not finite at token {row} of this round. Check the weights, the "
        "dtype and the logits processors."
    )


def _check_logits(scales: Sequence[Sequence[float]]) -> None:
    """Raise LogitsError for the first row whose log-sum-exp is not finite."""
    for row, (scale,) in enumerate(scales):
        if not math.isfinite(scale):
            raise _logits_error(row)


def _check_law(masses: Sequence[float], own: Sequence[Sequence[float]]) -> None:
    """Raise DraftError for a row of draft_probs that does not sum to 1 or excludes its token."""
    for i, (mass, (logprob,)) in enumerate(zip(masses, own, strict=True)):
        if not (abs(mass - 1) < LAW_TOLERANCE and logprob > -math.inf):
            raise DraftError(
                f"The law of draft token {i} is none: it must sum to 1 and give mass to the token "
                "drawn. Hand over the log-probabilities that it was drawn from."
            )
