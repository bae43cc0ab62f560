"""A further source for look-ups: a predicted text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec_mlx.contracts import DraftContext, Drafter, Session
from specdec_mlx.drafters.first_of import FirstOf, Several
from specdec_mlx.drafters.prompt_lookup import PromptLookupDrafter


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
