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
    """An `NGramDrafter` that draws each token from smoothed counts, and declares them.

    Where the target is greedy, or its noise is not known, it drafts as its base does.
    """

    def begin(self, prompt: Sequence[int], context: DraftContext) -> LookUpSession:
        """Count the n-grams of `prompt` [n]."""
        sampling = context.sampling
        if context.noise is None or sampling is None or sampling.greedy:
            return super().begin(prompt, context)
        return LookUpSession(StochasticNGramIndex(NGramIndex(self, prompt), context))


@dataclass(eq=False)
class StochasticNGramIndex(TextIndex):
    """A text's counts, drafting at random from a distribution that the draft declares."""

    # a row of V numbers a token, and what was drawn must not be thrown away
    cheap = False

    ngrams: NGramIndex
    generation: DraftContext
    num_emitted: int = 0

    def draft(self, limit: int, more: Sequence[int] = ()) -> Draft:
        """Draw up to `limit` tokens; `logprobs` [K, V] are what they were drawn from.

        Draws follow from noise, place and counts alone: asked twice, the draft is the same.
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
            noise = np.array(self.generation.draft_gumbel(self.num_emitted, i))
            tokens.append(int(np.argmax(rows[-1] + noise)))
            context = counts.shift(context, tokens[-1])
        return Draft(tokens, mx.array(np.stack(rows))) if tokens else NO_DRAFT

    def append(self, tokens: Sequence[int]) -> None:
        """Count the tokens [n]."""
        self.ngrams.append(tokens)
        self.num_emitted += len(tokens)


def smoothed(
    ngrams: NGramCounts, context: Context, vocab_size: int
) -> Float[np.ndarray, " vocab"] | None:
    """Smoothed probabilities [V] of the next token, float64; None where no context is known.

    Interpolated absolute discounting (Ney, Essen, Kneser 1994), from the plain frequencies of
    the lowest order on: q_n(x|h) = (c(hx) - d + d N(h) q_{n-1}(x|h')) / c(h), with c the count,
    N(h) the number of different continuations of h, and h' = h without its first token.
    """
    probs: Float[np.ndarray, " vocab"] | None = None
    for width in ngrams.widths:
        counts = ngrams.counts(context[len(context) - width :]) if width <= len(context) else {}
        # forgotten at this order, perhaps still known at a higher one
        if not counts:
            continue
        tokens = np.fromiter(counts.keys(), np.int64, len(counts))
        seen = np.fromiter(counts.values(), np.float64, len(counts))
        if probs is None:
            probs = np.zeros(vocab_size)
            probs[tokens] = seen / seen.sum()
        else:
            probs *= DISCOUNT * len(counts) / seen.sum()
            probs[tokens] += (seen - DISCOUNT) / seen.sum()
    return probs
