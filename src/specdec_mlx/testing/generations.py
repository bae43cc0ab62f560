"""Scripted generations: a drafter is played with, and each of its answers is looked at.

No model is needed: a scripted verdict stands in for the target's, and every number of accepted
tokens occurs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream

from specdec_mlx.errors import DraftError
from specdec_mlx.sampling.distribution import Sampling
from specdec_mlx.sampling.noise import Noise
from specdec_mlx.target.inputs import check_draft, check_drafted
from specdec_mlx.testing.failures import fail
from specdec_mlx.token_ids import to_list
from specdec_mlx.types import Checks, Closes, Draft, DraftContext, Drafter, DraftSession, is_cheap

LIMITS = (3, 1, 5, 2, 4, 8)
"""Draft lengths that are asked for, in turn."""

NUM_ROUNDS = 14
"""Rounds of a scripted generation: each limit twice, and a few more."""

TOLERANCE = 1e-3
"""How far two probabilities, or the mass of a distribution from 1, may be off: float32."""


@dataclass
class ScriptedRound:
    """What was proposed, and what was emitted."""

    tokens: list[int]
    logprobs: mx.array | None
    emitted: list[int]


@dataclass(frozen=True)
class NotedNoise(Noise):
    """Noise that notes which places drafts were drawn from: purposes and positions, in order."""

    drawn: list[tuple[str, int]] = field(default_factory=list, compare=False)

    def _mixed(self, purpose: str, position: int) -> int:
        if purpose.startswith("draft "):
            self.drawn.append((purpose, position))
        return super()._mixed(purpose, position)


@dataclass
class ScriptedGeneration:
    """A session and what it has seen.

    given: prompt + emitted, the list that the session was given, which grows under it as the
        loop's does.
    prompt: what it began with.
    noise: what it draws with.
    emitted: tokens observed.
    num_decided: how many of the noise's draws are of drafts that were decided.
    """

    session: DraftSession
    given: list[int]
    prompt: list[int]
    noise: NotedNoise
    emitted: list[int] = field(default_factory=list)
    num_decided: int = 0


@dataclass
class Generations:
    """What the loop does with a drafter, played from a script; raises where its contract is broken.

    drafter: under test. vocab_size, tokenizer: what it is told of the target.
    """

    drafter: Drafter
    vocab_size: int
    tokenizer: Any

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

    def begin(
        self, prompt: Sequence[int], context: DraftContext | None = None
    ) -> ScriptedGeneration:
        """Start a session, and see that the prompt stays the caller's."""
        given = list(prompt)
        context = context or self.context(Sampling())
        noise = NotedNoise(context.noise.seed if context.noise else 0)
        context = replace(context, noise=noise)
        if isinstance(self.drafter, Checks):
            self.drafter.check(context)
        session = self.drafter.begin(given, context)
        if not isinstance(session, DraftSession):
            self.fail(
                "protocol",
                f"begin() returned {type(session).__name__}, which lacks propose or observe.",
                "See specdec_mlx.DraftSession",
            )
        generation = ScriptedGeneration(session, given, list(prompt), noise)
        self._check_given(generation)
        return generation

    def propose(self, generation: ScriptedGeneration, limit: int) -> Draft:
        """A draft that can be verified."""
        drawn = generation.noise.drawn
        num_drawn = len(drawn)
        with mx.stream(generation_stream):
            draft = generation.session.propose(limit)
            self._check_draft(draft, limit)
        new, decided = drawn[num_drawn:], drawn[: generation.num_decided]
        if draft.logprobs is not None and (len({*new}) < len(new) or {*new} & {*decided}):
            self.fail(
                "noise",
                f"after {len(generation.emitted)} tokens it drew two tokens from the same noise, "
                "or one from that of an earlier draft. The text is then biased.",
                "Give draft_gumbel the number of tokens emitted, and each node an index of its own",
            )
        return draft

    def observe(self, generation: ScriptedGeneration, tokens: list[int]) -> None:
        """Tell the session what was emitted, and see that the tokens stay the caller's."""
        generation.given += tokens
        generation.emitted += tokens
        generation.num_decided = len(generation.noise.drawn)
        shown = list(tokens)
        generation.session.observe(shown)
        if shown != tokens:
            self.fail("protocol", "observe() changed the tokens given to it.", "Copy them")
        if len(generation.given) < 1000:
            self._check_given(generation)

    def close(self, generation: ScriptedGeneration, length: int | None = None) -> None:
        """End a session as the loop does, with the length of what the caller has."""
        if isinstance(generation.session, Closes):
            generation.session.close(len(generation.given) if length is None else length)

    def rounds(self, generation: ScriptedGeneration) -> Iterator[ScriptedRound]:
        """Play rounds; every number of accepted tokens comes up, and some proposals are dropped."""
        for i in range(NUM_ROUNDS):
            limit = LIMITS[i % len(LIMITS)]
            if is_cheap(generation.session):
                self.propose(generation, limit)  # the loop looks whether there is something
            draft = self.propose(generation, limit)
            tokens = to_list(draft.tokens)
            emitted = self._verdict(tokens, i)
            self.observe(generation, emitted)
            yield ScriptedRound(tokens, draft.logprobs if tokens else None, emitted)

    def script(self, prompt: Sequence[int]) -> list[ScriptedRound]:
        """A whole scripted generation, closed at its end."""
        generation = self.begin(prompt, self.context(Sampling(temp=1.0)))
        rounds = list(self.rounds(generation))
        self.close(generation)
        return rounds

    def fail(self, part: str, what: str, next_step: str) -> NoReturn:
        """Raise AssertionError: whose fault, what happened, what to do."""
        fail(self.drafter, part, what, next_step)

    def _verdict(self, tokens: list[int], index: int) -> list[int]:
        """The accepted part of a draft, and a correction or a bonus token."""
        num_accepted = (0, len(tokens), len(tokens) // 2, len(tokens), 1)[index % 5]
        num_accepted = min(num_accepted, len(tokens))
        after = (7 * index) % self.vocab_size
        if num_accepted < len(tokens) and after == tokens[num_accepted]:
            after = (after + 1) % self.vocab_size
        return [*tokens[:num_accepted], after]

    def _check_given(self, generation: ScriptedGeneration) -> None:
        """Raise if the session wrote into the list that it was given."""
        if generation.given != generation.prompt + generation.emitted:
            self.fail(
                "protocol",
                "it wrote into the list that begin() was given, the loop's own.",
                "Copy it: list(prompt)",
            )

    def _check_draft(self, draft: Draft, limit: int) -> None:
        """Raise for a draft that no rule could judge."""
        if not isinstance(draft, Draft):
            self.fail("protocol", f"propose() returned {type(draft).__name__}.", "Return a Draft")
        try:
            check_draft(Draft(draft.tokens, parents=draft.parents), self.vocab_size)
            tokens = to_list(draft.tokens)
            check_drafted(tokens, self.vocab_size)
        except DraftError as error:
            self.fail("protocol", str(error), "The target's ids are below context.vocab_size")
        if limit < len(draft):
            self.fail(
                "protocol",
                f"propose({limit}) returned {len(draft)} tokens.",
                "At most `limit` of them: the caches have to take them back",
            )
        if draft.evidence is not None and len(draft.evidence) != len(draft):
            self.fail(
                "protocol",
                f"evidence for {len(draft.evidence)} of {len(draft)} tokens.",
                "One number for each token, or None",
            )
        if draft.logprobs is not None and tokens:
            self._check_distributions(draft.logprobs, tokens)

    def _check_distributions(self, logprobs: mx.array, tokens: list[int]) -> None:
        """Raise unless `logprobs` are K distributions that could have brought the tokens."""
        expected = (len(tokens), self.vocab_size)
        if tuple(logprobs.shape) != expected:
            self.fail(
                "distribution", f"logprobs have shape {logprobs.shape}.", f"Expected {expected}"
            )
        probs = np.exp(np.array(logprobs.astype(mx.float32), np.float64))
        mass = probs.sum(-1)
        if not np.allclose(mass, 1, atol=TOLERANCE):
            self.fail(
                "distribution",
                f"the probabilities declared add up to {np.round(mass, 3).tolist()}, not to 1.",
                "Log-probabilities, normalised: x - logsumexp(x), as "
                "context.sampling.log_distribution returns",
            )
        if not all(probs[i, token] > 0 for i, token in enumerate(tokens)):
            self.fail(
                "distribution",
                "it proposed a token to which its declared distribution gives no chance.",
                "Hand over the distribution that the token was drawn from",
            )


def default_prompts(vocab_size: int) -> list[list[int]]:
    """Texts with something to look up: random, with repeats; repeating; and a single token."""
    coins = random.Random(0)
    few = max(2, min(vocab_size, 8))
    phrase = [coins.randrange(vocab_size) for _ in range(12)]
    noisy = [coins.randrange(few) for _ in range(40)]
    return [[*phrase, *noisy, *phrase[:6]], phrase[:3] * 6, [1 % vocab_size]]
