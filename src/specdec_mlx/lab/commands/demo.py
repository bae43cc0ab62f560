"""`specdec-mlx demo`: plain decoding against speculation, on real text.

It shows `num_draft_tokens="auto"` beside a fixed length, in turns of a few tokens. "auto" gains on
an edit, a summary and the trained pair, and nothing can be gained on a chat.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream, wired_limit

from specdec_mlx.arguments import checked, number, parse_draft_length
from specdec_mlx.cli.blas import (
    REFERENCE_BLAS,
    THREADS,
    as_shell,
    blas_name,
    start_again_with_openblas,
)
from specdec_mlx.contracts import Drafter
from specdec_mlx.draft_length.store import Tuning, tuning_for
from specdec_mlx.drafters.choosing.registry import DEFAULT_DRAFTER
from specdec_mlx.drafters.model import ModelDrafter
from specdec_mlx.drafters.suffix import SuffixDrafter
from specdec_mlx.generation import SpeculativeResponse, stream_generate
from specdec_mlx.lab import demo_model
from specdec_mlx.lab.bench.record import SPEEDS, describe_dtype, describe_machine, results_table
from specdec_mlx.lab.bench.summary import Result, find_differences, summarise
from specdec_mlx.lab.bench.timing import (
    PLAIN,
    TURN_TOKENS,
    Sample,
    Settings,
    ours,
    plain,
    take_turns,
    turns_of,
)
from specdec_mlx.lab.commands.shared_flags import SMALL_MODEL
from specdec_mlx.lab.pair import held_out_openings, load_pair
from specdec_mlx.lab.prompts import RecordedText, encode_chat
from specdec_mlx.lab.tables import Columns, markdown_table
from specdec_mlx.models.loading import load_model

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
"""

TEXT = """\
The lighthouse at Carrow Point was built in 1871, after two cargo ships had been lost on the reef
below it in a single winter. For ninety years a keeper and his family lived in the stone house
beside the tower, trimmed the lamp every four hours, and kept a diary of every ship that passed.
In 1961 the lamp was replaced by an electric one, and the last keeper, Anna Reyes, moved to the
village. She gave the diaries to the school, where they are still read every spring. Today the
tower is open to visitors from May to October, and the reef is a nature reserve."""

PROMPTS = {
    "edit": f"Rename radius to r in this code and change nothing else:\n```python\n{CODE}```",
    "summary": f"Summarise this text in three sentences:\n\n{TEXT}",
    "chat": "I have two days in Lisbon in spring. What should I see, and in which order?",
}
LIVE_CODE = CODE.partition("\n\n")[2].partition("\n\n")[0]  # the first function
LIVE_PROMPT = f"Rename radius to size in this code and show all of it:\n```python\n{LIVE_CODE}\n```"

PAIR, PAIR_TOPIC, PAIR_TOKENS = "lab pair", "power", 192  # of one letter each

LIVE_TOKENS, LEAST_TOKENS, SHORT_TOKENS = 20, 40, 100
"""Tokens that the live text has before the clock may cut it; tokens that a row of the table needs;
tokens below which a row explains why "auto" is slower than plain decoding."""

CONTRAST = "4"  # a fixed draft length, as in most programs

LIVE_SHARE, PAIR_SHARE = 0.12, 0.1
"""Most of the time that may go into the live texts, and into the pair that ships."""

IDENTICAL, TIE, DIFFERENT = ("identical", "parts at a tie", "DIFFERENT")
"""Plain decoding's tokens; other ones from a place on where the target's two greatest logits are
equal up to rounding, which on a GPU may fall either way; other ones."""

WIDTH = 100  # columns of the lines beneath the table


@dataclass(frozen=True)
class Show:
    """Texts that one model writes with a drafter.

    Attributes:
        name: of the drafter in tables.
        live: prompt of a text from which "auto" learns the costs of passes.
        tasks: prompts of the texts that are compared.
    """

    model: nn.Module
    tokenizer: Any
    name: str
    drafter: Drafter
    live: list[int]
    tasks: list[RecordedText]
    max_tokens: int
    end_tokens: frozenset[int] = frozenset()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, count = parser.add_argument, number(int, 1)
    add("--model", help=SMALL_MODEL)
    add(
        "--seconds",
        type=count,
        default=45,
        help=f"time for the generation; texts are cut to fit, after {LEAST_TOKENS} tokens "
        "at the earliest (%(default)s)",
    )
    add("--max-tokens", type=count, default=64, help="most tokens of a text (%(default)s)")
    add(
        "--repeats",
        type=count,
        default=3,
        help="timed runs of each text, as many as fit (%(default)s at most)",
    )
    tokens, length = ("tokens a round, or auto (%(default)s)", checked(parse_draft_length))
    add("--num-draft-tokens", type=length, default="auto", metavar="K", help=tokens)
    add(
        "--print-model-path",
        action="store_true",
        help="prepare the demo model, print its folder, and do nothing else",
    )


