"""Loading a trained head: what is recognised, what is refused and how, the ends of a target."""

from __future__ import annotations

import argparse
import json
import socket
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

import heads
import specdec_mlx as sd
import tiny
from selection import in_one_test
from specdec_mlx.checks import command as check
from specdec_mlx.cli import commands
from specdec_mlx.drafters.candidates import report
from specdec_mlx.drafters.draft_models import Lighter, NamedModel, choose_drafter, lighter_of
from specdec_mlx.drafters.heads.dflash import spread_layers
from specdec_mlx.drafters.heads.eagle import (
    IDS_KEY,
    Eagle3Config,
    default_layers,
    output_layers,
    windows_of,
)
from specdec_mlx.drafters.heads.formats import FORMATS, kind_of
from specdec_mlx.drafters.heads.known import heads_lines, known_repositories
from specdec_mlx.drafters.heads.loading import is_head
from specdec_mlx.drafters.heads.mtp import MTPHead, one_layer_model
from specdec_mlx.drafters.heads.mtp_families import FAMILIES, OTHER_FORMULAS
from specdec_mlx.drafters.heads.target_ends import DraftVocabulary, target_ends
from specdec_mlx.mlx_lm_plugin.flags import Flags
from specdec_mlx.mlx_lm_plugin.heads import with_heads
from specdec_mlx.mlx_lm_plugin.requests import Menu
from tiny_model_folder import write_model_folder

# What is recognised ------------------------------------------------------------------------------

