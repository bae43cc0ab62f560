"""Drafters whose proposals are known beforehand, and a target whose text is.

An oracle knows the text that the target will write. What it proposes is right, but for positions
chosen by a fixed rule, so that every number of accepted tokens occurs.

The target's cache shows which tokens it holds. It keeps of a tree what its own text goes through,
and says so by a verdict that names nodes.
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
from specdec_mlx.contracts import (
    ROOT,
    Draft,
    DraftContext,
    Drafter,
    DraftSession,
    FeatureRows,
    Features,
    Outcome,
    Verdict,
)
from specdec_mlx.contracts.trees import chain, depths_of, path_to
from specdec_mlx.target.rollback import Rollback
from specdec_mlx.target.strategies import STRATEGIES, Snapshot, Trim
from specdec_mlx.token_ids import to_list

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


@dataclass(frozen=True, eq=False)
class OracleDrafter:
    """Proposes the text that is coming, wrong in a share of positions."""

    text: Sequence[int]
    vocab_size: int
    wrong: float = 0.0
    seed: int = 0

    def begin(self, prompt: Sequence[int], context: DraftContext) -> ScriptedSession:
        script = self.script()
        return ScriptedSession(lambda start, limit: script[start : start + limit])

    def script(self) -> list[int]:
        coins = random.Random(self.seed)
        return [
            (token + 1) % self.vocab_size if coins.random() < self.wrong else token
            for token in self.text
        ]


def always_wrong(text: Sequence[int], vocab_size: int) -> OracleDrafter:
    return OracleDrafter(text, vocab_size, wrong=1.1)


@dataclass(frozen=True, eq=False)
class ScriptedDrafter:
    """Proposes what `script(number of tokens emitted, limit)` returns."""

    script: Callable[[int, int], Draft | Sequence[int]]

    def begin(self, prompt: Sequence[int], context: DraftContext) -> ScriptedSession:
        return ScriptedSession(self.script)


class ScriptedSession:
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
class Recorder:
    """Passes everything on to another drafter, and keeps what it proposed after which text."""

    drafter: Drafter
    proposals: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> DraftSession:
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
class OracleTrees:
    """Proposes trees through which the text that is coming goes, on a path drawn by `seed`."""

    # text: [n] everything that will be emitted; vocab_size: V, for the wrong tokens
    text: Sequence[int]
    vocab_size: int
    seed: int = 0

    def begin(self, prompt: Sequence[int], context: DraftContext) -> ScriptedSession:
        return ScriptedSession(self.draft)

    def draft(self, start: int, limit: int) -> Draft:
        """A tree in which one path, that ends anywhere, is right."""
        coins = random.Random(self.seed * 1000 + start)
        path, tokens = path_to(coins.randrange(len(TREE)), TREE), []
        for node, depth in enumerate(depths_of(TREE)):
            place = start + depth
            own = self.text[place] if place < len(self.text) else 0
            tokens.append(own if node in path else (own + 1 + node) % self.vocab_size)
        return Draft(tokens, parents=TREE).head(limit)


class TokenCache:
    """Holds the tokens that were fed, one row each."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    @property
    def state(self) -> list[mx.array]:
        return []


class RecurrentTokenCache(TokenCache):
    """One whose strategy can only return to a checkpoint."""


class ChainCache(TokenCache):
    """One whose strategy cannot drop rows from between others."""


class DropTokens(Trim):
    def save(self, cache: TokenCache) -> list[int]:
        return list(cache.tokens)

    def restore(self, cache: TokenCache, saved: list[int]) -> None:
        cache.tokens = list(saved)

    def trim(self, cache: TokenCache, back: int) -> int:
        del cache.tokens[len(cache.tokens) - back :]
        return back


class GatherTokens(DropTokens):
    def gather(self, cache: TokenCache, last: int, kept: Sequence[int]) -> None:
        drafted = cache.tokens[-last:]
        cache.tokens[-last:] = [drafted[node] for node in kept]


class ReturnToCheckpoint(Snapshot):
    save = DropTokens.save
    restore = DropTokens.restore


