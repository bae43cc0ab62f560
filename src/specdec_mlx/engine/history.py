"""What a prompt cache holds: the tokens, kept with the caches themselves."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import mlx.core as mx

from specdec_mlx.options import wrong
from specdec_mlx.verify.inputs import prompt_ids
from specdec_mlx.verify.rollback import Rollback
from specdec_mlx.verify.strategies import leaves

# of a model's first cache, ids as bytes, which a deep copy of the cache shares
NAME = "specdec_mlx_tokens"


def remember(
    prompt_cache: Sequence[Any] | None, tokens: Sequence[int] | mx.array
) -> None:
    """Name the tokens that a prompt cache holds, for drafters of generations that go on from it.

    A generation of ours does so itself at its end. A host that reads a prompt with the model names
    it before it calls `speculate`, `stream_generate`, or mlx-lm's calls under `install`. Names stay
    with the caches through `trim_prompt_cache` and `copy.deepcopy`, not through a file.

    Args:
        prompt_cache: the target's caches, a draft model's may follow.
        tokens: [n] ids from the first one on; those that the caches do not hold do not count.

    Raises:
        PromptError: for what is no flat list of ids.
    """
    for cache in leaves(prompt_cache or ()):
        with suppress(AttributeError):  # of a class with slots
            setattr(cache, NAME, array("q", prompt_ids(tokens)).tobytes())
        return


def tokens_on(prompt_cache: Sequence[Any] | None) -> list[int]:
    """Tokens that a prompt cache is known to hold, from the first one on; [] where none is."""
    caches = list(prompt_cache or ())
    named = array("q", getattr(next(leaves(caches), None), NAME, b"")).tolist()
    return named[: Rollback(caches, len(named)).end]


def history_of(
    caches: list[Any] | None, given: Sequence[int] | mx.array | None
) -> tuple[list[int], int]:
    """Tokens that caches are known to hold, and how many more they hold.

    given: the caller's word for it; None takes what is remembered. Raises ValueError for more
    tokens than there are.
    """
    history = tokens_on(caches) if given is None else prompt_ids(given)
    end = Rollback(caches or [], len(history) if caches else 0).end
    if len(history) > end:
        raise wrong(
            "history",
            history,
            f"{end} tokens at most, which is what prompt_cache holds",
        )
    return history, end - len(history)
