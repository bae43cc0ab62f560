"""Randomness as a pure function of seed, purpose and position.

MLX's global random state is neither read nor moved: with one seed, the target's own draws are the
same with any drafter and any draft length (Daliri et al. 2024, arXiv 2408.07978). Drafts and coins
are keyed by the round's first position and an index, never by the token's position alone: a
rejected draft has had its say in the verdict, and its successor must not be drawn from the same
numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
from jaxtyping import Float

from specdec_mlx.token_ids import to_list

_MASK = (1 << 64) - 1

MOST_ROWS = 32  # most positions whose noise is drawn at once

MOST_NUMBERS = 1 << 17
"""Most numbers that are drawn at once; a large vocabulary has work enough in one position."""


@dataclass(frozen=True)
class Noise:
    """Source of random numbers for one generation.

    purpose: what the draw is for ("target", "draft", "accept", ...); two are independent. position:
    index of the token among those generated. is_given: the seed is the caller's, who may expect one
    text for it.
    """

    seed: int
    is_given: bool = field(default=True, kw_only=True)

    @classmethod
    def from_global_state(cls) -> Noise:
        """Noise seeded by one draw from MLX's global state, so that `mx.random.seed` governs it."""
        bits = 24  # a random integer is drawn as a float32, which has no more
        low, middle, high = to_list(mx.random.randint(0, 1 << bits, shape=(3,)))
        return cls(low | middle << bits | high << 2 * bits, is_given=False)

    def key(self, purpose: str, position: int) -> mx.array:
        """Key for `mx.random`, uint32 [2]: 64 mixed bits of (seed, purpose, position)."""
        return mx.array(self._words(purpose, position), dtype=mx.uint32)

    def _words(self, purpose: str, position: int) -> list[int]:
        mixed = self._mixed(purpose, position)
        return [mixed >> 32, mixed & 0xFFFFFFFF]

    def _mixed(self, purpose: str, position: int) -> int:
        of_purpose = _mix(_mix(self.seed & _MASK) ^ zlib.crc32(purpose.encode()))
        return _mix(of_purpose + position)

    def uniform(self, purpose: str, position: int, n: int = 1) -> Float[mx.array, " n"]:
        """n numbers in [0, 1), multiples of 2^-24, of one position; made on the host, since a few
        are less work than the operations of a graph.
        """
        first = self._mixed(purpose, position)
        return mx.array([(_mix(first + i) >> 40) * 2.0**-24 for i in range(n)])

    def gumbel(
        self, purpose: str, position: int, vocab: int
    ) -> Float[mx.array, " vocab"]:
        """Standard Gumbel noise [V]: argmax(log p + noise) is distributed as p."""
        return mx.random.gumbel(shape=(vocab,), key=self.key(purpose, position))

    def gumbels(
        self, places: Sequence[tuple[str, int]], vocab: int
    ) -> Float[mx.array, "n vocab"]:
        """Gumbel noise of several purposes and positions, one row each; as `gumbel` for each."""
        if len(places) == 1:
            return self.gumbel(*places[0], vocab)[None]
        keys = mx.array([self._words(*place) for place in places], mx.uint32)
        return mx.vmap(lambda key: mx.random.gumbel(shape=(vocab,), key=key))(keys)


class GumbelRows:
    """Gumbel noise of one purpose at positions that are asked for in order.

    More are drawn each time, up to `MOST_ROWS`, the first time those asked for; a row follows from
    its position alone.
    """

    def __init__(self, noise: Noise, purpose: str) -> None:
        self._noise = noise
        self._purpose = purpose
        self._start = self._end = 0
        self._drawn: mx.array | None = None

    def at(self, start: int, n: int, vocab: int) -> Float[mx.array, "n vocab"]:
        """The rows of n >= 1 positions from `start` on; V is the same each time."""
        if self._drawn is None or start < self._start or start + n > self._end:
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
