"""What drafters may draw on besides a prompt: the turns before it, and a prediction.

mlx-lm gives a generation the new tokens and the caches of the old ones. Drafters need the old
tokens too; they are kept here for as long as the caches live.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx import contracts
from specdec_mlx.contracts import DraftContext, Drafter, LogitsProcessor, Session
from specdec_mlx.drafters.cascade import Cascade
from specdec_mlx.drafters.first_of import FirstOf, Several
from specdec_mlx.drafters.model import ModelDrafter, ModelSession
from specdec_mlx.drafters.prompt_lookup import PromptLookupDrafter
from specdec_mlx.drafters.shared_drafts import SharedModelSession
from specdec_mlx.errors import CacheRollbackError
from specdec_mlx.models import PerModel
from specdec_mlx.token_ids import to_ids
from specdec_mlx.verify.next_token import is_pure
from specdec_mlx.verify.strategies import leaves

# tokens, by a model's first cache
_held: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()


def tokens_on(caches: Sequence[Any] | None) -> list[int]:
    """Tokens that the caches hold; [] where that is unknown, or others have fed them since."""
    cache = next(leaves(caches or ()), None)
    held = _held.get(cache, []) if cache is not None else []
    length = getattr(cache, "offset", len(held))
    return held[:length] if length <= len(held) else []


def remember(caches: Sequence[Any] | None, tokens: Sequence[int]) -> None:
    """Note what the caches hold now; without effect for a class that takes no weak references."""
    cache = next(leaves(caches or ()), None)
    if cache is not None:
        with suppress(TypeError):
            _held[cache] = list(tokens)


def with_history(processor: LogitsProcessor, earlier: Sequence[int]) -> LogitsProcessor:
    """The logits processor, which also sees the tokens of earlier turns."""
    if not earlier:
        return processor
    before = to_ids(earlier)

    def seeing_all(tokens: mx.array, logits: mx.array) -> Any:
        return processor(mx.concatenate([before, to_ids(tokens)]), logits)

    seeing_all.pure = is_pure(processor)  # type: ignore[attr-defined]
    return seeing_all


def with_parts(drafter: Drafter, change: Callable[[Drafter], Drafter]) -> Drafter:
    """The drafter changed; of several that are asked in order, each of them."""
    if isinstance(drafter, FirstOf):
        return drafter.with_each(lambda part: with_parts(part, change))
    return change(drafter)


class Wrapper(Several):
    """A drafter around another one, with its key, its parts and its demands on the target."""

    drafter: Drafter

    @property
    def key(self) -> str:
        """The wrapped drafter's."""
        return contracts.key_of(self.drafter)

    @property
    def drafters(self) -> Sequence[Drafter]:  # type: ignore[override]
        """The wrapped drafter."""
        return (self.drafter,)


class WrappedSession:
    """A session that is told of its end by another function; the rest is its own."""

    def __init__(
        self, session: Session, key: str, close: Callable[[int], None]
    ) -> None:
        self.observe, self.close = session.observe, close
        self.parts = contracts.session_parts(session, key)
        self.groups = contracts.session_groups(session, key)


@dataclass(frozen=True)
class Continued(Wrapper):
    """A drafter that is shown the earlier turns, [n] tokens, too."""

    drafter: Drafter
    earlier: Sequence[int]

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Session:
        """Begin after the earlier turns and the prompt."""
        if context.draft_cache is not None:
            return self.drafter.begin(prompt, context)
        # which hold the prompt at other positions
        context = replace(context, target_caches=None)
        session = self.drafter.begin([*self.earlier, *prompt], context)

        def close(length: int) -> None:
            if isinstance(session, contracts.Closes):
                session.close(len(self.earlier) + length)

        return WrappedSession(session, self.key, close)


def continued(drafter: Drafter | None, earlier: Sequence[int]) -> Drafter | None:
    """The drafter, shown the earlier turns, unless it reads the target's states of the prompt."""

    def shown(part: Drafter) -> Drafter:
        return (
            part
            if isinstance(part, contracts.ReadsTarget)
            else Continued(part, earlier)
        )

    return with_parts(drafter, shown) if drafter is not None and earlier else drafter


@dataclass(frozen=True)
class Predicted(Wrapper):
    """A look-up that may also copy from a text that the answer is expected to resemble."""

    drafter: PromptLookupDrafter
    prediction: Sequence[int]

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Session:
        """Begin after the prediction, found by the prompt's end before it, and the prompt."""
        end = prompt[-self.drafter.max_ngram :]
        return self.drafter.begin([*end, *self.prediction, *prompt], context)


def predicting(drafter: Drafter, prediction: Sequence[int]) -> Drafter:
    """The drafter, after a look-up that may also copy from the prediction."""
    several = drafter if isinstance(drafter, FirstOf) else FirstOf(drafter)
    return type(several)(
        Predicted(PromptLookupDrafter(), prediction), *several.drafters
    )


def keeping_caches(drafter: Drafter, store: Any) -> Drafter:
    """The drafter, with the caches of its draft models kept in `store`."""

    def keeping(part: Drafter) -> Drafter:
        if isinstance(part, Cascade):
            return replace(part, first=keeping_caches(part.first, store))
        return Kept(part, store) if isinstance(part, ModelDrafter) else part

    return with_parts(drafter, keeping)


_loaded: PerModel[object] = PerModel(lambda model: object())


@dataclass(frozen=True)
class Kept(Wrapper):
    """A draft model with the target's tokenizer, its caches kept in mlx-lm's `LRUPromptCache`."""

    drafter: ModelDrafter
    store: Any

    @property
    def place(self) -> tuple[str, object]:
        """Name of the loaded model in the store, which no other one gets."""
        return "draft model", _loaded(self.drafter.model)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Session:
        """Begin after the prompt, of which the caches that are found hold a part."""
        if (
            context.draft_cache is not None
            or self.drafter.shared_with(context) is not None
        ):
            return self.drafter.begin(prompt, context)
        caches, rest = self.store.fetch_nearest_cache(self.place, list(prompt))
        if caches is None:
            caches = make_prompt_cache(self.drafter.model)
        held = list(prompt[: len(prompt) - len(rest)])
        session = self.drafter.begin(rest, replace(context, draft_cache=caches))
        assert isinstance(session, ModelSession)

        def close(length: int) -> None:
            """Store the caches as far as the model has read."""
            if isinstance(session, SharedModelSession):
                session.close(length - len(held))
            read = session.rollback
            with suppress(CacheRollbackError):
                read.rewind_to(min(read.position, length - len(held)))
                if read.position > 0:
                    tokens = [*held, *session.tokens[: read.position]]
                    self.store.insert_cache(self.place, tokens, caches)

        return WrappedSession(session, self.key, close)
