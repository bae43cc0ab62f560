"""Drafts from counts of what followed the last few tokens (n-gram tables with back-off).

The predictor of akunu, a C++ engine for Apple silicon: count what follows each context of a few
tokens, in the prompt and in the output alike, and propose the most frequent continuation of the
longest context that has been seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
from jaxtyping import Float

from specdec_mlx.drafters.evidence import places_class, share_class
from specdec_mlx.drafters.ngram_counts import Context, Continuation, NGramCounts
from specdec_mlx.drafters.ngram_table import NGramTable, as_table
from specdec_mlx.errors import DraftError, PromptError
from specdec_mlx.options import require
from specdec_mlx.types import Draft, DraftContext, Evidence

if TYPE_CHECKING:
    from specdec_mlx.sampling.noise import Noise

MAX_ORDER = 8
STEPS = 2**24  # of a float32 in [0, 1)


@dataclass(frozen=True)
class NGramDrafter:
    """Proposes the most frequent continuation of the longest known context (akunu's predictor).

    An n-gram of order n is a context of n - 1 tokens and the token after it. The longest context
    is looked up first, then ever shorter ones; in a context the most frequent continuation wins,
    and of equally frequent ones the most recent. Proposed tokens extend the context of the next
    proposal. Where no context is known the draft ends. The defaults are akunu's.

    max_order, min_order: orders in use, 1 <= min_order <= max_order <= 8. Order 1 is the unigram:
        no context, the most frequent token of all. Both at 2 give a plain bigram.
    num_draft: most tokens in a draft, beside the loop's own limit.
    window: how many of the last tokens are kept for contexts to be read from. The counts are not
        windowed: what followed a context 10,000 tokens ago still counts. A context is at most
        max_order - 1 tokens, so every window that holds one gives the same drafts, and a
        shorter one is refused.
    stochastic: draw each token from smoothed counts and hand that law over, for the rejection
        rule. Needs a temperature above 0 (else the draft is the deterministic one) and the
        vocabulary size. Costs a [V] row per token, where the deterministic draft costs a few
        look-ups.
    discount: d, the share of a count that stochastic drafts hand on to shorter contexts, 0 to 1:
        q_n(x|h) = (c(hx) - d) / c(h) + d N(h) / c(h) q_{n-1}(x|h'), with c the count, N(h) the
        number of different continuations of h, and h' = h without its first token: interpolated
        absolute discounting (Ney, Essen, Kneser 1994). It ends with the plain frequencies at
        the lowest order, so that tokens not seen there have no mass.
    max_entries: most pairs of context and continuation kept per order; beyond them the contexts
        not seen for longest are forgotten. (A context that fills the table alone, as the unigram
        can, takes no further continuation.)

    table: counts that are kept from generation to generation, looked up where this text's own know
        no context as long; what is written is counted there at its end. An `NGramTable`, or the
        path of its file, which is made if there is none and saved when the process ends. Not with
        `stochastic`.

    Memory: a pair costs at most 640 bytes, so that tables stay below
    640 * max_entries * (max_order - min_order + 1) bytes, 126 MB with the defaults. In a text that
    seldom repeats itself a pair costs 140 bytes: 14 MB at 32,768 tokens.

    Raises ValueError for arguments outside their range.
    """

    max_order: int = 4
    min_order: int = 2
    num_draft: int = 4
    window: int = 512
    stochastic: bool = False
    discount: float = 0.75
    max_entries: int = 65_536
    table: NGramTable | str | None = None

    def __post_init__(self) -> None:
        """Refuse arguments that mean nothing."""
        require(
            self,
            1 <= self.max_order <= MAX_ORDER,
            "max_order",
            f"an int from 1 (unigram) to {MAX_ORDER}",
        )
        require(
            self,
            1 <= self.min_order <= self.max_order,
            "min_order",
            f"an int from 1 to max_order = {self.max_order}; lower it or raise max_order",
        )
        require(
            self,
            self.num_draft >= 1,
            "num_draft",
            "an int >= 1; to draft nothing, leave the drafter out",
        )
        require(
            self,
            self.window >= max(1, self.max_order - 1),
            "window",
            f"at least a whole context, max_order - 1 = {self.max_order - 1} tokens (and 1); "
            "raise it or lower max_order",
        )
        require(self, 0 <= self.discount <= 1, "discount", "a number in [0, 1]")
        require(self, self.max_entries >= 1, "max_entries", "an int >= 1")
        require(
            self,
            self.table is None or not self.stochastic,
            "table",
            "None with stochastic=True: its distribution is that of one text's counts",
        )
        object.__setattr__(self, "table", as_table(self.table, self.max_order, self.min_order))

    def check(self, context: DraftContext) -> None:
        """Raise TokenizerMismatchError if the table was counted with another tokenizer."""
        if isinstance(self.table, NGramTable) and context.tokenizer is not None:
            self.table.check_tokenizer(context.tokenizer)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> NGramSession:
        """Count the n-grams of `prompt` [n].

        Raises DraftError for stochastic drafts without a vocabulary size, and PromptError for
        tokens outside it.
        """
        if not self.stochastic or context.sampling is None or context.sampling.temp == 0:
            return NGramSession(self, prompt)
        return StochasticNGramSession(
            self, prompt, _vocab_size(prompt, context), _noise(context.noise)
        )


class NGramSession:
    """One generation's counts, drafting deterministically.

    match_length: tokens in the context that gave the first token of the last proposal; 0 where
        the proposal was empty, or came from the unigram.
    """

    cheap = True

    def __init__(self, config: NGramDrafter, prompt: Sequence[int]) -> None:
        """Count the n-grams of `prompt`."""
        self.match_length = 0
        self._config = config
        self._counts = NGramCounts(config.min_order, config.max_order, config.max_entries)
        self._context: Context = ()  # the last max_order - 1 tokens, fewer at the beginning
        self._num_prompt = len(prompt)
        self._table = config.table if isinstance(config.table, NGramTable) else None
        self._written: list[int] = []
        self._learn(prompt)

    def propose(self, limit: int) -> Draft:
        """Continue with up to `limit` tokens, each the most frequent after those before it."""
        context = self._context
        draft: list[int] = []
        evidence: list[Evidence] = []
        self.match_length = 0
        for _ in range(min(limit, self._config.num_draft)):
            found = self._longest(context)
            if found is None:
                break
            if not draft:
                self.match_length = found.width
            draft.append(found.token)
            evidence.append(_evidence(found))
            context = self._counts.shift(context, found.token)
        return Draft(draft, evidence=evidence)

    def observe(self, tokens: Sequence[int]) -> None:
        """Count the tokens [n]: one table update a token and order."""
        self._learn(tokens)
        if self._table is not None:
            self._written += tokens

    def close(self, length: int) -> None:
        """Count what was written, up to `length` tokens of prompt and output, in the table."""
        if self._table is not None:
            self._table.add(self._written[: length - self._num_prompt])
            self._written = []

    def _longest(self, context: Context) -> Continuation | None:
        """What follows the longest context that is known, by the text's own counts if as long."""
        own, table = self._counts.continuation(context), self._table
        if table is None or (own is not None and own.width == self._config.max_order - 1):
            return own
        kept = table.continuation(context)
        return kept if kept and (own is None or kept.width > own.width) else own

    def _learn(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._counts.add(self._context, token)
            self._context = self._counts.shift(self._context, token)


def _evidence(found: Continuation) -> Evidence:
    """What speaks for a continuation."""
    share = share_class(found.seen / found.total)
    return Evidence(max(1, found.width), share, places_class(found.seen))


class StochasticNGramSession(NGramSession):
    """One generation's counts, drafting at random from a law that the draft declares."""

    cheap = False  # a law is a row of V numbers, and what was drawn must not be thrown away

    def __init__(
        self, config: NGramDrafter, prompt: Sequence[int], vocab_size: int, noise: Noise
    ) -> None:
        """Count the n-grams of `prompt`."""
        self._vocab_size = vocab_size
        self._noise = noise
        self._num_emitted = 0
        super().__init__(config, prompt)

    def propose(self, limit: int) -> Draft:
        """Draw up to `limit` tokens; `logprobs` [K, V] are the laws that they were drawn from.

        The draws depend on the noise, the draft's place and the counts alone, so that proposing
        twice gives the same draft. Whether a position is drafted is known before its token is
        drawn.
        """
        context = self._context
        tokens: list[int] = []
        rows: list[Float[np.ndarray, " vocab"]] = []
        self.match_length = 0
        for i in range(min(limit, self._config.num_draft)):
            law = self._counts.law(context, self._vocab_size, self._config.discount)
            if law is None:
                break
            if not tokens:
                self.match_length = self._counts.matched(context)
            rows.append(_log(law))
            tokens.append(_draw(rows[-1], self._uniform(i)))
            context = self._counts.shift(context, tokens[-1])
        return Draft(tokens, mx.array(np.stack(rows))) if tokens else Draft()

    def observe(self, tokens: Sequence[int]) -> None:
        """Count the tokens [n], and move on by as many positions."""
        super().observe(tokens)
        self._num_emitted += len(tokens)

    def _uniform(self, index: int) -> float:
        """Draw from [0, 1) in steps of 2^-48, for one token of the draft made here.

        Keyed by where the draft starts and the index in it, so that no later draft is drawn from
        noise that had a say in an earlier verdict. float32 has steps of 2^-24, which would round
        the mass of every rare token.
        """
        noise = self._noise.uniform(f"draft {index}", self._num_emitted, 2)
        high, low = np.floor(STEPS * np.array(noise, float))
        return float((high + low / STEPS) / STEPS)


def _log(probs: Float[np.ndarray, " vocab"]) -> Float[np.ndarray, " vocab"]:
    """Normalised float32 log-probabilities; -inf where there is no mass."""
    with np.errstate(divide="ignore"):
        logprobs: Float[np.ndarray, " vocab"] = np.log(probs / probs.sum()).astype(np.float32)
    return logprobs


def _draw(logprobs: Float[np.ndarray, " vocab"], u: float) -> int:
    """Invert the distribution function at u in [0, 1), of the very law that is handed over."""
    cumulative = np.cumsum(np.exp(logprobs.astype(np.float64)))
    return int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))


def _vocab_size(prompt: Sequence[int], context: DraftContext) -> int:
    """Size of the vocabulary, checked against the prompt."""
    size = context.vocab_size
    if size is None:
        raise DraftError(
            "NGramDrafter(stochastic=True) got vocab_size None, expected the target's vocabulary "
            "size: its law is a row of that length. Give DraftContext(vocab_size=...), or draft "
            "with stochastic=False."
        )
    strangers = [token for token in prompt if not 0 <= token < size]
    if strangers:
        raise PromptError(
            f"The prompt holds token {strangers[0]}, expected ids from 0 to {size - 1}. "
            "Tokenize it with the target's own tokenizer, or draft with stochastic=False."
        )
    return size


def _noise(noise: Noise | None) -> Noise:
    """Noise of the generation, or a fixed one for drafting on its own."""
    if noise is not None:
        return noise
    from specdec_mlx.sampling.noise import Noise

    return Noise(0)
