"""The contracts between the parts: what a drafter hands over, what a rule returns.

K is the number of draft tokens in a round, and V is the target's vocabulary size. Authors of
drafters need `Drafter`, `Session` and `Draft`. Authors of rules need `AcceptanceRule`, `TargetRows`
and `Verdict`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import mlx.core as mx
import mlx.nn as nn
from jaxtyping import Float, Integer

from specdec_mlx.errors import VerdictError

if TYPE_CHECKING:
    from specdec_mlx.sampling import Noise, Sampling
    from specdec_mlx.target import Verifier


ROOT = -1  # parent of a draft token that continues the text itself


def chain(num_tokens: int) -> list[int]:
    """Parents [K] of a chain."""
    return list(range(ROOT, num_tokens - 1))


def first_path(parents: Sequence[int]) -> list[int]:
    path: list[int] = []
    for node, parent in enumerate(parents):
        if parent == (path[-1] if path else ROOT):
            path.append(node)
    return path


SHARE_EDGES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.95, 1.0)
"""Lower bounds of the classes 2 to 8 of a share of votes or of sightings."""


PLACES_EDGES = (2, 3, 6)
"""Lower bounds of the classes 2 to 4 of a number of votes or of sightings."""


def share_class(share: float) -> int:
    """Class of a share, 1 to 8."""
    return 1 + bisect_right(SHARE_EDGES, share)


def places_class(num: int) -> int:
    """Class of a number of places, 1 to 4."""
    return 1 + bisect_right(PLACES_EDGES, num)


LogitsProcessor = Any  # mlx-lm's: (tokens [n], logits [1, V]) -> logits [1, V]


Origin = Literal["draft", "correction", "bonus", "plain"]


class Evidence(NamedTuple):
    """Evidence for one draft token. It helps to choose the draft length, and no rule reads it.

    Attributes:
        match: length of the match, or another strength >= 0 of the drafter's own. 0 if unknown.
        share: class of the share of votes, by `share_class`. 0 if unknown.
        places: class of the number of voters, by `places_class`. 0 if unknown.
        rank: index among the tokens that were proposed after the same tokens.
        confidence: chance of acceptance before the draw: a head's own estimate, or else the largest
            probability of the draft model. None if unknown.
        is_drawn: the token was drawn, and is not simply the likeliest.
        is_free: no step of a model was run for this token.
    """

    match: int = 0
    share: int = 0
    places: int = 0
    rank: int = 0
    confidence: float | None = None
    is_drawn: bool = False
    is_free: bool = False


class Step(Enum):
    """Decision at one position of a draft, before its token is drawn."""

    GO_ON = "go on"
    STOP_AFTER = "stop after"
    STOP_BEFORE = "stop before"


GoesOn = Callable[[Sequence[Evidence]], Step]
"""Decides from the evidence of all positions so far. The last is the present position."""


@dataclass(frozen=True)
class Draft:
    """Proposed continuation of the text, K tokens. An empty draft means plain decoding.

    Attributes:
        tokens: [K] token ids, a sequence of ints, or an `mx.array` that may be lazy.
        logprobs: [K, V] float32 log-probabilities of the distribution that each token was *drawn
            from*, normalised and captured while drafting. None for a deterministic draft. Siblings
            that are independent draws have equal rows. Siblings drawn without replacement have
            rows without the earlier siblings, renormalised.
        evidence: [K] how good each token is. An int is `Evidence.match`.
        parents: None for a chain. For a tree, [K] index of each token's parent, with `ROOT` for a
            token that continues the text. Parents come before children.
    """

    tokens: Sequence[int] | mx.array = ()
    logprobs: Float[mx.array, "k vocab"] | None = None
    evidence: Sequence[Evidence | int] | None = None
    parents: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def probs(self) -> Float[mx.array, "k vocab"] | None:
        """exp of `logprobs`."""
        return None if self.logprobs is None else mx.exp(self.logprobs)

    @property
    def tree(self) -> Sequence[int]:
        """Parents [K], of a chain too."""
        return chain(len(self)) if self.parents is None else self.parents

    @property
    def match(self) -> int:
        """Match of the first token, by which drafts are compared before anything is learned."""
        first = self.evidence[0] if self.evidence else 0
        return first.match if isinstance(first, Evidence) else first

    def head(self, num_tokens: int) -> Draft:
        """The first `num_tokens` tokens. Part of a tree is a tree: parents come first."""
        if num_tokens >= len(self):
            return self
        return Draft(
            tokens=self.tokens[:num_tokens],
            logprobs=None if self.logprobs is None else self.logprobs[:num_tokens],
            evidence=None if self.evidence is None else self.evidence[:num_tokens],
            parents=None if self.parents is None else self.parents[:num_tokens],
        )

    def first_chain(self) -> Draft:
        """The chain of first children, for verifying chains only. A chain returns itself.

        The choice does not depend on the tokens, so drawn tokens stay distributed as declared.
        """
        if self.parents is None:
            return self
        # The path is chosen by shape only. A choice by token values would change the distribution.
        return self._some(first_path(self.parents))

    def until(self, end_tokens: Set[int]) -> Draft:
        """The draft without the tokens after an end token. The tokens must be computed.

        A drawn token may decide about later tokens, because those then count as never drawn.
        """
        new_index = {ROOT: ROOT}  # node -> its index among the nodes that stay
        for node, parent in enumerate(self.tree):
            # A node stays if its parent stays and does not end the text.
            if parent in new_index and (parent == ROOT or self.tokens[parent] not in end_tokens):
                new_index[node] = len(new_index) - 1
        if self.parents is None:
            return self.head(len(new_index) - 1)
        _, *nodes = new_index
        return self._some(nodes, [new_index[self.parents[node]] for node in nodes])

    def _some(self, nodes: list[int], parents: Sequence[int] | None = None) -> Draft:
        tokens = self.tokens
        return Draft(
            tokens=tokens[mx.array(nodes)]
            if isinstance(tokens, mx.array)
            else [tokens[i] for i in nodes],
            logprobs=None if self.logprobs is None else self.logprobs[mx.array(nodes)],
            evidence=None if self.evidence is None else [self.evidence[i] for i in nodes],
            parents=parents,
        )


NO_DRAFT = Draft()  # an empty draft: the round is plain decoding


@dataclass(slots=True)
class RoundRecord:
    """One round as it happened.

    Attributes:
        drafted, accepted: tokens.
        emitted: accepted + 1, unless max_tokens cut the round.
        fed: positions of the pass.
        seconds: from the reading of the round before to the reading of this round.
        draft_seconds: host seconds for proposing.
        verify_seconds: host seconds for launching the pass and waiting. Lazy steps of a draft model
            run inside them.
        steady: `seconds` are the time of one pass, because this pass and the next were launched in
            the same mode and the caller was away for a short time only.
        ahead: launched before the round before was read.
        context: positions in the caches before the pass.
        part: key of the draft's drafter, or "".
        tied: a plain pass decided its last token.
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
    tied: bool = False

    @property
    def pass_seconds(self) -> float:
        """Seconds without drafting. In a steady round they are the time of the pass."""
        return self.seconds - self.draft_seconds


