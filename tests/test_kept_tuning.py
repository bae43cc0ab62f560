"""What a command learned is there for the next one: one file for each model and machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.tuner.utils import linear_to_lora_layers

import tiny
from command_line import both_ways, run
from serving import serving
from specdec_mlx.contracts import key_of
from specdec_mlx.draft_length.store import Tuning, kept_tuning, tuning_for, tuning_path
from specdec_mlx.drafters.default import default_drafter
from tiny_model_folder import write_model_folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECDEC_MLX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def learn(model: Any) -> None:
    tuning_for(model).of("x").steps.first.append(0.7)
    for _ in range(3):
        tuning_for(model).stairs(0).add(1, 0.01)
        tuning_for(model).stairs(0).add(5, 0.019)


def test_the_next_command_begins_with_what_the_last_one_learned(cache: Path) -> None:
    """After an interruption, too."""
    model = tiny.build("qwen2")
    with pytest.raises(KeyboardInterrupt), kept_tuning(model, "some/name"):
        learn(model)
        raise KeyboardInterrupt
    with kept_tuning(model := tiny.build("qwen2"), "some/name"):
        assert tuning_for(model).of("x").steps(1) == 0.7
        assert tuning_for(model).stairs(0)(5) > 1.5
    with kept_tuning(model := tiny.build("qwen2"), "another/name"):
        assert not tuning_for(model).drafters


def test_a_file_that_cannot_be_read_or_written_costs_a_line(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tuning_path("name").parent.mkdir(parents=True)
    tuning_path("name").write_text("{")
    with kept_tuning(model := tiny.build("qwen2"), "name"):
        learn(model)
    assert "learn anew" in capsys.readouterr().err
    assert Tuning.load(tuning_path("name")).drafters
    (tmp_path / "no folder").write_text("a file where the folder should be")
    monkeypatch.setenv("SPECDEC_MLX_CACHE", str(tmp_path / "no folder"))
    with kept_tuning(tiny.build("qwen2"), "name"):
        pass
    assert "cannot keep" in capsys.readouterr().err


def test_a_folder_is_known_by_its_place_and_not_by_how_it_is_written(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert tuning_path("model") == tuning_path(str(tmp_path / "model")) != tuning_path("org/model")


def test_a_model_with_an_adapter_is_another_one(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each adapter has a file, known by its place, beside that of the bare model."""
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)
    files = [tuning_path("name"), *(tuning_path("name", folder) for folder in ("one", "other"))]
    assert len(set(files)) == 3
    assert tuning_path("name", str(tmp_path / "one")) == files[1]
    with kept_tuning(model := tiny.build("qwen2"), "name", "one"):
        learn(model)
    assert [file.exists() for file in files] == [False, True, False]


def write_adapter(folder: Path, model: Any) -> Path:
    """An adapter that mlx-lm loads, of a model, which gets its layers."""
    lora = {"rank": 2, "scale": 1.0, "dropout": 0.0}
    model.freeze()
    linear_to_lora_layers(model, 1, lora)
    weights = dict(tree_flatten(model.trainable_parameters()))
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    config = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": lora}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@both_ways
def test_a_command_keeps_it_for_the_adapter_that_it_loads(tmp_path: Path) -> None:
    """And leaves the bare model's file alone."""
    write_model_folder(tmp_path / "model")
    adapter = write_adapter(tmp_path / "adapter", load(str(tmp_path / "model"))[0])
    arguments = ["generate", "--model", str(tmp_path / "model"), "--prompt", "the cat the cat"]
    arguments += ["--max-tokens", "4"]
    for flags, num_files in (["--adapter-path", str(adapter)], 1), ([], 2):
        done = run(*arguments, *flags, SPECDEC_MLX_CACHE=str(tmp_path / "cache"))
        assert done.returncode == 0, done.stderr
        assert len(list((tmp_path / "cache").glob("tuning/*.json"))) == num_files


def test_a_server_keeps_it_for_the_adapter_that_it_loads(cache: Path, tmp_path: Path) -> None:
    """As the other commands do."""
    folder = write_model_folder(tmp_path / "model")
    adapter = write_adapter(tmp_path / "adapter", load(str(folder))[0])
    with serving("--model", str(folder), "--adapter-path", str(adapter)) as client:
        client.completions.create(model="default_model", prompt="the cat", max_tokens=2)
    assert list((cache / "tuning").iterdir()) == [tuning_path(str(folder), str(adapter))]


@both_ways
@pytest.mark.parametrize("flags", [[], ["--no-tuning"]])
def test_generate_keeps_it_unless_told_not_to(flags: list[str], tmp_path: Path) -> None:
    write_model_folder(tmp_path / "model")
    arguments = ["generate", "--model", str(tmp_path / "model"), "--prompt", "the cat the cat"]
    arguments += ["--max-tokens", "30", *flags]
    done = run(*arguments, SPECDEC_MLX_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    files = list((tmp_path / "cache").glob("tuning/*.json"))
    assert len(files) == (0 if flags else 1)
    for file in files:
        kept = Tuning.load(file)
        assert set(kept.drafters) == {key_of(default_drafter())}
