"""What a memory costs: `python -m benchmarks.memory --tokenizer M FILE|FOLDER...`.

A memory is built from files, saved, loaded, and drafted from: a few of the files are left out of
it, and written as they stand, after a prompt that is their first half. Times are of this machine,
and of nothing beside it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int
from mlx_lm.utils import load_tokenizer

from specdec_mlx.contracts import DraftContext, Drafter
from specdec_mlx.drafters.suffix import SuffixDrafter
from specdec_mlx.lab.proposing import proposing
from specdec_mlx.lab.tables import markdown_table
from specdec_mlx.memory import Memory
from specdec_mlx.memory.index import ContextIndex
from specdec_mlx.memory.store import join

TEXTS, TOKENS = 20, 300
"""Texts that are left out and written, spread over all, and how many tokens of each."""

LIMIT = 8


@dataclass
class Costs:
    """Seconds and bytes.

    Attributes:
        tokens: in the memory.
        reading: seconds to read and tokenize the files.
        building: seconds to sort them.
        saving: seconds.
        loading: seconds until the first look-up can be made.
        disk: bytes a token.
        memory: bytes a token.
        rounds: seconds of propose and observe of each round, by drafter.
        per_pass: tokens that a pass would have given, by drafter.
    """

    tokens: int
    reading: float
    building: float
    saving: float
    loading: float
    disk: float
    memory: float
    rounds: dict[str, list[float]]
    per_pass: dict[str, float]


def measure(paths: Sequence[Path | str], tokenizer: object, max_tokens: int) -> Costs:
    """Build, save, load, and draft.

    Args:
        paths: files and folders.
        tokenizer: of the texts.
        max_tokens: in the memory; the oldest go first.
    """
    memory, reading = Memory(max_tokens), time.perf_counter()
    memory.update(paths, tokenizer)
    reading = time.perf_counter() - reading
    texts = memory.texts()
    step, memory = max(2, len(texts) // TEXTS), Memory(max_tokens)
    left_out = texts[::step][:TEXTS]
    for place, text in enumerate(texts):
        if place % step or place >= step * TEXTS:
            memory.add(text.tolist())
    memory.compact()
    everything = join(memory.texts())
    building = time.perf_counter()
    ContextIndex(everything)
    building = time.perf_counter() - building
    with tempfile.TemporaryDirectory() as folder:
        path, saving = Path(folder, "memory"), time.perf_counter()
        memory.save(path)
        saving = time.perf_counter() - saving
        loading = time.perf_counter()
        loaded = Memory.load(path)
        loading = time.perf_counter() - loading
        disk = path.stat().st_size / len(memory)
    drafters = {"suffix": SuffixDrafter(loaded)}
    written = {name: _write(drafter, left_out) for name, drafter in drafters.items()}
    return Costs(
        tokens=len(memory),
        reading=max(0.0, reading - building),
        building=building,
        saving=saving,
        loading=loading,
        disk=disk,
        memory=memory.num_bytes / len(memory),
        rounds={name: rounds for name, (rounds, _) in written.items()},
        per_pass={name: per_pass for name, (_, per_pass) in written.items()},
    )


def format_costs(costs: Costs) -> str:
    """A table."""
    rows = [
        ("tokens", f"{costs.tokens:,}"),
        ("read and tokenize", f"{costs.reading:.1f} s"),
        ("build", f"{costs.building:.1f} s"),
        ("save", f"{costs.saving:.2f} s"),
        ("load", f"{costs.loading:.2f} s"),
        ("on disk", f"{costs.disk:.1f} bytes a token"),
        ("in memory", f"{costs.memory:.0f} bytes a token"),
    ]
    for name, rounds in costs.rounds.items():
        median, percentile = statistics.median(rounds), statistics.quantiles(rounds, n=10)[-1]
        measured = f"{1e6 * median:.0f} us median, {1e6 * percentile:.0f} p90"
        rows.append((f"{name}: propose and observe", measured))
        rows.append((f"{name}: tokens a pass", f"{costs.per_pass[name]:.2f}"))
    return markdown_table(("what", "measured"), rows, 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory")
    parser.add_argument("paths", nargs="+", metavar="FILE|FOLDER")
    parser.add_argument("--tokenizer", required=True, metavar="MODEL")
    parser.add_argument("--max-tokens", type=int, default=1_000_000, metavar="N")
    args = parser.parse_args(arguments)
    print(format_costs(measure(args.paths, load_tokenizer(args.tokenizer), args.max_tokens)))
    return 0


def _write(drafter: Drafter, texts: Sequence[Int[np.ndarray, " n"]]) -> tuple[list[float], float]:
    """Seconds of each round, and tokens a pass, of writing texts whose first half is the prompt."""
    seconds: list[float] = []
    written = 0
    for text in texts:
        half = len(text) // 2
        session = drafter.begin(text[:half].tolist(), DraftContext())
        propose = proposing(session, "")
        coming = text[half : half + TOKENS].tolist()
        while coming:
            begun = time.perf_counter()
            proposed = propose(LIMIT)
            took = time.perf_counter() - begun
            draft = list(proposed.tokens)
            matching = zip(draft, coming, strict=False)
            kept = next((i for i, (a, b) in enumerate(matching) if a != b), len(draft))
            emitted = coming[: kept + 1]
            begun = time.perf_counter()
            session.observe(emitted)
            seconds.append(took + time.perf_counter() - begun)
            coming = coming[len(emitted) :]
            written += len(emitted)
    return seconds, written / len(seconds)


if __name__ == "__main__":
    sys.exit(main())
