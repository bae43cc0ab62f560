"""The demo: the same texts by plain mlx-lm and by speculation, side by side, within a given time.

It shows `draft_length="auto"` where it gains (an edit, a summary, the trained pair) and where
nothing can be gained (a chat), beside a fixed length, in turns of a few tokens.
"""

from __future__ import annotations

import copy
import os
import sys
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream, wired_limit

from specdec_mlx.bench.contenders import Contender, Emitted, ours, plain
from specdec_mlx.bench.machine import REFERENCE_BLAS, blas_name
from specdec_mlx.bench.prompts import Task, encode_chat
from specdec_mlx.bench.timing import TURN_TOKENS, Sample, take_turns
from specdec_mlx.cli.blas import THREADS
from specdec_mlx.cli.demo_report import (
    DIFFERENT,
    LEAST_TOKENS,
    Budget,
    Row,
    Scene,
    compare,
    fit,
    format_table,
    legend,
    measure_pace,
)
from specdec_mlx.contracts import Drafter
from specdec_mlx.draft_length.policy import parse_draft_length
from specdec_mlx.draft_length.store import tuning_for
from specdec_mlx.drafters.model import ModelDrafter
from specdec_mlx.drafters.ngram import NGramDrafter
from specdec_mlx.drafters.prompt_lookup import PromptLookupDrafter
from specdec_mlx.generation import stream_generate
from specdec_mlx.lab.pair import held_out_openings, load_pair
from specdec_mlx.models import load_model
from specdec_mlx.responses import SpeculativeResponse

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

LIST = """\
def shopping_list(items):
    for item in items:
        print("- " + item)
    print("That is all.")
"""

PROMPTS = {
    "edit": f"Rename radius to r in this code and change nothing else:\n```python\n{CODE}```",
    "summary": f"Summarise this text in three sentences:\n\n{TEXT}",
    "chat": "I have two days in Lisbon in spring. What should I see, and in which order?",
}
LIVE_PROMPT = f"Rename items to things in this code and show all of it:\n```python\n{LIST}```"

REHEARSAL_TOKENS = 40
PAIR, PAIR_TOPIC, PAIR_TOKENS = "lab pair", "power", 192  # of one letter each
CONTRAST = "4"  # A fixed draft length, as in most programs
REHEARSAL_SHARE, PAIR_SHARE = 0.12, 0.1  # most of the time that these may take


@dataclass(frozen=True)
class Show:
    """The texts that one model writes, by drafters, the most important first.

    rehearsal: a further prompt of `rehearsal_tokens`, from which "auto" learns the costs of passes.
    """

    model: nn.Module
    tokenizer: Any
    drafters: Mapping[str, Drafter]
    rehearsal: list[int]
    rehearsal_tokens: int
    scenes: Sequence[Scene]


def run_demo(
    model_path: Path | str,
    *,
    max_tokens: int = 64,
    seconds: float = 45.0,
    repeats: int = 3,
    draft_length: str = "auto",
    is_default: bool = True,
    preloaded: str | None = None,
) -> bool:
    """Say what is going to happen, run it, and show it; True if all texts are plain decoding's.

    model_path: folder or Hugging Face name. seconds: of all generation; what does not fit is cut or
    left out. draft_length: the fixed one beside "auto". is_default: also show the pair that ships.
    preloaded: the matrix library of this process.
    """
    name = Path(model_path).name
    say(f"Plain mlx-lm against speculation, the same texts side by side, with {name}.")
    model, tokenizer = load_model(model_path)
    say_what_multiplies(preloaded)
    whole = three_prompts(model, tokenizer, draft_length, max_tokens)
    pair = [pair_that_ships(draft_length)] if is_default else []
    share = 1 - REHEARSAL_SHARE - PAIR_SHARE * len(pair)
    main = cut(whole, share * seconds)
    least = sum(scene.seconds(LEAST_TOKENS) for scene in main.scenes)
    budget = Budget(max(seconds, least / share))
    say(announcement(whole, main, budget.seconds, bool(pair)))
    with wired_limit([show.model for show in (main, *pair)], [generation_stream]):
        rehearse([main, *pair], draft_length, budget.part(REHEARSAL_SHARE * budget.seconds))
        pairs = [play(show, budget.part(PAIR_SHARE * budget.seconds), repeats) for show in pair]
        samples = play(main, budget, repeats)
    rows: list[Row] = []
    for show, written in ((main, samples), *zip(pair, pairs, strict=True)):
        for scene in show.scenes:
            rows += compare(show.model, scene, written)
    summary = legend(rows, main.model, main.scenes[0], samples)
    print(f"{format_table(rows)}\n\n{summary}", flush=True)
    return all(row.verdict != DIFFERENT for row in rows)


