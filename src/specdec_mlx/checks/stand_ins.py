"""What stands in for a model or a drafter where a part of the check runs it outside of the loop.

Thousands of short texts after one context come past the same few places again and again. There the
loop, the drafter's session, the rule and the noise run as ever, and only a pass whose outcome is
known is looked up: `Remembered`.

Other parts ask sessions outside of any generation, where nobody shows them the target's states. So
each session of a drafter that reads the target gets caches of the target, feeds the text as it is
observed, and is shown the states of that: `standing_alone`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.drafters.model import logit_width
from specdec_mlx.rounds.features import FeatureFeed
from specdec_mlx.target.model_pass import ModelPass
from specdec_mlx.target.rollback import Rollback
from specdec_mlx.token_ids import to_ids, to_list
from specdec_mlx.types import (
    Checks,
    Closes,
    Draft,
    DraftContext,
    Drafter,
    ReadsTarget,
    all_drafters,
    key_of,
)

CHUNK = 2048
MOST_ROWS = 1000
IMPOSSIBLE = -1e9
"""Logit of what never comes: finite, as logits have to be."""


class Remembered(nn.Module):  # type: ignore[misc]
    """Stands for a model whose texts all begin with the same tokens.

    Its cache holds the tokens that were fed, so that one which was not rolled back leads to
    another row, as it would with the model's own caches.
    """

    def __init__(self, model: nn.Module, context: list[int], *, gives_last: bool = False) -> None:
        """context: [n] tokens that all texts begin with, n > 0.

        gives_last: whether the context but for its last token leads to that one with certainty.
        """
        super().__init__()
        self._rows = _Rows(model, tuple(context), gives_last=gives_last)

    def make_cache(self) -> list[TextCache]:
        """One cache, of tokens."""
        return [TextCache()]

    def __call__(self, ids: mx.array, cache: list[TextCache]) -> mx.array:
        """Logits [1, S, V] after each of ids [1, S]; none within the common context."""
        before = len(cache[0].tokens)
        cache[0].tokens += to_list(ids[0])
        fed = tuple(cache[0].tokens)
        self._rows.after(fed)  # one pass for all that are not known
        rows = [self._rows.after(fed[:end]) for end in range(before + 1, len(fed) + 1)]
        return mx.stack(rows)[None]

    def after(self, tokens: list[int]) -> mx.array:
        """Logits [V] after tokens that begin with the common context."""
        return self._rows.after(tuple(tokens))


class TextCache:
    """A cache that holds the text itself, and nothing to compute."""

    state: tuple[mx.array, ...] = ()

    def __init__(self) -> None:
        """Start empty."""
        self.tokens: list[int] = []

    @property
    def offset(self) -> int:
        """Tokens held."""
        return len(self.tokens)

    def is_trimmable(self) -> bool:
        """Always."""
        return True

    def trim(self, n: int) -> int:
        """Drop the last n tokens."""
        n = min(n, len(self.tokens))
        del self.tokens[len(self.tokens) - n :]
        return n


class _Rows:
    """Logits by text. Kept apart from the module, whose containers MLX would take for weights."""

    def __init__(self, model: nn.Module, context: tuple[int, ...], *, gives_last: bool) -> None:
        self.model = model
        self.context = context
        self.known: dict[tuple[int, ...], mx.array] = {}
        width = logit_width(model)
        self.unknown = mx.full((width,), mx.nan)
        self.last = mx.where(mx.arange(width) == context[-1], 0.0, IMPOSSIBLE)
        self.gives_last = gives_last
        self.caches: list[Any] | None = None
        self.latest: tuple[tuple[int, ...], list[Any]] = ((), [])

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
        start, caches = self._nearest(tokens)
        logits = self.model(to_ids(tokens[start:])[None], cache=caches)[0]
        mx.eval(logits)
        for i in range(logits.shape[0]):
            self.known.setdefault(tokens[: start + i + 1], logits[i])
        self.latest = tokens, caches
        return self.known[tokens]

    def _nearest(self, tokens: tuple[int, ...]) -> tuple[int, list[Any]]:
        """How much of a text is in caches already, and those caches, to be written to."""
        latest, caches = self.latest
        if latest and len(latest) < len(tokens) and latest == tokens[: len(latest)]:
            return len(latest), caches
        if tokens[: len(self.context)] == self.context:
            return len(self.context) - 1, copy.deepcopy(self._prefilled())
        return 0, make_prompt_cache(self.model)

    def _prefilled(self) -> list[Any]:
        """Caches that hold the common context but for its last token."""
        if self.caches is None:
            self.caches = make_prompt_cache(self.model)
            for i in range(0, len(self.context) - 1, CHUNK):
                chunk = self.context[i : min(i + CHUNK, len(self.context) - 1)]
                self.model(to_ids(chunk)[None], cache=self.caches)
                mx.eval([cache.state for cache in self.caches])
        return self.caches


def with_remembered_models(drafter: Drafter, context: list[int]) -> Drafter:
    """The drafter, with each model in its fields, or in those of drafters there, remembered.

    One that keeps a model where it cannot be seen runs it each time, which is as right, and slow.
    """
    if not dataclasses.is_dataclass(drafter) or isinstance(drafter, type | ReadsTarget):
        return drafter
    values = {field.name: getattr(drafter, field.name) for field in dataclasses.fields(drafter)}
    remembered = {name: _remembered(value, context) for name, value in values.items()}
    if all(remembered[name] is value for name, value in values.items()):
        return drafter
    changed = copy.copy(drafter)
    for name, value in remembered.items():
        object.__setattr__(changed, name, value)
    return changed


def _remembered(value: Any, context: list[int]) -> Any:
    """What stands for a field's value."""
    if isinstance(value, nn.Module):
        return Remembered(value, context)
    if isinstance(value, tuple) and value and all(isinstance(v, Drafter) for v in value):
        parts = tuple(with_remembered_models(v, context) for v in value)
        return parts if any(a is not b for a, b in zip(parts, value, strict=True)) else value
    return with_remembered_models(value, context) if isinstance(value, Drafter) else value


