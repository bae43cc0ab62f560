"""What stands on a prompt cache: the turns before a prompt, for drafters to draw on.

mlx-lm hands a generation the new tokens and the caches of the old ones. The target needs no more; a
drafter that copies, counts or runs a model of its own needs the old tokens too. They are kept here
for as long as the caches live.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from specdec_mlx.cache import leaves
from specdec_mlx.types import Draft, DraftContext, Drafter, DraftSession

_texts: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()


def text_on(caches: Sequence[Any] | None) -> list[int]:
    """Tokens that the caches hold, as far as that is known; [] if not.

    A cache that knows its length says whether it was trimmed or fed by others since.
    """
    cache = next(leaves(caches or ()), None)
    text = _texts.get(cache, []) if cache is not None else []
    length = getattr(cache, "offset", None)
    if not isinstance(length, int):
        return list(text)
    return list(text[:length]) if length <= len(text) else []


def remember(caches: Sequence[Any] | None, text: Sequence[int]) -> None:
    """Note what the caches hold now. A class that takes no weak references is passed over."""
    cache = next(leaves(caches or ()), None)
    if cache is not None:
        with suppress(TypeError):
            _texts[cache] = list(text)


@dataclass(frozen=True)
class Continued:
    """A drafter that is shown the turns before the prompt as well.

    earlier: [n] tokens on the target's caches. A draft model whose own caches the caller keeps has
    read them already.
    """

    drafter: Drafter
    earlier: Sequence[int]

    def begin(self, prompt: Sequence[int], context: DraftContext) -> DraftSession:
        """Begin after the earlier turns and the prompt."""
        if context.draft_cache is not None:
            return self.drafter.begin(prompt, context)
        session = self.drafter.begin([*self.earlier, *prompt], context)
        return ContinuedSession(session, len(self.earlier))


class ContinuedSession:
    """A session whose text is longer, by the earlier turns, than the loop knows."""

    def __init__(self, session: DraftSession, num_earlier: int) -> None:
        """Pass everything on to `session`."""
        self.session = session
        self.num_earlier = num_earlier
        self.cheap = getattr(session, "cheap", False)

    def propose(self, limit: int) -> Draft:
        """What the session proposes."""
        return self.session.propose(limit)

    def observe(self, tokens: Sequence[int]) -> None:
        """Tell the session."""
        self.session.observe(tokens)

    def close(self, length: int) -> None:
        """Tell the session, counted from the beginning of the conversation."""
        if hasattr(self.session, "close"):
            self.session.close(self.num_earlier + length)
