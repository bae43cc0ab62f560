"""The drafter's contract: `Drafter`, `DraftSession`, `Draft`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import mlx.core as mx
from jaxtyping import Float

from specdec_mlx.contracts.trees import ROOT as ROOT
from specdec_mlx.contracts.trees import first_path

if TYPE_CHECKING:
    from specdec_mlx.contracts.target import TargetCaches
    from specdec_mlx.sampling.distribution import Sampling
    from specdec_mlx.sampling.noise import Noise

LogitsProcessor = Any  # mlx-lm's: (tokens [n], logits [1, V]) -> logits [1, V]


Origin = Literal["draft", "correction", "bonus", "plain"]


class Evidence(NamedTuple):
    """Evidence for one draft token, as far as its drafter has any.

    No acceptance rule reads it; it only helps to choose how many tokens to draft.

    match: how many tokens of the text the draft was found by, or another strength >= 0 of the
        drafter's own; 0: nothing known.
    share, places: its share of the votes of places in a text, or of the times that its context was
        seen, and how many places vote for it, or how often it was seen there; classes out of
        `drafters.evidence`; 0: nothing known.
    rank: place among the tokens that its drafter proposes after the same ones.
    confidence: largest probability in the draft model's distribution at this position; None:
        nothing known. It is known before the token is drawn, and says nothing about the draw.
    is_drawn: whether the token is drawn from that distribution, and is not its likeliest one.
    is_free: whether no step was run for it: what look-up found behind a draft model's tokens.
    """

    match: int = 0
    share: int = 0
    places: int = 0
    rank: int = 0
    confidence: float | None = None
    is_drawn: bool = False
    is_free: bool = False


class Step(Enum):
    """Decision after a look at the draft's distribution at one position, its draw unseen.

    GO_ON: take this token, and draft another. STOP_AFTER: take it as the last one. STOP_BEFORE: do
    not take it.
    """

    GO_ON = "go on"
    STOP_AFTER = "stop after"
    STOP_BEFORE = "stop before"


GoesOn = Callable[[Sequence[Evidence]], Step]
"""Decides from the evidence of a draft's positions so far, the present one's last."""


@dataclass(frozen=True)
class Draft:
    """Proposed continuation of the text, K tokens; an empty one makes the round plain decoding.

    tokens: [K] token ids, a sequence of ints, or an `mx.array` where they are not computed yet.
    logprobs: [K, V] float32 log-probabilities of the distribution that each token was *drawn
        from*, captured while drafting and normalised; None for a point mass, that is when the
        drafter would always propose these very tokens.
        Among siblings, of a token *given those before it*: the same row for independent draws, a
        row without the earlier tokens, renormalised, for draws without replacement.
    evidence: optional [K] what speaks for each token; a plain int is `Evidence.match`. The
        automatic draft length learns how often tokens with the like of it are accepted; no
        acceptance rule reads it.
    parents: None for a chain, where each token follows the one before it. For a tree, [K] index of
        each token's parent among these tokens, `ROOT` for those that continue the text itself;
        parents stand before their children.
    """

    tokens: Sequence[int] | mx.array = ()
    logprobs: Float[mx.array, "k vocab"] | None = None
    evidence: Sequence[Evidence | int] | None = None
    parents: Sequence[int] | None = None

    def __len__(self) -> int:
        """K."""
        return len(self.tokens)

    @cached_property
    def probs(self) -> Float[mx.array, "k vocab"] | None:
        """exp of `logprobs`."""
        return None if self.logprobs is None else mx.exp(self.logprobs)

    @property
    def match(self) -> int:
        """The first token's match, by which drafts are compared where nothing is learned."""
        first = self.evidence[0] if self.evidence else 0
        return first.match if isinstance(first, Evidence) else first

    def head(self, num_tokens: int) -> Draft:
        """The first `num_tokens` of it; of a tree too, since parents stand before children."""
        if num_tokens >= len(self):
            return self
        return Draft(
            tokens=self.tokens[:num_tokens],
            logprobs=None if self.logprobs is None else self.logprobs[:num_tokens],
            evidence=None if self.evidence is None else self.evidence[:num_tokens],
            parents=None if self.parents is None else self.parents[:num_tokens],
        )

    def first_chain(self) -> Draft:
        """The chain of first children, for what verifies chains alone; a chain is its own.

        Which tokens are in it does not depend on what they are, so those drawn at random stay
        distributed as `logprobs` says.
        """
        if self.parents is None:
            return self
        nodes, tokens = first_path(self.parents), self.tokens
        return Draft(
            tokens=tokens[mx.array(nodes)]
            if isinstance(tokens, mx.array)
            else [tokens[i] for i in nodes],
            logprobs=None if self.logprobs is None else self.logprobs[mx.array(nodes)],
            evidence=None if self.evidence is None else [self.evidence[i] for i in nodes],
        )


