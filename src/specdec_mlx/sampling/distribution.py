"""Logits to the distribution of the next token, as `mlx_lm.sample_utils.make_sampler` has it.

Acceptance, residual and bonus token must use the same (Leviathan et al. 2023, section 2.2), so it
is made once, here, by mlx-lm's own filters in mlx-lm's order: top-p, min-p, XTC, top-k on
log-probabilities at temperature 1, the temperature last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import mlx.core as mx
from jaxtyping import Float, Integer
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, apply_xtc

from specdec_mlx.options import require, wrong

Sampler = Callable[[mx.array], mx.array]

# beyond them logits, or 1 / temp, are no float32 any more
LEAST_TEMP, MOST_TEMP = 1e-30, 1e30
TEMPS = f"a finite number >= 0: 0 for greedy, or {LEAST_TEMP} to {MOST_TEMP}"


def is_temp(value: float) -> bool:
    """True for a temperature that logits can be divided by, and for 0."""
    return isinstance(value, Real) and (value == 0 or LEAST_TEMP <= value <= MOST_TEMP)


@dataclass(frozen=True)
class Sampling:
    """How to draw a token, as a distribution and as a sampler.

    The arguments are those of `mlx_lm.sample_utils.make_sampler`, ValueError outside their range;
    temp = 0 is the argmax. An instance is a mlx-lm sampler, which draws from MLX's global random
    state.
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
        object.__setattr__(
            self, "xtc_special_tokens", tuple(self.xtc_special_tokens or ())
        )
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
        """Log-probabilities of the next token, float32 and normalised; -inf where filtered out.

        logprobs: [..., V] log-probabilities or logits. At temp = 0 the mass is on the first argmax.
        XTC tosses a coin at each position; this is the mixture over it.
        """
        if self.greedy:
            return _point_mass(logprobs)
        return _normalize(self._unnormalized(logprobs))

    def distribution(
        self, logprobs: Float[mx.array, "*batch vocab"]
    ) -> Float[mx.array, "*batch vocab"]:
        """Probabilities of the next token [..., V]: exp of `log_distribution`."""
        if self.greedy:
            return mx.exp(_point_mass(logprobs))
        return mx.softmax(self._unnormalized(logprobs), axis=-1)

    def _unnormalized(self, logprobs: mx.array) -> mx.array:
        """Logits of the distribution: enough to draw from, in fewer operations."""
        x = logprobs.astype(mx.float32)
        if 0 < self.top_p < 1:
            x = apply_top_p(_normalize(x), self.top_p)
        if self.min_p > 0:
            x = apply_min_p(x, self.min_p, self.min_tokens_to_keep)
        if self.xtc_probability == 0:
            return self._finish(x)
        plain, without_top = (
            mx.exp(_normalize(self._finish(y)))
            for y in (x, self._exclude_top_choices(x))
        )
        share = self.xtc_probability
        return mx.log((1 - share) * plain + share * without_top)

    def draw(
        self,
        logprobs: Float[mx.array, "*batch vocab"],
        gumbel: Float[mx.array, "*batch vocab"] | None,
    ) -> Integer[mx.array, "*batch"]:
        """Token ids [...] drawn with Gumbel noise [..., V]; greedy takes the argmax as given."""
        if self.greedy:
            return mx.argmax(logprobs, axis=-1)
        assert gumbel is not None
        return mx.argmax(self._unnormalized(logprobs) + gumbel, axis=-1)

    def __call__(
        self, logprobs: Float[mx.array, "*batch vocab"]
    ) -> Integer[mx.array, "*batch"]:
        """Token ids [...] for log-probabilities [..., V], like any sampler of mlx-lm."""
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
        """Apply XTC as if its coin had come up; mlx-lm draws one from the global state even at
        probability 1, so the state is put back.
        """
        state: Any = mx.random.state
        before = mx.array(state[0])
        kept = list(self.xtc_special_tokens or ())
        excluded: mx.array = apply_xtc(x, 1.0, self.xtc_threshold, kept)
        state[0][:] = before
        return excluded


def _normalize(x: mx.array) -> mx.array:
    return x - mx.logsumexp(x, axis=-1, keepdims=True)


def _point_mass(logprobs: mx.array) -> mx.array:
    best = mx.argmax(logprobs, axis=-1, keepdims=True)
    return mx.where(mx.arange(logprobs.shape[-1]) == best, 0.0, -mx.inf).astype(
        mx.float32
    )


def check_draft_temp(draft_temp: float | None) -> None:
    """Raise ValueError for a temperature of drafts that is none."""
    if draft_temp is not None and not is_temp(draft_temp):
        raise wrong("draft_temp", draft_temp, f"{TEMPS}, or None")


def sampling_of_drafts(
    target: Sampling | None, *, greedy: bool, draft_temp: float | None
) -> Sampling:
    """How to draw for a target, None for an opaque sampler: its filters, at `draft_temp`."""
    if greedy or target is None or target.greedy:
        return Sampling()
    return target if draft_temp is None else replace(target, temp=draft_temp)
