"""Loading a trained head: what is recognised, what is refused and how, the ends of a target."""

from __future__ import annotations

import argparse
import json
import re
import socket
from dataclasses import replace
from functools import partial
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
from selection import cases, in_one_test
from serving import drafter_of
from specdec_mlx.cli import commands
from specdec_mlx.drafters.choosing import candidates
from specdec_mlx.drafters.choosing.candidates import known_repositories
from specdec_mlx.drafters.choosing.choice import (
    DrafterChoice,
    DraftModel,
    choice_of,
    resolve,
)
from specdec_mlx.drafters.choosing.report import heads_lines, report
from specdec_mlx.drafters.heads.drafter import DraftVocabulary, anatomy_for_head
from specdec_mlx.drafters.heads.eagle import IDS_KEY, fused_layers
from specdec_mlx.drafters.heads.loading import FORMATS, is_head, kind_of
from specdec_mlx.drafters.heads.mtp import FAMILIES, OTHER_FORMULAS, MTPHead, one_layer_model
from specdec_mlx.drafters.heads.one_pass import block_layers
from specdec_mlx.errors import HeadError
from specdec_mlx.lab.commands import check
from specdec_mlx.mlx_lm_plugin.flags import Flags
from tiny_model_folder import write_model_folder

# What is recognised ------------------------------------------------------------------------------

