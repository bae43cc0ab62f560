"""The target's side of a round: one pass over the pending tokens and the draft, and its verdict.

With pure callables a round is one lazy graph, read by one host synchronisation. A sampler or
processor of the caller's may remember what it saw, so it is called row by row, as plain decoding
would, no further than the first rejected token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from specdec_mlx.contracts import (
    NO_DRAFT,
    ROOT,
    AcceptanceRule,
    Agreement,
    Draft,
    DraftContext,
    FeatureRows,
    Outcome,
    PendingPass,
    TreeVerdict,
    Verdict,
    needs_distribution,
    shares_noise,
)
from specdec_mlx.errors import DraftError, LogitsError, VerdictError
from specdec_mlx.rules.arithmetic import point_mass
from specdec_mlx.rules.registry import make_rule, tree_rule_for
from specdec_mlx.stats.counterfactual import Counterfactual, chances
from specdec_mlx.token_ids import read_all, to_ids, to_list
from specdec_mlx.verify.inputs import check_draft, check_drafted
from specdec_mlx.verify.model_pass import ModelPass
from specdec_mlx.verify.next_token import NextToken, RoundNoise, RoundPositions, existing, is_pure
from specdec_mlx.verify.rollback import Rollback

NO_TOKENS = mx.array([], mx.uint32)

NOT_FINITE = (
    "The target's logits for the next token are not finite. Check the weights, the dtype and the "
    "logits processors."
)
MASS_TOLERANCE = 1e-3  # most that a draft's distribution may be off from summing to 1, in float32


@dataclass
class LazyPass:
    """A round as one graph; see `contracts.PendingPass`.

    results: the small arrays that `read` waits for. is_sampled: by the caller's sampler: any ids.
    """

    draft: Draft
    num_fed: int
    logprobs: list[mx.array]
    verdict: Verdict | Agreement | TreeVerdict
    results: dict[str, mx.array]
    counterfactual: Counterfactual | None = None
    features: FeatureRows | None = None
    is_sampled: bool = False

    @property
    def to_compute(self) -> list[mx.array]:
        """The arrays that the device begins with."""
        return [*self.results.values(), *self.logprobs]

    @property
    def next_token(self) -> mx.array:
        """Token after an empty draft, not computed yet."""
        tokens = self.results["target_tokens"]
        return existing(tokens, self.logprobs[0].shape[-1]) if self.is_sampled else to_ids(tokens)

    def wait(self) -> None:
        """Wait until it is computed."""
        mx.eval(*self.results.values())

    def read(self) -> Outcome:
        """The outcome; the only host synchronisation of a round."""
        vocab_size = self.logprobs[0].shape[-1]
        if not len(self.draft.tokens):  # every line of the host shows beside plain decoding
            tokens, scales = read_all(self.results["target_tokens"], self.results["scales"])
            if not math.isfinite(scales[0][0]):
                raise LogitsError(NOT_FINITE)
            _check_next_token(tokens[0], vocab_size)
            return Outcome(range(0), tokens)
        numbers = dict(zip(self.results, read_all(*self.results.values()), strict=True))
        drafted = numbers.get("drafted", self.draft.tokens)
        check_drafted(numbers.get("drafted", ()), vocab_size)
        _check_verdict(self.verdict, numbers, len(drafted))
        outcome = _before_failure(self.verdict.outcome(numbers, drafted), numbers["scales"])
        _check_next_token(outcome.tokens[-1], vocab_size)
        if "masses" in numbers:
            check_distribution(numbers["masses"], numbers["own"])
        if self.counterfactual is not None:
            self.counterfactual.record(np.array(numbers["chances"]), outcome.num_accepted)
        return outcome


@dataclass
class StepwisePass:
    """A round whose rows go through callables of the caller's one at a time, in order.

    ends: tokens after which no draft is of use.
    """

    draft: Draft
    num_fed: int
    logits: mx.array
    distribution: NextToken
    position: int
    ends: Set[int] = frozenset()
    features: FeatureRows | None = None
    logprobs: list[mx.array] = field(default_factory=list)

    @property
    def to_compute(self) -> list[mx.array]:
        """The arrays that the device begins with."""
        return [self.logits]

    @cached_property
    def _first_row(self) -> tuple[mx.array, mx.array, mx.array]:
        if self.distribution.has_failed:  # the processors have seen it, in the round before
            raise LogitsError(NOT_FINITE)
        return self._row(0, [])

    @property
    def next_token(self) -> mx.array:
        """Token after an empty draft, not computed yet."""
        return existing(self._first_row[0], self.logits.shape[-1])

    def wait(self) -> None:
        """Wait until the rows are computed."""
        mx.eval(self.logits)

    def read(self) -> Outcome:
        """The outcome."""
        drafted = to_list(self.draft.tokens)
        drafted = drafted[: len(Draft(drafted).until(self.ends))]
        check_drafted(drafted, self.logits.shape[-1])
        tokens: list[int] = []
        while len(tokens) <= len(drafted) and tokens == drafted[: len(tokens)]:
            row = len(tokens)
            token, bad, logprobs = self._row(row, drafted[:row]) if row else self._first_row
            token_id, is_bad = to_list(mx.concatenate([token, bad]))
            if is_bad and not row:
                raise LogitsError(NOT_FINITE)
            if is_bad:  # what came before is handed out first
                self.distribution.has_failed = True
                return Outcome(range(row), tokens)
            tokens.append(token_id)
            self.logprobs.append(logprobs)
        _check_next_token(tokens[-1], self.logits.shape[-1])
        return Outcome(range(len(tokens) - 1), tokens)

    def _row(self, row: int, before: list[int]) -> tuple[mx.array, mx.array, mx.array]:
        """The target's token [1] after draft tokens, 1 if its logits are not finite, [1, V]."""
        logits = self.distribution.process_row(self.logits[row : row + 1], before)
        scale = mx.logsumexp(logits, axis=-1, keepdims=True)
        token = self.distribution.draw(logits - scale, self.position + row)
        return token, ~mx.isfinite(scale[0]).astype(mx.bool_), logits - scale


