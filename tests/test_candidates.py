"""`specdec-mlx drafters --model`: what can draft for a model, from what is on the disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from huggingface_hub import scan_cache_dir, try_to_load_from_cache
from tokenizers import normalizers

import tiny_text
from specdec_mlx.cli.commands import main
from specdec_mlx.drafters import candidates, registry
from specdec_mlx.drafters.candidates import Candidate, find_candidates, locate, report, weight_bytes
from specdec_mlx.errors import ModelFolderError
from specdec_mlx.stats.theory import expected_speedup
from tiny_model_folder import write_model_folder

HALF = {"num_hidden_layers": 1}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 3 layers."""
    root = tmp_path_factory.mktemp("target")
    return write_model_folder(root / "target", num_hidden_layers=3)


@pytest.fixture
def shelf(tmp_path: Path, target: Path) -> Path:
    """A folder with models that can serve, cannot serve, and cannot be read."""
    write_model_folder(tmp_path / "small", **HALF)
    write_model_folder(tmp_path / "middle", num_hidden_layers=2)
    small = tmp_path / "small" / "model.safetensors"
    small.write_bytes(bytes(small.stat().st_size))
    write_model_folder(tmp_path / "large", num_hidden_layers=4)
    write_model_folder(tmp_path / "swapped", swapped=True, **HALF)
    (tmp_path / "target").symlink_to(target)
    for name in ("torn", "bare", "stranger", "wordless", "odd"):
        shutil.copytree(tmp_path / "small", tmp_path / name)
    (tmp_path / "torn" / "tokenizer.json").write_text('{"version": ')
    (tmp_path / "bare" / "model.safetensors").unlink()
    (tmp_path / "stranger" / "config.json").write_text('{"model_type": "nobody_knows"}')
    (tmp_path / "wordless" / "tokenizer.json").unlink()
    (tmp_path / "odd" / "config.json").write_text("[]")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes.txt").write_text("no model")
    return tmp_path


REASONS = {
    "large": "not smaller",
    "target": None,  # it is the target itself, and not listed
    "torn": "cannot be read",
    "bare": "has no weights",
    "stranger": "knows no model type nobody_knows",
    "wordless": "no tokenizer",
    "odd": "cannot be read",
}


def test_models_with_the_tokenizer_and_less_cost_can_serve(target: Path, shelf: Path) -> None:
    """The cheapest first, with sizes as they are on the disk; all others with a reason."""
    found = find_candidates(str(target), shelf)
    able = [one for one in found if one.refusal is None]
    assert [one.name for one in able] == ["small", "swapped", "middle"]
    assert able[1].note == ", another tokenizer"
    for one in able:
        assert one.size == weight_bytes(shelf / one.name) > 10_000
        assert one.cost == one.size / weight_bytes(target) < 1
    refused = {one.name: one.refusal for one in found if one.refusal is not None}
    assert refused.keys() == {name for name, reason in REASONS.items() if reason}
    for name, refusal in refused.items():
        assert REASONS[name] in refusal, (name, refusal)  # type: ignore[operator]


