"""The distribution of the next token, and the source of randomness.

Random numbers are a pure function of seed, purpose and position. MLX's global random state is
neither read nor moved: with one seed, the target's own draws are the same with any drafter and any
draft length (Daliri et al. 2024, arXiv 2408.07978). Drafts and coins are keyed by the round's first
position and an index, never by the token's position alone: a rejected draft has influenced the
verdict, and its successor must not be drawn from the same numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import FunctionType
from typing import Any

import mlx.core as mx
from jaxtyping import Float, Integer
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, apply_xtc, make_sampler

from specdec_mlx.arguments import require
from specdec_mlx.contracts import LogitsProcessor

Sampler = Callable[[mx.array], mx.array]


# Outside these bounds logits / temp, or 1 / temp, overflow in float32.
LEAST_TEMP, MOST_TEMP = 1e-30, 1e30


TEMPS = f"a finite number >= 0: 0 for greedy, or {LEAST_TEMP} to {MOST_TEMP}"


def is_temp(value: float) -> bool:
    """True for 0, and for a temperature that logits can be divided by."""
    return isinstance(value, Real) and (value == 0 or LEAST_TEMP <= value <= MOST_TEMP)


@dataclass(frozen=True)
class Sampling:
    """How to draw a token, as a distribution and as a sampler.

    The arguments are as in `mlx_lm.sample_utils.make_sampler`, and temp = 0 is the argmax. Raises
    ValueError for numbers out of range. An instance is a mlx-lm sampler, which draws from MLX's
    global random state.
    """

    temp: float = 0.0
    top_p: float = 0.0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    top_k: int = 0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special_tokens: Sequence[int] | None = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "xtc_special_tokens", tuple(self.xtc_special_tokens or ()))
        for name, least in (("min_tokens_to_keep", 1), ("top_k", 0)):
            number: int = getattr(self, name)
            is_whole = isinstance(number, Integral) and number >= least
            require(self, is_whole, name, f"an int >= {least}")
        for name, number in vars(self).items():
            is_number = isinstance(number, Real) or name == "xtc_special_tokens"
            require(self, is_number, name, "a number")
        require(self, is_temp(self.temp), "temp", TEMPS)
        require(self, 0 <= self.top_p <= 1, "top_p", "a number in [0, 1] (0 or 1: off)")
        require(self, 0 <= self.min_p <= 1, "min_p", "a number in [0, 1] (0: off)")
        require(self, 0 <= self.xtc_probability <= 1, "xtc_probability", "in [0, 1]")
        require(self, 0 <= self.xtc_threshold <= 0.5, "xtc_threshold", "in [0, 0.5]")

    @property
    def greedy(self) -> bool:
        """True if the distribution has all its mass on one token."""
        return self.temp == 0

    def log_distribution(
        self, logprobs: Float[mx.array, "*batch vocab"]
    ) -> Float[mx.array, "*batch vocab"]:
        """Log-probabilities of the next token, float32 and normalised; -inf for excluded tokens.

        At temp = 0 the first argmax has all the mass. XTC tosses a coin at each position, and this
        is the mixture over the coin.

        logprobs: [..., V] log-probabilities or logits.
        """
        if self.greedy:
            return _point_mass(logprobs)
        return _normalize(self._unnormalized(logprobs))

    def distribution(
        self, logprobs: Float[mx.array, "*batch vocab"]
    ) -> Float[mx.array, "*batch vocab"]:
        """Probabilities [..., V] of the next token."""
        if self.greedy:
            return mx.exp(_point_mass(logprobs))
        return mx.softmax(self._unnormalized(logprobs), axis=-1)

    def _unnormalized(self, logprobs: mx.array) -> mx.array:
        """Logits of the distribution. They are enough to draw from, and take fewer operations."""
        x = logprobs.astype(mx.float32)
        # The order of the filters, and the top-k after XTC, are mlx-lm's.
        if 0 < self.top_p < 1:
            x = apply_top_p(_normalize(x), self.top_p)
        if self.min_p > 0:
            x = apply_min_p(x, self.min_p, self.min_tokens_to_keep)
        if self.xtc_probability == 0:
            return self._finish(x)
        plain, without_top = (
            mx.exp(_normalize(self._finish(y))) for y in (x, self._exclude_top_choices(x))
        )
        share = self.xtc_probability
        return mx.log((1 - share) * plain + share * without_top)

    def draw(
        self,
        logprobs: Float[mx.array, "*batch vocab"],
        gumbel: Float[mx.array, "*batch vocab"] | None,
    ) -> Integer[mx.array, "*batch"]:
        """Token ids [...] drawn with Gumbel noise [..., V]. Greedy takes the input's argmax."""
        if self.greedy:
            return mx.argmax(logprobs, axis=-1)
        assert gumbel is not None
        return mx.argmax(self._unnormalized(logprobs) + gumbel, axis=-1)

    def __call__(self, logprobs: Float[mx.array, "*batch vocab"]) -> Integer[mx.array, "*batch"]:
        """Token ids [...] for log-probabilities [..., V], from MLX's global random state."""
        if self.greedy:
            return mx.argmax(logprobs, axis=-1)
        return mx.random.categorical(self._unnormalized(logprobs))

    def _finish(self, x: mx.array) -> mx.array:
        if self.top_k > 0:
            require(
                self,
                self.top_k < x.shape[-1],
                "top_k",
                f"an int below the vocabulary size, {x.shape[-1]} (0: off)",
            )
            x = apply_top_k(x, self.top_k)
        return x if self.temp == 1 else x * (1.0 / self.temp)

    def _exclude_top_choices(self, x: mx.array) -> mx.array:
        """Apply XTC as if its coin had come up."""
        # mlx-lm tosses the coin in the global random state even at probability 1, so that the state
        # is put back.
        state: Any = mx.random.state
        before = mx.array(state[0])
        special_tokens = list(self.xtc_special_tokens or ())
        excluded: mx.array = apply_xtc(x, 1.0, self.xtc_threshold, special_tokens)
        state[0][:] = before
        return excluded


