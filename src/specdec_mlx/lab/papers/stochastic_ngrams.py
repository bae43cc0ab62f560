"""n-grams that draft at random, from smoothed counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from jaxtyping import Float

from specdec_mlx.contracts import NO_DRAFT, Draft, DraftContext, LookUpSession, TextIndex
from specdec_mlx.drafters.ngram import Context, NGramCounts, NGramDrafter, NGramIndex

DISCOUNT = 0.75  # share of a count that a distribution leaves to shorter contexts


@dataclass(frozen=True)
class StochasticNGramDrafter(NGramDrafter):
    """An `NGramDrafter` that draws tokens from smoothed counts, and declares their distribution.

    With a greedy target, or without known noise, it drafts like `NGramDrafter`.
    """

    def begin(self, prompt: Sequence[int], context: DraftContext) -> LookUpSession:
        sampling = context.sampling
        if context.noise is None or sampling is None or sampling.greedy:
            return super().begin(prompt, context)
        return LookUpSession(StochasticNGramIndex(NGramIndex(self, prompt), context))


@dataclass(eq=False)
class StochasticNGramIndex(TextIndex):
    # Each token takes V numbers, and dropping a drawn token would change its distribution.
    cheap = False

    ngrams: NGramIndex
    generation: DraftContext
    num_emitted: int = 0

    def draft(self, limit: int, more: Sequence[int] = ()) -> Draft:
        """Draw up to `limit` tokens from the declared `logprobs` [K, V].

        The draws depend on noise, position and counts only, so a repeated call gives the same
        draft.
        """
        vocab_size = self.generation.vocab_size
        assert vocab_size is not None
        counts, context = self.ngrams.counts, self.ngrams.context
        for token in more:
            context = counts.shift(context, token)
        tokens: list[int] = []
        rows: list[Float[np.ndarray, " vocab"]] = []
        for i in range(min(limit, self.ngrams.config.num_draft)):
            probs = smoothed(counts, context, vocab_size)
            if probs is None:
                break
            with np.errstate(divide="ignore"):
                rows.append(np.log(probs / probs.sum()).astype(np.float32))
            # argmax(log q + Gumbel noise) is a draw from q.
            noise = np.array(self.generation.draft_gumbel(self.num_emitted, i))
            tokens.append(int(np.argmax(rows[-1] + noise)))
            context = counts.shift(context, tokens[-1])
        return Draft(tokens, mx.array(np.stack(rows))) if tokens else NO_DRAFT

    def append(self, tokens: Sequence[int]) -> None:
        self.ngrams.append(tokens)
        self.num_emitted += len(tokens)


def smoothed(
    ngrams: NGramCounts, context: Context, vocab_size: int
) -> Float[np.ndarray, " vocab"] | None:
    """Smoothed probabilities [V] of the next token in float64. None if no context is known.

    Interpolated absolute discounting (Ney, Essen, Kneser 1994), from the frequencies of the lowest
    order: q_n(x|h) = (c(hx) - d + d N(h) q_{n-1}(x|h')) / c(h), with the count c, the number N(h)
    of different continuations of h, and h' = h without its first token.
    """
    probs: Float[np.ndarray, " vocab"] | None = None
    for width in ngrams.widths:
        counts = ngrams.counts(context[len(context) - width :]) if width <= len(context) else {}
        # Each order forgets on its own, so a longer context may still be known.
        if not counts:
            continue
        tokens = np.fromiter(counts.keys(), np.int64, len(counts))
        seen = np.fromiter(counts.values(), np.float64, len(counts))
        if probs is None:
            probs = np.zeros(vocab_size)
            probs[tokens] = seen / seen.sum()
        else:
            # d N(h) q_{n-1}(x|h') / c(h)
            probs *= DISCOUNT * len(counts) / seen.sum()
            # (c(hx) - d) / c(h)
            probs[tokens] += (seen - DISCOUNT) / seen.sum()
    return probs
