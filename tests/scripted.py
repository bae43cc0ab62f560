"""Drafters whose proposals are known beforehand.

An oracle knows the text that the target will write. What it proposes is right, but for positions
chosen by a fixed rule, so that every number of accepted tokens occurs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from specdec_mlx.contracts import Closes, Draft, DraftContext, Drafter
from specdec_mlx.token_ids import to_list


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
    """Proposes what `script(number of tokens emitted, limit)` returns."""

    script: Callable[[int, int], Sequence[int]]

    def begin(self, prompt: Sequence[int], context: DraftContext) -> ScriptedSession:
        return ScriptedSession(self.script)


class ScriptedSession:
    """Follows the script by the number of tokens emitted."""

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


class _Position:
    """A cache that knows how much was fed, and nothing else."""

    def __init__(self) -> None:
        self.offset = 0
        self.state = mx.array(0)

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        self.offset -= n
        return n


class _ScriptedModel:
    def __init__(self, text: list[int], vocab_size: int) -> None:
        self.text = text
        self.vocab_size = vocab_size
        self.layers = [None]

    def make_cache(self) -> list[_Position]:
        return [_Position()]

    def __call__(self, ids: mx.array, cache: list[_Position]) -> mx.array:
        start = cache[0].offset
        cache[0].offset += ids.shape[1]
        coming = [self.next_token(i) for i in range(start + 1, cache[0].offset + 1)]
        return (mx.array([coming])[..., None] == mx.arange(self.vocab_size)).astype(mx.float32)

    def next_token(self, index: int) -> int:
        return self.text[index] if index < len(self.text) else 0


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

    def begin(self, prompt: Sequence[int], context: DraftContext) -> OracleTreeSession:
        return OracleTreeSession(self)

    def draft(self, start: int, limit: int) -> Draft:
        """A tree in which one path, that ends anywhere, is right."""
        coins = random.Random(self.seed * 1000 + start)
        end, path = coins.randrange(len(TREE)), set[int]()
        while end >= 0:
            path.add(end)
            end = TREE[end]
        depth, tokens = [0] * len(TREE), []
        for node, parent in enumerate(TREE):
            depth[node] = 0 if parent < 0 else depth[parent] + 1
            place = start + depth[node]
            own = self.text[place] if place < len(self.text) else 0
            tokens.append(own if node in path else (own + 1 + node) % self.vocab_size)
        return Draft(tokens, parents=TREE).head(limit)


class OracleTreeSession(ScriptedSession):
    """Follows the text by the number of tokens emitted."""

    def __init__(self, drafter: OracleTrees) -> None:
        super().__init__(lambda start, limit: [])
        self.drafter = drafter

    def propose(self, limit: int) -> Draft:
        return self.drafter.draft(len(self.observed), limit)
