"""Drafters whose proposals are known beforehand.

An oracle knows the text that the target will write. What it proposes is right, but for positions
chosen by a fixed rule, so that every number of accepted tokens occurs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdec_mlx.types import Draft, DraftContext


@dataclass(frozen=True, eq=False)
class OracleDrafter:
    """Proposes the text that is coming, wrong in a share of positions.

    text: [n] everything that will be emitted. wrong: share of positions at which another token is
    proposed; which ones follows from `seed` alone. vocab_size: V, for the wrong tokens.
    """

    text: Sequence[int]
    vocab_size: int
    wrong: float = 0.0
    seed: int = 0

    def begin(self, prompt: Sequence[int], context: DraftContext) -> ScriptedSession:
        coins = random.Random(self.seed)
        script = [
            (token + 1) % self.vocab_size if coins.random() < self.wrong else token
            for token in self.text
        ]
        return ScriptedSession(lambda start, limit: script[start : start + limit])


def always_wrong(text: Sequence[int], vocab_size: int) -> OracleDrafter:
    """A drafter that never proposes the token that is coming."""
    return OracleDrafter(text, vocab_size, wrong=1.1)


@dataclass(frozen=True, eq=False)
class ScriptedDrafter:
    """Proposes what `script(number of tokens emitted, limit)` returns."""

    script: Callable[[int, int], Sequence[int]]

    def begin(self, prompt: Sequence[int], context: DraftContext) -> ScriptedSession:
        return ScriptedSession(self.script)


class ScriptedSession:
    """Follows the script by the number of tokens emitted.

    limits: what was asked for, one entry a proposal. observed: every token, in order. closed_at:
    the length that `close` was called with.
    """

    def __init__(self, script: Callable[[int, int], Sequence[int]]) -> None:
        self.script = script
        self.limits: list[int] = []
        self.observed: list[int] = []
        self.closed_at: int | None = None

    def propose(self, limit: int) -> Draft:
        self.limits.append(limit)
        return Draft(list(self.script(len(self.observed), limit)))

    def observe(self, tokens: Sequence[int]) -> None:
        self.observed += tokens

    def close(self, length: int) -> None:
        self.closed_at = length
