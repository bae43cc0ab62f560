"""Does a drafter keep its contract? One call for anybody's test suite.

    from specdec_mlx.testing import check_drafter

    def test_my_drafter_keeps_the_contract():
        check_drafter(MyDrafter())

What a wrong drafter would do to the text (or only to its speed) says the message of the
AssertionError.
"""

from __future__ import annotations

import gc
import inspect
import random
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream

from specdec_mlx.checks.statistics import ChiSquare
from specdec_mlx.sampling.distribution import Sampling
from specdec_mlx.testing.chi_square import limit
from specdec_mlx.testing.generations import (
    TOLERANCE,
    Generations,
    ScriptedGeneration,
    ScriptedRound,
    default_prompts,
)
from specdec_mlx.token_ids import to_list
from specdec_mlx.types import Draft, DraftContext, Drafter

NUM_THREADS = 4
MEMORY_TOKENS = 1500
"""Tokens after which memory is read, and again at three times as many."""

MEMORY_GROWTH = 4.0
"""Most memory that the later tokens, twice as many, may take beside the first; quadratic: 8."""


def check_drafter(
    drafter: Drafter,
    *,
    vocab_size: int = 32,
    tokenizer: Any = None,
    prompts: Sequence[Sequence[int]] | None = None,
    num_draws: int = 1500,
    learns: bool = False,
    remembers: bool = False,
) -> list[str]:
    """Hold a drafter to the contract of `specdec_mlx.types`.

    Args:
        drafter: an instance.
        vocab_size: V that the drafter is told.
        tokenizer: the target's, if it asks for one.
        prompts: texts to draft after, as token ids below V; give some where it finds something to
            propose, since a drafter that proposes nothing passes.
        num_draws: drafts drawn at random whose tokens are held against the distributions that they
            declare, by chi-square, with a false alarm in 1e6. With 1,500 one is found to be wrong
            where it is off by a total variation of about 0.1 over a few dozen tokens.
        learns: whether what it proposes may depend on its rejected proposals.
        remembers: whether it may depend on earlier generations. Both are allowed where they are
            meant, and most often they are a mistake.

    Returns:
        A line for each property that was checked: protocol, empty drafts, sessions, rewinds,
        distribution, memory, threads.

    Raises:
        AssertionError: it broke one; says which, what happened and what to do.
    """
    check = _Check(drafter, vocab_size, tokenizer, prompts or default_prompts(vocab_size))
    lines = [check.protocol(), check.empty_drafts()]
    if not remembers:
        lines.append(check.sessions())
    if not learns:
        lines.append(check.rewinds())
    lines += [check.distribution(num_draws), check.memory()]
    return [*lines, check.threads(alike=not remembers)]


