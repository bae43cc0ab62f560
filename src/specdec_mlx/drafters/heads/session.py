"""What all heads do in a generation: follow the text, keep the target's rows, draw tokens.

Some draft token by token, each from what the one before left (`SteppingSession`), others all tokens
of a draft in one pass (`OnePassSession`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from specdec_mlx.draft_length.chances import Chances
from specdec_mlx.drafters.drawing import Pace, draft_to, draft_while
from specdec_mlx.drafters.writing import Writes, WritesAtOnce
from specdec_mlx.sampling.distribution import Sampling
from specdec_mlx.types import MOST_WAITING, Draft, DraftContext, FeatureRows, GoesOn


class WaitingRows:
    """Rows [n, W] of consecutive positions that a head has not read yet.

    start: position in the text of the first of them; where none waits, of the next one. parts: the
    rows, in pieces.
    """

    def __init__(self) -> None:
        """None wait."""
        self.start = 0
        self.parts: list[mx.array] = []
        self._num_rows = 0

    def __len__(self) -> int:
        """How many wait."""
        return self._num_rows

    def add(self, rows: mx.array) -> None:
        """Further rows [n, W], of the positions behind those that wait."""
        self.parts.append(rows)
        self._num_rows += rows.shape[0]

    def take(self, num_rows: int) -> mx.array:
        """The first rows [num_rows, W], at most as many as wait, which no longer wait then."""
        rows = joined(self.parts)
        taken, left = rows[:num_rows], rows[num_rows:]
        self.parts = [left] if left.shape[0] else []
        self._num_rows = left.shape[0]
        self.start += taken.shape[0]
        return taken


def joined(parts: list[mx.array]) -> mx.array:
    """Rows [n, W] that stand in pieces, at least one."""
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


class HeadSession(Writes, ABC):
    """The head's side of one generation; each kind of heads adds how it reads and drafts.

    When it is asked, the target's rows are known up to the last token but one: the last token of
    the text has not been fed to the target. Of an earlier turn in the target's caches it knows
    nothing; its text begins with the prompt.

    Args:
        head: what reads the rows.
        sampling: how drafts are drawn.
        prompt: [n] token ids.
        context: the generation's.
        branches: most tokens at a place.

    on_close: is told the text [n], prompt included, when the generation has ended.
    """

    def __init__(
        self,
        head: Any,
        sampling: Sampling,
        prompt: Sequence[int],
        context: DraftContext,
        branches: int = 1,
    ) -> None:
        """Nothing was shown yet."""
        self.on_close: Callable[[Sequence[int]], None] | None = None
        self.branches = branches
        self.nodes = Chances.of("model")
        self.tree = None
        self.head = head
        self.sampling = sampling
        self.context = context
        self.tokens = list(prompt)
        self.num_prompt = len(prompt)
        self.waiting = WaitingRows()

    @property
    def forks(self) -> bool:
        """True if drafts are to fork, and can."""
        return self.branches > 1

    def see(self, features: FeatureRows) -> None:
        """Take the rows of further positions; a long prompt is read chunk by chunk."""
        self.waiting.add(self.head.rows(features))
        self.read_if_many()

    def observe(self, tokens: Sequence[int]) -> None:
        """Take the tokens emitted."""
        if self.tree is not None:
            self.tree.learn(tokens)
            self.tree = None
        self.tokens += tokens
        self.read_if_many()

    def close(self, length: int) -> None:
        """The end: the first `length` tokens of the text are all that the caller has."""
        if self.on_close is not None:
            self.on_close(self.tokens[:length])

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


class SteppingSession(HeadSession):
    """Drafts token by token, and may stop in the middle; see `HeadSession`."""

    def __init__(self, *args: Any) -> None:
        """Nothing was shown yet."""
        super().__init__(*args)
        self.pace = Pace()

    def propose(self, limit: int) -> Draft:
        """`limit` tokens, as one lazy graph; none before anything was read."""
        length = self.begin_draft(limit)
        draft = draft_to(length, self.draws(length), self.next_logits)
        self.end_draft()
        return draft

    def propose_while(self, limit: int, goes_on: GoesOn) -> Draft:
        """Up to `limit` tokens, as long as they are worth it; see `draft_while`."""
        length = self.begin_draft(limit)
        draft = draft_while(length, self.draws(), self.next_logits, goes_on, self.pace)
        self.end_draft()
        return draft

    @abstractmethod
    def begin_draft(self, limit: int) -> int:
        """Read what waits; how many tokens may be drafted then."""

    def end_draft(self) -> None:
        """Let go of what was held for a draft; by default nothing is."""
        return

    @abstractmethod
    def next_logits(self, token: mx.array | None) -> mx.array:
        """Logits [1, V] of the token after `token`, or after the text; called in order."""


class OnePassSession(WritesAtOnce, HeadSession):
    """Drafts all tokens in one pass; see `HeadSession`.

    Its head has `read` for rows, `guesses` for the logits of a draft, and `most_drafted` tokens.

    cache: what the head keeps of the rows that it has read.
    """

    def __init__(self, *args: Any) -> None:
        """Nothing was read yet."""
        super().__init__(*args)
        self.cache = self.head.make_cache()

    def all_logits(self, limit: int) -> mx.array | None:
        """Logits [n, V] of the next n <= limit tokens; none before the prompt was read."""
        self.read()
        length = min(limit, self.head.most_drafted)
        if length == 0 or self.waiting.start == 0:
            return None
        logits: mx.array = self.head.guesses(self.tokens[-1], length, self.cache)
        return logits

    def read(self) -> list[Any]:
        """Read the rows that wait."""
        if len(self.waiting):
            self.head.read(self.waiting.take(len(self.waiting)), self.cache)
        return [getattr(kept, "state", kept) for kept in self.cache]
