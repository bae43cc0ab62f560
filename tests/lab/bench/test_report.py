"""Reports of a machine: they measure what fits into the time, and give nothing away."""

from __future__ import annotations

import getpass
import json
import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

import narrow
from benchmarks import import_report
from specdec_mlx.cli.commands import main
from specdec_mlx.draft_length import costs
from specdec_mlx.drafters.choosing import choice
from specdec_mlx.errors import ModelFolderError
from specdec_mlx.lab import prompts
from specdec_mlx.lab.bench import report
from specdec_mlx.lab.bench.cost import CostMeter, linear_cost
from specdec_mlx.lab.bench.report import (
    JSON_FILE,
    TABLE_FILE,
    Budget,
    MachineReport,
    choose_model,
    load_report,
)
from specdec_mlx.lab.bench.summary import ALL
from specdec_mlx.lab.bench.timing import MLX_LM_SPECULATION, PLAIN, Contender, plain
from specdec_mlx.lab.commands import bench as bench_command
from tiny_model_folder import write_model_folder

OTHER, BROKEN = "another-package", "broken-package"
DEPTHS = 8, 40


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports of a narrow model: few rows and tokens, and two packages, of which one fails."""
    tokenizer = narrow.FakeTokenizer()
    monkeypatch.setattr(bench_command, "load_target", lambda name: (narrow.model(), tokenizer))
    monkeypatch.setattr(choice, "load_model", lambda name: (narrow.model(seed=1), tokenizer))
    monkeypatch.setattr(report, "WIDTHS", (1, 2, 5))
    monkeypatch.setattr(report, "DEPTHS", DEPTHS)
    monkeypatch.setattr(report, "NUM_SWEEPS", 1)
    monkeypatch.setattr(report, "MODULES", {OTHER: "json", BROKEN: "json", "absent": "not_there"})

    def make_peer(name: str, model: Any, tokenizer: Any) -> Contender:
        if name == BROKEN:
            raise OSError(f"{Path.home()}/secret cannot be read")
        return Contender(name, start=plain(model).start)

    monkeypatch.setattr(report, "make_peer", make_peer)


def run_report(folder: Path, *flags: str) -> MachineReport:
    few = ["--max-tokens", "6", "--categories", "chat", "code_edit"]
    assert main(["bench", "--report", str(folder), *few, *flags]) == 0
    return load_report(folder / JSON_FILE)


@pytest.mark.usefixtures("quick")
def test_a_report_measures_all_rows_and_gives_nothing_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No user, host, path, folder or text is in either file, nor in the message of a fault."""
    model = write_model_folder(tmp_path / "projects" / "my-private-model")
    draft = write_model_folder(tmp_path / "projects" / "my-draft")
    found = run_report(tmp_path / "out", "--model", str(model), "--draft-model", str(draft))
    rows = [r.drafter + r.kernels for r in found.results if r.category == ALL]
    ours = ["auto", "autoauto", MLX_LM_SPECULATION, "model", "modelauto"]
    assert rows == [PLAIN, *ours, OTHER]
    assert {r.identical for r in found.results if r.category == ALL} == {2}
    assert {r.category for r in found.modelled} == {"chat", "code_edit", ALL}
    assert {depth: curve.positions for depth, curve in found.costs.items()} == dict.fromkeys(
        DEPTHS, (1, 2, 5)
    )
    assert found.left_out == {BROKEN: "stopped by OSError"}
    assert found.model == replace(found.draft_model, gigabytes=found.model.gigabytes)
    assert replace(found.model, gigabytes=1.0) == report.ModelFacts("qwen2", "float", 1.0)
    printed = capsys.readouterr().out
    assert (tmp_path / "out" / TABLE_FILE).read_text().strip() in printed
    assert "| modelled |" in printed
    private = [getpass.getuser(), platform.node(), "/", "private", "secret", "my-", tmp_path.name]
    private += [prompt.text[:20] for prompt in prompts.read_prompts()]
    for name in (JSON_FILE, TABLE_FILE):
        content = (tmp_path / "out" / name).read_text().replace("tok/", "").replace("tokens/", "")
        assert [word for word in private if word in content] == [], name
    written = json.loads((tmp_path / "out" / JSON_FILE).read_text())
    assert not [key for key in ("texts", "samples", "command", "prompt") if key in written]


