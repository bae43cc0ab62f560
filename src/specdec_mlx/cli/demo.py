"""The demo: the same texts by plain mlx-lm and by speculation, side by side, within a given time.

What it shows is the default, `draft_length="auto"`, where it gains (an edit, a summary) and where
there is nothing to gain (a chat); a fixed length stands beside it as a contrast. All numbers are
of this run: whoever writes a text takes turns with the others, so that a change in the machine's
pace meets all alike.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generation_stream, wired_limit

from specdec_mlx.bench.machine import REFERENCE_BLAS, blas_name
from specdec_mlx.bench.timing import TURN_TOKENS, Sample, take_turns
from specdec_mlx.cli.blas import THREADS
from specdec_mlx.cli.demo_report import DIFFERENT, compare, format_table, legend
from specdec_mlx.cli.demo_texts import Show, pair_that_ships, three_prompts
from specdec_mlx.cli.plan import Budget, EnoughTime, fit
from specdec_mlx.draft_length.policy import parse_draft_length
from specdec_mlx.generation import stream_generate
from specdec_mlx.models import load_model
from specdec_mlx.responses import SpeculativeResponse

REHEARSAL_SHARE, PAIR_SHARE = 0.12, 0.1
"""Most of the time that may go into the rehearsals, and into the pair that ships."""


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
        Whether no text was another one than plain decoding's.
    """
    name = Path(model_path).name
    say(f"Plain mlx-lm against speculation, the same texts side by side, with {name}.")
    model, tokenizer = load_model(model_path)
    say_what_multiplies(preloaded)
    whole = three_prompts(model, tokenizer, draft_length, max_tokens)
    pair = [pair_that_ships(draft_length)] if is_default else []
    share = 1 - REHEARSAL_SHARE - PAIR_SHARE * len(pair)
    main = cut(whole, share * seconds)
    least = sum(scene.least_seconds for scene in main.scenes)
    budget = Budget(max(seconds, least / share))
    say(announcement(whole, main, budget.seconds, bool(pair)))
    with wired_limit([show.model for show in (main, *pair)], [generation_stream]):
        rehearse([main, *pair], draft_length, budget.part(REHEARSAL_SHARE * budget.seconds))
        pairs = [play(show, budget.part(PAIR_SHARE * budget.seconds), repeats) for show in pair]
        samples = play(main, budget, repeats)
    rows = [
        row
        for show, written in ((main, samples), *zip(pair, pairs, strict=True))
        for scene in show.scenes
        for row in compare(show.model, scene, written)
    ]
    print(f"{format_table(rows)}\n\n{legend(rows, main, samples)}", flush=True)
    return all(row.verdict != DIFFERENT for row in rows)


def cut(show: Show, seconds: float) -> Show:
    """What of a show there is time for."""
    scenes = fit(show.scenes, seconds)
    names = {contender.drafter for scene in scenes for contender in scene.contenders}
    drafters = {name: drafter for name, drafter in show.drafters.items() if name in names}
    return replace(show, scenes=scenes, drafters=drafters)


def say(text: str) -> None:
    """What is not a result goes to standard error, at once."""
    print(text, file=sys.stderr, flush=True)


# --- what is said before ------------------------------------------------------------------------


def say_what_multiplies(preloaded: str | None) -> None:
    """On a Linux CPU, which BLAS is used, and what that means for other programs."""
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
    """What is going to happen, how long it takes, and what had to be left out for that.

    Args:
        whole: what there is.
        main: what there is time for.
        limit: most seconds that it takes.
        with_pair: whether the pair that ships is shown as well.
    """
    first = main.scenes[0]
    needed = sum(scene.most_seconds for scene in main.scenes)
    texts = ", ".join(scene.task.id for scene in main.scenes)
    lines = [
        f"Next, in at most {limit:.0f} s: a text live, then {texts}"
        f"{' and the trained pair that ships' if with_pair else ''}; each by plain mlx-lm and by "
        f"speculation, in turns of {TURN_TOKENS} tokens. A plain token takes "
        f"{1e3 * first.pace.step:.0f} ms here."
    ]
    if needed > limit:
        lines.append(
            f"All {first.max_tokens} tokens of each text would take up to {needed:.0f} s: they "
            "are cut where the time is over."
        )
    if len(main.drafters) < len(whole.drafters):
        lines.append(f"Of the drafters only {', '.join(main.drafters)} is shown, to keep to it.")
    if left_out := [scene.task.id for scene in whole.scenes[len(main.scenes) :]]:
        lines.append(f"Left out, to keep to it: {', '.join(left_out)}.")
    return "\n".join(lines)


# --- the run ------------------------------------------------------------------------------------


def rehearse(shows: Sequence[Show], draft_length: str, budget: Budget) -> None:
    """Let "auto" learn what passes cost here, on texts that are not compared; the first live.

    Args:
        shows: the first one has the drafter that is shown live.
        draft_length: a number or a policy, as on the command line.
        budget: the time for it.
    """
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
    responses = stream_generate(
        *(show.model, show.tokenizer, show.rehearsal, show.rehearsal_tokens),
        drafter=show.drafters[name],
        draft_length=parse_draft_length(draft_length),
    )
    with closing(responses):
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
    """All texts of a show by all contenders in turns, and again while there is time.

    When it is over, all stop at the same token.

    Raises ValueError if there was no time at all.
    """
    samples: list[Sample] = []
    began = budget.spent
    turn_seconds = sum(scene.seconds(TURN_TOKENS) - scene.seconds(0) for scene in show.scenes)
    for repeat in range(repeats):
        before = budget.spent
        runs = [run for scene in show.scenes for run in scene.runs(repeat)]
        take_turns(runs, repeat, EnoughTime(budget, turn_seconds))
        samples += [run.sample() for run in runs]
        if budget.left < budget.spent - before:
            break
    if not samples[0].tokens:
        raise ValueError("The time was over before the first text. Give more with --seconds.")
    say(what_was_written(show, samples, budget.spent - began))
    return samples


def what_was_written(show: Show, samples: Sequence[Sample], seconds: float) -> str:
    """The texts' lengths, and whether they were cut."""
    first = {sample.id: sample.tokens for sample in samples if sample.repeat == 0}
    lengths = ", ".join(f"{name} {len(tokens)}" for name, tokens in first.items())
    repeats = 1 + samples[-1].repeat
    times = f", {repeats} times" if repeats > 1 else ""
    is_cut = any(
        len(tokens := first[scene.task.id]) < scene.max_tokens
        and tokens[-1] not in scene.end_tokens
        for scene in show.scenes
    )
    cut_short = "; cut, since the time was over" if is_cut else ""
    return f"Written in {seconds:.0f} s: {lengths} tokens{times}{cut_short}."
