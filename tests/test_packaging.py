"""What the package says of itself: what it is installed with, where it runs, and what checks it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import specdec_mlx
from specdec_mlx.cli.backends import EXTRAS
from specdec_mlx.cli.commands import commands, main
from specdec_mlx.mlx_lm_plugin.installation import NEXT, OLDEST

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OPTIONAL = PROJECT["optional-dependencies"]
PLATFORMS = {
    "linux": {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"},
    "darwin": {"sys_platform": "darwin", "platform_system": "Darwin", "platform_machine": "arm64"},
}
BACKEND = re.compile(r"mlx-(cpu|cuda|cuda-\d+|metal)")


def needs(name: str, extra: str, platform: str) -> list[Requirement]:
    """Requirements of a distribution on a platform, with one extra or with none ("")."""
    try:
        written = metadata.requires(name) or ()
    except metadata.PackageNotFoundError:
        written = ()
    if name == PROJECT["name"]:
        written = OPTIONAL[extra] if extra else PROJECT["dependencies"]
    environment = {**default_environment(), **PLATFORMS[platform], "extra": extra}
    found = map(Requirement, written)
    return [each for each in found if each.marker is None or each.marker.evaluate(environment)]


def backends_with(extras: Iterable[str], platform: str) -> set[str]:
    """Backends among all that `pip install "specdec-mlx[EXTRAS]"` installs on a platform."""
    todo = [(PROJECT["name"], extra) for extra in ("", *extras)]
    seen = set(todo)
    while todo:
        for needed in needs(*todo.pop(), platform):
            new = {(canonicalize_name(needed.name), extra) for extra in ("", *needed.extras)} - seen
            seen |= new
            todo += new
    return {name for name, _ in seen if BACKEND.fullmatch(name)}


def test_each_extra_brings_exactly_its_backend() -> None:
    """On Linux; no other extra does but the development tools, and on a Mac all bring Metal."""
    for backend, extra in EXTRAS.items():
        assert backends_with([extra], "linux") == {backend}
    assert backends_with([], "linux") == set()
    chosen = {extra: backends_with([extra], "linux") for extra in OPTIONAL.keys() - EXTRAS.values()}
    assert {extra: found for extra, found in chosen.items() if found} == {"dev": {"mlx-cpu"}}
    for extras in ([], *([extra] for extra in OPTIONAL)):
        assert backends_with(extras, "darwin") == {"mlx-metal"}
    assert backends_with(["cpu", "cuda13"], "linux") == {"mlx-cpu", "mlx-cuda-13"}  # the control


def test_the_version_is_one_and_mlx_lm_has_no_upper_bound() -> None:
    """What replaces names in mlx-lm knows one series, and says so itself; `generate` needs none."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert PROJECT["version"] == specdec_mlx.__version__ == citation["version"]
    (needed,) = (r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "mlx-lm")
    assert not needed.specifier.contains("0.31.2")
    assert all(needed.specifier.contains(v) for v in (OLDEST, "0.32.2", NEXT, "1.0"))


@pytest.mark.parametrize("goal", ["demo", "test"])
def test_an_old_python_is_refused_on_one_line_before_anything_is_made(
    goal: str, tmp_path: Path
) -> None:
    """The `python3` that macOS brings is one; pip would speak of versions of mlx-lm instead."""
    old, folder = tmp_path / "python3.10", tmp_path / "venv"
    told = "import sys; sys.version_info = (3, 10, 13); exec(sys.argv[2])"
    old.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{told}' \"$@\"\n")
    old.chmod(0o755)
    command = ["make", "--silent", goal, f"PYTHON={old}", f"VENV={folder}"]
    not_ours = {"MAKEFLAGS", "MAKELEVEL"}  # of the make that runs the tests
    env = {name: value for name, value in os.environ.items() if name not in not_ours}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == (
        f"{old} is Python 3.10, and 3.11 or later is needed: make {goal} PYTHON=python3.13"
    )
    assert not folder.exists()


def workflows() -> dict[str, Any]:
    """By file name; YAML reads the key `on` as True."""
    folder = ROOT / ".github" / "workflows"
    return {path.name: yaml.safe_load(path.read_text("utf-8")) for path in folder.glob("*.yml")}


def runs(workflow: Any) -> list[str]:
    """Shell commands of a workflow."""
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    return [step["run"] for step in steps if "run" in step]


def test_workflows_and_forms_for_issues_name_what_there_is() -> None:
    """Targets of the Makefile, and commands of ours; every field has a label and its own name."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    said = "\n".join(command for workflow in workflows().values() for command in runs(workflow))
    called = set(re.findall(r"^ *make ([\w-]+)", said, re.M))
    assert {"test", "docs"} <= called <= targets
    assert set(re.findall(r"specdec-mlx (\w[\w-]*)", said)) <= commands().keys()
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    texts = {path.stem: path.read_text("utf-8") for path in folder.glob("*.yml")}
    asked = set(re.findall(r"`specdec-mlx ([\w-]+)", "\n".join(texts.values())))
    assert {"doctor", "bench"} <= asked <= commands().keys()
    assert texts.keys() == {"bug", "benchmark", "idea", "config"}
    for form in (yaml.safe_load(text) for name, text in texts.items() if name != "config"):
        assert all(form[name] for name in ("name", "description"))
        labels = {
            f["id"]: f["attributes"]["label"] for f in form["body"] if f["type"] != "markdown"
        }
        assert all(labels.values())
        assert len(labels) == sum(field["type"] != "markdown" for field in form["body"]) > 0


@pytest.mark.full
def test_the_package_is_a_drafter_and_its_own_tests_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Installed beside this one, its name is a drafter's; a second time nothing is overwritten."""
    monkeypatch.chdir(tmp_path)
    assert main(["new-drafter", "last-words"]) == 0
    folder = tmp_path / "specdec-mlx-last-words"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    metadata = folder / "src" / "last_words-0.1.0.dist-info"  # as an installer writes it
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {project['name']}\nVersion: 0.1.0\n")
    [(group, entries)] = project["entry-points"].items()
    lines = [f"{name} = {place}" for name, place in entries.items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder / "src"), *sys.path])}
    own = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(own, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert main(["new-drafter", "last-words"]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["auto", "My", "a b", "-x", ""])
def test_names_that_no_drafter_can_have_are_refused(name: str) -> None:
    with pytest.raises(SystemExit):
        main(["new-drafter", "--", name])


def test_importing_the_package_has_no_effect() -> None:
    """Neither MLX nor a command is imported, and the process keeps its signal handlers."""
    code = (
        "import signal, sys\n"
        "sys.argv = ['specdec-mlx', 'server']\n"
        "before = set(sys.modules), [signal.getsignal(s) for s in (2, 15)]\n"
        "import specdec_mlx\n"
        "new = set(sys.modules) - before[0]\n"
        "new = {name for name in new if name.startswith(('mlx', 'specdec'))}\n"
        "print(sorted(new), before[1] == [signal.getsignal(s) for s in (2, 15)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['specdec_mlx'] True\n"
