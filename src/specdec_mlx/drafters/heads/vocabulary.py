"""A draft vocabulary: a head over the frequent part of the target's tokens."""

from __future__ import annotations

import mlx.core as mx


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
