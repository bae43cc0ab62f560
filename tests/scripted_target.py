"""A target whose text is known beforehand, with a cache that shows which tokens it holds.

It keeps of a tree what its own text goes through, and says so by a verdict that names nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from specdec_mlx.contracts import ROOT, Draft, FeatureRows, Features, Outcome, Verdict
from specdec_mlx.target.rollback import Rollback
from specdec_mlx.target.strategies import STRATEGIES, Snapshot, Trim
from specdec_mlx.token_ids import to_list


class TokenCache:
    """Holds the tokens that were fed, one row each."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    @property
    def state(self) -> list[mx.array]:
        return []


class RecurrentTokenCache(TokenCache):
    """The same, for a strategy that can only return to a checkpoint."""


class ChainCache(TokenCache):
    """The same, for a strategy that cannot drop rows from between others."""


class DropTokens(Trim):
    """Drops the last tokens."""

    def save(self, cache: TokenCache) -> list[int]:
        return list(cache.tokens)

    def restore(self, cache: TokenCache, saved: list[int]) -> None:
        cache.tokens = list(saved)

    def trim(self, cache: TokenCache, back: int) -> int:
        del cache.tokens[len(cache.tokens) - back :]
        return back


class GatherTokens(DropTokens):
    """Keeps any of the last tokens."""

    def gather(self, cache: TokenCache, last: int, kept: Sequence[int]) -> None:
        drafted = cache.tokens[-last:]
        cache.tokens[-last:] = [drafted[node] for node in kept]


class ReturnToCheckpoint(Snapshot):
    """Puts back what was saved, and nothing in between."""

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
        return ScriptedPass(
            draft, len(fed), self.text[position], self.verdict(draft, position), self.rows(fed)
        )

    def feed(self, tokens: mx.array, embeddings: Any = None) -> mx.array:
        self.advance(to_list(tokens))
        return mx.zeros((len(tokens), 1))

    def advance(self, tokens: list[int]) -> None:
        """The cache holds these too."""
        self.cache.tokens += tokens
        self.rollback.advance(len(tokens))

    def verdict(self, draft: Draft, position: int) -> Verdict:
        """Go from the root to the child that the text goes to, as long as there is one."""
        drafted = to_list(draft.tokens)
        is_chain = draft.parents is None
        parents = range(ROOT, len(drafted) - 1) if draft.parents is None else draft.parents
        path: list[int] = []
        node: int | None = ROOT
        while node is not None:
            own, parent = self.text[position + len(path)], node
            children = (i for i, p in enumerate(parents) if p == parent and drafted[i] == own)
            node = next(children, None)
            path += [] if node is None else [node]
        nodes = path + [0] * (len(drafted) - len(path))
        next_token = self.text[position + len(path)]
        return Verdict(
            mx.array(len(path)), mx.array(next_token), None if is_chain else mx.array(nodes)
        )

    def rows(self, fed: list[int]) -> FeatureRows | None:
        """It cannot be read."""
        return None

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
            head_input=-states if self.wanted.head_input else None,
            top_tokens=mx.repeat(states, self.wanted.top, axis=1) if self.wanted.top else None,
        )


def rounds_of(drafts: Sequence[Draft]) -> Iterator[Draft]:
    """These, and then nothing more."""
    yield from drafts
    while True:
        yield Draft()
