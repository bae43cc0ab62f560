"""Install each package in an environment of its own, put the questions, and write the page."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.conformance.peers import PEERS, Peer
from benchmarks.conformance.questions import QUESTIONS, Answer, answers

ROOT = Path(__file__).parents[2]
NEEDED = ["mlx[cpu]", "mlx-lm", "scipy", "jaxtyping", "beartype", "msgspec"]
"""What the questions and this repository need beside a package."""


def python_for(peer: Peer, folder: Path) -> str:
    """The interpreter of a package's environment, which is made at first use."""
    home = folder / peer.package
    python = home / "bin" / "python"
    if not python.exists():
        venv.create(home, with_pip=True)
        wanted = [peer.requirement] if peer.requirement else []
        command = [str(python), "-m", "pip", "install", "--quiet", "--pre", *wanted, *NEEDED]
        subprocess.run(command, check=True)
    return str(python)


def ask(name: str, folder: Path) -> dict[str, Any]:
    """Put all questions to a package in its own environment; the answers as JSON has them."""
    python = python_for(PEERS[name], folder)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    command = [python, "-m", "benchmarks.conformance", "--ask", name]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def answer_all(name: str) -> dict[str, Any]:
    """Ask the package that this interpreter has."""
    peer = PEERS[name]
    found: dict[str, Answer] = {}
    for column, answer in answers(peer):
        found[column] = answer
        print(f"{name}: {column}: {answer.word} ({answer.evidence})", file=sys.stderr, flush=True)
    return {
        "package": peer.package,
        "version": version(peer.package) if peer.requirement else "this repository",
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
        "calls": peer.calls,
        "answers": {column: answer.to_dict() for column, answer in found.items()},
    }


def page(results: dict[str, dict[str, Any]], date: str) -> str:
    """The table and the evidence, as Markdown."""
    names = list(results)
    lines = [
        f"| | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
        f"| version | {' | '.join(results[name]['version'] for name in names)} |",
    ]
    for column in QUESTIONS:
        words = [results[name]["answers"][column]["word"] for name in names]
        lines.append(f"| {column} | {' | '.join(words)} |")
    lines += [
        "",
        f"Run on {date} on a CPU, with mlx {results[names[0]]['mlx']}.",
        "",
        "## Evidence",
    ]
    for name in names:
        lines += ["", f"### {name}", "", f"Called: {results[name]['calls']}.", ""]
        lines += ["| question | answer | evidence |", "|---|---|---|"]
        for column, answer in results[name]["answers"].items():
            evidence = answer["evidence"].replace("|", "\\|")
            lines.append(f"| {column} | {answer['word']} | {evidence} |")
    return "\n".join(lines) + "\n"


MARK = "<!-- The rest of this page is written by benchmarks.conformance. -->\n"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conformance")
    parser.add_argument(
        "folder", nargs="?", type=Path, help="where environments and answers are kept"
    )
    parser.add_argument("--peer", action="append", choices=PEERS, help="repeatable; all by default")
    parser.add_argument("--page", type=Path, help="a page whose table and evidence are replaced")
    parser.add_argument("--ask", choices=PEERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ask:
        print(json.dumps(answer_all(args.ask)))
        return 0
    if args.folder is None:
        parser.error("name a folder for the environments, such as /tmp/conformance")
    args.folder.mkdir(parents=True, exist_ok=True)
    kept = args.folder / "answers.json"
    results = json.loads(kept.read_text("utf-8")) if kept.exists() else {}
    for name in args.peer or PEERS:
        results[name] = ask(name, args.folder)
        kept.write_text(json.dumps(results, indent=1), "utf-8")
    results = {name: results[name] for name in PEERS if name in results}
    table = page(results, datetime.date.today().isoformat())
    if args.page:
        words = args.page.read_text("utf-8").partition(MARK)[0] if args.page.exists() else ""
        args.page.write_text(words + MARK + "\n" + table, "utf-8")
    else:
        print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
