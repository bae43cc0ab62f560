"""The contracts between the parts: what a drafter hands over, what a rule returns.

A drafter proposes, the target scores K+1 positions in one pass, a rule decides how many to keep.
Throughout, K is the number of draft tokens in a round and V the target's vocabulary size.

Who writes a drafter needs `Drafter`, `DraftSession` and `Draft`; who writes a rule,
`AcceptanceRule`, `TargetRows` and `Verdict`. What either may add stands at the end, as protocols
with their defaults.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import mlx.core as mx
import mlx.nn as nn
from jaxtyping import Float, Integer

if TYPE_CHECKING:
    from specdec_mlx.sampling.distribution import Sampling
    from specdec_mlx.sampling.noise import Noise
    from specdec_mlx.target.rollback import Rollback

LogitsProcessor = Any  # mlx-lm's: (tokens [n], logits [1, V]) -> logits [1, V]
Origin = Literal["draft", "correction", "bonus", "plain"]

ROOT = -1
"""Parent of a draft token that continues the text itself."""


class Evidence(NamedTuple):
    """What speaks for one draft token, as far as its drafter knows.

    No acceptance rule reads it; it only helps to choose how many tokens to draft.

    match: how many tokens of the text the draft was found by, or another strength >= 0 of the
        drafter's own; 0: nothing known.
    after_one, after_two: how regularly this token has followed the one, the two tokens before it,
        a class out of `drafters.evidence.share_class`; 0: nothing known.
    """

    match: int = 0
    after_one: int = 0
    after_two: int = 0


@dataclass(frozen=True)
class Draft:
    """Proposed continuation of the text, K tokens; an empty one makes the round plain decoding.

    tokens: [K] token ids, a sequence of ints, or an `mx.array` where they are not computed yet.
    logprobs: [K, V] float32 log-probabilities of the distribution that each token was *drawn
        from*, captured while drafting and normalised; None for a point mass, that is when the
        drafter would always propose these very tokens.
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


@dataclass(slots=True)
class Outcome:
    """What one round brought, known to the host.

    kept: indices of the draft tokens that were kept, from the root down; `range(n)` for a chain.
    tokens: [n + 1] what is emitted, the kept tokens and the one after them; fewer where the loop
        has cut them at max_tokens.
    """

    kept: Sequence[int]
    tokens: list[int]

    @property
    def num_accepted(self) -> int:
        """How many draft tokens were kept, n."""
        return len(self.kept)


NO_DRAFT = Draft()
"""An empty draft: the round is plain decoding."""


@dataclass(frozen=True)
class Verdict:
    """What a rule decided about one draft.

    num_accepted: n, how many draft tokens are kept, 0 <= n <= K; scalar int array.
    next_token: the token after them, drawn from the target (after a whole chain the bonus token,
        else the correction); scalar int array.
    nodes: for a tree, [K] ints whose first n are the kept tokens, from the root down; None for a
        chain, which keeps its first n.
    """

    num_accepted: Integer[mx.array, ""]
    next_token: Integer[mx.array, ""]
    nodes: Integer[mx.array, " k"] | None = None

    def arrays(self) -> dict[str, mx.array]:
        """What has to be read to know the outcome."""
        numbers = {"verdict": mx.stack([self.num_accepted, self.next_token.astype(mx.int32)])}
        return numbers if self.nodes is None else {**numbers, "nodes": self.nodes}

    @staticmethod
    def outcome(numbers: Mapping[str, Any], drafted: Sequence[int]) -> Outcome:
        """The outcome, from what was read and the draft's tokens [K]."""
        n, next_token = numbers["verdict"]
        kept = numbers["nodes"][:n] if "nodes" in numbers else range(n)
        return Outcome(kept, [*(drafted[i] for i in kept), next_token])


