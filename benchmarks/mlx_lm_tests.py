"""mlx-lm's own tests, stock and with drafters installed: nothing else may come of them.

Its wheel has no tests, its source package has:

    pip download --no-deps --no-binary :all: mlx-lm==0.32.2
    tar xzf mlx_lm-0.32.2.tar.gz
    python -m benchmarks.mlx_lm_tests mlx_lm-0.32.2/tests

All run three times, each time in a process of its own: as they are, under `install()`, and under
`install("trees:recycling=true")`, which is in force before they import anything. The one
model that most of them load from the Hub is stood in for by another, quantized as its name says. A
test that wants other files of the Hub, or words of that very model, fails in the first column too,
and has to fail with the same in the others. The exit status is 1 if a column differs from the first
and `EXPECTED` has no reason for it, or if no test ran.
"""

# ruff: noqa: N802, N815  # unittest's names
from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import mlx.core as mx
import mlx_lm
import numpy as np
from transformers import AutoTokenizer

from specdec_mlx import lab, mlx_lm_plugin
from specdec_mlx.lab.tables import markdown_table

HUB_NAME = "mlx-community/Qwen1.5-0.5B-Chat-4bit"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
)
STOCK = "stock"
TREES = "trees:recycling=true"
COLUMNS: dict[str, Callable[[], Any]] = {
    STOCK: lambda: None,
    "install()": mlx_lm_plugin.install,
    "install, trees": lambda: mlx_lm_plugin.install(TREES),
}
EXPECTED = {
    "test_generate.TestGenerate.test_stream_generate_speculative": (
        "which tokens were drafted: five in two passes, as theirs, and our second draft is one "
        "token shorter, since the last token wanted comes with the verdict in any case"
    ),
    "test_server.TestServer.test_handle_completions": (
        "one seed, but mlx-lm's server shows the repetition penalty the whole prompt at the first "
        "request, and only what its cache lacks at the second: other logits. Whether the draws "
        "hide that is luck, and ours are others: of 40 seeds 14 gave two texts stock, 10 installed"
    ),
}
"""Tests that may end differently, each with its reason."""

OK, SKIPPED, MISSING = "ok", "skipped", "did not run"
TRUNCATED = 60  # characters of a failure in the table

Outcomes = dict[str, str]
ExcInfo = (
    tuple[type[BaseException], BaseException, TracebackType]
    | tuple[None, None, None]  # as unittest has it
)


class Recorder(unittest.TestResult):
    """Writes each test's outcome on a line of its own, as soon as it is known.

    Tests that do not seed their random numbers all begin with the same.

    Args:
        file: takes the lines, a pair in JSON each.
        speculation: the one in force, or None; what shows that a test generated with it.
    """

    def __init__(self, file: TextIO, speculation: Any) -> None:
        super().__init__()
        self._file, self._speculation, self._account = file, speculation, None
        self.speculated = 0

    def startTest(self, test: unittest.TestCase) -> None:
        """Seed."""
        super().startTest(test)
        random.seed(0)
        np.random.seed(0)
        mx.random.seed(0)

    def stopTest(self, test: unittest.TestCase) -> None:
        """Count it if an account of ours is new."""
        super().stopTest(test)
        account = getattr(self._speculation, "stats", None)
        self.speculated += account is not self._account
        self._account = account

    def addSuccess(self, test: unittest.TestCase) -> None:
        """Write it."""
        self._write(test, OK)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        """Write it."""
        self._write(test, SKIPPED)

    def addError(self, test: unittest.TestCase, err: ExcInfo) -> None:
        """Write with what; `test` may be a class whose set-up failed, or a module."""
        self._write(test, described(err[1]))

    addFailure = addError

    def addSubTest(
        self, test: unittest.TestCase, subtest: unittest.TestCase, err: ExcInfo | None
    ) -> None:
        """Write a part that failed, in the test's place."""
        if err is not None:
            self._write(test, described(err[1]))

    def _write(self, test: unittest.TestCase, outcome: str) -> None:
        print(json.dumps([test.id(), outcome]), file=self._file, flush=True)


def described(error: BaseException | None) -> str:
    """An error on one line, without what is another in each process."""
    message = " ".join(f"{type(error).__name__}: {error}".split())
    return re.sub(r"0x[0-9a-f]+|/\S+|\b\d{5,}\b", "...", message)


