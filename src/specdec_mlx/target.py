"""The target: one pass over the pending tokens and the draft, and its verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, InitVar, dataclass, field
from functools import cached_property, partial
from math import inf
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import maybe_quantize_kv_cache

from specdec_mlx.arguments import argument_error, short_repr
from specdec_mlx.caches import Rollback
from specdec_mlx.contracts import (
    NO_DRAFT,
    ROOT,
    Agreement,
    Decision,
    Draft,
    DraftContext,
    FeatureRows,
    Features,
    KeysValues,
    LogitsProcessor,
    Outcome,
    needs_distribution,
    shares_noise,
)
from specdec_mlx.errors import DraftError, LogitsError, VerdictError
from specdec_mlx.exactness.probe import MARGIN, first_inexact, kernels_around, warn_of_chains
from specdec_mlx.exactness.recurrent_states import recurrent_states_of
from specdec_mlx.exactness.ties import TieBreak, check_ties, margins, tie_bound
from specdec_mlx.kernels import Kernels, make_kernels
from specdec_mlx.kernels.contract import within
from specdec_mlx.models.anatomy import StateReader, check_readable, keys_values_of, vocab_size_of
from specdec_mlx.options import Options, check_sampler, processors_of
from specdec_mlx.rules import make_rule
from specdec_mlx.sampling import GumbelRows, Noise, Sampler, Sampling, max_window, read_sampler
from specdec_mlx.token_ids import to_ids, to_list
from specdec_mlx.trees.shape import depths_of, path_to
from specdec_mlx.trees.tree_pass import TreeLayout, takes_trees, tree_pass
from specdec_mlx.trees.tree_rules import tree_rule_for


def check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise argument_error("model", model, "a loaded model: model, tokenizer = mlx_lm.load(...)")


def check_draft(draft: Draft, vocab_size: int) -> None:
    """Raise DraftError for a draft whose faults show before anything is computed.

    These are ids that the target lacks, a distribution of another shape than [K, V], and parents
    that are no tree. `check_drafted` checks ids that are not computed yet.
    """
    tokens, parents = draft.tokens, draft.parents
    if isinstance(tokens, mx.array):
        if tokens.ndim != 1 or not mx.issubdtype(tokens.dtype, mx.integer):
            raise DraftError(
                f"The drafter proposed an array of shape {tokens.shape} and type {tokens.dtype}; "
                "expected token ids [K], integers."
            )
    elif isinstance(tokens, Sequence) and set(map(type, tokens)) <= {int}:
        check_drafted(tokens, vocab_size)
    else:
        raise DraftError(
            f"The drafter proposed a {type(tokens).__name__} that is no sequence of ints; expected "
            "one, or an mx.array of them. Use .tolist() on arrays of other libraries."
        )
    num_tokens, shape = len(tokens), getattr(draft.logprobs, "shape", None)
    is_array = isinstance(draft.logprobs, mx.array) and shape == (num_tokens, vocab_size)
    if draft.logprobs is not None and not is_array:
        raise DraftError(
            f"The drafter's distribution is a {type(draft.logprobs).__name__} of shape {shape}; "
            f"expected an mx.array [K, V] = {(num_tokens, vocab_size)}. Hand over one row a draft "
            "token."
        )
    if parents is not None and not (
        len(parents) == num_tokens and all(-1 <= parent < i for i, parent in enumerate(parents))
    ):
        raise DraftError(
            f"The drafter's parents are {list(parents)}; expected {num_tokens} indices, each of an "
            "earlier token, or -1 for the text itself."
        )


def check_drafted(tokens: Sequence[int], vocab_size: int) -> None:
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        unknown = next(token for token in tokens if not 0 <= token < vocab_size)
        raise DraftError(
            f"The drafter proposed token {unknown}; the target has 0 to {vocab_size - 1}. Use a "
            "drafter for the same tokenizer."
        )


class NextToken:
    """Turns the target's logits into a distribution, and draws tokens.

    Attributes:
        sampling: the distribution, also read off a sampler of mlx-lm's `make_sampler`. None if the
            sampler can only be called.
        by_row: rows are drawn one at a time and in order, because a sampler or processor of the
            caller's may remember its calls.
        remembers: a processor may remember its calls.
        history: tokens that processors see, on the device.
        has_failed: the logits after the text were not finite.
    """

    def __init__(
        self, sampler: Sampler | Sampling, processors: Sequence[LogitsProcessor], noise: Noise
    ) -> None:
        check_sampler(sampler)
        self.sampler = read_sampler(sampler) or sampler
        self.sampling = self.sampler if isinstance(self.sampler, Sampling) else None
        self.greedy = self.sampling is not None and self.sampling.greedy
        self.processors = processors_of(processors)
        self.noise = noise
        self.gumbels = GumbelRows(noise, "target")
        self.history: mx.array | None = None
        self.remembers = not all(map(is_pure, self.processors))
        self.by_row = self.remembers or not is_pure(self.sampler)
        self.has_failed = False
        self._window = max_window(self.processors)

    def extend_history(self, tokens: Sequence[int] | mx.array) -> None:
        if len(tokens):
            new = to_ids(tokens)
            seen = new if self.history is None else mx.concatenate([self.history, new])
            # Known processors read a bounded number of tokens, so that the history need not grow
            # with the text.
            self.history = seen if self._window is None else seen[-self._window :]

    def process(
        self, logits: mx.array, drafted: mx.array, parents: Sequence[int] | None = None
    ) -> mx.array:
        """Run pure processors over logits [K+1, V], each row after the tokens of its own path."""
        rows = []
        for i in range(logits.shape[0]):
            before = drafted[:i] if parents is None else drafted[_index(path_to(i - 1, parents))]
            rows.append(self.process_row(logits[i : i + 1], before))
        return mx.concatenate(rows)

    def process_row(self, logits: mx.array, drafted: Sequence[int] | mx.array) -> mx.array:
        """Run the processors over logits [1, V] that follow these draft tokens."""
        if self.history is None:
            return logits
        seen = mx.concatenate([self.history, to_ids(drafted)]) if len(drafted) else self.history
        for processor in self.processors:
            logits = _returned("processor", processor(seen, logits), logits.shape, mx.floating)
        return logits

    def draw(
        self, logprobs: mx.array, position: int, parents: Sequence[int] | None = None
    ) -> mx.array:
        """The target's own token [K+1] at each row of log-probabilities [K+1, V]."""
        if self.sampling is None:
            ids = [self.sampler(row[None]) for row in logprobs]  # any ints
            ids = [_returned("sampler", token, (1,), mx.integer).astype(mx.int64) for token in ids]
            return mx.concatenate(ids)
        if self.greedy:
            return mx.argmax(logprobs, axis=-1)
        if parents is None:
            return self.sampling.draw(logprobs, self.gumbels.at(position, *logprobs.shape))
        # Siblings are alternatives for one position of the text, so that they share its noise.
        depths = [0, *(depth + 1 for depth in depths_of(parents))]
        noise = self.gumbels.at(position, max(depths) + 1, logprobs.shape[-1])
        return self.sampling.draw(logprobs, noise[_index(depths)])


