"""Drafts that are drawn token by token from logits, under the target's sampling.

A *step* gives the next logits. Draft models and trained heads have different steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import mlx.core as mx

from specdec_mlx.arguments import argument_error
from specdec_mlx.contracts import Draft, DraftContext, Evidence, GoesOn, LogitsProcessor, Step
from specdec_mlx.sampling import MOST_NUMBERS, TEMPS, Sampling, is_temp
from specdec_mlx.token_ids import to_ids

NextLogits = Callable[[mx.array | None], mx.array]
"""A step: logits [1, V] after a token [1], or after the text for None."""

DRAWN_AT_ONCE = 4
"""Tokens whose noise is drawn together if the length of the draft is unknown."""

IMPOSSIBLE = -1e4
"""Logit of a token that a drafter cannot propose, as logits processors see it. float16 has it."""

GOES_ON = 0.75  # chance that a draft goes on after its first token, as in a draft of 4 tokens


class ChainDraws:
    """The drawn tokens of a chain, and the distributions that they were drawn from.

    Args:
        context: context of the generation.
        sampling: the way drafts are drawn. Greedy sampling makes a deterministic draft.
        text: prompt of `num_prompt` tokens and emitted tokens [n].
        num_prompt: tokens of the prompt.
        at_once: tokens whose noise is drawn together.

    Attributes:
        is_drawn: tokens are drawn at random.
        one_by_one: tokens must be drawn one by one, because there are logits processors.
    """

    def __init__(
        self,
        context: DraftContext,
        sampling: Sampling,
        text: Sequence[int],
        num_prompt: int,
        at_once: int = DRAWN_AT_ONCE,
    ) -> None:
        self.is_drawn = not sampling.greedy
        self.one_by_one = len(context.logits_processors) > 0
        self._context = context
        self._sampling = sampling
        self._seen = to_ids(text) if self.one_by_one else None
        self._start = len(text) - num_prompt
        # MOST_NUMBERS bounds the memory of the noise.
        self._at_once = max(1, min(at_once, MOST_NUMBERS // (context.vocab_size or 1)))
        self._noise: mx.array | None = None
        self._tokens: list[mx.array] = []
        self._rows: list[mx.array] = []
        self._num_drawn = 0

    def __len__(self) -> int:
        return self._num_drawn

    def draw(self, logits: mx.array) -> mx.array:
        """Draw n tokens from logits [n, V], and keep the distributions that they were drawn from.

        n is 1 if tokens must be drawn one by one.
        """
        num_rows = logits.shape[0]
        logits = match_vocab(logits, self._context.vocab_size)
        if self.one_by_one:
            logits = processed(logits, self._seen, self._context.logits_processors)
        rows = noisy = logits
        if self.is_drawn:
            rows = self._sampling.log_distribution(logits)
            # Gumbel-max: argmax(log q + noise) is a draw from q.
            noisy = rows + self._gumbels(num_rows)
        token = mx.argmax(noisy, axis=-1).astype(mx.uint32)
        self._rows.append(rows)
        self._tokens.append(token)
        self._num_drawn += num_rows
        if self._seen is not None:
            self._seen = mx.concatenate([self._seen, token])
        return token

    def log_confidences(self, *, latest: bool = False) -> mx.array:
        """Log of the largest probability at each token, or at the latest draw only."""
        rows = self._rows[-1] if latest else _first(self._rows, len(self))
        likeliest = mx.max(rows, axis=-1)
        # Rows of a greedy draft are logits, so they are normalised here.
        return likeliest if self.is_drawn else likeliest - mx.logsumexp(rows, axis=-1)

    def draft(self, length: int | None = None) -> Draft:
        length = len(self) if length is None else length
        if length == 0:
            return Draft()
        logprobs = _first(self._rows, length) if self.is_drawn else None
        return Draft(_first(self._tokens, length), logprobs)

    def _gumbels(self, num_tokens: int) -> mx.array:
        if num_tokens > 1:
            return self._context.draft_gumbels(self._start, num_tokens, len(self))
        place = len(self) % self._at_once
        if place == 0:
            self._noise = self._context.draft_gumbels(self._start, self._at_once, len(self))
        assert self._noise is not None
        return self._noise[place : place + 1]


def _first(parts: Sequence[mx.array], length: int) -> mx.array:
    """The first rows of some arrays, as one array. Each array has at least one row."""
    joined = mx.concatenate(list(parts[:length]))  # MLX does not copy a single array
    return joined if joined.shape[0] == length else joined[:length]


def draft_to(length: int, draws: ChainDraws, step: NextLogits) -> Draft:
    """Draw `length` tokens as one lazy graph, without synchronisation."""
    token = None
    for _ in range(length):
        token = draws.draw(step(token))
        mx.async_eval(token)  # the device drafts while the rest of the graph is made
    return draws.draft()


def draw_rows(draws: ChainDraws, logits: mx.array) -> ChainDraws:
    for rows in mx.split(logits, len(logits)) if draws.one_by_one else [logits]:
        draws.draw(rows)
    return draws


@dataclass
class Pace:
    """Times of a draft's steps in seconds.

    Attributes:
        build: host time to build a step.
        wait: time to wait for a step, or None before it was measured.
    """

    build: float = 0.0
    wait: float | None = None

    def overlaps(self, latest: float | None) -> bool:
        """True if the next step should be launched before the evidence of this step is read.

        `latest` is the largest probability at the position before, None for the first position.
        """
        if self.wait is None:
            return False
        chance = GOES_ON if latest is None else latest
        # Expected gain if the draft goes on, and loss of a whole step if it ends.
        return chance * min(self.build, self.wait) > (1 - chance) * (self.build + self.wait)


def _mix(average: float, sample: float) -> float:
    return 0.9 * average + 0.1 * sample if average else sample


Estimate = Callable[[], mx.array | None]
"""Log of the chances [n] that a source gives the tokens of its latest step, before they are drawn.