EAGLE = ["fc.weight", "layers.0.self_attn.q_proj.weight"]
RECOGNISED: list[tuple[dict[str, Any], list[str], str | None]] = [
    ({"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000}, [], "eagle3"),
    ({"speculators_model_type": "eagle3", "transformer_layer_config": {}}, [], "eagle3"),
    ({"model_type": "llama"}, [*EAGLE, "midlayer.hidden_norm.weight"], "eagle3"),
    ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, EAGLE, "eagle"),
    ({"model_type": "qwen3", "architectures": ["DFlashDraftModel"]}, [], "dflash"),
    ({"model_type": "qwen3", "dflash_config": {"mask_token_id": 3}}, [], "dflash"),
    ({"speculators_model_type": "dflash", "draft_vocab_size": 64000}, [], "dflash"),
    ({"model_type": "llama", "pard_token": 128256}, [], "pard"),
    ({"medusa_num_heads": 2}, [], "medusa"),
    ({"model_type": "llama"}, ["0.0.linear.weight", "0.1.weight"], "medusa"),
    ({"model_type": "qwen3_5_mtp", "text_config": {}}, ["fc.weight"], "mtp"),
    ({"model_type": "qwen3_5", "text_config": {}}, ["mtp.fc.weight"], "mtp"),
    ({"model_type": "qwen3_5", "text_config": {}}, ["model.layers.0.x"], None),
    (
        {"model_type": "deepseek_v3", "num_hidden_layers": 61},
        ["model.layers.61.eh_proj.weight"],
        "mtp",
    ),
    (
        {"model_type": "glm4_moe", "num_hidden_layers": 46},
        ["model.layers.4.eh_proj.weight"],
        None,
    ),
    ({"model_type": "mimo"}, ["model.mtp_layers.0.input_proj.weight"], "mtp"),
    ({"model_type": "ernie4_5_moe"}, ["model.mtp_linear_proj.0.weight"], "mtp"),
    ({"model_type": "gemma4_assistant"}, [], "gemma4_assistant"),
    ({"speculators_model_type": "peagle"}, [], "peagle"),
    ({"model_type": "llama"}, ["model.embed_tokens.weight"], None),
]


@in_one_test(("config", "names", "kind"), RECOGNISED)
def test_a_head_is_told_by_its_config_and_its_tensors(
    config: dict[str, Any], names: list[str], kind: str | None
) -> None:
    """As the published repositories write them; a model of its own is none."""
    assert kind_of(config, names) == kind


@in_one_test("config", [{}, {IDS_KEY: []}, {"eagle_config": {IDS_KEY: []}}])
def test_a_config_that_names_no_layers_means_the_default(config: dict[str, Any]) -> None:
    """The paper's, whether the list is missing or empty."""
    assert Eagle3Config.read(config, 24).layers == default_layers(24)


def test_layers_in_either_convention_are_outputs() -> None:
    """First id 1: the outputs are named; first id 2: the inputs, one layer on."""
    assert output_layers([1, 11, 20]) == (1, 11, 20)
    assert output_layers([2, 12, 21]) == (1, 11, 20)
    assert default_layers(24) == (1, 11, 20)
    assert spread_layers(36, 5) == (1, 9, 17, 25, 33)
    assert spread_layers(40, 5) == (1, 10, 19, 28, 37)


DESCRIBED = {
    "eagle3": "EAGLE-3; reads the outputs of layers 1, 3, 4; 41 of 97 tokens",
    "eagle1": "EAGLE",
    "dflash": "DFlash; reads the outputs of layers 1, 3, 5; blocks of 4; windows of 4",
    "gemma4_assistant": "Gemma 4 assistant; reads the target's caches 2 (sliding_attention), 3 "
    "(full_attention); 5 of 12 groups of tokens",
    "mtp_deepseek_v3": "multi-token prediction; deepseek_v3 layer; reads the state after the "
    "final norm",
}


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_head_says_what_it_was_recognised_as(name: str, tmp_path: Path) -> None:
    """With what it reads, in its repr too."""
    reference = heads.reference(name)
    drafter = sd.load_head(reference.write(tmp_path), reference.target())
    assert drafter.describe() == f"{tmp_path}: {DESCRIBED[name]}"
    assert DESCRIBED[name] in repr(drafter)


def test_norms_converted_for_mlx_are_not_shifted_again(tmp_path: Path) -> None:
    """A repository made for MLX has its norms as they are applied, and often no prefix."""
    reference = heads.reference("mtp_qwen3_5")
    raw = sd.load_head(reference.write(tmp_path / "raw"), reference.target())
    shifted = {
        name.removeprefix("mtp."): value + 1 if value.ndim == 1 else value
        for name, value in reference.weights.items()
    }
    changed = heads.Reference(
        reference.config | {"model_type": "qwen3_5_mtp"}, shifted, reference.arrays
    )
    converted = sd.load_head(changed.write(tmp_path / "mlx", fmt="mlx"), reference.target())
    ours, theirs = (dict(tree_flatten(d.head.parameters())) for d in (raw, converted))
    assert ours.keys() == theirs.keys()
    assert all(mx.allclose(ours[name], theirs[name]) for name in ours)
    twice = sd.load_head(tmp_path / "mlx", reference.target(), norms_less_one=True)
    assert not mx.allclose(twice.head.hidden_norm.weight, ours["hidden_norm.weight"])


FAMILIES_OF_FIXTURES = (
    *("mtp_qwen3_5", "mtp_deepseek_v3", "mtp_exaone_moe", "mtp_longcat_flash"),
    *("mtp_nemotron_h", "mtp_step3p5", "mtp_mimo_v2_flash"),
)


@pytest.mark.parametrize("name", FAMILIES_OF_FIXTURES)
def test_only_the_files_that_hold_the_layer_are_opened(name: str, tmp_path: Path) -> None:
    """Of a whole model's repository, by its index; the other shards need not even be there."""
    reference = heads.reference(name)
    index = {"model.layers.0.mlp.up_proj.weight": "model-00001-of-00003.safetensors"}
    index |= {"model.embed_tokens.weight": "model-00001-of-00003.safetensors"}
    tensors = sorted(reference.weights)
    halves = (tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :])
    for number, names in enumerate(halves, 2):
        shard = f"model-{number:05}-of-00003.safetensors"
        weights = {name: reference.weights[name] for name in names}
        heads.Reference(reference.config, weights, {}).write(tmp_path)
        (tmp_path / "model.safetensors").rename(tmp_path / shard)
        index |= dict.fromkeys(names, shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    sharded = sd.load_head(tmp_path, reference.target()).head
    whole = sd.load_head(reference.write(tmp_path / "whole"), reference.target()).head
    assert sharded.kind.endswith("multi-token prediction")
    ours, theirs = (dict(tree_flatten(head.parameters())) for head in (sharded, whole))
    assert ours.keys() == theirs.keys()
    assert all(mx.array_equal(ours[path], theirs[path]) for path in ours)


@pytest.mark.parametrize("name", ["eagle3", "mtp_deepseek_v3", "mtp_step3p5"])
def test_bits_quantize_the_head_and_not_the_target(name: str, tmp_path: Path) -> None:
    """Its matrices, as far as their rows can be divided; experts too."""
    reference, target = heads.reference(name), heads.reference(name).target()
    drafter = sd.load_head(reference.write(tmp_path), target, draft_bits=4)
    kinds = {type(part).__name__ for _, part in drafter.head.named_modules()}
    assert "QuantizedLinear" in kinds
    assert not any(isinstance(part, nn.QuantizedLinear) for part in target.modules())
    rows = heads.features(drafter, reference.arrays["rows"])
    session = drafter.begin(reference.prompt, sd.DraftContext(vocab_size=heads.VOCAB))
    session.see(rows.rows(range(6)))
    assert len(session.propose(2)) == 2


@pytest.mark.parametrize("own", ["fc", "model.fc"])
def test_bits_of_a_single_matrix_are_read(own: str, tmp_path: Path) -> None:
    """A conversion with mixed bits names those of a layer apart; the head is what was written."""
    reference = heads.reference("eagle3")
    target = reference.target()
    head = sd.load_head(reference.write(tmp_path / "plain"), target).head
    bits = {"fc": 8, "lm_head": 3}
    nn.quantize(head, 32, 4, class_predicate=lambda path, part: quantized_as(path, part, bits))
    tensors: dict[str, Any] = dict(tree_flatten(head.parameters()))
    tensors |= {name: mx.array(reference.weights[name]) for name in ("d2t", "t2d")}
    written = {"group_size": 32, "bits": 4, own: {"group_size": 32, "bits": 8}}
    mixed = heads.Reference(reference.config | {"quantization": written}, {}, {})
    mixed.write(tmp_path / "mixed")
    mx.save_safetensors(str(tmp_path / "mixed" / "model.safetensors"), tensors)
    loaded = sd.load_head(tmp_path / "mixed", target).head
    ours, theirs = (dict(tree_flatten(one.parameters())) for one in (head, loaded))
    assert ours.keys() == theirs.keys()
    assert all(mx.array_equal(ours[name], theirs[name]) for name in ours)
    assert (loaded.fc.bits, loaded.lm_head.bits, loaded.layers[0].mlp.up_proj.bits) == (8, 3, 4)
    wider = heads.target(width=64)
    assert "states have 32 numbers" in refused(tmp_path / "mixed", wider)


def quantized_as(path: str, part: nn.Module, bits: dict[str, int]) -> bool | dict[str, int]:
    """How to quantize a layer: with bits of its own, or with 4."""
    if not hasattr(part, "to_quantized") or part.weight.shape[-1] % 32:
        return False
    return {"group_size": 32, "bits": bits.get(path, 4)}


WINDOWS: dict[str, tuple[dict[str, Any], tuple[int | None, ...]]] = {
    "kinds": (
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3},
        (None, 3),
    ),
    "Qwen's word": ({"use_sliding_window": True, "sliding_window": 3}, (3, 3)),
    "Qwen's later layers": (
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
        (None, 3),
    ),
    "Qwen's denial": (
        {
            "use_sliding_window": False,
            "sliding_window": 3,
            "layer_types": ["sliding_attention"] * 2,
        },
        (),
    ),
    "a size alone": ({"sliding_window": 3}, ()),
}