LLAMA, QWEN = {"model_type": "llama"}, {"model_type": "qwen3_5", "text_config": {}}
DEEPSEEK = {"model_type": "deepseek_v3", "num_hidden_layers": 61}
EAGLE = ["fc.weight", "layers.0.self_attn.q_proj.weight"]
RECOGNISED: list[tuple[dict[str, Any], list[str], str | None]] = [
    ({"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000}, [], "eagle3"),
    (LLAMA, [*EAGLE, "midlayer.hidden_norm.weight"], "eagle3"),
    (LLAMA | {"architectures": ["LlamaForCausalLM"]}, EAGLE, "eagle"),
    ({"model_type": "qwen3", "architectures": ["DFlashDraftModel"]}, [], "dflash"),
    ({"speculators_model_type": "dflash", "draft_vocab_size": 64000}, [], "dflash"),
    (LLAMA | {"pard_token": 128256}, [], "pard"),
    (LLAMA, ["0.0.linear.weight", "0.1.weight"], "medusa"),
    ({"hydra_num_heads": 4}, ["hydra_mlp.0.0.linear.weight"], "hydra"),
    (QWEN | {"model_type": "qwen3_5_mtp"}, ["fc.weight"], "mtp"),
    (QWEN, ["mtp.fc.weight"], "mtp"),
    (DEEPSEEK, ["model.layers.61.eh_proj.weight"], "mtp"),
    (DEEPSEEK, ["model.layers.4.eh_proj.weight"], None),
    ({"model_type": "ernie4_5_moe"}, ["model.mtp_linear_proj.0.weight"], "mtp"),
    ({"model_type": "gemma4_assistant"}, [], "gemma4_assistant"),
    ({"model_type": "gemma4", "num_assistant_tokens": 4}, [], None),
    ({"model_type": "mimo", "use_mtp": True}, [], None),
    ({"speculators_model_type": "peagle"}, [], "peagle"),
    (LLAMA, ["model.embed_tokens.weight"], None),
]


@in_one_test(("config", "names", "kind"), RECOGNISED)
def test_a_head_is_told_by_its_config_and_its_tensors(config, names, kind):
    """As the published repositories write them; a model of its own is none."""
    assert kind_of(config, names) == kind


def test_layers_in_either_convention_are_outputs() -> None:
    """First id 1: the outputs are named; first id 2: the inputs; none: the authors' defaults."""
    configs = [{}, *({IDS_KEY: ids} for ids in ([], [1, 11, 20], [2, 12, 21]))]
    for config in configs:
        assert fused_layers(config, 24) == (1, 11, 20)
    for num_layers, layers in ((36, [1, 9, 17, 25, 33]), (40, [1, 10, 19, 28, 37])):
        assert block_layers({}, 5, num_layers) == layers


DESCRIBED = {
    "dflash": "DFlash; reads the outputs of layers 1, 3, 5; blocks of 4; looks back 128 "
    "positions; windows of 4",
    "gemma4_assistant": "Gemma 4 assistant; reads the target's caches 2 (sliding_attention), 3 "
    "(full_attention); 5 of 12 groups of tokens",
    "mtp_deepseek_v3": "multi-token prediction; deepseek_v3 layer; reads the state after the "
    "final norm",
}


@in_one_test("name", DESCRIBED)
def test_a_head_says_what_it_was_recognised_as(name: str, tmp_path: Path) -> None:
    """With what it reads; one for another target is refused when it is used."""
    drafter = heads.loaded(name, tmp_path)
    assert drafter.describe() == f"{tmp_path}: {DESCRIBED[name]}"
    with pytest.raises(HeadError, match="loaded for a target with 97 tokens, and this"):
        list(sd.speculate(tiny.build("qwen2"), [1, 2, 3], drafter))


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    """True if both have the same parameters."""
    ours, theirs = (dict(tree_flatten(head.parameters())) for head in (one, other))
    same = {name for name in ours.keys() & theirs.keys() if mx.allclose(ours[name], theirs[name])}
    return same == ours.keys() == theirs.keys()


def test_norms_converted_for_mlx_are_not_shifted_again(tmp_path: Path) -> None:
    """A repository made for MLX has its norms as they are applied, and often no prefix."""
    reference = heads.reference("mtp_qwen3_5")
    raw = heads.loaded("mtp_qwen3_5", tmp_path / "raw")
    shifted = {
        name.removeprefix("mtp."): value + 1 if value.ndim == 1 else value
        for name, value in reference.weights.items()
    }
    config = reference.config | {"model_type": "qwen3_5_mtp"}
    folder = heads.Reference(config, shifted, {}).write(tmp_path / "mlx", fmt="mlx")
    assert same_weights(raw.head, sd.load_head(folder, reference.target()).head)
    twice = sd.load_head(folder, reference.target(), norms_less_one=True)
    assert not same_weights(raw.head, twice.head)


@pytest.mark.parametrize("name", ["eagle3", "mtp_deepseek_v3", "mtp_step3p5"])
def test_bits_quantize_the_head_and_not_the_target(name: str, tmp_path: Path) -> None:
    """Its matrices, as far as their rows can be divided; experts too."""
    reference, target = heads.reference(name), heads.reference(name).target()
    drafter = sd.load_head(reference.write(tmp_path), target, draft_bits=4)
    assert any(isinstance(part, nn.QuantizedLinear) for part in drafter.head.modules())
    assert not any(isinstance(part, nn.QuantizedLinear) for part in target.modules())
    session = drafter.begin(reference.prompt, sd.drafters.DraftContext(vocab_size=heads.VOCAB))
    session.see(heads.features(drafter, reference.arrays["rows"]).rows(range(6)))
    assert len(session.propose(2)) == 2
    for wrong in (0, 7, True):
        with pytest.raises(ValueError, match=f"draft_bits={wrong!r}: expected one of"):
            sd.load_head(tmp_path, target, draft_bits=wrong)


@in_one_test("own", ["fc", "model.fc"])
def test_bits_of_a_single_matrix_are_read(own: str, tmp_path: Path) -> None:
    """A conversion with mixed bits names those of a layer apart; the head is what was written."""
    reference, bits = heads.reference("eagle3"), {"fc": 8, "lm_head": 3}

    def quantized_as(path: str, part: nn.Module) -> bool | dict[str, int]:
        if not hasattr(part, "to_quantized") or part.weight.shape[-1] % 32:
            return False
        return {"group_size": 32, "bits": bits.get(path, 4)}

    head = heads.loaded("eagle3", tmp_path / "plain").head
    nn.quantize(head, 32, 4, class_predicate=quantized_as)
    tensors: dict[str, Any] = dict(tree_flatten(head.parameters()))
    tensors |= {name: mx.array(reference.weights[name]) for name in ("d2t", "t2d")}
    written = {"group_size": 32, "bits": 4, own: {"group_size": 32, "bits": 8}}
    mixed = heads.Reference(reference.config | {"quantization": written}, {}, {})
    mx.save_safetensors(str(mixed.write(tmp_path / "mixed") / "model.safetensors"), tensors)
    loaded = sd.load_head(tmp_path / "mixed", reference.target()).head
    assert same_weights(head, loaded)
    assert (loaded.fc.bits, loaded.lm_head.bits, loaded.layers[0].mlp.up_proj.bits) == (8, 3, 4)
    with pytest.raises(HeadError, match="quantized form, so draft_bits=8 has no effect"):
        sd.load_head(tmp_path / "mixed", reference.target(), draft_bits=8)
    assert "states have 32 numbers" in refused(tmp_path / "mixed", heads.target(width=64))


SIZE, SLIDING = {"sliding_window": 3}, "sliding_attention"


def test_a_layer_with_a_window_forgets(tmp_path: Path) -> None:
    """A state follows from the last `window` pairs, however they are read, and from no others."""
    head: Any = heads.loaded("eagle3", tmp_path, layer_types=[SLIDING], **SIZE).head
    states, tokens = mx.random.normal((8, heads.WIDTH), key=mx.random.key(0)), mx.arange(8)

    def last(rows: mx.array, size: int = 8) -> mx.array:
        cache = head.make_cache()
        parts = [slice(start, start + size) for start in range(0, 8, size)]
        return [head.step(rows[part], tokens[part], cache) for part in parts][-1][-1]

    for size in (1, 5, 7):
        assert mx.allclose(last(states, size), last(states), atol=1e-5)
    for row in range(8):
        changed = mx.where(mx.arange(8)[:, None] == row, -states, states)
        assert bool(mx.allclose(last(changed), last(states), atol=1e-5)) == (row < 5), row


# What is refused ----------------------------------------------------------------------------------


def refused(folder: Path, target: nn.Module) -> str:
    """The message of the error."""
    with pytest.raises(HeadError) as error:
        sd.load_head(folder, target)
    return str(error.value)


MISSING = {
    "eagle3": ("norm.weight", "norm.weight"),
    "mtp_exaone_moe": ("mtp.layers.0.mlp.up_proj.weight", "body.layers.0.mlp.up_proj.weight"),
    "mtp_longcat_flash": (
        "model.mtp.layers.0.transformer_layer.mlp.up_proj.weight",
        "body.layers.0.mlps.0.up_proj.weight",
    ),
    "mtp_nemotron_h": ("mtp.layers.1.final_layernorm.weight", "body.norm_f.weight"),
    "mtp_step3p5": ("model.layers.4.transformer.shared_head.norm.weight", "further.1.norm.weight"),
    "mtp_mimo_v2_flash": ("model.mtp.layers.1.eh_proj.weight", "further.0.projection.weight"),
}


@in_one_test("name", MISSING)
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    """By its name here, like one that nobody knows; without its projection there is no layer."""
    reference, (tensor, ours) = heads.reference(name), MISSING[name]

    def said(folder: str, weights: heads.Arrays) -> str:
        written = heads.Reference(reference.config, weights, {}).write(tmp_path / folder)
        return refused(written, reference.target())

    weights = dict(reference.weights)
    more = {f"{tensor}.x": weights.pop(tensor)}
    assert f"1 parameters not in model: {ours}.x.)" in said("more", {**reference.weights, **more})
    fewer = said("fewer", weights)
    assert f"Missing 1 parameters: {ours}.). It is another variant" in fewer
    assert "Fetch it again, or use a head" in fewer
    assert "has no tensors. Fetch its" in said("nothing", {})
    if name == "eagle3":
        del weights["d2t"]
        assert "drafts 41 of 97 tokens, and its tensor d2t" in said("numbers", weights)
    if name.startswith("mtp"):
        ends = ("eh_proj.weight", "fc.weight")
        del weights[next((key for key in weights if key.endswith(ends)), "")]
        model_type = reference.config["model_type"]
        assert f"{model_type} model without the tensors of its multi-" in said("none", weights)


def test_a_head_of_another_target_is_refused(tmp_path: Path) -> None:
    """By the width of the states and by the vocabulary, also that of its own tokens."""
    for name in ("eagle3", "eagle1", "dflash", "mtp_qwen3_5"):
        folder = heads.reference(name).write(tmp_path / name)
        assert "states have 32 numbers" in refused(folder, heads.target(width=64))
        said = "vocabulary of 97 tokens, and this target has 1000"
        assert said in refused(folder, heads.target(vocab=1000))
    with pytest.raises(ValueError, match="0 to 4, and the target has 4"):
        DraftVocabulary(mx.array([0, 2, 4]), anatomy_for_head(heads.target(vocab=4)))


def test_what_is_no_head_is_refused(tmp_path: Path) -> None:
    """A model of its own, a kind that cannot be loaded yet, an empty folder, none at all."""
    tensors = {"x": heads.reference("eagle1").weights["fc.weight"]}
    said = {"llama": "no head of a known kind", "gemma4_assistant": "text_config"}
    said |= {name: f"prediction of {name} {reason}" for name, reason in OTHER_FORMULAS.items()}
    said["eagle4"] = FORMATS["eagle4"].label
    for name, words in said.items():
        config = {"model_type": name, name: 3}
        folder = heads.Reference(config, tensors, {}).write(tmp_path / name)
        assert words in refused(folder, heads.target())
        assert is_head(folder) == (name in ("gemma4_assistant", "eagle4"))
    (tmp_path / "c").mkdir()
    assert "has no config.json" in refused(tmp_path / "c", heads.target())
    assert not is_head(tmp_path / "c")


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


# Other kinds --------------------------------------------------------------------------------------


def test_medusa_heads_load_from_their_names(tmp_path: Path) -> None:
    """As many as there are, whatever the config says; what has no place is named."""
    reference = heads.reference("medusa")
    drafter = heads.loaded("medusa", tmp_path, medusa_num_heads=5)
    assert drafter.describe().endswith("Medusa; 2 heads")
    assert mx.array_equal(drafter.head.lm_heads[1].weight, reference.weights["1.1.weight"])
    more = {**reference.weights, "a.b": np.zeros(3), "10000000.0.linear.bias": np.zeros(3)}
    message = refused(heads.Reference(reference.config, more, {}).write(tmp_path), heads.target())
    assert "2 parameters not in model: a.b, blocks.10000000.0.bias" in message


def test_pard_loads_as_the_model_that_it_is(tmp_path: Path) -> None:
    """With the mask token of its config."""
    write_model_folder(tmp_path, pard_token=17)
    drafter = sd.load_head(tmp_path, heads.target())
    assert isinstance(drafter, sd.drafters.PardDrafter)
    assert drafter.describe() == "PARD; mask token 17"
    assert drafter.tokenizer is not None


OPTIONS_OF_OTHER_FORMATS: list[tuple[str, dict[str, Any]]] = [
    ("eagle3", {"pre_norm": True}),
    ("eagle3", {"norms_less_one": False}),
    ("eagle1", {"norms_less_one": True}),
    ("mtp_qwen3_5", {"layers": [1]}),
]


@in_one_test(("name", "option"), OPTIONS_OF_OTHER_FORMATS)
def test_an_option_without_meaning_for_a_format_is_refused(name, option, tmp_path):
    reference = heads.reference(name)
    folder = reference.write(tmp_path / f"{name} {[*option]}")
    with pytest.raises(HeadError, match=f"{next(iter(option))} has no meaning for this format"):
        sd.load_head(folder, reference.target(), **option)


OTHERS = ["mimo", "ernie4_5_moe", "bailing_moe", "bailing_hybrid", "bailing_moe_v3"]


@pytest.mark.parametrize("name", cases(OTHERS, "mimo", "bailing_hybrid"))
def test_layers_of_other_families_load_from_their_names(name: str, tmp_path: Path) -> None:
    """Those of the original repository; `test_heads_parity` loads the others'."""
    family, config = FAMILIES[name], tiny.CONFIGS[name] | {"model_type": name}
    target = heads.target(width=config["hidden_size"], vocab=config["vocab_size"])
    made = heads.random_head(heads.mtp(name), target)
    stored = heads.as_published(made, family, config)
    stored |= {"model.embed_tokens.weight": mx.zeros((3, 3)), "model.norm.weight": mx.zeros(3)}
    folder = heads.Reference(config, {n: np.array(x) for n, x in stored.items()}, {})
    loaded = sd.load_head(folder.write(tmp_path), target, norms_less_one=False)
    assert same_weights(made, loaded.head)


FULL = ["full_attention"]
THETAS = {"rope_theta": [1e4] * 4 + [1.0, 2.0, 3.0], "layer_types": FULL * 7}
SLIDES = {"mtp_layer_types": [SLIDING], "mtp_sliding_windows": [3]}
SAID_OF_LAYERS: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("exaone_moe", 0, SLIDES, {"window": 3, "rotates": True}),
    ("exaone_moe", 0, {"layer_types": FULL * 4}, {"window": None, "rotates": True}),
    ("step3p5", 2, THETAS, {"window": None, "theta": 3.0, "heads": 4}),
    ("step3p5", 1, {}, {"window": 16, "theta": 1000.0, "heads": 6}),
    ("step3p5", 0, {"layer_types": None}, {"window": 16, "heads": 6}),
    ("nemotron_h", 0, {"mtp_hybrid_override_pattern": "*E*-"}, {"kinds": "*E*-"}),
    ("nemotron_h", 0, {"mtp_layers_block_type": ["moe", "attention"]}, {"kinds": "E*"}),
]


@in_one_test(("name", "depth", "changes", "expected"), SAID_OF_LAYERS)
def test_a_layer_is_made_by_what_the_config_says_of_it(name, depth, changes, expected):
    """Not by what it says of the target's own layers; and it can be run."""
    family, config = FAMILIES[name], tiny.CONFIGS[name] | changes
    head = MTPHead(family, config, anatomy_for_head(tiny.build(name)), depth)
    layers = getattr(one_layer_model(family, config, depth), family.body).layers
    attention, caches = layers[0].get("self_attn", {}), head.make_cache()
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


# Typed and listed ---------------------------------------------------------------------------------


def test_a_folder_of_a_head_may_stand_for_a_draft_model(tmp_path: Path) -> None:
    """With the options that it is loaded with; wrong ones are named, not dropped."""
    assert not is_head(heads.reference("eagle1").write(tmp_path / "eagle1")), "it does not say so"
    folder = heads.reference("eagle3").write(tmp_path / "eagle3")
    target, spec = (
        heads.reference("eagle3").target(),
        "model:branches=4,greedy=true,draft_temp=1,draft_bits=8",
    )
    assert isinstance(resolve(folder, None, target), sd.drafters.HeadDrafter)
    head = DraftModel(folder)
    flags = Flags(DrafterChoice([spec], head))
    learning = replace(flags, online=True)
    assert (flags.waits_for_target, Flags().waits_for_target) == (True, False)
    unnamed, ordered = Flags(DrafterChoice(model=head)), Flags(DrafterChoice(["ngram"], head))
    assert type(unnamed.drafter(target)) is type(ordered.drafter(target)) is sd.BestOf
    requested = drafter_of(flags, target, drafters=["model"])
    parser = argparse.ArgumentParser()
    check.add_arguments(parser)
    arguments = parser.parse_args(["--draft-model", str(folder), "--drafter", spec])
    checked = choice_of(arguments).resolve(target)
    for drafter in (flags.drafter(target), requested, checked):
        assert isinstance(drafter, sd.drafters.HeadDrafter)
        assert (drafter.branches, drafter.greedy, drafter.draft_temp) == (4, True, 1.0)
    make = flags.drafting.make
    for call, named in (
        (flags.drafter, "made for a loaded target, which is not known"),
        (partial(make, "model:twigs=4", target), r"twigs.*See help\(load_head\)"),
        (
            partial(make, "model:branches=many", target),
            "branches is 'many', expected int",
        ),
        (partial(make, "model:branches=0", target), "expected an int >= 1"),
        (partial(learning.drafting.make, spec, target), "--online a trained head takes no options"),
    ):
        with pytest.raises(ValueError, match=named):
            call()


def test_heads_for_a_model_are_listed(tmp_path: Path) -> None:
    """Those here that fit, those that do not with the reason, those known by the model's name."""
    write_model_folder(tmp_path / "Qwen3-8B-4bit")
    written: dict[str, dict[str, Any]] = {
        "narrow  EAGLE-3, another width": {"vocab_size": None},
        "fits  EAGLE-3, here": {"hidden_size": 64, "vocab_size": None},
        "other  EAGLE-3, another vocabulary": {"vocab_size": 9999},
        "damaged  EAGLE-3, its config.json is damaged": {"vocab_size": "many"},
        "odd  EAGLE-3, its config.json is damaged": {"transformer_layer_config": [1]},
    }
    for line, changes in written.items():
        heads.reference("eagle3").write(tmp_path / line.partition(" ")[0], **changes)
    heads.Reference({"exit_layer": 1, "hidden_size": 64}, {}, {}).write(tmp_path / "exit")
    text = report(str(tmp_path / "Qwen3-8B-4bit"), tmp_path)
    known = ("exit  trained exit, here", "AngelSlim/Qwen3-8B_eagle3  to be fetched")
    assert not [line for line in (*written, *known) if f"  {line}\n" not in text]
    command = f"specdec-mlx generate --model {tmp_path / 'Qwen3-8B-4bit'} --draft-model"
    after = text.partition("EAGLE-3, here\n")[2].splitlines()
    size = (tmp_path / "fits" / "model.safetensors").stat().st_size
    assert after[0] == f"    {size / 1e6:.1f} MB in memory, a draft token reads {size / 1e6:.1f} MB"
    assert "accepted: " in after[1]
    assert after[2].startswith(f"    {command} {tmp_path / 'fits'} --prompt")
    assert f"_eagle3  to be fetched\n    {command} AngelSlim/Qwen3-8B_eagle3 --prompt" in text
    assert f"{command} {tmp_path / 'narrow'}" not in text
    assert "Left out" not in text


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
def test_a_head_of_a_relative_is_not_listed_as_if_it_were_the_models_own(model, tmp_path):
    """It was trained on another model's states; one that serves a family, PARD, needs no word."""
    own = RELATIVES[model]
    note = "" if own is None else f", made for qwen3-4b, not for {own}"
    heads_by = ("AngelSlim/Qwen3-4B_eagle3", "z-lab/Qwen3-4B-DFlash-b16")
    repositories = (*heads_by, "deepseek-ai/dspark_qwen3_4b_block7")
    expected = {"amd/PARD-Qwen3-0.6B": "", **dict.fromkeys(repositories, note)}
    assert known_repositories(model) == expected
    assert known_repositories(model, small=True) == {"mlx-community/Qwen3-0.6B-4bit": ""}
    assert known_repositories(f"{model}x".replace("Qwen3", "Qwenx3")) == {}
    head = heads.reference("eagle3").write(tmp_path / "head", vocab_size=None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 32}))
    here = heads_lines(model, tmp_path, [("AngelSlim/Qwen3-4B_eagle3", head)])
    assert f"  AngelSlim/Qwen3-4B_eagle3  EAGLE-3, here{note}" in here