@pytest.mark.usefixtures("quick")
def test_time_runs_out_between_rows_and_the_report_says_which_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows take a minute each, so that two rows fit into two minutes and a half."""
    now = [0.0]
    measured = report.run_bench, report.cost_curve

    def slowly(step: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            now[0] += 60
            return step(*args, **options)

        return run

    monkeypatch.setattr(report, "run_bench", slowly(measured[0]))
    monkeypatch.setattr(report, "cost_curve", slowly(measured[1]))
    monkeypatch.setattr(
        bench_command, "Budget", lambda seconds: Budget(seconds, clock=lambda: now[0])
    )
    model = write_model_folder(tmp_path / "model")
    found = run_report(tmp_path / "out", "--model", str(model), "--minutes", "2.5")
    assert list(found.costs) == [DEPTHS[0]]
    assert {r.drafter for r in found.results} == {PLAIN, "auto"}
    names = ["auto, kernels", f"costs after {DEPTHS[1]} tokens", OTHER, BROKEN]
    assert found.left_out == dict.fromkeys(names, "no time was left")
    text = (tmp_path / "out" / TABLE_FILE).read_text()
    assert all(name in text for name in names)


@pytest.mark.usefixtures("quick")
def test_a_report_that_cannot_be_written_is_refused_before_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder is in the place of the file, or a file in the place of the folder."""
    monkeypatch.setattr(bench_command, "measure_report", None)
    model = write_model_folder(tmp_path / "model")
    (tmp_path / "out" / JSON_FILE).mkdir(parents=True)
    (tmp_path / "file").touch()
    for place in ("out", "file"):
        assert main(["bench", "--report", str(tmp_path / place), "--model", str(model)]) == 2
        assert str(tmp_path / place) in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_flags_of_other_benchmarks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt of a file would name its kind, and a drafter may name a path."""
    alone = ["--temp", "1"], ["--drafter", "ngram"], ["--no-cost"], ["--draft-layers", "1"]
    for flags in (*alone, ["--ties", "plain"], ["--draft-vocab", "off"]):
        assert main(["bench", "--report", "--model", "any", *flags]) == 2
        assert f"{flags[0]} and --report exclude each other" in capsys.readouterr().err


def test_costs_are_measured_at_the_depth_that_is_asked_for() -> None:
    """And for every number of rows that a draft may have, so that no modelled cost is a guess."""
    assert {*range(1, 17), costs.WIDTHS[-1]} <= {*report.WIDTHS}
    meter = CostMeter(narrow.model(), [1, 2, 3], (1, 2), 700)
    assert meter._verifier.rollback.position == 700
    for most, depths in ((None, [256, 2048, 8192]), (8192, [256, 2048, 8128]), (300, [236])):
        model: Any = SimpleNamespace(args=SimpleNamespace(max_position_embeddings=most))
        assert report.depths_of(model) == depths


def test_the_largest_model_that_fits_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the folders of LM Studio and in our own; a model whose weights are missing is not."""
    monkeypatch.setattr(report, "models_in", lambda where: models_in(where) if where else iter(()))
    monkeypatch.setattr(report, "LM_STUDIO", (str(tmp_path / "studio"),))
    monkeypatch.setattr(report, "cache_root", lambda: tmp_path / "cache")
    with pytest.raises(ModelFolderError, match=r"hf download \S+ && hf download"):
        choose_model()
    small = write_model_folder(tmp_path / "cache" / "small")
    medium = write_model_folder(tmp_path / "studio" / "me" / "medium", num_hidden_layers=3)
    large = write_model_folder(tmp_path / "studio" / "me" / "large", num_hidden_layers=6)
    part = write_model_folder(tmp_path / "studio" / "me" / "part", num_hidden_layers=5)
    index = {"weight_map": {"x": "model-00002-of-00002.safetensors"}}
    (part / "model.safetensors.index.json").write_text(json.dumps(index))
    assert choose_model() == str(large)
    sizes = {folder: report.weight_bytes(folder) for folder in (small, medium, large)}
    assert choose_model(sizes[large] - 1) == str(medium)
    assert choose_model(sizes[medium] - 1) == str(small)


