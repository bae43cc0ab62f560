"""Who takes part in a benchmark: plain mlx-lm, its own speculation, and our drafters."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.sample_utils import make_sampler

from specdec_mlx.draft_length import policy
from specdec_mlx.draft_length.tuning import Tuning
from specdec_mlx.drafters.model import ModelDrafter
from specdec_mlx.drafters.registry import make_drafter, parse_options
from specdec_mlx.loop import speculate
from specdec_mlx.sampling.distribution import Sampling
from specdec_mlx.stats.account import SpeculationStats
from specdec_mlx.types import Drafter

PLAIN = "mlx-lm"
MLX_LM_SPECULATION = "mlx-lm-speculation"
NO_DRAFTER = "none"
MLX_LM_DRAFT_LENGTH = 3  # of mlx-lm's command line, where no number is given


class Passes(NamedTuple):
    """What somebody else's loop says of itself so far.

    target_passes: the one that gave the first token included. drafted: tokens proposed.
    drafting: passes that had a draft.
    """

    target_passes: int
    drafted: int
    drafting: int


@dataclass(frozen=True)
class Emitted:
    """One token of a generation.

    stats: the running account, of our loop only. passes: the same of another package's loop; None
    for mlx-lm's. at: when the token was known, by `time.perf_counter`; None is now, as it is handed
    out, which a loop without streaming cannot do.
    """

    token: int
    from_draft: bool = False
    stats: SpeculationStats | None = None
    passes: Passes | None = None
    at: float | None = None


Start = Callable[[list[int], int, int], Generator[Emitted, None, None]]


@dataclass(frozen=True)
class Contender:
    """A way to generate. start: prompt [n], max_tokens and seed to a stream of tokens.

    drafter: as given on the command line. draft_length, rule: the same; "" where they mean
    nothing.
    """

    drafter: str
    draft_length: str
    start: Start
    rule: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells it from the others."""
        return self.drafter, self.draft_length, self.rule


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
    """mlx-lm's own speculative decoding."""

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
        with closing(steps):
            for token, _, from_draft in steps:
                yield Emitted(int(token), bool(from_draft))

    return Contender(MLX_LM_SPECULATION, str(draft_length), start)


def ours(
    model: nn.Module,
    drafter: Drafter | None,
    name: str,
    draft_length: str,
    temp: float = 0.0,
    tokenizer: Any = None,
    rule: str = "auto",
) -> Contender:
    """Our loop with a drafter, or with none; `rule` as in `speculate`.

    What an automatic draft length learns it keeps from text to text, for each seed, and so for
    each repeat, anew: a text that it has seen before would be no fair test.
    """
    length = parse_draft_length(draft_length)
    tunings: dict[int, Tuning] = {}

    def start(prompt: list[int], max_tokens: int, seed: int) -> Generator[Emitted, None, None]:
        tokens = speculate(
            model,
            prompt,
            drafter,
            max_tokens=max_tokens,
            sampling=Sampling(temp),
            seed=seed,
            rule=rule,
            draft_length=length,
            tuning=tunings.setdefault(seed, Tuning.for_model(model)),
            tokenizer=tokenizer,
        )
        with closing(tokens):
            for token in tokens:
                yield Emitted(token.token, token.from_draft, token.stats)

    if drafter is None:
        return Contender(name, "", start)
    return Contender(name, draft_length, start, rule)


def make_contenders(
    model: nn.Module,
    drafters: Sequence[str],
    draft_lengths: Sequence[str],
    temp: float = 0.0,
    tokenizer: Any = None,
    draft_model: nn.Module | None = None,
    draft_tokenizer: Any = None,
    rules: Sequence[str] = ("auto",),
) -> list[Contender]:
    """Plain mlx-lm, its own speculation if there is a draft model, then ours.

    Ours is each drafter with each length and rule; without a drafter these mean nothing.

    Raises UnknownNameError and ValueError for drafters that cannot be made.
    """
    contenders = [plain(model, temp)]
    if draft_model is not None:
        numbers = [int(text) for text in draft_lengths if text.isdecimal()]
        for number in numbers or [MLX_LM_DRAFT_LENGTH]:
            contenders.append(mlx_lm_speculation(model, draft_model, number, temp))
    for spec in drafters:
        drafter = drafter_from_spec(spec, draft_model, draft_tokenizer)
        for length, rule in product(draft_lengths, rules) if drafter else [("", "auto")]:
            contenders.append(ours(model, drafter, spec, length, temp, tokenizer, rule))
    return contenders


def drafter_from_spec(
    spec: str, draft_model: nn.Module | None = None, draft_tokenizer: Any = None
) -> Drafter | None:
    """The drafter that `NAME:key=value,...` names; None for "none"; "model" takes draft_model."""
    name, _, options = spec.partition(":")
    if name == NO_DRAFTER:
        return None
    if name != "model":
        return make_drafter(spec)
    if draft_model is None:
        raise ValueError("--drafter model needs --draft-model, a folder or a Hugging Face name.")
    return ModelDrafter(draft_model, tokenizer=draft_tokenizer, **parse_options(options))


def parse_draft_length(text: str) -> int | str:
    """As `draft_length.policy.parse_draft_length`; 0 for an empty text, beside no drafter."""
    return policy.parse_draft_length(text or "0")
