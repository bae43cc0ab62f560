"""`Sampling` is mlx-lm's sampler, as a law."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_lm.sample_utils
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_sampler
from scipy.special import softmax
from scipy.stats import chisquare

import strategies
from selection import in_one_test
from specdec_mlx import Sampling
from specdec_mlx.drafters.drawing import check_draft_temp, sampling_of_drafts
from specdec_mlx.sampling import Noise, read_sampler

FLOAT32 = 1e-5
TINY = 1e-37  # the mixture over XTC's coin is formed in float32, which ends here


def normalised(logits: mx.array) -> mx.array:
    """Log-probabilities as mlx-lm's loop hands them to a sampler."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def host_law(logprobs: mx.array, **arguments) -> np.ndarray:
    """Law [..., V], float64, that mlx-lm's sampler draws from; XTC's coin decides nothing in it."""
    caught = []

    def catch(logits: mx.array, temp: float) -> mx.array:
        caught.append(np.array(logits, np.float64) / temp)
        return mx.zeros(logits.shape[:-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlx_lm.sample_utils, "categorical_sampling", catch)
        make_sampler(**arguments)(logprobs)
    return softmax(caught[0], axis=-1)


def host_mixture(logprobs: mx.array, sampling: Sampling) -> np.ndarray:
    """Law of mlx-lm's sampler with the same arguments, over both outcomes of XTC's coin."""
    arguments = vars(sampling) | {"xtc_special_tokens": list(sampling.xtc_special_tokens)}
    share = arguments.pop("xtc_probability")
    plain = host_law(logprobs, **arguments, xtc_probability=0.0)
    if share == 0:
        return plain
    return (1 - share) * plain + share * host_law(logprobs, **arguments, xtc_probability=1.0)


@given(logits=strategies.logit_rows(), data=st.data())
@settings(max_examples=300)
def test_law_is_that_of_the_host_sampler(logits, data):
    """The same law and the same support, for any logits and settings."""
    sampling = Sampling(**data.draw(strategies.sampling_arguments(logits.shape[-1])))
    logprobs = normalised(logits)
    law = np.exp(np.array(sampling.log_distribution(logprobs), np.float64))
    expected = host_mixture(logprobs, sampling)
    np.testing.assert_allclose(law, expected, atol=FLOAT32)
    assert np.all(law[expected == 0] == 0)
    assert np.all(law[expected > TINY] > 0)


@in_one_test("filters", [{}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 2}, {"top_p": 1.0}])
def test_law_takes_logits_as_it_takes_log_probabilities(filters):
    """A constant more in all of a row's logits changes nothing."""
    logits = mx.array([[0.3, 2.0, 1.5, -1.0], [3.0, 2.9, 2.8, 0.0]])
    sampling = Sampling(temp=0.8, **filters)
    expected = sampling.log_distribution(normalised(logits))
    for constant in (-3.0, 200.0):  # exp(200) is beyond float32
        assert mx.allclose(sampling.log_distribution(logits + constant), expected, atol=1e-4)


@given(logits=strategies.logit_rows(), data=st.data())
def test_law_takes_rows_one_by_one(logits, data):
    """A batch [..., V] has the law of each of its rows, XTC included: one coin a row.

    It is float32 and normalised, without NaN, and has never more support than the logits.
    """
    sampling = Sampling(**data.draw(strategies.sampling_arguments(logits.shape[-1])))
    rows = mx.concatenate([logits, logits[:, ::-1], mx.zeros_like(logits)])
    together = sampling.log_distribution(rows[None])[0]
    assert together.dtype == mx.float32
    assert not mx.any((together > -mx.inf) & (rows == -mx.inf)).item()
    for row, law in zip(rows, mx.exp(together), strict=True):
        own = mx.exp(sampling.log_distribution(row[None])[0])
        assert own.sum().item() == pytest.approx(1, abs=FLOAT32)
        np.testing.assert_allclose(law, own, atol=1e-6)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    """The law of 16-bit log-probabilities is that of the same numbers in float32."""
    logits = mx.random.normal((1, 50), key=mx.random.key(0)).astype(dtype)
    sampling = Sampling(temp=0.7, top_p=0.8, min_p=0.05)
    assert mx.array_equal(
        sampling.log_distribution(logits), sampling.log_distribution(logits.astype(mx.float32))
    )


