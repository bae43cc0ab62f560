"""Contenders of a benchmark, one timed generation, and a benchmark's worth of them, interleaved."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Iterator, Sequence, Set
from contextlib import closing
from itertools import islice, product
from typing import Annotated, Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.sample_utils import make_sampler
from msgspec import Meta, Struct
from msgspec.structs import replace

from specdec_mlx.arguments import check_int, parse_draft_length
from specdec_mlx.contracts import Drafter
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.drafters.choosing.choice import DrafterChoice
from specdec_mlx.files import Count
from specdec_mlx.kernels import make_kernels
from specdec_mlx.lab.prompts import RecordedText
from specdec_mlx.loop import speculate
from specdec_mlx.rules import make_rule
from specdec_mlx.sampling import Sampling

Amount = Annotated[float, Meta(ge=0)]

PLAIN = "mlx-lm"
MLX_LM_SPECULATION = "mlx-lm-speculation"
MLX_LM_DRAFT_LENGTH = 3  # of mlx-lm's command line, where no number is given


class Emitted(NamedTuple):
    """A token, with the loop's counts so far.

    Attributes:
        token: its id.
        from_draft: True for an accepted draft token.
        passes: passes of the target, counting the first token's. None for a pass per token.
        drafted: draft tokens.
        drafting: passes with a draft.
        at: when the token was known, by `time.perf_counter`. None for now.
        ties: further passes that decided ties.
    """

    token: int
    from_draft: bool = False
    passes: int | None = None
    drafted: int = 0
    drafting: int = 0
    at: float | None = None
    ties: int = 0


Start = Callable[[list[int], int, int], Generator[Emitted, None, None]]
"""(prompt [n], max_tokens, seed) -> a stream of tokens."""


class Way(Struct, frozen=True, forbid_unknown_fields=True):
    """Flags of the command line that name a way to generate. "" where a flag does not apply."""

    drafter: str
    draft_length: str = ""
    rule: str = ""
    kernels: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.drafter, self.draft_length, self.rule, self.kernels


class Contender(Way, frozen=True, kw_only=True):
    """A way to generate, with the function that starts a generation."""

    start: Start


def plain(model: nn.Module, temp: float = 0.0) -> Contender:
    def start(prompt: list[int], max_tokens: int, seed: int) -> Generator[Emitted, None, None]:
        mx.random.seed(seed)
        sampler = make_sampler(temp)
        steps = generate_step(mx.array(prompt), model, max_tokens=max_tokens, sampler=sampler)
        with closing(steps):
            for token, _ in steps:
                yield Emitted(int(token))

    return Contender(PLAIN, start=start)


def mlx_lm_speculation(
    model: nn.Module, draft_model: nn.Module, draft_length: int, temp: float = 0.0
) -> Contender:
    # mlx-lm may remove it, and only this contender needs it
    from mlx_lm.generate import speculative_generate_step

    def start(prompt: list[int], max_tokens: int, seed: int) -> Generator[Emitted, None, None]:
        mx.random.seed(seed)
        options = {"num_draft_tokens": draft_length, "max_tokens": max_tokens}
        options |= {"sampler": make_sampler(temp)}
        steps = speculative_generate_step(mx.array(prompt), model, draft_model, **options)
        # mlx-lm reports no rounds. A token of the target ends each round.
        counts, begins_round = np.zeros(3, int), True
        with closing(steps):
            for n, (token, _, from_draft) in enumerate(steps):
                if begins_round:
                    length = min(draft_length, max_tokens - n)
                    counts += (1, length, length > 0)
                begins_round = not from_draft
                yield Emitted(int(token), bool(from_draft), *counts.tolist())

    return Contender(MLX_LM_SPECULATION, str(draft_length), start=start)


def ours(
    model: nn.Module,
    drafter: Drafter | None,
    name: str,
    draft_length: str,
    temp: float = 0.0,
    tokenizer: Any = None,
    rule: str = "auto",
    tuning_for_text: Callable[[], Tuning] | None = None,
    is_seeded: bool = False,
    kernels: str = "",
    ties: str | None = None,
) -> Contender:
    """Our loop as a contender.

    Args:
        model: the target.
        drafter: None for the loop without drafts.
        name: of the drafter in tables.
        draft_length: as on the command line.
        temp: temperature.
        tokenizer: the target's.
        rule: as on the command line.
        tuning_for_text: returns the measurements with which "auto" begins a text. None begins anew
            in each repeat, because a text that was seen before is no fair test.
        is_seeded: measure rule "auto" as it works with a seed.
        kernels: of passes over several rows, as on the command line; "" for MLX's own.
        ties: see `Options`.
    """
    how = make_rule(rule, is_seeded=is_seeded)
    length, chosen = parse_draft_length(draft_length or "0"), make_kernels(kernels or None)
    tunings: dict[int, Tuning] = {}

    def start(prompt: list[int], max_tokens: int, seed: int) -> Generator[Emitted, None, None]:
        # A repeat has its own seed, so "auto" begins anew in each repeat.
        if tuning_for_text is None and seed not in tunings:
            tunings[seed] = Tuning.for_model(model, chosen)
        tokens = speculate(
            model,
            prompt,
            drafter,
            max_tokens=max_tokens,
            sampler=Sampling(temp),
            seed=seed,
            rule=how,
            num_draft_tokens=length,
            tuning=tuning_for_text() if tuning_for_text else tunings[seed],
            tokenizer=tokenizer,
            kernels=chosen,
            ties=ties if drafter else None,
        )
        with closing(tokens):
            for token in tokens:
                stats = token.stats
                drafting = stats.drafted_at[0] if stats.drafted_at else 0
                passes = stats.target_passes + stats.ties
                counts = passes, stats.drafted, drafting
                yield Emitted(token.token, token.from_draft, *counts, ties=stats.ties)

    return Contender(name, *((draft_length, rule, kernels) if drafter else ()), start=start)


# Timing

WARM_UP_TOKENS = 24

TURN_TOKENS = 8  # tokens that a contender generates before it is another one's turn


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of all contenders. ValueError for no token or no repeat.

    Attributes:
        max_tokens: of each text.
        repeats: timed runs of each text.
        seed: of draws, None for 0. With a seed, rule "auto" is the coupled rule.
        end_tokens: ids that end a text.
        temp: temperature. At 0 texts are compared.
        model: name of the target, for the record.
        dtype: of the target, for the record.
        vocab_size: of the target, for the record.
        ties: "plain" decides near ties by plain passes, None does not.
    """

    max_tokens: int = 128
    repeats: int = 1
    seed: int | None = None
    end_tokens: Set[int] = frozenset()
    temp: Amount = 0.0
    model: str = ""
    dtype: str = ""
    vocab_size: Count = 0
    ties: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_tokens", "repeats"):
            check_int(name, getattr(self, name), 1)


