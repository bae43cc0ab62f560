"""Programs on mlx-lm that are installed here write stock's text, as the cookbook's blocks say.

`python -m benchmarks.hosts FOLDER` installs all of them, and runs the same.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from benchmarks import hosts
from selection import FULL

PAGE = hosts.PAGE.read_text()


def test_every_program_of_the_script_has_a_block_and_a_row() -> None:
    """A block that names the model or the server, and with `install()` the account."""
    for host in hosts.HOSTS.values():
        block = hosts.block_of(host, PAGE)
        assert (hosts.MODEL in block) != (hosts.URL in block)
        if host.way != "plugin":
            compile(block, host.name, "exec")
            assert re.search("^text = ", block, re.M)
            assert ("speculation = " in block) == (host.way != "server")
        assert f"\n| {host.name} | " in PAGE
    rows = re.findall(r"^\| (?!program|---)([^|]+) \| [\d.]+ \| `", PAGE, re.M)
    assert sorted(rows) == sorted(host.name for host in hosts.HOSTS.values())


@FULL
def test_programs_that_are_here_write_the_same_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each that can be imported; mlx-lm and openai's client always can."""
    ran, model = [], hosts.model_folder(tmp_path)
    for host in hosts.are_here():
        with hosts.servers(model) as serve:
            result = hosts.try_host(host, sys.executable, model, serve)
        assert result.text == result.stock, host.name
        emitted, passes = result.passes
        assert emitted > passes > 0, host.name
        ran.append(host.name)
    assert {"A program that reads the prompt itself", "openai"} <= set(ran)
    with capsys.disabled():
        print(f"\n{len(ran)} of {len(hosts.HOSTS)} programs ran: {', '.join(ran)}")
