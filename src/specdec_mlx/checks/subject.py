"""The subject of a check: a target, a drafter, a sampling, a rule and prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from specdec_mlx.checks.stand_ins import Alone
from specdec_mlx.contracts import (
    AcceptanceRule,
    Draft,
    DraftContext,
    Drafter,
    DraftSession,
    shares_noise,
)
from specdec_mlx.engine.ranks import Ranks
from specdec_mlx.loop import Token, speculate
from specdec_mlx.sampling.distribution import Sampling
from specdec_mlx.sampling.noise import Noise
from specdec_mlx.token_ids import to_list
from specdec_mlx.verify.inputs import check_drafted

Item = TypeVar("Item")

Probs = NDArray[np.float64]  # probabilities [V] of the next token, float64


@dataclass(frozen=True, eq=False)
class Subject:
    """A target, a drafter or None, a sampling, a rule, and prompts.

    draft_length: of the loop. seed: of all draws.
    """

    model: nn.Module
    drafter: Drafter | None
    sampling: Sampling
    rule: AcceptanceRule
    prompts: Sequence[list[int]]
    vocab_size: int
    draft_length: int | str = 4
    seed: int = 0
    tokenizer: Any = None
    end_tokens: Collection[int] = ()

    @property
    def num_asked(self) -> int:
        """Tokens to ask a drafter for outside of the loop, where nothing is automatic."""
        return 4 if isinstance(self.draft_length, str) else self.draft_length

    def begin(self, prompt: Sequence[int], **options: Any) -> DraftSession:
        """A session outside of the loop; options: further ones of the context."""
        context = DraftContext(
            sampling=self.sampling,
            noise=Noise(self.seed),
            coupled=shares_noise(self.rule),
            vocab_size=self.vocab_size,
            tokenizer=self.tokenizer,
            **options,
        )
        assert self.drafter is not None
        return Alone(self.drafter, self.model).begin(prompt, context)

    def text(self, prompt: Sequence[int], num_tokens: int, **options: Any) -> list[Token]:
        """So many tokens by the loop, at temperature 0 if no sampler is given."""
        options |= {"rule": self.rule, "draft_length": self.draft_length, "seed": self.seed}
        options |= {"tokenizer": self.tokenizer, "max_tokens": num_tokens}
        return list(speculate(self.model, prompt, self.drafter, **options))


@dataclass
class Work:
    """The time that a part may take, until `time.perf_counter` says so, and its progress.

    say: takes the number of samples so far. ranks: the first one's clock counts on all.
    """

    until: float
    say: Callable[[int], None] = lambda num_samples: None
    ranks: Ranks | None = None

    def has_time(self, seconds: float = 0.0) -> bool:
        """True if there is so much time left."""
        has_time = time.perf_counter() + seconds < self.until
        if self.ranks is None:
            return has_time
        mx.synchronize()  # passes on other streams have collectives of their own
        return bool(self.ranks.gather([has_time])[0][0])

    def each(self, items: Iterable[Item]) -> Iterator[Item]:
        """The first of the items, and further ones while there is time."""
        for i, item in enumerate(items):
            if i > 0 and not self.has_time():
                return
            self.say(i)
            yield item

    def share(self, fraction: float, say: Callable[[int], None]) -> Work:
        """A part of the time that is left."""
        now = time.perf_counter()
        return replace(self, until=now + fraction * (self.until - now), say=say)


@dataclass(frozen=True, eq=False)
class Step:
    """A place in a text of the target's own, and the draft that was proposed there.

    tokens: [n] before it. target_probs: [V], from a single-token pass. draft_probs: [V] of the
    first drafted token, or None.
    """

    tokens: list[int]
    target_probs: Probs
    draft: Draft
    draft_probs: Probs | None


def walk(subject: Subject, prompt: list[int], num_tokens: int) -> Iterator[Step]:
    """Steps along a text that the target alone draws, the drafter following it."""
    tokens, session = list(prompt), subject.begin(prompt)
    plainly = replace(subject, drafter=None)
    for token in plainly.text(prompt, num_tokens, sampler=subject.sampling):
        draft = session.propose(1)
        target_probs = probabilities(subject.sampling.log_distribution(token.logprobs))
        yield Step(list(tokens), target_probs, draft, first_probs(draft, subject.vocab_size))
        if token.token in subject.end_tokens:
            return
        session.observe([token.token])
        tokens.append(token.token)


def first_probs(draft: Draft, vocab_size: int) -> Probs | None:
    """Distribution [V] of a draft's first token, or None; DraftError for a foreign token."""
    if not len(draft):
        return None
    if draft.logprobs is not None:
        return probabilities(draft.logprobs[0])
    tokens = to_list(draft.tokens)
    check_drafted(tokens, vocab_size)
    probs: Probs = np.eye(1, vocab_size, tokens[0])[0]
    return probs


def probabilities(logprobs: mx.array) -> Probs:
    """Log-probabilities [V] as probabilities that sum to 1 in float64."""
    probs = np.exp(np.array(logprobs.astype(mx.float32), np.float64))
    normalised: Probs = probs / probs.sum()
    return normalised


def total_variation(a: Probs, b: Probs) -> float:
    """Half the sum of all differences."""
    return float(np.abs(a - b).sum() / 2)
