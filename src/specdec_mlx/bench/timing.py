"""One timed generation, and a benchmark's worth of them, interleaved."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import mlx.core as mx
from mlx_lm.generate import generation_stream

from specdec_mlx.bench.contenders import MLX_LM_SPECULATION, Contender, Emitted
from specdec_mlx.bench.prompts import Task

WARM_UP_TOKENS = 24


@dataclass(frozen=True)
class Settings:
    """How every contender generates. end_tokens: ids that end a text (the token is part of it)."""

    max_tokens: int = 128
    repeats: int = 1
    seed: int = 0
    end_tokens: Collection[int] = ()


@dataclass(frozen=True)
class Sample:
    """One generation as it happened.

    tokens: [n] ids, the end token included. first_round: how many of them came with the first
        round; their time is in `first_seconds`, with the prefill of all models.
    first_seconds: from the call to the first token. decode_seconds: from there to the last token.
    passes, drafted, accepted: target passes, draft tokens proposed, and draft tokens handed out.
    drafting_rounds: passes that had a draft. host_seconds: host time of the loop outside the
        target's passes; None for mlx-lm's own loops, and for a text that met an end token, since
        it leaves a pass under way whose launch would count. peak_bytes: MLX's peak memory.
    """

    id: str
    category: str
    drafter: str
    draft_length: str
    repeat: int
    tokens: list[int]
    first_round: int
    first_seconds: float
    decode_seconds: float
    passes: int
    drafted: int
    accepted: int
    drafting_rounds: int
    host_seconds: float | None
    peak_bytes: int

    @property
    def key(self) -> tuple[str, str]:
        """Its contender's key."""
        return self.drafter, self.draft_length

    @property
    def seconds_per_token(self) -> float | None:
        """Decoding seconds a token; None where all tokens came with the first round."""
        num_timed = len(self.tokens) - self.first_round
        return self.decode_seconds / num_timed if num_timed > 0 else None


def run_interleaved(
    tasks: Sequence[Task],
    contenders: Sequence[Contender],
    settings: Settings,
    on_sample: Callable[[Sample], None] = lambda sample: None,
    between_tasks: Callable[[], None] = lambda: None,
) -> list[Sample]:
    """Every contender on every task, `repeats` times: A B C A B C on the first task, then the next.

    So a change in the machine's speed meets all contenders alike. Begins with a short untimed
    generation of each contender.
    """
    for contender in contenders:
        _warm_up(contender, tasks[0], settings)
    samples = []
    for task in tasks:
        between_tasks()
        for repeat in range(settings.repeats):
            for contender in contenders:
                samples.append(time_generation(contender, task, settings, repeat))
                on_sample(samples[-1])
    return samples


def time_generation(contender: Contender, task: Task, settings: Settings, repeat: int) -> Sample:
    """Generate one text to its end, or to max_tokens."""
    emitted: list[Emitted] = []
    mx.synchronize(generation_stream)  # a closed generator may have left a pass under way
    mx.reset_peak_memory()
    began = first = last = time.perf_counter()
    stream = contender.start(task.prompt, settings.max_tokens, settings.seed + repeat)
    with closing(stream):
        for item in stream:
            last = time.perf_counter()
            if not emitted:
                first = last
            emitted.append(item)
            if item.token in settings.end_tokens:
                break
        passes, drafted, drafting_rounds, host_seconds = _count(contender, emitted, settings)
    return Sample(
        id=task.id,
        category=task.category,
        drafter=contender.drafter,
        draft_length=contender.draft_length,
        repeat=repeat,
        tokens=[item.token for item in emitted],
        first_round=len(next(_rounds(emitted), [])),
        first_seconds=first - began,
        decode_seconds=last - first,
        passes=passes,
        drafted=drafted,
        accepted=sum(item.from_draft for item in emitted),
        drafting_rounds=drafting_rounds,
        host_seconds=host_seconds,
        peak_bytes=mx.get_peak_memory(),
    )


def _count(
    contender: Contender, emitted: list[Emitted], settings: Settings
) -> tuple[int, int, int, float | None]:
    """Passes, drafted tokens, passes with a draft, host seconds.

    Ours are counted by the loop itself. mlx-lm's speculation drafts K tokens a round, or as many
    as are still wanted.
    """
    stats = emitted[-1].stats if emitted else None
    if stats is not None:
        drafting = stats.drafted_at[0] if stats.drafted_at else 0
        is_whole = len(emitted) == settings.max_tokens
        host_seconds = stats.draft_seconds + stats.other_seconds if is_whole else None
        return stats.target_passes, stats.drafted, drafting, host_seconds
    rounds = list(_rounds(emitted))
    if contender.drafter != MLX_LM_SPECULATION:
        return len(rounds), 0, 0, None
    drafted = []
    left = settings.max_tokens
    for tokens in rounds:
        drafted.append(min(left, int(contender.draft_length)))
        left -= len(tokens)
    return len(rounds), sum(drafted), sum(n > 0 for n in drafted), None


def _rounds(emitted: Sequence[Emitted]) -> Iterator[list[Emitted]]:
    """The tokens of each round: accepted ones, and the target's own token that ends it."""
    current: list[Emitted] = []
    for item in emitted:
        current.append(item)
        if not item.from_draft:
            yield current
            current = []
    if current:
        yield current


def _warm_up(contender: Contender, task: Task, settings: Settings) -> None:
    """Compile kernels and fill caches, under a seed that no timed repeat has."""
    num_tokens = min(WARM_UP_TOKENS, settings.max_tokens)
    time_generation(contender, task, replace(settings, max_tokens=num_tokens), settings.repeats)