class Verifier:
    """The target of a generation: see `contracts.Target`.

    counterfactual: an account of what each rule would have accepted. Raises ValueError if the rule
    needs a distribution and there is none.
    """

    def __init__(
        self,
        model_pass: ModelPass,
        next_token: NextToken,
        rule: str | AcceptanceRule,
        counterfactual: Counterfactual | None = None,
    ) -> None:
        self.model_pass = model_pass
        self.distribution = next_token
        is_opaque = next_token.by_row or next_token.sampling is None
        self.rule = make_rule(rule, is_seeded=next_token.noise.is_given and not is_opaque)
        self.tree_rule = tree_rule_for(self.rule)
        self.counterfactual = counterfactual
        self.feed = model_pass.feed
        self.tap = model_pass.tap
        self.fed_features = model_pass.fed_features
        self.vocab_size = model_pass.vocab_size
        self.widest_pass = model_pass.widest
        self.quantize = model_pass.quantize
        self.extend_history = next_token.extend_history
        self.show_end = next_token.show_end
        self.remembers = next_token.remembers
        self.end_tokens: Set[int] = frozenset()
        if is_opaque:
            _check_needs(self.rule, counterfactual)

    @property
    def rollback(self) -> Rollback:
        """The caches."""
        return self.model_pass.rollback

    def draft_context(self, tokenizer: Any, draft_cache: list[Any] | None) -> DraftContext:
        """The target as a drafter may know it; of its tokenizer the tokens that end a text."""
        self.end_tokens = frozenset(getattr(tokenizer, "eos_token_ids", None) or ())
        return DraftContext(
            sampling=self.distribution.sampling,
            noise=self.distribution.noise,
            coupled=shares_noise(self.rule),
            logits_processors=[f for f in self.distribution.processors if is_pure(f)],
            vocab_size=self.vocab_size(),
            tokenizer=tokenizer,
            draft_cache=draft_cache,
            prefill_step_size=self.model_pass.options.prefill_step_size,
            target_caches=self.model_pass,
        )

    def launch(
        self,
        pending: Sequence[int] | mx.array,
        draft: Draft,
        position: int,
        embeddings: mx.array | None = None,
    ) -> PendingPass:
        """Start a round: feed the pending tokens and the draft, and let the device run.

        A tree that cannot be verified here is cut to a chain. DraftError, before anything is fed.
        """
        draft = self.checked(draft)
        num_drafted = len(draft.tokens)
        pending = to_ids(pending)
        num_fed = pending.shape[0] + num_drafted
        fed, rows = self._feed_all_but_last_pass(pending)
        drafted = NO_TOKENS
        if num_drafted:
            self.rollback.checkpoint()
            drafted = self.drafted_ids(draft)
            fed = mx.concatenate([fed, drafted])
        logits = self.feed(fed, embeddings, draft.parents)
        if logits.shape[0] > num_drafted + 1:
            logits = logits[-num_drafted - 1 :]
        pass_ = self.judge(logits, draft, drafted, position, num_fed)
        to_compute = pass_.to_compute
        if self.model_pass.taps is not None:
            pass_.features = FeatureRows.joined([*rows, self.fed_features()[0]])
            if pass_.features.top_tokens is not None:
                to_compute.append(pass_.features.top_tokens)
        mx.async_eval(to_compute)
        return pass_

    def judge(
        self, logits: mx.array, draft: Draft, drafted: mx.array, position: int, num_fed: int
    ) -> LazyPass | StepwisePass:
        """The round of a pass that was made, lazy; logits: [K+1, V] from the last pending on."""
        if self.distribution.by_row:
            own = self.distribution
            return StepwisePass(draft, num_fed, logits, own, position, self.end_tokens)
        processed = self.distribution.process(logits, drafted, draft.parents)
        rows = RoundPositions(processed, self.distribution, position, draft.parents)
        verdict: Verdict | Agreement | TreeVerdict
        if not len(draft.tokens):
            results = {"scales": rows.scales, "target_tokens": rows.tokens}
            pass_ = LazyPass(NO_DRAFT, num_fed, [rows.logprobs], Agreement(rows.tokens), results)
            pass_.is_sampled = not rows.has_distribution
            return pass_
        as_ids = Draft(drafted, draft.logprobs, parents=draft.parents)
        noise = RoundNoise(self.distribution.noise, position)
        if draft.parents is None:
            verdict = self.rule.decide(rows, as_ids, noise)
        else:
            assert self.tree_rule is not None, "a draft is cut to a chain without one"
            verdict = self.tree_rule.decide_tree(rows, as_ids, noise)
        results = {"scales": rows.scales, **verdict.arrays()}
        q = as_ids.probs
        if isinstance(draft.tokens, mx.array):
            results["drafted"] = draft.tokens
        if draft.logprobs is not None and q is not None:
            results["masses"] = mx.sum(q, axis=-1)
            results["own"] = mx.take_along_axis(draft.logprobs, drafted[:, None], axis=-1)
        if self.counterfactual is not None:
            q = point_mass(drafted, rows.probs) if q is None else q
            results["chances"] = chances(rows.probs, drafted, q)
        return LazyPass(draft, num_fed, rows.each(), verdict, results, self.counterfactual)

    def checked(self, draft: Draft, *, may_fork: bool = True) -> Draft:
        """A draft until its end tokens, of a tree the first chain where it must be one.

        Raises DraftError for what is none.
        """
        if len(draft.tokens):
            check_draft(draft, self.vocab_size())
            is_known = not isinstance(draft.tokens, mx.array)
            if is_known and not self.end_tokens.isdisjoint(draft.tokens):
                draft = draft.until(self.end_tokens)
            if draft.parents is not None and not (may_fork and self.takes_trees()):
                return draft.first_chain()
        return draft

    def drafted_ids(self, draft: Draft) -> mx.array:
        """The draft's tokens as ids that exist; wrong ones are an error once they can be read."""
        if not len(draft):
            return NO_TOKENS
        ids = to_ids(draft.tokens)
        is_known = not isinstance(draft.tokens, mx.array)
        return ids if is_known else mx.minimum(ids, self.vocab_size() - 1)

    def takes_trees(self) -> bool:
        """True if rule, rows and model go with trees; the account of other rules does not."""
        is_taken = self.tree_rule is not None and self.counterfactual is None
        return is_taken and not self.distribution.by_row and self.model_pass.takes_trees()

    def _feed_all_but_last_pass(self, pending: mx.array) -> tuple[mx.array, list[FeatureRows]]:
        """Feed pending tokens that one pass has no room for; those that are left, and the rows."""
        rows: list[FeatureRows] = []
        while pending.shape[0] > 1:
            room = self.widest_pass()
            if room is None or pending.shape[0] <= room:
                break
            self.feed(pending[:room])
            if self.model_pass.taps is not None:
                rows.append(self.fed_features()[0])
            pending = pending[room:]
        return pending, rows