def main(args: argparse.Namespace) -> int:
    """Return 1 if a text differs from plain decoding beyond rounding, and 0 otherwise.

    The pair that ships is shown with the default model only.
    """
    preloaded = {} if args.print_model_path else start_again_with_openblas("demo")
    path = args.model or demo_model.demo_model_path()
    if args.print_model_path:
        print(path)
        return 0
    seconds, draft_length = args.seconds, args.num_draft_tokens
    say(f"Plain mlx-lm against speculation, the same texts side by side, with {Path(path).name}.")
    model, tokenizer = load_model(path)
    say_what_multiplies(preloaded)
    shows = [prompts_of(model, tokenizer, args.max_tokens)]
    shows += [] if args.model else [pair_that_ships()]
    texts = [task.id for show in shows for task in show.tasks]
    say(
        f"Next, in about {seconds:.0f} s, or more on a slow machine: a text live, then "
        f"{', '.join(texts)}, by turns."
    )
    began, results = time.perf_counter(), list[Result]()
    with wired_limit([show.model for show in shows], [generation_stream]):
        for i, show in enumerate(shows):
            responses = live_text(show, draft_length, began + LIVE_SHARE * seconds * (i + 1))
            show_live(responses) if i == 0 else deque(responses, maxlen=0)
        for show in shows[::-1]:  # the pair first, which takes little
            # The last show may use all time that is left.
            share = 1.0 if show is shows[0] else LIVE_SHARE * len(shows) + PAIR_SHARE
            samples = play(show, draft_length, began + share * seconds, args.repeats)
            differences = find_differences(show.model, show.tasks, samples)
            results[:0] = summarise(samples, differences)
    rows = [r for r in results if r.category in texts and r.drafter != PLAIN]
    notes = legend(rows, texts, model, results[0].total_tokens_per_second)
    print(f"{format_table(rows)}\n\n{notes}", flush=True)
    return int(any(verdict(row) == DIFFERENT for row in rows))


def prompts_of(model: nn.Module, tokenizer: Any, max_tokens: int) -> Show:
    tasks = [
        RecordedText(name, name, encode_chat(tokenizer, text)) for name, text in PROMPTS.items()
    ]
    live, end_tokens = encode_chat(tokenizer, LIVE_PROMPT), frozenset(tokenizer.eos_token_ids)
    drafter = SuffixDrafter()
    return Show(model, tokenizer, DEFAULT_DRAFTER, drafter, live, tasks, max_tokens, end_tokens)


def pair_that_ships() -> Show:
    """The lab pair, on a text from a topic that it was not trained on."""
    target, draft, tokenizer = load_pair()
    opening, live = (
        list(tokenizer.encode(text)) for name, _, text in held_out_openings() if name == PAIR_TOPIC
    )
    drafter = ModelDrafter(draft, tokenizer=tokenizer)
    tasks = [RecordedText(PAIR, PAIR, opening)]
    return Show(target, tokenizer, "model", drafter, live, tasks, PAIR_TOKENS)


def say(text: str) -> None:
    """Print to standard error at once. Results go to standard output."""
    print(text, file=sys.stderr, flush=True)


def say_what_multiplies(preloaded: dict[str, str]) -> None:
    """On a Linux CPU, name the BLAS, and its consequences for speculation."""
    if sys.platform != "linux" or mx.default_device() != mx.cpu:
        return
    if blas_name() == REFERENCE_BLAS:
        say(
            "MLX's wheel has the reference BLAS here, where a pass over m positions costs m times "
            'one: no draft can pay. pip install "specdec-mlx[cpu]" brings OpenBLAS (20 MB); this '
            "command then preloads it by itself; or LD_PRELOAD=libopenblas.so.0, the system's own."
        )
        return
    variables = as_shell(preloaded | {THREADS: os.environ.get(THREADS, "1")})
    advice = f"; for programs of your own: {variables}" if preloaded else ""
    say(f"Matrices are multiplied by {blas_name()}{advice}.")


def live_text(show: Show, draft_length: str, until: float) -> Iterator[SpeculativeResponse]:
    responses = stream_generate(
        *(show.model, show.tokenizer, show.live, show.max_tokens),
        drafter=show.drafter,
        num_draft_tokens=parse_draft_length(draft_length),
    )
    with closing(responses):
        for response in responses:
            yield response
            # "auto" needs some passes to learn their costs.
            is_long_enough = response.generation_tokens >= LIVE_TOKENS
            if is_long_enough and time.perf_counter() > until:
                return


def show_live(responses: Iterator[SpeculativeResponse]) -> None:
    on, off = ("\033[4m", "\033[0m") if sys.stdout.isatty() else ("", "")
    print(f"Live{' (accepted drafts underlined)' if on else ''}:\n")
    for response in responses:
        text = response.text
        print(f"{on}{text}{off}" if response.from_draft else text, end="", flush=True)
    print(f"\n\n{response.stats}\n", flush=True)


