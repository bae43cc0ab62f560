"""How the target's next token comes about: processors, a distribution or a sampler, and noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from specdec_mlx.options import shown
from specdec_mlx.sampling.distribution import Sampler, Sampling
from specdec_mlx.sampling.mlx_lm_samplers import max_window, read_sampler
from specdec_mlx.sampling.noise import GumbelRows, Noise
from specdec_mlx.target.inputs import check_sampler, processors_of
from specdec_mlx.token_ids import to_ids
from specdec_mlx.types import LogitsProcessor
from specdec_mlx.types.trees import depths_of, path_to


class NextToken:
    """Turns the target's logits into what tokens are drawn from, and draws them.

    Args:
        sampler: a `Sampling`, or any mlx-lm sampler; what those of `make_sampler` draw from is read
            back from them.
        processors: mlx-lm logits processors.
        noise: of this generation.

    sampling: the distribution of the next token; None if only a sampler is known. by_row: whether
        rows have to be drawn one by one, as plain decoding would, since a sampler or processor of
        the caller's may remember what it saw.
    """

    def __init__(
        self, sampler: Sampler | Sampling, processors: Sequence[LogitsProcessor], noise: Noise
    ) -> None:
        """No token was seen yet."""
        check_sampler(sampler)
        self.sampler = read_sampler(sampler) or sampler
        self.sampling = self.sampler if isinstance(self.sampler, Sampling) else None
        self.processors = processors_of(processors)
        self.noise = noise
        self._gumbels = GumbelRows(noise, "target")
        self.history: mx.array | None = None
        self.by_row = not all(is_pure(f) for f in (self.sampler, *self.processors))
        self._window = max_window(self.processors)

    def extend_history(self, tokens: Sequence[int] | mx.array) -> None:
        """Add emitted tokens to what the processors see, which need not be the whole text."""
        if self.processors and len(tokens):
            new = to_ids(tokens)
            seen = new if self.history is None else mx.concatenate([self.history, new])
            self.history = seen if self._window is None else seen[-self._window :]

    def process(
        self, logits: mx.array, drafted: mx.array, parents: Sequence[int] | None = None
    ) -> mx.array:
        """Run pure processors over every row, each with the history that it would have.

        Args:
            logits: [K+1, V].
            drafted: [K].
            parents: [K] where the draft is a tree.
        """
        if not self.processors:
            return logits
        assert self.history is not None
        befores = [
            drafted[:row]
            if parents is None
            else drafted[mx.array(path_to(row - 1, parents), mx.int32)]
            for row in range(logits.shape[0])
        ]
        return mx.concatenate(
            [
                self._process_row(logits[row : row + 1], mx.concatenate([self.history, before]))
                for row, before in enumerate(befores)
            ]
        )

    def process_row(self, logits: mx.array, drafted: list[int]) -> mx.array:
        """Run the processors over one row [1, V], after tokens of a draft."""
        if self.history is None:
            return logits
        seen = mx.concatenate([self.history, to_ids(drafted)]) if drafted else self.history
        return self._process_row(logits, seen)

    def _process_row(self, logits: mx.array, seen: mx.array) -> mx.array:
        for processor in self.processors:
            logits = _returned("processor", processor(seen, logits), logits.shape, mx.floating)
        return logits

    def draw(
        self, logprobs: mx.array, position: int, parents: Sequence[int] | None = None
    ) -> mx.array:
        """The target's own token at each row; [K+1].

        Args:
            logprobs: [K+1, V].
            position: of row 0 among the tokens generated.
            parents: [K] where the draft is a tree; rows of one depth are drawn with one noise.
        """
        if self.sampling is None:
            return mx.concatenate([self._sample(row[None]) for row in logprobs])
        if self.sampling.greedy:
            return self.sampling.draw(logprobs, None)
        if parents is None:
            return self.sampling.draw(logprobs, self._gumbels.at(position, *logprobs.shape))
        depths = [0, *(depth + 1 for depth in depths_of(parents))]
        noise = self._gumbels.at(position, max(depths) + 1, logprobs.shape[-1])
        return self.sampling.draw(logprobs, noise[mx.array(depths)])

    def _sample(self, logprobs: mx.array) -> mx.array:
        """The id [1], any int, that a sampler of the caller's draws from a row [1, V]."""
        return _returned("sampler", self.sampler(logprobs), (1,), mx.integer).astype(mx.int64)


def existing(ids: mx.array, vocab_size: int) -> mx.array:
    """Token ids [n] as they can be fed; those that the target does not have as others."""
    return mx.clip(ids, 0, vocab_size - 1).astype(mx.uint32)


def _returned(by: str, found: Any, shape: tuple[int, ...], kind: mx.DtypeCategory) -> mx.array:
    """What a callable of the caller's returned; ValueError unless it is an array as expected."""
    if isinstance(found, mx.array):
        if found.shape == shape and mx.issubdtype(found.dtype, kind):
            return found
        found = (found.shape, found.dtype)
    expected = f"an mx.array of shape {shape} and type {kind.name}"
    raise ValueError(f"The {by} returned {shown(found)}; expected {expected}.")


class Rows:
    """The target at the K+1 positions of a round; see `types.TargetRows`. All of it lazy.

    logits: [K+1, V] after the processors. position: of row 0 among the tokens generated. parents:
    [K] where the draft is a tree.
    """

    def __init__(
        self,
        logits: mx.array,
        next_token: NextToken,
        position: int,
        parents: Sequence[int] | None = None,
    ) -> None:
        """Nothing is computed before it is asked for."""
        self.scales = mx.logsumexp(logits, axis=-1, keepdims=True)
        self.logprobs = logits - self.scales
        self._next_token = next_token
        self._position = position
        self._parents = parents
        self._probs: mx.array | None = None
        self._tokens: mx.array | None = None

    @property
    def greedy(self) -> bool:
        """True if all mass lies on the argmax."""
        sampling = self._next_token.sampling
        return sampling is not None and sampling.greedy

    @property
    def has_distribution(self) -> bool:
        """True if `probs` is known."""
        return self._next_token.sampling is not None

    @property
    def probs(self) -> mx.array:
        """The distribution that the next token is drawn from, float32; [K+1, V]."""
        if self._probs is None:
            sampling = self._next_token.sampling
            assert sampling is not None, "a rule that reads probs has needs_distribution"
            self._probs = sampling.distribution(self.logprobs)
        return self._probs

    @property
    def tokens(self) -> mx.array:
        """The target's own draw at each row; [K+1]."""
        if self._tokens is None:
            self._tokens = self._next_token.draw(self.logprobs, self._position, self._parents)
        return self._tokens


class RoundNoise:
    """Randomness of one round's rule, keyed by the position of its first token."""

    def __init__(self, noise: Noise, position: int) -> None:
        """Nothing is drawn yet."""
        self._noise = noise
        self._position = position

    def uniform(self, n: int) -> mx.array:
        """Numbers in [0, 1), one for each draft token's coin; [n]."""
        return self._noise.uniform("accept", self._position, n)

    def gumbel(self, vocab: int) -> mx.array:
        """Standard Gumbel noise for the token after the kept ones; [V]."""
        return self._noise.gumbel("next", self._position, vocab)


def is_pure(f: Any) -> bool:
    """True if calling `f` on a row that is thrown away afterwards does no harm.

    True for `Sampling`, for what mlx-lm's `make_sampler` and `make_logits_processors` return, and
    for callables that say so themselves with a true attribute `pure`.
    """
    known = getattr(f, "__module__", None) == "mlx_lm.sample_utils"
    return isinstance(f, Sampling) or known or bool(getattr(f, "pure", False))