def _index(rows: Sequence[int]) -> mx.array:
    return mx.array(list(rows), mx.int32)


def clip_ids(ids: mx.array, vocab_size: int) -> mx.array:
    """Token ids [n] that can be fed; ids outside the vocabulary are clipped."""
    # A custom sampler may return any id. A pass launched ahead would read outside the embedding
    # before the host sees the error.
    return mx.clip(ids, 0, vocab_size - 1).astype(mx.uint32)


def _returned(by: str, returned: Any, shape: tuple[int, ...], kind: mx.DtypeCategory) -> mx.array:
    """The array that a callable of the caller's returned; ValueError for any other value."""
    if isinstance(returned, mx.array):
        if returned.shape == shape and mx.issubdtype(returned.dtype, kind):
            return returned
        returned = (returned.shape, returned.dtype)
    expected = f"an mx.array of shape {shape} and type {kind.name}"
    raise ValueError(f"The {by} returned {short_repr(returned)}; expected {expected}.")


class RoundPositions:
    """The target at the K+1 positions of a round; see `contracts.TargetRows`.

    It is made from logits that have passed the processors.
    """

    def __init__(
        self,
        logits: mx.array,
        next_token: NextToken,
        position: int,
        parents: Sequence[int] | None = None,
    ) -> None:
        self.scales = mx.logsumexp(logits, axis=-1, keepdims=True)
        self.logprobs = logits - self.scales
        self._logits = logits
        self._next_token = next_token
        self._position = position
        self._parents = parents
        self.has_distribution = next_token.sampling is not None
        self.greedy = next_token.greedy

    def each(self) -> list[mx.array]:
        """`logprobs` as K+1 arrays [1, V]."""
        # A slice of `logprobs` would keep all K+1 rows alive for as long as a caller keeps one
        # token.
        count = self.logprobs.shape[0]
        return list(map(mx.subtract, mx.split(self._logits, count), mx.split(self.scales, count)))

    @cached_property
    def probs(self) -> mx.array:
        """Float32 distribution [K+1, V] of the next token at each row."""
        sampling = self._next_token.sampling
        assert sampling is not None, "a rule that reads probs has needs_distribution"
        return sampling.distribution(self.logprobs)

    @cached_property
    def tokens(self) -> mx.array:
        """The target's own draw [K+1] at each row."""
        return self._next_token.draw(self.logprobs, self._position, self._parents)