class DrafterStates(ABC):
    """Where drafters keep their sides of conversations between generations.

    A state is a list of caches that hold the first tokens of a text. It belongs to one loaded
    model or head.
    """

    @abstractmethod
    def fetch(self, owner: nn.Module, tokens: Sequence[int]) -> tuple[list[Any] | None, int]:
        """A state that the caller may change, or None, and how many of `tokens` it holds."""

    @abstractmethod
    def store(self, owner: nn.Module, tokens: Sequence[int], caches: list[Any]) -> None:
        """Keep caches that hold exactly `tokens`. The caller gives them up."""


@dataclass(frozen=True)
class DraftContext:
    """The generation as far as a drafter may know it.

    Attributes:
        sampling: distribution of the target's tokens, under which a drafter that draws must draw.
            None for an opaque sampler.
        noise: randomness, keyed by purpose and position.
        coupled: drafts are drawn from the noise of the target's own draws.
        logits_processors: (tokens [n], logits [1, V]) -> logits [1, V].
        vocab_size: V.
        tokenizer: the target's, or None.
        draft_cache: the caller's caches for a draft model, to be kept in step with the text, or
            None.
        drafter_states: where the drafter finds and leaves its state of the conversation, or None.
        prefill_step_size: most positions of the prompt in one pass.
        target_caches: for drafters that run layers of the target: the number of tokens in the
            caches (`position`) and their contents (`keys_values`), of which nothing may be kept.
            None where several texts are generated at once.
        shared_drafts: begins the session of a draft model or head, from (drafter, prompt, context),
            as one of several texts. None for a single text.
        num_unseen: positions at the front of the prompt whose target states no reader gets.
        on_close: called by a source of logits at its end, with itself and the text [n], or None.
    """

    sampling: Sampling | None = None
    noise: Noise | None = None
    coupled: bool = False
    logits_processors: Sequence[LogitsProcessor] = ()
    vocab_size: int | None = None
    tokenizer: Any = None
    draft_cache: list[Any] | None = None
    drafter_states: DrafterStates | None = None
    prefill_step_size: int = 2048
    target_caches: Verifier | None = None
    shared_drafts: Callable[..., Session] | None = None
    num_unseen: int = 0
    on_close: Callable[[Any, Sequence[int]], None] | None = None

    def draft_gumbel(self, start: int, index: int) -> Float[mx.array, " vocab"]:
        """Standard Gumbel noise [V] for drawing token `index` of a draft.

        Under the coupled rule this is the target's own noise at that position, and `index` is the
        depth in a tree. Otherwise each node of a tree has its own `index`, for independent draws.
        Siblings that must differ are the largest few of log q + one row, and declare q without the
        siblings before them.

        start: tokens emitted before the draft.
        """
        # Keyed by both numbers. Noise that comes again after a verdict has influenced that verdict,
        # and would bias the text.
        return self.draft_gumbels(start, 1, index)[0]

    def draft_gumbels(self, start: int, n: int, first: int = 0) -> Float[mx.array, "n vocab"]:
        """Noise [n, V] of n tokens of a draft from `first` on."""
        assert self.noise is not None
        assert self.vocab_size is not None
        places = [
            # A coupled draft token must share the noise that the target will use at its own
            # position.
            ("target", start + index) if self.coupled else (f"draft {index}", start)
            for index in range(first, first + n)
        ]
        return self.noise.gumbels(places, self.vocab_size)