STRATEGIES[TokenCache] = GatherTokens()
STRATEGIES[ChainCache] = DropTokens()
STRATEGIES[RecurrentTokenCache] = ReturnToCheckpoint()


@dataclass
class ScriptedPass:
    """See `contracts.PendingPass`; each row's logprobs hold the number of the row."""

    draft: Draft
    num_fed: int
    own: int
    verdict: Verdict
    features: FeatureRows | None = None

    @property
    def logprobs(self) -> mx.array:
        return mx.arange(len(self.draft) + 1)[:, None]

    @property
    def next_token(self) -> mx.array:
        return mx.array([self.own], mx.uint32)

    def wait(self) -> None: ...

    def read(self) -> Outcome:
        numbers = {name: array.tolist() for name, array in self.verdict.arrays().items()}
        return self.verdict.outcome(numbers, to_list(self.draft.tokens))


@dataclass
class ScriptedTarget:
    """See `contracts.Target`."""

    text: Sequence[int]
    cache: TokenCache = field(default_factory=TokenCache)
    drafts: list[Draft] = field(default_factory=list)
    history: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rollback = Rollback([self.cache])

    def launch(
        self, pending: Any, draft: Draft, position: int, embeddings: Any = None
    ) -> ScriptedPass:
        if len(draft):
            self.rollback.checkpoint()
            self.drafts.append(draft)
        fed = [*to_list(pending), *to_list(draft.tokens)]
        self.advance(fed)
        verdict, rows = self.verdict(draft, position), self.rows(fed)
        return ScriptedPass(draft, len(fed), self.text[position], verdict, rows)

    def feed(self, tokens: mx.array, embeddings: Any = None) -> mx.array:
        self.advance(to_list(tokens))
        return mx.zeros((len(tokens), 1))

    def advance(self, tokens: list[int]) -> None:
        self.cache.tokens += tokens
        self.rollback.advance(len(tokens))

    def verdict(self, draft: Draft, position: int) -> Verdict:
        """Go from the root to the child that the text goes to, as long as there is one."""
        drafted = to_list(draft.tokens)
        parents = chain(len(drafted)) if draft.parents is None else draft.parents
        path: list[int] = []
        for node, parent in enumerate(parents):  # which come before children
            is_next = parent == (path[-1] if path else ROOT)
            if is_next and drafted[node] == self.text[position + len(path)]:
                path.append(node)
        next_token = mx.array(self.text[position + len(path)])
        nodes = mx.array(path + [0] * (len(drafted) - len(path)))
        return Verdict(mx.array(len(path)), next_token, None if draft.parents is None else nodes)  # type: ignore[arg-type]

    def rows(self, fed: list[int]) -> FeatureRows | None:
        return None  # it cannot be read

    def extend_history(self, tokens: Any) -> None:
        self.history += to_list(tokens)

    def vocab_size(self) -> int:
        return 1000

    def widest_pass(self) -> int | None:
        return None

    def quantize(self) -> None: ...


@dataclass
class TappedTarget(ScriptedTarget):
    """One that can be read: a position's row, in each layer that is wanted, holds its token."""

    wanted: Features | None = None
    latest: tuple[FeatureRows, int] | None = None

    def tap(self, wanted: Features) -> None:
        self.wanted = wanted

    def fed_features(self) -> tuple[FeatureRows, int]:
        assert self.latest is not None
        return self.latest

    def feed(self, tokens: mx.array, embeddings: Any = None) -> mx.array:
        rows = self.rows(to_list(tokens))
        assert rows is not None, "fed before it was tapped"
        self.latest = rows, len(tokens)
        return super().feed(tokens, embeddings)

    def rows(self, fed: list[int]) -> FeatureRows | None:
        if self.wanted is None:
            return None
        states = mx.array(fed)[:, None]
        return FeatureRows(
            layers={layer: states + 1000 * layer for layer in self.wanted.layers},
            head_input=-states if self.wanted.head_input else None,  # type: ignore[arg-type]
            top_tokens=mx.repeat(states, self.wanted.top, axis=1),
        )