def _check_needs(rule: AcceptanceRule, counterfactual: Counterfactual | None) -> None:
    if needs_distribution(rule):
        needing, instead = f"rule={rule.name!r}", "rule='auto', and "
    elif counterfactual is not None:
        needing, instead = "counterfactual=True", ""
    else:
        return
    raise ValueError(
        f"{needing} needs the target's distribution, and a sampler or processor of your own gives "
        f"none. Use {instead}specdec_mlx.Sampling(...) as the sampler."
    )


def _check_verdict(
    verdict: Verdict | Agreement | TreeVerdict, numbers: Mapping[str, Any], k: int
) -> None:
    """Raise VerdictError for a number of kept tokens, or nodes, that the draft does not have."""
    if isinstance(verdict, TreeVerdict):  # its nodes are read off the draft's own parents
        return
    if isinstance(verdict, Agreement):
        if (num_rows := len(numbers["target_tokens"])) != k + 1:
            raise VerdictError(
                f"The rule answered with {num_rows} tokens for a draft of {k}; "
                "expected the target's own token at each of the K + 1 positions."
            )
        return
    n = numbers["verdict"][0]
    nodes = numbers["nodes"][:n] if "nodes" in numbers else ()
    if not 0 <= n <= k or not all(0 <= node < k for node in nodes):
        raise VerdictError(
            f"The rule kept {n} tokens{f', {nodes},' if nodes else ''} of a draft of {k}; expected "
            "a number from 0 to K, and nodes from 0 to K - 1."
        )


