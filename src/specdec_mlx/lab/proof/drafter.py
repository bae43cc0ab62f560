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
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

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
    """Check a drafter against the contract of `specdec_mlx.contracts`.

    Args:
        drafter: an instance.
        vocab_size: V that the drafter is told.
        tokenizer: the target's, if the drafter needs it.
        prompts: texts to draft after, as token ids below V. Give texts for which it finds something
            to propose, because a drafter that proposes nothing passes.
        num_draws: drafts whose tokens are compared with the distributions declared for them, by
            chi-square, with a false alarm in 1e6. 1,500 find a total variation of about 0.1 over a
            few dozen tokens.
        learns: True if proposals may depend on rejected proposals. This is usually a mistake.
        remembers: True if proposals may depend on earlier generations. This is usually a mistake.

    Returns:
        A line for each property that was checked.

    Raises:
        AssertionError: the drafter broke a property. The message says what happened and what to do.
    """
    prompts = prompts or default_prompts(vocab_size)
    check = DrafterConformance(drafter, vocab_size, tokenizer, prompts, num_draws, remembers)
    left_out = {"noise": True, "rewinds": learns}  # noise: in every draft
    return check.run(name for name in check.properties if not left_out.get(name))


@dataclass(frozen=True)
class NotedNoise(Noise):
    """Noise that lists its uses by drafts.

    Attributes:
        drawn: purpose and position of each use, in order.
    """

    drawn: list[tuple[str, int]] = field(default_factory=list, compare=False)

    def _mixed(self, purpose: str, position: int) -> int:
        if purpose.startswith("draft "):
            self.drawn.append((purpose, position))
        return super()._mixed(purpose, position)


class LoopsOwn(list[int]):
    """A list that a drafter may keep and must not change."""

    def _refuse(self, *args: Any) -> NoReturn:
        raise TypeError("it writes into the loop's own list. Copy it, list(prompt)")

    append = extend = insert = remove = clear = reverse = _refuse
    pop = sort = _refuse  # type: ignore[assignment]
    __iadd__ = __imul__ = __setitem__ = __delitem__ = _refuse


