"""What drafters may draw on besides a prompt: the turns before it, and a prediction.

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

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.drafters.cascade import Cascade
from specdec_mlx.drafters.first_of import FirstOf
from specdec_mlx.drafters.model import ModelDrafter, ModelSession
from specdec_mlx.drafters.prompt_lookup import PromptLookupDrafter
from specdec_mlx.errors import CacheRollbackError
from specdec_mlx.target.next_token import is_pure
from specdec_mlx.target.strategies import leaves
from specdec_mlx.token_ids import to_ids
from specdec_mlx.types import (
    Checks,
    Closes,
    Draft,
    DraftContext,
    Drafter,
    DraftSession,
    LogitsProcessor,
    ReadsTarget,
    Stepwise,
    is_cheap,
    key_of,
    session_groups,
    session_parts,
)

_held: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
"""What caches hold, by the first of them."""


def tokens_on(caches: Sequence[Any] | None) -> list[int]:
    """Tokens that the caches hold, as far as that is known; [] if not.

    A cache that knows its length says whether it was trimmed or fed by others since.
    """
    cache = next(leaves(caches or ()), None)
    held = _held.get(cache, []) if cache is not None else []
    length = getattr(cache, "offset", None)
    if not isinstance(length, int):
        return list(held)
    return list(held[:length]) if length <= len(held) else []


def remember(caches: Sequence[Any] | None, tokens: Sequence[int]) -> None:
    """Note what the caches hold now. A class that takes no weak references is passed over."""
    cache = next(leaves(caches or ()), None)
    if cache is not None:
        with suppress(TypeError):
            _held[cache] = list(tokens)


def with_history(processor: LogitsProcessor, earlier: Sequence[int]) -> LogitsProcessor:
    """A logits processor that also sees the tokens whose caches were kept from earlier turns."""
    if not earlier:
        return processor
    before = to_ids(earlier)

    def seeing_all(tokens: mx.array, logits: mx.array) -> Any:
        return processor(mx.concatenate([before, to_ids(tokens)]), logits)

    seeing_all.pure = is_pure(processor)  # type: ignore[attr-defined]
    return seeing_all


class Wrapper:
    """A drafter around another one: what is known of that one holds for it too."""

    drafter: Drafter

    @property
    def key(self) -> str:
        """The other's: it is the same drafter, with more to draw on."""
        return key_of(self.drafter)

    @property
    def drafters(self) -> Sequence[Drafter]:
        """What it is made of."""
        return (self.drafter,)

    def check(self, context: DraftContext) -> None:
        """Let the other refuse the target."""
        if isinstance(self.drafter, Checks):
            self.drafter.check(context)


@dataclass(frozen=True)
class Continued(Wrapper):
    """A drafter that is shown the turns before the prompt as well.

    Args:
        drafter: the drafter.
        earlier: [n] tokens on the target's caches. A draft model whose own caches the caller keeps
            has read them already.
    """

    drafter: Drafter
    earlier: Sequence[int]

    def begin(self, prompt: Sequence[int], context: DraftContext) -> DraftSession:
        """Begin after the earlier turns and the prompt."""
        if context.draft_cache is not None:
            return self.drafter.begin(prompt, context)
        session = self.drafter.begin([*self.earlier, *prompt], context)
        return ContinuedSession(session, len(self.earlier), self.key)


def continued(drafter: Drafter | None, earlier: Sequence[int]) -> Drafter | None:
    """The drafter, shown the turns before the prompt as well.

    Not one that reads the target, whose states begin with the prompt.
    """
    if isinstance(drafter, FirstOf):
        return drafter.with_each(lambda part: continued(part, earlier) or part)
    if drafter is None or isinstance(drafter, ReadsTarget):
        return drafter
    return Continued(drafter, earlier)


class ContinuedSession:
    """A session that has seen more tokens, those of the earlier turns, than the loop knows of."""

    def __init__(self, session: DraftSession, num_earlier: int, key: str) -> None:
        """Pass everything on to `session`, whose drafter has this key."""
        self.session = session
        self.key = key
        self.num_earlier = num_earlier
        self.cheap = is_cheap(session)

    @property
    def parts(self) -> Sequence[tuple[str, DraftSession]]:
        """The session's own parts, or itself."""
        return session_parts(self.session, self.key)

    @property
    def groups(self) -> Sequence[Sequence[tuple[str, DraftSession]]]:
        """The session's own groups, or itself."""
        return session_groups(self.session, self.key)

    def propose(self, limit: int) -> Draft:
        """What the session proposes."""
        return self.session.propose(limit)

    def observe(self, tokens: Sequence[int]) -> None:
        """Tell the session."""
        self.session.observe(tokens)

    def close(self, length: int) -> None:
        """Tell the session, counted from the beginning of the conversation."""
        if isinstance(self.session, Closes):
            self.session.close(self.num_earlier + length)


