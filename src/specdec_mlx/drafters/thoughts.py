"""The thought before an answer, known by its tokens: where it ends, and how long it may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

Mark = tuple[int, ...]
"""Token ids of a mark, which stand one after another."""


@dataclass(frozen=True)
class Thought:
    """The marks of the thought that a text may begin with.

    Attributes:
        closes: the tokens that end the thought.
        opens: the tokens with which the model may open a thought; empty if the prompt opened it.
        calls: the tokens that begin a tool call, which ends a thought as well; empty for none.
        ends: the end tokens, with which a thought before an answer cannot end.
    """

    closes: Mark
    opens: Mark = ()
    calls: Mark = ()
    ends: Mark = ()

    def answer_start(self, text: Sequence[int]) -> int | None:
        """Return how many tokens of a text stand before its answer; None while it is a thought.

        A text that begins with other tokens than `opens` is an answer. A call is part of an answer.
        """
        head = tuple(text[: len(self.opens)])
        if head != self.opens:
            return None if head and head == self.opens[: len(head)] else 0
        closed = find(self.closes, text, len(head))
        called = find(self.calls, text, len(head))
        if closed is None:
            return called
        return min(closed + len(self.closes), len(text) if called is None else called)

    def is_closed_by(self, text: Sequence[int]) -> bool:
        """True if the last tokens of a text close a thought that was open before them."""
        marks = filter(None, (self.closes, self.calls))
        return any(tuple(text[-len(mark) :]) == mark for mark in marks)


def find(mark: Mark, text: Sequence[int], start: int) -> int | None:
    """Return where a mark stands first in a text, from `start` on; None if it does not."""
    try:
        while mark:
            start = text.index(mark[0], start)
            if tuple(text[start : start + len(mark)]) == mark:
                return start
            start += 1
    except ValueError:
        pass
    return None


class ThoughtBudget:
    """Logits processor that closes the thought at the beginning of a text after `most` tokens.

    It then leaves no token but the next of `thought.closes`. A row depends on nothing but the
    tokens before it, so that drafts change no text. Nothing is read on the host.
    """

    pure = True

    def __init__(self, thought: Thought, most: int, start: int | None = None) -> None:
        """start: tokens before the text; None for those of the first call."""
        self.thought, self.most, self.start = thought, most, start

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Logits [1, V]; all but one are -inf where the thought that `tokens` [n] hold is full."""
        if self.start is None:
            self.start = tokens.shape[0]
        begin = self.start + len(self.thought.opens)
        if tokens.shape[0] < begin + self.most:
            return logits
        text, closes = tokens[begin:], self.thought.closes
        is_full = _stands_at(self.thought.opens, tokens, self.start)
        is_full &= ~(_stands_in(closes, text) | _stands_in(self.thought.calls, text))
        token = mx.array(closes[0])
        for i in range(1, min(len(closes), text.shape[0] + 1)):  # how much of the mark is written
            is_begun = _stands_at(closes[:i], text, text.shape[0] - i)
            token = mx.where(is_begun, closes[i], token)
        is_next = mx.arange(logits.shape[-1]) == token
        forced = mx.where(is_next, mx.zeros_like(logits), -mx.inf)
        return mx.where(is_full, forced, logits)


def _stands_at(mark: Mark, text: mx.array, place: int) -> mx.array:
    """True if a mark stands at a place of a text [n], which has tokens enough."""
    return mx.all(text[place : place + len(mark)] == mx.array(mark, text.dtype))


def _stands_in(mark: Mark, text: mx.array) -> mx.array:
    """True if a mark stands anywhere in a text [n]; False for an empty mark."""
    num_places = text.shape[0] - len(mark) + 1
    if not mark or num_places < 1:
        return mx.array(False)
    is_here = text[:num_places] == mark[0]
    for i, token in enumerate(mark[1:], 1):
        is_here &= text[i : i + num_places] == token
    return mx.any(is_here)