None if it makes no estimate. The largest probabilities take its place then.
"""


def no_estimate() -> None:
    return None


def draft_while(
    length: int,
    draws: ChainDraws,
    step: NextLogits,
    goes_on: GoesOn,
    pace: Pace,
    estimate: Estimate = no_estimate,
) -> Draft:
    return worth_it(draws, _confidences_of_steps(length, draws, step, pace, estimate), goes_on)


def truncate(draws: ChainDraws, goes_on: GoesOn, estimate: Estimate = no_estimate) -> Draft:
    """The part of a finished draft that is worth verifying, by confidences and not by draws."""
    logs: Any = ()
    if len(draws):
        estimates = estimate()
        logs = (draws.log_confidences() if estimates is None else estimates).tolist()
    return worth_it(draws, map(math.exp, logs), goes_on)


def _confidences_of_steps(
    length: int, draws: ChainDraws, step: NextLogits, pace: Pace, estimate: Estimate
) -> Iterator[float]:
    """Draw token after token on demand, and yield the confidence before each draw."""
    logs: list[mx.array] = []
    token, latest = None, None
    for place in range(length):
        # A step too many is dropped unread. Its token was not seen, so the law of the draft is
        # unchanged.
        ahead = 2 if pace.overlaps(latest) else 1
        while len(draws) < min(place + ahead, length):
            began = perf_counter()
            token = draws.draw(step(token))
            log = estimate()
            logs.append(draws.log_confidences(latest=True) if log is None else log)
            mx.async_eval(token, logs[-1])
            pace.build = _mix(pace.build, perf_counter() - began)
        began = perf_counter()
        latest = math.exp(logs[place].item())  # type: ignore[arg-type]
        # Only then was the wait for this step alone.
        if len(draws) == place + 1:
            pace.wait = _mix(pace.wait or 0.0, perf_counter() - began)
        yield latest


def worth_it(draws: ChainDraws, confidences: Iterable[float], goes_on: GoesOn) -> Draft:
    """The draft up to the token at which `goes_on` ends it, given the confidences so far."""
    evidence: list[Evidence] = []
    decision = Step.GO_ON
    for confidence in confidences:
        evidence.append(Evidence(confidence=confidence, is_drawn=draws.is_drawn))
        decision = goes_on(evidence)
        if decision is not Step.GO_ON:
            break
    # The decision sees confidences, never tokens, so no drawn token is dropped for its value.
    length = len(evidence) - (decision is Step.STOP_BEFORE)
    return replace(draws.draft(length), evidence=evidence[:length])


def match_vocab(logits: mx.array, vocab_size: int | None) -> mx.array:
    """Logits [S, V] of the target's ids. Ids that the draft model lacks get -inf."""
    width = logits.shape[-1]
    if vocab_size is None or width == vocab_size:
        return logits
    if width > vocab_size:
        return logits[:, :vocab_size]
    return mx.pad(logits, [(0, 0), (0, vocab_size - width)], constant_values=-mx.inf)


def spread(logits: mx.array, ids: mx.array, vocab_size: int) -> mx.array:
    """Logits [n, V] from the logits [n, k] of tokens [n, k]. All other tokens get -inf."""
    wide = mx.full((logits.shape[0], vocab_size), -mx.inf, logits.dtype)
    return mx.put_along_axis(wide, ids, logits, axis=-1)


def processed(
    logits: mx.array, text: mx.array | None, processors: Sequence[LogitsProcessor]
) -> mx.array:
    """Logits [1, V] after the processors, which read the tokens [n] of the text.

    If the processors leave only tokens that the drafter cannot propose, these are equally likely.
    """
    # With -inf there, such a row would have no token at all, and NaN as its distribution.
    logits = mx.maximum(logits, IMPOSSIBLE)
    for processor in processors:
        logits = processor(text, logits)
    is_possible = logits > IMPOSSIBLE / 2
    has_any = mx.any(is_possible, axis=-1, keepdims=True)
    return mx.where(is_possible | ~has_any, logits, -mx.inf)


def check_draft_temp(draft_temp: float | None) -> None:
    if draft_temp is not None and not is_temp(draft_temp):
        raise argument_error("draft_temp", draft_temp, f"{TEMPS}, or None")


def sampling_of_drafts(drafter: Any, target: Sampling | None) -> Sampling:
    """The way to draw drafts for a target's sampling. None stands for an opaque sampler."""
    draft_temp = drafter.draft_temp
    if drafter.greedy or target is None or target.greedy:
        return Sampling()
    return target if draft_temp is None else replace(target, temp=draft_temp)