def standing_alone(drafter: Drafter, model: nn.Module) -> Drafter:
    """The drafter, with sessions that read the target by themselves if it reads it."""
    reads = any(isinstance(part, ReadsTarget) for part in all_drafters(drafter))
    return Reading(drafter, model) if reads else drafter


class Reading:
    """A drafter whose sessions run the target.

    Args:
        drafter: reads `model`, or is made of others of which one does.
        model: the target.
    """

    def __init__(self, drafter: Drafter, model: nn.Module) -> None:
        """Nothing is run yet."""
        self.drafter, self._model = drafter, model
        self.key = key_of(drafter)

    def check(self, context: DraftContext) -> None:
        """Raise what the drafter raises for this target."""
        if isinstance(self.drafter, Checks):
            self.drafter.check(context)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> ReadingSession:
        """Start a generation."""
        return ReadingSession(self.drafter, self._model, prompt, context)


class ReadingSession:
    """A session, and the target's pass over its text."""

    def __init__(
        self, drafter: Drafter, model: nn.Module, prompt: Sequence[int], context: DraftContext
    ) -> None:
        """As `Reading` and its `begin`; nothing was fed yet."""
        self._tokens = list(prompt)
        self._session = drafter.begin(prompt, context)
        target: Any = ModelPass(model, Rollback(make_prompt_cache(model)), probe=False)
        self._target: ModelPass = target
        self._feed = FeatureFeed.between(drafter, self._session, target)

    def propose(self, limit: int) -> Draft:
        """The session's draft, once it was shown all of the text but for its last token."""
        self._read()
        return self._session.propose(limit)

    def observe(self, tokens: Sequence[int]) -> None:
        """Show the states of what was emitted, and tell the session."""
        self._tokens += tokens
        self._read()
        self._session.observe(tokens)

    def close(self, length: int) -> None:
        """Tell the session of the end."""
        if isinstance(self._session, Closes):
            self._session.close(length)

    def _read(self) -> None:
        start = self._target.rollback.position
        unread = self._tokens[start:-1]
        if unread and self._feed is not None:
            self._target.feed(to_ids(unread))
            self._feed.show_fed(start)