@given(logits=strategies.logit_rows(), data=st.data())
def test_draw_is_the_argmax_of_law_and_noise(logits, data):
    """The Gumbel-max trick; a token without mass is never drawn.

    temp = 0: all mass on the first of the largest, and every way to draw gives that token.
    """
    sampling = Sampling(**data.draw(strategies.sampling_arguments(logits.shape[-1])))
    gumbel = Noise(data.draw(st.integers(0, 100))).gumbel("target", 0, logits.shape[-1])[None]
    law = np.array(sampling.log_distribution(logits))[0]
    token = sampling.draw(logits, gumbel).item()
    assert token == np.argmax(law + np.array(gumbel)[0])
    assert law[token] > -np.inf
    greedy, best = replace(sampling, temp=0.0), int(np.argmax(np.array(logits[0])))
    law = np.where(np.arange(logits.shape[-1]) == best, 0.0, -np.inf)
    assert np.array_equal(greedy.log_distribution(logits)[0], law)
    drawn = greedy.draw(logits, None), greedy(logits), greedy(logits[0])
    assert {token.item() for token in (*drawn, make_sampler(temp=0.0)(logits))} == {best}


@pytest.mark.usefixtures("compiled")
def test_law_is_that_of_the_host_sampler_compiled():
    """The same with mlx-lm's filters compiled, on rows of 50 tokens, one at a time."""
    filters = {"top_p": 0.9, "min_p": 0.02, "top_k": 20, "min_tokens_to_keep": 3}
    xtc = {"xtc_probability": 0.5, "xtc_threshold": 0.05, "xtc_special_tokens": [1]}
    sampling = Sampling(temp=0.8, **filters, **xtc)
    for logits in 3 * mx.random.normal((10, 1, 50), key=mx.random.key(1)):
        logprobs = normalised(logits)
        law = np.exp(np.array(sampling.log_distribution(logprobs), np.float64))
        np.testing.assert_allclose(law, host_mixture(logprobs, sampling), atol=FLOAT32)


LOGITS = mx.array([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0])
XTC = Sampling(temp=1.3, min_p=0.05, xtc_probability=0.4, xtc_threshold=0.15)


@pytest.mark.usefixtures("compiled")
def test_draws_follow_the_law():
    """20,000 draws, by noise and from the global state: chi-square at a false-alarm rate of 1e-6.

    A law that is off by a total variation of 0.03 fails with a chance above 0.99.
    """
    count = 20_000
    rows = mx.broadcast_to(LOGITS, (count, 7))
    law = np.exp(np.array(XTC.log_distribution(LOGITS), np.float64))
    gumbel = mx.random.gumbel((count, 7), key=Noise(3).key("target", 0))
    mx.random.seed(3)
    for tokens in (XTC.draw(rows, gumbel), XTC(rows)):
        seen = np.bincount(np.array(tokens), minlength=7)
        assert seen[law == 0].sum() == 0
        assert chisquare(seen[law > 0], count * law[law > 0] / law.sum()).pvalue > 1e-6


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temp=1.0, top_p=0.9), XTC])
def test_only_calling_it_draws_from_the_global_state(sampling):
    """Law and draw neither read nor move it, even where mlx-lm's filters toss a coin."""
    mx.random.seed(1)
    before = mx.random.state[0].tolist()
    law = sampling.log_distribution(LOGITS)
    mx.eval(law, sampling.draw(LOGITS, mx.zeros((7,))))
    assert mx.random.state[0].tolist() == before
    rows = mx.broadcast_to(LOGITS, (50, 7))
    first, second = sampling(rows), sampling(rows)
    assert mx.array_equal(sampling.log_distribution(LOGITS), law)
    mx.random.seed(1)
    assert mx.array_equal(sampling(rows), first)
    assert mx.array_equal(first, second) == sampling.greedy


