"""Who takes part in a benchmark: plain mlx-lm, its own speculation, and our drafters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_sampler

from specdec_mlx.draft_length.policy import parse_draft_length
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.drafters.registry import make_drafter
from specdec_mlx.loop import speculate
from specdec_mlx.sampling.distribution import Sampling
from specdec_mlx.stats.account import SpeculationStats
from specdec_mlx.types import Drafter

PLAIN = "mlx-lm"
MLX_LM_SPECULATION = "mlx-lm-speculation"
MLX_LM_DRAFT_LENGTH = 3  # of mlx-lm's command line, where no number is given


class Counts(NamedTuple):
    """What a loop says of itself so far.

    Attributes:
        target_passes: the one that gave the first token included.
        drafted: tokens proposed.
        drafting: passes that had a draft.
        host_seconds: in the loop, outside the target's passes; None where it does not say.
    """

    target_passes: int
    drafted: int = 0
    drafting: int = 0
    host_seconds: float | None = None


@dataclass(frozen=True)
class Emitted:
    """One token of a generation.

    Attributes:
        token: its id.
        from_draft: whether it was proposed.
        counts: up to this token; None of a loop that takes a pass for every token.
        at: when the token was known, by `time.perf_counter`; None is now, as it is handed out,
            which a loop without streaming cannot do.
    """

    token: int
    from_draft: bool = False
    counts: Counts | None = None
    at: float | None = None


Start = Callable[[list[int], int, int], Generator[Emitted, None, None]]


class Keyed:
    """What belongs to a contender: a way to draft, a length and a rule tell it from the others."""

    drafter: str
    draft_length: str
    rule: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells it from the others."""
        return self.drafter, self.draft_length, self.rule


@dataclass(frozen=True)
class Contender(Keyed):
    """A way to generate.

    Attributes:
        drafter, draft_length, rule: as given on the command line; "" where it means nothing.
        start: prompt [n], max_tokens and seed to a stream of tokens.
    """

    drafter: str
    draft_length: str
    start: Start
    rule: str = ""


def plain(model: nn.Module, temp: float = 0.0) -> Contender:
    """mlx-lm without speculation, which all others are compared with."""

    def start(prompt: list[int], max_tokens: int, seed: int) -> Generator[Emitted, None, None]:
        mx.random.seed(seed)
        steps = generate_step(
            mx.array(prompt), model, max_tokens=max_tokens, sampler=make_sampler(temp)
        )
        with closing(steps):
            for token, _ in steps:
                yield Emitted(int(token))

    return Contender(PLAIN, "", start)


def mlx_lm_speculation(
    model: nn.Module, draft_model: nn.Module, draft_length: int, temp: float = 0.0
) -> Contender:
    """mlx-lm's own speculative decoding, which drafts K tokens a round, or as many as are wanted.

    Args:
        model: the target.
        draft_model: with the target's tokenizer.
        draft_length: tokens a round.
        temp: temperature; 0 is greedy.
    """
    from mlx_lm.generate import speculative_generate_step  # may go; nothing else hangs on it

    def start(prompt: list[int], max_tokens: int, seed: int) -> Generator[Emitted, None, None]:
        mx.random.seed(seed)
        steps = speculative_generate_step(
            mx.array(prompt),
            model,
            draft_model,
            num_draft_tokens=draft_length,
            max_tokens=max_tokens,
            sampler=make_sampler(temp),
        )
        passes = drafted = drafting = 0
        begins_round = True
        with closing(steps):
            for n, (token, _, from_draft) in enumerate(steps):
                if begins_round:
                    length = min(draft_length, max_tokens - n)
                    passes, drafted, drafting = (
                        passes + 1,
                        drafted + length,
                        drafting + (length > 0),
                    )
                begins_round = not from_draft
                yield Emitted(int(token), bool(from_draft), Counts(passes, drafted, drafting))

    return Contender(MLX_LM_SPECULATION, str(draft_length), start)


def ours(
    model: nn.Module,
    drafter: Drafter | None,
    name: str,
    draft_length: str,
    temp: float = 0.0,
    tokenizer: Any = None,
    rule: str = "auto",
    tuning: Tuning | None = None,
) -> Contender:
    """Our loop with a drafter, or with none.

    What an automatic draft length learns it keeps from text to text: in `tuning`, else for each
    seed, and so for each repeat, anew, since a text that it has seen before would be no fair test.

    Args:
        model: the target.
        drafter: None for plain decoding by our loop.
        name: what tables call the drafter.
        draft_length: a number or a policy, as on the command line.
        temp: temperature; 0 is greedy.
        tokenizer: the target's, for drafters that compare it.
        rule: as in `speculate`.
        tuning: where to keep what is learned; None for a new one for each seed.
    """
    length = parse_draft_length(draft_length or "0")
    tunings: dict[int, Tuning] = {}

    def start(prompt: list[int], max_tokens: int, seed: int) -> Generator[Emitted, None, None]:
        tokens = speculate(
            model,
            prompt,
            drafter,
            max_tokens=max_tokens,
            sampler=Sampling(temp),
            seed=seed,
            rule=rule,
            draft_length=length,
            tuning=tuning or tunings.setdefault(seed, Tuning.for_model(model)),
            tokenizer=tokenizer,
        )
        with closing(tokens):
            for token in tokens:
                yield Emitted(token.token, token.from_draft, _counts(token.stats))

    if drafter is None:
        return Contender(name, "", start)
    return Contender(name, draft_length, start, rule)


def _counts(stats: SpeculationStats) -> Counts:
    drafting = stats.drafted_at[0] if stats.drafted_at else 0
    host_seconds = stats.draft_seconds + stats.other_seconds
    return Counts(stats.target_passes, stats.drafted, drafting, host_seconds)


def make_contenders(
    model: nn.Module,
    drafters: Sequence[str],
    draft_lengths: Sequence[str],
    temp: float = 0.0,
    tokenizer: Any = None,
    draft_model: nn.Module | None = None,
    draft_tokenizer: Any = None,
    rules: Sequence[str] = ("auto",),
    make: Callable[[str], Drafter | None] | None = None,
) -> list[Contender]:
    """Plain mlx-lm, its own speculation if there is a draft model, then ours.

    Ours is each drafter with each length and rule; without a drafter these mean nothing.

    Args:
        model: the target.
        drafters: names with options; "none" is our loop without a drafter.
        draft_lengths: K or the name of a policy, each as it is typed.
        temp: temperature, 0 for greedy.
        tokenizer: the target's, for drafters that compare it with their own.
        draft_model: what "model" drafts with, and mlx-lm's own speculation.
        draft_tokenizer: the draft model's.
        rules: acceptance rules, names with options.
        make: makes the drafter of a name; None for `make_drafter` with the draft model.

    Raises:
        UnknownNameError: no drafter or length has this name.
        ValueError: options that a drafter does not take, or "model" without one.
    """
    contenders = [plain(model, temp)]
    if draft_model is not None:
        numbers = [int(text) for text in draft_lengths if text.isdecimal()]
        for number in numbers or [MLX_LM_DRAFT_LENGTH]:
            contenders.append(mlx_lm_speculation(model, draft_model, number, temp))
    make = make or functools.partial(
        make_drafter, draft_model=draft_model, draft_tokenizer=draft_tokenizer
    )
    for spec in drafters:
        drafter = make(spec)
        for length, rule in product(draft_lengths, rules) if drafter else [("", "auto")]:
            contenders.append(ours(model, drafter, spec, length, temp, tokenizer, rule))
    return contenders
