"""What all heads do in a generation: follow the text, keep the target's rows, draw tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from specdec_mlx.drafters.model import fit_width
from specdec_mlx.sampling.distribution import Sampling
from specdec_mlx.token_ids import to_ids
from specdec_mlx.types import Draft, DraftContext, FeatureRows

MOST_WAITING = 256
"""Rows that may wait to be read while nothing is drafted; a state of a large model is 16 kB."""


class WaitingRows:
    """Rows of consecutive positions that a head has not read yet.

    start: position in the text of the first of them; where none waits, of the next one.
    """

    def __init__(self) -> None:
        """None wait."""
        self.start = 0
        self._rows: list[mx.array] = []
        self._num_rows = 0

    def __len__(self) -> int:
        """How many wait."""
        return self._num_rows

    def add(self, rows: mx.array) -> None:
        """Further rows [n, W], of the positions behind those that wait."""
        self._rows.append(rows)
        self._num_rows += rows.shape[0]

    def take(self, num_rows: int) -> mx.array:
        """The first rows [num_rows, W], at most as many as wait, which no longer wait then."""
        rows = self._rows[0] if len(self._rows) == 1 else mx.concatenate(self._rows)
        taken, left = rows[:num_rows], rows[num_rows:]
        self._rows = [left] if left.shape[0] else []
        self._num_rows = left.shape[0]
        self.start += taken.shape[0]
        return taken


class Draws:
    """One draft while it is drawn, token by token, under the target's own sampling.

    Args:
        context: the generation's.
        sampling: how drafts are drawn; greedy makes a point mass.
        text: [n] prompt and tokens emitted.
        num_prompt: tokens of the prompt.
        length: most tokens to draw.
    """

    def __init__(
        self,
        context: DraftContext,
        sampling: Sampling,
        text: Sequence[int],
        num_prompt: int,
        length: int,
    ) -> None:
        """Nothing was drawn yet."""
        self._context = context
        self._sampling = sampling
        self._seen = to_ids(text) if context.logits_processors else None
        self._noise = (
            None if sampling.greedy else context.draft_gumbels(len(text) - num_prompt, length)
        )
        self._tokens: list[mx.array] = []
        self._logprobs: list[mx.array] = []

    def draw(self, logits: mx.array) -> mx.array:
        """The next token [1], from logits [1, V]; its distribution is kept as it was drawn from."""
        logits = fit_width(logits, self._context.vocab_size)
        for processor in self._context.logits_processors:
            logits = processor(self._seen, logits)
        if self._noise is None:
            token = mx.argmax(logits, axis=-1).astype(mx.uint32)
        else:
            logprobs = self._sampling.log_distribution(logits)
            self._logprobs.append(logprobs)
            noise = self._noise[len(self._tokens)]
            token = mx.argmax(logprobs + noise, axis=-1).astype(mx.uint32)
        self._tokens.append(token)
        if self._seen is not None:
            self._seen = mx.concatenate([self._seen, token])
        return token

    def draft(self) -> Draft:
        """All that was drawn."""
        if not self._tokens:
            return Draft()
        logprobs = mx.concatenate(self._logprobs) if self._logprobs else None
        return Draft(mx.concatenate(self._tokens), logprobs)


class HeadSession(ABC):
    """The head's side of one generation; a kind of heads adds `propose` and `read`.

    When it is asked, the target's rows are known up to the last token but one: the last token of
    the text has not been fed to the target. Of an earlier turn in the target's caches it knows
    nothing; its text begins with the prompt.

    Args:
        head: what reads the rows.
        sampling: how drafts are drawn.
        prompt: [n] token ids.
        context: the generation's.
    """

    def __init__(
        self, head: Any, sampling: Sampling, prompt: Sequence[int], context: DraftContext
    ) -> None:
        """Nothing was shown yet."""
        self.branches: Sequence[Sequence[float]] = ()
        self.head = head
        self.sampling = sampling
        self.context = context
        self.tokens = list(prompt)
        self.num_prompt = len(prompt)
        self.waiting = WaitingRows()

    def see(self, features: FeatureRows) -> None:
        """Take the rows of further positions; a long prompt is read chunk by chunk."""
        self.waiting.add(self.head.rows(features))
        self.read_if_many()

    def observe(self, tokens: Sequence[int]) -> None:
        """Take the tokens emitted."""
        self.tokens += tokens
        self.read_if_many()

    def read_if_many(self) -> None:
        """Read what waits if it is much, so that it need not be kept."""
        if len(self.waiting) >= MOST_WAITING:
            mx.async_eval(self.read())

    @abstractmethod
    def propose(self, limit: int) -> Draft:
        """Continue what was observed so far with 0 to `limit` tokens."""

    @abstractmethod
    def read(self) -> list[Any]:
        """Read the rows that can be read now; what has to be computed for that."""

    def draws(self, length: int) -> Draws:
        """A draft of at most `length` tokens after the text, to be drawn."""
        return Draws(self.context, self.sampling, self.tokens, self.num_prompt, length)
