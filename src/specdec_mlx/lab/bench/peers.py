"""Other packages' prompt lookup, on the same model, prompts and clock.

Both packages copy from the text, so they need no checkpoint. They run with their own defaults. They
are imported at first use, because importing either changes parts of transformers and mlx-lm.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.sample_utils import make_sampler

from specdec_mlx.errors import MissingPackageError
from specdec_mlx.lab.bench.timing import Contender, Emitted

MLX_DSPARK = "mlx-dspark"
MLX_OPTIQ = "mlx-optiq"


def make_peer(name: str, model: nn.Module, tokenizer: Any, temp: float = 0.0) -> Contender:
    """Another package's prompt lookup as a contender.

    Args:
        name: of the package, one of `PEERS`.
        model: the target.
        tokenizer: the target's.
        temp: temperature; 0 is greedy.

    Raises:
        MissingPackageError: the package is not installed.
    """
    return PEERS[name](model, tokenizer, temp)


def mlx_dspark(model: nn.Module, tokenizer: Any, temp: float) -> Contender:
    """`mlx_dspark.lookup_generate` (0.20): a match of 3 or 4 tokens, drafts of 6 to 32 tokens.

    It returns all tokens at the end, so that their times are taken at its callbacks: the first is
    known when the next pass begins, the others when their round is reported. It ends a text at its
    own end tokens, which are the tokenizer's and the usual ends of a turn.
    """
    package = _import("mlx_dspark", MLX_DSPARK)

    def start(prompt: list[int], max_tokens: int, seed: int) -> Generator[Emitted, None, None]:
        target = package.Target(model, tokenizer)
        rounds = _Rounds(target)
        result = package.lookup_generate(
            target,
            tokenizer,
            prompt_ids=prompt,
            max_new_tokens=max_tokens,
            temperature=temp,
            seed=seed,
            on_round=rounds.add,
        )
        rounds.finish()
        yield from rounds.emitted(result.token_ids[:max_tokens])

    return Contender(MLX_DSPARK, start=start)


class _Rounds:
    """What mlx-dspark's callbacks report: when each round ended, and what it drafted."""

    def __init__(self, target: Any) -> None:
        """Note when `target` begins its first pass after the prefill: then a token is known."""
        self.verify = target.verify
        self.first_at: float | None = None
        self.rounds: list[tuple[int, int, float]] = []
        target.verify = self.note_first

    def note_first(self, *args: Any, **options: Any) -> Any:
        """In place of the target's `verify`."""
        if self.first_at is None:
            self.first_at = time.perf_counter()
        return self.verify(*args, **options)

    def add(self, *, drafted: int, accepted: int, **_: Any) -> None:
        """Take a round's report."""
        self.rounds.append((drafted, accepted, time.perf_counter()))

    def finish(self) -> None:
        """A text of one token has no second pass."""
        self.first_at = self.first_at or time.perf_counter()

    def emitted(self, tokens: list[int]) -> Generator[Emitted, None, None]:
        """The tokens with their rounds; the last round may be cut."""
        coming = iter(tokens)
        counts = 1, 0, 0
        for token in coming:
            yield Emitted(token, False, *counts, self.first_at)
            break
        for drafted, accepted, at in self.rounds:
            counts = counts[0] + 1, counts[1] + drafted, counts[2] + (drafted > 0)
            for i, token in zip(range(accepted + 1), coming, strict=False):
                yield Emitted(token, i < accepted, *counts, at)


def mlx_optiq(model: nn.Module, tokenizer: Any, temp: float) -> Contender:
    """`optiq.runtime.ngram_spec.ngram_generate_step` (0.7): a match of 3 tokens, a learned length.

    It measures its passes on first use and keeps what it learned with the loaded model. The
    tokens between two changes of its count of accepted ones are its own.
    """
    package = _import("optiq.runtime.ngram_spec", MLX_OPTIQ)

    def start(prompt: list[int], max_tokens: int, seed: int) -> Generator[Emitted, None, None]:
        mx.random.seed(seed)
        stats = package.NgramStats()
        steps = package.ngram_generate_step(
            mx.array(prompt), model, max_tokens=max_tokens, sampler=make_sampler(temp), stats=stats
        )
        num_from_draft = 0
        with closing(steps):
            for token, _ in steps:
                from_draft = num_from_draft < stats.accepted
                num_from_draft += from_draft
                target_passes = stats.verify_steps + stats.plain_steps
                counts = target_passes, stats.drafted, stats.verify_steps
                yield Emitted(int(token), from_draft, *counts)

    return Contender(MLX_OPTIQ, start=start)


PEERS: dict[str, Callable[[nn.Module, Any, float], Contender]] = {
    MLX_DSPARK: mlx_dspark,
    MLX_OPTIQ: mlx_optiq,
}
"""Names that `--peer` takes, which are those of the packages."""
MODULES = {MLX_DSPARK: "mlx_dspark", MLX_OPTIQ: "optiq"}
"""Name of a package -> its module."""


def _import(module: str, package: str) -> Any:
    """A package's module. Raises MissingPackageError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f"{package} cannot be imported here ({error}). Use: pip install {package}"
        ) from error