def test_a_repository_of_mlx_community_is_named_and_no_other(tmp_path: Path) -> None:
    """By its place in the Hugging Face cache. A quantized model has its bits and its mode."""
    for owner, name in (("mlx-community", "mlx-community/Tiny-4bit"), ("somebody", "")):
        place = tmp_path / f"models--{owner}--Tiny-4bit" / "snapshots" / "0"
        folder = write_model_folder(place, quantization={"bits": 4, "group_size": 32})
        found = report.facts_of(str(folder))
        assert (found.name, found.weights) == (name, "4 affine")


def test_a_folder_that_is_called_as_a_repository_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder's name is its owner's, also in a folder `mlx-community`."""
    write_model_folder(tmp_path / "mlx-community" / "my-private-model")
    monkeypatch.chdir(tmp_path)
    assert report.facts_of("mlx-community/my-private-model").name == ""


models_in = report.models_in


def example() -> MachineReport:
    facts = report.ModelFacts("qwen3", "4 affine", 4.6, "mlx-community/Qwen3-8B-4bit")
    curve = replace(linear_cost(0.1), positions=(1, 2, 3, 4), seconds=(0.02, 0.03, 0.028, 0.04))
    return MachineReport(
        *("2026-11-28", "Apple M4 Pro", 24.0, "macOS 26.1", "Metal", 1.0, {"mlx": "0.32.4"}),
        *(facts, None, 128, {256: curve, 2048: curve}, [], [], {}, 1.0),
    )


def test_an_imported_row_is_read_back_as_the_curve_that_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Costs that fall by noise are evened out. The row says when, with which MLX, and how."""
    folder = tmp_path / "a report"
    report.save_report(example(), folder)
    assert load_report(folder / JSON_FILE) == example()
    chips = tmp_path / "chips.tsv"
    chips.write_text(import_report.CHIPS.read_text())
    monkeypatch.setattr(import_report, "CHIPS", chips)
    for _ in range(2):  # the second time in place of the first
        assert import_report.main([str(folder / JSON_FILE), "--write", "--fits", "M4.*"]) == 0
    row = capsys.readouterr().out.splitlines()[0]
    assert "measured 2026-11-28, MLX 0.32.4" in row
    assert chips.read_text().count(row) == 1
    monkeypatch.setattr(costs, "__file__", str(tmp_path / "costs.py"))
    curves = costs._read()
    assert list(curves)[-1] == "mildest"
    curve = curves["m4-pro-4-affine-4.6gb"]
    assert [curve(m) for m in (1, 2, 3, 4)] == pytest.approx([1, 1.45, 1.45, 2])
    assert curve.fits == "M4.*"
    assert import_report.main([str(folder / JSON_FILE), "--depth", "2048"]) == 0
    assert capsys.readouterr().out.startswith("m4-pro-4-affine-4.6gb-2048\t1:1 2:1.45 ")
    with pytest.raises(ValueError, match=r"no costs after 3 tokens\. It has: 256, 2048"):
        import_report.main([str(folder / JSON_FILE), "--depth", "3"])
    (folder / JSON_FILE).write_text("{}")
    with pytest.raises(ValueError, match="no report of a machine"):
        load_report(folder / JSON_FILE)


def test_a_report_cannot_break_the_table_of_chips() -> None:
    """A report may come from anybody: every field is a single column of a single line."""
    odd = replace(example(), chip="M4\tPro\nm3-max\t1:1\x85", versions={})
    name, costs, _, fits, what, source = import_report.row_of(odd).split("\t")
    assert (name, costs, fits) == ("m4-pro-m3-max-1-1-4-affine-4.6gb", "1:1 2:1.45 3:1.45 4:2", "")
    assert what.startswith("M4 Pro m3-max 1:1 , Metal")
    assert "MLX unknown" in source
    assert len("".join((name, what, source)).splitlines()) == 1
    with pytest.raises(ValueError, match="expected a regular expression"):
        import_report.row_of(example(), fits="M4(")
