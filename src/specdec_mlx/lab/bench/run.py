"""A live benchmark, interleaved, against plain mlx-lm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from msgspec.structs import replace

from specdec_mlx.drafters.choosing.choice import DrafterChoice, DraftModel
from specdec_mlx.lab import prompts
from specdec_mlx.lab.bench.cost import CostMeter
from specdec_mlx.lab.bench.record import Record, describe_dtype, describe_machine
from specdec_mlx.lab.bench.summary import find_differences, summarise
from specdec_mlx.lab.bench.timing import (
    PLAIN,
    Contender,
    Settings,
    make_contenders,
    run_interleaved,
)
from specdec_mlx.lab.prompts import Prompt, RecordedText
from specdec_mlx.progress import progress_bar


def run_bench(
    model: nn.Module,
    tasks: Sequence[RecordedText],
    contenders: Sequence[Contender],
    settings: Settings,
    *,
    measure_cost: bool = True,
    progress: bool = False,
) -> Record:
    """Run all contenders on all tasks, and compare them. Plain mlx-lm is the first contender.

    Args:
        model: the target.
        tasks: the prompts.
        contenders: made with `settings`.
        settings: of all contenders.
        measure_cost: measure c(m) too, with a sweep before each task.
        progress: show a bar.
    """
    assert contenders[0].drafter == PLAIN
    meter = CostMeter(model, tasks[0].prompt) if measure_cost else None
    machine = describe_machine()
    steps = run_interleaved(tasks, contenders, settings, *([meter.sweep] if meter else []))
    total = len(tasks) * len(contenders) * settings.repeats
    samples = list(progress_bar(steps, "bench", total, unit="text", disable=not progress))
    is_greedy = settings.temp == 0
    differences = find_differences(model, tasks, samples) if is_greedy else []
    # Replays use the texts of plain decoding.
    texts = {s.id: s.tokens for s in samples if s.drafter == PLAIN and s.repeat == 0}
    return Record(
        command="",
        machine=machine,
        settings=replace(
            settings, dtype=describe_dtype(model), vocab_size=model(mx.array([[0]])).shape[-1]
        ),
        texts=[RecordedText(t.id, t.category, t.prompt, texts[t.id]) for t in tasks],
        cost=meter.curve() if meter else None,
        results=summarise(samples, differences, greedy=is_greedy),
        differences=differences,
        samples=samples,
    )


def bench_texts(
    model: nn.Module,
    tokenizer: Any,
    texts: Mapping[str, Sequence[str]],
    drafters: Sequence[str],
    draft_lengths: Sequence[str] = ("4",),
    *,
    draft_model: nn.Module | None = None,
    rules: Sequence[str] = ("auto",),
    temp: float = 0.0,
    settings: Settings | None = None,
    progress: bool = True,
) -> Record:
    """Run a benchmark on your own texts.

    Args:
        model: the target.
        tokenizer: the target's, with a chat template.
        texts: kind of text -> user messages.
        drafters: as on the command line.
        draft_lengths: as on the command line.
        draft_model: model of the drafter "model", with the target's tokenizer.
        rules: as on the command line.
        temp: temperature. At 0 the texts are compared with plain decoding.
        settings: None for 128 tokens and one repeat.
        progress: show a bar.

    Returns:
        The record that `specdec-mlx bench` prints and writes.

    Raises:
        UnknownNameError: no drafter, length or rule has this name.
        ValueError: a drafter does not take these options, or there are no texts.
    """
    messages = [
        Prompt(f"{kind}/{i}", kind, text)
        for kind, messages in texts.items()
        for i, text in enumerate(messages)
    ]
    choice = DrafterChoice(drafters, DraftModel(draft_model))
    settings = settings or Settings(end_tokens=tokenizer.eos_token_ids)
    how = replace(settings, temp=temp)
    contenders = make_contenders(model, choice, draft_lengths, how, tokenizer, rules)
    tasks = make_tasks(tokenizer, messages)
    return run_bench(model, tasks, contenders, how, progress=progress)


def make_tasks(tokenizer: Any, messages: Sequence[Prompt]) -> list[RecordedText]:
    if not messages:
        raise ValueError("No prompts. Give another file, or drop --categories.")
    return [
        RecordedText(p.id, p.category, prompts.encode_chat(tokenizer, p.text)) for p in messages
    ]
