"""Products that a device shortens, and types that a model mixes, are rounding and no fault."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
import pytest

import tiny
from scripted import OracleDrafter
from specdec_mlx.exactness.probe import first_inexact
from specdec_mlx.exactness.rounding import rounding_of, shortens_products
from specdec_mlx.lab.bench.summary import find_differences
from specdec_mlx.lab.bench.timing import PLAIN, Sample
from specdec_mlx.lab.probing import near_tie, probe
from specdec_mlx.lab.prompts import RecordedText
from specdec_mlx.loop import speculate

PROMPT = [5, 9, 2, 7, 5, 9, 2]


def shortened(array: mx.array) -> mx.array:
    """Float32 numbers with 10 bits after the point, as TF32 has them."""
    bits = array.view(mx.uint32)
    return (((bits + 0x1000) >> 13) << 13).view(mx.float32)


class ShortLinear(nn.Linear):
    """Several rows as an M5 computes them, a single row in full."""

    def __call__(self, x: mx.array) -> mx.array:
        if x.shape[-2] == 1 or x.dtype != mx.float32:
            whole: mx.array = super().__call__(x)
            return whole
        product: mx.array = shortened(x) @ shortened(self.weight).T
        return product + self.bias if "bias" in self else product


@pytest.fixture
def short_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layers that are made now are of a class of their own: what is kept by class stays right."""
    monkeypatch.setattr(nn, "Linear", ShortLinear)
    shortens_products.cache_clear()
    yield
    shortens_products.cache_clear()


def drafted(model: nn.Module) -> int:
    """Accepted tokens of a drafter that proposes what the target writes."""
    text = [token.token for token in speculate(model, PROMPT, max_tokens=24)]
    oracle = OracleDrafter([*PROMPT, *text], 128)
    tokens = list(speculate(model, PROMPT, oracle, max_tokens=24, num_draft_tokens=4))
    return tokens[-1].stats.accepted


def test_float32_is_drafted_where_the_device_shortens_products(short_products: None) -> None:
    model = tiny.build("llama")
    assert shortens_products()
    assert max(row.max_difference for row in probe(model).rows) > 1e-4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert first_inexact(model, 0) != 0
        assert drafted(model) > 0


def test_a_wrong_mask_is_found_where_the_device_shortens_products(
    short_products: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.build("llama")
    attention = mx.fast.scaled_dot_product_attention
    monkeypatch.setattr(
        "mlx.core.fast.scaled_dot_product_attention",
        lambda q, k, v, *, scale, mask=None, **more: attention(q, k, v, scale=scale),
    )
    with pytest.warns(UserWarning, match="nothing is drafted there"):
        assert first_inexact(model, 0) == 0


def test_a_model_that_hands_out_float32_is_measured_by_what_it_computes_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A last norm in float32 makes the logits float32; the layers before round to 8 bits."""
    model = tiny.build("llama", mx.bfloat16)
    model.model.norm.weight = model.model.norm.weight.astype(mx.float32)
    assert model(mx.array([PROMPT])).dtype == mx.float32
    assert rounding_of(model) == rounding_of(tiny.build("llama", mx.bfloat16))
    assert rounding_of(model) > rounding_of(tiny.build("llama"))


@pytest.mark.parametrize(("ties", "excused"), [(0.5, True), (2.0, False)])
def test_a_benchmark_excuses_what_rounding_moves_and_no_more(
    ties: float, excused: bool, short_products: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `check` does: a text that parts where its top two are as near as passes are apart."""
    model = tiny.build("llama")
    tie = near_tie(probe(model, past_window=False).differences)
    assert tie > near_tie([])
    gap = ties * tie
    monkeypatch.setattr("specdec_mlx.lab.bench.summary.top_two_gap", lambda *where: gap)
    of = {"id": "one", "category": "kind", "num_tokens": 3, "passes": 3, "decode_seconds": 0.0}
    samples = [Sample(PLAIN, tokens=[1, 2, 3], **of), Sample("other", tokens=[1, 2, 4], **of)]
    (found,) = find_differences(model, [RecordedText("one", "kind", PROMPT)], samples)
    assert (found.position, found.excused) == (2, excused)
