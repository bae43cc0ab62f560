"""The target's side of a round: one pass over the pending tokens and the draft, and its verdict."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import InitVar, dataclass, field
from typing import Any

import mlx.core as mx

from specdec_mlx.contracts import (
    NO_DRAFT,
    AcceptanceRule,
    Agreement,
    Draft,
    DraftContext,
    FeatureRows,
    PendingPass,
    needs_distribution,
    shares_noise,
)
from specdec_mlx.rules.registry import make_rule
from specdec_mlx.rules.trees import tree_rule_for
from specdec_mlx.token_ids import to_ids
from specdec_mlx.verify.inputs import check_draft
from specdec_mlx.verify.model_pass import ModelPass
from specdec_mlx.verify.next_token import NextToken, RoundNoise, RoundPositions, is_pure
from specdec_mlx.verify.passes import LazyPass, StepwisePass

NO_TOKENS = mx.array([], mx.uint32)


@dataclass(eq=False)
class Verifier(ModelPass):
    """The target of a generation: passes of a model, and verdicts; see `contracts.Target`.

    next_token: what its tokens are drawn from, and with which noise. given_rule: how much of a
    draft is kept, as `make_rule` takes it. end_tokens: tokens that end a text; a draft goes no
    further. Raises ValueError if the rule needs a distribution, and there is none.
    """

    next_token: NextToken = field(kw_only=True)
    given_rule: InitVar[str | AcceptanceRule] = field(kw_only=True)
    end_tokens: Set[int] = field(default=frozenset(), kw_only=True)

    def __post_init__(self, given_rule: str | AcceptanceRule) -> None:
        self.remembers = self.next_token.remembers
        is_opaque = self.next_token.by_row or self.next_token.sampling is None
        is_seeded = self.next_token.noise.is_given and not is_opaque
        self.rule = make_rule(given_rule, is_seeded=is_seeded)
        self.tree_rule = tree_rule_for(self.rule)
        if is_opaque and needs_distribution(self.rule):
            raise ValueError(
                f"rule={self.rule.name!r} needs the target's distribution, and a sampler or "
                "processor of your own gives none. Leave it out, or use "
                "specdec_mlx.Sampling(...) as the sampler."
            )

    def extend_history(self, tokens: Sequence[int] | mx.array) -> None:
        """Add tokens of the text to what logits processors see."""
        self.next_token.extend_history(tokens)

    def show_end(self, logprobs: mx.array) -> None:
        """Show processors the text when no pass comes after it; logprobs: [1, V], any."""
        self.next_token.process_row(logprobs, ())

    def draft_context(
        self, tokenizer: Any, draft_cache: list[Any] | None
    ) -> DraftContext:
        """The target as a drafter may know it."""
        return DraftContext(
            sampling=self.next_token.sampling,
            noise=self.next_token.noise,
            coupled=shares_noise(self.rule),
            logits_processors=[f for f in self.next_token.processors if is_pure(f)],
            vocab_size=self.vocab_size(),
            tokenizer=tokenizer,
            draft_cache=draft_cache,
            prefill_step_size=self.options.prefill_step_size,
            target_caches=self,
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
        if len(draft.tokens):
            draft = self.checked(draft)
        fed, drafted, num_drafted = to_ids(pending), NO_TOKENS, len(draft.tokens)
        num_fed = fed.shape[0] + num_drafted
        rows: list[FeatureRows] = []
        if fed.shape[0] > 1:
            fed, rows = self._feed_all_but_last_pass(fed)
        if num_drafted:
            self.rollback.checkpoint()
            drafted = self.drafted_ids(draft)
            fed = mx.concatenate([fed, drafted])
        logits = self.feed(fed, embeddings, draft.parents, in_round=True)
        pass_ = self.judge(
            logits[-num_drafted - 1 :], draft, drafted, position, num_fed
        )
        to_compute = pass_.to_compute
        if (taps := self.taps) is not None:
            assert taps.features is not None
            features = (
                FeatureRows.joined([*rows, taps.features]) if rows else taps.features
            )
            pass_.features = features
            if features.top_tokens is not None:
                to_compute.append(features.top_tokens)
        mx.async_eval(to_compute)
        return pass_

    def judge(
        self,
        logits: mx.array,
        draft: Draft,
        drafted: mx.array,
        position: int,
        num_fed: int,
    ) -> LazyPass | StepwisePass:
        """The round of a pass that was made, lazy; logits: [K+1, V] from the last pending on."""
        target = self.next_token
        if target.by_row:
            return StepwisePass(
                draft, num_fed, logits, target, position, self.end_tokens
            )
        rows = RoundPositions(
            target.process(logits, drafted, draft.parents),
            target,
            position,
            draft.parents,
        )
        if not len(draft.tokens):
            return LazyPass(
                NO_DRAFT,
                num_fed,
                [rows.logprobs],
                Agreement(rows.tokens),
                {"scales": rows.scales, "target_tokens": rows.tokens},
                is_sampled=target.sampling is None,
            )
        as_ids = Draft(drafted, draft.logprobs, parents=draft.parents)
        given = rows, as_ids, RoundNoise(target.noise, position)
        if draft.parents is None:
            decision = self.rule.decide(*given)
        else:
            assert self.tree_rule is not None, "a draft is cut to a chain without one"
            decision = self.tree_rule.decide_tree(*given)
        results = {"scales": rows.scales, **decision.arrays()}
        if isinstance(draft.tokens, mx.array):
            results["drafted"] = draft.tokens
        q = as_ids.probs
        if draft.logprobs is not None and q is not None:
            results["masses"] = mx.sum(q, axis=-1)
            results["own"] = mx.take_along_axis(
                draft.logprobs, drafted[:, None], axis=-1
            )
        return LazyPass(draft, num_fed, rows.each(), decision, results)

    def checked(self, draft: Draft, *, may_fork: bool = True) -> Draft:
        """A draft until its end tokens, of a tree the first chain where it must be one.

        Raises DraftError for what is none.
        """
        check_draft(draft, self.vocab_size())
        is_known = not isinstance(draft.tokens, mx.array)
        if is_known and not self.end_tokens.isdisjoint(draft.tokens):
            draft = draft.until(self.end_tokens)
        if draft.parents is not None and not (may_fork and self.takes_trees()):
            return draft.first_chain()
        return draft

    def drafted_ids(self, draft: Draft) -> mx.array:
        """The draft's tokens as ids that exist; wrong ones are an error once they can be read."""
        if not len(draft.tokens):
            return NO_TOKENS
        ids = to_ids(draft.tokens)
        is_known = not isinstance(draft.tokens, mx.array)
        return ids if is_known else mx.minimum(ids, self.vocab_size() - 1)

    def takes_trees(self) -> bool:
        """True if rule, rows and model go with trees."""
        is_taken = self.tree_rule is not None and not self.next_token.by_row
        return is_taken and super().takes_trees()

    def _feed_all_but_last_pass(
        self, pending: mx.array
    ) -> tuple[mx.array, list[FeatureRows]]:
        """Feed pending tokens that one pass has no room for; those that are left, and the rows."""
        rows: list[FeatureRows] = []
        while (room := self.widest_pass()) is not None and 1 < pending.shape[0] > room:
            self.feed(pending[:room], in_round=True)
            if self.taps is not None:
                rows.append(self.fed_features()[0])
            pending = pending[room:]
        return pending, rows