@dataclass(frozen=True)
class RoundNoise:
    """Randomness of one round's rule, keyed by the position of its first token."""

    noise: Noise
    position: int

    def uniform(self, n: int) -> mx.array:
        """Numbers in [0, 1), one for each draft token's coin; [n]."""
        return self.noise.uniform("accept", self.position, n)

    def gumbel(self, vocab: int) -> mx.array:
        """Standard Gumbel noise for the token after the kept ones; [V]."""
        return self.noise.gumbel("next", self.position, vocab)


def is_pure(f: Any) -> bool:
    """True if calling `f` on a row that is thrown away afterwards does no harm.

    This holds for `Sampling`, for mlx-lm's samplers and processors, and for callables whose
    attribute `pure` is true.
    """
    known = getattr(f, "__module__", None) == "mlx_lm.sample_utils"
    return isinstance(f, Sampling) or known or bool(getattr(f, "pure", False))


NOT_FINITE = (
    "The target's logits for the next token are not finite. Check the weights, the dtype and the "
    "logits processors."
)


MASS_TOLERANCE = 1e-3  # most that a draft's distribution may be off from summing to 1, in float32


@dataclass
class LazyPass:
    """A pass under way whose verdict is part of the same lazy graph.

    Attributes:
        draft: the draft that it verifies.
        num_fed: positions of the pass.
        logprobs: K+1 log-probabilities [1, V] after the processors, before temperature and filters,
            as mlx-lm reports them. Each is in its own memory.
        decision: turns the numbers that `read` waits for into an outcome.
        results: small arrays that `read` waits for.
        features: states for a drafter that reads the target, or None.
        is_sampled: the caller's sampler drew the tokens, so that an id may be outside the
            vocabulary.
        tie_break: decides ties, or None.
    """

    draft: Draft
    num_fed: int
    logprobs: list[mx.array]
    decision: Decision
    results: dict[str, mx.array]
    features: FeatureRows | None = None
    is_sampled: bool = False
    tie_break: TieBreak | None = None

    @property
    def to_compute(self) -> list[mx.array]:
        """Arrays to start on the device."""
        return [*self.results.values(), *self.logprobs]

    def draw_next(self) -> mx.array:
        """The lazy token [1], uint32, that follows an empty draft."""
        tokens = self.results["target_tokens"]
        return clip_ids(tokens, self.logprobs[0].shape[-1]) if self.is_sampled else tokens

    def wait(self) -> None:
        mx.eval(*self.results.values())

    def read(self) -> Outcome:
        """Wait for the pass, and check and return its outcome."""
        vocab_size = self.logprobs[0].shape[-1]
        # The only host synchronisation of a round: all small arrays are read at once.
        mx.eval(*self.results.values())
        numbers: dict[str, Any] = dict(
            zip(self.results, map(mx.array.tolist, self.results.values()), strict=True)
        )
        drafted: Any = self.draft.tokens
        # The tokens of a lazy draft are known only now, and so is whether they exist.
        if "drafted" in numbers:
            drafted = numbers["drafted"]
            check_drafted(drafted, vocab_size)
        outcome = self.decision.outcome(numbers, drafted)
        for i, node in enumerate((ROOT, *outcome.accepted)):
            # A row of logits that holds inf or nan has a logsumexp that is not finite.
            if not math.isfinite(numbers["scales"][node + 1][0]):
                if i == 0:
                    raise LogitsError(NOT_FINITE)
                # Earlier tokens are right and are handed out. The next round begins with this row,
                # and raises.
                outcome = Outcome(outcome.accepted[:i], outcome.tokens[:i])
                break
        check_next_token(outcome.tokens[-1], vocab_size)
        if "masses" in numbers:
            check_distribution(numbers["masses"], numbers["own"])
        if self.tie_break is not None:
            return self.tie_break.decide(outcome, numbers["margins"], self.logprobs)
        return outcome


