"""`specdec-mlx drafters --model`: what can draft for a model, from what is on the disk."""

from __future__ import annotations

import os
import re
import shutil
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from huggingface_hub import scan_cache_dir, try_to_load_from_cache
from tokenizers import normalizers

import tiny_text
from specdec_mlx.cli.commands import main
from specdec_mlx.drafters.choosing import candidates, registry
from specdec_mlx.drafters.choosing.candidates import (
    Candidate,
    find_candidates,
    locate,
    weight_bytes,
)
from specdec_mlx.errors import ModelFolderError
from specdec_mlx.stats.theory import expected_speedup
from tiny_model_folder import write_model_folder

HALF = {"num_hidden_layers": 1}
REASONS = {
    "large": "not smaller",
    "torn": "cannot be read",
    "stranger": "knows no model type nobody_knows",
    "odd": "cannot be read",
    "changing": "comes back as 'the quick",
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 3 layers."""
    root = tmp_path_factory.mktemp("target")
    return write_model_folder(root / "target", num_hidden_layers=3)


@pytest.fixture
def shelf(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with models that can serve, cannot serve, and cannot be read."""
    write_model_folder(tmp_path / "small", **HALF)
    write_model_folder(tmp_path / "middle", num_hidden_layers=2)
    small = tmp_path / "small" / "model.safetensors"
    small.write_bytes(bytes(small.stat().st_size))
    write_model_folder(tmp_path / "large", num_hidden_layers=4)
    write_model_folder(tmp_path / "swapped", swapped=True, **HALF)
    (tmp_path / "target").symlink_to(target)
    for name in ("torn", "stranger", "odd", "changing"):
        shutil.copytree(tmp_path / "small", tmp_path / name)
    (tmp_path / "torn" / "tokenizer.json").write_text('{"version": ')
    (tmp_path / "stranger" / "config.json").write_text('{"model_type": "nobody_knows"}')
    (tmp_path / "odd" / "config.json").write_text("[]")
    load, changing = candidates.load_tokenizer, tiny_text.bpe()
    changing.normalizer = normalizers.Lowercase()
    changed = tiny_text.tokenizer(changing)
    monkeypatch.setattr(
        candidates, "load_tokenizer", lambda f: changed if f.name == "changing" else load(f)
    )
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes.txt").write_text("no model")
    return tmp_path


def test_models_with_the_tokenizer_and_less_cost_can_serve(
    target: Path, shelf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cheapest first, with sizes as they are on the disk, and the speedup of theorem 3.8; all
    others with a reason; in a report on the command line, beside drafters that need no model.
    """
    found = find_candidates(str(target), shelf)
    able = [one for one in found if one.refusal is None]
    assert [one.name for one in able] == ["small", "swapped", "middle"]
    assert able[1].doubt == "another tokenizer"
    for one in able:
        assert one.size == weight_bytes(shelf / one.name) > 10_000
        assert one.cost == one.size / weight_bytes(target) < 1
    refused = {one.name: one.refusal or "" for one in found if one not in able}
    assert refused.keys() == REASONS.keys()  # the target itself is not listed
    assert all(REASONS[name] in refusal for name, refusal in refused.items()), refused
    assert main(["drafters", "--model", str(target), "--in", str(shelf)]) == 0
    expected, draft_models, without, left_out = capsys.readouterr().out.split("\n\n")
    assert re.fullmatch(r".+, unquantized weights: .+\.", expected)
    command = f"specdec-mlx generate --model {target}"
    assert f'    {command} --draft-model {shelf / "small"} --prompt "..."\n' in draft_models
    assert f'    {command} --prompt "..."\n' in without
    assert "prompt-lookup     Copies what followed" in without
    assert "  model " not in without
    assert f"({weight_bytes(target) / 1e6:.1f} MB)" in draft_models
    assert draft_models.index("  small  ") < draft_models.index("  middle  ")
    best = max(expected_speedup(0.8, K, able[0].cost) for K in range(65))
    assert f"80% accepted: {best:.2f} times as fast" in draft_models
    assert Candidate("a", cost=0.9).expectation().count("does not pay") == 2
    assert "of the target's, another tokenizer" in draft_models
    assert "large  not smaller" in left_out


@pytest.fixture
def cache(tmp_path: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same models as Hugging Face's cache lays them out, two revisions of one, and rubbish."""
    root = tmp_path / "hub"
    for name in ("small", "swapped", "torn"):
        put(root, f"models--somebody--{name}", "a" * 40, shelf / name)
    put(root, "models--somebody--small", "b" * 40, shelf / "middle")
    put(root, "models--somebody--empty", "c" * 40, shelf / "notes")
    (root / "models--somebody--broken").mkdir()
    (root / "models--somebody--broken" / "snapshots").write_text("a file")
    put(root, "datasets--somebody--data", "d" * 40, shelf / "small")
    scan, look_up = scan_cache_dir, try_to_load_from_cache
    monkeypatch.setattr(candidates, "scan_cache_dir", lambda where: scan(where or root))
    monkeypatch.setattr(
        candidates, "try_to_load_from_cache", lambda name, file: look_up(name, file, cache_dir=root)
    )
    return root


def put(root: Path, name: str, revision: str, folder: Path) -> None:
    snapshot = shutil.copytree(folder, root / name / "snapshots" / revision)
    for file in snapshot.iterdir():
        os.utime(file, (ord(revision[0]), ord(revision[0])))
    (root / name / "refs").mkdir(exist_ok=True)
    (root / name / "refs" / "main").write_text(revision)


def test_the_hugging_face_cache_is_looked_through(target: Path, cache: Path) -> None:
    """The latest revision of each model counts; what is broken is said or passed over. A target may
    be named as there; a name that was never fetched says how, without the network.
    """
    for where in (cache, None):
        found = {one.name: one for one in find_candidates(str(target), where)}
        assert found["somebody/small"].refusal is None
        assert found["somebody/small"].size == weight_bytes(cache.parent / "middle")
        assert found.keys() == {f"somebody/{n}" for n in ("small", "swapped", "torn", "empty")}
        assert found["somebody/swapped"].doubt == "another tokenizer"
        assert "cannot be read" in (found["somebody/empty"].refusal or "")
    assert locate("somebody/small").name == "b" * 40
    for name in ("somebody/else", "./nowhere"):
        with pytest.raises(ModelFolderError, match=f"hf download {name}"):
            locate(name)


def test_wrong_arguments_are_refused(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["--in", "."], "--in needs --model"),
        (["--model", "./nowhere"], "hf download"),
        (["--model", str(target), "--in", "./nowhere"], "There is no folder nowhere"),
    ):
        assert main(["drafters", *arguments]) == 2
        assert words in capsys.readouterr().err


def test_a_drafter_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody's broken package breaks its own line."""
    broken = EntryPoint("broken", "no_such_module:Drafter", registry.GROUP)
    known = registry._entries()
    monkeypatch.setattr(registry, "_entries", lambda: {**known, "broken": broken})
    assert "No module named 'no_such" in registry.describe_drafters()["broken"]
