"""The target's next token: processors, a distribution or a sampler, and noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx

from specdec_mlx.contracts import LogitsProcessor
from specdec_mlx.contracts.trees import depths_of, path_to
from specdec_mlx.options import shown
from specdec_mlx.sampling.distribution import Sampler, Sampling
from specdec_mlx.sampling.mlx_lm_samplers import max_window, read_sampler
from specdec_mlx.sampling.noise import GumbelRows, Noise
from specdec_mlx.token_ids import to_ids
from specdec_mlx.verify.inputs import check_sampler, processors_of


class NextToken:
    """Turns the target's logits into a distribution, and draws tokens.

    sampling: also read back from mlx-lm's `make_sampler`; None if only a sampler is known. by_row:
    rows are drawn one by one, since a sampler or processor of the caller's may remember; remembers:
    a processor may. has_failed: the logits after the text were seen to be not finite.
    """

    def __init__(
        self,
        sampler: Sampler | Sampling,
        processors: Sequence[LogitsProcessor],
        noise: Noise,
    ) -> None:
        check_sampler(sampler)
        self.sampler = read_sampler(sampler) or sampler
        self.sampling = self.sampler if isinstance(self.sampler, Sampling) else None
        self.processors = processors_of(processors)
        self.noise = noise
        self._gumbels = GumbelRows(noise, "target")
        self.history: mx.array | None = None
        self.remembers = not all(map(is_pure, self.processors))
        self.by_row = self.remembers or not is_pure(self.sampler)
        self.has_failed = False
        self._window = max_window(self.processors)

    def extend_history(self, tokens: Sequence[int] | mx.array) -> None:
        """Add emitted tokens to the processors' history, which need not be the whole text."""
        if self.processors and len(tokens):
            new = to_ids(tokens)
            seen = new if self.history is None else mx.concatenate([self.history, new])
            self.history = seen if self._window is None else seen[-self._window :]

    def process(
        self, logits: mx.array, drafted: mx.array, parents: Sequence[int] | None = None
    ) -> mx.array:
        """Run pure processors over rows [K+1, V], each with the history that it would have."""
        if not self.processors:
            return logits
        rows = []
        for i in range(logits.shape[0]):
            before = (
                drafted[:i]
                if parents is None
                else drafted[_index(path_to(i - 1, parents))]
            )
            rows.append(self.process_row(logits[i : i + 1], before))
        return mx.concatenate(rows)

    def process_row(
        self, logits: mx.array, drafted: Sequence[int] | mx.array
    ) -> mx.array:
        """Run the processors over one row [1, V], after tokens of a draft."""
        if self.history is None:
            return logits
        seen = (
            mx.concatenate([self.history, to_ids(drafted)])
            if len(drafted)
            else self.history
        )
        for processor in self.processors:
            logits = _returned(
                "processor", processor(seen, logits), logits.shape, mx.floating
            )
        return logits

    def draw(
        self, logprobs: mx.array, position: int, parents: Sequence[int] | None = None
    ) -> mx.array:
        """The target's own token [K+1] at each row [K+1, V]; rows of one depth share noise."""
        if self.sampling is None:
            ids = [self.sampler(row[None]) for row in logprobs]  # any ints
            ids = [
                _returned("sampler", token, (1,), mx.integer).astype(mx.int64)
                for token in ids
            ]
            return mx.concatenate(ids)
        if self.sampling.greedy:
            return self.sampling.draw(logprobs, None)
        if parents is None:
            return self.sampling.draw(
                logprobs, self._gumbels.at(position, *logprobs.shape)
            )
        depths = [0, *(depth + 1 for depth in depths_of(parents))]
        noise = self._gumbels.at(position, max(depths) + 1, logprobs.shape[-1])
        return self.sampling.draw(logprobs, noise[_index(depths)])


def _index(rows: Sequence[int]) -> mx.array:
    return mx.array(list(rows), mx.int32)


def clip_ids(ids: mx.array, vocab_size: int) -> mx.array:
    """Token ids [n] as they can be fed: those out of the vocabulary are clipped."""
    return mx.clip(ids, 0, vocab_size - 1).astype(mx.uint32)


def _returned(
    by: str, found: Any, shape: tuple[int, ...], kind: mx.DtypeCategory
) -> mx.array:
    """The array that a callable of the caller's returned; ValueError for another value."""
    if isinstance(found, mx.array):
        if found.shape == shape and mx.issubdtype(found.dtype, kind):
            return found
        found = (found.shape, found.dtype)
    expected = f"an mx.array of shape {shape} and type {kind.name}"
    raise ValueError(f"The {by} returned {shown(found)}; expected {expected}.")


class RoundPositions:
    """A round's K+1 positions, from processed logits; see `contracts.TargetRows`."""

    def __init__(
        self,
        logits: mx.array,
        next_token: NextToken,
        position: int,
        parents: Sequence[int] | None = None,
    ) -> None:
        self.scales = mx.logsumexp(logits, axis=-1, keepdims=True)
        self.logprobs = logits - self.scales
        self._logits = logits
        self._next_token = next_token
        self._position = position
        self._parents = parents
        self.has_distribution = next_token.sampling is not None

    @property
    def greedy(self) -> bool:
        """True if all mass lies on the argmax."""
        sampling = self._next_token.sampling
        return sampling is not None and sampling.greedy

    def each(self) -> list[mx.array]:
        """`logprobs` once more, each row [1, V] in memory of its own: a slice would keep all."""
        count = self.logprobs.shape[0]
        return list(
            map(
                mx.subtract, mx.split(self._logits, count), mx.split(self.scales, count)
            )
        )

    @cached_property
    def probs(self) -> mx.array:
        """The distribution that the next token is drawn from, float32; [K+1, V]."""
        sampling = self._next_token.sampling
        assert sampling is not None, "a rule that reads probs has needs_distribution"
        return sampling.distribution(self.logprobs)

    @cached_property
    def tokens(self) -> mx.array:
        """The target's own draw at each row; [K+1]."""
        return self._next_token.draw(self.logprobs, self._position, self._parents)


@dataclass(frozen=True)
class RoundNoise:
    """Randomness of one round's rule, keyed by the position of its first token."""

    noise: Noise
    position: int

    def uniform(self, n: int) -> mx.array:
        """Numbers in [0, 1), one for each draft token's coin; [n]."""
        return self.noise.uniform("accept", self.position, n)

    def gumbel(self, vocab: int) -> mx.array:
        """Standard Gumbel noise for the token after the kept ones; [V]."""
        return self.noise.gumbel("next", self.position, vocab)


def is_pure(f: Any) -> bool:
    """True if calling `f` on a row that is thrown away afterwards does no harm.

    So for `Sampling`, mlx-lm's own samplers and processors, and callables with a true `pure`.
    """
    known = getattr(f, "__module__", None) == "mlx_lm.sample_utils"
    return isinstance(f, Sampling) or known or bool(getattr(f, "pure", False))
