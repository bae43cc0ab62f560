"""Stop strings: they end a text wherever its tokens fall."""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """Cuts a text before the first of several strings, in whatever pieces the text comes.

    The string that begins first counts. If two begin at one place the shorter counts, because it is
    complete sooner. So the cut depends on the text only, and not on its tokens.

    Attributes:
        strings: the strings, shortest first.
        matched: the string that ended the text. None so far.
    """

    def __init__(self, strings: str | Iterable[str]) -> None:
        strings = [strings] if isinstance(strings, str) else strings
        self.strings = sorted({string for string in strings if string}, key=len)
        self.matched: str | None = None
        self._longest = len(self.strings[-1]) if self.strings else 0
        self._pending = ""

    def add(self, piece: str) -> str:
        """The text that is certain to come before the cut. "" once a string was found."""
        return self._advance(piece, final=False)

    def finish(self) -> str:
        """The text that was held back because a string could have begun there."""
        return self._advance("", final=True)

    def search(self, text: str, *, final: bool = False) -> tuple[int, str | None]:
        """Number of characters before the first string, and that string.

        The string is None if no string is complete. Unless the text is `final`, the number then
        ends where a string may have begun.
        """
        places = [(text.find(string), string) for string in self.strings]
        known = [place for place in places if place[0] >= 0]
        first, matched = min(known, key=lambda place: place[0], default=(len(text), None))
        if not final:
            for start in range(max(0, len(text) - self._longest + 1), first):
                tail = text[start:]
                if any(string.startswith(tail) for string in self.strings):
                    return start, None
        return first, matched

    def _advance(self, piece: str, *, final: bool) -> str:
        if self.matched is not None:
            return ""
        text = self._pending + piece
        num_before, self.matched = self.search(text, final=final)
        self._pending = "" if final else text[num_before:]
        return text[:num_before]
