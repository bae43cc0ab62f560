"""The tables at the top of docs/benchmarks.md, with today's default, by one command.

    python -m benchmarks.tables FOLDER --prompts FILE --agents FILE --edits FILE

Four kinds of texts: 40 prompts, agents' conversations and edits of files by replay, in counts and
at what a pass costs on two chips, and the pair that ships live beside mlx-lm. What a command has
written into FOLDER is kept, so that a run that was stopped goes on. The page gets the tables, the
machine and the day.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specdec_mlx import lab
from specdec_mlx.lab.bench.summary import ALL
from specdec_mlx.lab.tables import markdown_table

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- tables: benchmarks/tables.py -->", "<!-- end of tables -->"

PROMPTS = "--per-category 5 --max-tokens 80"
SESSIONS = (
    "--drafter prompt-lookup --drafter auto --drafter auto:memory=process --num-draft-tokens auto"
)
COSTS = {"m3-max": "M3 Max", "m5-max-27b": "M5 Max", "linear:0.24": "0.24 a position"}
PAIR = "--drafter model --max-tokens 192 --repeats 2"
LENGTHS = "--num-draft-tokens 3 --num-draft-tokens 4 --num-draft-tokens auto"

Result = Mapping[str, Any]


def run(folder: Path, name: str, command: str) -> Any:
    """Run `specdec-mlx COMMAND --json FILE` unless the file exists, and read the file."""
    path, failed = folder / f"{name}.json", folder / f"{name}.failed"
    if not path.exists():
        words = [sys.executable, "-m", "specdec_mlx", *shlex.split(command), "--json", str(failed)]
        subprocess.run(words, check=True)
        failed.rename(path)
    return json.loads(path.read_text("utf-8"))


def prompts(scores: Iterable[Result]) -> str:
    """A row for each kind of prompt: counts, and modelled speeds by cost."""
    header = ["40 prompts, replayed", "tokens a pass", "accepted/drafted", *COSTS.values()]
    kinds: dict[str, dict[str, Result]] = {}
    for score in scores:
        kinds.setdefault(score["category"], {})[score["cost"]] = score
    rows = []
    for kind, by_cost in kinds.items():
        found = by_cost["linear:0.24"]
        counts = f"{found['accepted']}/{found['drafted']}"
        rows.append([kind, f"{found['tokens_per_pass']:.2f}", counts, *modelled(by_cost)])
    return markdown_table(header, rows, 1)


def modelled(by_cost: Mapping[str, Result]) -> list[str]:
    """The speeds of one way of drafting."""
    return [f"{by_cost[cost]['ratio']:.2f}" for cost in COSTS]


def sessions(kinds: Mapping[str, Iterable[Result]]) -> str:
    """A row for each kind of session and drafter: counts, and modelled speeds by cost."""
    header = ["replayed", "drafter", "tokens a pass", *COSTS.values()]
    rows = []
    for kind, scores in kinds.items():
        ways: dict[str, dict[str, Result]] = {}
        for score in scores:
            if score["category"] == ALL and not score["session"]:
                ways.setdefault(score["drafter"], {})[score["cost"]] = score
        for drafter, by_cost in ways.items():
            passes = f"{by_cost['linear:0.24']['tokens_per_pass']:.2f}"
            rows.append([kind, f"`{drafter}`", passes, *modelled(by_cost)])
    return markdown_table(header, rows, 2)


def pair(by_temp: Mapping[float, Iterable[Result]]) -> str:
    """A row for each temperature and way of drafting with the pair's draft model, live."""
    header = ["the pair that ships", "temperature", "K", "speed", "95%", "tokens a pass"]
    rows = [
        [
            "mlx-lm's own" if found["drafter"].startswith("mlx-lm") else "ours",
            f"{temp:g}",
            found["draft_length"],
            f"{found['ratio']:.2f}",
            f"{found['ratio_low']:.2f} to {found['ratio_high']:.2f}",
            f"{found['tokens_per_pass']:.2f}",
        ]
        for temp, results in by_temp.items()
        for found in results
        if found["category"] == ALL and found["draft_length"]
    ]
    return markdown_table(header, rows, 3)


def machine(record: Mapping[str, Any]) -> str:
    """Where and when the live rows were measured."""
    said, settings = record["machine"], record["settings"]
    return (
        f"The pair live: {said['processor']}, {said['cores']} cores, {said['blas']}, "
        f"{settings['dtype']}, mlx {said['mlx']}, mlx-lm {said['mlx-lm']}, "
        f"{datetime.now(UTC):%Y-%m-%d}."
    )


def tables(args: argparse.Namespace) -> str:
    """Run what is missing, and lay all of it out."""
    folder: Path = args.folder
    run(folder, "texts", f"bench --prompts {args.prompts} {PROMPTS}")
    costs = " ".join(f"--cost {cost}" for cost in COSTS)
    by_kind = run(folder, "prompts", f"replay {folder / 'texts.json'} {costs}")
    scores = {
        kind: run(folder, kind, f"replay --sessions {path} {SESSIONS} {costs}")
        for kind, path in (("agents", args.agents), ("edits", args.edits))
    }
    openings = folder / "lab.jsonl"
    made = subprocess.run(
        [sys.executable, "-m", "specdec_mlx.lab", "prompts"], check=True, capture_output=True
    )
    openings.write_bytes(made.stdout)
    models = f"--model {lab.target_path()} --draft-model {lab.draft_path()}"
    live = f"bench {models} --prompts {openings} {PAIR} {LENGTHS} --no-cost"
    records = {
        temp: run(folder, f"pair-{temp:g}", f"{live} --temp {temp:g}") for temp in (0.0, 1.0)
    }
    by_temp = {temp: record["results"] for temp, record in records.items()}
    parts = prompts(by_kind), sessions(scores), pair(by_temp), machine(records[1.0])
    return "\n\n".join(parts)


def main() -> None:
    """Write the tables into the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("folder", type=Path, help="where results are kept")
    for name in ("prompts", "agents", "edits"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    page = PAGE.read_text("utf-8")
    place = re.compile(rf"(?<={BEGIN}\n).*?(?={END})", re.S)
    PAGE.write_text(place.sub(lambda _: f"\n{tables(args)}\n\n", page), "utf-8")


if __name__ == "__main__":
    main()
