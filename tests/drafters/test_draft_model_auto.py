"""`draft_model="auto"`: what fits the model is found here, named by no one, and said in words."""

from __future__ import annotations

import importlib
import json
import logging
import re
from pathlib import Path
from typing import Any

import huggingface_hub
import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten

import command_line
import heads
import specdec_mlx as sd
from selection import in_one_test
from specdec_mlx.cli.commands import main
from specdec_mlx.drafters.choosing import candidates
from specdec_mlx.drafters.choosing.candidates import choose_for
from specdec_mlx.drafters.choosing.report import report
from specdec_mlx.drafters.heads.loading import is_head
from specdec_mlx.errors import HeadError
from tiny_model_folder import write_model_folder

CONFIGS = json.loads((heads.FIXTURES / "configs.json").read_text())
LAYOUTS = {
    # a repository with a head, as its authors or a converter name it: the model it is for, a config
    "Qwen3.5-4B-MTP-4bit": ("Qwen3.5-4B-4bit", {"model_type": "qwen3_5_mtp"}),
    "Ornith-9B-MTP-4bit": ("Ornith-9B-8bit", {"model_type": "qwen3_5_mtp"}),  # in no table
    "Qwen3-8B_eagle3": ("Qwen3-8B-4bit", CONFIGS["eagle3"]),
    "Qwen3-8B-DFlash-b16": ("Qwen3-8B-MLX-bf16", CONFIGS["dflash"]),
    "gpt-oss-20b-speculator.eagle3": (
        "gpt-oss-20b-MXFP4",
        {"speculators_model_type": "eagle3", "transformer_layer_config": {"hidden_size": 64}},
    ),
    "PARD-Qwen3-0.6B": ("Qwen3-14B-4bit", {"model_type": "qwen3", "pard_token": 5}),
}

BITS = {"quantization": {"group_size": 64, "bits": 4}}
CONVERSIONS: dict[str, dict[str, Any]] = {
    # what writes a model for MLX with its prediction layer, and how
    "mlx-lm #1543": {"file": "mtp.safetensors.index.json", "less_one": True},
    "MTPLX": {"file": "mtp.safetensors", "bits": 4, **BITS},
    "vllm-mlx": {"file": "mtp/weights.safetensors", "name": "qwen3_5_moe", "bits": 4},
    "Rapid-MLX": {"file": "mtp/model.safetensors", "renamed": lambda name: name[len("mtp.") :]},
    "mlx-optiq": {
        "file": "a.safetensors",
        "bits": 8,
        "less_one": True,
        "mtp_file": "a.safetensors",
    },
    "Ornith": {"file": "mtp.safetensors", "name": "qwen3_5_moe", "one_by_one": True},
    "oMLX": {"file": "model.safetensors", "renamed": "language_model.{}".format, **BITS},
    "Step 3.5": {
        "file": "mtp.safetensors",
        "name": "step3p5",
        "bits": 4,
        "renamed": lambda n: f"mtp.layers.{int(n[13]) - 4}.{n[15:].removeprefix('transformer.')}",
    },
    "original": {"file": "model.safetensors", "less_one": True},
}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mlx_lm_extra_tensors": {"mtp_file": "b"}}, "names b for its prediction layer, which is not"),
    ({"renamed": lambda n: n.replace("up_proj.w", "up_proj.qw")}, "not read (mtp.layers.0.mlp.up_"),
    ({"renamed": "draft.{}".format}, "in mtp.safetensors, which has draft.mtp.fc.weight"),
    ({"model_type": "qwen9"}, "no head of a known kind"),
]


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is on the disk but what a test writes, and nothing is fetched."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("socket.socket.connect", pytest.fail)


def write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@in_one_test("head", LAYOUTS)
def test_a_head_beside_the_model_or_in_the_cache_is_taken(head: str, tmp_path: Path) -> None:
    """And the reason is said; one for a relative of the model is left out, with a sentence."""
    model, config = LAYOUTS[head]
    for own, place in (("beside", tmp_path / head / "beside"), ("cache", tmp_path / head / "hub")):
        target = write_model_folder(tmp_path / head / own / model)
        found = write(place / head, {**config, "vocab_size": None, "hidden_size": 64})
        choice = choose_for(str(target), where=None if own == "beside" else place)
        assert choice.place == str(found)
        assert choice.lines[0].startswith(f"{head} drafts: ")
        assert choice.lines[0].endswith(f" for {model}.")
    other = write_model_folder(tmp_path / head / "beside" / "Llama-3.2-1B-Instruct-4bit")
    choice = choose_for(str(other))
    assert choice.place is None
    assert "nothing says that it was made for this model" in "".join(choice.lines)


def test_each_refusal_is_a_sentence(tmp_path: Path) -> None:
    target = write_model_folder(tmp_path / "Qwen3-8B-4bit", num_hidden_layers=8)
    heads_config = CONFIGS["eagle3"]
    write(tmp_path / "Qwen3-8B-eagle3-a", {**heads_config, "hidden_size": 48, "vocab_size": None})
    write(tmp_path / "Qwen3-8B-eagle3-b", {**heads_config, "vocab_size": 9999})
    broken = write_model_folder(tmp_path / "broken") / "config.json"
    broken.write_text(broken.read_text().replace('"qwen2"', '"nothing_known"'))
    write_model_folder(tmp_path / "other-tokenizer", swapped=True)
    write_model_folder(tmp_path / "too-large", num_hidden_layers=9)
    small = write_model_folder(tmp_path / "small", num_hidden_layers=1, intermediate_size=16)
    write_model_folder(tmp_path / "small-2", num_hidden_layers=1, intermediate_size=32)
    choice = choose_for(str(target), where=tmp_path)
    said = "\n".join(choice.lines)
    assert choice.place == str(small)
    assert choice.lines[0] == (
        "small drafts: a small model with the same tokenizer for Qwen3-8B-4bit."
    )
    for name, reason in (
        ("Qwen3-8B-eagle3-a", "another width"),
        ("Qwen3-8B-eagle3-b", "another vocabulary"),
        ("broken", "mlx-lm knows no model type nothing_known"),
        ("other-tokenizer", "another tokenizer"),
        ("too-large", "not smaller"),
        ("small-2", "one is enough"),
    ):
        assert f"{name} is left out: {reason}" in said


