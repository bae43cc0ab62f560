"""A vertical cascade: what a draft model will draft is guessed, and checked several in a pass.

Leviathan et al. 2023, section 6; Chen et al. 2023, arXiv 2312.11462. The drafts are those of the
model alone. Not worth it where the draft model's own text repeats nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from specdec_mlx.arguments import short_repr
from specdec_mlx.contracts import (
    NO_DRAFT,
    Agreement,
    Draft,
    DraftContext,
    GoesOn,
    Session,
    Step,
)
from specdec_mlx.drafters.choosing.registry import make_drafter
from specdec_mlx.drafters.drawing import ChainDraws, sampling_of_drafts, worth_it
from specdec_mlx.drafters.fingerprint import fingerprint
from specdec_mlx.drafters.model import ModelDrafter, ModelSource
from specdec_mlx.drafters.shared_vocabulary import check_same_tokenizer
from specdec_mlx.drafters.writing import way_of_writing
from specdec_mlx.duck_typed import as_drafter
from specdec_mlx.exactness.probe import first_inexact
from specdec_mlx.lab.papers.ahead import begin_ahead, propose_after
from specdec_mlx.token_ids import to_ids, to_list


@dataclass(frozen=True, eq=False)
class GuessedDrafter(ModelDrafter):
    """Draft with a model whose own next tokens are guessed, so that a pass of it checks several.

    Args:
        drafter: guesses: a look-up, or its name, or a smaller `ModelDrafter`.

    The other arguments are those of `ModelDrafter`. Raises ValueError for a drafter that cannot
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
        """The model by its content, how it drafts, and what guesses."""
        way = f"{way_of_writing(self)}, drafter={self.drafter.key}"
        return f"GuessedDrafter({fingerprint(self.model)}, {way})"

    def check(self, context: DraftContext) -> None:
        """Raise TokenizerMismatchError for a target with another tokenizer; see `ModelDrafter`."""
        self.drafter.check(context)
        super().check(context)

    def shared_with(self, context: DraftContext) -> None:
        """None, as guesses are the target's tokens; raises TokenizerMismatchError."""
        if self.tokenizer is not None and context.tokenizer is not None:
            check_same_tokenizer(context.tokenizer, self.tokenizer)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> GuessedSession:
        """Start a generation; the draft model reads the prompt with its first proposal."""
        return GuessedSession(self, ModelSource(self, prompt, context))


def guesser_for(drafter: GuessedDrafter) -> Any:
    """The drafter of a draft model; ValueError for one that cannot guess for it."""
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


class GuessedDraws(ChainDraws):
    """A chain in the making, several tokens of it from one pass over guesses."""

    def draw_guessed(self, logits: mx.array, guesses: Sequence[int]) -> list[int]:
        """Tokens from rows [n + 1, V], the later ones of a pass over n guesses, while these hold.

        The first draw that is no guess ends them, as under `Match`: rows after it are of another
        text, and what was drawn there is dropped unseen.
        """
        own: list[int] = []
        for rows in mx.split(logits, len(logits)) if self.one_by_one else [logits]:
            if own == guesses[: len(own)]:
                own += to_list(self.draw(rows))
        numbers = {"target_tokens": own}
        tokens = Agreement.outcome(numbers, guesses[: len(own) - 1]).tokens
        if num_dropped := len(own) - len(tokens):
            self._num_drawn -= num_dropped
            for parts in (self._tokens, self._rows):
                parts[-1] = parts[-1][:-num_dropped]
        return tokens


@dataclass
class DraftNoise:
    """The noise of a draft model's own draws, to a model that guesses these, by their positions."""

    source: ModelSource

    def gumbels(self, places: Sequence[tuple[str, int]], vocab_size: int) -> mx.array:
        """[n, V] of consecutive positions; of drafts, where these have other noise."""
        start = len(self.source.tokens) - self.source.num_prompt
        first = places[0][1] - start
        return self.source.context.draft_gumbels(start, len(places), first)


class GuessedSession(Session):
    """The side of a draft model whose next tokens another session guesses.

    Tokens are drawn from the model's own rows with its own noise, so that guesses only decide in
    which pass. guesser: has seen the first `num_shown` tokens of the text.
    """

    def __init__(self, drafter: GuessedDrafter, source: ModelSource) -> None:
        context = source.context
        self.source = source
        self.sampling = sampling_of_drafts(drafter, context.sampling)
        noise: Any = DraftNoise(source)
        own = {"sampling": self.sampling, "noise": noise, "coupled": True}
        alone = replace(context, draft_cache=None, **own)
        self.guesser = begin_ahead(drafter, drafter.drafter, source.tokens, alone)
        self.num_shown = len(source.tokens)

    def propose(self, limit: int) -> Draft:
        """`limit` tokens, in as few passes as the guesses allow."""
        return self.propose_while(limit, lambda evidence: Step.GO_ON)

    def propose_while(self, limit: int, goes_on: GoesOn) -> Draft:
        """Up to `limit` tokens, as long as they are worth it, by confidences alone."""
        length, draws = self.source.begin_draft(limit), self.draws()
        return worth_it(draws, self.confidences(length, draws), goes_on)

    def draws(self) -> GuessedDraws:
        """An empty draft after the text."""
        source = self.source
        text = source.tokens, source.num_prompt
        return GuessedDraws(source.context, self.sampling, *text, at_once=1)

    def confidences(self, length: int, draws: GuessedDraws) -> Iterator[float]:
        """Draw when asked, in one pass all that was guessed; the largest probability at each."""
        source, drafted = self.source, list[int]()
        while len(drafted) < length:
            after, position = [*source.tokens, *drafted], source.rollback.position
            ahead, pending = after[self.num_shown :], after[position:]
            most = self.num_guesses(length - len(drafted) - 1, len(pending))
            guessed = propose_after(self.guesser, ahead, most) if most else NO_DRAFT
            guesses = to_list(guessed.tokens)[:most]
            rows = source.feed(to_ids([*pending, *guesses]))[len(pending) - 1 :]
            new = draws.draw_guessed(rows, guesses)
            drafted += new
            source.rollback.rewind_to(len(source.tokens) + len(drafted) - 1)
            logs: Any = draws.log_confidences()[-len(new) :].tolist()
            yield from map(math.exp, logs)

    def num_guesses(self, most: int, num_pending: int) -> int:
        """Most guesses that a pass may check besides the pending tokens."""
        rollback = self.source.rollback
        room, end = rollback.widest_pass(), rollback.end
        if room is None and (until := first_inexact(self.source.model, end)) is not None:
            room = until - end
        return most if room is None else max(0, min(most, room - num_pending))

    def observe(self, tokens: Sequence[int]) -> None:
        """Show both what was emitted."""
        self.guesser.observe(tokens)
        self.source.observe(tokens)
        self.num_shown = len(self.source.tokens)

    def close(self, length: int) -> None:
        """End both."""
        self.guesser.close(length)
        self.source.close(length)