@dataclass(frozen=True)
class Predicted(Wrapper):
    """A look-up that may also copy from a text that the answer is expected to resemble.

    Args:
        drafter: the look-up.
        prediction: [n] tokens. They stand before the prompt, behind a copy of the prompt's last
            tokens, so that the beginning of an answer finds theirs. The target never sees them.
    """

    drafter: PromptLookupDrafter
    prediction: Sequence[int]

    def begin(self, prompt: Sequence[int], context: DraftContext) -> DraftSession:
        """Begin after the prediction and the prompt."""
        end = prompt[-self.drafter.max_ngram :]
        return self.drafter.begin([*end, *self.prediction, *prompt], context)


def predicting(drafter: Drafter, prediction: Sequence[int]) -> Drafter:
    """The drafter, whose look-up may copy from the prediction; with one, if it has none."""
    if isinstance(drafter, PromptLookupDrafter):
        return Predicted(drafter, prediction)
    together: type[FirstOf] = type(drafter) if isinstance(drafter, FirstOf) else FirstOf
    parts = drafter.drafters if isinstance(drafter, FirstOf) else (drafter,)
    if any(isinstance(part, PromptLookupDrafter) for part in parts):
        return together(
            *(
                Predicted(part, prediction) if isinstance(part, PromptLookupDrafter) else part
                for part in parts
            )
        )
    return together(Predicted(PromptLookupDrafter(), prediction), *parts)


def keeping_caches(drafter: Drafter, store: Any) -> Drafter:
    """The drafter, with the caches of the draft models in it kept in `store`."""
    if isinstance(drafter, ModelDrafter):
        return Kept(drafter, store)
    if isinstance(drafter, Cascade):
        return replace(drafter, first=keeping_caches(drafter.first, store))
    if isinstance(drafter, FirstOf):
        return drafter.with_each(lambda part: keeping_caches(part, store))
    return drafter


@dataclass(frozen=True)
class Kept(Wrapper):
    """A draft model whose caches are kept from turn to turn, as mlx-lm keeps the target's.

    Not where it has another tokenizer: caches are looked up by the target's tokens.

    Args:
        drafter: the draft model.
        store: mlx-lm's, for caches by what they hold.
    """

    drafter: ModelDrafter
    store: Any

    @property
    def place(self) -> tuple[str, int]:
        """What the model's caches are stored under."""
        return "draft model", id(self.drafter.model)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> DraftSession:
        """Begin after the prompt, of which the caches that are found hold a part."""
        if context.draft_cache is not None or self.drafter.shared_with(context) is not None:
            return self.drafter.begin(prompt, context)
        caches, rest = self.store.fetch_nearest_cache(self.place, list(prompt))
        if caches is None:
            caches = make_prompt_cache(self.drafter.model)
        session = self.drafter.begin(rest, replace(context, draft_cache=caches))
        assert isinstance(session, ModelSession)
        return KeptSession(self, session, caches, list(prompt[: len(prompt) - len(rest)]))


class KeptSession:
    """A draft model's session that began after a part of the prompt.

    Args:
        kept: the drafter that it belongs to.
        session: the draft model's own.
        caches: of the draft model.
        held: the tokens that they held then.
    """

    def __init__(
        self,
        kept: Kept,
        session: ModelSession,
        caches: list[Any],
        held: list[int],
    ) -> None:
        """Pass everything on to `session`."""
        self.kept, self.session, self.caches, self.held = kept, session, caches, held
        self.propose = session.propose
        self.observe = session.observe
        if isinstance(session, Stepwise):
            self.propose_while = session.propose_while

    def close(self, length: int) -> None:
        """Store the caches as far as the model has read: it is not fed for the next turn's sake."""
        read = self.session.rollback
        with suppress(CacheRollbackError):
            read.rewind_to(min(read.position, length - len(self.held)))
            if read.position > 0:
                tokens = [*self.held, *self.session.tokens[: read.position]]
                self.kept.store.insert_cache(self.kept.place, tokens, self.caches)
