"""A draft model whose own decoding is speculated for: the same drafts in fewer of its passes.

A draft model writes its drafts token by token, a pass each. A look-up guesses what it will write,
one pass of the draft model over the guess says how far that is so, and the token after comes with
it. What is drawn at each position is drawn from the same logits with the same noise as without, so
the drafts are the same, token by token (up to rounding, where a pass over several positions rounds
otherwise than single ones), and so is the distribution that is handed over with them.

Each pass is waited for, since what to guess next hangs on it: a host synchronisation a pass, where
an ordinary draft has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import mlx.core as mx

from specdec_mlx.drafters.registry import make_drafter
from specdec_mlx.sampling.distribution import Sampling
from specdec_mlx.target.rollback import Rollback
from specdec_mlx.token_ids import to_ids, to_list
from specdec_mlx.types import (
    Closes,
    Draft,
    DraftContext,
    Drafter,
    DraftSession,
    ProposesAhead,
    ReadsTarget,
    RunsModel,
    all_drafters,
)

FIRST_GUESS = 4
"""Tokens that are guessed at first. As many as were right are guessed next, two more if all were:
a wrong guess costs a wider pass, and only that."""


def make_guesser(choice: Drafter | str | None) -> Drafter | None:
    """The drafter that guesses what a draft model will write, by itself or by its name.

    Raises ValueError for one that runs a model, or reads the target's states: it has to be cheap.
    """
    guesser = make_drafter(choice) if isinstance(choice, str) else choice
    for part in all_drafters(guesser):
        if isinstance(part, RunsModel | ReadsTarget):
            raise ValueError(
                f"ModelDrafter: drafter={choice!r} runs a model or reads the target; expected a "
                "look-up, such as 'prompt-lookup' or 'ngram'."
            )
    return guesser


@runtime_checkable
class DraftModelSide(Protocol):
    """What is asked of a draft model's session; see `ModelSession`."""

    context: DraftContext
    sampling: Sampling
    rollback: Rollback
    tokens: list[int]

    def catch_up(self) -> None:
        """Feed the text but for its last one or two tokens."""
        ...

    def feed(self, ids: mx.array) -> mx.array:
        """One pass of the draft model; logits [S, V]."""
        ...

    def noise(self, first: int, num: int) -> mx.array | None:
        """Gumbel noise [num, V] of a draft's tokens from `first` on; None for no draws."""
        ...

    def observe(self, tokens: Sequence[int]) -> None:
        """Keep the accepted part of the last draft, and note what was emitted."""
        ...

    def close(self, length: int) -> None:
        """Bring the caller's caches to the first `length` tokens."""
        ...


class SpeculatedSession:
    """The draft model's side of one generation, and that of the drafter that guesses for it.

    session: the draft model's. guesses: the guessing drafter's, which is told what was emitted; one
    that cannot be asked about the draft so far is asked once a draft. most: how many tokens it may
    guess next.
    """

    def __init__(self, session: DraftModelSide, guesses: DraftSession) -> None:
        """Take the two sessions, which have the same text."""
        self.session = session
        self.guesses = guesses
        self.most = FIRST_GUESS

    @property
    def rollback(self) -> Rollback:
        """The draft model's caches."""
        return self.session.rollback

    @property
    def tokens(self) -> list[int]:
        """The text."""
        return self.session.tokens

    def propose(self, limit: int) -> Draft:
        """`limit` tokens, as many passes as the guesses make necessary.

        All of the draft has one checkpoint: caches without trim return to it after a wrong guess,
        and read the draft so far again with the next one.
        """
        if limit == 0:
            return Draft()
        self.session.catch_up()
        room = self.rollback.widest_pass()
        length = limit if room is None else min(limit, 1 + room)
        self.rollback.checkpoint()
        noise = self.session.noise(0, length)
        guess = to_list(self.guesses.propose(length - 1).tokens)
        drafted: list[int] = []
        laws: list[mx.array] = []
        while len(drafted) < length:
            guess = self.guess_again(guess, drafted, length - 1)
            self.extend(drafted, laws, guess[len(drafted) :], noise)
        return Draft(drafted, mx.concatenate(laws) if laws else None)

    def guess_again(self, guess: list[int], drafted: list[int], limit: int) -> list[int]:
        """A guess [<= limit] of the whole draft that begins as it was drafted so far.

        Where the guesser knows nothing else, the rest of the guess stands where it stood: most
        often one word was exchanged for another.
        """
        behind = guess[len(drafted) :]
        if guess[: len(drafted)] != drafted and isinstance(self.guesses, ProposesAhead):
            new = self.guesses.propose_after(drafted, limit - len(drafted))
            behind = to_list(new.tokens) or behind
        return [*drafted, *behind][:limit]

    def extend(
        self, drafted: list[int], laws: list[mx.array], guess: list[int], noise: mx.array | None
    ) -> None:
        """Add to a draft what one pass of the draft model gives: 1 to len(guess) + 1 tokens.

        Args:
            drafted: the draft so far.
            laws: the distributions that it was drawn from, [n, V] of each pass.
            guess: what may follow.
            noise: Gumbel noise [K, V] of the whole draft; None where nothing is drawn.
        """
        pending = self.pending(drafted)
        guess = guess[: self.room(len(pending))]
        logits = self.session.feed(to_ids([*pending, *guess]))[len(pending) - 1 :]
        logits = self.process(logits, [*drafted, *guess])
        law = None if noise is None else self.session.sampling.log_distribution(logits)
        if law is not None and noise is not None:
            logits = law + noise[len(drafted) :][: len(logits)]
        own = to_list(mx.argmax(logits, axis=-1))
        num_right = next((i for i, token in enumerate(guess) if token != own[i]), len(guess))
        drafted += own[: num_right + 1]
        if law is not None:
            laws.append(law[: num_right + 1])
        if guess:
            self.most = self.most + 2 if num_right == len(guess) else max(1, num_right)
        self.rollback.rewind_to(len(self.tokens) + len(drafted) - 1)

    def pending(self, drafted: list[int]) -> list[int]:
        """Text and draft as far as the caches do not hold them: at least one token."""
        position, end = self.rollback.position, len(self.tokens)
        return [*self.tokens[position:], *drafted][max(0, position - end) :]

    def room(self, num_pending: int) -> int:
        """Most tokens to guess in the next pass."""
        widest = self.rollback.widest_pass()
        return self.most if widest is None else max(0, min(self.most, widest - num_pending))

    def process(self, logits: mx.array, behind: list[int]) -> mx.array:
        """Run the logits processors over rows [n, V], each with the history that it would have.

        Args:
            logits: of the last n positions of the text and what is behind it.
            behind: draft and guess.
        """
        processors = self.session.context.logits_processors
        if not processors:
            return logits
        seen = to_ids([*self.tokens, *behind])
        first = len(seen) - len(logits) + 1
        rows = []
        for i in range(len(logits)):
            row = logits[i : i + 1]
            for processor in processors:
                row = processor(seen[: first + i], row)
            rows.append(row)
        return mx.concatenate(rows)

    def observe(self, tokens: Sequence[int]) -> None:
        """Tell both what was emitted."""
        self.session.observe(tokens)
        self.guesses.observe(tokens)

    def close(self, length: int) -> None:
        """Tell both of the end."""
        self.session.close(length)
        if isinstance(self.guesses, Closes):
            self.guesses.close(length)
