"""One text in two models' tokens.

Tokens do not depend on what stands far from them, so only a window at the end is encoded again; it
begins some tokens early, and new tokens are taken from where both encodings agree.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec_mlx.drafters.shared_vocabulary import SharedVocabulary
from specdec_mlx.drafters.spelling import Spelling, is_continuation, whole_characters

MARGIN = 8
"""Last tokens that more text may still change. Words are seldom longer; where they are, a draft
model reads tokens that it would have written otherwise."""

CONTEXT = 8
"""Tokens before those from which a window begins, so that its first ones do not matter."""


class DraftText:
    """The target's text in the draft model's tokens.

    ids: the draft model's tokens. settled: how many of them no longer text changes.
    """

    def __init__(self, shared: SharedVocabulary, *, continues: bool = False) -> None:
        """Start empty. continues: True if something stands before, on the caches."""
        self.shared = shared
        self.ids = [] if continues else list(shared.draft.prefix)
        self.settled = len(self.ids)
        self._ends = [0] * len(self.ids)
        self._text = bytearray()
        self._places: list[int] = []
        self._fixed = len(self.ids)

    @property
    def num_read(self) -> int:
        """Number of the target's tokens that were read."""
        return len(self._places)

    def read(self, tokens: Sequence[int]) -> None:
        """Take further tokens of the target's text, and settle all but the last of the draft's."""
        for token in tokens:
            if token in self.shared.target.special:
                self._add_special(token)
            else:
                self._text += self._spelled(token)
            self._places.append(len(self._text))
        self._encode()
        self.settled = max(self.settled, len(self.ids) - MARGIN)

    def cut(self, num_tokens: int) -> None:
        """Take back all but the first `num_tokens` of the target's tokens."""
        if num_tokens < len(self._places):
            end = self._places[num_tokens - 1] if num_tokens else 0
            del self._places[num_tokens:], self._text[end:]
            while self._ends and self._ends[-1] > end:
                self._ends.pop()
            del self.ids[len(self._ends) :]
            self.settled = min(self.settled, len(self.ids))
            self._fixed = min(self._fixed, len(self.ids))
            self._encode()

    def _spelled(self, token: int) -> bytes:
        """A token's bytes, without the space that sentencepiece begins a text with."""
        target = self.shared.target
        word = target.spelled.get(token, b"")
        return word.removeprefix(b" ") if target.prepends_space and not self._text else word

    def _add_special(self, token: int) -> None:
        """Add the draft model's own token, or else what people would write."""
        content = self.shared.target.special[token].encode()
        own = self.shared.to_draft.get(token)
        if own is None:
            self._text += content
            return
        self._encode()
        if self._text or own not in self.ids:  # BOS may be there already
            self._text += content
            self.ids.append(own)
            self._ends.append(len(self._text))
        self._fixed = self.settled = len(self.ids)

    def _encode(self) -> None:
        """Encode new text, and the tokens before it that it may change."""
        if len(self._text) == (self._ends[-1] if self._ends else 0):
            return
        first = max(self._fixed, self.settled - CONTEXT)
        while first > self._fixed and is_continuation(self._text[self._start(first)]):
            first -= 1
        kept, ids, ends = self._meet(first, *self._encoded(first))
        if kept is None:
            kept, (ids, ends) = self.settled, self._encoded(self.settled)
        del self.ids[kept:], self._ends[kept:]
        self.ids += ids
        self._ends += ends

    def _start(self, index: int) -> int:
        """Where a token begins."""
        return self._ends[index - 1] if index else 0

    def _encoded(self, first: int) -> tuple[list[int], list[int]]:
        """All text from a token on: ids, and where they end."""
        start = self._start(first)
        ids, ends = self.shared.draft.encode(bytes(self._text[start:]), at_start=start == 0)
        return ids, [start + end for end in ends]

    def _meet(
        self, first: int, ids: list[int], ends: list[int]
    ) -> tuple[int | None, list[int], list[int]]:
        """Join a window to the text where both have the same token, or at least a token's end.

        Args:
            first: the token that the window begins with.
            ids: the window in tokens.
            ends: where they end.

        Returns:
            How many tokens are kept, None for no such place, and what follows them.
        """
        if first == self.settled:
            return first, ids, ends
        places = {end: j for j, end in enumerate(ends, 1)}
        places[self._start(first)] = 0
        old = range(max(self.settled, first), len(self.ids) + 1)
        edges = [(i, places[self._start(i)]) for i in old if self._start(i) in places]
        same = [(i, j) for i, j in edges if j and i > first and self.ids[i - 1] == ids[j - 1]]
        for kept, j in [*same, *edges][:1]:
            return kept, ids[j:], ends[j:]
        return None, [], []


def continuation(target: Spelling, tokens: Sequence[int], drafted: bytes) -> list[int]:
    """Drafted bytes in the target's tokens, as it would write them after `tokens`.

    They are encoded together with the last of those if a token ends between them, else alone. The
    beginning of a character at the end is left out unless there is nothing else.
    """
    drafted = whole_characters(drafted) or drafted
    before = _context(target, tokens)
    ids, ends = target.encode(before + drafted)
    if before and len(before) in ends:
        ids = ids[len(ends) - ends[::-1].index(len(before)) :]
    elif before:
        ids = target.encode(drafted).ids
    kept: list[int] = []
    for index in ids:  # as far as they spell what was drafted
        word = target.spelled.get(index)
        if not word or not drafted.startswith(word):
            break
        kept.append(index)
        drafted = drafted[len(word) :]
    return kept


def _context(target: Spelling, tokens: Sequence[int]) -> bytes:
    """The last tokens as bytes, back to one that is no text, beginning with a character."""
    context = b""
    for token in reversed(tokens[-CONTEXT:]):
        word = target.spelled.get(token)
        if word is None:
            break
        context = word + context
    start = 0
    while start < len(context) and is_continuation(context[start]):
        start += 1
    return context[start:]
