"""Drafts from counts of what followed the last few tokens (n-gram tables with back-off).

The predictor of akunu, a C++ engine for Apple silicon: the most frequent continuation of the
longest context of a few tokens that has been seen, in the prompt or in the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np
from jaxtyping import Float

from specdec_mlx.arguments import require
from specdec_mlx.contracts import (
    Draft,
    DraftContext,
    Evidence,
    places_class,
    share_class,
)
from specdec_mlx.drafters.ngram_table import (
    Context,
    Continuation,
    NGramCounts,
    NGramTable,
)
from specdec_mlx.memory.kept import opened

MAX_ORDER = 8


@dataclass(frozen=True)
class NGramDrafter:
    """Proposes the most frequent continuation of the longest known context (akunu's predictor).

    An n-gram of order n is a context of n - 1 tokens and the token after it; of equally frequent
    ones the most recent wins. The draft ends where no context is known. The defaults are akunu's.
    max_order, min_order: 1 <= min_order <= max_order <= 8; order 1 is the most frequent token of
    all. num_draft: most tokens in a draft. stochastic: at a temperature above 0, draw each token
    from smoothed counts and declare that distribution. max_entries: most pairs of context and
    continuation per order; the contexts not seen for longest are forgotten. table: counts kept
    between generations, used where this text's know no context as long: an `NGramTable`, or the
    path of its file, made if need be and saved when the process ends; not with `stochastic`.

    Memory: at most 640 * max_entries * (max_order - min_order + 1) bytes, 126 MB with the defaults;
    140 bytes a pair, 14 MB for 32,768 tokens that seldom repeat. ValueError out of range.
    """

    max_order: int = 4
    min_order: int = 2
    num_draft: int = 4
    stochastic: bool = False
    max_entries: int = 65_536
    table: NGramTable | str | None = None

    def __post_init__(self) -> None:
        orders = f"an int from 1 (unigram) to {MAX_ORDER}"
        require(self, 1 <= self.max_order <= MAX_ORDER, "max_order", orders)
        lower = f"an int from 1 to max_order = {self.max_order}; lower it or raise max_order"
        require(self, 1 <= self.min_order <= self.max_order, "min_order", lower)
        one = "an int >= 1; to draft nothing, leave the drafter out"
        require(self, self.num_draft >= 1, "num_draft", one)
        require(self, self.max_entries >= 1, "max_entries", "an int >= 1")
        without = (
            "None with stochastic=True: its distribution is that of one text's counts"
        )
        require(self, self.table is None or not self.stochastic, "table", without)
        if self.table is not None and not isinstance(self.table, NGramTable):
            make = partial(NGramTable, self.max_order, self.min_order)
            object.__setattr__(self, "table", opened(self.table, NGramTable, make))

    def check(self, context: DraftContext) -> None:
        """Raise TokenizerMismatchError if the table was counted with another tokenizer."""
        self._table_of(context)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> NGramSession:
        """Count the n-grams of `prompt` [n]; deterministic also where the noise is not known."""
        draws = self.stochastic and context.noise is not None
        if draws and context.sampling is not None and not context.sampling.greedy:
            return StochasticNGramSession(self, prompt, context)
        return NGramSession(self, prompt, self._table_of(context))

    def _table_of(self, context: DraftContext) -> NGramTable | None:
        return self.table.of(context) if isinstance(self.table, NGramTable) else None


class NGramSession:
    """One generation's counts, drafting deterministically."""

    cheap = True

    def __init__(
        self,
        config: NGramDrafter,
        prompt: Sequence[int],
        table: NGramTable | None = None,
    ) -> None:
        self._config = config
        self._counts = NGramCounts(
            config.min_order, config.max_order, config.max_entries
        )
        # the last max_order - 1 tokens, fewer at the beginning
        self._context: Context = ()
        self._num_prompt = len(prompt)
        self._table = table
        self._written: list[int] = []
        for token in prompt:
            self._learn(token)

    def propose(self, limit: int) -> Draft:
        """Continue with up to `limit` tokens, each the most frequent after those before it."""
        context = self._context
        draft: list[int] = []
        evidence: list[Evidence] = []
        most = min(limit, self._config.num_draft)
        while len(draft) < most and (found := self._longest(context)) is not None:
            draft.append(found.token)
            share = share_class(found.seen / found.total)
            evidence.append(
                Evidence(max(1, found.width), share, places_class(found.seen))
            )
            context = self._counts.shift(context, found.token)
        return Draft(draft, evidence=evidence)

    def observe(self, tokens: Sequence[int]) -> None:
        """Count the tokens [n]: one table update a token and order."""
        for token in tokens:
            self._learn(token)
        self._written += tokens

    def close(self, length: int) -> None:
        """Count what was written, up to `length` tokens of prompt and output, in the table."""
        if self._table is not None:
            self._table.add(self._written[: length - self._num_prompt])
            self._written = []

    def _longest(self, context: Context) -> Continuation | None:
        """The continuation of the longest known context; the text's own counts win a tie."""
        own, table = self._counts.continuation(context), self._table
        if table is None or (
            own is not None and own.width == self._config.max_order - 1
        ):
            return own
        kept = table.continuation(context)
        return kept if kept and (own is None or kept.width > own.width) else own

    def _learn(self, token: int) -> None:
        self._counts.learn(self._context, token)
        self._context = self._counts.shift(self._context, token)


class StochasticNGramSession(NGramSession):
    """One generation's counts, drafting at random from a distribution that the draft declares."""

    # a row of V numbers a token, and what was drawn must not be thrown away
    cheap = False

    def __init__(
        self, config: NGramDrafter, prompt: Sequence[int], context: DraftContext
    ) -> None:
        super().__init__(config, prompt)
        self._generation = context

    def propose(self, limit: int) -> Draft:
        """Draw up to `limit` tokens; `logprobs` [K, V] are what they were drawn from.

        Draws follow from noise, place and counts alone: proposing twice gives the same draft.
        """
        vocab_size = self._generation.vocab_size
        assert vocab_size is not None
        context = self._context
        tokens: list[int] = []
        rows: list[Float[np.ndarray, " vocab"]] = []
        for i in range(min(limit, self._config.num_draft)):
            probs = self._counts.distribution(context, vocab_size)
            if probs is None:
                break
            with np.errstate(divide="ignore"):
                rows.append(np.log(probs / probs.sum()).astype(np.float32))
            noise = np.array(self._generation.draft_gumbel(len(self._written), i))
            tokens.append(int(np.argmax(rows[-1] + noise)))
            context = self._counts.shift(context, tokens[-1])
        return Draft(tokens, mx.array(np.stack(rows))) if tokens else Draft()