def _normalize(x: mx.array) -> mx.array:
    # Float32 rounds the logsumexp of large logits by more than it rounds that of small ones.
    x = x - mx.max(x, axis=-1, keepdims=True)
    return x - mx.logsumexp(x, axis=-1, keepdims=True)


def _point_mass(logprobs: mx.array) -> mx.array:
    best = mx.argmax(logprobs, axis=-1, keepdims=True)
    return mx.where(mx.arange(logprobs.shape[-1]) == best, 0.0, -mx.inf).astype(mx.float32)


METHODS = "sampling_methods"


TEMPERATURE = "temp"


CONTEXT_SIZE = "context_size"


BIAS_CELLS = {"indices", "values"}


def read_sampler(sampler: Sampler | Sampling | None) -> Sampling | None:
    """The `Sampling` behind a sampler of ours or mlx-lm's. None for a custom sampler.

    Without a sampler, decoding is greedy. Raises ValueError for a sampler of mlx-lm's whose numbers
    give no distribution.
    """
    if isinstance(sampler, Sampling):
        return sampler
    if sampler is None or _same(sampler, make_sampler(0.0)):
        return Sampling()
    arguments = _arguments(sampler)
    if arguments is None:
        return None
    try:
        # The arguments are read off closure cells, whose meaning could change with mlx-lm. They
        # count only if they make the same functions again.
        again = make_sampler(**arguments)
    except (TypeError, ValueError):
        return None
    return Sampling(**arguments) if _same(sampler, again) else None


def max_window(processors: Sequence[LogitsProcessor]) -> int | None:
    """Number of last tokens that all these processors read, at least 1. None for all tokens."""
    windows = [_window(processor) for processor in processors]
    known = [window for window in windows if window is not None]
    return max(1, *known) if known and len(known) == len(windows) else None


def _window(processor: LogitsProcessor) -> int | None:
    cells = _cells(processor) or {}
    if cells.keys() == BIAS_CELLS:
        return 1
    size = cells.get(CONTEXT_SIZE)
    # mlx-lm reads tokens[-size:], and tokens[-0:] is all of them
    return size if isinstance(size, int) and size > 0 else None


def _arguments(sampler: Callable[..., Any]) -> dict[str, Any] | None:
    cells = _cells(sampler)
    if cells is None or cells.keys() != {METHODS, TEMPERATURE}:
        return None
    arguments = {TEMPERATURE: cells[TEMPERATURE]}
    for method in cells[METHODS]:
        arguments |= _cells(method) or {}
    return arguments


