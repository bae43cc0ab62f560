"""Draft models with fewer bits and fewer layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

import specdec_mlx as sd
import tiny
from command_line import both_ways, run
from lossless import PROMPT, ROUGH, Case, largest_difference, plain_text, spoken
from scripted import Recorder
from selection import in_one_test
from specdec_mlx.contracts import key_of
from specdec_mlx.drafters.lighter import first_layers, quantized
from tiny_model_folder import write_model_folder

RUNS = ("llama", "gemma3_text", "mamba2", "qwen3_next", "falcon_h1", "deepseek_v3", "gpt2")
"""Architectures of every kind; beside them, below, those that are refused."""
TOKENS = mx.array([PROMPT])


def logits_of(model: nn.Module) -> mx.array:
    logits: mx.array = model(TOKENS, cache=make_prompt_cache(model))
    return logits.astype(mx.float32)


def arrays_of(model: nn.Module) -> dict[str, int]:
    """Which arrays a model holds, by name."""
    return {name: id(array) for name, array in tree_flatten(model.parameters())}


LIGHTER: dict[str, Callable[[nn.Module], nn.Module]] = {
    "quantized": lambda model: quantized(model, 4),
    "one layer": lambda model: first_layers(model, 1),
    "both": lambda model: first_layers(quantized(model, 8), 2),
}


@in_one_test("way", LIGHTER)
def test_the_model_that_was_given_is_left_alone(way: str) -> None:
    """The same arrays, under the same names, and the same logits."""
    model = tiny.build("llama")
    arrays, logits = arrays_of(model), logits_of(model)
    lighter = LIGHTER[way](model)
    assert not mx.allclose(logits_of(lighter), logits, atol=1e-3)
    assert arrays_of(model) == arrays
    assert mx.array_equal(logits_of(model), logits)


@in_one_test("way", LIGHTER)
def test_a_lighter_draft_model_has_a_key_of_its_own(way: str) -> None:
    """The same in every process, and for the same content."""
    model, again = tiny.build("llama"), tiny.build("llama")
    keys = [key_of(sd.ModelDrafter(m)) for m in (model, LIGHTER[way](model), LIGHTER[way](again))]
    assert keys[0] != keys[1] == keys[2]


@pytest.mark.parametrize("way", LIGHTER)
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_greedy_text_is_the_targets_own(name: str, way: str) -> None:
    """And what is proposed is what the lighter model would write."""
    case = Case(name, num_tokens=30)
    model = LIGHTER[way](case.model)
    recorder = Recorder(sd.ModelDrafter(model))
    items = list(case.speculate(recorder, 4))
    assert spoken(items).deviation(case.plain) <= case.tolerance
    for text, proposed in recorder.proposals[2::6]:
        assert proposed == plain_text(model, text, len(proposed)).tokens


# Fewer bits -------------------------------------------------------------------------------------


def test_a_layer_takes_the_largest_group_that_fits() -> None:
    """64 and 32; what is 96 wide takes 32."""
    model = quantized(tiny.build("llama"), 4)
    found = {
        path.rpartition(".")[2]: (module.bits, module.group_size)
        for path, module in model.named_modules()
        if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding)
    }
    assert found["q_proj"] == found["embed_tokens"] == found["lm_head"] == (4, 64)
    assert found["down_proj"] == (4, 32)


def test_what_a_model_says_of_its_own_layers_counts() -> None:
    """mlx-lm's `quant_predicate`: False leaves a layer alone, a dictionary is taken as it is."""
    model = tiny.build("llama")

    def own(path: str, module: nn.Module) -> bool | dict[str, int]:
        return {"group_size": 32, "bits": 8} if "lm_head" in path else "q_proj" not in path

    model.quant_predicate = own
    new = quantized(model, 4)
    assert (new.lm_head.bits, new.lm_head.group_size) == (8, 32)
    assert isinstance(new.layers[0].self_attn.q_proj, nn.Linear)
    assert new.layers[0].self_attn.k_proj.bits == 4


WRONG_BITS: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "a number of bits that MLX lacks": (
        lambda: tiny.build("llama"),
        7,
        "of 7 bits: expected one of 2, 3, 4, 5, 6, 8",
    ),
    "a model that is quantized already": (
        lambda: quantized(tiny.build("llama"), 4),
        3,
        r"quantized already \(.*: 4 bits\). Leave the bits out",
    ),
    "widths that no group fits": (
        lambda: tiny.build("llama", hidden_size=40, num_attention_heads=4, head_dim=8),
        4,
        "is 40 wide. Widths must be multiples of 32",
    ),
}


@in_one_test("what", WRONG_BITS)
def test_what_cannot_be_quantized_is_said_in_words(what: str) -> None:
    make, bits, words = WRONG_BITS[what]
    with pytest.raises(sd.errors.DraftModelError, match=words):
        quantized(make(), bits)


# Fewer layers -----------------------------------------------------------------------------------