def play(show: Show, draft_length: str, until: float, repeats: int) -> list[Sample]:
    """Write each text with all contenders in turns, and cut all at the same token in time.

    The first text is always long enough to be timed. Later texts may be left out.
    """

    def learned() -> Tuning:
        # Each text begins with what "auto" learned from the live text.
        return copy.deepcopy(tuning_for(show.model))

    way: Any = {"tokenizer": show.tokenizer, "tuning_for_text": learned}
    contenders = [plain(show.model)]
    for length in dict.fromkeys((draft_length, CONTRAST)):
        contenders.append(ours(show.model, show.drafter, show.name, length, **way))
    settings = Settings(show.max_tokens, end_tokens=show.end_tokens)
    samples: list[Sample] = []
    for repeat in range(repeats):
        began = time.perf_counter()
        for left, task in zip(range(len(show.tasks), 0, -1), show.tasks, strict=True):
            now = time.perf_counter()
            if samples and now > until:
                return samples
            runs = [turns_of(way, task, settings, repeat) for way in contenders]
            samples += take_turns(runs, repeat, turns_until(now + (until - now) / left))
        now = time.perf_counter()
        # A repeat takes about as long as the repeat before.
        if now + (now - began) > until:
            break
    return samples


def turns_until(end: float) -> Callable[[], bool]:
    """A condition for more turns: fewer than `LEAST_TOKENS`, or before `end`."""
    turns = count()
    least = 1 + math.ceil(LEAST_TOKENS / TURN_TOKENS)  # the first turn is one token
    return lambda: next(turns) < least or time.perf_counter() < end


def verdict(row: Result) -> str:
    if row.identical:
        return IDENTICAL
    return TIE if row.excused else DIFFERENT


def is_timed(row: Result) -> bool:
    return row.ratio is not None and row.tokens >= LEAST_TOKENS


COLUMNS: Columns = {
    "tokens": lambda row: str(row.tokens),
    "speed": lambda row: f"{row.ratio:.2f} times plain",
    "tokens a pass": SPEEDS["tok/pass"],
    "accepted": SPEEDS["accepted"],
    "identical": verdict,
}


def format_table(rows: Sequence[Result]) -> str:
    return markdown_table(*results_table([row for row in rows if is_timed(row)], COLUMNS, "text"))


def remarks(rows: Sequence[Result], texts: Sequence[str]) -> list[str]:
    """Why a text has no row, and why "auto" is slower than plain decoding in a short row."""
    begun = {row.category for row in rows}
    lines = [
        f"{text} is left out: the time was over before its turn. Use a larger --seconds."
        for text in texts
        if text not in begun
    ]
    for row in rows:
        # Short texts do not repay the drafts with which "auto" learns.
        is_short = row.draft_length == "auto" and row.tokens < SHORT_TOKENS
        if not is_timed(row):
            lines.append(
                f"{row.category} is left out ({verdict(row)}): it has {row.tokens} tokens, and a "
                f"speed takes {LEAST_TOKENS}, from more than one pass."
            )
        elif is_short and round(row.ratio or 0, 2) < 1:
            cause = "It found no draft that it expected to pay."
            if row.drafted:
                cause = (
                    f"It drafted {row.drafted} tokens to learn whether drafts pay, which takes "
                    f"time, and {row.accepted} were accepted."
                )
            lines.append(
                f"{row.category}: auto is below plain. {cause} A speed over {row.tokens} tokens "
                "also varies from run to run."
            )
    return list(dict.fromkeys(lines))


def legend(
    rows: Sequence[Result], texts: Sequence[str], model: nn.Module, plain_speed: float | None
) -> str:
    """The outcome, an explanation of the table, and the machine.

    Args:
        rows: of the table.
        texts: names of all texts.
        model: the target.
        plain_speed: of plain decoding in tokens per second.
    """
    speed = f" ({plain_speed:.1f} a second)" if plain_speed else ""
    num_same = sum(verdict(row) == IDENTICAL for row in rows)
    machine = describe_machine()
    blas = f"{machine['blas']}, " if mx.default_device() == mx.cpu else ""
    lines = [
        f"{num_same} of {len(rows)} texts are plain mlx-lm's, token by token.",
        *remarks(rows, texts),
        "speed: tokens a second from the first token to the last, over those of plain mlx-lm"
        f"{speed}, which took turns with it; medians of all repeats that there was time for.",
        "accepted: draft tokens of all repeats. K: most tokens drafted for a pass; auto, the "
        "default, drafts where it pays.",
        f"Machine: {machine['processor']}, {machine['cores']} cores, {machine['device']}, "
        f"{describe_dtype(model)}, {blas}mlx {machine['mlx']}, mlx-lm {machine['mlx-lm']}.",
    ]
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores + 1:  # one is this program
        lines.append(f"Others use this machine too (load {load:.0f}): speeds vary between runs.")
    return "\n".join(textwrap.fill(line, WIDTH) for line in lines)