def test_a_tokenizer_that_changes_the_text_is_left_out(
    target: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writing cannot be carried over; the reason has the first difference."""
    changing = tiny_text.bpe()
    changing.normalizer = normalizers.Lowercase()
    load, changed = candidates.load_tokenizer, tiny_text.tokenizer(changing)
    monkeypatch.setattr(
        candidates, "load_tokenizer", lambda f: changed if f.name == "swapped" else load(f)
    )
    (found,) = (one for one in find_candidates(str(target), shelf) if one.name == "swapped")
    assert (found.refusal or "").startswith("another tokenizer: ")
    assert "comes back as 'the quick" in (found.refusal or "")


@pytest.fixture
def cache(tmp_path: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same models as Hugging Face's cache lays them out, two revisions of one, and rubbish."""
    root = tmp_path / "hub"
    for name in ("small", "swapped", "torn"):
        put(root, f"somebody/{name}", "a" * 40, shelf / name)
    put(root, "somebody/small", "b" * 40, shelf / "middle")
    put(root, "somebody/empty", "c" * 40, shelf / "notes")
    (root / "models--somebody--broken").mkdir()
    (root / "models--somebody--broken" / "snapshots").write_text("a file")
    put(root, "somebody/data", "d" * 40, shelf / "small", kind="datasets")
    scan, look_up = scan_cache_dir, try_to_load_from_cache
    monkeypatch.setattr(candidates, "scan_cache_dir", lambda where: scan(where or root))
    monkeypatch.setattr(
        candidates, "try_to_load_from_cache", lambda name, file: look_up(name, file, cache_dir=root)
    )
    return root


def put(root: Path, name: str, revision: str, folder: Path, kind: str = "models") -> None:
    repo = root / f"{kind}--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / revision
    blobs = repo / "blobs"
    for place in (snapshot, blobs, repo / "refs"):
        place.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        blob = blobs / f"{revision[:4]}-{file.name}"
        shutil.copy(file, blob)
        os.utime(blob, (ord(revision[0]), ord(revision[0])))
        (snapshot / file.name).symlink_to(blob)
    (repo / "refs" / "main").write_text(revision)


def test_the_hugging_face_cache_is_looked_through(target: Path, cache: Path) -> None:
    """The latest revision of each model counts; what is broken is said or passed over."""
    for where in (cache, None):
        found = {one.name: one for one in find_candidates(str(target), where)}
        assert found["somebody/small"].refusal is None
        assert found["somebody/small"].size == weight_bytes(cache.parent / "middle")
        assert found.keys() == {f"somebody/{n}" for n in ("small", "swapped", "torn", "empty")}
        assert "another tokenizer" in found["somebody/swapped"].note
        assert "cannot be read" in (found["somebody/empty"].refusal or "")


def test_a_target_may_be_named_as_in_the_cache(cache: Path) -> None:
    """Its folder is found without the network; a name that was never fetched says how."""
    assert locate("somebody/small").name == "b" * 40
    with pytest.raises(ModelFolderError, match="hf download somebody/else"):
        locate("somebody/else")
    with pytest.raises(ModelFolderError, match="hf download"):
        locate("./nowhere")


def test_what_to_expect_follows_from_the_cost() -> None:
    """Theorem 3.8 of Leviathan et al., with the best K for each acceptance rate."""
    line = Candidate("a", Path(), 1, cost=0.1).expectation()
    best = max(expected_speedup(0.8, K, 0.1) for K in range(65))
    assert line.startswith("60% accepted: ")
    assert f"80% accepted: {best:.2f} times as fast" in line
    assert Candidate("a", Path(), 1, cost=0.9).expectation().count("does not pay") == 2


def test_the_report_has_it_all(
    target: Path, shelf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the command line: built-in drafters, those that can serve, and why others cannot."""
    assert main(["drafters", "--model", str(target), "--in", str(shelf)]) == 0
    out = capsys.readouterr().out
    assert "prompt-lookup   Copies what followed" in out
    without, draft_models, left_out = out.split("\n\n")
    assert "model " not in without
    assert draft_models.index("  small  ") < draft_models.index("  middle  ")
    assert draft_models.count("80% accepted") == 3
    assert "of the target's, another tokenizer" in draft_models
    assert "large  not smaller" in left_out
    assert f"({weight_bytes(target) / 1e6:.1f} MB)" in out


def test_wrong_arguments_are_refused_in_words(
    target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, words in (
        (["--in", "."], "--in needs --model"),
        (["--model", "./nowhere"], "hf download"),
        (["--model", str(target), "--in", "./nowhere"], "There is no folder nowhere"),
    ):
        assert main(["drafters", *arguments]) == 2
        assert words in capsys.readouterr().err


def test_a_drafter_that_cannot_be_loaded_is_said_to(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody's broken package breaks its own line."""

    class Broken:
        def load(self) -> None:
            raise ImportError("no module named x")

    known = registry._entries()
    monkeypatch.setattr(registry, "_entries", lambda: {**known, "broken": Broken()})
    assert "cannot be loaded: no module named x" in report(str(target), tmp_path)
