"""Find the end of the thought before an answer, by its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Mark = tuple[int, ...]
"""Consecutive token ids of a mark."""


@dataclass(frozen=True)
class Thought:
    """The marks of the thought that a text may begin with.

    Attributes:
        closes: the tokens that end the thought.
        opens: the tokens with which the model may open a thought. Empty if the prompt opened it.
        calls: the tokens that begin a tool call, which ends a thought as well. Empty for none.
        eos_ids: end tokens. A thought before an answer cannot end with them.
    """

    closes: Mark
    opens: Mark = ()
    calls: Mark = ()
    eos_ids: Mark = ()

    def answer_start(self, text: Sequence[int]) -> int | None:
        """Number of tokens before the answer, or None if the text is still a thought.

        A text that does not begin with `opens` is an answer. A call is part of an answer.
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
    """Index of the first occurrence of a mark in a text from `start` on, or None."""
    try:
        while mark:
            start = text.index(mark[0], start)
            if tuple(text[start : start + len(mark)]) == mark:
                return start
            start += 1
    except ValueError:
        pass
    return None
