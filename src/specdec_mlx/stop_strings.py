"""Stop strings on text: the first of several strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """Cuts a text before the first of several strings, in whatever pieces the text comes.

    The string that begins first counts, and of two that begin at one place the shorter, which is
    complete sooner. So the cut depends on the text alone, not on its tokens. found: the string
    that ended the text; None so far.
    """

    def __init__(self, strings: str | Iterable[str]) -> None:
        strings = [strings] if isinstance(strings, str) else strings
        self.strings = sorted({string for string in strings if string}, key=len)
        self.found: str | None = None
        self._longest = len(self.strings[-1]) if self.strings else 0
        self._held = ""

    def add(self, piece: str) -> str:
        """The text that is now known to stand before the cut; "" once a string was found."""
        return self._advance(piece, final=False)

    def finish(self) -> str:
        """The text that was held back, because a string could have begun there."""
        return self._advance("", final=True)

    def search(self, text: str, *, final: bool = False) -> tuple[int, str | None]:
        """Number of characters before the first string, and that string.

        None in its place if none is complete: then the rest of the text may become one, unless it
        is `final`.
        """
        places = [(text.find(string), string) for string in self.strings]
        known = [place for place in places if place[0] >= 0]
        first, found = min(known, key=lambda place: place[0], default=(len(text), None))
        if not final:
            for start in range(max(0, len(text) - self._longest + 1), first):
                tail = text[start:]
                if any(string.startswith(tail) for string in self.strings):
                    return start, None
        return first, found

    def _advance(self, piece: str, *, final: bool) -> str:
        if self.found is not None:
            return ""
        text = self._held + piece
        num_before, self.found = self.search(text, final=final)
        self._held = "" if final else text[num_before:]
        return text[:num_before]