@dataclass(frozen=True)
class Agreement:
    """Verdict of a rule that keeps a chain as far as it equals the target's own tokens.

    The comparison is made on the host: the fewer small operations wait behind a pass, the better.

    target_tokens: [K+1] the target's own draw at each position.
    """

    target_tokens: Integer[mx.array, " k+1"]

    def arrays(self) -> dict[str, mx.array]:
        """What has to be read to know the outcome."""
        return {"target_tokens": self.target_tokens}

    @staticmethod
    def outcome(numbers: Mapping[str, Any], drafted: Sequence[int]) -> Outcome:
        """The outcome, from what was read and the draft's tokens [K]."""
        own = numbers["target_tokens"]
        n = 0
        while n < len(drafted) and drafted[n] == own[n]:
            n += 1
        return Outcome(range(n), own[: n + 1])


class TargetRows(Protocol):
    """The target at the K+1 positions of a round, as a rule sees it; all of it lazy.

    Row 0 follows the text, row i + 1 the draft token i.
    """

    @property
    def greedy(self) -> bool:
        """Whether all mass lies on the argmax (temperature 0)."""
        ...

    @property
    def has_distribution(self) -> bool:
        """Whether `probs` is known; not so for a sampler that can only be called."""
        ...

    @property
    def logprobs(self) -> Float[mx.array, "rows vocab"]:
        """Log-probabilities after the logits processors, before temperature and filters."""
        ...

    @property
    def probs(self) -> Float[mx.array, "rows vocab"]:
        """The distribution that the next token is drawn from, float32; a one-hot if greedy."""
        ...

    @property
    def tokens(self) -> Integer[mx.array, " rows"]:
        """The target's own draw at each row, from the noise of that position."""
        ...


class Randomness(Protocol):
    """What a rule may draw with in one round, independent of the draft's own noise."""

    def uniform(self, n: int) -> Float[mx.array, " n"]:
        """Numbers in [0, 1), one for each draft token's coin."""
        ...

    def gumbel(self, vocab: int) -> Float[mx.array, " vocab"]:
        """Standard Gumbel noise for the token after the kept ones."""
        ...


@runtime_checkable
class AcceptanceRule(Protocol):
    """Pure decision about a draft: knows no model, no cache, and holds no state.

    `rules.coins.CoinRule` is a base for rules that decide token by token, `rules.match.Match` is
    the simplest rule of all. Optional members: `NeedsNoDistribution`, `SharesNoise`.
    """

    @property
    def name(self) -> str:
        """What `rule=` calls it."""
        ...

    def decide(
        self, target: TargetRows, draft: Draft, randomness: Randomness
    ) -> Verdict | Agreement:
        """What is kept of a draft of at least one token, and what follows.

        Args:
            target: the target at K+1 positions; where it is greedy, `target.probs` is a one-hot,
                and a rule that is exact answers `Agreement(target.tokens)`.
            draft: K tokens, as an `mx.array` that need not be computed yet.
            randomness: all that the rule may draw with.
        """
        ...


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