@dataclass
class DrafterConformance(Conformance):
    """The test of a drafter, with generations that are played from a script."""

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
        with self.blaming("it is no drafter"):
            as_drafter(self.subject)
        before = dict(getattr(self.subject, "__dict__", {}))
        cases = itertools.product(self.prompts, SAMPLINGS)
        drafts = [draft for case in cases for draft, _ in self.begin(*case).rounds()]
        after = getattr(self.subject, "__dict__", {})
        changed = [key for key in {**before, **after} if before.get(key) is not after.get(key)]
        self.require(
            not changed,
            f"a generation changed the drafter itself: {', '.join(changed)}.",
            "Keep what changes in the session: generations share it",
        )
        return f"{sum(len(draft) > 0 for draft in drafts)} drafts, each can be verified"

    def empty_drafts(self) -> str:
        """Rounds without a draft work, also several in a row and before the first proposal."""
        for prompt in self.prompts:
            generation = self.begin(prompt)
            for token in [*range(min(6, self.vocab_size)), 0, 1]:
                generation.observe([token])
                self.require(not len(generation.propose(0)), "propose(0) returned tokens.")
            generation.propose(4)
        return "plain rounds before, between and after drafts"

    def sessions(self) -> str:
        """Generations in sequence, in turns and in threads do not influence each other."""
        prompts = [self.prompts[i % len(self.prompts)] for i in range(NUM_SESSIONS)]
        alone = list(map(self._drafted, prompts))
        in_turns = zip(*(self.begin(p, AT_ONE).rounds() for p in prompts), strict=True)
        runs = {
            "after other generations": list(map(self._drafted, prompts)),
            "while others took turns with it": [
                [draft.tokens for draft, _ in rounds] for rounds in zip(*in_turns, strict=True)
            ],
            "while other threads drafted too": self._in_threads(prompts),
        }
        if self.remembers:
            return f"{NUM_SESSIONS} at once, which may have to do with each other"
        for where, everyone in runs.items():
            pairs = zip(itertools.chain(*alone), itertools.chain(*everyone), strict=True)
            for one, other in pairs:
                self.require(one == other, f"it proposed {one} alone, and {other} {where}.")
        return f"{NUM_SESSIONS} draft as each alone: one after the other, in turns, in threads"

    def _drafted(self, prompt: Sequence[int]) -> list[Any]:
        generation = self.begin(prompt, AT_ONE)
        tokens = [draft.tokens for draft, _ in generation.rounds()]
        generation.session.close(len(generation.text))
        return tokens

    def _in_threads(self, prompts: Sequence[Sequence[int]]) -> list[list[Any]]:
        barrier = threading.Barrier(len(prompts))

        def run(prompt: Sequence[int]) -> list[Any]:
            with mx.stream(generation_stream):
                barrier.wait()
                return self._drafted(prompt)

        before = sys.getswitchinterval()
        # Frequent switches make shared state visible.
        sys.setswitchinterval(1e-6)
        try:
            with ThreadPoolExecutor(len(prompts)) as pool:
                return list(pool.map(run, prompts))
        finally:
            sys.setswitchinterval(before)

    def rewinds(self) -> str:
        """After any verdict, the proposal equals a new session's proposal for the text."""
        compared = 0
        for case in itertools.product(self.prompts, SAMPLINGS):
            before: list[int] = []
            for draft, emitted in self.begin(*case).rounds():
                # A session that sees the same text and has never drafted.
                watcher, size = self.begin(*case), len(draft)
                for token in before:
                    # Single tokens, because a session must not depend on how the text was divided.
                    watcher.observe([token])
                expected = watcher.propose(size or 1)
                what = f"after {len(before)} tokens it proposed {draft.tokens}; a session that saw "
                what += f"the same text, and was never asked before, proposes {expected.tokens}"
                self.require(draft.tokens == expected.tokens[:size], f"{what}.")
                is_same = not size or draft.logprobs is None or _is_close(draft, expected)
                self.require(is_same, f"{what}, and declares another distribution.")
                before += emitted
                compared += 1
        return f"{compared} proposals are those of a session that never drafted"

    def distribution(self) -> str:
        """Random tokens follow the distribution that was declared for them."""
        drawn, declared = np.zeros((2, self.vocab_size))
        firsts: dict[int, Draft] = {}
        for seed in range(self.num_draws):
            which = seed % len(self.prompts)
            # Each seed is a new generation, so the draws are independent.
            draft = self.begin(self.prompts[which], AT_ONE, seed).propose(1 + seed % 2)
            if draft.logprobs is None:
                if seed >= 20 and not drawn.any():
                    return "its drafts are point masses, there is none to test"
                continue
            is_same = _is_close(draft.head(1), firsts.setdefault(which, draft))
            self.require(is_same, "what is declared for the first token changes with the seed.")
            declared += np.exp(np.array(draft.logprobs, np.float64)).sum(0)
            np.add.at(drawn, draft.tokens, 1)
        test = ChiSquare.of(drawn, declared)
        result = (
            f"{drawn.sum():.0f} drawn tokens, chi-square {test.statistic:.0f}, "
            f"p = {test.p_value:.2g}"
        )
        worst = int(np.argmax(np.abs(drawn - declared)))
        counts = f"{drawn[worst]:.0f} times, where {declared[worst]:.1f} times were declared"
        self.require(test.p_value >= RARE_ALARM, f"{result}. Token {worst} was drawn {counts}.")
        return result

    def memory(self) -> str:
        """A session ends with its generation, and its memory per token does not grow."""
        generation = self.begin(self.prompts[0])
        *_, (_, emitted) = generation.rounds()
        # Generations also end inside of a round.
        generation.session.close(len(generation.text) - len(emitted) + 1)
        session = as_given(generation.session)
        # A class with __slots__ may not allow weak references.
        reference = weakref.ref(session) if hasattr(session, "__weakref__") else lambda: None
        del generation, session
        gc.collect()
        self.require(reference() is None, "a closed session is still held by something.")
        start, middle, end = self._memory_at(0, MEMORY_TOKENS, 3 * MEMORY_TOKENS)
        first, later = middle - start, end - middle
        self.require(
            later <= MEMORY_GROWTH * max(first, 200_000),
            f"the first {MEMORY_TOKENS} tokens took {first / 1e6:.1f} MB, twice as many then "
            f"took {later / 1e6:.1f} MB.",
        )
        return f"released at the end; {first / MEMORY_TOKENS:.0f} bytes a token of text"

    def _memory_at(self, *lengths: int) -> list[int]:
        """Bytes in use after these numbers of tokens of one text."""
        generation, coins, sizes = self.begin(self.prompts[0]), random.Random(0), []
        tracemalloc.start()
        try:
            for length in lengths:
                while len(generation.text) < len(self.prompts[0]) + length:
                    generation.observe(coins.choices(range(self.vocab_size), k=2))
                sizes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        return sizes

    def begin(
        self, prompt: Sequence[int], sampling: Sampling | None = GREEDY, seed: int = 0
    ) -> ScriptedGeneration:
        noise, drafter = NotedNoise(seed), as_drafter(self.subject)
        context = DraftContext(
            sampling=sampling, noise=noise, vocab_size=self.vocab_size, tokenizer=self.tokenizer
        )
        drafter.check(context)
        with self.blaming("begin()", part="protocol"):
            session = begin_session(drafter, LoopsOwn(prompt), context)
            return ScriptedGeneration(self, session, list(prompt), noise)


