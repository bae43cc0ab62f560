"""What a drafter guesses of a beam search: for each beam, how it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.beams.steps import Beam, Tokens
from specdec_mlx.draft_length.auto import Auto
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.options import whole
from specdec_mlx.per_model import PerModel
from specdec_mlx.target.inputs import begin_session, check_draft
from specdec_mlx.token_ids import to_list
from specdec_mlx.types import Draft, DraftContext, Drafter, DraftSession, Forks, RoundRecord
from specdec_mlx.types.trees import children_of, path_to


@dataclass
class BeamDrafting:
    """A session of the drafter for each beam.

    Where a beam goes on in two ways, one of them takes the session over, and the other has a copy
    of it, or a new one that begins with the whole text.

    prompt: token ids. stream: MLX's stream to run on.
    """

    drafter: Drafter
    prompt: Sequence[int]
    context: DraftContext
    stream: Any
    _sessions: dict[Tokens, DraftSession] = field(default_factory=dict)
    """By the generated tokens that a session has observed."""

    def follow(self, beams: Sequence[Beam]) -> None:
        """Bring the sessions to these beams; those of other beams are dropped."""
        before, self._sessions = self._sessions, {}
        taken: set[Tokens] = set()
        sources = [(beam.tokens, _longest_prefix(beam.tokens, before)) for beam in beams]
        originals = []
        for tokens, source in sources:
            if source is None or source in taken:
                self._sessions[tokens] = self._copied(tokens, source, before)
            else:
                taken.add(source)
                originals.append((tokens, source))
        for tokens, source in originals:  # after the copies of them
            session = self._sessions[tokens] = before[source]
            if len(tokens) > len(source):
                session.observe(tokens[len(source) :])

    def _copied(
        self, tokens: Tokens, source: Tokens | None, before: dict[Tokens, DraftSession]
    ) -> DraftSession:
        """A session of its own for a beam."""
        original = None if source is None else before[source]
        if source is None or not isinstance(original, Forks):
            return begin_session(self.drafter, [*self.prompt, *tokens], self.context)
        session = original.fork()
        session.observe(tokens[len(source) :])
        return session

    def guesses(self, beam: Beam, limit: int) -> list[Tokens]:
        """How a beam may go on, up to `limit` tokens: one way for a chain, several for a tree."""
        if limit == 0:
            return []
        with mx.stream(self.stream):
            draft = self._sessions[beam.tokens].propose(limit)
        check_draft(draft, self.context.vocab_size or 0)
        return paths_of(draft, limit)


def paths_of(draft: Draft, limit: int) -> list[Tokens]:
    """The chains from the root of a draft to its leaves, each cut to `limit` tokens."""
    tokens = to_list(draft.tokens)
    if draft.parents is None:
        return [tuple(tokens[:limit])] if tokens else []
    leaves = [node for node, below in enumerate(children_of(draft.parents)[1:]) if not below]
    paths = (path_to(leaf, draft.parents) for leaf in leaves)
    return list(dict.fromkeys(tuple(tokens[node] for node in path[:limit]) for path in paths))


def _longest_prefix(tokens: Tokens, sessions: dict[Tokens, DraftSession]) -> Tokens | None:
    """The longest of the texts that sessions have observed with which these tokens begin."""
    begun = [known for known in sessions if tokens[: len(known)] == known]
    return max(begun, key=len, default=None)


@dataclass
class GuessLength:
    """How many steps of a beam search to guess: as many as pay, by measured cost and acceptance.

    The rule of several rows with one draft length, where all rows are accepted together: a step
    counts once, and a pass costs what it costs with all its rows.
    """

    length: Auto

    def limit(self) -> int:
        """Steps to guess now."""
        return self.length.limit("", cheap=False)

    def record(self, num_guessed: int, num_steps: int, seconds: float, *, steady: bool) -> None:
        """Learn from a pass.

        Args:
            num_guessed: steps of the longest guess.
            num_steps: steps that it brought.
            seconds: from the reading of the pass before.
            steady: whether it had the rows of the one before it.
        """
        right = min(num_steps - 1, num_guessed)
        round_ = RoundRecord(
            num_guessed, right, num_steps, 1 + num_guessed, (), seconds, steady=steady
        )
        self.length.record(round_)


@dataclass(frozen=True)
class FixedGuess:
    """Always so many steps."""

    length: int

    def limit(self) -> int:
        """The fixed number."""
        return self.length

    def record(self, num_guessed: int, num_steps: int, seconds: float, *, steady: bool) -> None:
        """Learn nothing."""


NO_GUESS = FixedGuess(0)
"""A step a pass."""

_learned: PerModel[dict[int, GuessLength]] = PerModel(lambda model: {})


def guess_length_for(
    model: nn.Module, num_beams: int, choice: int | str
) -> GuessLength | FixedGuess:
    """How many steps to guess; "auto" goes on with what was learned with so many beams.

    Raises:
        ValueError: for anything but "auto" or an int >= 0.
    """
    if choice != "auto":
        return FixedGuess(whole("draft_length", choice, 0, ", or 'auto'"))
    learned = _learned(model)
    if num_beams not in learned:
        tuning = Tuning.for_model(model)
        learned[num_beams] = GuessLength(Auto(tuning))
    return learned[num_beams]
