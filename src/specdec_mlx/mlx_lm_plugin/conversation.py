"""What drafters may draw on besides a text: a prediction, and caches of the turns before."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.contracts import Draft, DraftContext, Drafter, Session
from specdec_mlx.drafters.first_of import FirstOf, Several
from specdec_mlx.drafters.model import ModelDrafter
from specdec_mlx.drafters.prompt_lookup import PromptLookupDrafter
from specdec_mlx.drafters.shared_drafts import SharedSession
from specdec_mlx.errors import CacheRollbackError
from specdec_mlx.models.loading import PerModel


class Wrapper(Several):
    """A drafter around another one, with its key, its parts and its demands on the target."""

    drafter: Drafter

    @property
    def key(self) -> str:
        """The wrapped drafter's."""
        return self.drafter.key

    @property
    def drafters(self) -> Sequence[Drafter]:  # type: ignore[override]
        """The wrapped drafter."""
        return (self.drafter,)


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
    return type(several)(Predicted(PromptLookupDrafter(), prediction), *several.drafters)


def keeping_caches(drafter: Drafter, store: Any) -> Drafter:
    """The drafter, with the caches of its draft models kept in `store`."""
    if isinstance(drafter, Several):
        changed: Drafter = drafter.with_each(lambda part: keeping_caches(part, store))
        return changed
    return Kept(drafter, store) if isinstance(drafter, ModelDrafter) else drafter


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
        if context.draft_cache is not None or self.drafter.shared_with(context) is not None:
            return self.drafter.begin(prompt, context)
        caches, rest = self.store.fetch_nearest_cache(self.place, list(prompt))
        if caches is None:
            caches = make_prompt_cache(self.drafter.model)
        held = list(prompt[: len(prompt) - len(rest)])
        own = replace(context, draft_cache=caches, num_unseen=0)
        session: Any = self.drafter.begin(rest, own)
        return KeptSession(self, session, held, caches)


@dataclass(eq=False)
class KeptSession(Session):
    """A draft model's session around the one that drafts, which stores the caches at its end.

    held: tokens of the prompt that the caches held at the beginning.
    """

    kept: Kept
    session: Any  # its source is a `ModelReader`
    held: list[int]
    caches: list[Any]

    def parts(self, key: str) -> Sequence[tuple[str, Session]]:
        """The session that drafts."""
        return [(key, self.session)]

    def groups(self, key: str) -> Sequence[Sequence[tuple[str, Session]]]:
        """The session that drafts is asked."""
        return [[(key, self.session)]]

    def propose(self, limit: int) -> Draft:
        """Its draft."""
        draft: Draft = self.session.propose(limit)
        return draft

    def observe(self, tokens: Sequence[int]) -> None:
        """Tell it."""
        self.session.observe(tokens)

    def close(self, length: int) -> None:
        """Store the caches as far as the model has read."""
        session, length = self.session, length - len(self.held)
        if isinstance(session, SharedSession):
            session.close(length)
        read = session.source.rollback
        with suppress(CacheRollbackError):
            read.rewind_to(length)
            if read.position > 0:
                tokens = [*self.held, *session.source.tokens[: read.position]]
                self.kept.store.insert_cache(self.kept.place, tokens, self.caches)