@dataclass(frozen=True)
class DraftContext:
    """What a drafter may know about the generation that it drafts for.

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

    What is observed after a proposal begins with the part of it that was accepted. Optional
    members: `Cheap`, `SessionParts`, `SeesTarget`, `Closes`.
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


class PendingPass(Protocol):
    """A pass of the target that is under way.

    draft: what it verifies. num_fed: positions that it computes. logprobs: [K+1, V] the target's
    log-probabilities, processed, before temperature and filters, as mlx-lm reports them. features:
    rows of the fed positions for a drafter that reads the target; None if nobody asked.
    """

    draft: Draft
    num_fed: int
    logprobs: Any
    features: FeatureRows | None

    @property
    def next_token(self) -> Any:
        """Token after an empty draft, uint32 [1], not computed yet."""
        ...

    def wait(self) -> None:
        """Wait until it is computed."""
        ...

    def read(self) -> Outcome:
        """What was kept and what is emitted; the only host synchronisation of a round."""
        ...


class Target(Protocol):
    """The target of one generation, as the loop sees it: it verifies drafts and can go back."""

    @property
    def rollback(self) -> Rollback:
        """Its caches, and how many positions of the text they hold."""
        ...

    def launch(
        self,
        pending: Sequence[int] | mx.array,
        draft: Draft,
        position: int,
        embeddings: mx.array | None = None,
    ) -> PendingPass:
        """Start a pass over the pending tokens, at least one, and a draft.

        Args:
            pending: tokens of the text that are not in the caches yet.
            draft: what to verify after them; may be empty.
            position: index of the next token among those generated.
            embeddings: of the pending tokens, [S, D], if the caller gave any.
        """
        ...

    def feed(self, tokens: mx.array, embeddings: mx.array | None = None) -> mx.array:
        """One pass for the caches alone; logits [S, V], lazy."""
        ...

    def extend_history(self, tokens: Sequence[int] | mx.array) -> None:
        """Add tokens of the text to what logits processors see."""
        ...

    def vocab_size(self) -> int:
        """V."""
        ...

    def widest_pass(self) -> int | None:
        """Most positions that the next pass may have; None for any number."""
        ...

    def quantize(self) -> None:
        """Replace caches by quantized ones, if that was asked for and is due."""
        ...


@runtime_checkable
class Tappable(Protocol):
    """A target whose states can be read; default: it cannot be read."""

    def tap(self, wanted: Features) -> None:
        """Have every pass from now on bring these features."""
        ...

    def fed_features(self) -> tuple[FeatureRows, int]:
        """Rows of the latest `feed`, and how many positions it had."""
        ...


# What a drafter may add -------------------------------------------------------------------------


@runtime_checkable
class Keyed(Protocol):
    """A drafter with an identity of its own; default: its class and options, see `key_of`."""

    @property
    def key(self) -> str:
        """What its costs and acceptance are remembered under: content and options that matter.

        Two drafters that behave differently must not share a key; a wrapper passes on the key of
        what it wraps.
        """
        ...


@runtime_checkable
class Checks(Protocol):
    """A drafter that may refuse a target; default: it takes any."""

    def check(self, context: DraftContext) -> None:
        """Raise a ValueError, before anything is computed, if it cannot draft for this target."""
        ...


@runtime_checkable
class DrafterParts(Protocol):
    """A drafter made of others; default: it has no parts."""

    @property
    def drafters(self) -> Sequence[Drafter]:
        """What it is made of."""
        ...


@runtime_checkable
class RunsModel(Protocol):
    """A drafter that runs a model of its own; default: it runs none."""

    @property
    def model(self) -> nn.Module:
        """The model, whose memory is kept wired while it drafts."""
        ...


@dataclass(frozen=True)
class Features:
    """What of the target's passes a drafter wants to read, or a part of what it gets.

    As a wish (`ReadsTarget.features`): layers: indices of decoder layers whose outputs are wanted.
    head_input: whether the state after the final norm is. top: how many of the likeliest tokens.
    """

    layers: tuple[int, ...] = ()
    head_input: bool = False
    top: int = 0


@dataclass(frozen=True)
class FeatureRows:
    """Rows of the target's passes at n positions in the text, one after the other; all lazy.

    layers: index of the layer -> its output, [n, D]. head_input: [n, D], state after the final
    norm. top_tokens: [n, top] the likeliest next tokens, the likeliest first.
    """

    layers: Mapping[int, mx.array]
    head_input: mx.array | None = None
    top_tokens: mx.array | None = None

    def rows(self, indices: Sequence[int]) -> FeatureRows:
        """Some of the rows, in this order."""
        ids = mx.array(list(indices), mx.int32)
        return FeatureRows(
            layers={layer: states[ids] for layer, states in self.layers.items()},
            head_input=None if self.head_input is None else self.head_input[ids],
            top_tokens=None if self.top_tokens is None else self.top_tokens[ids],
        )


@runtime_checkable
class ReadsTarget(Protocol):
    """A drafter that reads the target's states; default: it reads none. See `SeesTarget`."""

    @property
    def features(self) -> Features:
        """What its sessions want to see."""
        ...


# What a session may add -------------------------------------------------------------------------


@runtime_checkable
class Cheap(Protocol):
    """A session that says what asking it costs; default: asking costs time."""

    @property
    def cheap(self) -> bool:
        """Whether proposing is microseconds of host work whose result may be thrown away.

        The loop then looks for a draft while a pass runs.
        """
        ...


@runtime_checkable
class SessionParts(Protocol):
    """A session made of others, asked in its place, in order, until one has a draft."""

    @property
    def parts(self) -> Sequence[DraftSession]:
        """The sessions, in order; default: the session itself."""
        ...