def _cells(function: Any) -> dict[str, Any] | None:
    """Names and contents of a closure's cells. None if mlx-lm did not make the function."""
    is_function = isinstance(function, FunctionType)
    if not is_function or function.__module__ != make_sampler.__module__:
        return None
    cells = function.__closure__ or ()
    names = function.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _same(a: Any, b: Any) -> bool:
    cells_a, cells_b = _cells(a), _cells(b)
    if cells_a is None or cells_b is None or a.__code__ != b.__code__:
        return False
    methods_a, methods_b = cells_a.pop(METHODS, []), cells_b.pop(METHODS, [])
    return (
        cells_a == cells_b
        and len(methods_a) == len(methods_b)
        and all(_same(x, y) for x, y in zip(methods_a, methods_b, strict=True))
    )


_MASK = (1 << 64) - 1


MOST_ROWS = 32  # most positions whose noise is drawn at once


MOST_NUMBERS = 1 << 17
"""Most numbers that are drawn at once. With a large vocabulary one position is work enough."""


@dataclass(frozen=True)
class Noise:
    """Source of random numbers for one generation.

    Its methods take a purpose ("target", "draft", "accept", ...), where two purposes are
    independent, and a position, the index of the token among those generated.

    Attributes:
        seed: the seed.
        is_given: the seed is the caller's, who may expect one text for it.
    """

    seed: int
    is_given: bool = field(default=True, kw_only=True)

    @classmethod
    def from_global_state(cls) -> Noise:
        """Noise seeded by one draw from MLX's global state, so that `mx.random.seed` governs it."""
        bits = 24  # MLX draws integers as float32, which has 24 bits
        drawn: Any = mx.random.randint(0, 1 << bits, shape=(3,)).tolist()
        low, middle, high = drawn
        return cls(low | middle << bits | high << 2 * bits, is_given=False)

    def key(self, purpose: str, position: int) -> mx.array:
        """Key for `mx.random`, uint32 [2]."""
        return mx.array(self._words(purpose, position), dtype=mx.uint32)

    def _words(self, purpose: str, position: int) -> list[int]:
        mixed = self._mixed(purpose, position)
        return [mixed >> 32, mixed & 0xFFFFFFFF]

    def _mixed(self, purpose: str, position: int) -> int:
        of_purpose = _mix(_mix(self.seed & _MASK) ^ zlib.crc32(purpose.encode()))
        return _mix(of_purpose + position)

    def uniform(self, purpose: str, position: int, n: int = 1) -> Float[mx.array, " n"]:
        """n numbers in [0, 1) of one position, multiples of 2^-24."""
        # Made on the host: for a few numbers this is less work than the operations of a graph.
        first = self._mixed(purpose, position)
        return mx.array([(_mix(first + i) >> 40) * 2.0**-24 for i in range(n)])

    def gumbel(self, purpose: str, position: int, vocab: int) -> Float[mx.array, " vocab"]:
        """Standard Gumbel noise [V]. argmax(log p + noise) has distribution p."""
        return mx.random.gumbel(shape=(vocab,), key=self.key(purpose, position))

    def gumbels(self, places: Sequence[tuple[str, int]], vocab: int) -> Float[mx.array, "n vocab"]:
        """Gumbel noise [n, V] of several (purpose, position) pairs, as `gumbel` for each."""
        if len(places) == 1:
            return self.gumbel(*places[0], vocab)[None]
        keys = mx.array([self._words(*place) for place in places], mx.uint32)
        return mx.vmap(lambda key: mx.random.gumbel(shape=(vocab,), key=key))(keys)


class GumbelRows:
    """Gumbel noise of one purpose at positions that are requested in order."""

    def __init__(self, noise: Noise, purpose: str) -> None:
        self._noise = noise
        self._purpose = purpose
        self._start = self._end = 0
        self._drawn: mx.array | None = None

    def at(self, start: int, n: int, vocab: int) -> Float[mx.array, "n vocab"]:
        """The rows of n >= 1 positions from `start` on. V is the same in every call."""
        if self._drawn is None or start < self._start or start + n > self._end:
            # Draw ahead, and twice as much each time, since one operation for many rows costs
            # hardly more than for one. A row depends on its position only, so that the extra rows
            # change no text.
            room = min(2 * (self._end - self._start), MOST_ROWS, MOST_NUMBERS // vocab)
            self._start, self._end = start, start + max(n, room)
            places = [(self._purpose, i) for i in range(self._start, self._end)]
            self._drawn = self._noise.gumbels(places, vocab)
        return self._drawn[start - self._start : start - self._start + n]


def _mix(x: int) -> int:
    """Bijection on 64 bits in which every input bit moves every output bit (splitmix64)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