@dataclass
class StepwisePass:
    """A pass whose rows go through the caller's own callables one at a time, in order.

    Such a callable may remember its calls, so that it must see exactly the rows of the text. See
    `LazyPass` for the other fields.

    Attributes:
        logits: [K+1, V] before the processors.
        target: draws the tokens.
        position: index of the first new token among those generated.
        end_tokens: tokens that end the text; draft tokens after them are not judged.
    """

    draft: Draft
    num_fed: int
    logits: mx.array
    target: NextToken
    position: int
    end_tokens: Set[int] = frozenset()
    features: FeatureRows | None = None
    logprobs: list[mx.array] = field(default_factory=list)
    _first_row: tuple[mx.array, mx.array, mx.array] | None = None

    @property
    def to_compute(self) -> list[mx.array]:
        """Arrays to start on the device."""
        return [self.logits]

    def draw_next(self) -> mx.array:
        """The lazy token [1], uint32, that follows an empty draft. The callables see the text."""
        return clip_ids(self._row(0, [])[0], self.logits.shape[-1])

    def wait(self) -> None:
        mx.eval(self.logits)

    def read(self) -> Outcome:
        drafted = to_list(self.draft.tokens)
        drafted = drafted[: len(Draft(drafted).until(self.end_tokens))]
        check_drafted(drafted, self.logits.shape[-1])
        tokens: list[int] = []
        # Row i is right as long as draft tokens 0 to i - 1 are the tokens of the text.
        while len(tokens) <= len(drafted) and tokens == drafted[: len(tokens)]:
            row = len(tokens)
            token, bad, logprobs = self._row(row, drafted[:row])
            token_id, is_bad = to_list(mx.concatenate([token, bad]))
            if is_bad and not row:
                raise LogitsError(NOT_FINITE)
            if is_bad:  # earlier tokens are handed out first
                self.target.has_failed = True
                return Outcome(range(row), tokens)
            tokens.append(token_id)
            self.logprobs.append(logprobs)
        check_next_token(tokens[-1], self.logits.shape[-1])
        return Outcome(range(len(tokens) - 1), tokens)

    def _row(self, row: int, before: list[int]) -> tuple[mx.array, mx.array, mx.array]:
        """Token [1], flag [1] of logits that are not finite, log-probabilities [1, V]."""
        # `draw_next` has computed the first row already, and a callable must see it only once.
        if not row and self._first_row is not None:
            return self._first_row
        if self.target.has_failed:  # the round before has shown this row to the processors
            raise LogitsError(NOT_FINITE)
        logits = self.target.process_row(self.logits[row : row + 1], before)
        scale = mx.logsumexp(logits, axis=-1, keepdims=True)
        token = self.target.draw(logits - scale, self.position + row)
        result = token, ~mx.isfinite(scale[0]).astype(mx.bool_), logits - scale
        self._first_row = self._first_row or result
        return result