class Session(ABC):
    """All that a drafter changes in the course of one generation.

    A session needs only `propose` and `observe`. A class with these methods works without
    inheriting (see `duck_typed`). The tokens observed after a proposal begin with its accepted
    part.

    Attributes:
        cheap: proposing is microseconds of host work, and a draft may be thrown away.
    """

    cheap: bool = False

    @abstractmethod
    def propose(self, limit: int) -> Draft:
        """Continue the text with 0 to `limit` tokens."""

    @abstractmethod
    def observe(self, tokens: Sequence[int]) -> None:
        """Take the tokens really emitted since the last call; rewind or learn by itself."""

    def propose_while(self, limit: int, goes_on: GoesOn) -> Draft:
        """Continue the text with 0 to `limit` tokens, until `goes_on` stops it.

        Call `goes_on` at each position with the evidence so far, before the token is drawn. A token
        that is dropped because of its value would bias the text. By default it is not called.
        """
        return self.propose(limit)

    @property
    def can_stop(self) -> bool:
        """True if `propose_while` calls `goes_on`. By default, if it is overridden."""
        return type(self).propose_while is not Session.propose_while

    @property
    def forks(self) -> bool:
        """True if its drafts are trees, and trees cost it time."""
        return False

    def candidates(self, limit: int) -> Sequence[Draft]:
        """All drafts that it has, the likeliest first, for a tree; by default what it proposes."""
        return [self.propose(limit)]

    def propose_after(self, tokens: Sequence[int], limit: int) -> Draft:
        """Continue the text and `tokens`, which may not come. Note nothing of these tokens."""
        raise NotImplementedError  # `looks_ahead` says who can be called

    @property
    def looks_ahead(self) -> bool:
        """True if `propose_after` can be called; by default, if it is overridden."""
        return type(self).propose_after is not Session.propose_after

    def see(self, features: FeatureRows) -> None:  # noqa: B027  # optional
        """Take the states of further positions of the text, before those are observed.

        At the end of a text whose caches are kept, the last tokens follow after they were observed.
        The arrays are lazy. Evaluate or drop the arrays of one chunk of the prompt before the next
        chunk. By default they are dropped.
        """

    @property
    def reads_target(self) -> bool:
        """True if `see` uses the states. By default, if it is overridden."""
        return type(self).see is not Session.see

    def see_rejected(  # noqa: B027  # optional
        self, tokens: Sequence[int], features: FeatureRows
    ) -> None:
        """Take rejected draft tokens [n] and their states, after `see` took the others.

        Called if the drafter's `features` ask for rejected rows. By default they are dropped.
        """

    def close(self, length: int) -> None:  # noqa: B027  # optional
        """Called once at the end. The caller got the first `length` tokens of prompt + observed."""

    def parts(self, key: str) -> Sequence[tuple[str, Session]]:
        """The sessions that it is made of, each with its drafter's key. By default itself.

        key: key of its own drafter.
        """
        return [(key, self)]

    def groups(self, key: str) -> Sequence[Sequence[tuple[str, Session]]]:
        """The sessions to ask in its place, in groups. By default itself.

        The groups are asked in order until one has a draft. Among the deterministic drafts of a
        group's cheap sessions, the most valuable draft is taken. A session that costs time is asked
        only if it promises more. A draft that a cheap session drew is taken if there is no other.
        See `draft_length.drafting`.
        """
        return [[(key, self)]]


