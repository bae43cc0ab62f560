"""Stand-ins where a part of the check runs a model or a drafter outside of the loop.

`Remembered` looks up passes that thousands of short texts have in common; loop, session, rule and
noise run as ever. `Alone` has sessions feed the target the text themselves, where nobody shows them
its states.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, make_prompt_cache

from specdec_mlx.contracts import (
    Closes,
    Draft,
    DraftContext,
    Drafter,
    ReadsTarget,
    is_cheap,
    key_of,
)
from specdec_mlx.engine.drafting import proposing
from specdec_mlx.engine.features import FeatureFeed
from specdec_mlx.token_ids import to_ids, to_list
from specdec_mlx.verify.model_pass import ModelPass, vocab_size_of
from specdec_mlx.verify.rollback import Rollback

MOST_ROWS = 1000


class Remembered(nn.Module):  # type: ignore[misc]
    """Stands for a model whose texts all begin with the same tokens.

    Its cache holds the tokens fed: one that was not rolled back leads to another row, as it should.
    """

    def __init__(self, model: nn.Module, context: list[int]) -> None:
        """context: [n > 0] common tokens."""
        super().__init__()
        held: Any = SimpleNamespace(model=model, context=tuple(context), known={}, caches=None)
        held.inside = mx.full((vocab_size_of(model),), mx.nan)
        self._held = held  # attributes of the module itself would be weights and layers to MLX

    def make_cache(self) -> list[_TokenCache]:
        """One cache, of tokens."""
        return [_TokenCache()]

    def __call__(self, ids: mx.array, cache: list[_TokenCache]) -> mx.array:
        """Logits [1, S, V] after each of ids [1, S]; NaN within the common context."""
        before, rows = cache[0].offset, ids[:, None, :, None]
        held, _ = cache[0].update_and_fetch(rows, rows)
        fed = to_list(held[0, 0, :, 0])
        self.after(fed)  # one pass for all that are not known
        return mx.stack([self.after(fed[:end]) for end in range(before + 1, len(fed) + 1)])[None]

    def after(self, tokens: Sequence[int]) -> mx.array:
        """Logits [V]; not a number for a text that ends within the common context."""
        held, text = self._held, tuple(tokens)
        num_common = len(held.context)
        if len(text) < num_common and text == held.context[: len(text)]:
            inside: mx.array = held.inside
            return inside
        if text not in held.known:
            start, caches = 0, make_prompt_cache(held.model)
            if text[:num_common] == held.context:
                start, caches = num_common - 1, self._prefilled()
            logits = held.model(to_ids(text[start:])[None], cache=caches)[0]
            mx.eval(logits)
            if len(held.known) >= MOST_ROWS:
                held.known.clear()
            rows = {text[: start + i + 1]: row for i, row in enumerate(logits)}
            held.known = rows | held.known
        known: mx.array = held.known[text]
        return known

    def _prefilled(self) -> list[Any]:
        """New caches that hold the common context but for its last token."""
        held = self._held
        if held.caches is None:
            held.caches = make_prompt_cache(held.model)
            begun = mx.array(held.context[:-1])
            if begun.size:
                list(generate_step(begun, held.model, max_tokens=0, prompt_cache=held.caches))
        caches: list[Any] = copy.deepcopy(held.caches)
        return caches


class _TokenCache(KVCache):  # type: ignore[misc]
    """Holds tokens in place of keys; a class of its own, so that no trees are drafted on it."""


def with_remembered_models(part: Any, context: list[int]) -> Any:
    """A drafter, with each model in its fields, or in those of drafters there, remembered."""
    if type(part) is tuple:
        return tuple(with_remembered_models(entry, context) for entry in part)
    if not isinstance(part, Drafter):
        return Remembered(part, context) if isinstance(part, nn.Module) else part
    if not dataclasses.is_dataclass(part) or isinstance(part, type | ReadsTarget):
        return part
    changed = copy.copy(part)
    for field in dataclasses.fields(part):
        value = with_remembered_models(getattr(part, field.name), context)
        object.__setattr__(changed, field.name, value)
    return changed


@dataclasses.dataclass(frozen=True, eq=False)
class Alone:
    """A drafter whose sessions run the target themselves, if they read it.

    model: the target. see: takes each draft, and the number of tokens that was asked for.
    """

    drafter: Drafter
    model: nn.Module
    see: Callable[[Draft, int], object] = lambda draft, limit: None

    def begin(self, prompt: Sequence[int], context: DraftContext) -> _AloneSession:
        """Start a generation."""
        return _AloneSession(self, prompt, context)


class _AloneSession:
    """A session, and the target's pass over its text."""

    def __init__(self, alone: Alone, prompt: Sequence[int], context: DraftContext) -> None:
        self._session, self._see = alone.drafter.begin(list(prompt), context), alone.see
        self._propose = proposing(self._session, key_of(alone.drafter))
        self.cheap = is_cheap(self._session)
        if isinstance(self._session, Closes):
            self.close = self._session.close
        self._tokens = list(prompt)
        rollback = Rollback(make_prompt_cache(alone.model))
        target: Any = ModelPass(alone.model, rollback, probe=False)
        self._target: ModelPass = target
        self._feed = FeatureFeed.between(alone.drafter, self._session, target)

    def propose(self, limit: int) -> Draft:
        self._read()
        draft = self._propose(limit)
        self._see(draft, limit)
        return draft

    def observe(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens
        self._read()
        self._session.observe(tokens)

    def _read(self) -> None:
        start = self._target.rollback.position
        unread = self._tokens[start:-1]
        if unread and self._feed is not None:
            self._target.feed(to_ids(unread))
            self._feed.show_fed(start)