def make_contenders(
    model: nn.Module,
    choice: DrafterChoice,
    draft_lengths: Sequence[str],
    settings: Settings,
    tokenizer: Any = None,
    rules: Sequence[str] = ("auto",),
    kernels: Sequence[str] = (),
) -> list[Contender]:
    """Plain mlx-lm, its own speculation if there is a draft model, and each drafter in all ways.

    A drafter runs without kernels, and with each of `kernels`.

    Raises ValueError for an unknown name or option.
    """
    temp, is_seeded = settings.temp, settings.seed is not None
    contenders = [plain(model, temp)]
    draft_model, _ = choice.model.pair
    if draft_model is not None:
        numbers = [int(text) for text in draft_lengths if text.isdecimal()]
        lengths = numbers or [MLX_LM_DRAFT_LENGTH]
        contenders += [mlx_lm_speculation(model, draft_model, n, temp) for n in lengths]
    for spec, one in choice.each().items():
        drafter = one.resolve(model)
        ways = product(draft_lengths, rules, ("", *kernels)) if drafter else [("", "auto", "")]
        contenders += [
            ours(
                *(model, drafter, spec, length, temp, tokenizer, rule, None, is_seeded, names),
                ties=settings.ties,
            )
            for length, rule, names in ways
        ]
    return contenders


class Sample(Way, frozen=True, kw_only=True):
    """One run of a contender on a prompt.

    Attributes:
        id: of the prompt.
        category: of the prompt.
        session: of the prompt.
        repeat: run of the prompt.
        num_tokens: length of the text.
        tokens: [n] ids with the end token.
        first_round: tokens of the first round. 0 for a modelled run.
        first_seconds: duration of prefill and first round. 0 for a modelled run.
        decode_seconds: from the end of the first round to the last token.
        plain_seconds: duration of plain decoding, for a modelled run.
        passes: passes of the target.
        drafted: draft tokens.
        accepted: accepted draft tokens.
        drafting_rounds: passes with a draft.
        ties: of the passes, those that decided ties.
        peak_bytes: memory, with all contenders that ran side by side.
    """

    id: str
    category: str
    session: str = ""
    repeat: Count = 0
    num_tokens: Count
    tokens: list[Count] = []
    first_round: Count = 0
    first_seconds: Amount = 0.0
    decode_seconds: Amount
    plain_seconds: Amount = 0.0
    passes: Count
    drafted: Count = 0
    accepted: Count = 0
    drafting_rounds: Count = 0
    ties: Count = 0
    peak_bytes: Count = 0

    @property
    def seconds(self) -> float:
        return self.first_seconds + self.decode_seconds

    @property
    def seconds_per_token(self) -> float | None:
        """Decoding seconds per token. None if all tokens came with the first round."""
        num_timed = self.num_tokens - self.first_round
        return self.decode_seconds / num_timed if num_timed > 0 else None