class TextIndex(ABC):
    """A text, indexed so that what may follow it is looked up. `LookUpSession` drafts with it.

    Attributes:
        cheap: looking up is microseconds of host work, and a draft may be thrown away.
    """

    cheap: bool = True

    @abstractmethod
    def append(self, tokens: Sequence[int]) -> None:
        """Write the text on with the tokens [n] emitted."""

    @abstractmethod
    def draft(self, limit: int, more: Sequence[int] = ()) -> Draft:
        """Look up 0 to `limit` tokens that may follow the text.

        more: tokens after the text, which may not come. Nothing is noted of these tokens.
        """

    def chains(self, limit: int) -> Sequence[Draft]:
        """All chains that may follow, the likeliest first; by default the draft alone."""
        return [self.draft(limit)]

    def see(self, features: FeatureRows) -> None:  # noqa: B027  # optional
        """Take the target's rows, as `Session.see`."""

    def see_rejected(  # noqa: B027  # optional
        self, tokens: Sequence[int], features: FeatureRows
    ) -> None:
        """Take rejected tokens [n] and their rows, as `Session.see_rejected`."""

    def close(self, length: int) -> None:  # noqa: B027  # optional
        """End the text after `length` tokens of prompt and output, as `Session.close`."""


class LookUpSession(Session):
    """One generation of a drafter that looks up what may follow in an index of the text."""

    def __init__(self, index: TextIndex) -> None:
        self.index, self.cheap = index, index.cheap

    def propose(self, limit: int) -> Draft:
        """The index's draft."""
        return self.index.draft(limit)

    def propose_after(self, tokens: Sequence[int], limit: int) -> Draft:
        """The index's draft after the text and `tokens`."""
        return self.index.draft(limit, tokens)

    def candidates(self, limit: int) -> Sequence[Draft]:
        """All chains of the index."""
        return self.index.chains(limit)

    def observe(self, tokens: Sequence[int]) -> None:
        """Write the index's text on."""
        self.index.append(tokens)

    @property
    def reads_target(self) -> bool:
        """True if the index does."""
        return type(self.index).see is not TextIndex.see

    def see(self, features: FeatureRows) -> None:
        """Hand the rows to the index."""
        self.index.see(features)

    def see_rejected(self, tokens: Sequence[int], features: FeatureRows) -> None:
        """Hand the rows to the index."""
        self.index.see_rejected(tokens, features)

    def close(self, length: int) -> None:
        """End the index's text."""
        self.index.close(length)


