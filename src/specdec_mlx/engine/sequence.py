"""One sequence: its tokens, and how far they have come."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx_lm

from specdec_mlx.contracts import Target
from specdec_mlx.verify.rollback import mark_unusable, states_of

SHOWS_PROMPT = not mlx_lm.__version__.startswith("0.31.")
"""Before 0.32 mlx-lm's processors see the prompt's last token, and no earlier one."""


@dataclass
class SequenceState:
    """The text of one generation, prompt included.

    tokens: known to the host. embeddings: [prompt_length, D] in place of the prompt's tokens, or
    None; has_prompt: the prompt's tokens are known as well. num_handed_out: generated tokens that
    the caller has. num_history: first tokens of the prompt, which the caches held before, so that
    only drafters see them.
    """

    tokens: list[int]
    prompt_length: int
    max_tokens: int
    embeddings: mx.array | None = None
    num_handed_out: int = 0
    has_prompt: bool = True
    num_history: int = 0

    @property
    def num_generated(self) -> int:
        """Generated tokens that are known."""
        return len(self.tokens) - self.prompt_length

    @property
    def end(self) -> int:
        """Prompt + what the caller has: where caches are to end."""
        return self.prompt_length + self.num_handed_out

    @property
    def not_handed_out(self) -> Sequence[int]:
        """Generated tokens that the caller does not have yet."""
        return self.tokens[self.prompt_length + self.num_handed_out :]

    @property
    def shown_at_first(self) -> Sequence[int]:
        """Tokens that logits processors see before one is drawn."""
        return self.tokens[
            self.num_history if SHOWS_PROMPT else self.prompt_length - 1 :
        ]

    def num_remaining(self, besides: int = 0) -> int | None:
        """Tokens wanted beyond those known and `besides` more; None for no limit."""
        if self.max_tokens < 0:
            return None
        return self.max_tokens + self.prompt_length - len(self.tokens) - besides

    def wants_more(self, besides: int = 0) -> bool:
        """True if tokens are wanted beyond those known and `besides` more."""
        end = self.prompt_length + self.max_tokens
        return self.max_tokens < 0 or len(self.tokens) + besides < end

    def append(self, tokens: Sequence[int]) -> list[int]:
        """Add generated tokens, but no more than are wanted; those that were added."""
        added = list(tokens[: self.num_remaining()])
        self.tokens += added
        return added

    def embeddings_from(self, start: int, size: int) -> mx.array | None:
        """The caller's embeddings of a part of the prompt, if there are any."""
        if self.embeddings is None or start >= self.prompt_length:
            return None
        return self.embeddings[start - self.num_history :][:size]


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
        error.add_note(
            f"{type(failure).__name__} at the end of the generation: {failure}"
        )


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
        mx.async_eval(states_of(caches.caches))
    except BaseException as failure:
        reason = f"{type(failure).__name__}: {failure}".rstrip(": ")
        mark_unusable(
            caches.caches,
            f"a generation was interrupted and could not be undone ({reason}).",
        )
        raise
    finally:
        callers_cache[: len(caches.caches)] = caches.caches
