"""Draft models with fewer layers."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from test_commands import account, text_in

import specdec_mlx as sd
import tiny
from command_line import run
from lossless import PROMPT, ROUGH, Case, largest_difference, plain_text, spoken
from scripted import Recorder
from selection import cases, in_one_test
from specdec_mlx.drafters.reduced_models import first_layers

RUNS = ("llama", "gemma3_text", "mamba2", "qwen3_next", "falcon_h1", "deepseek_v3", "gpt2")
"""Architectures of every kind; beside them, below, those that are refused."""
TOKENS = mx.array([PROMPT])
TEXT = "the cat in the hat and the other cat in the hat"


def logits_of(model: nn.Module) -> mx.array:
    logits: mx.array = model(TOKENS, cache=make_prompt_cache(model))
    return logits.astype(mx.float32)


NUM_LAYERS = (1, 2)


@in_one_test("num_layers", NUM_LAYERS)
def test_the_model_that_was_given_is_left_alone(num_layers: int) -> None:
    """The same arrays, under the same names, and the same logits; the lighter one has a key of its
    own, the same for the same content.
    """
    model, again = tiny.build("llama"), tiny.build("llama")
    logits = logits_of(model)
    arrays, lighter, after = (
        {name: id(array) for name, array in tree_flatten(model.parameters())},
        first_layers(model, num_layers),
        {name: id(array) for name, array in tree_flatten(model.parameters())},
    )
    assert not mx.allclose(logits_of(lighter), logits, atol=1e-3)
    assert arrays == after
    assert mx.array_equal(logits_of(model), logits)
    keys = [sd.ModelDrafter(m).key for m in (model, lighter, first_layers(again, num_layers))]
    assert keys[0] != keys[1] == keys[2]


@in_one_test("num_layers", NUM_LAYERS)
@pytest.mark.parametrize("name", cases(["llama", "qwen3_next"], "llama"))
def test_greedy_text_is_the_targets_own(name: str, num_layers: int) -> None:
    """And what is proposed is what the lighter model would write."""
    case = Case(name, num_tokens=30)
    model = first_layers(case.model, num_layers)
    recorder = Recorder(sd.ModelDrafter(model))
    items = list(case.speculate(recorder, 4))
    assert spoken(items).deviation(case.plain) <= case.tolerance
    for text, proposed in recorder.proposals[2::6]:
        assert proposed == plain_text(model, text, len(proposed)).tokens


CANNOT_BE_CUT: dict[str, str] = {
    "afm7": "has no single list of layers",  # two lists, one of which has no caches
    "phi3small": "does not run on its first 1 layers: a text in two parts",
    "kimi_k3": "Leave|leave",  # without its last layer
}
"""Architectures whose layers are not to be had alone, and what is said. A pass of the second over
several tokens sees its own future, cut or not."""


@in_one_test("name", CANNOT_BE_CUT)
def test_what_cannot_be_cut_is_refused(name: str) -> None:
    """By name; and numbers of layers that there are not."""
    model = tiny.build(name)
    few = 1 if name != "kimi_k3" else len(model.layers) - 1
    with pytest.raises(sd.errors.DraftModelError, match=CANNOT_BE_CUT[name]):
        first_layers(model, few)
    for num_layers in (0, -1, 4):
        with pytest.raises(sd.errors.DraftModelError, match="expected a number from 1 to 3"):
            first_layers(tiny.build("llama"), num_layers)


@pytest.mark.parametrize("name", cases(RUNS, "llama", "gemma3_text", "mamba2"))
def test_the_caches_of_the_first_layers_are_enough(name: str) -> None:
    """A text in passes of any size has the logits of the text as a whole; for every kind, without
    its last layer. All layers are the model itself.
    """
    model = tiny.build(name)
    whole = first_layers(model, len(model.layers))
    assert mx.allclose(logits_of(whole), logits_of(model), atol=1e-5)
    assert len(make_prompt_cache(whole)) == len(make_prompt_cache(model))
    short = first_layers(model, max(1, len(model.layers) - 1))
    caches = make_prompt_cache(short)
    parts = [short(part, cache=caches) for part in mx.split(TOKENS, [5, 6, 10], axis=1)]
    at_once = short(TOKENS, cache=make_prompt_cache(short))
    assert largest_difference(mx.concatenate(parts, axis=1), at_once) < ROUGH.get(name, (1e-3,))[0]
    assert not caches[-1].empty()


@in_one_test("name", ["llama", "gemma3_text"])
@in_one_test("num_layers", [1, 2])
def test_the_first_layers_are_an_early_exit(name: str, num_layers: int) -> None:
    """As if the others added nothing to the residual stream."""
    model = tiny.build(name)
    cut = logits_of(first_layers(model, num_layers))
    for layer in model.layers[num_layers:]:
        for path, module in layer.named_modules():
            if path.endswith(("o_proj", "down_proj")):
                module.weight = mx.zeros_like(module.weight)
    assert mx.allclose(cut, logits_of(model), atol=1e-5)


def test_the_flag_makes_another_draft_model_and_the_same_text(folder: Path) -> None:
    """The target itself, lighter: it is not always right any more."""
    texts, counts = set(), []
    for flags in ((), ("--draft-layers", "1")):
        model = ("--model", folder, "--draft-model", folder, "--drafter", "model", *flags)
        text = ("--prompt", TEXT, "--max-tokens", "60", "--num-draft-tokens", "4")
        done = run("generate", *model, *text)
        assert done.returncode == 0, done.stderr
        texts.add(text_in(done.stdout))
        counts.append(account(done.stdout)[1])
    assert len(texts) == 1
    assert counts[0] == 47  # all but the first token's, and those after whole drafts
    assert max(counts[1:]) < 47
