"""Does a drafter keep its contract? One call for anybody's test suite.

    from specdec_mlx.testing.conformance import check_drafter

    def test_my_drafter_keeps_the_contract():
        check_drafter(MyDrafter())

No model is needed: a scripted verdict stands in for the target's, and every number of accepted
tokens occurs. What a wrong drafter would do to the text (or only to its speed) says the message of
the AssertionError.
"""

from __future__ import annotations

import gc
import inspect
import random
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, NoReturn

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream

from specdec_mlx.sampling.distribution import Sampling
from specdec_mlx.sampling.noise import Noise
from specdec_mlx.token_ids import to_list
from specdec_mlx.types import Draft, DraftContext, Drafter, DraftSession

LIMITS = (3, 1, 5, 2, 4, 8)
"""Draft lengths that are asked for, in turn."""

NUM_ROUNDS = 14
"""Rounds of a scripted generation: each limit twice, and a few more."""

TOLERANCE = 1e-3
"""How far two log-probabilities, or the mass of a law from 1, may be off: float32, other shapes."""

FALSE_ALARM = 1e-6
"""Chance that a sound drafter fails the test of its law; the seed is fixed, so it never changes."""

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
    """Hold a drafter to the contract of `specdec_mlx.types`; AssertionError says what it broke.

    vocab_size, tokenizer: what the drafter is told of the target. prompts: texts to draft after,
    as token ids below vocab_size; give some where your drafter finds something to propose, since a
    drafter that proposes nothing passes. num_draws: drafts drawn at random whose tokens are held
    against the laws that they declare, by chi-square. With 1,500 a law is found to be wrong where
    it is off by a total variation of about 0.1 over a few dozen tokens. learns: whether what it
    proposes may depend on its rejected proposals; remembers: whether on earlier generations. Both
    are allowed where they are meant, and most often they are a mistake.

    Returns a line for each property that was checked: protocol, empty drafts, sessions, rewinds,
    law, memory, threads.
    """
    check = _Check(drafter, vocab_size, tokenizer, prompts or _default_prompts(vocab_size))
    lines = [check.protocol(), check.empty_drafts()]
    if not remembers:
        lines.append(check.sessions())
    if not learns:
        lines.append(check.rewinds())
    return [*lines, check.law(num_draws), check.memory(), check.threads(not remembers)]


@dataclass
class _Round:
    """One scripted round: what was proposed, and what was emitted."""

    tokens: list[int]
    logprobs: mx.array | None
    emitted: list[int]


@dataclass
class _Generation:
    """A session and what it has seen.

    text: prompt + emitted, the list that the session was given, which grows under it as the loop's
    does. start: the prompt. emitted: tokens observed.
    """

    session: DraftSession
    text: list[int]
    start: list[int]
    emitted: list[int] = field(default_factory=list)


