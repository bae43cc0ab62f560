"""The demo: three prompts, plain against speculative, side by side."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import stream_generate as plain_stream_generate

from specdec_mlx.bench.machine import blas_name
from specdec_mlx.bench.prompts import encode_chat
from specdec_mlx.drafters.model import ModelDrafter
from specdec_mlx.drafters.ngram import NGramDrafter
from specdec_mlx.drafters.prompt_lookup import PromptLookupDrafter
from specdec_mlx.generation import stream_generate
from specdec_mlx.models import four_bit_copy, load_model
from specdec_mlx.stats.account import SpeculationStats
from specdec_mlx.types import Drafter

CODE = """\
import math

def circle_area(radius):
    if radius < 0:
        raise ValueError("radius must not be negative")
    return math.pi * radius * radius

def circle_perimeter(radius):
    if radius < 0:
        raise ValueError("radius must not be negative")
    return 2 * math.pi * radius

def sphere_volume(radius):
    if radius < 0:
        raise ValueError("radius must not be negative")
    return 4 / 3 * math.pi * radius ** 3
"""

TEXT = """\
The lighthouse at Carrow Point was built in 1871, after two cargo ships had been lost on the reef
below it in a single winter. For ninety years a keeper and his family lived in the stone house
beside the tower, trimmed the lamp every four hours, and kept a diary of every ship that passed.
In 1961 the lamp was replaced by an electric one, and the last keeper, Anna Reyes, moved to the
village. She gave the diaries to the school, where they are still read every spring. Today the
tower is open to visitors from May to October, and the reef is a nature reserve."""

PROMPTS = {
    "edit code": f"Rename radius to r in this code and change nothing else:\n```python\n{CODE}```",
    "summarise": f"Summarise this text in three sentences:\n\n{TEXT}",
    "chat": "I have two days in Lisbon in spring. What should I see, and in which order?",
}


Way = Callable[[], Iterator[Any]]
"""A way of generating: called once for each run, it streams responses."""


@dataclass(frozen=True)
class Run:
    """One generation. tokens: ids; seconds: from the first token to the last."""

    tokens: list[int]
    seconds: float
    stats: SpeculationStats | None


@dataclass(frozen=True)
class Row:
    """A line of the table: one prompt with one drafter; time is relative to plain decoding."""

    prompt: str
    drafter: str
    num_tokens: int
    stats: SpeculationStats | None
    time_ratio: float
    identical: bool


def run_demo(
    model_path: Path | str, max_tokens: int, repeats: int, draft_length: int | str = 4
) -> bool:
    """Run, show and compare; whether all texts were identical."""
    print(f"Model: {model_path}", file=sys.stderr)
    model, tokenizer = load_model(model_path)
    drafters: dict[str, Drafter] = {
        "prompt-lookup": PromptLookupDrafter(),
        "ngram": NGramDrafter(),
        "model (4-bit copy)": ModelDrafter(four_bit_copy(model_path)),
    }
    generate = partial(stream_generate, max_tokens=max_tokens, draft_length=draft_length)
    show_live(generate, model, tokenizer, drafters["prompt-lookup"])
    rows: list[Row] = []
    for name, prompt in PROMPTS.items():
        ids = encode_chat(tokenizer, prompt)
        ways: dict[str, Way] = {
            "plain": partial(plain_stream_generate, model, tokenizer, ids, max_tokens),
            **{
                key: partial(generate, model, tokenizer, ids, drafter=drafter)
                for key, drafter in drafters.items()
            },
        }
        rows += compare(name, ways, repeats)
    print(format_table(rows))
    print(f"\n{length_note(draft_length)}\n{timing_note()}")
    return all(row.identical for row in rows)


def show_live(
    generate: Callable[..., Iterator[Any]], model: nn.Module, tokenizer: Any, drafter: Drafter
) -> None:
    """Stream the code edit; accepted draft tokens are underlined on a terminal."""
    prompt = encode_chat(tokenizer, PROMPTS["edit code"])
    on, off = ("\033[4m", "\033[0m") if sys.stdout.isatty() else ("", "")
    print(f"Live, with prompt lookup{' (accepted drafts underlined)' if on else ''}:\n")
    for response in generate(model, tokenizer, prompt, drafter=drafter):
        text = response.text
        print(f"{on}{text}{off}" if response.from_draft else text, end="", flush=True)
    print(f"\n\n{response.stats}\n")


def compare(name: str, ways: dict[str, Way], repeats: int) -> list[Row]:
    """Rows for one prompt: each way of generating in turn, `repeats` times over; plain is one."""
    from tqdm import tqdm

    runs: dict[str, list[Run]] = {key: [] for key in ways}
    bar = tqdm(total=repeats * len(runs), desc=name, leave=False, file=sys.stderr)
    for _ in range(repeats):
        for key, way in ways.items():
            runs[key].append(timed(way()))
            bar.update()
    bar.close()
    plain = runs["plain"][0]
    base = statistics.median(run.seconds for run in runs["plain"])
    return [
        Row(
            prompt=name,
            drafter=key,
            num_tokens=len(taken[0].tokens),
            stats=taken[0].stats,
            time_ratio=statistics.median(run.seconds for run in taken) / base,
            identical=all(run.tokens == plain.tokens for run in taken),
        )
        for key, taken in runs.items()
    ]


def timed(stream: Iterator[Any]) -> Run:
    """Run a generation to its end."""
    tokens: list[int] = []
    started = 0.0
    for response in stream:
        tokens.append(response.token)
        started = started or time.perf_counter()
    seconds = time.perf_counter() - started
    return Run(tokens, seconds, getattr(response, "stats", None))


def format_table(rows: Sequence[Row]) -> str:
    """The comparison as text, one line a row."""
    head = (
        f"{'prompt':<11}{'drafter':<20}{'tokens':>7}{'passes':>8}{'tok/pass':>10}"
        f"{'accepted/drafted':>18}{'time':>7}  text"
    )
    lines = [head, "-" * len(head)]
    for row in rows:
        stats = row.stats or SpeculationStats(target_passes=row.num_tokens)
        drafted = f"{stats.accepted}/{stats.drafted}" if stats.drafted else "-"
        lines.append(
            f"{row.prompt:<11}{row.drafter:<20}{row.num_tokens:>7}{stats.target_passes:>8}"
            f"{stats.tokens_per_pass:>10.2f}{drafted:>18}{row.time_ratio:>7.2f}  "
            f"{'identical' if row.identical else 'DIFFERENT'}"
        )
    return "\n".join(lines)


def length_note(draft_length: int | str) -> str:
    """What the draft length of the table means."""
    if draft_length == "auto":
        return "draft length: auto, which drafts where it pays, and learns that from a few rounds."
    return (
        f"draft length: {draft_length}, fixed, to compare drafters. The default elsewhere is auto, "
        "which drafts only where it pays (--draft-length auto)."
    )


def timing_note() -> str:
    """What the time column means on this machine."""
    note = "time: relative to plain mlx-lm, first token to last; below 1 is sooner."
    if mx.default_device() == mx.gpu:
        return note
    if (blas := blas_name()) != "reference BLAS":
        return (
            f"{note}\nThis is a CPU with {blas}: float32 is bandwidth-bound as on a Mac; 4-bit "
            "weights are not, so the draft model's time says nothing about a Mac."
        )
    return (
        f"{note}\nThis is a CPU with MLX's {blas}, where a pass over m positions costs m times "
        "one, so that no drafting can pay and the time column says nothing about a Mac.\nWith "
        "Debian's libopenblas0-pthread and LD_PRELOAD=libopenblas.so.0 it does."
    )