def _check_next_token(token: int, vocab_size: int) -> None:
    """Raise VerdictError for a token that the target does not have: it would be fed next."""
    if not 0 <= token < vocab_size:
        raise VerdictError(
            f"The next token is {token}; the target has 0 to {vocab_size - 1}. Have your own "
            "sampler, or rule, draw it from the target's rows."
        )


def _before_failure(outcome: Outcome, scales: Sequence[Sequence[float]]) -> Outcome:
    """The tokens before the first row of log-sum-exps that is not finite; without one, LogitsError.

    The next round finds that row again, as its first, when these tokens have been handed out.
    """
    for i, node in enumerate((ROOT, *outcome.kept)):
        if not math.isfinite(scales[node + 1][0]):
            if i == 0:
                raise LogitsError(NOT_FINITE)
            return Outcome(outcome.kept[:i], outcome.tokens[:i])
    return outcome


def check_distribution(masses: Sequence[float], own: Sequence[Sequence[float]]) -> None:
    """Raise DraftError for a row of draft_probs that does not sum to 1 or excludes its token."""
    for i, (mass, (logprob,)) in enumerate(zip(masses, own, strict=True)):
        if not (abs(mass - 1) < MASS_TOLERANCE and logprob > -math.inf):
            raise DraftError(
                f"The distribution of draft token {i} is none: it must sum to 1 and give mass to "
                "the token drawn. Hand over the log-probabilities that it was drawn from."
            )