class Drafter(ABC):
    """Frozen configuration of a way to draft; reusable and shareable between generations.

    A drafter needs only `begin`. A class with this method works without inheriting (see
    `duck_typed`).

    Attributes:
        branches: most tokens that it proposes at a place. More than one makes trees.
        on_every_rank: run it on every machine of a target that is spread over several machines.
        drafters: the drafters that a combination is made of.
    """

    branches: int = 1
    on_every_rank: bool = False
    drafters: Sequence[Drafter] = ()

    @abstractmethod
    def begin(self, prompt: Sequence[int], context: DraftContext) -> Session:
        """Start a generation after `prompt` [n] token ids, before the target has read it.

        The prompt is a copy that the session may keep.
        """

    @property
    def key(self) -> str:
        """Name in saved measurements. By default the class and its options (`repr`)."""
        return class_and_options(self)

    @property
    def class_name(self) -> str:
        """Name in messages."""
        return type(self).__name__

    @property
    def features(self) -> Features | None:
        """Features of the target that the sessions `see`. By default none."""
        return None

    def models(self) -> Sequence[nn.Module]:
        """Models of the drafter, whose memory is kept wired. By default none."""
        return ()

    def check(self, context: DraftContext) -> None:  # noqa: B027  # optional
        """Raise a ValueError if it cannot draft for this target. Nothing is computed yet."""

    def keeps_draft_cache(self, context: DraftContext) -> bool:
        """True if its sessions keep `context.draft_cache` in step with the text.

        No other drafter of a combination gets these caches. By default False.
        """
        return False

    def describe(self) -> str:
        """A line for the user. By default "", which is not shown."""
        return ""


def class_and_options(drafter: object) -> str:
    """A drafter's module and `repr` if it is a dataclass, else module and class."""
    kind = type(drafter)
    described = repr(drafter) if hasattr(kind, "__dataclass_fields__") else kind.__qualname__
    return f"{kind.__module__}.{described}"


def all_drafters(drafter: Drafter | None) -> Iterator[Drafter]:
    """A drafter and, recursively, its parts. Nothing for None."""
    if drafter is not None:
        yield drafter
        for part in drafter.drafters:
            yield from all_drafters(part)


def models_of(drafter: Drafter | None) -> list[nn.Module]:
    models = (model for part in all_drafters(drafter) for model in part.models())
    return list({id(model): model for model in models}.values())


@dataclass(slots=True)
class Outcome:
    """Outcome of one round, known to the host.

    Attributes:
        accepted: indices of the accepted draft tokens, from the root down.
        tokens: [n + 1] emitted tokens, the last after the accepted ones; fewer if max_tokens cut
            them.
        is_tied: the last token comes from a plain pass after the round's own.
    """

    accepted: Sequence[int]
    tokens: list[int]
    is_tied: bool = False

    @property
    def num_accepted(self) -> int:
        return len(self.accepted)


class Decision(ABC):
    """Lazy answer of a rule: `Verdict`, `Agreement`, or `TreeVerdict` for a tree."""

    @abstractmethod
    def arrays(self) -> dict[str, mx.array]:
        """Arrays to read for the outcome, by name."""

    @abstractmethod
    def outcome(self, numbers: Mapping[str, Any], drafted: Sequence[int]) -> Outcome:
        """The outcome, from the numbers that were read and the draft's tokens [K]."""


