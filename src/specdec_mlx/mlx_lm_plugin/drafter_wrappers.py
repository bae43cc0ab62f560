"""Further sources for drafters: a predicted text, and the caches of earlier turns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from specdec_mlx.contracts import Draft, DraftContext, Drafter, Session
from specdec_mlx.drafters.first_of import FirstOf, Several
from specdec_mlx.drafters.model import ModelDrafter
from specdec_mlx.drafters.prompt_lookup import PromptLookupDrafter
from specdec_mlx.drafters.shared_drafts import SharedSession
from specdec_mlx.errors import CacheRollbackError
from specdec_mlx.models.loading import PerModel


class Wrapper(Several):
    """A drafter around another drafter. It has the key, parts and demands of that drafter."""

    drafter: Drafter

    @property
    def key(self) -> str:
        return self.drafter.key

    @property
    def drafters(self) -> Sequence[Drafter]:  # type: ignore[override]
        return (self.drafter,)


@dataclass(frozen=True)
class Predicted(Wrapper):
    """A look-up that also copies from a text that the answer is expected to resemble."""

    drafter: PromptLookupDrafter
    prediction: Sequence[int]

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Session:
        # With the end of the prompt in front of it, the beginning of the prediction is found first.
        end = prompt[-self.drafter.max_ngram :]
        return self.drafter.begin([*end, *self.prediction, *prompt], context)


def predicting(drafter: Drafter, prediction: Sequence[int]) -> Drafter:
    """The drafter, behind a look-up that also copies from the prediction."""
    combination = drafter if isinstance(drafter, FirstOf) else FirstOf(drafter)
    return type(combination)(Predicted(PromptLookupDrafter(), prediction), *combination.drafters)


def keeping_caches(drafter: Drafter, store: Any) -> Drafter:
    if isinstance(drafter, Several):
        changed: Drafter = drafter.with_each(lambda part: keeping_caches(part, store))
        return changed
    return CachedModelDrafter(drafter, store) if isinstance(drafter, ModelDrafter) else drafter


_loaded: PerModel[object] = PerModel(lambda model: object())


@dataclass(frozen=True)
class CachedModelDrafter(Wrapper):
    """A draft model whose caches are kept in mlx-lm's `LRUPromptCache`.

    It has the target's tokenizer.
    """

    drafter: ModelDrafter
    store: Any

    @property
    def place(self) -> tuple[str, object, int | None]:
        """Key in the store of this loaded model and its window."""
        return "draft model", _loaded(self.drafter.model), self.drafter.window

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Session:
        if context.draft_cache is not None or self.drafter.shared_with(context) is not None:
            return self.drafter.begin(prompt, context)
        caches, rest = self.store.fetch_nearest_cache(self.place, list(prompt))
        if caches is None:
            caches = self.drafter.make_cache()
        cached = list(prompt[: len(prompt) - len(rest)])
        draft_context = replace(context, draft_cache=caches, num_unseen=0)
        session: Any = self.drafter.begin(rest, draft_context)
        return CachedModelSession(self, session, cached, caches)


@dataclass(eq=False)
class CachedModelSession(Session):
    """Passes everything on to a draft model's session, and stores the caches at the end.

    Attributes:
        drafter: the drafter of this session.
        session: the session that drafts.
        cached: tokens of the prompt that the caches held at the beginning.
        caches: the draft model's caches.
    """

    drafter: CachedModelDrafter
    session: Any  # its source is a `ModelReader`
    cached: list[int]
    caches: list[Any]

    def parts(self, key: str) -> Sequence[tuple[str, Session]]:
        return [(key, self.session)]

    def groups(self, key: str) -> Sequence[Sequence[tuple[str, Session]]]:
        return [[(key, self.session)]]

    def propose(self, limit: int) -> Draft:
        draft: Draft = self.session.propose(limit)
        return draft

    def observe(self, tokens: Sequence[int]) -> None:
        self.session.observe(tokens)

    def close(self, length: int) -> None:
        """Store the caches up to the last token that the draft model has read."""
        session, length = self.session, length - len(self.cached)
        if isinstance(session, SharedSession):
            session.close(length)
        read = session.source.rollback
        # Caches that cannot go back are not worth keeping.
        with suppress(CacheRollbackError):
            read.rewind_to(length)
            if read.position > 0:
                tokens = [*self.cached, *session.source.tokens[: read.position]]
                self.drafter.store.insert_cache(self.drafter.place, tokens, self.caches)
