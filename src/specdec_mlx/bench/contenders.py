"""Contenders of a benchmark: plain mlx-lm, its own speculation, and our drafters."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_sampler

from specdec_mlx.contracts import Drafter
from specdec_mlx.draft_length.policy import parse_draft_length
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.loop import speculate
from specdec_mlx.rules.registry import make_rule
from specdec_mlx.sampling.distribution import Sampling

PLAIN = "mlx-lm"
MLX_LM_SPECULATION = "mlx-lm-speculation"
MLX_LM_DRAFT_LENGTH = 3  # of mlx-lm's command line, where no number is given


class Counts(NamedTuple):
    """A loop's own counts so far.

    target_passes: with that of the first token. drafting: passes that had a draft.
    """

    target_passes: int
    drafted: int = 0
    drafting: int = 0


@dataclass(frozen=True)
class Emitted:
    """One token, with the counts up to it (None: a pass a token) and when it was known (None: now).

    at: by `time.perf_counter`.
    """

    token: int
    from_draft: bool = False
    counts: Counts | None = None
    at: float | None = None


Start = Callable[[list[int], int, int], Generator[Emitted, None, None]]
"""(prompt [n], max_tokens, seed) -> a stream of tokens."""


@dataclass(frozen=True)
class Way:
    """A way to generate, by its flags on the command line; "" where it has none."""

    drafter: str
    draft_length: str = ""
    rule: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """All three, which tell contenders apart."""
        return self.drafter, self.draft_length, self.rule


@dataclass(frozen=True)
class Contender(Way):
    """A way to generate, and how it starts."""

    start: Start = field(kw_only=True)


def plain(model: nn.Module, temp: float = 0.0) -> Contender:
    """mlx-lm without speculation, which all others are compared with."""

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
    """mlx-lm's own speculative decoding, `draft_length` tokens a round."""
    from mlx_lm.generate import speculative_generate_step  # may go; nothing else hangs on it

    def start(prompt: list[int], max_tokens: int, seed: int) -> Generator[Emitted, None, None]:
        mx.random.seed(seed)
        options = {"num_draft_tokens": draft_length, "max_tokens": max_tokens}
        options |= {"sampler": make_sampler(temp)}
        steps = speculative_generate_step(mx.array(prompt), model, draft_model, **options)
        counts, begins_round = Counts(0), True
        with closing(steps):
            for n, (token, _, from_draft) in enumerate(steps):
                if begins_round:
                    length = min(draft_length, max_tokens - n)
                    passes, drafted, drafting = counts
                    counts = Counts(passes + 1, drafted + length, drafting + (length > 0))
                begins_round = not from_draft
                yield Emitted(int(token), bool(from_draft), counts)

    return Contender(MLX_LM_SPECULATION, str(draft_length), start=start)


def ours(
    model: nn.Module,
    drafter: Drafter | None,
    name: str,
    draft_length: str,
    temp: float = 0.0,
    tokenizer: Any = None,
    rule: str = "auto",
    tuning: Tuning | None = None,
    is_seeded: bool = False,
) -> Contender:
    """Our loop with a drafter, or with none, by the name that tables give it.

    tuning: what an automatic length learns; None for a new one for each repeat, since a text seen
    before is no fair test. is_seeded: measure rule "auto" as it is for a caller who gives a seed.
    """
    how = make_rule(rule, is_seeded=is_seeded)
    length = parse_draft_length(draft_length or "0")
    tunings: dict[int, Tuning] = {}

    def start(prompt: list[int], max_tokens: int, seed: int) -> Generator[Emitted, None, None]:
        tokens = speculate(
            *(model, prompt, drafter),
            max_tokens=max_tokens,
            sampler=Sampling(temp),
            seed=seed,
            rule=how,
            draft_length=length,
            tuning=tuning or tunings.setdefault(seed, Tuning.for_model(model)),
            tokenizer=tokenizer,
        )
        with closing(tokens):
            for token in tokens:
                stats = token.stats
                drafting = stats.drafted_at[0] if stats.drafted_at else 0
                counts = Counts(stats.target_passes, stats.drafted, drafting)
                yield Emitted(token.token, token.from_draft, counts)

    return Contender(name, *((draft_length, rule) if drafter else ()), start=start)


def make_contenders(
    model: nn.Module,
    drafters: Mapping[str, Drafter | None],
    draft_lengths: Sequence[str],
    temp: float = 0.0,
    tokenizer: Any = None,
    draft_model: nn.Module | None = None,
    rules: Sequence[str] = ("auto",),
    is_seeded: bool = False,
) -> list[Contender]:
    """Plain mlx-lm, its own speculation if there is a draft model, then each drafter in all ways.

    drafters: by the names that tables give them; None is plain decoding by our loop. is_seeded: as
    for `ours`.
    """
    contenders = [plain(model, temp)]
    if draft_model is not None:
        numbers = [int(text) for text in draft_lengths if text.isdecimal()]
        lengths = numbers or [MLX_LM_DRAFT_LENGTH]
        contenders += [mlx_lm_speculation(model, draft_model, n, temp) for n in lengths]
    for spec, drafter in drafters.items():
        for length, rule in product(draft_lengths, rules) if drafter else [("", "auto")]:
            how = model, drafter, spec, length, temp, tokenizer, rule
            contenders.append(ours(*how, is_seeded=is_seeded))
    return contenders