@dataclass
class ScriptedGeneration:
    """A session, its text and its noise. It does what the loop does, without a model.

    Attributes:
        num_decided: draws of the noise for drafts that have been decided.
    """

    check: DrafterConformance
    session: Session
    text: list[int]
    noise: NotedNoise
    num_decided: int = 0

    def propose(self, limit: int) -> Draft:
        """A draft with its tokens as a list, after the checks of the loop and of its noise."""
        require, blaming = self.check.require, self.check.blaming
        drawn, num_drawn = self.noise.drawn, len(self.noise.drawn)
        with mx.stream(generation_stream):
            draft = proposing(self.session, "")(limit)
            kind = type(draft).__name__
            require(isinstance(draft, Draft), f"propose() returned {kind}.", part="protocol")
            with blaming("propose()", part="protocol"):
                check_draft(draft, self.check.vocab_size)
                tokens = to_list(draft.tokens)
                check_drafted(tokens, self.check.vocab_size)
            draft, size = replace(draft, tokens=tokens), len(tokens)
            require(size <= limit, f"propose({limit}) returned {size} tokens.", part="protocol")
            is_whole = draft.evidence is None or len(draft.evidence) == size
            require(is_whole, "evidence has to be one for each token.", part="protocol")
            if draft.logprobs is not None and size:
                token_logprobs: Any = draft.logprobs[mx.arange(size), to_ids(tokens)][:, None]
                masses: Any = mx.exp(draft.logprobs).sum(-1)
                with blaming("propose()", part="distribution"):
                    check_distribution(masses.tolist(), token_logprobs.tolist())
        # Two tokens from the same noise are not independent, and neither is a token drawn from
        # noise that decided an earlier round.
        new = drawn[num_drawn:]
        require(
            draft.logprobs is None or len({*new} - {*drawn[: self.num_decided]}) == len(new),
            f"after {len(self.text)} tokens of text it drew two tokens from the same noise, or one "
            "from that of an earlier draft. What is emitted is then biased.",
            part="noise",
        )
        return draft

    def observe(self, tokens: list[int]) -> None:
        self.text += tokens
        self.num_decided = len(self.noise.drawn)
        with self.check.blaming("observe()", part="protocol"):
            self.session.observe(LoopsOwn(tokens))

    def rounds(self) -> Iterator[tuple[Draft, list[int]]]:
        """Drafts, and the tokens emitted after each.

        Every number of accepted tokens occurs, and some proposals are dropped.
        """
        for i in range(NUM_ROUNDS):
            limit = LIMITS[i % len(LIMITS)]
            if self.session.cheap:
                # The loop asks a cheap drafter whether it has anything, and may drop the answer.
                self.propose(limit)
            draft = self.propose(limit)
            tokens = to_list(draft.tokens)
            most, after = len(tokens), (7 * i) % self.check.vocab_size
            num_accepted = (0, most, most // 2, most, min(1, most))[i % 5]
            if tokens[num_accepted : num_accepted + 1] == [after]:  # it was rejected
                after = (after + 1) % self.check.vocab_size
            emitted = [*tokens[:num_accepted], after]
            self.observe(emitted)
            yield draft, emitted


def default_prompts(vocab_size: int) -> list[list[int]]:
    coins = random.Random(0)
    few = max(2, min(vocab_size, 8))
    phrase = [coins.randrange(vocab_size) for _ in range(12)]
    noisy = [coins.randrange(few) for _ in range(40)]
    return [[*phrase, *noisy, *phrase[:6]], phrase[:3] * 6, [1 % vocab_size]]


def _is_close(draft: Draft, expected: Draft) -> bool:
    if draft.logprobs is None or expected.logprobs is None:
        return False
    a, b = mx.exp(draft.logprobs), mx.exp(expected.logprobs[: len(draft)])
    return bool(mx.allclose(a, b, atol=TOLERANCE).item())
