"""One sequence: its tokens, and how far they have come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx


@dataclass
class SequenceState:
    """The text of one generation, prompt included.

    tokens: known to the host. embeddings: [prompt_length, D] in place of the prompt's tokens, or
    None. num_handed_out: generated tokens that the caller has.
    """

    tokens: list[int]
    prompt_length: int
    max_tokens: int
    embeddings: mx.array | None = None
    num_handed_out: int = 0

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

    def num_wanted(self, besides: int = 0) -> int | None:
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
        added = list(tokens[: self.num_wanted()])
        self.tokens += added
        return added

    def embeddings_from(self, start: int, size: int) -> mx.array | None:
        """The caller's embeddings of a part of the prompt, if there are any."""
        if self.embeddings is None or start >= self.prompt_length:
            return None
        return self.embeddings[start : start + size]
