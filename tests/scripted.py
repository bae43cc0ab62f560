"""Drafters whose proposals are known beforehand.

An oracle knows the text that the target will write. What it proposes is right, but for positions
chosen by a fixed rule, so that every number of accepted tokens occurs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from specdec_mlx.contracts import Closes, Draft, DraftContext, Drafter
from specdec_mlx.contracts.trees import depths_of, path_to
from specdec_mlx.token_ids import to_list

Script = Callable[[int, int], Sequence[int] | Draft]
"""(number of tokens emitted, limit) -> what is proposed."""


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
        """[n] what is proposed at each position."""
        coins = random.Random(self.seed)
        return [
            (token + 1) % self.vocab_size if coins.random() < self.wrong else token
            for token in self.text
        ]


def always_wrong(text: Sequence[int], vocab_size: int) -> OracleDrafter:
    """A drafter that never proposes the token that is coming."""
    return OracleDrafter(text, vocab_size, wrong=1.1)


@dataclass(frozen=True, eq=False)
class ScriptedDrafter:
    script: Script

    def begin(self, prompt: Sequence[int], context: DraftContext) -> ScriptedSession:
        return ScriptedSession(self.script)


class ScriptedSession:
    """Follows the script by the number of tokens emitted."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.limits: list[int] = []
        self.observed: list[int] = []
        self.closed_at: int | None = None

    def propose(self, limit: int) -> Draft:
        self.limits.append(limit)
        draft = self.script(len(self.observed), limit)
        return draft if isinstance(draft, Draft) else Draft(list(draft))

    def observe(self, tokens: Sequence[int]) -> None:
        self.observed += tokens

    def close(self, length: int) -> None:
        self.closed_at = length


@dataclass(frozen=True, eq=False)
class _ScriptedModel:
    """Its caches are mlx-lm's own, which count the tokens that were fed."""

    text: list[int]
    vocab_size: int
    layers: tuple[None] = (None,)

    def __call__(self, ids: mx.array, cache: list[KVCache]) -> mx.array:
        start = cache[0].offset + 1
        cache[0].update_and_fetch(*[mx.zeros((1, 1, ids.shape[1], 1))] * 2)
        coming = [*self.text[start:], *[0] * ids.shape[1]][: ids.shape[1]]
        return (mx.array([coming])[..., None] == mx.arange(self.vocab_size)).astype(mx.float32)


def scripted_model(prompt: Sequence[int], drafter: OracleDrafter) -> _ScriptedModel:
    """A draft model for mlx-lm that proposes what the oracle would."""
    return _ScriptedModel([*prompt, *drafter.script()], drafter.vocab_size)


@dataclass(frozen=True, eq=False)
class Recorder:
    """Passes everything on to another drafter, and keeps what it proposed."""

    drafter: Drafter
    proposals: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> RecordingSession:
        return RecordingSession(self, prompt, context)


class RecordingSession:
    def __init__(self, recorder: Recorder, prompt: Sequence[int], context: DraftContext) -> None:
        self.session = recorder.drafter.begin(prompt, context)
        self.proposals = recorder.proposals
        self.text = list(prompt)

    def propose(self, limit: int) -> Draft:
        draft = self.session.propose(limit)
        if len(draft):
            self.proposals.append((list(self.text), to_list(draft.tokens)))
        return draft

    def observe(self, tokens: Sequence[int]) -> None:
        self.session.observe(tokens)
        self.text += tokens

    def close(self, length: int) -> None:
        if isinstance(self.session, Closes):
            self.session.close(length)


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
