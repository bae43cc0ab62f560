"""Stand-ins where a part of the check runs a model or a drafter outside of the loop.

`Remembered` looks up passes that thousands of short texts have in common; loop, session, rule and
noise run as ever. `standing_alone` has sessions feed the target the text themselves, where nobody
shows them its states.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace
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
        certain = mx.where(mx.arange(logit_width(model)) == context[-1], 0.0, IMPOSSIBLE)
        sure = {tuple(context[:-1]): certain} if gives_last else {}
        # not as attributes of the module itself, which MLX would take for weights and layers
        self._held: Any = SimpleNamespace(model=model, context=context, sure=sure, caches=None)
        self._held.known = dict(sure)

    def make_cache(self) -> list[_TextCache]:
        """One cache, of tokens."""
        return [_TextCache()]

    def __call__(self, ids: mx.array, cache: list[_TextCache]) -> mx.array:
        """Logits [1, S, V] after each of ids [1, S]; NaN within the common context."""
        before = len(cache[0].tokens)
        cache[0].tokens += to_list(ids[0])
        fed = cache[0].tokens
        self.after(fed)  # one pass for all that are not known
        return mx.stack([self.after(fed[:end]) for end in range(before + 1, len(fed) + 1)])[None]

    def after(self, tokens: Sequence[int]) -> mx.array:
        """Logits [V]; not a number for a text that ends within the common context."""
        held, text = self._held, tuple(tokens)
        size = len(held.context)
        if text not in held.known and len(text) < size and list(text) == held.context[: len(text)]:
            return mx.full((logit_width(held.model),), mx.nan)
        if text not in held.known:
            if len(held.known) >= MOST_ROWS:
                held.known = dict(held.sure)
            start, caches = 0, make_prompt_cache(held.model)
            if list(text[:size]) == held.context:
                start, caches = size - 1, copy.deepcopy(self._prefilled())
            logits = held.model(to_ids(text[start:])[None], cache=caches)[0]
            mx.eval(logits)
            for i, row in enumerate(logits):
                held.known.setdefault(text[: start + i + 1], row)
        known: mx.array = held.known[text]
        return known

    def _prefilled(self) -> list[Any]:
        """Caches that hold the common context but for its last token."""
        held = self._held
        if held.caches is None:
            held.caches = make_prompt_cache(held.model)
            for start in range(0, len(held.context) - 1, CHUNK):
                chunk = held.context[start : min(start + CHUNK, len(held.context) - 1)]
                held.model(to_ids(chunk)[None], cache=held.caches)
                mx.eval([cache.state for cache in held.caches])
        caches: list[Any] = held.caches
        return caches


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
    """A session that passes everything on to another one, and hands its drafts to `see`."""

    def __init__(
        self, session: DraftSession, see: Callable[[Draft, int], object] = lambda draft, limit: None
    ) -> None:
        self._session, self._see, self.cheap = session, see, is_cheap(session)

    def propose(self, limit: int) -> Draft:
        """The session's draft."""
        draft = self._session.propose(limit)
        self._see(draft, limit)
        return draft

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
