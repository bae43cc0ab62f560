"""`specdec-mlx new-drafter NAME`: what it writes is a drafter that can be installed and named."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from specdec_mlx.cli.commands import main


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
