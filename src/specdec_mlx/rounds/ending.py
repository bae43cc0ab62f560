"""How a generation ends: caches at exactly prompt + tokens handed out, or refused from then on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from specdec_mlx.contracts import Target
from specdec_mlx.target.rollback import refuse


def close_all(*closings: Callable[[], None]) -> None:
    """Run all of these, whatever they raise; raise that, or note it on the exception under way."""
    error = sys.exception()
    failures: list[BaseException] = []
    for close in closings:
        try:
            close()
        except BaseException as raised:
            failures.append(raised)
    for failure in failures:
        is_ordinary = isinstance(failure, Exception)
        if error is None or isinstance(error, GeneratorExit) or not is_ordinary:
            raise failure
        error.add_note(f"{type(failure).__name__} at the end of the generation: {failure}")


def bring_caches_to(
    end: int,
    target: Target,
    callers_cache: list[Any] | None,
    feed: Callable[[int], None],
) -> None:
    """Bring the caller's caches to exactly the first `end` tokens of the text; `feed` feeds more.

    Raises CacheRollbackError: they cannot be brought there, and are refused from now on.
    """
    if callers_cache is None:
        return
    caches = target.rollback
    try:
        caches.rewind_to(end)
        while (left := end - caches.position) > 0:
            feed(left)
        target.quantize()
        mx.async_eval([cache.state for cache in caches.caches])
    except BaseException as failure:
        reason = f"{type(failure).__name__}: {failure}".rstrip(": ")
        refuse(caches.caches, f"a generation was interrupted and could not be undone ({reason}).")
        raise
    finally:
        callers_cache[: len(caches.caches)] = caches.caches