@dataclass(frozen=True)
class Verdict(Decision):
    """Decision of a rule about one chain.

    Attributes:
        num_accepted: number of draft tokens accepted, 0 to K; scalar int array.
        next_token: token drawn from the target after them, the bonus token or the correction;
            scalar int array.
    """

    num_accepted: Integer[mx.array, ""]
    next_token: Integer[mx.array, ""]

    def arrays(self) -> dict[str, mx.array]:
        next_token = self.next_token.astype(mx.int32)
        return {"verdict": mx.stack([self.num_accepted, next_token])}

    @staticmethod
    def outcome(numbers: Mapping[str, Any], drafted: Sequence[int]) -> Outcome:
        (n, next_token), k = numbers["verdict"], len(drafted)
        if not 0 <= n <= k:
            raise VerdictError(
                f"The rule kept {n} tokens of a draft of {k}; expected a number from 0 to K."
            )
        return Outcome(range(n), [*drafted[:n], next_token])


@dataclass(frozen=True)
class Agreement(Decision):
    """Decision of a rule that accepts a chain as far as it equals the target's own draws.

    Attributes:
        target_tokens: [K+1] the target's draw at each row.
    """

    target_tokens: Integer[mx.array, " k+1"]

    def arrays(self) -> dict[str, mx.array]:
        return {"target_tokens": self.target_tokens}

    @staticmethod
    def outcome(numbers: Mapping[str, Any], drafted: Sequence[int]) -> Outcome:
        # Compared on the host. On the device this would add small operations to every pass.
        target_tokens = numbers["target_tokens"]
        if len(target_tokens) != len(drafted) + 1:
            raise VerdictError(
                f"The rule answered with {len(target_tokens)} tokens for a draft of "
                f"{len(drafted)}; expected the target's own token at each of the K + 1 positions."
            )
        n = 0
        while n < len(drafted) and drafted[n] == target_tokens[n]:
            n += 1
        return Outcome(range(n), target_tokens[: n + 1])


class TargetRows(Protocol):
    """The target at the K+1 positions of a round, as a rule sees it. All arrays are lazy."""

    @property
    def greedy(self) -> bool:
        """True if the argmax has all the mass (temperature 0)."""

    @property
    def has_distribution(self) -> bool:
        """True if `probs` is known. A sampler that can only be called has none."""

    @property
    def logprobs(self) -> Float[mx.array, "rows vocab"]:
        """Log-probabilities after the logits processors, before temperature and filters."""

    @property
    def probs(self) -> Float[mx.array, "rows vocab"]:
        """Float32 distribution of the next token at each row, a one-hot if greedy."""

    @property
    def tokens(self) -> Integer[mx.array, " rows"]:
        """The target's own draw at each row, from the noise of its position."""


class Randomness(Protocol):
    """Randomness of a rule in one round, independent of the draft's own noise."""

    def uniform(self, n: int) -> Float[mx.array, " n"]:
        """Numbers in [0, 1), one for each draft token's coin."""

    def gumbel(self, vocab: int) -> Float[mx.array, " vocab"]:
        """Standard Gumbel noise for the token after the accepted ones."""


@runtime_checkable
class AcceptanceRule(Protocol):
    """Pure decision about a draft. It knows no model and no cache, and has no state.

    `rules.CoinRule` is a base for rules that decide token by token, and `rules.Match` is the
    simplest rule. The functions below read optional attributes.
    """

    @property
    def name(self) -> str:
        """Name for `rule=`."""

    def decide(self, target: TargetRows, draft: Draft, randomness: Randomness) -> Decision:
        """Decide about a draft of at least one token, which may be lazy.

        Args:
            target: rows at K+1 positions. If it is greedy, `target.probs` is a one-hot, and an
                exact rule answers `Agreement(target.tokens)`.
            draft: the draft.
            randomness: the only source of randomness for the rule.
        """


