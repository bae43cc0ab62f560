"""A model that computes the logits after each text once.

Thousands of short texts after one context come past the same few places again and again. Here the
loop, the drafter's session, the rule and the noise run as ever, and only a pass whose outcome is
known is looked up.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.drafters.model import logit_width
from specdec_mlx.token_ids import to_ids, to_list
from specdec_mlx.types import Drafter, ReadsTarget

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
    """A cache that holds the text itself."""

    def __init__(self) -> None:
        """Start empty."""
        self.tokens: list[int] = []

    @property
    def state(self) -> list[mx.array]:
        """Nothing to compute."""
        return []

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
    changes: dict[str, Any] = {}
    for entry in dataclasses.fields(drafter):
        value = getattr(drafter, entry.name)
        if isinstance(value, nn.Module):
            changes[entry.name] = Remembered(value, context)
        elif isinstance(value, Drafter):
            changes[entry.name] = with_remembered_models(value, context)
        elif isinstance(value, tuple) and value and all(isinstance(v, Drafter) for v in value):
            changes[entry.name] = tuple(with_remembered_models(v, context) for v in value)
    if not any(changes[name] is not getattr(drafter, name) for name in changes):
        return drafter
    changed = copy.copy(drafter)
    for name, value in changes.items():
        object.__setattr__(changed, name, value)
    return changed
