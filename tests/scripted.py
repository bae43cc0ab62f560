"""Drafters whose proposals are known beforehand.

An oracle knows the text that the target will write. What it proposes is right, but for positions
chosen by a fixed rule, so that every number of accepted tokens occurs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step

import tiny
from specdec_mlx.contracts import Draft, DraftContext, Drafter, Session
from specdec_mlx.token_ids import to_list
from specdec_mlx.trees.shape import depths_of, path_to

PROMPT = [5, 17, 99, 3, 64, 17, 99, 42]


@cache
def target(name: str = "qwen2", bits: int | None = None) -> nn.Module:
    """A tiny model, one for all tests."""
    model = tiny.build(name)
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
    return model


def plain(
    num_tokens: int = 24, prompt: Sequence[int] = PROMPT, model: nn.Module | None = None, **how: Any
) -> list[int]:
    """What mlx-lm writes after a prompt, token by token."""
    steps = generate_step(mx.array(list(prompt)), model or target(), max_tokens=num_tokens, **how)
    return [int(token) for token, _ in steps]


Text = Sequence[int] | Callable[[Sequence[int]], Sequence[int]]
"""What is coming, or for each prompt what comes after it."""


@dataclass(frozen=True, eq=False)
class OracleDrafter(Drafter):
    """Proposes the text that is coming, wrong in a share of positions."""

    text: Text
    vocab_size: int
    wrong: float = 0.0
    seed: int = 0

    def begin(self, prompt: Sequence[int], context: DraftContext) -> ScriptedSession:
        script = self.script(prompt)
        return ScriptedSession(lambda start, limit: script[start : start + limit])

    def script(self, prompt: Sequence[int] = ()) -> list[int]:
        coins = random.Random(self.seed)
        return [
            (token + 1) % self.vocab_size if coins.random() < self.wrong else token
            for token in (self.text(prompt) if callable(self.text) else self.text)
        ]


def always_wrong(text: Sequence[int], vocab_size: int) -> OracleDrafter:
    return OracleDrafter(text, vocab_size, wrong=1.1)


@dataclass(frozen=True, eq=False)
class ScriptedDrafter(Drafter):
    """Proposes what `script(number of tokens emitted, limit)` returns."""

    script: Callable[[int, int], Draft | Sequence[int]]

    def begin(self, prompt: Sequence[int], context: DraftContext) -> ScriptedSession:
        return ScriptedSession(self.script)


class ScriptedSession(Session):
    def __init__(self, script: Callable[[int, int], Draft | Sequence[int]]) -> None:
        self.script = script
        self.limits: list[int] = []
        self.observed: list[int] = []
        self.closed_at: int | None = None

    def propose(self, limit: int) -> Draft:
        self.limits.append(limit)
        scripted = self.script(len(self.observed), limit)
        return scripted if isinstance(scripted, Draft) else Draft(list(scripted))

    def observe(self, tokens: Sequence[int]) -> None:
        self.observed += tokens

    def close(self, length: int) -> None:
        self.closed_at = length


class _Position:
    """A cache that knows how much was fed, and nothing else."""

    def __init__(self) -> None:
        self.offset, self.state = 0, mx.array(0)

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        self.offset -= n
        return n


class _ScriptedModel:
    def __init__(self, text: list[int], vocab_size: int) -> None:
        self.text, self.vocab_size, self.layers = text, vocab_size, [None]

    def make_cache(self) -> list[_Position]:
        return [_Position()]

    def __call__(self, ids: mx.array, cache: list[_Position]) -> mx.array:
        start = cache[0].offset
        cache[0].offset += ids.shape[1]
        coming = self.text[start + 1 : cache[0].offset + 1]
        coming = [*coming, *[0] * (ids.shape[1] - len(coming))]
        return (mx.array([coming])[..., None] == mx.arange(self.vocab_size)).astype(mx.float32)


def scripted_model(prompt: Sequence[int], drafter: OracleDrafter) -> _ScriptedModel:
    """A draft model for mlx-lm that proposes what the oracle would."""
    return _ScriptedModel([*prompt, *drafter.script()], drafter.vocab_size)


@dataclass(frozen=True, eq=False)
class Recorder(Drafter):
    """Passes everything on to another drafter, and keeps what it proposed after which text."""

    drafter: Drafter
    proposals: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Session:
        session, text = self.drafter.begin(prompt, context), list(prompt)
        propose, observe = session.propose, session.observe

        def noted(limit: int) -> Draft:
            draft = propose(limit)
            if len(draft):
                self.proposals.append((list(text), to_list(draft.tokens)))
            return draft

        def told(tokens: Sequence[int]) -> None:
            text.extend(tokens)
            observe(tokens)

        session.propose, session.observe = noted, told  # type: ignore[method-assign]
        return session


TREE = (-1, -1, 0, 1, 1, 4, 4, 3)  # parents in the trees of `OracleTrees`


@dataclass(frozen=True, eq=False)
class OracleTrees(Drafter):
    """Proposes trees through which the text that is coming goes, on a path drawn by `seed`."""

    text: Text
    vocab_size: int
    seed: int = 0

    def begin(self, prompt: Sequence[int], context: DraftContext) -> ScriptedSession:
        text = self.text(prompt) if callable(self.text) else self.text
        return ScriptedSession(lambda start, limit: self.draft(text[start:], start).head(limit))

    def draft(self, coming: Sequence[int], start: int) -> Draft:
        """A tree in which one path, that ends anywhere, is right."""
        coins = random.Random(self.seed * 1000 + start)
        path, tokens = path_to(coins.randrange(len(TREE)), TREE), []
        for node, depth in enumerate(depths_of(TREE)):
            own = coming[depth] if depth < len(coming) else 0
            tokens.append(own if node in path else (own + 1 + node) % self.vocab_size)
        return Draft(tokens, parents=TREE)