@pytest.mark.parametrize("made_by", CONVERSIONS)
def test_a_layer_in_the_models_own_folder_drafts_for_it(made_by: str, tmp_path: Path) -> None:
    """It is what was written, bits and norms too; the text is the model's own."""
    how, folder = CONVERSIONS[made_by], tmp_path / "Qwen"
    head = heads.write_conversion(folder, **how)
    choice = choose_for(str(folder))
    assert choice.place == str(folder / how["file"])
    (line,) = choice.lines
    assert re.fullmatch(
        r"its own prediction layer drafts: multi-token prediction \(.*\) for Qwen\.", line
    )
    assert "its own prediction layer  multi-token prediction (" in report(str(folder), tmp_path)
    assert is_head(choice.place)
    assert not is_head(folder)  # which may be a draft model for another
    model, tokenizer = mlx_lm.load(str(folder))
    named, found = (sd.load_head(one, model) for one in (folder, choice.place))
    expected, loaded = (dict[str, Any](tree_flatten(h.parameters())) for h in (head, named.head))
    assert expected.keys() == loaded.keys()
    assert all(mx.allclose(x, loaded[name], atol=1e-6) for name, x in expected.items())
    assert found.key == named.key
    options: dict[str, Any] = {"max_tokens": 16, "temp": 0, "drafter": None}
    plain = sd.generate(model, tokenizer, "the rain in", **options)
    drafted = sd.generate(model, tokenizer, "the rain in", draft_model="auto", **options)
    assert drafted == plain
    assert drafted.stats.drafted > 0


@in_one_test(("how", "words"), REFUSED)
def test_a_layer_that_cannot_be_loaded_is_refused(how: Any, words: str, tmp_path: Path) -> None:
    """In a sentence: by `auto`, which goes on without it, and by `load_head`."""
    heads.write_conversion(tmp_path / "Qwen", "mtp.safetensors", **how)
    choice = choose_for(str(tmp_path / "Qwen"))
    assert choice.place is None
    assert "its own prediction layer is left out: " in choice.lines[1]
    assert words in choice.lines[1]
    with pytest.raises(HeadError, match=re.escape(words)):
        sd.load_head(tmp_path / "Qwen", heads.target(width=64, vocab=268))


def test_nothing_is_fetched_unless_told_to(tmp_path: Path) -> None:
    target = str(write_model_folder(tmp_path / "Qwen3-8B-4bit"))
    choice = choose_for(target)
    assert choice.place is None
    assert "look-up in the text. Known: amd/PARD-Qwen3-0.6B, AngelSlim" in choice.lines[0]
    assert "auto:fetch=true fetches the first" in choice.lines[0]
    assert choose_for(target, fetch=True).place == "amd/PARD-Qwen3-0.6B"


def test_the_text_is_the_models_own_and_the_reason_is_seen(tmp_path: Path, caplog: Any) -> None:
    """In Python a line of log, in commands one on stderr; what is wrong is an error in words."""
    folder = write_model_folder(tmp_path / "Qwen3-8B-4bit", num_hidden_layers=8)
    model, tokenizer = mlx_lm.load(str(folder))
    heads.write_eagle3(tmp_path / "Qwen3-8B_eagle3", model)
    options: dict[str, Any] = {"max_tokens": 16, "temp": 0}
    plain = sd.generate(model, tokenizer, "the rain in", drafter=None, **options)
    with caplog.at_level(logging.WARNING):
        drafted = sd.generate(
            model, tokenizer, "the rain in", drafter=None, draft_model="auto", **options
        )
    assert drafted == plain
    assert drafted.stats.drafted > 0
    assert "specdec_mlx: Qwen3-8B_eagle3 drafts: EAGLE-3 for Qwen3-8B-4bit." in caplog.text
    done = command_line.run(
        *("generate", "--model", str(folder), "--prompt", "the rain in", "--max-tokens", "8"),
        *("--draft-model", "auto"),
    )
    assert done.returncode == 0, done.stderr
    assert "specdec_mlx: Qwen3-8B_eagle3 drafts: EAGLE-3" in done.stderr
    with pytest.raises(ValueError, match="fetched"):
        sd.generate(model, tokenizer, "a", draft_model="auto:fetched=1")
    tokenizer._tokenizer.name_or_path = ""
    with pytest.raises(ValueError, match="has no name"):
        sd.generate(model, tokenizer, "a", draft_model="auto")


@pytest.mark.parametrize("command", ["bench", "check"])
def test_a_command_without_a_model_looks_for_a_drafter_of_the_small_model(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def look(model: str) -> None:
        raise ValueError(f"looked for {model}")

    module = importlib.import_module(f"specdec_mlx.lab.commands.{command}")
    monkeypatch.setattr(candidates, "choose_for", look)
    monkeypatch.setattr(module, "demo_model_path", lambda: Path("small-model"))
    monkeypatch.setattr(module, "load_target", lambda name: (None, None))
    assert main([command, "--draft-model", "auto"]) == 2
    assert "looked for small-model" in capsys.readouterr().err
