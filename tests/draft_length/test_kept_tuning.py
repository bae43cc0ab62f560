"""What a command learned is there for the next one: one file for each model and machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import tiny
from command_line import both_ways, run
from specdec_mlx.draft_length.store import Tuning, kept_tuning, tuning_for, tuning_path
from specdec_mlx.drafters.suffix import SuffixDrafter
from tiny_model_folder import write_model_folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECDEC_MLX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def learn(model: Any) -> None:
    tuning_for(model).of("x").steps.first.extend([0.7, 0.7])
    for _ in range(3):
        tuning_for(model).cost_model(0).add(1, 0.01)
        tuning_for(model).cost_model(0).add(5, 0.019)


def test_the_next_command_begins_with_what_the_last_one_learned(cache: Path) -> None:
    """After an interruption, too."""
    model = tiny.build("qwen2")
    with pytest.raises(KeyboardInterrupt), kept_tuning(model, "some/name"):
        learn(model)
        raise KeyboardInterrupt
    with kept_tuning(model := tiny.build("qwen2"), "some/name"):
        assert tuning_for(model).of("x").steps(1) == 0.7
        assert tuning_for(model).cost_model(0)(5) > 1.5
    with kept_tuning(model := tiny.build("qwen2"), "another/name"):
        assert not tuning_for(model).drafters


def test_a_file_that_cannot_be_read_or_written_costs_a_line(cache, tmp_path, monkeypatch, capsys):
    tuning_path("name").parent.mkdir(parents=True)
    tuning_path("name").write_text("{")
    with kept_tuning(model := tiny.build("qwen2"), "name"):
        learn(model)
    assert "learn anew" in capsys.readouterr().err
    assert Tuning.load(tuning_path("name")).drafters
    monkeypatch.setenv("SPECDEC_MLX_CACHE", str(tuning_path("name")))  # a file for a folder
    with kept_tuning(tiny.build("qwen2"), "name"):
        pass
    assert "cannot keep" in capsys.readouterr().err


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A model's folder, and that of an adapter without weights of its own."""
    folder = tmp_path_factory.mktemp("loaded")
    (folder / "adapter_config.json").write_text('{"fine_tune_type": "full"}')
    mx.save_safetensors(str(folder / "adapters.safetensors"), {})
    return str(write_model_folder(folder / "model")), str(folder)


@both_ways
def test_a_command_keeps_it_for_what_it_loads_unless_told_not_to(cache, loaded):
    model, adapter = loaded
    command = ["generate", "--model", model, "--prompt", "the cat the cat", "--max-tokens", "30"]
    for flags, num_files in (["--no-tuning"], 0), (["--adapter-path", adapter], 1), ([], 2):
        done = run(*command, *flags)
        assert done.returncode == 0, done.stderr
        files = list(cache.glob("tuning/*.json"))
        assert len(files) == num_files
    for file in files:
        assert set(Tuning.load(file).drafters) == {SuffixDrafter().key}