@runtime_checkable
class SeesTarget(Protocol):
    """A session that reads the target's states; default: it is shown none."""

    def see(self, features: FeatureRows) -> None:
        """Take the rows of further positions of the text, before they are observed.

        The prompt's rows come chunk by chunk during prefill, later ones after each verdict, only
        those of positions that were kept.
        """
        ...


@runtime_checkable
class Closes(Protocol):
    """A session that wants to know of the end; default: it is dropped."""

    def close(self, length: int) -> None:
        """The end: the first `length` tokens of prompt + observed are all that the caller has."""
        ...


@runtime_checkable
class TimesRounds(Protocol):
    """A draft length that learns from seconds; default: it does not ask for any.

    With a caller who is slow with its tokens, what a pass takes is hidden behind that. The loop
    then waits for a pass, before it hands out tokens, where this says that its time is wanted.
    """

    def wants_timing(self, num_drafted: int) -> bool:
        """Whether the seconds of a round that drafted so many tokens are needed now."""
        ...


# What a rule may add ----------------------------------------------------------------------------


@runtime_checkable
class NeedsNoDistribution(Protocol):
    """A rule that works with samplers and processors that can only be called.

    Default: a rule reads `TargetRows.probs`, and such samplers are refused. Where rows have to be
    drawn one by one, the draft is kept as far as it equals the target's own tokens.
    """

    @property
    def needs_distribution(self) -> bool:
        """Whether it reads `TargetRows.probs` come what may."""
        ...


@runtime_checkable
class SharesNoise(Protocol):
    """A rule for drafts drawn from the noise of the target's own draws; default: independent."""

    @property
    def shares_noise(self) -> bool:
        """Whether drafters are to draw from that noise (`DraftContext.coupled`)."""
        ...


@runtime_checkable
class ChoosesRule(Protocol):
    """A rule that lets another one decide; default: it decides itself."""

    def for_draft(self, draft: Draft) -> AcceptanceRule:
        """The rule that decides about this draft where the target is not greedy."""
        ...


# Their defaults ---------------------------------------------------------------------------------


def needs_distribution(rule: AcceptanceRule) -> bool:
    """Whether a rule reads the target's distribution come what may."""
    return rule.needs_distribution if isinstance(rule, NeedsNoDistribution) else True


def shares_noise(rule: AcceptanceRule) -> bool:
    """Whether a rule wants drafts drawn from the target's own noise."""
    return rule.shares_noise if isinstance(rule, SharesNoise) else False


def rule_for(rule: AcceptanceRule, draft: Draft) -> AcceptanceRule:
    """The rule that decides about a draft where the target is not greedy."""
    return rule.for_draft(draft) if isinstance(rule, ChoosesRule) else rule


def is_cheap(session: DraftSession) -> bool:
    """Whether a proposal may be asked for and thrown away."""
    return session.cheap if isinstance(session, Cheap) else False


def session_parts(session: DraftSession) -> Sequence[DraftSession]:
    """The sessions to ask: its parts, or itself."""
    return session.parts if isinstance(session, SessionParts) else (session,)


def key_of(drafter: Drafter) -> str:
    """What costs and acceptance of a drafter are remembered under.

    Its own `key`, or else class and options: the `repr` of a dataclass, which has both.
    """
    if isinstance(drafter, Keyed):
        return drafter.key
    kind = type(drafter)
    described = repr(drafter) if hasattr(kind, "__dataclass_fields__") else kind.__qualname__
    return f"{kind.__module__}.{described}"


def all_drafters(drafter: Drafter | None) -> Iterator[Drafter]:
    """A drafter and all that it is made of, itself first; nothing for None."""
    if drafter is not None:
        yield drafter
        for part in drafter.drafters if isinstance(drafter, DrafterParts) else ():
            yield from all_drafters(part)


def models_of(drafter: Drafter | None) -> list[nn.Module]:
    """Models that run for a drafter, its parts' included, each once."""
    models = [part.model for part in all_drafters(drafter) if isinstance(part, RunsModel)]
    return list({id(model): model for model in models}.values())
