"""The demo: the same texts by plain mlx-lm and by speculation, side by side, within a given time.

What it shows is the default, `draft_length="auto"`, where it gains (an edit, a summary) and where
there is nothing to gain (a chat); a fixed length stands beside it as a contrast. All numbers are
of this run: whoever writes a text takes turns with the others, so that a change in the machine's
pace meets all alike.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream, wired_limit

from specdec_mlx.bench.contenders import Contender, ours, plain
from specdec_mlx.bench.machine import REFERENCE_BLAS, blas_name
from specdec_mlx.bench.prompts import Task, encode_chat
from specdec_mlx.bench.timing import TURN_TOKENS, Run, Sample, Settings, take_turns
from specdec_mlx.cli.blas import MISSING, choose_num_threads
from specdec_mlx.cli.demo_report import compare, format_table, legend
from specdec_mlx.cli.plan import Budget, Scene, fit, measure_pace, time_for_first
from specdec_mlx.draft_length.tuning import tuning_for
from specdec_mlx.drafters.registry import make_drafter
from specdec_mlx.generation import stream_generate
from specdec_mlx.lab.corpus import held_out_openings
from specdec_mlx.lab.pair import load_pair
from specdec_mlx.models import load_model

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
REHEARSAL_SHARE = 0.15  # of the time

PAIR = "lab pair"
PAIR_TOPIC = "power"
PAIR_TOKENS = 192  # of one letter each

DRAFTERS = ("prompt-lookup", "ngram")
CONTRAST = "4"  # a fixed draft length, such as most programs take


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
    """Say what is going to happen, run it, and show it.

    Args:
        model_path: folder or Hugging Face name.
        max_tokens: most tokens of a text.
        seconds: most that all generation may take; what does not fit is cut or left out.
        repeats: how often each text is written at most.
        draft_length: what is shown; beside "auto" stands a fixed one as a contrast.
        is_default: whether the pair that ships is shown as well.
        preloaded: the matrix library that was preloaded for this process.

    Returns:
        Whether all texts were identical.
    """
    say(
        "Plain mlx-lm against speculation, the same texts side by side, with "
        f"{Path(model_path).name}."
    )
    model, tokenizer = load_model(model_path)
    say_what_multiplies(model, preloaded)
    scenes = make_scenes(model, tokenizer, draft_length, max_tokens)
    if is_default:
        scenes.append(pair_scene(draft_length))
    shown = fit(scenes, seconds * (1 - REHEARSAL_SHARE))
    least = sum(scene.least_seconds for scene in shown)
    budget = Budget(max(seconds, least / (1 - REHEARSAL_SHARE)))
    say(announcement(scenes, shown, budget.seconds))
    with wired_limit([scene.model for scene in shown], [generation_stream]):
        rehearse(shown, tokenizer, draft_length, budget.part(REHEARSAL_SHARE * budget.seconds))
        samples = play(shown, budget, repeats)
    rows = [row for scene in shown for row in compare(scene, samples)]
    print(f"{format_table(rows)}\n\n{legend(rows, shown, samples)}", flush=True)
    return all(row.same_text for row in rows)


def say(text: str) -> None:
    """What is not a result goes to standard error, at once."""
    print(text, file=sys.stderr, flush=True)


# --- what is shown ------------------------------------------------------------------------------


def make_scenes(
    model: nn.Module, tokenizer: Any, draft_length: str, max_tokens: int
) -> list[Scene]:
    """The three prompts, each by plain mlx-lm and by both drafters.

    Where there is nothing to gain, a fixed length shows what is to lose.
    """
    pace = measure_pace(model)
    ways = [plain(model), *(our_way(model, tokenizer, name, draft_length) for name in DRAFTERS)]
    contrast = our_way(model, tokenizer, DRAFTERS[-1], CONTRAST)
    return [
        Scene(
            model,
            Task(name, name, encode_chat(tokenizer, prompt)),
            Task("live", "live", encode_chat(tokenizer, LIVE_PROMPT)),
            [*ways, contrast] if name == "chat" and draft_length == "auto" else ways,
            pace,
            max_tokens,
            tokenizer.eos_token_ids,
        )
        for name, prompt in PROMPTS.items()
    ]


def our_way(
    model: nn.Module,
    tokenizer: Any,
    name: str,
    draft_length: str,
    draft_model: nn.Module | None = None,
) -> Contender:
    """Speculation as in `sd.generate`: what "auto" learns stays with the loaded model."""
    drafter = make_drafter(name, draft_model=draft_model, draft_tokenizer=tokenizer)
    return ours(model, drafter, name, draft_length, tokenizer=tokenizer, tuning=tuning_for(model))


def pair_scene(draft_length: str) -> Scene:
    """The trained pair that ships, on a text of its own kind that it was not trained on.

    Its tokens take so little time that the whole text is always worth it.
    """
    target, draft, tokenizer = load_pair()
    opening, later = (
        Task(PAIR, PAIR, list(tokenizer.encode(text)))
        for topic, _, text in held_out_openings()
        if topic == PAIR_TOPIC
    )
    lengths = dict.fromkeys((draft_length, CONTRAST))
    ways = [our_way(target, tokenizer, "model", length, draft) for length in lengths]
    return Scene(
        *(target, opening, later, [plain(target), *ways], measure_pace(target), PAIR_TOKENS),
        least_tokens=PAIR_TOKENS,
    )


# --- what is said before ------------------------------------------------------------------------


def say_what_multiplies(model: nn.Module, preloaded: str | None) -> None:
    """On a Linux CPU, which BLAS is used and with how many threads, and what that means."""
    if sys.platform != "linux" or mx.default_device() != mx.cpu:
        return
    if blas_name() == REFERENCE_BLAS:
        say(MISSING)
        return
    num_threads = choose_num_threads(model)
    number = f" on {num_threads} of {os.cpu_count()} threads, as measured" if num_threads else ""
    advice = (
        f"; for programs of your own: LD_PRELOAD={preloaded} OPENBLAS_NUM_THREADS={num_threads}"
        if preloaded and num_threads
        else ""
    )
    say(f"Matrices are multiplied by {blas_name()}{number}{advice}.")


def announcement(scenes: Sequence[Scene], shown: Sequence[Scene], limit: float) -> str:
    """What is going to happen, how long it takes, and what had to be left out for that."""
    first = shown[0]
    whole = sum(scene.most_seconds for scene in shown)
    texts = ", ".join(scene.task.id for scene in shown)
    lines = [
        f"Next, in at most {limit:.0f} s: a text live, then {texts}; each by plain mlx-lm and by "
        f"speculation, in turns of {TURN_TOKENS} tokens. A plain token takes "
        f"{1e3 * first.pace.step:.0f} ms here."
    ]
    if whole > limit:
        lines.append(
            f"Texts of {first.max_tokens} tokens would take up to {whole:.0f} s: they are cut "
            "where their time is over."
        )
    if len(first.contenders) < len(scenes[0].contenders):
        lines.append(f"Of the drafters only {DRAFTERS[0]} is shown, to keep that time.")
    if len(shown) < len(scenes):
        missing = ", ".join(scene.task.id for scene in scenes[len(shown) :])
        lines.append(f"Left out, to keep that time: {missing}.")
    return "\n".join(lines)


# --- the run ------------------------------------------------------------------------------------


def rehearse(scenes: Sequence[Scene], tokenizer: Any, draft_length: str, budget: Budget) -> None:
    """Let "auto" learn what passes cost here, on texts that are not compared; the first live."""
    show_live(scenes[0], tokenizer, draft_length, budget)
    rehearsed = [scenes[0].contenders[1]]
    for scene in scenes:
        new = [c for c in scene.contenders if c.draft_length == "auto" and c not in rehearsed]
        settings = Settings(REHEARSAL_TOKENS, end_tokens=scene.end_tokens)
        runs = [Run(contender, scene.rehearsal, settings, 0) for contender in new]
        take_turns(runs, may_go_on=budget.fits_again)
        rehearsed += new


def show_live(scene: Scene, tokenizer: Any, draft_length: str, budget: Budget) -> None:
    """Stream a text with the first drafter; accepted draft tokens are underlined on a terminal."""
    on, off = ("\033[4m", "\033[0m") if sys.stdout.isatty() else ("", "")
    print(f"Live, with {DRAFTERS[0]}{' (accepted drafts underlined)' if on else ''}:\n")
    responses = stream_generate(
        *(scene.model, tokenizer, scene.rehearsal.prompt, min(REHEARSAL_TOKENS, scene.max_tokens)),
        drafter=DRAFTERS[0],
        draft_length=int(draft_length) if draft_length.isdecimal() else draft_length,
    )
    with closing(responses):
        for response in responses:
            text = response.text
            print(f"{on}{text}{off}" if response.from_draft else text, end="", flush=True)
            if not budget.fits_again():
                break
    print(f"\n\n{response.stats}\n", flush=True)


def play(scenes: Sequence[Scene], budget: Budget, repeats: int) -> list[Sample]:
    """All texts, each as often as its time allows; what one leaves over is for the next.

    Raises ValueError if there was no time for any.
    """
    samples: list[Sample] = []
    for i, scene in enumerate(scenes):
        if budget.left < (scene.least_seconds if samples else 0):
            say(f"  {scene.task.id}: left out, its time is over")
            continue
        seconds = time_for_first(scenes[i:], budget.left)
        samples += play_scene(scene, budget.part(seconds), repeats)
    if not samples:
        raise ValueError(
            f"{budget.seconds:.0f} s were over before the first text. Give more, with --seconds."
        )
    return samples


def play_scene(scene: Scene, budget: Budget, repeats: int) -> list[Sample]:
    """One text by all contenders in turns, again while there is time.

    When it is over, all stop at the same token.
    """
    settings = Settings(scene.max_tokens, end_tokens=scene.end_tokens)
    samples: list[Sample] = []
    for repeat in range(repeats):
        before = budget.spent
        runs = [Run(contender, scene.task, settings, repeat) for contender in scene.contenders]
        take_turns(runs, repeat, budget.fits_again)
        samples += [run.sample() for run in runs]
        if budget.left < budget.spent - before:
            break
    if not (tokens := samples[0].tokens):
        return []
    is_whole = len(tokens) == scene.max_tokens or tokens[-1] in scene.end_tokens
    times = f", {repeat + 1} times" if repeat else ""
    cut = "" if is_whole else f"; cut from {scene.max_tokens}, since its time was over"
    say(f"  {scene.task.id}: {len(tokens)} tokens{times}, in {budget.spent:.0f} s{cut}")
    return samples