CANNOT_BE_CUT: dict[str, str] = {
    "afm7": "has no single list of layers",  # two lists, one of which has no caches
    "phi3small": "does not run on its first 1 layers alone: a text in two parts",
}
"""Architectures whose layers are not to be had alone, and what is said. A pass of the second over
several tokens sees its own future, cut or not."""


@in_one_test("name", [*RUNS, *CANNOT_BE_CUT])
def test_all_layers_are_the_model_itself(name: str) -> None:
    """For every kind of architecture; where there is no list of layers, it is refused by name."""
    model = tiny.build(name)
    if name in CANNOT_BE_CUT:
        with pytest.raises(sd.errors.DraftModelError, match=f"{name} {CANNOT_BE_CUT[name]}"):
            first_layers(model, 1)
        return
    whole = first_layers(model, len(model.layers))
    assert mx.allclose(logits_of(whole), logits_of(model), atol=1e-5)
    assert len(make_prompt_cache(whole)) == len(make_prompt_cache(model))


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


NEEDS_ITS_LAST = (*CANNOT_BE_CUT, "kimi_k3")
"""Architectures that are refused without their last layer."""


@in_one_test("name", [*RUNS, *NEEDS_ITS_LAST])
def test_the_caches_of_the_first_layers_are_enough(name: str) -> None:
    """A text in passes of any size has the logits of the text as a whole; for every kind,
    without its last layer."""
    model = tiny.build(name)
    num_layers = max(1, len(model.layers) - 1)
    if name in NEEDS_ITS_LAST:
        with pytest.raises(sd.errors.DraftModelError, match=r"Leave|leave"):
            first_layers(model, num_layers)
        return
    short = first_layers(model, num_layers)
    ids, caches = mx.array([PROMPT]), make_prompt_cache(short)
    parts = [short(part, cache=caches) for part in mx.split(ids, [5, 6, 10], axis=1)]
    whole = short(ids, cache=make_prompt_cache(short))
    assert largest_difference(mx.concatenate(parts, axis=1), whole) < ROUGH.get(name, (1e-3,))[0]
    assert not caches[-1].empty()


@in_one_test("num_layers", [0, -1, 4])
def test_layers_that_there_are_not_are_refused(num_layers: int) -> None:
    with pytest.raises(sd.errors.DraftModelError, match="expected a number from 1 to 3"):
        first_layers(tiny.build("llama"), num_layers)


# On the command line ----------------------------------------------------------------------------

TEXT = "the cat in the hat and the other cat in the hat"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_model_folder(root / "model")
    return root


def accepted(folders: Path, *flags: str) -> tuple[str, int]:
    """The text, and how many of its tokens were drafted, with the target as the draft model."""
    model = str(folders / "model")
    draft = ("--draft-model", model, *flags) if flags else ()
    done = run(
        *("generate", "--model", model, "--prompt", TEXT, "--max-tokens", "60"),
        *("--draft-length", "4", *draft),
    )
    assert done.returncode == 0, done.stderr
    counted = done.stdout.partition("accepted ")[2].partition(" of")[0]
    return done.stdout.split("==========\n")[1], int(counted)


@both_ways
def test_each_flag_makes_another_draft_model_and_the_same_text(folders: Path) -> None:
    """The target itself, lighter: it is not always right any more."""
    expected, perfect = accepted(folders, "--drafter", "model")
    assert perfect == 47  # all but the first token's, and those after whole drafts
    bits, layers = ("--draft-bits", "2"), ("--draft-layers", "1")
    for flags in (bits, layers, bits + layers):
        text, count = accepted(folders, *flags)
        assert text == expected
        assert count < perfect


WRONG: dict[str, str] = {
    "generate --draft-bits 4": "--draft-bits: give --draft-model MODEL as well",
    "server --draft-layers 4": "--draft-layers: give --draft-model MODEL as well",
    "bench --draft-layers 4": "--draft-layers: give --draft-model MODEL as well",
    "generate --draft-model MODEL --draft-bits 7": "expected one of 2, 3, 4, 5, 6, 8",
    "chat --draft-model MODEL --draft-layers 99": "expected a number from 1 to",
    "server --draft-model MODEL --draft-layers 99": "expected a number from 1 to",
    "bench --draft-model MODEL --draft-bits 9": "expected one of 2, 3, 4, 5, 6, 8",
    "check --draft-model MODEL --draft-bits 9": "expected one of 2, 3, 4, 5, 6, 8",
    "generate --draft-model MODEL --draft-bits x": "expected an int >= 1",
}


@in_one_test("typed", WRONG)
def test_what_cannot_be_had_is_said_in_words(typed: str, folders: Path) -> None:
    """By every command that takes a draft model."""
    model = str(folders / "model")
    name, *flags = typed.replace("MODEL", model).split()
    done = run(name, "--model", model, *flags)
    assert done.returncode == 2
    assert WRONG[typed] in done.stderr