def test_defaults_are_those_of_the_host_sampler():
    """Greedy, and with a temperature alone nothing is filtered."""
    defaults = {name: p.default for name, p in inspect.signature(make_sampler).parameters.items()}
    assert vars(Sampling()) | {"xtc_special_tokens": None} == defaults
    assert mx.allclose(
        Sampling(temp=1.0).log_distribution(LOGITS), normalised(LOGITS[None])[0]
    ).item()


OUT_OF_RANGE: dict[str, list[float]] = {
    "temp": [-0.1, float("nan"), 9e-31, 1e-45, float("inf"), 1e38],
    "top_p": [-0.1, 1.1, float("nan")],
    "min_p": [-0.1, 1.1, float("nan")],
    "min_tokens_to_keep": [0],
    "top_k": [-1],
    "xtc_probability": [-0.1, 1.1],
    "xtc_threshold": [-0.1, 0.6],
}


@in_one_test(("name", "value"), [(name, x) for name, wrong in OUT_OF_RANGE.items() for x in wrong])
def test_arguments_out_of_range_are_refused(name, value):
    """A ValueError that names the argument and what was given, before the first token."""
    with pytest.raises(ValueError, match=rf"Sampling\({name}={re.escape(str(value))}\): expected "):
        Sampling(**{name: value})


@in_one_test("temp", [1e-30, 1e-20, 1e30])
def test_temperatures_to_the_ends_of_their_range_draw_tokens(temp: float) -> None:
    """At the low end the likeliest one, at the high end any of those that are not filtered out."""
    logits = mx.where(mx.arange(7) == 5, -mx.inf, LOGITS)
    probs = np.array(Sampling(temp=temp).distribution(logits))
    assert np.isfinite(probs).all()
    assert probs[5] == 0
    assert abs(probs.sum() - 1) < 1e-6


def test_a_sampler_of_mlx_lms_that_draws_from_no_distribution_is_refused() -> None:
    """It would write token 0 again and again."""
    with pytest.raises(ValueError, match=r"Sampling\(temp=1e-40\): expected "):
        read_sampler(make_sampler(temp=1e-40))


def test_top_k_of_the_whole_vocabulary_is_refused():
    """As by mlx-lm, which takes 0 < top_k < V; it can only be known with the logits."""
    with pytest.raises(ValueError, match="below the vocabulary size, 7"):
        Sampling(temp=1.0, top_k=7).log_distribution(LOGITS)
    assert (Sampling(temp=1.0, top_k=6).log_distribution(LOGITS) > -mx.inf).sum().item() == 6


def test_probabilities_are_those_of_the_logarithms_in_every_row() -> None:
    """Greedy and drawn; and what stands at the ends of its bounds is taken."""
    logits = mx.random.normal((2, 3, 5), key=mx.random.key(0))
    at_its_bound = Sampling(temp=1.0, xtc_threshold=0.5, xtc_special_tokens=None)
    for sampling in (Sampling(), Sampling(temp=0.7), XTC, at_its_bound):
        expected = np.exp(np.array(sampling.log_distribution(logits)))
        np.testing.assert_allclose(np.array(sampling.distribution(logits)), expected, atol=1e-6)
    assert Sampling(xtc_special_tokens=[1]).xtc_special_tokens == (1,)
    for wrong in (-0.5, float("nan"), 1e-40, float("inf")):
        with pytest.raises(ValueError, match="draft_temp="):
            check_draft_temp(wrong)
    check_draft_temp(None)
    check_draft_temp(0.5)
    check_draft_temp(0.0)


def test_drafts_are_drawn_as_the_target_but_for_their_temperature() -> None:
    target = Sampling(temp=0.7, top_p=0.9)
    for target_is, greedy, temp, expected in (
        (target, False, None, target),
        (target, False, 0.3, replace(target, temp=0.3)),
        (target, True, 0.3, Sampling()),
        (Sampling(), False, 0.3, Sampling()),
        (None, False, None, Sampling()),
    ):
        drafter: Any = SimpleNamespace(greedy=greedy, draft_temp=temp)
        assert sampling_of_drafts(drafter, target_is) == expected
