"""Does a drafter keep its contract? Scripted generations, without a model."""

from __future__ import annotations

import gc
import itertools
import random
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream

from specdec_mlx.contracts import (
    Draft,
    DraftContext,
    Drafter,
    Session,
)
from specdec_mlx.duck_typed import as_drafter, as_given, begin_session
from specdec_mlx.lab.proof.chi_square import RARE_ALARM, ChiSquare
from specdec_mlx.lab.proof.conformance import Conformance
from specdec_mlx.lab.proposing import proposing
from specdec_mlx.sampling import Noise, Sampling
from specdec_mlx.target import check_distribution, check_draft, check_drafted
from specdec_mlx.token_ids import to_ids, to_list

LIMITS = (3, 1, 5, 2, 4, 8)
NUM_ROUNDS = 14
"""Draft lengths that are asked for in turn, and rounds of a generation: each twice, and more."""

AT_ONE, GREEDY = Sampling(temp=1.0), Sampling()
SAMPLINGS = (GREEDY, AT_ONE, None)
TOLERANCE = 1e-3  # largest error of a probability: float32

NUM_SESSIONS = 4  # generations at once
MEMORY_TOKENS = 1500  # tokens after which memory is read, and again at three times as many

MEMORY_GROWTH = 4.0
"""Memory limit of the later tokens, twice as many, over that of the first; quadratic growth: 8."""


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
    """Hold a drafter to the contract of `specdec_mlx.contracts`.

    Args:
        drafter: an instance.
        vocab_size: V that the drafter is told.
        tokenizer: the target's, if it asks for one.
        prompts: texts to draft after, as token ids below V; give some where it finds something to
            propose, since a drafter that proposes nothing passes.
        num_draws: drafts whose tokens are held against the distributions that they declare, by
            chi-square, with a false alarm in 1e6. 1,500 find a total variation of about 0.1 over a
            few dozen tokens.
        learns: True if proposals may depend on rejected proposals.
        remembers: True if they may depend on earlier generations. Most often both are a mistake.

    Returns:
        A line for each property that was checked.

    Raises:
        AssertionError: it broke one; says which, what happened and what to do.
    """
    prompts = prompts or default_prompts(vocab_size)
    check = DrafterConformance(drafter, vocab_size, tokenizer, prompts, num_draws, remembers)
    left_out = {"noise": True, "rewinds": learns}  # noise: in every draft
    return check.run(name for name in check.properties if not left_out.get(name))


class ScriptedRound(NamedTuple):
    """A proposal, and the tokens emitted after it."""

    tokens: list[int]
    logprobs: mx.array | None
    emitted: list[int]


@dataclass(frozen=True)
class NotedNoise(Noise):
    """Noise that notes the places that drafts were drawn from: purposes and positions, in order."""

    drawn: list[tuple[str, int]] = field(default_factory=list, compare=False)

    def _mixed(self, purpose: str, position: int) -> int:
        if purpose.startswith("draft "):
            self.drawn.append((purpose, position))
        return super()._mixed(purpose, position)


class LoopsOwn(list[int]):
    """A list that a drafter is shown: it may keep it, and must not change it."""

    def _refuse(self, *args: Any) -> NoReturn:
        raise TypeError("it writes into the loop's own list. Copy it, list(prompt)")

    append = extend = insert = remove = clear = reverse = _refuse
    pop = sort = _refuse  # type: ignore[assignment]
    __iadd__ = __imul__ = __setitem__ = __delitem__ = _refuse


@dataclass
class ScriptedGeneration:
    """A session and its text; num_decided: draws of its noise that are of decided drafts."""

    session: Session
    text: list[int]
    noise: NotedNoise
    num_decided: int = 0


