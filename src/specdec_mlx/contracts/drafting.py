"""The drafter's contract: `Drafter`, `DraftSession`, `Draft`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import mlx.core as mx
from jaxtyping import Float

from specdec_mlx.contracts.trees import ROOT as ROOT
from specdec_mlx.contracts.trees import chain, first_path

if TYPE_CHECKING:
    from specdec_mlx.sampling.distribution import Sampling
    from specdec_mlx.sampling.noise import Noise
    from specdec_mlx.verify.model_pass import ModelPass


SHARE_EDGES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.95, 1.0)
"""Lower ends of the classes of a share of the votes, or of the times that something was seen."""

PLACES_EDGES = (2, 3, 6)
"""Of the number of places that vote for a token, or of the times that it was seen."""


def share_class(share: float) -> int:
    """Class of a share, 1 to 8."""
    return 1 + bisect_right(SHARE_EDGES, share)


def places_class(num: int) -> int:
    """Class of a number of places, at least 1; 1 to 4."""
    return 1 + bisect_right(PLACES_EDGES, num)


LogitsProcessor = Any  # mlx-lm's: (tokens [n], logits [1, V]) -> logits [1, V]


Origin = Literal["draft", "correction", "bonus", "plain"]


class Evidence(NamedTuple):
    """Evidence for one draft token; no rule reads it, it only helps to choose how many to draft.

    match: length of the match, or another strength >= 0 of the drafter's own; 0: nothing known.
    share, places: share of the votes, and number of voters, as classes of this module; 0:
    nothing known. rank: place among the tokens proposed after the same ones. confidence: largest
    probability of the draft model here, known before the draw; None: nothing known. is_drawn: it is
    drawn, and not the likeliest. is_free: no step was run for it.
    """

    match: int = 0
    share: int = 0
    places: int = 0
    rank: int = 0
    confidence: float | None = None
    is_drawn: bool = False
    is_free: bool = False


class Step(Enum):
    """Decision at one position of a draft, its draw unseen: go on, stop after or before it."""

    GO_ON = "go on"
    STOP_AFTER = "stop after"
    STOP_BEFORE = "stop before"


GoesOn = Callable[[Sequence[Evidence]], Step]
"""Decides from the evidence of a draft's positions so far, the present one's last."""


@dataclass(frozen=True)
class Draft:
    """Proposed continuation of the text, K tokens; an empty one makes the round plain decoding.

    tokens: [K] token ids, a sequence of ints, or an `mx.array` where not computed yet. logprobs:
    [K, V] float32 log-probabilities of the distribution that each token was *drawn from*, captured
    while drafting and normalised; None for a point mass, when the drafter would always propose
    these very tokens. Among siblings, of a token given those before it: the same row for
    independent draws, a row without the earlier tokens, renormalised, without replacement.
    evidence: [K] what speaks for each token; an int is `Evidence.match`. parents: None for a chain;
    for a tree [K] index of each token's parent, `ROOT` for those that continue the text, parents
    before children.
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
    def tree(self) -> Sequence[int]:
        """`parents`, of a chain too; [K]."""
        return chain(len(self)) if self.parents is None else self.parents

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

        Which tokens are in it does not depend on what they are, so drawn ones stay distributed as
        declared.
        """
        if self.parents is None:
            return self
        return self._some(first_path(self.parents))

    def until(self, ends: Set[int]) -> Draft:
        """Without what continues a token of `ends`; its tokens have to be known.

        A drawn token may decide about those after it, which then were as good as never drawn.
        """
        places = {ROOT: ROOT}  # node -> its place among those that stay
        for node, parent in enumerate(self.tree):
            if parent in places and (parent == ROOT or self.tokens[parent] not in ends):
                places[node] = len(places) - 1
        if self.parents is None:
            return self.head(len(places) - 1)
        _, *nodes = places
        return self._some(nodes, [places[self.parents[node]] for node in nodes])

    def _some(self, nodes: list[int], parents: Sequence[int] | None = None) -> Draft:
        tokens = self.tokens
        return Draft(
            tokens=tokens[mx.array(nodes)]
            if isinstance(tokens, mx.array)
            else [tokens[i] for i in nodes],
            logprobs=None if self.logprobs is None else self.logprobs[mx.array(nodes)],
            evidence=None
            if self.evidence is None
            else [self.evidence[i] for i in nodes],
            parents=parents,
        )


NO_DRAFT = Draft()  # an empty draft: the round is plain decoding


@dataclass(slots=True)
class RoundRecord:
    """One round as it happened.

    drafted, accepted, emitted: tokens; emitted = accepted + 1 unless max_tokens cut the round. fed:
    positions of the pass. seconds: from the reading of the round before to this one's.
    draft_seconds, verify_seconds: host time for proposing, and for launching the pass and waiting
    (a model's lazy steps run inside verify). steady: launched and read in the same mode, the caller
    not busy for most of it; only then are the seconds those of one pass. ahead: launched before the
    round before was read. context: positions on the caches before. part: key of the draft's
    drafter, or "".
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

    @property
    def pass_seconds(self) -> float:
        """Seconds without those of drafting: those of the pass, where it is steady."""
        return self.seconds - self.draft_seconds


@dataclass(frozen=True)
class DraftContext:
    """The generation that a drafter drafts for, as far as it may know it.

    sampling: of the target's tokens, which a drafter that draws must draw under; None for an opaque
    sampler. noise: randomness, keyed by purpose and position. coupled: drafts are drawn from the
    noise of the target's own draws. logits_processors: (tokens [n], logits [1, V]) -> logits.
    draft_cache: caches for a draft model that the caller wants kept in step, or None.
    prefill_step_size: most positions of the prompt at a time. target_caches: for drafters that run
    layers of the target, how many tokens they hold (`position`) and what (`keys_values`), of which
    nothing is to be kept; None where several texts are written at once. shared_drafts: begins the
    session of a draft model or head (drafter, prompt, context) as one of several texts; None for a
    text alone. num_unseen: first positions of the prompt, of which readers of the target's states
    see nothing.
    """

    sampling: Sampling | None = None
    noise: Noise | None = None
    coupled: bool = False
    logits_processors: Sequence[LogitsProcessor] = ()
    vocab_size: int | None = None
    tokenizer: Any = None
    draft_cache: list[Any] | None = None
    prefill_step_size: int = 2048
    target_caches: ModelPass | None = None
    shared_drafts: Callable[..., Any] | None = None
    num_unseen: int = 0

    def draft_gumbel(self, start: int, index: int) -> Float[mx.array, " vocab"]:
        """Standard Gumbel noise [V] for drawing token `index` of a draft.

        start: tokens emitted before the draft. Keyed by both: a `start` that comes again after a
        verdict would draw from noise that had a say in it, and bias the text (`check_drafter` sees
        it). Under the coupled rule it is the target's own noise at that position. In a tree each
        node has an `index` of its own (coupled: its depth), for independent draws; siblings that
        are to differ are the largest few of log q + one row, and declare q without those before.
        """
        return self.draft_gumbels(start, 1, index)[0]

    def draft_gumbels(
        self, start: int, n: int, first: int = 0
    ) -> Float[mx.array, "n vocab"]:
        """The noise of n tokens of a draft from `first` on, one row each, in fewer operations."""
        assert self.noise is not None
        assert self.vocab_size is not None
        places = [
            ("target", start + index) if self.coupled else (f"draft {index}", start)
            for index in range(first, first + n)
        ]
        return self.noise.gumbels(places, self.vocab_size)


@runtime_checkable
class DraftSession(Protocol):
    """All that a drafter changes in the course of one generation.

    What is observed after a proposal begins with the part of it that was accepted.
    """

    def propose(self, limit: int) -> Draft:
        """Continue what was observed so far with 0 to `limit` tokens; `limit` >= 0."""

    def observe(self, tokens: Sequence[int]) -> None:
        """Take the tokens really emitted since the last call; rewind or learn by itself."""


@runtime_checkable
class SessionGroups(Protocol):
    """The session of a combination: not asked itself, but for the sessions that are.

    The loop asks its groups in order, until one has a draft. Of a group's cheap sessions the point
    mass worth most is taken. A session that costs time is asked only where it promises more; a
    cheap session's drawn draft is taken where no other is. See `engine.drafting`.
    """

    @property
    def parts(self) -> Sequence[tuple[str, DraftSession]]:
        """The sessions that it is made of, each with its drafter's key."""

    @property
    def groups(self) -> Sequence[Sequence[tuple[str, Session]]]:
        """Groups of sessions; itself alone, where its parts' drafts are to be one tree."""

    def observe(self, tokens: Sequence[int]) -> None:
        """Hand the tokens emitted on to all of them."""


Session = DraftSession | SessionGroups


@runtime_checkable
class Drafter(Protocol):
    """Frozen configuration of a way to draft; reusable and shareable between generations."""

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Session:
        """Start a generation after `prompt` [n] token ids, before the target has read it.

        It is a copy, to be kept if need be, and stays as it is.
        """
