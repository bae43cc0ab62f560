"""A vertical cascade: the draft model's next tokens are guessed, and a pass checks several.

See Leviathan et al. 2023, section 6, and Chen et al. 2023, arXiv 2312.11462. The drafts are the
same as without guesses. Do not use it if the draft model's text has no repetitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from specdec_mlx.arguments import short_repr
from specdec_mlx.contracts import (
    NO_DRAFT,
    DraftContext,
    Session,
)
from specdec_mlx.drafters.choosing.registry import make_drafter
from specdec_mlx.drafters.draft_sources import Parents, WritingSession, way_of_writing
from specdec_mlx.drafters.drawing import sampling_of_drafts
from specdec_mlx.drafters.fingerprint import fingerprint
from specdec_mlx.drafters.model import ModelDrafter, ModelSource
from specdec_mlx.drafters.shared_vocabulary import check_same_tokenizer
from specdec_mlx.duck_typed import as_drafter
from specdec_mlx.exactness.probe import first_inexact
from specdec_mlx.lab.papers.draft_ahead import begin_ahead, propose_after
from specdec_mlx.token_ids import to_ids, to_list


@dataclass(frozen=True, eq=False)
class GuessedDrafter(ModelDrafter):
    """Drafts with a model whose next tokens are guessed, so that a pass checks several.

    Args:
        drafter: makes the guesses: a look-up or its name, or a smaller `ModelDrafter`.

    The other arguments are described at `ModelDrafter`. Raises ValueError if the drafter cannot
    guess.
    """

    drafter: Any = "suffix"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.drafter, str):
            object.__setattr__(self, "drafter", make_drafter(self.drafter))
        object.__setattr__(self, "drafter", guesser_for(self))

    @property
    def key(self) -> str:
        way = f"{way_of_writing(self)}, drafter={self.drafter.key}"
        return f"GuessedDrafter({fingerprint(self.model)}, {way})"

    def check(self, context: DraftContext) -> None:
        """Raise TokenizerMismatchError for a target with another tokenizer. See `ModelDrafter`."""
        self.drafter.check(context)
        super().check(context)

    def shared_with(self, context: DraftContext) -> None:
        """None, because guesses are tokens of the target. Raises TokenizerMismatchError."""
        if self.tokenizer is not None and context.tokenizer is not None:
            check_same_tokenizer(context.tokenizer, self.tokenizer)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Session:
        return WritingSession(self, GuessedSource(self, prompt, context))


def guesser_for(drafter: GuessedDrafter) -> Any:
    """The guesser of a draft model. ValueError if it cannot guess for the model."""
    guesser = as_drafter(drafter.drafter)
    what = f"GuessedDrafter: drafter={short_repr(drafter.drafter)}"
    if guesser is None:
        raise ValueError(f"{what} guesses nothing. Use ModelDrafter.")
    if drafter.branches > 1 or drafter.on_every_rank:
        raise ValueError(
            f"{what} guesses for a draft model that writes chains on one rank; leave branches= and "
            "on_every_rank= out."
        )
    if guesser.features is not None or guesser.branches > 1:
        raise ValueError(
            f"{what} reads the target, or drafts trees; expected a look-up, such as 'suffix', or a "
            "smaller ModelDrafter."
        )
    if isinstance(guesser, ModelDrafter):
        return replace(guesser, tokenizers="same")
    return guesser


@dataclass
class DraftNoise:
    """The draft model's noise by position, for a model that guesses the draft model's draws."""

    source: ModelSource

    def gumbels(self, places: Sequence[tuple[str, int]], vocab_size: int) -> mx.array:
        """Gumbel noise [n, V] of consecutive positions."""
        start = len(self.source.tokens) - self.source.num_prompt
        # Positions inside of the draft, counted from the text's end
        first = places[0][1] - start
        return self.source.context.draft_gumbels(start, len(places), first)


class GuessedSource(ModelSource):
    """A draft model whose next tokens another session guesses, so that each pass has several rows.

    A row is used if the drawn tokens equal the guesses before it. Otherwise another pass is made.
    So guesses only decide which pass makes a token's logits.

    Attributes:
        drafted: tokens of the draft so far.
        guesses: tokens that the latest pass read after the first `num_before` tokens of the draft.
        rows: [n + 1, V] logits of the latest pass.
        num_told: tokens of the text that the guesser has seen.
    """

    def __init__(
        self, drafter: GuessedDrafter, prompt: Sequence[int], context: DraftContext
    ) -> None:
        super().__init__(drafter, prompt, context)
        noise: Any = DraftNoise(self)
        sampling = sampling_of_drafts(drafter, context.sampling)
        draws = {"sampling": sampling, "noise": noise, "coupled": True}
        alone = replace(context, draft_cache=None, on_close=None, **draws)
        self.guesser = begin_ahead(drafter, drafter.drafter, self.tokens, alone)
        self.num_told = len(self.tokens)

    def begin_draft(self, limit: int) -> int:
        """Feed the tokens that were missed. Returns `limit`, unless passes are narrow."""
        self.longest = super().begin_draft(limit)
        self.drafted: list[int] = []
        self.guesses: list[int] = []
        self.num_before = -1  # no pass yet
        return self.longest

    def next_logits(self, tokens: mx.array | None, parents: Parents = None) -> mx.array:
        """Logits [1, V] after the text and the draft with these new `tokens`."""
        if tokens is not None:
            self.drafted += to_list(tokens)
        # Row i of the latest pass follows i of its guesses.
        place = len(self.drafted) - self.num_before
        if self.num_before < 0 or self.guesses[:place] != self.drafted[self.num_before :]:
            self.check_guesses()
            place = 0
        return self.rows[place : place + 1]

    def check_guesses(self) -> None:
        after = [*self.tokens, *self.drafted]
        if self.drafted:
            self.rollback.rewind_to(len(after) - 1)
        # Tokens that the cache does not hold have to be fed before the guesses.
        pending = after[self.rollback.position :]
        most = self.num_guesses(self.longest - len(self.drafted) - 1, len(pending))
        guessed = propose_after(self.guesser, after[self.num_told :], most) if most else NO_DRAFT
        self.guesses, self.num_before = to_list(guessed.tokens)[:most], len(self.drafted)
        self.rows = self.feed(to_ids([*pending, *self.guesses]))[len(pending) - 1 :]

    def num_guesses(self, most: int, num_pending: int) -> int:
        """Most guesses that a pass can check after the pending tokens."""
        room, end = self.rollback.widest_pass(), self.rollback.end
        # Beyond `until` a wide pass differs from single steps.
        if room is None and (until := first_inexact(self.model, end)) is not None:
            room = until - end
        return most if room is None else max(0, min(most, room - num_pending))

    def end_draft(self) -> None:
        self.rollback.rewind_to(len(self.tokens) + len(self.drafted))

    def observe(self, tokens: Sequence[int]) -> None:
        self.guesser.observe(tokens)
        super().observe(tokens)
        self.num_told = len(self.tokens)

    def close(self, length: int) -> None:
        self.guesser.close(length)
        super().close(length)