def three_prompts(model: nn.Module, tokenizer: Any, draft_length: str, max_tokens: int) -> Show:
    """An edit, a summary and a chat; where there is nothing to gain, also with a fixed length."""
    drafters: dict[str, Drafter] = {"prompt-lookup": PromptLookupDrafter(), "ngram": NGramDrafter()}
    ways = [plain(model)]
    for name, drafter in drafters.items():
        ways.append(after_rehearsal(model, tokenizer, drafter, name, draft_length))
    contrast = after_rehearsal(model, tokenizer, drafters["ngram"], "ngram", CONTRAST)
    pace, scenes = measure_pace(model), []
    for name, prompt in PROMPTS.items():
        task = Task(name, name, encode_chat(tokenizer, prompt))
        own = [*ways, contrast] if name == "chat" and draft_length == "auto" else ways
        scenes.append(Scene(task, own, pace, max_tokens, tokenizer.eos_token_ids))
    rehearsal = encode_chat(tokenizer, LIVE_PROMPT)
    return Show(model, tokenizer, drafters, rehearsal, REHEARSAL_TOKENS, scenes)


def pair_that_ships(draft_length: str) -> Show:
    """The lab pair, on a text of a kind that it was not trained on; also with a fixed length."""
    target, draft, tokenizer = load_pair()
    texts = [text for name, _, text in held_out_openings() if name == PAIR_TOPIC]
    opening, later = (list(tokenizer.encode(text)) for text in texts)
    drafter = ModelDrafter(draft, tokenizer=tokenizer)
    ways = [
        after_rehearsal(target, tokenizer, drafter, "model", length)
        for length in dict.fromkeys((draft_length, CONTRAST))
    ]
    pace = measure_pace(target)
    scene = Scene(Task(PAIR, PAIR, opening), [plain(target), *ways], pace, PAIR_TOKENS)
    return Show(target, tokenizer, {"model": drafter}, later, PAIR_TOKENS, [scene])


def after_rehearsal(
    model: nn.Module, tokenizer: Any, drafter: Drafter, name: str, draft_length: str
) -> Contender:
    """Speculation that begins each text with a copy of what "auto" learned in the rehearsal."""

    def start(prompt: list[int], max_tokens: int, seed: int) -> Generator[Emitted, None, None]:
        tuning = copy.deepcopy(tuning_for(model))
        way = ours(model, drafter, name, draft_length, tokenizer=tokenizer, tuning=tuning)
        return way.start(prompt, max_tokens, seed)

    return Contender(name, draft_length, start, "auto")


def cut(show: Show, seconds: float) -> Show:
    """As much of a show as there is time for."""
    scenes = fit(show.scenes, seconds)
    names = {contender.drafter for scene in scenes for contender in scene.contenders}
    drafters = {name: show.drafters[name] for name in show.drafters if name in names}
    return replace(show, scenes=scenes, drafters=drafters)


def say(text: str) -> None:
    """Print to standard error, at once; results go to standard output."""
    print(text, file=sys.stderr, flush=True)


def say_what_multiplies(preloaded: str | None) -> None:
    """On a Linux CPU, name the BLAS, and what it means for speculation and other programs."""
    if sys.platform != "linux" or mx.default_device() != mx.cpu:
        return
    if blas_name() == REFERENCE_BLAS:
        say(
            "MLX's wheel has the reference BLAS here, where a pass over m positions costs m times "
            'one: no draft can pay. pip install "specdec-mlx[cpu]" brings OpenBLAS (8 MB); this '
            "command then preloads it by itself; or LD_PRELOAD=libopenblas.so.0, the system's own."
        )
        return
    threads = f"{THREADS}={os.environ.get(THREADS)}"
    advice = f"; for programs of your own: LD_PRELOAD={preloaded} {threads}" if preloaded else ""
    say(f"Matrices are multiplied by {blas_name()}{advice}.")


