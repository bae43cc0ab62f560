"""Stand-ins where a part of the check runs a model or a drafter outside of the loop.

`Remembered` looks up passes that thousands of short texts have in common; loop, session, rule and
noise run as ever. `standing_alone` has sessions feed the target the text themselves, where nobody
shows them its states.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.contracts import (
    Closes,
    Draft,
    DraftContext,
    Drafter,
    DraftSession,
    ReadsTarget,
    all_drafters,
    is_cheap,
)
from specdec_mlx.drafters.model import logit_width
from specdec_mlx.rounds.features import FeatureFeed
from specdec_mlx.target.model_pass import ModelPass
from specdec_mlx.target.rollback import Rollback
from specdec_mlx.token_ids import to_ids, to_list

CHUNK = 2048
MOST_ROWS = 1000
IMPOSSIBLE = -1e9  # logit of a token that never comes: finite, as logits have to be


class Remembered(nn.Module):  # type: ignore[misc]
    """Stands for a model whose texts all begin with the same tokens.

    Its cache holds the tokens fed: one that was not rolled back leads to another row, as it should.
    """

    def __init__(self, model: nn.Module, context: list[int], *, gives_last: bool = False) -> None:
        """context: [n > 0] common tokens; gives_last: the others lead to its last for sure."""
        super().__init__()
        self._rows = _Rows(model, tuple(context), gives_last)

    def make_cache(self) -> list[_TextCache]:
        """One cache, of tokens."""
        return [_TextCache()]

    def __call__(self, ids: mx.array, cache: list[_TextCache]) -> mx.array:
        """Logits [1, S, V] after each of ids [1, S]; NaN within the common context."""
        before = len(cache[0].tokens)
        cache[0].tokens += to_list(ids[0])
        fed = tuple(cache[0].tokens)
        self._rows.after(fed)  # one pass for all that are not known
        rows = [self._rows.after(fed[:end]) for end in range(before + 1, len(fed) + 1)]
        return mx.stack(rows)[None]

    def after(self, tokens: list[int]) -> mx.array:
        """Logits [V] after tokens that begin with the common context."""
        return self._rows.after(tuple(tokens))


class _TextCache:
    """A cache that holds the text itself, and nothing to compute."""

    state: tuple[mx.array, ...] = ()

    def __init__(self) -> None:
        self.tokens: list[int] = []

    @property
    def offset(self) -> int:
        return len(self.tokens)

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        n = min(n, len(self.tokens))
        del self.tokens[len(self.tokens) - n :]
        return n


class _Rows:
    """Logits by text. Kept apart from the module, whose containers MLX would take for weights."""

    def __init__(self, model: nn.Module, context: tuple[int, ...], gives_last: bool) -> None:
        self.model, self.context, self.gives_last = model, context, gives_last
        self.known: dict[tuple[int, ...], mx.array] = {}
        width = logit_width(model)
        self.unknown = mx.full((width,), mx.nan)
        self.last = mx.where(mx.arange(width) == context[-1], 0.0, IMPOSSIBLE)
        self.caches: list[Any] | None = None

    def after(self, tokens: tuple[int, ...]) -> mx.array:
        """Logits [V]; not a number for a text that ends within the common context."""
        if tokens in self.known:
            return self.known[tokens]
        if self.gives_last and tokens == self.context[:-1]:
            return self.last
        if len(tokens) < len(self.context) and tokens == self.context[: len(tokens)]:
            return self.unknown
        if len(self.known) >= MOST_ROWS:
            self.known.clear()
        start, caches = 0, make_prompt_cache(self.model)
        if tokens[: len(self.context)] == self.context:
            start, caches = len(self.context) - 1, copy.deepcopy(self._prefilled())
        logits = self.model(to_ids(tokens[start:])[None], cache=caches)[0]
        mx.eval(logits)
        for i in range(logits.shape[0]):
            self.known.setdefault(tokens[: start + i + 1], logits[i])
        return self.known[tokens]

    def _prefilled(self) -> list[Any]:
        """Caches that hold the common context but for its last token."""
        if self.caches is None:
            self.caches = make_prompt_cache(self.model)
            for start in range(0, len(self.context) - 1, CHUNK):
                chunk = self.context[start : min(start + CHUNK, len(self.context) - 1)]
                self.model(to_ids(chunk)[None], cache=self.caches)
                mx.eval([cache.state for cache in self.caches])
        return self.caches


def with_remembered_models(drafter: Drafter, context: list[int]) -> Drafter:
    """The drafter, with each model in its fields, or in those of drafters there, remembered."""
    if not dataclasses.is_dataclass(drafter) or isinstance(drafter, type | ReadsTarget):
        return drafter
    changed = copy.copy(drafter)
    for field in dataclasses.fields(drafter):
        value = _remembered(getattr(drafter, field.name), context)
        object.__setattr__(changed, field.name, value)
    return changed


def _remembered(value: Any, context: list[int]) -> Any:
    if isinstance(value, nn.Module):
        return Remembered(value, context)
    if type(value) is tuple:
        return tuple(_remembered(entry, context) for entry in value)
    return with_remembered_models(value, context) if isinstance(value, Drafter) else value


class PassesOn:
    """A session that passes everything on to another one."""

    def __init__(self, session: DraftSession) -> None:
        self._session, self.cheap = session, is_cheap(session)

    def propose(self, limit: int) -> Draft:
        """The session's draft."""
        return self._session.propose(limit)

    def observe(self, tokens: Sequence[int]) -> None:
        """Tell the session what was emitted."""
        self._session.observe(tokens)

    def close(self, length: int) -> None:
        """Tell the session of the end."""
        if isinstance(self._session, Closes):
            self._session.close(length)


def standing_alone(drafter: Drafter, model: nn.Module) -> Drafter:
    """The drafter, with sessions that read the target by themselves if it reads it."""
    reads = any(isinstance(part, ReadsTarget) for part in all_drafters(drafter))
    return Reading(drafter, model) if reads else drafter


class Reading:
    """A drafter that reads the target, whose sessions run the target themselves."""

    def __init__(self, drafter: Drafter, model: nn.Module) -> None:
        self.drafter, self._model = drafter, model

    def begin(self, prompt: Sequence[int], context: DraftContext) -> _ReadingSession:
        """Start a generation."""
        return _ReadingSession(self.drafter, self._model, prompt, context)


class _ReadingSession(PassesOn):
    """A session, and the target's pass over its text."""

    def __init__(
        self, drafter: Drafter, model: nn.Module, prompt: Sequence[int], context: DraftContext
    ) -> None:
        super().__init__(drafter.begin(prompt, context))
        self._tokens = list(prompt)
        target: Any = ModelPass(model, Rollback(make_prompt_cache(model)), probe=False)
        self._target: ModelPass = target
        self._feed = FeatureFeed.between(drafter, self._session, target)

    def propose(self, limit: int) -> Draft:
        self._read()
        return super().propose(limit)

    def observe(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens
        self._read()
        super().observe(tokens)

    def _read(self) -> None:
        start = self._target.rollback.position
        unread = self._tokens[start:-1]
        if unread and self._feed is not None:
            self._target.feed(to_ids(unread))
            self._feed.show_fed(start)
