"""The two ends of a target: what embeds its tokens, and what makes logits of its last state.

Heads share them. They are found by watching one short pass, not by guessing where a model keeps
them: the embedding is the first module that turns ids into states, the head the last that turns
states into logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.drafters.lighter import HEADS, some_rows
from specdec_mlx.errors import HeadError
from specdec_mlx.per_model import PerModel
from specdec_mlx.target.keys_values import READABLE
from specdec_mlx.target.strategies import leaves, window_of
from specdec_mlx.target.watching import watching


@dataclass(frozen=True)
class LastCache:
    """One of the target's caches.

    index: among all, nested ones counted one by one. width: of a key. window: positions after which
    it forgets, None if it keeps all.
    """

    index: int
    width: int
    window: int | None


@dataclass(frozen=True)
class TargetEnds:
    """The ends of a target, and the sizes that a head has to fit.

    embed: token ids [..., n] -> states [..., n, D]; a factor that some models apply to them is left
        out, since heads are trained with the bare matrix. logits: the head's input [..., D] ->
        logits [..., V]; a cap that the model has behind it is left out. width: D. vocab_size: V.
        num_layers: of the decoder. dtype: of the states. last_caches: kind of attention -> the last
        of the target's caches that it fills.
    """

    embed: Callable[[mx.array], mx.array]
    logits: Callable[[mx.array], mx.array]
    width: int
    vocab_size: int
    num_layers: int
    dtype: mx.Dtype
    last_caches: Mapping[str, LastCache] = field(default_factory=dict)

    def narrowed(self, ids: mx.array) -> TargetEnds:
        """The same with logits [..., Vd] of some tokens alone."""
        head: Any = getattr(self.logits, "__self__", self.logits)
        if not isinstance(head, HEADS):
            return replace(self, logits=lambda states: self.logits(states)[..., ids])
        narrow = some_rows(head, ids)
        return replace(self, logits=getattr(narrow, "as_linear", narrow))


class DraftVocabulary:
    """Which of the target's V tokens the Vd rows of a head stand for.

    Args:
        offsets: d2t, [Vd] ints: the target's id less the draft's, as checkpoints have it.
        vocab_size: V.

    is_whole: whether they are all of the target's tokens in their own order.

    Raises:
        ValueError: an id is not one of the target's.
    """

    def __init__(self, offsets: mx.array, vocab_size: int) -> None:
        """Read the ids once."""
        ids = offsets.astype(mx.int32) + mx.arange(offsets.shape[0])
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"d2t names the tokens {low} to {high}, and the target has {vocab_size}"
            )
        self.ids = ids
        self.vocab_size = vocab_size
        self.is_whole = mx.array_equal(ids, mx.arange(vocab_size)).item()

    def widen(self, logits: mx.array) -> mx.array:
        """Logits [n, V] of logits [n, Vd]: -inf for tokens that the head cannot propose."""
        if self.is_whole:
            return logits
        wide = mx.full((logits.shape[0], self.vocab_size), -mx.inf, logits.dtype)
        wide[:, self.ids] = logits
        return wide


class Call(NamedTuple):
    """A module that was called with `given` and returned `result`."""

    module: Any
    given: Any
    result: Any


def watched_pass(model: nn.Module) -> tuple[list[Call], mx.array, list[Any]]:
    """Calls in a pass over two tokens, its logits and its caches; nothing is computed."""
    calls: list[Call] = []
    parts = [part for part in model.modules() if part is not model]
    caches = make_prompt_cache(model)
    with watching(parts, lambda *call: calls.append(Call(*call))):
        logits = model(mx.array([[0, 1]]), cache=caches)
    return calls, logits, caches


def head_calls(calls: Sequence[Call], logits: mx.array) -> list[Call]:
    """Those that turn states into logits."""
    of_states = [c for c in calls if _is(c.given, mx.floating) and _is(c.result, mx.floating)]
    return [c for c in of_states if c.result.shape == logits.shape != c.given.shape]


def _is(x: Any, kind: mx.DtypeCategory) -> bool:
    """True for an array of a kind of numbers."""
    return isinstance(x, mx.array) and mx.issubdtype(x.dtype, kind)


def _find(model: nn.Module) -> TargetEnds:
    calls, logits, caches = watched_pass(model)
    embeddings = [c for c in calls if _is(c.given, mx.integer) and _is(c.result, mx.floating)]
    heads = head_calls(calls, logits)
    if not embeddings or not heads:
        missing = "makes its logits" if embeddings else "embeds its tokens"
        raise HeadError(
            f"No module was found in {type(model).__module__} that {missing}, so a head cannot "
            "share it. Use a draft model, or a drafter that works on tokens."
        )
    head = heads[-1]
    return TargetEnds(
        embed=embeddings[0].module,
        logits=head.module.as_linear if hasattr(head.module, "as_linear") else head.module,
        width=head.given.shape[-1],
        vocab_size=logits.shape[-1],
        num_layers=len(model.layers),
        dtype=head.given.dtype,
        last_caches=_last_caches(caches),
    )


def _last_caches(caches: Sequence[Any]) -> dict[str, LastCache]:
    """The last cache of each kind of attention, in Hugging Face's words, after a pass."""
    found = {}
    for index, cache in enumerate(leaves(caches)):
        if isinstance(cache, READABLE) and not cache.empty():
            window = window_of(cache)
            kind = "full_attention" if window is None else "sliding_attention"
            found[kind] = LastCache(index, cache.keys.shape[-1], window)
    return found


target_ends = PerModel(_find)
"""The ends of a loaded model, looked for once. They hold its modules, and not the model."""