NO_DRAFT = Draft()
"""An empty draft: the round is plain decoding."""


@dataclass(slots=True)
class RoundRecord:
    """One round as it happened.

    drafted, accepted, emitted: numbers of tokens; emitted = accepted + 1 unless the round was cut
        short by max_tokens. tokens: the emitted ones. fed: positions that the pass computed.
    seconds: from the reading of the round before to this one's, all that the round cost.
    draft_seconds, verify_seconds: host time spent in proposing, and in launching the pass and
        waiting for it (a draft model's lazy steps run inside verify).
    steady: whether the round was launched and read in the same mode, and the caller was not busy
        with its tokens for most of the time. Only such a round's seconds are those of one pass; at
        a change of mode some backends count two, and then next to none.
    ahead: whether it was launched before the round before it was read, in pipelined mode.
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
    """The generation that a drafter drafts for, as far as it may know it.

    sampling: the distribution that target tokens are drawn from, or None when the caller gave an
        opaque sampler. A drafter that draws at random must draw from its logits under this same
        sampling.
    noise: the generation's source of randomness, keyed by purpose and position. coupled: whether
        drafts are to be drawn from the noise of the target's own draws (rule "coupled").
    logits_processors: the target's processors, in order; (tokens [n], logits [1, V]) -> logits.
    vocab_size: V.
    tokenizer: the target's tokenizer where the caller has one, else None.
    draft_cache: caches for a draft model that the caller wants used and kept in step, or None.
    prefill_step_size: most positions of the prompt to process at a time.
    target_caches: what the target has read, for drafters that run layers of its own; None where
        several texts are written at once.
    """

    sampling: Sampling | None = None
    noise: Noise | None = None
    coupled: bool = False
    logits_processors: Sequence[LogitsProcessor] = ()
    vocab_size: int | None = None
    tokenizer: Any = None
    draft_cache: list[Any] | None = None
    prefill_step_size: int = 2048
    target_caches: TargetCaches | None = None

    def draft_gumbel(self, start: int, index: int) -> Float[mx.array, " vocab"]:
        """Standard Gumbel noise [V] for drawing token `index` of a draft.

        start: number of tokens emitted before the draft. Keyed by both, so that no later draft is
        drawn from noise that had a say in an earlier verdict: a `start` that comes again after a
        verdict biases the text (`check_drafter` sees it). Under the coupled rule, where the draft
        has no say in what is emitted, it is the target's own noise at that position.

        Of a tree each node has an `index` of its own, siblings too, whatever their depth (coupled:
        its depth): they are then drawn independently, and each declares the distribution at its
        place. Siblings that are to differ are the largest few of log q + one row, and declare q
        without those before.
        """
        assert self.noise is not None
        assert self.vocab_size is not None
        return self.noise.gumbel(*self._place(start, index), self.vocab_size)

    def draft_gumbels(self, start: int, n: int, first: int = 0) -> Float[mx.array, "n vocab"]:
        """The noise of n tokens of a draft from `first` on, one row each, in fewer operations."""
        assert self.noise is not None
        assert self.vocab_size is not None
        places = [self._place(start, index) for index in range(first, first + n)]
        return self.noise.gumbels(places, self.vocab_size)

    def _place(self, start: int, index: int) -> tuple[str, int]:
        """Purpose and position that key the noise of a draft's token."""
        return ("target", start + index) if self.coupled else (f"draft {index}", start)


@runtime_checkable
class DraftSession(Protocol):
    """All that a drafter changes in the course of one generation.

    What is observed after a proposal begins with the part of it that was accepted. Optional
    members: `Cheap`, `SessionParts`, `SeesTarget`, `Forks`, `Closes`.
    """

    def propose(self, limit: int) -> Draft:
        """Continue what was observed so far with 0 to `limit` tokens; `limit` >= 0."""
        ...

    def observe(self, tokens: Sequence[int]) -> None:
        """Take the tokens really emitted since the last call; rewind or learn by itself."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """Frozen configuration of a way to draft; reusable and shareable between generations.

    Optional members: `Keyed`, `Checks`, `DrafterParts`, `RunsModel`, `ReadsTarget`.
    """

    def begin(self, prompt: Sequence[int], context: DraftContext) -> DraftSession:
        """Start a generation after `prompt` [n] token ids, before the target has read it."""
        ...