def announcement(whole: Show, main: Show, limit: float, with_pair: bool) -> str:
    """The texts to come, of all that there are, and the most seconds that they take."""
    needed = sum(scene.seconds(scene.max_tokens) for scene in whole.scenes)
    texts = ", ".join(scene.task.id for scene in main.scenes)
    pair = " and the trained pair that ships" if with_pair else ""
    step = 1e3 * main.scenes[0].pace.step
    rest = f" All would take up to {needed:.0f} s: the rest is cut or left out."
    return (
        f"Next, in at most {limit:.0f} s: a text live, then {texts}{pair}; each by plain mlx-lm "
        f"and by speculation, in turns of {TURN_TOKENS} tokens. A plain token takes {step:.0f} ms "
        f"here.{rest if needed > limit else ''}"
    )


def rehearse(shows: Sequence[Show], draft_length: str, budget: Budget) -> None:
    """Let "auto" learn the costs of passes, on texts that are not compared; the first one live."""
    parts = [(show, name) for show in shows for name in show.drafters]
    for i, (show, name) in enumerate(parts):
        responses = rehearsal(show, name, draft_length, budget)
        if i == 0:
            show_live(name, responses)
        elif budget.left > 0:
            deque(responses, maxlen=0)


def rehearsal(
    show: Show, name: str, draft_length: str, budget: Budget
) -> Iterator[SpeculativeResponse]:
    """One drafter's rehearsal, until it or its time is over."""
    call = show.model, show.tokenizer, show.rehearsal, show.rehearsal_tokens
    options: Any = {
        "drafter": show.drafters[name],
        "draft_length": parse_draft_length(draft_length),
    }
    with closing(stream_generate(*call, **options)) as responses:
        for response in responses:
            yield response
            if budget.left <= 0:
                return


def show_live(name: str, responses: Iterator[SpeculativeResponse]) -> None:
    """Stream a text; accepted draft tokens are underlined on a terminal."""
    on, off = ("\033[4m", "\033[0m") if sys.stdout.isatty() else ("", "")
    print(f"Live, with {name}{' (accepted drafts underlined)' if on else ''}:\n")
    for response in responses:
        text = response.text
        print(f"{on}{text}{off}" if response.from_draft else text, end="", flush=True)
    print(f"\n\n{response.stats}\n", flush=True)


def play(show: Show, budget: Budget, repeats: int) -> list[Sample]:
    """All texts by all contenders in turns, cut at one token; ValueError for no time at all."""
    samples, began = list[Sample](), budget.spent
    turn_seconds = sum(scene.seconds(TURN_TOKENS) - scene.seconds(0) for scene in show.scenes)
    for repeat in range(repeats):
        before = budget.spent
        runs = [run for scene in show.scenes for run in scene.runs(repeat)]
        take_turns(runs, repeat, budget.enough_for_turns(turn_seconds))
        samples += [run.sample() for run in runs]
        if budget.left < budget.spent - before:
            break
    if not samples[0].tokens:
        raise ValueError("The time was over before the first text. Give more with --seconds.")
    say(what_was_written(show, samples, budget.spent - began))
    return samples


def what_was_written(show: Show, samples: Sequence[Sample], seconds: float) -> str:
    """The texts' lengths, and a word if they were cut."""
    first = {sample.id: sample.tokens for sample in samples if sample.repeat == 0}
    lengths = ", ".join(f"{name} {len(tokens)}" for name, tokens in first.items())
    repeats = 1 + samples[-1].repeat
    times = f", {repeats} times" if repeats > 1 else ""
    written = ((scene, first[scene.task.id]) for scene in show.scenes)
    is_cut = any(len(t) < s.max_tokens and t[-1] not in s.end_tokens for s, t in written)
    cut_short = "; cut, since the time was over" if is_cut else ""
    return f"Written in {seconds:.0f} s: {lengths} tokens{times}{cut_short}."