def test_heads_are_listed_for_a_name_that_is_not_here(monkeypatch, tmp_path, capsys):
    """By the name alone: nothing is fetched, and it is said that nothing here was compared."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "nothing"))
    monkeypatch.setattr(socket, "socket", None)
    assert commands.main(["drafters", "--model", "Qwen/Qwen3-4B-Instruct-2507"]) == 0
    said = capsys.readouterr().out
    parts = said.split("\n\n")
    assert "4-bit weights: " in parts[0]
    assert parts[2].startswith("Trained heads for Qwen/Qwen3-4B-Instruct-2507")
    assert "  mlx-community/Qwen3-0.6B-4bit  to be fetched\n    specdec-mlx gen" in parts[3]
    assert "  prompt-lookup  " in parts[4]
    assert "Qwen/Qwen3-4B-Instruct-2507 is no folder here and not in the Hugging Face cache" in said
    assert "  amd/PARD-Qwen3-0.6B  to be fetched\n" in said
    assert "_eagle3  to be fetched, made for qwen3-4b, not for qwen3-4b-instruct-2507" in said
    assert commands.main(["drafters", "--model", "nobody/nothing"]) == 0
    assert "hf download nobody/nothing" in capsys.readouterr().out
    assert commands.main(["drafters", "--model", "./nowhere"]) == 2


# The ends of a target -----------------------------------------------------------------------------

ENDS = ("llama", "qwen2", "gemma2", "gpt2", "qwen3_5", "deepseek_v3", "mamba2", "phi", "quantized")


@in_one_test("name", ENDS)
def test_the_ends_of_a_target_are_found(name: str) -> None:
    """The head of its last state makes its logits, up to a cap; its embedding has its width."""
    model = tiny.build("llama", hidden_size=64) if name == "quantized" else tiny.build(name)
    if name == "quantized":
        nn.quantize(model, 32)
    before = {path: type(part) for path, part in model.named_modules()}
    ends = anatomy_for_head(model)
    assert {path: type(part) for path, part in model.named_modules()} == before
    assert ends.vocab_size == model(mx.array([[1]])).shape[-1]
    assert ends.num_layers == len(model.layers)
    states = mx.random.normal((3, ends.width))
    assert ends.logits(states).shape == (3, ends.vocab_size)
    assert ends.embed(mx.array([1, 2])).shape[0] == 2
    if name == "gemma2":  # without the square root of the width, which heads are trained without
        assert mx.array_equal(ends.embed(mx.array([3])), model.model.embed_tokens.weight[3:4])


MADE_WITH_LAYERS = {
    "deepseek_v3": ({"num_hidden_layers": 61}, "model.layers.61"),
    "glm4_moe": ({"num_hidden_layers": 46}, "model.layers.46"),
    "step3p5": ({"num_hidden_layers": 45}, "model.layers.45"),
    "mimo": ({"num_hidden_layers": 36}, "model.mtp_layers.0"),
    "mimo_v2_flash": ({"num_hidden_layers": 48}, "model.mtp.layers.0"),
    "qwen3_5": ({"num_hidden_layers": 64}, "mtp"),
}


@in_one_test("model_type", MADE_WITH_LAYERS)
def test_prediction_layers_are_named_as_a_models_own_files_do(model_type: str, tmp_path: Path):
    """With their place among its tensors; to take where the files have them, else to be fetched."""
    config, name = MADE_WITH_LAYERS[model_type]
    parts = [f"{part}.weight" for part in FAMILIES[model_type].names.values()]
    place = tmp_path / "model.safetensors.index.json"
    place.unlink(missing_ok=True)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **config}))
    line = f"multi-token prediction ({name})"
    apart = f"  its own prediction layer  {line}, to be fetched from its original repository"
    assert apart in heads_lines("M", tmp_path)
    index = {"weight_map": {f"{name}.{part}": "model-00002.safetensors" for part in parts}}
    place.write_text(json.dumps(index))
    found = heads_lines("M", tmp_path)
    assert f"  its own prediction layer  {line}, here" in found
    assert f'    specdec-mlx generate --model M --draft-model {place} --prompt "..."' in found


CHIPS = [
    ("Apple M3 Max", 4, r"Apple M3 Max, 4-bit weights: .*agents 1\.\d; .*chat 1\.\d; .*a head .*"),
    ("Apple M1", 4, r"Apple M1, 4-bit weights: times plain decoding, modelled: .*"),
    ("Apple M99", None, r"Apple M99, unquantized weights: nobody has measured it.*bench`\."),
]


@in_one_test(("chip", "bits", "words"), CHIPS)
def test_what_to_expect_is_said_first_by_the_chip(chip, bits, words, monkeypatch, tmp_path):
    """By the weights too; nothing is promised for a chip that nobody has measured."""
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": chip})
    write_model_folder(tmp_path / "M")
    config = tmp_path / "M" / "config.json"
    quantization = {} if bits is None else {"quantization": {"bits": bits, "group_size": 64}}
    config.write_text(json.dumps(json.loads(config.read_text()) | quantization))
    first = report(str(tmp_path / "M"), tmp_path).splitlines()[0]
    assert re.fullmatch(words, first)


def test_known_repositories_are_read_without_a_fault():
    """Each line has a beginning and repositories; no repository stands twice for one beginning."""
    lines = [line.split() for line in candidates.KNOWN.read_text("utf-8").splitlines()]
    named = [(start, one.removeprefix("~")) for start, *ones in lines for one in ones]
    assert all(
        re.fullmatch(r"[\w.-]+/[\w.-]+", one) and start == start.lower() for start, one in named
    )
    assert len(named) == len(set(named)) > 60