@dataclass
class _Check(Generations):
    """One drafter under test, after these prompts."""

    prompts: Sequence[Sequence[int]]

    def protocol(self) -> str:
        """The two classes are there, and every draft is one that can be verified."""
        if not isinstance(self.drafter, Drafter) or inspect.isclass(self.drafter):
            self.fail("protocol", f"{self.drafter!r} has no begin(prompt, context).", "See Drafter")
        before = dict(getattr(self.drafter, "__dict__", {}))
        num_drafts = 0
        for context in self.contexts():
            for prompt in self.prompts:
                generation = self.begin(prompt, context)
                rounds = list(self.rounds(generation))
                num_drafts += sum(bool(r.tokens) for r in rounds)
        after = getattr(self.drafter, "__dict__", {})
        changed = [key for key in {**before, **after} if before.get(key) is not after.get(key)]
        if changed:
            self.fail(
                "protocol",
                f"a generation changed the drafter itself: {', '.join(changed)}.",
                "Keep what changes in the session; the drafter is shared between generations",
            )
        return f"protocol: {num_drafts} drafts, each can be verified"

    def empty_drafts(self) -> str:
        """Rounds without a draft are normal, also many in a row and before the first proposal."""
        for prompt in self.prompts:
            generation = self.begin(prompt)
            for token in [*range(min(6, self.vocab_size)), 0, 1]:
                self.observe(generation, [token])
                if len(self.propose(generation, 0).tokens):
                    self.fail("empty drafts", "propose(0) returned tokens.", "Return Draft()")
            self.propose(generation, 4)
        return "empty drafts: plain rounds before, between and after drafts"

    def sessions(self) -> str:
        """Two generations at once, and one after the other, have nothing to do with each other."""
        prompt, other = self.prompts[0], self.prompts[-1]
        alone = self.script(prompt)
        context = self.context(Sampling(temp=1.0))
        first, second = self.begin(prompt, context), self.begin(other, context)
        rounds = []
        for round_, _ in zip(self.rounds(first), self.rounds(second), strict=False):
            rounds.append(round_)
        self.close(second)
        self._same_rounds("sessions", alone, rounds, "beside another generation")
        self._same_rounds("sessions", alone, self.script(prompt), "after other generations")
        return f"sessions: {len(rounds)} rounds, alone and beside another generation"

    def rewinds(self) -> str:
        """After any verdict, what is proposed is what the same text alone would have led to."""
        compared = 0
        for context in self.contexts():
            for prompt in self.prompts:
                generation = self.begin(prompt, context)
                for round_ in self.rounds(generation):
                    self._compare_with_watcher(generation, round_, context)
                    compared += 1
        return f"rewinds: {compared} proposals are those of a session that never drafted"

    def _compare_with_watcher(
        self, generation: ScriptedGeneration, round_: ScriptedRound, context: DraftContext
    ) -> None:
        """Compare this round's draft with that of a session that only watched the text."""
        before = generation.emitted[: len(generation.emitted) - len(round_.emitted)]
        watcher = self.begin(generation.prompt, context)
        for token in before:
            self.observe(watcher, [token])
        expected = self.propose(watcher, len(round_.tokens) or 1)
        if round_.tokens != to_list(expected.tokens)[: len(round_.tokens)]:
            self.fail(
                "rewinds",
                f"after {len(before)} tokens it proposed {round_.tokens}; a session that saw the "
                f"same text, and was never asked before, proposes {to_list(expected.tokens)}.",
                "Take back in observe() what was proposed and not emitted (learns=True if what was "
                "rejected is meant to matter)",
            )
        if round_.logprobs is not None and not _close(round_.logprobs, expected.logprobs):
            self.fail(
                "rewinds",
                f"after {len(before)} tokens it declared another distribution than a session that "
                "saw the same text.",
                "Take back in observe() what was proposed and not emitted",
            )

    def distribution(self, num_draws: int) -> str:
        """Tokens drawn at random follow the distribution that was declared for them.

        Where it differs from draw to draw the statistic is smaller than chi-square's, so that the
        limit errs on the drafter's side.
        """
        drawn, declared = np.zeros(self.vocab_size), np.zeros(self.vocab_size)
        firsts: dict[int, mx.array] = {}
        for seed in range(num_draws):
            which = seed % len(self.prompts)
            draft = self._random_draft(which, seed)
            if draft.logprobs is None:
                if seed >= 20 and not drawn.any():
                    return "distribution: its drafts are point masses, there is none to test"
                continue
            if not _close(draft.logprobs[:1], firsts.setdefault(which, draft.logprobs[:1])):
                self.fail(
                    "distribution",
                    "what is declared for the first token changes with the seed.",
                    "It is the distribution before the token was drawn, not after",
                )
            declared += np.exp(np.array(draft.logprobs, np.float64)).sum(0)
            np.add.at(drawn, to_list(draft.tokens), 1)
        test = ChiSquare.of(drawn, declared)
        most = limit(test.freedom)
        found = f"{drawn.sum():.0f} drawn tokens, chi-square {test.statistic:.0f}, limit {most:.0f}"
        if test.statistic > most:
            worst = int(np.argmax(np.abs(drawn - declared)))
            self.fail(
                "distribution",
                f"{found}. Token {worst} was drawn {drawn[worst]:.0f} times, where "
                f"{declared[worst]:.1f} times were declared.",
                "Hand over the distribution that each token was drawn from, captured while "
                "drawing, after context.sampling.log_distribution, and never drop a drawn token "
                "for what it is",
            )
        return f"distribution: {found}"

    def memory(self) -> str:
        """A session ends with its generation, and needs no more memory a token as texts grow."""
        generation = self.begin(self.prompts[0])
        last = list(self.rounds(generation))[-1]
        stopped_inside = len(generation.given) - len(last.emitted) + 1
        self.close(generation, stopped_inside)
        try:
            reference = weakref.ref(generation.session)
        except TypeError:  # __slots__ without __weakref__
            reference = None
        del generation
        gc.collect()
        if reference is not None and reference() is not None:
            self.fail(
                "memory",
                "a closed session is still held by something.",
                "Keep no list of sessions, in the drafter or in its module",
            )
        first, later = self._growth()
        if later > MEMORY_GROWTH * max(first, 200_000):
            self.fail(
                "memory",
                f"the first {MEMORY_TOKENS} tokens took {first / 1e6:.1f} MB, the next "
                f"{2 * MEMORY_TOKENS} took {later / 1e6:.1f} MB.",
                "Do not copy the text at every round",
            )
        return f"memory: released at the end; {first / MEMORY_TOKENS:.0f} bytes a token of text"

    def _growth(self) -> tuple[int, int]:
        """Bytes for the first tokens of a text, and for twice as many behind them."""
        generation = self.begin(self.prompts[0])
        coins = random.Random(0)
        tracemalloc.start()
        try:
            readings = [tracemalloc.get_traced_memory()[0]]
            for count in (MEMORY_TOKENS, 2 * MEMORY_TOKENS):
                for _ in range(count // 2):
                    self.observe(generation, [coins.randrange(self.vocab_size) for _ in range(2)])
                readings.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        return readings[1] - readings[0], readings[2] - readings[1]

    def threads(self, *, alike: bool = True) -> str:
        """Generations in several threads at once propose what they would have alone, if `alike`."""
        prompts = [self.prompts[i % len(self.prompts)] for i in range(NUM_THREADS)]
        alone = [self.script(prompt) for prompt in prompts]
        results: list[Any] = [None] * NUM_THREADS
        barrier = threading.Barrier(NUM_THREADS)

        def run(i: int) -> None:
            try:
                with mx.stream(generation_stream):
                    barrier.wait()
                    results[i] = self.script(prompts[i])
            except Exception as error:
                results[i] = error

        workers = [threading.Thread(target=run, args=(i,)) for i in range(NUM_THREADS)]
        with _eager_switching():
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        for expected, got in zip(alone, results, strict=True):
            if isinstance(got, Exception):
                raise got
            if alike:
                self._same_rounds("threads", expected, got, "while other threads drafted too")
        return f"threads: {NUM_THREADS} at once{' draft as each alone' if alike else ''}"

    def _same_rounds(
        self, part: str, expected: Sequence[ScriptedRound], got: Sequence[ScriptedRound], where: str
    ) -> None:
        """Raise unless both generations proposed the same."""
        for i, (one, other) in enumerate(zip(expected, got, strict=True)):
            if one.tokens != other.tokens:
                self.fail(
                    part,
                    f"in round {i} it proposed {one.tokens} alone, and {other.tokens} {where}.",
                    "Keep in the session all that changes, and draw random drafts from "
                    "context.draft_gumbel or context.noise (remembers=True if it is meant)",
                )

    def _random_draft(self, which: int, seed: int) -> Draft:
        """A draft of a fresh session after one of the prompts, under a seed of its own."""
        generation = self.begin(self.prompts[which], self.context(Sampling(temp=1.0), seed))
        return self.propose(generation, 1 + seed % 2)


def _close(got: mx.array, expected: mx.array | None) -> bool:
    """Whether the rows of `got` are the first rows of `expected`, as probabilities."""
    if expected is None:
        return False
    rows = np.exp(np.array(expected[: got.shape[0]], np.float64))
    return bool(np.allclose(np.exp(np.array(got, np.float64)), rows, atol=TOLERANCE))


@contextmanager
def _eager_switching() -> Iterator[None]:
    """Let threads take turns every few microseconds, so that what they share shows."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