@in_one_test("said", WINDOWS)
def test_windows_are_those_that_the_config_means(said: str) -> None:
    """As Hugging Face's Llama and Qwen read these keys."""
    config, windows = WINDOWS[said]
    assert windows_of({"num_hidden_layers": 2, **config}) == windows


@pytest.mark.parametrize(
    "config",
    [
        {"layer_types": ["sliding_attention"], "sliding_window": 3},
        {"use_sliding_window": True, "sliding_window": 3},
    ],
)
def test_a_layer_with_a_window_forgets(config: dict[str, Any], tmp_path: Path) -> None:
    """A state follows from the last `window` pairs, however they are read, and from no others."""
    reference = heads.reference("eagle3")
    drafter = sd.load_head(reference.write(tmp_path, **config), reference.target())
    head: Any = drafter.head
    states, tokens = mx.random.normal((8, heads.WIDTH), key=mx.random.key(0)), mx.arange(8)

    def last(rows: mx.array, parts: list[int]) -> mx.array:
        cache, made, start = head.make_cache(), rows, 0
        for end in parts:
            made = head.step(rows[start:end], tokens[start:end], cache)
            start = end
        return made[-1]

    whole = last(states, [8])
    for parts in ([1, 2, 3, 4, 5, 6, 7, 8], [5, 8], [7, 8]):
        assert mx.allclose(last(states, parts), whole, atol=1e-5)
    for row in range(8):
        changed = mx.where(mx.arange(8)[:, None] == row, -states, states)
        assert bool(mx.allclose(last(changed, [8]), whole, atol=1e-5)) == (row < 5), row
    assert "windows of 3" in drafter.describe()