@dataclass
class DrafterConformance(Conformance):
    """One drafter under test: what the loop does with it, played from a script."""

    properties = {  # noqa: RUF012
        "protocol": "See Drafter, Session and Draft in specdec_mlx.contracts",
        "noise": "Give draft_gumbel the number of tokens emitted, and an index for each node",
        "empty drafts": "Return Draft()",
        "sessions": "Keep in the session all that changes, and draw random drafts from "
        "context.draft_gumbel or context.noise (remembers=True if it is meant)",
        "rewinds": "Take back in observe() what was proposed and not emitted (or learns=True)",
        "distribution": "Hand over the distribution that each token was drawn from, captured while "
        "drawing, after context.sampling.log_distribution, and drop no token for what it is",
        "memory": "Keep no list of sessions, and no copy of the text at every round",
    }
    subject: Drafter
    vocab_size: int
    tokenizer: Any
    prompts: Sequence[Sequence[int]]
    num_draws: int
    remembers: bool

    def protocol(self) -> str:
        """The two classes are there, and every draft is one that can be verified."""
        with self.blaming("it is no drafter"):
            as_drafter(self.subject)
        before = dict(getattr(self.subject, "__dict__", {}))
        generations = itertools.starmap(self._begin, itertools.product(self.prompts, SAMPLINGS))
        num_drafts = sum(bool(r.tokens) for begun in generations for r in self._rounds(begun))
        after = getattr(self.subject, "__dict__", {})
        changed = [key for key in {**before, **after} if before.get(key) is not after.get(key)]
        self.require(
            not changed,
            f"a generation changed the drafter itself: {', '.join(changed)}.",
            "Keep what changes in the session: generations share it",
        )
        return f"{num_drafts} drafts, each can be verified"

    def empty_drafts(self) -> str:
        """Rounds without a draft are normal, also many in a row and before the first proposal."""
        for prompt in self.prompts:
            generation = self._begin(prompt)
            for token in [*range(min(6, self.vocab_size)), 0, 1]:
                self._observe(generation, [token])
                is_empty = not len(self._propose(generation, 0).tokens)
                self.require(is_empty, "propose(0) returned tokens.")
            self._propose(generation, 4)
        return "plain rounds before, between and after drafts"

    def sessions(self) -> str:
        """Generations one after the other, in turns and in threads have nothing to do together."""
        prompts = [self.prompts[i % len(self.prompts)] for i in range(NUM_SESSIONS)]
        alone = [self._script(prompt) for prompt in prompts]
        in_turns = zip(*(self._rounds(self._begin(p, AT_ONE)) for p in prompts), strict=True)
        runs: dict[str, Sequence[Sequence[ScriptedRound]]] = {
            "after other generations": [self._script(prompt) for prompt in prompts],
            "while others took turns with it": list(zip(*in_turns, strict=True)),
            "while other threads drafted too": self._in_threads(prompts),
        }
        if self.remembers:
            return f"{NUM_SESSIONS} at once, which may have to do with each other"
        for where, everyone in runs.items():
            for expected, got in zip(alone, everyone, strict=True):
                for one, other in zip(expected, got, strict=True):
                    self.require(
                        one.tokens == other.tokens,
                        f"it proposed {one.tokens} alone, and {other.tokens} {where}.",
                    )
        return f"{NUM_SESSIONS} draft as each alone: one after the other, in turns, in threads"

    def _in_threads(self, prompts: Sequence[Sequence[int]]) -> list[Sequence[ScriptedRound]]:
        barrier = threading.Barrier(len(prompts))

        def run(prompt: Sequence[int]) -> Sequence[ScriptedRound]:
            with mx.stream(generation_stream):
                barrier.wait()
                return self._script(prompt)

        before = sys.getswitchinterval()
        # threads take turns so often that what they share shows
        sys.setswitchinterval(1e-6)
        try:
            with ThreadPoolExecutor(len(prompts)) as pool:
                return list(pool.map(run, prompts))
        finally:
            sys.setswitchinterval(before)

    def rewinds(self) -> str:
        """After any verdict, the proposal is that of a session that saw the same text."""
        compared = 0
        for prompt, sampling in itertools.product(self.prompts, SAMPLINGS):
            before: list[int] = []
            for round_ in self._rounds(self._begin(prompt, sampling)):
                # it sees the text, and is never asked
                watcher = self._begin(prompt, sampling)
                for token in before:
                    self._observe(watcher, [token])
                draft = self._propose(watcher, len(round_.tokens) or 1)
                expected = to_list(draft.tokens)
                what = f"after {len(before)} tokens it proposed {round_.tokens}; a session that "
                what += f"saw the same text, and was never asked before, proposes {expected}"
                self.require(round_.tokens == expected[: len(round_.tokens)], f"{what}.")
                is_same = round_.logprobs is None or _close(round_.logprobs, draft.logprobs)
                self.require(is_same, f"{what}, and declares another distribution.")
                before += round_.emitted
                compared += 1
        return f"{compared} proposals are those of a session that never drafted"

    def distribution(self) -> str:
        """Tokens drawn at random follow the distribution that was declared for them."""
        drawn, declared = np.zeros(self.vocab_size), np.zeros(self.vocab_size)
        firsts: dict[int, mx.array] = {}
        for seed in range(self.num_draws):
            which = seed % len(self.prompts)
            generation = self._begin(self.prompts[which], AT_ONE, seed)
            draft = self._propose(generation, 1 + seed % 2)
            if draft.logprobs is None:
                if seed >= 20 and not drawn.any():
                    return "its drafts are point masses, there is none to test"
                continue
            is_same = _close(draft.logprobs[:1], firsts.setdefault(which, draft.logprobs[:1]))
            self.require(is_same, "what is declared for the first token changes with the seed.")
            declared += np.exp(np.array(draft.logprobs, np.float64)).sum(0)
            np.add.at(drawn, to_list(draft.tokens), 1)
        test = ChiSquare.of(drawn, declared)
        found = (
            f"{drawn.sum():.0f} drawn tokens, chi-square {test.statistic:.0f}, "
            f"p = {test.p_value:.2g}"
        )
        worst = int(np.argmax(np.abs(drawn - declared)))
        counts = f"{drawn[worst]:.0f} times, where {declared[worst]:.1f} times were declared"
        self.require(test.p_value >= RARE_ALARM, f"{found}. Token {worst} was drawn {counts}.")
        return found

    def memory(self) -> str:
        """A session ends with its generation, and needs no more memory a token as texts grow."""
        generation = self._begin(self.prompts[0])
        last = list(self._rounds(generation))[-1]
        # inside of a round
        # __slots__ may have none
        self._close(generation, len(generation.text) - len(last.emitted) + 1)
        session = as_given(generation.session)
        can_refer = hasattr(session, "__weakref__")
        held = weakref.ref(session) if can_refer else lambda: None
        del generation, session
        gc.collect()
        self.require(held() is None, "a closed session is still held by something.")
        start, middle, end = self._memory_at(0, MEMORY_TOKENS, 3 * MEMORY_TOKENS)
        first, later = middle - start, end - middle
        self.require(
            later <= MEMORY_GROWTH * max(first, 200_000),
            f"the first {MEMORY_TOKENS} tokens took {first / 1e6:.1f} MB, twice as many then "
            f"took {later / 1e6:.1f} MB.",
        )
        return f"released at the end; {first / MEMORY_TOKENS:.0f} bytes a token of text"

    def _memory_at(self, *lengths: int) -> list[int]:
        """Bytes in use after so many tokens of one text, which come in pairs."""
        generation, coins, held = self._begin(self.prompts[0]), random.Random(0), []
        tracemalloc.start()
        try:
            for length in lengths:
                while len(generation.text) < len(self.prompts[0]) + length:
                    self._observe(generation, coins.choices(range(self.vocab_size), k=2))
                held.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        return held

    # What the checks are made of

    def _begin(
        self, prompt: Sequence[int], sampling: Sampling | None = GREEDY, seed: int = 0
    ) -> ScriptedGeneration:
        noise = NotedNoise(seed)
        context = DraftContext(
            sampling=sampling, noise=noise, vocab_size=self.vocab_size, tokenizer=self.tokenizer
        )
        drafter = as_drafter(self.subject)
        drafter.check(context)
        with self.blaming("begin()", part="protocol"):
            session = begin_session(drafter, LoopsOwn(prompt), context)
            return ScriptedGeneration(session, list(prompt), noise)

    def _propose(self, generation: ScriptedGeneration, limit: int) -> Draft:
        drawn, num_drawn = generation.noise.drawn, len(generation.noise.drawn)
        with mx.stream(generation_stream):
            draft = proposing(generation.session, "")(limit)
            self._check_draft(draft, limit)
        new, decided = drawn[num_drawn:], drawn[: generation.num_decided]
        is_fresh = len({*new}) == len(new) and not {*new} & {*decided}
        self.require(
            draft.logprobs is None or is_fresh,
            f"after {len(generation.text)} tokens of text it drew two tokens from the same "
            "noise, or one from that of an earlier draft. What is emitted is then biased.",
            part="noise",
        )
        return draft

    def _observe(self, generation: ScriptedGeneration, tokens: list[int]) -> None:
        generation.text += tokens
        generation.num_decided = len(generation.noise.drawn)
        with self.blaming("observe()", part="protocol"):
            generation.session.observe(LoopsOwn(tokens))

    def _close(self, generation: ScriptedGeneration, length: int | None = None) -> None:
        generation.session.close(len(generation.text) if length is None else length)

    def _rounds(self, generation: ScriptedGeneration) -> Iterator[ScriptedRound]:
        """Play rounds; every number of accepted tokens comes up, and some proposals are dropped."""
        for i in range(NUM_ROUNDS):
            limit = LIMITS[i % len(LIMITS)]
            if generation.session.cheap:
                # the loop looks whether there is something
                self._propose(generation, limit)
            draft = self._propose(generation, limit)
            tokens = to_list(draft.tokens)
            most, after = len(tokens), (7 * i) % self.vocab_size
            num_accepted = (0, most, most // 2, most, min(1, most))[i % 5]
            if tokens[num_accepted : num_accepted + 1] == [after]:  # it was rejected
                after = (after + 1) % self.vocab_size
            emitted = [*tokens[:num_accepted], after]
            self._observe(generation, emitted)
            yield ScriptedRound(tokens, draft.logprobs if tokens else None, emitted)

    def _script(self, prompt: Sequence[int]) -> list[ScriptedRound]:
        generation = self._begin(prompt, AT_ONE)
        rounds = list(self._rounds(generation))
        self._close(generation)
        return rounds

    def _check_draft(self, draft: Draft, limit: int) -> None:
        """Raise for a draft that the loop would refuse, and for one that is too long."""
        self.require(
            isinstance(draft, Draft), f"propose() returned {type(draft).__name__}.", part="protocol"
        )
        with self.blaming("propose()", part="protocol"):
            check_draft(draft, self.vocab_size)
            check_drafted(to_list(draft.tokens), self.vocab_size)
        size = len(draft)
        self.require(size <= limit, f"propose({limit}) returned {size} tokens.", part="protocol")
        is_whole = draft.evidence is None or len(draft.evidence) == size
        self.require(is_whole, "evidence has to be one for each token.", part="protocol")
        if draft.logprobs is not None and size:
            own: Any = draft.logprobs[mx.arange(size), to_ids(draft.tokens)][:, None]
            masses: Any = mx.exp(draft.logprobs).sum(-1)
            with self.blaming("propose()", part="distribution"):
                check_distribution(masses.tolist(), own.tolist())


def default_prompts(vocab_size: int) -> list[list[int]]:
    """Texts with something to look up: random, with repeats; repeating; and a single token."""
    coins = random.Random(0)
    few = max(2, min(vocab_size, 8))
    phrase = [coins.randrange(vocab_size) for _ in range(12)]
    noisy = [coins.randrange(few) for _ in range(40)]
    return [[*phrase, *noisy, *phrase[:6]], phrase[:3] * 6, [1 % vocab_size]]


def _close(got: mx.array, expected: mx.array | None) -> bool:
    """True if the rows of `got` are the first rows of `expected`, as probabilities."""
    if expected is None:
        return False
    a, b = mx.exp(got), mx.exp(expected[: len(got)])
    return bool(mx.allclose(a, b, atol=TOLERANCE).item())
