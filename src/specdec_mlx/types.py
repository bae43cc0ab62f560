"""The contracts between the parts: what a drafter hands over, what a rule returns.

A drafter proposes, the target scores K+1 positions in one pass, a rule decides how many to keep.
Throughout, K is the number of draft tokens in a round and V the target's vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import mlx.core as mx
from jaxtyping import Float

from specdec_mlx.drafters.evidence import Evidence

if TYPE_CHECKING:
    from specdec_mlx.sampling.distribution import Sampling
    from specdec_mlx.sampling.noise import Noise

LogitsProcessor = Any  # mlx-lm's: (tokens [n], logits [1, V]) -> logits [1, V]
Origin = Literal["draft", "correction", "bonus", "plain"]


@dataclass(frozen=True)
class Draft:
    """Proposed continuation of the text, K tokens; an empty one makes the round plain decoding.

    tokens: [K] token ids, a sequence of ints, or an `mx.array` where they are not computed yet.
    logprobs: [K, V] float32 log-probabilities of the law that each token was *drawn from*,
        captured while drafting and normalised; None for a point mass, that is when the drafter
        would always propose these very tokens.
    evidence: optional [K] what speaks for each token; a plain int is `Evidence.match`. The
        automatic draft length learns how often tokens with the like of it are accepted; no
        acceptance rule reads it.
    """

    tokens: Sequence[int] | mx.array = ()
    logprobs: Float[mx.array, "k vocab"] | None = None
    evidence: Sequence[Evidence | int] | None = None

    def __len__(self) -> int:
        """K."""
        return len(self.tokens)

    def head(self, num_tokens: int) -> Draft:
        """The first `num_tokens` of it."""
        if num_tokens >= len(self):
            return self
        return Draft(
            tokens=self.tokens[:num_tokens],
            logprobs=None if self.logprobs is None else self.logprobs[:num_tokens],
            evidence=None if self.evidence is None else self.evidence[:num_tokens],
        )


@dataclass(frozen=True)
class Verdict:
    """What a rule decided about one draft.

    num_accepted: n, how many leading draft tokens are kept, 0 <= n <= K; scalar int array.
    next_token: the token after them, drawn from the target (n = K: the bonus token, else the
        correction); scalar int array.
    """

    num_accepted: mx.array
    next_token: mx.array


@dataclass(frozen=True)
class RoundRecord:
    """One round as it happened.

    drafted, accepted, emitted: numbers of tokens; emitted = accepted + 1 unless the round was cut
        short by max_tokens. tokens: the emitted ones. fed: positions that the pass computed.
    seconds: from the reading of the round before to this one's, all that the round cost.
    draft_seconds, verify_seconds: host time spent in proposing, and in launching the pass and
        waiting for it (a draft model's lazy steps run inside verify).
    steady: whether the round was launched and read in the same gear, and the caller was not busy
        with its tokens for most of the time. Only such a round's seconds are those of one pass; at
        a shift of gears some backends count two, and then next to none.
    ahead: whether it was launched before the round before it was read, in the plain gear.
    context: positions on the caches before the pass.
    part: key of the drafter whose draft it verified, one of several under `FirstOf`; "" for none.
    """

    drafted: int
    accepted: int
    emitted: int
    fed: int
    tokens: Sequence[int] = ()
    seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    steady: bool = True
    ahead: bool = False
    context: int = 0
    part: str = ""


@dataclass(frozen=True)
class DraftContext:
    """What a drafter may know about the generation that it drafts for.

    sampling: the law that target tokens are drawn from, or None when the caller gave an opaque
        sampler. A drafter that draws at random must draw from its logits under this same law.
    noise: the generation's source of randomness, keyed by purpose and position. coupled: whether
        drafts are to be drawn from the noise of the target's own draws (rule "coupled").
    logits_processors: the target's processors, in order; (tokens [n], logits [1, V]) -> logits.
    vocab_size: V.
    tokenizer: the target's tokenizer where the caller has one, else None.
    draft_cache: caches for a draft model that the caller wants used and kept in step, or None.
    prefill_step_size: most positions of the prompt to process at a time.
    """

    sampling: Sampling | None = None
    noise: Noise | None = None
    coupled: bool = False
    logits_processors: Sequence[LogitsProcessor] = ()
    vocab_size: int | None = None
    tokenizer: Any = None
    draft_cache: list[Any] | None = None
    prefill_step_size: int = 2048

    def draft_gumbel(self, start: int, index: int) -> Float[mx.array, " vocab"]:
        """Standard Gumbel noise [V] for drawing token `index` of a draft.

        start: number of tokens emitted before the draft. Keyed by both, so that no later draft is
        drawn from noise that had a say in an earlier verdict; under the coupled rule, where the
        draft has no say in what is emitted, it is the target's own noise at that position.
        """
        assert self.noise is not None
        assert self.vocab_size is not None
        return self.noise.gumbel(*self._place(start, index), self.vocab_size)

    def draft_gumbels(self, start: int, n: int) -> Float[mx.array, "n vocab"]:
        """The noise of tokens 0 to n - 1, one row each, in fewer operations."""
        assert self.noise is not None
        assert self.vocab_size is not None
        places = [self._place(start, index) for index in range(n)]
        return self.noise.gumbels(places, self.vocab_size)

    def _place(self, start: int, index: int) -> tuple[str, int]:
        """Purpose and position that key the noise of a draft's token."""
        return ("target", start + index) if self.coupled else (f"draft {index}", start)


@runtime_checkable
class DraftSession(Protocol):
    """All that a drafter changes in the course of one generation.

    What is observed after a proposal begins with the part of it that was accepted.

    Optional members: `cheap`, true if proposing is microseconds of host work that may be thrown
    away, so that the loop may look for a draft while a pass runs; `close(length)`, called once at
    the end, when the first `length` tokens of prompt + observed are all that the caller has;
    `parts`, sessions that are asked in its place, in order, until one has a draft, and
    `part_keys`, the key of each.
    """

    def propose(self, limit: int) -> Draft:
        """Continue the text observed so far with 0 to `limit` tokens; `limit` >= 0."""
        ...

    def observe(self, tokens: Sequence[int]) -> None:
        """Take the tokens really emitted since the last call; rewind or learn by itself."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """Frozen configuration of a way to draft; reusable and shareable between generations.

    Optional member: `check(context)`, called before anything is computed; raises a ValueError if
    the drafter cannot draft for this target.
    """

    def begin(self, prompt: Sequence[int], context: DraftContext) -> DraftSession:
        """Start a generation after `prompt` [n] token ids."""
        ...


@runtime_checkable
class Keyed(Protocol):
    """A drafter that says itself what it is called where costs and acceptance are remembered."""

    @property
    def key(self) -> str:
        """Content and options that matter; equal for equals, in every process."""
        ...


def key_of(drafter: Any) -> str:
    """A drafter's own key; else its class with its module, and for a dataclass its fields."""
    if isinstance(drafter, Keyed):
        return drafter.key
    kind = type(drafter)
    own = repr(drafter) if is_dataclass(drafter) else kind.__qualname__
    return f"{kind.__module__}.{own}"


def keyed_parts(session: DraftSession, key: str) -> list[tuple[str, DraftSession]]:
    """The sessions to ask in a session's place, each with a key; by default itself, with its own.

    Parts that have no keys are numbered.
    """
    if not hasattr(session, "parts"):
        return [(key, session)]
    numbered = [f"{key}, {i}" for i in range(len(session.parts))]
    return list(zip(getattr(session, "part_keys", numbered), session.parts, strict=True))


@runtime_checkable
class AcceptanceRule(Protocol):
    """Pure decision about a draft: knows no model, no cache, and holds no state.

    The law of a round follows from three functions of the target's law and the draft, so that
    tests can enumerate it. `accept_probs` gives the chance of each position's own coin,
    `num_accepted` turns the K coins into n, `next_probs` is the law of the token after.
    """

    @property
    def name(self) -> str:
        """What `rule=` calls it."""
        ...

    def accept_probs(self, target_probs: Any, draft_tokens: Any, draft_probs: Any) -> Any:
        """[K] chance that the coin of each draft position shows heads."""
        ...

    def num_accepted(self, coins: Any) -> Any:
        """N, from K coins (booleans)."""
        ...

    def next_probs(
        self, target_probs: Any, draft_tokens: Any, draft_probs: Any, num_accepted: Any
    ) -> Any:
        """[V] law of the token that follows n accepted ones."""
        ...