def needs_distribution(rule: AcceptanceRule) -> bool:
    """`needs_distribution` of a rule: it always reads `TargetRows.probs`. True by default."""
    return getattr(rule, "needs_distribution", True)


def shares_noise(rule: AcceptanceRule) -> bool:
    """`shares_noise` of a rule: drafts are drawn from the noise of the target's own draws."""
    return getattr(rule, "shares_noise", False)


def rule_for(rule: AcceptanceRule, draft: Draft) -> AcceptanceRule:
    """`for_draft(draft)` of a rule: the rule that decides about it if the target is not greedy."""
    for_draft = getattr(rule, "for_draft", None)
    return rule if for_draft is None else for_draft(draft)


@dataclass(frozen=True)
class Features:
    """Features of the target's passes that a drafter wants to read.

    Attributes:
        layers: indices of the decoder layers whose outputs are wanted.
        head_input: the state after the final norm is wanted.
        top: number of the likeliest tokens.
        caches: indices of the target's caches, with nested ones counted one by one, whose keys and
            values are wanted.
        rejected: states of rejected draft tokens are wanted too.
    """

    layers: tuple[int, ...] = ()
    head_input: bool = False
    top: int = 0
    caches: tuple[int, ...] = ()
    rejected: bool = False


class KeysValues(NamedTuple):
    """Contents of one of the target's caches for the text read so far. Lazy.

    Attributes:
        keys, values: [1, heads, n, d], rotated, of the last n positions in any order. n covers all
            positions, or the window.
        offset: number of positions read.
    """

    keys: mx.array
    values: mx.array
    offset: int


ReadsCache = Callable[[int], KeysValues]
"""Reads one of the target's caches, by its index, as it is when it is called."""


@dataclass(frozen=True)
class FeatureRows:
    """States of the target's passes at n consecutive positions of the text. Lazy.

    Attributes:
        layers: index -> output [n, D]. Several streams of a layer are side by side [n, streams *
            D].
        head_input: [n, D].
        top_tokens: [n, top] by the raw logits, the likeliest first.
        keys_values: reads a cache, or None. Call it in `propose`, and keep nothing that it returns,
            or the next pass has to copy the cache.
    """

    layers: Mapping[int, mx.array]
    head_input: mx.array | None = None
    top_tokens: mx.array | None = None
    keys_values: ReadsCache | None = None

    def rows(self, indices: Sequence[int]) -> FeatureRows:
        """Some of the rows, in this order."""
        first = indices[0] if indices else 0
        end = first + len(indices)
        # A slice is a view. An index array copies the rows.
        is_run = list(indices) == list(range(first, end))
        which = slice(first, end) if is_run else mx.array(list(indices), mx.int32)
        return self.joined([self], lambda parts: parts[0][which])

    def only(self, wanted: Features) -> FeatureRows:
        """The wanted features, all of which must be there."""
        top = None if self.top_tokens is None else self.top_tokens[:, : wanted.top]
        return FeatureRows(
            layers={layer: self.layers[layer] for layer in wanted.layers},
            head_input=self.head_input if wanted.head_input else None,
            top_tokens=top if wanted.top else None,
            keys_values=self.keys_values if wanted.caches else None,
        )

    @classmethod
    def joined(
        cls,
        parts: Sequence[FeatureRows],
        join: Callable[[list[mx.array]], mx.array] = mx.concatenate,
    ) -> FeatureRows:
        """The rows of several passes with the same features, one pass after the other."""

        def together(arrays: Sequence[mx.array | None]) -> mx.array | None:
            there = [array for array in arrays if array is not None]
            return join(there) if there else None

        return cls(
            layers={
                layer: join([part.layers[layer] for part in parts]) for layer in parts[0].layers
            },
            head_input=together([part.head_input for part in parts]),
            top_tokens=together([part.top_tokens for part in parts]),
            keys_values=parts[-1].keys_values,
        )


MOST_WAITING = 2048  # rows that a session reads after the first token; 16 kB each, if large
MANY_WAITING = MOST_WAITING // 8  # more rows than this are read for keys and values only