# What is refused ----------------------------------------------------------------------------------


def refused(folder: Path, target: nn.Module) -> str:
    """The message of the error."""
    with pytest.raises(sd.errors.HeadError) as error:
        sd.load_head(folder, target)
    return str(error.value)


def test_missing_tensors_are_listed(tmp_path: Path) -> None:
    """By the names that they have here; those that nobody knows too."""
    reference = heads.reference("eagle3")
    weights = dict(reference.weights)
    weights["midlayer.surprise.weight"] = weights.pop("norm.weight")
    broken = heads.Reference(reference.config, weights, reference.arrays)
    message = refused(broken.write(tmp_path), reference.target())
    assert "recognised as EAGLE-3" in message
    assert "lacks norm.weight" in message
    assert "no place for layers.0.surprise.weight" in message


MISSING = {
    "mtp_exaone_moe": ("mtp.layers.0.self_attn.q_norm.weight", "self_attn.q_norm.weight"),
    "mtp_longcat_flash": (
        "model.mtp.layers.0.transformer_layer.mlp.up_proj.weight",
        "body.layers.0.mlps.0.up_proj.weight",
    ),
    "mtp_nemotron_h": ("mtp.layers.1.final_layernorm.weight", "body.norm_f.weight"),
    "mtp_step3p5": ("model.layers.4.transformer.shared_head.output.weight", "layers.2.head.weight"),
    "mtp_mimo_v2_flash": ("model.mtp.layers.1.eh_proj.weight", "layers.1.projection.weight"),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_tensor_of_a_layer_is_named(name: str, tmp_path: Path) -> None:
    """Of any of its layers; without the first projection there is no such layer."""
    reference, (tensor, ours) = heads.reference(name), MISSING[name]
    weights = {key: x for key, x in reference.weights.items() if key != tensor}
    assert len(weights) == len(reference.weights) - 1
    folder = heads.Reference(reference.config, weights, {}).write(tmp_path / "one")
    assert f"{ours}. It is another variant, or not complete" in refused(folder, reference.target())
    first = next(key for key in weights if key.endswith(("eh_proj.weight", "fc.weight")))
    del weights[first]
    folder = heads.Reference(reference.config, weights, {}).write(tmp_path / "none")
    message = refused(folder, reference.target())
    assert "without the tensors of its multi-token prediction layer" in message
    assert "{" not in message


def test_a_head_of_another_target_is_refused(tmp_path: Path) -> None:
    """By the width of the states and by the vocabulary."""
    for name in ("eagle3", "eagle1", "dflash", "mtp_qwen3_5"):
        folder = heads.reference(name).write(tmp_path / name)
        message = refused(folder, heads.target(width=64))
        assert "states have 32 numbers" in message
        assert "have 64" in message
        message = refused(folder, heads.target(vocab=1000))
        assert "vocabulary of 97 tokens" in message
        assert "1000" in message


def test_a_model_without_its_layer_is_refused(tmp_path: Path) -> None:
    """Conversions for MLX leave these tensors out, and then say nothing of it."""
    reference = heads.reference("mtp_qwen3_5")
    weights = {"model.norm.weight": reference.weights["mtp.norm.weight"]}
    folder = heads.Reference(reference.config, weights, {}).write(tmp_path)
    message = refused(folder, reference.target())
    assert "qwen3_5 model without the tensors" in message
    assert "mtp." in message


def test_what_is_no_head_is_refused(tmp_path: Path) -> None:
    """A model of its own, a kind that cannot be loaded yet, an empty folder, none at all."""
    target = heads.target()
    reference = heads.reference("eagle1")
    model = heads.Reference({"model_type": "llama"}, {"x": reference.weights["fc.weight"]}, {})
    assert "no head of a known kind" in refused(model.write(tmp_path / "a"), target)
    known = heads.Reference({"hydra_num_heads": 3}, model.weights, {})
    assert FORMATS["hydra"].label in refused(known.write(tmp_path / "b"), target)
    known = heads.Reference({"model_type": "gemma4_assistant"}, model.weights, {})
    assert "text_config" in refused(known.write(tmp_path / "d"), target)
    (tmp_path / "c").mkdir()
    assert "has no config.json" in refused(tmp_path / "c", target)
    for text, said in (("[]", "holds a list"), ("{", "cannot be read")):
        (tmp_path / "c" / "config.json").write_text(text)
        assert said in refused(tmp_path / "c", target)


def test_an_assistant_needs_the_keys_that_its_queries_go_with(tmp_path: Path) -> None:
    """A target without a window, and one with wider keys, are refused; so is another width."""
    reference = heads.reference("gemma4_assistant")
    folder = reference.write(tmp_path)
    assert "sliding attention, and this target has no such cache" in refused(folder, heads.target())
    wider = heads.gemma4_target(global_head_dim=32)
    assert "keys of 16 numbers" in refused(folder, wider)
    assert "keys of 32 numbers" in refused(folder, wider)
    other = reference.write(tmp_path / "other", backbone_hidden_size=64)
    assert "64 numbers" in refused(other, reference.target())


def test_a_chosen_group_of_tokens_has_the_logits_of_the_whole_head(tmp_path: Path) -> None:
    """And all others have none."""
    reference = heads.reference("gemma4_assistant")
    head: Any = sd.load_head(reference.write(tmp_path), reference.target()).head
    states = mx.random.normal((3, 16), key=mx.random.key(1))
    some, all_of_them = head.logits(states), head.embed_tokens.as_linear(states)
    chosen = mx.isfinite(some)
    assert chosen.sum(axis=-1).tolist() == [5 * 96 // 12] * 3
    assert mx.allclose(mx.where(chosen, some, 0), mx.where(chosen, all_of_them, 0), atol=1e-5)


def test_is_head_tells_heads_from_models(tmp_path: Path) -> None:
    """By the configuration alone; what is not there is none."""
    assert is_head(heads.reference("eagle3").write(tmp_path / "a"))
    assert not is_head(heads.reference("mtp_qwen3_5").write(tmp_path / "b"))
    assert not is_head(tmp_path / "c")


def test_ids_that_the_target_lacks_are_refused() -> None:
    """A draft vocabulary of another target."""
    with pytest.raises(ValueError, match="0 to 4, and the target has 4"):
        DraftVocabulary(mx.array([0, 1, 2]), 4)


def test_a_head_is_refused_by_a_target_that_it_was_not_loaded_for(tmp_path: Path) -> None:
    """Before anything is computed."""
    reference = heads.reference("eagle1")
    drafter = sd.load_head(reference.write(tmp_path), reference.target())
    with pytest.raises(
        sd.errors.HeadError, match="loaded for a target with 97 tokens, and this one has"
    ):
        list(sd.speculate(tiny.build("qwen2"), [1, 2, 3], drafter))


# Other kinds --------------------------------------------------------------------------------------


def test_medusa_heads_load_from_their_names(tmp_path: Path) -> None:
    """Two heads of one block; the config may say another number."""
    arrays = np.random.default_rng(0).standard_normal((6, 97, 32)).astype(np.float32)
    weights = {}
    for j in range(2):
        weights[f"{j}.0.linear.weight"] = arrays[3 * j, :32]
        weights[f"{j}.0.linear.bias"] = arrays[3 * j + 1, 0]
        weights[f"{j}.1.weight"] = arrays[3 * j + 2]
    folder = heads.Reference({"medusa_num_heads": 5}, weights, {}).write(tmp_path)
    drafter = sd.load_head(folder, heads.target())
    assert drafter.describe().endswith("Medusa; 2 heads")
    x = arrays[0, 40]
    y = weights["1.0.linear.weight"] @ x + weights["1.0.linear.bias"]
    expected = weights["1.1.weight"] @ (x + y / (1 + np.exp(-y)))
    assert np.allclose(drafter.head.guesses(0, 2, [mx.array(x)[None]])[1], expected, atol=1e-3)
    more = heads.Reference({"medusa_num_heads": 5}, {**weights, "a.b": arrays[0]}, {})
    assert "no place for a.b" in refused(more.write(tmp_path), heads.target())


def test_pard_loads_as_the_model_that_it_is(tmp_path: Path) -> None:
    """With the mask token of its config."""
    write_model_folder(tmp_path, pard_token=17)
    drafter = sd.load_head(tmp_path, heads.target())
    assert isinstance(drafter, sd.drafters.PardDrafter)
    assert drafter.describe() == "PARD; mask token 17"
    assert drafter.tokenizer is not None


@in_one_test("name", OTHER_FORMULAS)
def test_another_formula_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """Original repositories of these have such a layer, and it says why it cannot be loaded."""
    model = heads.Reference({"model_type": name}, {"mtp.x": np.zeros(3, np.float32)}, {})
    message = refused(model.write(tmp_path), heads.target())
    assert f"the multi-token prediction of {name} {OTHER_FORMULAS[name]}" in message


@pytest.mark.parametrize(
    "name",
    [
        *("mimo", "ernie4_5_moe", "bailing_moe", "bailing_hybrid", "bailing_moe_v3"),
        *("exaone_moe", "longcat_flash", "step3p5", "nemotron_h", "mimo_v2_flash"),
    ],
)
def test_layers_of_other_families_load_from_their_names(name: str, tmp_path: Path) -> None:
    """Every tensor has its place, under the names of the original repository."""
    family = FAMILIES[name]
    config = tiny.CONFIGS[name] | {"model_type": name}
    target = heads.target(width=config["hidden_size"], vocab=config["vocab_size"])
    made = heads.random_head(heads.mtp(name), target)
    stored = heads.as_published(made, family, config)
    stored |= {"model.embed_tokens.weight": mx.zeros((3, 3)), "model.norm.weight": mx.zeros(3)}
    folder = heads.Reference(config, {n: np.array(x) for n, x in stored.items()}, {})
    loaded = sd.load_head(folder.write(tmp_path), target, norms_less_one=False).head
    ours, theirs = (dict(tree_flatten(head.parameters())) for head in (made, loaded))
    assert ours.keys() == theirs.keys()
    assert all(mx.array_equal(ours[path], theirs[path]) for path in ours)


SAID_OF_LAYERS: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "EXAONE's says nothing": ("exaone_moe", 0, {}, {"window": None, "rotates": False}),
    "EXAONE's has a window": (
        "exaone_moe",
        0,
        {"mtp_layer_types": ["sliding_attention"], "mtp_sliding_windows": [3]},
        {"window": 3, "rotates": True},
    ),
    "EXAONE has no windows": (
        "exaone_moe",
        0,
        {"layer_types": ["full_attention"] * 4},
        {"window": None, "rotates": True},
    ),
    "Step's third": (
        "step3p5",
        2,
        {"rope_theta": [1e4] * 4 + [1.0, 2.0, 3.0], "layer_types": ["full_attention"] * 7},
        {"window": None, "theta": 3.0, "heads": 4},
    ),
    "Step's lists end before": ("step3p5", 1, {}, {"window": 16, "theta": 1000.0, "heads": 6}),
    "Step's kinds are not said": ("step3p5", 0, {"layer_types": None}, {"window": 16, "heads": 6}),
    "Nemotron's says nothing": ("nemotron_h", 0, {}, {"kinds": "*E"}),
    "Nemotron's pattern": (
        "nemotron_h",
        0,
        {"mtp_hybrid_override_pattern": "*E*-"},
        {"kinds": "*E*-"},
    ),
    "Nemotron's list": (
        "nemotron_h",
        0,
        {"mtp_layers_block_type": ["moe", "attention"], "mtp_hybrid_override_pattern": None},
        {"kinds": "E*"},
    ),
}


@in_one_test("said", SAID_OF_LAYERS)
def test_a_layer_is_made_by_what_the_config_says_of_it(said: str) -> None:
    """Not by what it says of the target's own layers; and it can be run."""
    name, depth, changes, expected = SAID_OF_LAYERS[said]
    config = tiny.CONFIGS[name] | changes
    family = FAMILIES[name]
    model = one_layer_model(family, config, depth)
    head = MTPHead(family, config, target_ends(tiny.build(name)), depth)
    layers = getattr(model, family.body).layers
    attention = layers[0].get("self_attn", {})
    caches = head.make_cache()
    found = {
        "window": getattr(caches[0], "max_size", None),
        "rotates": "rope" in attention,
        "theta": getattr(attention.get("rope"), "base", None),
        "heads": getattr(attention, "num_heads", None),
        "kinds": "".join(getattr(layer, "block_type", "") for layer in layers),
    }
    assert {key: found[key] for key in expected} == expected
    states = head.step(mx.zeros((3, head.width)), mx.array([1, 2, 3]), caches)
    assert mx.isfinite(head.logits(states)).all()


def test_a_folder_of_a_head_may_stand_for_a_draft_model(tmp_path: Path) -> None:
    """In `generate` and on the command line, which loads the target first."""
    assert not is_head(heads.reference("eagle1").write(tmp_path / "eagle1")), "it does not say so"
    folder = heads.reference("eagle3").write(tmp_path / "eagle3")
    target = heads.reference("eagle3").target()
    assert isinstance(choose_drafter(None, folder, target), sd.drafters.HeadDrafter)
    flags = Flags(draft_model=str(folder), lighter=Lighter(bits=8))
    assert flags.has_head
    assert isinstance(flags.drafter(target), sd.drafters.HeadDrafter)
    with pytest.raises(ValueError, match="made for a loaded target, which this command"):
        flags.drafter()
    assert not Flags().has_head


def test_a_drafters_options_are_those_that_the_head_is_loaded_with(tmp_path: Path) -> None:
    """On the command line, and of a request to the server; wrong ones are named, not dropped."""
    folder = heads.reference("eagle3").write(tmp_path / "eagle3")
    target = heads.reference("eagle3").target()
    spec = "model:branches=4,greedy=true,draft_temp=1"
    flags = Flags(drafters=[spec], draft_model=str(folder))
    requested = Menu(flags).requested({"drafter": "model"}).drafter
    parser = argparse.ArgumentParser()
    check.add_arguments(parser)
    arguments = parser.parse_args(["--draft-model", str(folder), "--drafter", spec])
    checked = NamedModel(arguments.draft_model, lighter_of(arguments)).make(spec, target)
    for drafter in (flags.drafter(target), with_heads(requested, target), checked):
        assert isinstance(drafter, sd.drafters.HeadDrafter)
        assert (drafter.branches, drafter.greedy, drafter.draft_temp) == (4, True, 1.0)
    for wrong, named in (
        ("model:twigs=4", r"twigs.*See help\(load_head\)"),
        ("model:branches=many", "branches is 'many', expected int"),
        ("model:branches=0", "expected an int >= 1"),
    ):
        with pytest.raises(ValueError, match=named):
            flags.make(wrong, target)
    with pytest.raises(ValueError, match="with --online a trained head takes no options"):
        Flags(draft_model=str(folder), online=True).make(spec, target)


def test_heads_for_a_model_are_listed(tmp_path: Path) -> None:
    """Those here that fit, those that do not with the reason, those known by the model's name."""
    write_model_folder(tmp_path / "Qwen3-8B-4bit")
    heads.reference("eagle3").write(tmp_path / "narrow", vocab_size=None)
    heads.reference("eagle3").write(tmp_path / "fits", hidden_size=64, vocab_size=None)
    heads.reference("eagle3").write(tmp_path / "other", vocab_size=9999)
    heads.reference("gemma4_assistant").write(tmp_path / "assistant", backbone_hidden_size=64)
    heads.Reference({"exit_layer": 1, "hidden_size": 64}, {}, {}).write(tmp_path / "exit")
    text = report(str(tmp_path / "Qwen3-8B-4bit"), tmp_path)
    assert "  assistant  Gemma 4 assistant, " in text
    assert "  fits  EAGLE-3, here\n" in text
    assert "  exit  trained exit, here\n" in text
    assert "  narrow  EAGLE-3, another width\n" in text
    assert "  other  EAGLE-3, another vocabulary\n" in text
    assert "  AngelSlim/Qwen3-8B_eagle3  to be fetched" in text
    assert "Left out" not in text


def test_what_fits_is_told_by_the_targets_config(tmp_path: Path) -> None:
    """An assistant reads the caches of a Gemma 4; a model whose own layer is known, or is not."""
    assistant = heads.reference("gemma4_assistant").write(tmp_path / "assistant")
    found = [("assistant", assistant)]
    sizes = {"hidden_size": 32, "vocab_size": 97}
    said = {
        "gemma4_text": "  assistant  Gemma 4 assistant, here",
        "llama": "  assistant  Gemma 4 assistant, for Gemma 4",
        "glm4_moe": "  its original repository  multi-token prediction, to be fetched",
        "deepseek_v41": "multi-token prediction, not to be loaded: it is DSpark",
    }
    for model_type, line in said.items():
        folder = tmp_path / model_type
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(sizes | {"model_type": model_type}))
        assert any(line in text for text in heads_lines("m", folder, found)), model_type