def run_column(column: str, tests: Path, pattern: str, outcomes: Path) -> None:
    """Run the tests in this process, in one of the ways.

    Args:
        column: one of `COLUMNS`.
        tests: folder of the test files.
        pattern: of their names.
        outcomes: file for `Recorder`, and at its end the number of tests that speculated.
    """
    speculation = COLUMNS[column]()
    suite = unittest.defaultTestLoader.discover(str(tests), pattern)
    with outcomes.open("w", encoding="utf-8") as file:
        recorder = Recorder(file, speculation)
        suite.run(recorder)
        print(json.dumps(["", recorder.speculated]), file=file)


def compare(tests: Path, pattern: str, model: Path) -> tuple[dict[str, Outcomes], dict[str, int]]:
    """Run every column: column -> test -> outcome, and column -> tests that speculated."""
    found: dict[str, Outcomes] = {}
    speculated: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="mlx-lm-tests-") as name:
        work = Path(name)
        environment = os.environ | stand_in(model, work / "hub")
        for number, column in enumerate(COLUMNS):
            outcomes, log = work / f"{number}.jsonl", work / f"{number}.log"
            command = [sys.executable, "-m", "benchmarks.mlx_lm_tests", str(tests)]
            command += ["--files", pattern, "--column", column, "--outcomes", str(outcomes)]
            print(f"{column} ...", file=sys.stderr, flush=True)
            with log.open("w", encoding="utf-8") as said:
                done = subprocess.run(
                    command, env=environment, stdout=said, stderr=subprocess.STDOUT, check=False
                )
            if done.returncode:
                print(
                    f"{column} ended with {done.returncode}:\n{log.read_text(encoding='utf-8')}",
                    file=sys.stderr,
                )
            pairs = dict(map(json.loads, outcomes.read_text(encoding="utf-8").splitlines()))
            speculated[column] = pairs.pop("", 0)
            found[column] = pairs
    return found, speculated


def stand_in(model: Path, hub: Path) -> dict[str, str]:
    """Put a model, quantized, where the Hub's files are kept; the environment that has it found."""
    folder = hub / "hub" / f"models--{HUB_NAME.replace('/', '--')}"
    snapshot = folder / "snapshots" / "stand-in"
    for made in (folder / "refs", snapshot.parent):
        made.mkdir(parents=True)
    (folder / "refs" / "main").write_text(snapshot.name, encoding="utf-8")
    mlx_lm.convert(str(model), str(snapshot), quantize=True, q_bits=4, q_group_size=64)
    if AutoTokenizer.from_pretrained(snapshot).chat_template is None:
        (snapshot / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return {"HF_HOME": str(hub), "HF_HUB_OFFLINE": "1"}


def differences(found: Mapping[str, Outcomes]) -> list[str]:
    """Tests that did not end in all columns as in the first."""
    names = dict.fromkeys(name for outcomes in found.values() for name in outcomes)
    return [
        name
        for name in names
        if len({outcomes.get(name, MISSING) for outcomes in found.values()}) > 1
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and what differs; 1 if that was not expected."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mlx_lm_tests",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("tests", type=Path, metavar="FOLDER", help="of mlx-lm's test files")
    add("--files", default="test_*.py", help="which of them (%(default)s)")
    add("--model", type=Path, help=f"model folder in the place of {HUB_NAME} (the lab's target)")
    add("--column", choices=COLUMNS, help=argparse.SUPPRESS)
    add("--outcomes", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.column:
        run_column(args.column, args.tests, args.files, args.outcomes)
        return 0
    found, speculated = compare(args.tests, args.files, args.model or lab.target_path())
    different = differences(found)
    names = dict.fromkeys(name for outcomes in found.values() for name in outcomes)
    rows = [
        [name, *(outcomes.get(name, MISSING)[:TRUNCATED] for outcomes in found.values())]
        for name in names
    ]
    print(markdown_table(["test", *found], rows, num_text_columns=1 + len(found)))
    for column, outcomes in found.items():
        num_ok = sum(outcome == OK for outcome in outcomes.values())
        said = f"{num_ok} of {len(names)} ok"
        print(f"\n{column}: {said}; {speculated[column]} tests generated with a drafter", end="")
    print()
    for name in different:
        print(f"\n{name}: {EXPECTED.get(name, 'NOT EXPECTED')}")
        for column, outcomes in found.items():
            print(f"    {column}: {outcomes.get(name, MISSING)}")
    return int(not set(different) <= EXPECTED.keys() or not names)


if __name__ == "__main__":
    sys.exit(main())