@dataclass
class _Check:
    """One drafter under test."""

    drafter: Drafter
    vocab_size: int
    tokenizer: Any
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
        self.same_rounds("sessions", alone, rounds, "beside another generation")
        self.same_rounds("sessions", alone, self.script(prompt), "after other generations")
        return f"sessions: {len(rounds)} rounds, alone and beside another generation"

    def rewinds(self) -> str:
        """After any verdict, what is proposed is what the same text alone would have led to."""
        compared = 0
        for context in self.contexts():
            for prompt in self.prompts:
                generation = self.begin(prompt, context)
                for round_ in self.rounds(generation):
                    compared += self.compare_with_replay(generation, round_, context)
        return f"rewinds: {compared} proposals are those of a session that never drafted"

    def compare_with_replay(
        self, generation: _Generation, round_: _Round, context: DraftContext
    ) -> int:
        """Compare this round's draft with that of a session that only watched the text."""
        before = generation.emitted[: len(generation.emitted) - len(round_.emitted)]
        watcher = self.begin(generation.start, context)
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
                f"after {len(before)} tokens it declared another law than a session that saw the "
                "same text.",
                "Take back in observe() what was proposed and not emitted",
            )
        return 1

    def law(self, num_draws: int) -> str:
        """Tokens drawn at random follow the law that was declared for them."""
        drawn, declared = np.zeros(self.vocab_size), np.zeros(self.vocab_size)
        firsts: dict[int, mx.array] = {}
        total = 0
        for seed in range(num_draws):
            which = seed % len(self.prompts)
            draft = self.random_draft(which, seed)
            if draft.logprobs is None:
                if seed >= 20 and not total:
                    return "law: its drafts are point masses, there is none to test"
                continue
            if not _close(draft.logprobs[:1], firsts.setdefault(which, draft.logprobs[:1])):
                self.fail(
                    "law",
                    "the law declared for the first token changes with the seed.",
                    "It is the law before the token was drawn, not after",
                )
            laws = np.exp(np.array(draft.logprobs, np.float64))
            declared += laws.sum(0)
            np.add.at(drawn, to_list(draft.tokens), 1)
            total += len(draft)
        statistic, limit = _chi_square(drawn, declared)
        if statistic > limit:
            worst = int(np.argmax(np.abs(drawn - declared)))
            self.fail(
                "law",
                f"over {total} drawn tokens chi-square is {statistic:.0f}, at most {limit:.0f} was "
                f"expected. Token {worst} was drawn {drawn[worst]:.0f} times, its declared laws "
                f"add up to {declared[worst]:.1f}.",
                "Hand over the law that each token was drawn from, captured while drawing, after "
                "context.sampling.law, and never drop a drawn token for what it is",
            )
        return f"law: {total} drawn tokens, chi-square {statistic:.0f}, limit {limit:.0f}"

    def memory(self) -> str:
        """A session ends with its generation, and needs no more memory a token as texts grow."""
        generation = self.begin(self.prompts[0])
        last = list(self.rounds(generation))[-1]
        self.close(generation, len(generation.text) - len(last.emitted) + 1)  # stopped in a round
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
        first, later = self.growth()
        if later > MEMORY_GROWTH * max(first, 200_000):
            self.fail(
                "memory",
                f"the first {MEMORY_TOKENS} tokens took {first / 1e6:.1f} MB, the next "
                f"{2 * MEMORY_TOKENS} took {later / 1e6:.1f} MB.",
                "Do not copy the text at every round",
            )
        return f"memory: released at the end; {first / MEMORY_TOKENS:.0f} bytes a token of text"

    def growth(self) -> tuple[int, int]:
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

    def threads(self, alike: bool = True) -> str:
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
                self.same_rounds("threads", expected, got, "while other threads drafted too")
        return f"threads: {NUM_THREADS} at once{' draft as each alone' if alike else ''}"

    # What the checks are made of

    def contexts(self) -> Iterator[DraftContext]:
        """Greedy, drawn at random, and an opaque sampler."""
        yield self.context(Sampling())
        yield self.context(Sampling(temp=1.0))
        yield self.context(None)

    def context(self, sampling: Sampling | None, seed: int = 0) -> DraftContext:
        """What the loop tells a drafter."""
        return DraftContext(
            sampling=sampling,
            noise=Noise(seed),
            vocab_size=self.vocab_size,
            tokenizer=self.tokenizer,
        )

    def begin(self, prompt: Sequence[int], context: DraftContext | None = None) -> _Generation:
        """Start a session, and see that the prompt stays the caller's."""
        given = list(prompt)
        context = context or self.context(Sampling())
        if hasattr(self.drafter, "check"):
            self.drafter.check(context)
        session = self.drafter.begin(given, context)
        if not isinstance(session, DraftSession):
            self.fail(
                "protocol",
                f"begin() returned {type(session).__name__}, which lacks propose or observe.",
                "See specdec_mlx.DraftSession",
            )
        generation = _Generation(session, given, list(prompt))
        self.check_text(generation)
        return generation

    def check_text(self, generation: _Generation) -> None:
        """Raise if the session wrote into the text that it was given."""
        if generation.text != generation.start + generation.emitted:
            self.fail(
                "protocol",
                "it wrote into the list that begin() was given, the loop's own text.",
                "Copy it: list(prompt)",
            )

    def propose(self, generation: _Generation, limit: int) -> Draft:
        """A draft that can be verified, and that proposing did not tell apart from nothing."""
        with mx.stream(generation_stream):
            draft = generation.session.propose(limit)
            self.check_draft(draft, limit)
        return draft

    def check_draft(self, draft: Draft, limit: int) -> None:
        """Raise for a draft that no rule could judge."""
        if not isinstance(draft, Draft):
            self.fail("protocol", f"propose() returned {type(draft).__name__}.", "Return a Draft")
        K = len(draft)
        if limit < K:
            self.fail(
                "protocol",
                f"propose({limit}) returned {K} tokens.",
                "At most `limit` of them: the caches have to take them back",
            )
        tokens = to_list(draft.tokens)
        if not all(0 <= token < self.vocab_size for token in tokens):
            self.fail(
                "protocol",
                f"proposed {tokens}; the target's vocabulary has {self.vocab_size} tokens.",
                "Propose token ids below context.vocab_size",
            )
        if draft.evidence is not None and len(draft.evidence) != K:
            self.fail(
                "protocol",
                f"evidence for {len(draft.evidence)} of {K} tokens.",
                "One number for each token, or None",
            )
        if draft.logprobs is not None and K:
            self.check_law(draft.logprobs, tokens)

    def check_law(self, logprobs: mx.array, tokens: list[int]) -> None:
        """Raise unless `logprobs` are K laws that could have brought the tokens."""
        expected = (len(tokens), self.vocab_size)
        if tuple(logprobs.shape) != expected:
            self.fail("law", f"logprobs have shape {logprobs.shape}.", f"Expected {expected}")
        laws = np.exp(np.array(logprobs.astype(mx.float32), np.float64))
        mass = laws.sum(-1)
        if not np.allclose(mass, 1, atol=TOLERANCE):
            self.fail(
                "law",
                f"the probabilities of its laws add up to {np.round(mass, 3).tolist()}, not to 1.",
                "Log-probabilities, normalised: x - logsumexp(x), as context.sampling.law returns",
            )
        if not all(laws[i, token] > 0 for i, token in enumerate(tokens)):
            self.fail(
                "law",
                "it proposed a token to which its declared law gives no chance.",
                "Hand over the law that the token was drawn from",
            )

    def observe(self, generation: _Generation, tokens: list[int]) -> None:
        """Tell the session what was emitted, and see that the tokens stay the caller's."""
        generation.text += tokens
        generation.emitted += tokens
        given = list(tokens)
        generation.session.observe(given)
        if given != tokens:
            self.fail("protocol", "observe() changed the tokens given to it.", "Copy them")
        if len(generation.text) < 1000:
            self.check_text(generation)

    def close(self, generation: _Generation, length: int | None = None) -> None:
        """End a session as the loop does, with the length of what the caller has."""
        close = getattr(generation.session, "close", None)
        if close is not None:
            close(len(generation.text) if length is None else length)

    def rounds(self, generation: _Generation) -> Iterator[_Round]:
        """Play rounds; every number of accepted tokens comes up, and some proposals are dropped."""
        for i in range(NUM_ROUNDS):
            limit = LIMITS[i % len(LIMITS)]
            if getattr(generation.session, "cheap", False):
                self.propose(generation, limit)  # the loop looks whether there is something
            draft = self.propose(generation, limit)
            tokens = to_list(draft.tokens)
            emitted = self.verdict(tokens, i)
            self.observe(generation, emitted)
            yield _Round(tokens, draft.logprobs if tokens else None, emitted)

    def verdict(self, tokens: list[int], index: int) -> list[int]:
        """The accepted part of a draft, and a correction or a bonus token."""
        num_accepted = (0, len(tokens), len(tokens) // 2, len(tokens), 1)[index % 5]
        num_accepted = min(num_accepted, len(tokens))
        after = (7 * index) % self.vocab_size
        if num_accepted < len(tokens) and after == tokens[num_accepted]:
            after = (after + 1) % self.vocab_size
        return [*tokens[:num_accepted], after]

    def script(self, prompt: Sequence[int]) -> list[_Round]:
        """A whole scripted generation, closed at its end."""
        generation = self.begin(prompt, self.context(Sampling(temp=1.0)))
        rounds = list(self.rounds(generation))
        self.close(generation)
        return rounds

    def same_rounds(
        self, name: str, expected: Sequence[_Round], got: Sequence[_Round], where: str
    ) -> None:
        """Raise unless both generations proposed the same."""
        for i, (one, other) in enumerate(zip(expected, got, strict=True)):
            if one.tokens != other.tokens:
                self.fail(
                    name,
                    f"in round {i} it proposed {one.tokens} alone, and {other.tokens} {where}.",
                    "Keep in the session all that changes, and draw random drafts from "
                    "context.draft_gumbel or context.noise (remembers=True if it is meant)",
                )

    def random_draft(self, which: int, seed: int) -> Draft:
        """A draft of a fresh session after one of the prompts, under a seed of its own."""
        generation = self.begin(self.prompts[which], self.context(Sampling(temp=1.0), seed))
        return self.propose(generation, 1 + seed % 2)

    def fail(self, name: str, what: str, next_step: str) -> NoReturn:
        """Raise AssertionError: whose fault, what happened, what to do."""
        raise AssertionError(f"{type(self.drafter).__name__}, {name}: {what} {next_step}.")


def _default_prompts(vocab_size: int) -> list[list[int]]:
    """Texts with something to look up: random, with repeats; repeating; and a single token."""
    coins = random.Random(0)
    few = max(2, min(vocab_size, 8))
    phrase = [coins.randrange(vocab_size) for _ in range(12)]
    noisy = [coins.randrange(few) for _ in range(40)]
    return [[*phrase, *noisy, *phrase[:6]], phrase[:3] * 6, [1 % vocab_size]]


def _close(got: mx.array, expected: mx.array | None) -> bool:
    """Whether the rows of `got` are the first rows of `expected`, as probabilities."""
    if expected is None:
        return False
    rows = np.exp(np.array(expected[: got.shape[0]], np.float64))
    return bool(np.allclose(np.exp(np.array(got, np.float64)), rows, atol=TOLERANCE))


def _chi_square(observed: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Pearson's statistic, and the limit that a sound drafter exceeds with chance FALSE_ALARM.

    Cells below 5 expected are taken together. Where laws differ from draw to draw the statistic is
    smaller than chi-square's, so that the limit errs on the drafter's side. The limit is Wilson
    and Hilferty's approximation of the quantile.
    """
    small = expected < 5
    cells = [(observed[~small], expected[~small])]
    if expected[small].sum() >= 1:
        cells.append((observed[small].sum(keepdims=True), expected[small].sum(keepdims=True)))
    found = np.concatenate([o for o, _ in cells])
    wanted = np.concatenate([e for _, e in cells])
    freedom = max(1, len(found) - 1)
    statistic = float(((found - wanted) ** 2 / wanted).sum())
    z = NormalDist().inv_cdf(1 - FALSE_ALARM)
    spread = 2 / (9 * freedom)
    return statistic, freedom * (1 - spread + z * spread**0.5) ** 3


@contextmanager
def _eager_switching() -> Iterator[None]:
    """Let threads take turns every few microseconds, so that what they share shows."""
    interval: Callable[[float], None] = sys.setswitchinterval
    before = sys.getswitchinterval()
    interval(1e-6)
    try:
        yield
    finally:
        interval(before)