def run_interleaved(
    tasks: Sequence[RecordedText],
    contenders: Sequence[Contender],
    settings: Settings,
    between_tasks: Callable[[], None] = lambda: None,
) -> Iterator[Sample]:
    """Run every contender on every task `repeats` times, in turns of a few tokens, after a warm-up.

    Args:
        tasks: the prompts.
        contenders: the ways to generate.
        settings: of all contenders.
        between_tasks: called before each task.
    """
    short = replace(settings, max_tokens=min(WARM_UP_TOKENS, settings.max_tokens))
    for contender in contenders:
        time_generation(contender, tasks[0], short, settings.repeats)
    for task in tasks:
        between_tasks()
        for repeat in range(settings.repeats):
            # Turns of a few tokens expose all contenders to the same changes in speed.
            runs = [turns_of(contender, task, settings, repeat) for contender in contenders]
            yield from take_turns(runs, seed=repeat)


def take_turns(
    runs: Sequence[Generator[Sample, None, None]],
    seed: int = 0,
    may_go_on: Callable[[], bool] = lambda: True,
) -> list[Sample]:
    """Run all generations to their end, in turns of random order.

    Args:
        runs: results of `turns_of`.
        seed: of the order.
        may_go_on: asked before each round of turns. If it returns False, all generations stop.
    """
    draws, samples, under_way = random.Random(seed), dict[int, Sample](), {*range(len(runs))}
    num_turns = 1 if mx.distributed.init().size() == 1 else None
    while under_way and may_go_on():
        # A random order spreads the effects of heat and of caches over all.
        for i in draws.sample(sorted(under_way), len(under_way)):
            if turns := list(islice(runs[i], num_turns)):
                samples[i] = turns[-1]
            else:
                under_way.remove(i)
    for run in runs:
        run.close()
    return [samples[i] for i in range(len(runs))]


def time_generation(
    contender: Contender, task: RecordedText, settings: Settings, repeat: int
) -> Sample:
    *_, sample = turns_of(contender, task, settings, repeat, settings.max_tokens)
    return sample


def turns_of(
    contender: Contender,
    task: RecordedText,
    settings: Settings,
    repeat: int,
    num_tokens: int = TURN_TOKENS,
) -> Generator[Sample, None, None]:
    """Generate a text in turns of `num_tokens`, with a first turn of one token.

    Yields the sample so far after each turn. The clock runs during turns, until the device is idle.
    """
    emitted, end_tokens, seed = list[Emitted](), settings.end_tokens, (settings.seed or 0) + repeat
    start = first_seconds = decode_seconds = 0.0
    peak_bytes, size = 0, 1
    with closing(contender.start(task.prompt, settings.max_tokens, seed)) as stream:
        while size > 0:
            is_first = not emitted
            mx.reset_peak_memory()
            began = time.perf_counter()
            for item in islice(stream, size):
                emitted.append(item)
                if item.token in end_tokens:
                    break
            emitted_at = time.perf_counter()
            # Work that a turn started must not run in the time of the next contender.
            mx.synchronize(generation_stream)
            if is_first:
                start, first_seconds = began, emitted_at - began
                began = emitted_at  # The pass in progress is for the next tokens.
            decode_seconds += time.perf_counter() - began
            peak_bytes = max(peak_bytes, mx.get_peak_memory())
            first, last = emitted[0], emitted[-1]
            if first.at is not None and last.at is not None:
                # A loop that does not stream runs in its first turn, and reports when tokens came.
                first_seconds, decode_seconds = first.at - start, last.at - first.at
            target_tokens = (i for i, item in enumerate(emitted, 1) if not item.from_draft)
            yield Sample(
                *contender.key,
                id=task.id,
                category=task.category,
                repeat=repeat,
                num_tokens=len(emitted),
                tokens=[item.token for item in emitted],
                first_round=next(target_tokens, len(emitted)),
                first_seconds=first_seconds,
                decode_seconds=decode_seconds,
                passes=len(emitted) if last.passes is None else last.passes,
                drafted=last.drafted,
                accepted=sum(item.from_draft for item in emitted),
                drafting_rounds=last.drafting,
                ties=last.ties,
                peak_bytes=peak_bytes,
            )
            left = 0 if last.token in end_tokens else settings.max_tokens - len(emitted)
            size = min(num_tokens, left)
