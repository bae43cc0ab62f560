"""Faults planted in one layer are found whatever a model rounds; right models pass everywhere."""

from __future__ import annotations

import mlx.core as mx
import pytest

import tiny
from benchmarks.power_of_probe import DEVICES, FAULTS, TYPES, make, plant, sampled, verdicts
from narrow import Counting
from selection import FULL, in_one_test
from specdec_mlx.exactness.probe import first_inexact
from specdec_mlx.exactness.recurrent_states import recurrent_states_of
from specdec_mlx.exactness.rounding import rounding_of
from specdec_mlx.lab.probing import LEAST_TIE, near_tie, probe
from specdec_mlx.models.anatomy import anatomy_of


@in_one_test("fault", FAULTS)
def test_a_fault_in_one_layer_of_eight_is_found_in_bfloat16(fault):
    """By the measurement before the first draft; rows are alike, and the logits hardly differ."""
    model = make("bfloat16", 8, 0)
    plant(model, 4, fault)
    with pytest.warns(UserWarning, match=r"first at model\.layers\.4\.self_attn\.o_proj"):
        assert first_inexact(model, 0) == 0


@in_one_test("fault", list(FAULTS)[::2])
def test_a_fault_is_found_where_several_rows_round_otherwise(fault):
    assert verdicts("bfloat16", 2, 0, "simulated", (1, fault)) == [True, True]


@FULL
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", TYPES)
def test_every_fault_is_found_at_every_depth(kind: str, device: str) -> None:
    """A sample of the table in docs: every fault, at the start and at the end of a shallow model.

    A deep model costs eight times as much. The types share its faults among them, so that each
    fault is planted in each of its layers for each device.
    """
    turn = list(TYPES).index(kind)
    shallow = [(2, layer, fault) for fault in FAULTS for layer in sampled(2, 2)]
    deep = [(16, layer, fault) for fault in FAULTS for layer in sampled(16, 2)]
    missed = [
        (depth, layer, fault)
        for depth, layer, fault in [*shallow, *deep[turn :: len(TYPES)]]
        if verdicts(kind, depth, depth, device, (layer, fault)) != [True, True]
    ]
    assert not missed


@in_one_test("device", DEVICES)
@in_one_test("kind", TYPES)
def test_a_right_model_passes_on_any_device(kind, device):
    assert verdicts(kind, 2, 0, device) == [False, False]


def test_a_fault_widens_no_near_tie() -> None:
    """Rounding of a right model in 16 bits does, as single passes show it."""
    faulty, right = (make("bfloat16", 2, 0, device) for device in DEVICES)
    plant(faulty, 1, "position 0 unseen")
    report = probe(faulty, past_window=False)
    assert max(row.max_difference for row in report.rows) > 0.1
    assert near_tie(report.differences) == LEAST_TIE
    rounded = probe(right, past_window=False)
    assert rounded.exact
    assert near_tie(rounded.differences) > 0.01


def test_one_parameter_in_16_bits_makes_no_model_coarse() -> None:
    model = tiny.build("llama")
    model.model.norm.weight = model.model.norm.weight.astype(mx.bfloat16)
    assert rounding_of(model) == rounding_of(tiny.build("llama"))
    model = make("float32", 2, 0)
    model.model.norm.weight = model.model.norm.weight.astype(mx.bfloat16)
    plant(model, 0, "position 0 unseen")
    with pytest.warns(UserWarning, match="nothing is drafted there"):
        assert first_inexact(model, 0) == 0


@in_one_test(("device", "most"), [("alike", 7), ("simulated", 10)])
def test_the_measurement_before_the_first_draft_is_short(device, most):
    """A prompt, five single passes and a wide one; a few more where rows are not bitwise alike."""
    model = Counting(make("bfloat16", 2, 0, device))
    anatomy_of(model)
    recurrent_states_of(model)
    model.num_passes = 0
    assert first_inexact(model, 0) != 0
    assert model.num_passes <= most