def check_next_token(token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise VerdictError(
            f"The next token is {token}; the target has 0 to {vocab_size - 1}. Have your own "
            "sampler or rule draw it from the target's rows."
        )


def check_distribution(masses: Sequence[float], token_logprobs: Sequence[Sequence[float]]) -> None:
    """Raise DraftError for a distribution that does not sum to 1 or excludes its own token.

    Args:
        masses: [K] sums of the rows.
        token_logprobs: [K, 1] log-probability of each drawn token.
    """
    for i, (mass, (logprob,)) in enumerate(zip(masses, token_logprobs, strict=True)):
        if not (abs(mass - 1) < MASS_TOLERANCE and logprob > -math.inf):
            raise DraftError(
                f"The distribution of draft token {i} is none: it must sum to 1 and give mass to "
                "the token drawn. Hand over the log-probabilities that it was drawn from."
            )


NO_TOKENS = mx.array([], mx.uint32)


@dataclass(eq=False)
class Verifier:
    """The target of one generation: a model, its caches, and verdicts about drafts.

    Attributes:
        model: the target.
        rollback: its caches.
        options: sampler, processors, rule, and when caches are quantized.
        noise: randomness of the tokens. None for a fixed seed.
        probe: measure once whether the model is exact for several positions at once.
        next_token: draws tokens.
        end_tokens: tokens that end a text. Drafts end there.
        remembers: a logits processor may remember its calls.
        state_reader: reads states of the passes, or None.
        tie_bound: log-probabilities nearer than this are a tie. 0 if ties are not looked for.
        kernels: other kernels for passes over several rows, or None.

    Raises:
        ValueError: the rule needs a distribution, and there is none, or `ties` has no meaning.
    """

    model: nn.Module
    rollback: Rollback
    options: Options = field(default_factory=Options)
    _: KW_ONLY
    noise: InitVar[Noise | None] = None
    probe: bool = True
    state_reader: StateReader | None = field(default=None, init=False)
    kernels: Kernels | None = field(default=None, init=False)
    # first position at which wide passes are not exact, or have not been measured
    _exact_until: float = field(default=0, init=False)
    _began_at: int = field(default=0, init=False)

    def __post_init__(self, noise: Noise | None) -> None:
        self._began_at = self.rollback.position
        options, noise = self.options, noise or Noise(0, is_given=False)
        sampler, processors = options.sampler or Sampling(), options.logits_processors or ()
        self.next_token = NextToken(sampler, processors, noise)
        self.end_tokens = frozenset(getattr(options.tokenizer, "eos_token_ids", None) or ())
        self.remembers = self.next_token.remembers
        if options.kernels is not None:
            self.kernels = make_kernels(options.kernels)
        is_opaque = self.next_token.by_row or self.next_token.sampling is None
        self.rule = make_rule(options.rule, is_seeded=noise.is_given and not is_opaque)
        if is_opaque and needs_distribution(self.rule):
            raise ValueError(
                f"rule={self.rule.name!r} needs the target's distribution, and a sampler or "
                "processor of your own gives none. Leave it out, or use "
                "specdec_mlx.Sampling(...) as the sampler."
            )
        if options.ties is not None:
            check_ties(self)

    @cached_property
    def tie_bound(self) -> float:
        return 0.0 if self.options.ties is None else tie_bound(self.model, self.kernels)

    @cached_property
    def vocab_size(self) -> int:
        return vocab_size_of(self.model)

    @property
    def position(self) -> int:
        """Number of positions in the caches."""
        return self.rollback.position

    def tap(self, wanted: Features) -> None:
        """Read these features in every later pass. Raises UnreadableError."""
        for index in wanted.caches:
            check_readable(self.rollback.caches, index)
        self.state_reader = StateReader(self.model, wanted, self.keys_values)

    def keys_values(self, index: int) -> KeysValues:
        """Present contents of a cache. UnreadableError if it has no keys and values."""
        return keys_values_of(self.rollback.caches, index)

    def fed_features(self) -> tuple[FeatureRows, int]:
        """Features of the latest pass, and its number of positions."""
        assert self.state_reader is not None
        assert self.state_reader.features is not None, "asked for rows before a pass"
        return self.state_reader.features, self.state_reader.num_rows

    def extend_history(self, tokens: Sequence[int] | mx.array) -> None:
        if self.next_token.processors:
            self.next_token.extend_history(tokens)

    def show_end(self, logprobs: mx.array) -> None:
        """Show processors a text that has ended. `logprobs` [1, V] may be any."""
        self.next_token.process_row(logprobs, ())

    def draft_context(self, tokenizer: Any, draft_cache: list[Any] | None) -> DraftContext:
        return DraftContext(
            sampling=self.next_token.sampling,
            noise=self.next_token.noise,
            coupled=shares_noise(self.rule),
            logits_processors=[f for f in self.next_token.processors if is_pure(f)],
            vocab_size=self.vocab_size,
            tokenizer=tokenizer,
            draft_cache=draft_cache,
            prefill_step_size=self.options.prefill_step_size,
            target_caches=self,
        )

    def feed(
        self,
        tokens: mx.array,
        embeddings: mx.array | None = None,
        parents: Sequence[int] | None = None,
        *,
        in_round: bool = False,
    ) -> mx.array:
        """Run one pass over tokens [S]. Returns lazy logits [S, V].

        Args:
            tokens: [S] ids.
            embeddings: [S, D] to feed in place of the tokens.
            parents: [K] parents of the last K tokens, if they are a tree.
            in_round: the pass verifies. From the first wide one on, recurrences go step by step, as
                in plain decoding.
        """
        if in_round and self.probe and tokens.shape[0] > 1:
            # Found once for each model. A prefill does not need the states, and goes faster
            # without.
            self.rollback.states = recurrent_states_of(self.model)
        if self.options.kv_bits is not None:
            self.quantize()
        how: dict[str, Any] = {}
        if parents is not None:
            rows = TreeLayout.after(tokens.shape[0] - len(parents), parents)
            how["call"] = partial(tree_pass, rows=rows)
        if embeddings is not None:
            how["input_embeddings"] = embeddings[None]
        forward = partial(self.rollback.forward, self.model, tokens, **how)
        if self.kernels is not None and in_round:
            width, on_trees = tokens.shape[0], parents is not None
            forward = partial(within, self.kernels_around(width, on_trees), forward)
        return forward() if self.state_reader is None else self.state_reader.read(forward)

    def kernels_around(self, rows: int, on_trees: bool = False) -> AbstractContextManager[object]:
        """The kernels around a pass over this number of rows."""
        end = self.rollback.end
        return kernels_around(self.kernels, self.model, rows, end, on_trees, probe=self.probe)

    @property
    def must_quantize(self) -> bool:
        """True if a cache is to be quantized before the next pass."""
        bits, start = self.options.kv_bits, self.options.quantized_kv_start
        # As in mlx-lm, a first pass takes the caches as they are.
        has_fed = self.rollback.position > self._began_at
        caches = self.rollback.caches if bits and has_fed else ()
        return any(hasattr(cache, "to_quantized") and cache.offset >= start for cache in caches)

    def quantize(self) -> None:
        """Quantize the caches that are long enough, in the caller's list. Call after a rollback."""
        if self.must_quantize:
            how = self.options
            maybe_quantize_kv_cache(
                self.rollback.caches, how.quantized_kv_start, how.kv_group_size, how.kv_bits
            )

    def measure_width(self) -> int | None:
        """Most positions of the next pass. None for any number.

        The model is measured when the text comes near a position at which it may change. No pass
        may reach across `quantized_kv_start`, where plain decoding begins to quantize.
        """
        limits: list[float] = [self.rollback.widest_pass() or inf]
        if self.probe and self._exact_until < inf:
            end = self.rollback.end
            if end + MARGIN >= self._exact_until:
                until = first_inexact(self.model, end)
                self._exact_until = inf if until is None else until
            limits.append(max(1, self._exact_until - end))
        if self.options.kv_bits is not None and not self.must_quantize:
            start = self.options.quantized_kv_start
            limits += [
                max(1, start - cache.offset)
                for cache in self.rollback.caches
                if hasattr(cache, "to_quantized")
            ]
        limit = min(limits)
        return None if limit == inf else int(limit)

    @cached_property
    def tree_rule(self) -> Any:
        return tree_rule_for(self.rule)

    def takes_trees(self) -> bool:
        """True if one pass can verify a tree now. Warns once for each model if not."""
        can_judge = self.tree_rule is not None and not self.next_token.by_row
        if not (self.probe and can_judge) or self.options.ties is not None:
            return False
        end = self.rollback.end
        if takes_trees(self.rollback) and first_inexact(self.model, end, on_trees=True) is None:
            return True
        if self.state_reader is None:
            warn_of_chains(self.model)
        return False

    def launch(
        self,
        pending: Sequence[int] | mx.array,
        draft: Draft,
        position: int,
        embeddings: mx.array | None = None,
    ) -> LazyPass | StepwisePass:
        """Start a round: feed the pending tokens and the draft, and let the device run.

        A tree that cannot be verified here is cut to a chain.

        Args:
            pending: [n] ids, uint32 if they are an array; at least one.
            draft: K tokens, possibly none.
            position: index of the next token among those generated.
            embeddings: [S, D] of the pending tokens, or None.

        Raises:
            DraftError: the draft is malformed. Nothing was fed.
        """
        fed = pending if isinstance(pending, mx.array) else mx.array([*pending], mx.uint32)
        num_fed, num_drafted, drafted = fed.shape[0], 0, NO_TOKENS
        rows: list[FeatureRows] = []
        if len(draft.tokens):
            draft = self.checked(draft)
            drafted, num_drafted = self.drafted_ids(draft), len(draft.tokens)
            num_fed += num_drafted
        # Pending tokens that do not fit into one exact pass are fed before it. The draft stays in
        # one pass with at least one pending token, whose row judges the first draft token.
        # Under `ties` a pass without a draft is plain.
        most = 1 if self.tie_bound and not num_drafted else num_fed
        while fed.shape[0] > 1 and (room := min(most, self.measure_width() or most)) < len(fed):
            self.feed(fed[:room], in_round=True)
            if self.state_reader is not None:
                rows.append(self.fed_features()[0])
            fed = fed[room:]
        if num_drafted:
            # Taken after the early pending tokens, so that a rejection replays as little as
            # possible.
            self.rollback.checkpoint()
            fed = mx.concatenate([fed, drafted])
        logits = self.feed(fed, embeddings, draft.parents, in_round=True)
        # Row -K-1 follows the last pending token. The other K rows follow the draft tokens.
        pass_ = self.judge(logits[-num_drafted - 1 :], draft, drafted, position, num_fed)
        if isinstance(pass_, LazyPass) and "margins" in pass_.results:
            start = self.rollback.position - fed.shape[0]
            pass_.tie_break = TieBreak(self, self.tie_bound, start, fed, position)
        to_compute = pass_.to_compute
        if self.state_reader is not None:
            features, _ = self.fed_features()
            pass_.features = features = FeatureRows.joined([*rows, features]) if rows else features
            if features.top_tokens is not None:
                to_compute.append(features.top_tokens)
        # Start the device and return. Only `read` waits.
        mx.async_eval(to_compute)
        return pass_

    def judge(
        self, logits: mx.array, draft: Draft, drafted: mx.array, position: int, num_fed: int
    ) -> LazyPass | StepwisePass:
        """Judge the draft from logits [K+1, V], lazily."""
        target = self.next_token
        if target.by_row:
            return StepwisePass(draft, num_fed, logits, target, position, self.end_tokens)
        if target.processors:
            logits = target.process(logits, drafted, draft.parents)
        rows = RoundPositions(logits, target, position, draft.parents)
        results = {"scales": rows.scales}
        if not len(draft.tokens):
            results["target_tokens"] = rows.tokens
            decision: Decision = Agreement(rows.tokens)
            is_sampled = target.sampling is None
            return LazyPass(
                NO_DRAFT, num_fed, [rows.logprobs], decision, results, is_sampled=is_sampled
            )
        # The rule gets ids that exist. `read` raises later if the draft had others.
        as_ids = Draft(drafted, draft.logprobs, parents=draft.parents)
        noise = RoundNoise(target.noise, position)
        if draft.parents is None:
            decision = self.rule.decide(rows, as_ids, noise)
        else:
            assert self.tree_rule is not None, "a draft is cut to a chain without one"
            decision = self.tree_rule.decide_tree(rows, as_ids, noise)
        results |= decision.arrays()
        if isinstance(draft.tokens, mx.array):
            results["drafted"] = draft.tokens
        if draft.logprobs is not None:
            # A drafter that declares a wrong q would bias the text, so that each q is checked when
            # it is read.
            results["masses"] = mx.sum(mx.exp(draft.logprobs), axis=-1)
            results["own"] = mx.take_along_axis(draft.logprobs, drafted[:, None], axis=-1)
        if self.tie_bound:
            results["margins"] = margins(rows, position, target, self.tie_bound)
        return LazyPass(draft, num_fed, rows.each(), decision, results)

    def feed_alone(self, tokens: mx.array, before: Sequence[int], position: int) -> RoundPositions:
        """Feed the last of tokens [n] in a pass of its own, after the others. Returns its row.

        Args:
            tokens: the text's next tokens.
            before: tokens of the text that processors have not seen.
            position: index of the next token among those generated.
        """
        if tokens.shape[0] > 1:
            self.feed(tokens[:-1], in_round=True)
        logits = self.feed(tokens[-1:], in_round=True)
        return RoundPositions(
            self.next_token.process_row(logits, before), self.next_token, position
        )

    def checked(self, draft: Draft, *, may_fork: bool = True) -> Draft:
        """The draft up to its first end token, cut to a chain where it must not fork.

        Raises DraftError for a malformed draft.
        """
        check_draft(draft, self.vocab_size)
        is_known = not isinstance(draft.tokens, mx.array)
        if is_known and not self.end_tokens.isdisjoint(draft.tokens):
            draft = draft.until(self.end_tokens)
        if draft.parents is not None and not (may_fork and self.takes_trees()):
            return draft.first_chain()
        return draft

    def drafted_ids(self, draft: Draft) -> mx.array:
        """The draft's tokens as ids that exist. `read` raises for others."""
        if isinstance(draft.tokens, mx.array):
            # as uint32 a negative id is a large one
            return mx.minimum(to_ids(draft.tokens), self.vocab_size - 1)
        return mx.array([*draft.tokens], mx.uint32)