@in_one_test(
    ("model", "repository"),
    [
        ("mlx-community/Meta-Llama-3.1-8B-Instruct-4bit", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"),
        ("mlx-community/Qwen3.5-4B-4bit", "z-lab/Qwen3.5-4B-DFlash"),
        ("Qwen/Qwen3-0.6B", "amd/PARD-Qwen3-0.6B"),
    ],
)
def test_known_repositories_are_found_by_the_models_name(model: str, repository: str) -> None:
    """However it was converted; not those of a model whose name goes on."""
    found = known_repositories(model)
    assert found[repository] == ""
    assert len(known_repositories(model.replace("B", "Bx").replace("wen", "wenx"))) <= 1
    assert ("amd/PARD-Qwen3-0.6B" in found) == ("Qwen3-" in model)


RELATIVES = {
    "Qwen/Qwen3-4B": None,
    "mlx-community/Qwen3-4B-4bit-DWQ-053125": None,
    "mlx-community/Qwen3-4B-MLX-bf16": None,
    "lmstudio-community/Qwen3-4B-mxfp4_gs32": None,
    "Qwen/Qwen3-4B-Base": "qwen3-4b-base",
    "Qwen/Qwen3-4B-Instruct-2507": "qwen3-4b-instruct-2507",
    "mlx-community/Qwen3-4B-Thinking-2507-4bit": "qwen3-4b-thinking-2507-4bit",
}


@in_one_test("model", RELATIVES)
def test_a_head_of_a_relative_is_not_listed_as_if_it_were_the_models_own(
    model: str, tmp_path: Path
) -> None:
    """It was trained on another model's states; one that serves a family, PARD, needs no word."""
    own = RELATIVES[model]
    note = "" if own is None else f", made for qwen3-4b, not for {own}"
    assert known_repositories(model) == {
        "amd/PARD-Qwen3-0.6B": "",
        "AngelSlim/Qwen3-4B_eagle3": note,
        "z-lab/Qwen3-4B-DFlash-b16": note,
    }
    head = heads.reference("eagle3").write(tmp_path / "head", vocab_size=None)
    config = {"model_type": "qwen3", "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    here = heads_lines(model, tmp_path, [("AngelSlim/Qwen3-4B_eagle3", head)])
    assert f"  AngelSlim/Qwen3-4B_eagle3  EAGLE-3, here{note}" in here


def test_heads_are_listed_for_a_name_that_is_not_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the name alone: nothing is fetched, and it is said that nothing here was compared."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "nothing"))
    monkeypatch.setattr(socket, "socket", None)
    assert commands.main(["drafters", "--model", "Qwen/Qwen3-4B-Instruct-2507"]) == 0
    said = capsys.readouterr().out
    assert "  prompt-lookup  " in said
    assert "Qwen/Qwen3-4B-Instruct-2507 is no folder here and not in the Hugging Face cache" in said
    assert "  amd/PARD-Qwen3-0.6B  to be fetched\n" in said
    assert "_eagle3  to be fetched, made for qwen3-4b, not for qwen3-4b-instruct-2507" in said
    assert commands.main(["drafters", "--model", "nobody/nothing"]) == 0
    assert "hf download nobody/nothing" in capsys.readouterr().out
    assert commands.main(["drafters", "--model", "./nowhere"]) == 2


# The ends of a target -----------------------------------------------------------------------------

ENDS = ("llama", "qwen2", "gemma2", "gpt2", "qwen3_5", "deepseek_v3", "mamba2", "phi")


@in_one_test("name", ENDS)
def test_the_ends_of_a_target_are_found(name: str) -> None:
    """The head of its last state makes its logits, up to a cap; its embedding has its width."""
    model = tiny.build(name)
    before = {path: type(part) for path, part in model.named_modules()}
    ends = target_ends(model)
    assert {path: type(part) for path, part in model.named_modules()} == before
    assert ends.vocab_size == model(mx.array([[1]])).shape[-1]
    assert ends.num_layers == len(model.layers)
    states = mx.random.normal((3, ends.width))
    assert ends.logits(states).shape == (3, ends.vocab_size)
    assert ends.embed(mx.array([1, 2])).shape[0] == 2


def test_gemmas_embedding_is_the_bare_matrix() -> None:
    """Without the square root of the width, which heads are trained without."""
    model = tiny.build("gemma2")
    expected = model.model.embed_tokens.weight[3:4]
    assert mx.array_equal(target_ends(model).embed(mx.array([3])), expected)


def divisible(part: nn.Module) -> bool | dict[str, int]:
    fits = hasattr(part, "to_quantized") and part.weight.shape[-1] % 32 == 0
    return {"group_size": 32, "bits": 4} if fits else False


def test_a_quantized_target_lends_its_ends() -> None:
    """Of another class, found in the same way."""
    model = heads.target(width=64)
    nn.quantize(model, class_predicate=lambda path, part: divisible(part))
    ends = target_ends(model)
    assert (ends.width, ends.vocab_size) == (64, heads.VOCAB)
    assert ends.logits(ends.embed(mx.array([1]))).shape == (1, heads.VOCAB)
