"""What stands on a prompt cache: the turns before a prompt, for drafters to draw on.

mlx-lm hands a generation the new tokens and the caches of the old ones. The target needs no more; a
drafter that copies, counts or runs a model of its own needs the old tokens too. They are kept here
for as long as the caches live.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache

from specdec_mlx.drafters.first_of import FirstOf
from specdec_mlx.drafters.model import ModelDrafter, ModelSession
from specdec_mlx.errors import CacheRollbackError
from specdec_mlx.target.rollback import leaves
from specdec_mlx.types import Draft, DraftContext, Drafter, DraftSession, key_of, keyed_parts

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

    @property
    def key(self) -> str:
        """The drafter's own: what was learned about it holds here too."""
        return key_of(self.drafter)

    def check(self, context: DraftContext) -> None:
        """Let the drafter refuse the target."""
        if hasattr(self.drafter, "check"):
            self.drafter.check(context)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> DraftSession:
        """Begin after the earlier turns and the prompt."""
        if context.draft_cache is not None:
            return self.drafter.begin(prompt, context)
        session = self.drafter.begin([*self.earlier, *prompt], context)
        return ContinuedSession(session, len(self.earlier), self.key)


class ContinuedSession:
    """A session whose text is longer, by the earlier turns, than the loop knows."""

    def __init__(self, session: DraftSession, num_earlier: int, key: str) -> None:
        """Pass everything on to `session`, whose drafter has `key`; its parts are asked for it."""
        self.session = session
        self.num_earlier = num_earlier
        self.cheap = getattr(session, "cheap", False)
        self.part_keys = [key for key, _ in keyed_parts(session, key)]
        self.parts = [part for _, part in keyed_parts(session, key)]

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


def keeping_caches(drafter: Drafter, store: LRUPromptCache) -> Drafter:
    """The drafter, with the caches of the draft models in it kept in `store`."""
    if isinstance(drafter, ModelDrafter):
        return Kept(drafter, store)
    if isinstance(drafter, FirstOf):
        return FirstOf(*(keeping_caches(part, store) for part in drafter.drafters))
    return drafter


@dataclass(frozen=True)
class Kept:
    """A draft model whose caches are kept from turn to turn, as mlx-lm keeps the target's.

    store: mlx-lm's, for caches by what they hold.
    """

    drafter: ModelDrafter
    store: LRUPromptCache

    @property
    def key(self) -> str:
        """The drafter's own: what was learned about it holds here too."""
        return self.drafter.key

    @property
    def cache_key(self) -> tuple[str, int]:
        """What the model's caches are stored under."""
        return "draft model", id(self.drafter.model)

    def check(self, context: DraftContext) -> None:
        """Let the drafter refuse the target."""
        self.drafter.check(context)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> DraftSession:
        """Begin after the prompt, of which the caches that are found hold a part."""
        if context.draft_cache is not None:
            return self.drafter.begin(prompt, context)
        caches, rest = self.store.fetch_nearest_cache(self.cache_key, list(prompt))
        if caches is None:
            caches = make_prompt_cache(self.drafter.model)
        session = self.drafter.begin(rest, replace(context, draft_cache=caches))
        return KeptSession(self, session, caches, list(prompt[: len(prompt) - len(rest)]))


class KeptSession:
    """A draft model's session that began behind a part of the text.

    held: the tokens that its caches held then.
    """

    def __init__(
        self, kept: Kept, session: ModelSession, caches: list[Any], held: list[int]
    ) -> None:
        """Pass everything on to `session`."""
        self.kept, self.session, self.caches, self.held = kept, session, caches, held
        self.propose = session.propose
        self.observe = session.observe

    def close(self, length: int) -> None:
        """Store the caches as far as the model has read: it is not fed for the next turn's sake."""
        tape = self.session.tape
        with suppress(CacheRollbackError):
            tape.rewind_to(min(tape.position, length - len(self.held)))
            if tape.position > 0:
                text = [*self.held, *self.session.text[: tape.position]]
                self.kept.store.insert_cache(self.kept.cache_key, text, self.caches)
