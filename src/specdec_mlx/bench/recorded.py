"""The loop on a recorded text: the target knows it, takes no time, and costs come from a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import mlx.core as mx

from specdec_mlx import contracts
from specdec_mlx.bench.cost import CostCurve
from specdec_mlx.bench.record import RecordedText
from specdec_mlx.contracts import ROOT, Draft, DraftContext, FeatureRows, Features, Step
from specdec_mlx.contracts.trees import chain, children_of
from specdec_mlx.draft_length.auto import Auto
from specdec_mlx.draft_length.policy import DraftLength
from specdec_mlx.engine.assemble import assemble_around
from specdec_mlx.engine.clock import RoundClock
from specdec_mlx.engine.options import Options
from specdec_mlx.errors import UnreadableError
from specdec_mlx.loop import Generation
from specdec_mlx.sampling.distribution import Sampling
from specdec_mlx.sampling.noise import Noise
from specdec_mlx.token_ids import to_list
from specdec_mlx.verify.rollback import Rollback


class Modelled(NamedTuple):
    """A text as a way of drafting would have generated it: live counts, modelled seconds."""

    category: str
    tokens: int
    passes: int
    drafted: int
    accepted: int
    seconds: float
    plain_seconds: float


@dataclass
class _RecordedPass:
    """A pass of the recorded target; see `specdec_mlx.contracts.PendingPass`."""

    draft: Draft
    num_fed: int
    coming: list[int]
    logprobs: Any
    features: FeatureRows | None = None

    @property
    def next_token(self) -> list[int]:
        return self.coming[:1]

    def wait(self) -> None:
        """Nothing is computed."""

    def read(self) -> contracts.Outcome:
        kept = right_path(self.draft, self.coming)
        return contracts.Outcome(kept, self.coming[: len(kept) + 1] or [0])


class RecordedTarget:
    """A target whose greedy text is known; see `specdec_mlx.contracts.Target`."""

    remembers = False

    def __init__(self, text: RecordedText, vocab_size: int) -> None:
        self.rollback = Rollback([], position=len(text.prompt) - 1)
        self._text, self._vocab_size = text, vocab_size
        self._known = [*text.generated, 0]  # after the end: unknown, and nobody reads it
        self._is_tapped, self._num_fed = False, 0

    def vocab_size(self) -> int:
        """V, as recorded."""
        return self._vocab_size

    def widest_pass(self) -> int | None:
        """Any number of positions."""
        return None

    def takes_trees(self) -> bool:
        """Any shape."""
        return True

    def tap(self, wanted: Features) -> None:
        """Show the likeliest tokens, from the text's own places; UnreadableError for states.

        Of a text without `top_tokens` only its own token is known: scores are lower bounds.
        """
        if wanted != Features(top=wanted.top):
            raise UnreadableError(
                "A recorded text has no states to read, only the likeliest tokens. "
                "Replay drafters that work on tokens."
            )
        self._is_tapped, self.rollback = True, Rollback([])

    def fed_features(self) -> tuple[FeatureRows, int]:
        """Rows of the prompt, of which nothing is known."""
        return top_rows(self._text, [None] * self._num_fed), self._num_fed

    def extend_history(self, tokens: Sequence[int] | mx.array) -> None:
        """No processors want to know."""

    def show_end(self, logprobs: mx.array) -> None:
        """No processors want to know."""

    def quantize(self) -> None:
        """There are no caches."""

    def feed(self, tokens: mx.array, embeddings: mx.array | None = None) -> mx.array:
        """A pass whose logits are never asked for."""
        self._num_fed = tokens.shape[0]
        self.rollback.advance(self._num_fed)
        return mx.zeros((tokens.shape[0], self._vocab_size))

    def launch(
        self,
        pending: Sequence[int] | mx.array,
        draft: Draft,
        position: int,
        embeddings: mx.array | None = None,
    ) -> contracts.PendingPass:
        """A pass of the recording, see `contracts.Target`; ValueError for a drawn draft."""
        if draft.logprobs is not None:
            raise ValueError("Replay needs drafts that are not random. Drop stochastic=True.")
        num_fed = len(pending) + len(draft)
        self.rollback.advance(num_fed)
        coming = self._known[position : position + len(draft) + 1]
        pass_ = _RecordedPass(draft, num_fed, coming, [None] * (len(draft) + 1))
        if self._is_tapped:
            places: list[int | None] = [position - i for i in reversed(range(len(pending)))]
            right = {node: position + 1 + i for i, node in enumerate(right_path(draft, coming))}
            places += [right.get(node) for node in range(len(draft))]
            pass_.features = top_rows(self._text, places)
        return pass_


class _UndisturbedClock(RoundClock):
    """A clock for rounds whose seconds come from a table: nothing disturbs it."""

    @property
    def was_undisturbed(self) -> bool:
        return True


class ModelledLength:
    """A draft length that is told the cost curve's seconds instead of the clock's, and adds them.

    draft_seconds: of one draft token of a drafter that takes time; look-ups take none.
    """

    def __init__(self, inner: DraftLength, cost: CostCurve, draft_seconds: float = 0.0) -> None:
        self.cut: Callable[..., int] = inner.cut
        self.seconds, self.num_steps, self.draft_seconds = 0.0, 0, draft_seconds
        self._inner, self._cost = inner, cost
        self._cheap: set[str] = set()
        if isinstance(inner, Auto):
            inner.prices.clock = lambda: self.draft_seconds * self.num_steps
            self.begin = partial(self._begin, inner)
            self.choose, self.outbids, self.grow = inner.choose, inner.outbids, inner.grow
            self.extra_price, self.wants_timing = inner.extra_price, inner.wants_timing

    def limit(self, part: str, cheap: bool) -> int:
        """The inner one's."""
        if cheap:
            self._cheap.add(part)
        return self._inner.limit(part, cheap)

    def _begin(
        self, inner: Auto, part: str, session: contracts.DraftSession, may_fork: Callable[[], bool]
    ) -> Callable[[int], Draft]:
        if isinstance(session, contracts.Stepwise):
            session = _ModelledSteps(session, self)
        return inner.begin(part, session, may_fork)

    def record(self, round_: contracts.RoundRecord) -> None:
        """Pass a round on, with its modelled seconds."""
        unseen = 0 if round_.part in self._cheap else round_.drafted
        drafting = self.draft_seconds * (self.num_steps or unseen)
        self.num_steps = 0
        verifying = self._cost(round_.fed)
        self.seconds += drafting + verifying
        modelled = replace(round_, seconds=drafting + verifying, draft_seconds=drafting)
        self._inner.record(replace(modelled, verify_seconds=verifying))


class _ModelledSteps:
    """A session whose steps are counted."""

    def __init__(self, session: contracts.Stepwise, length: ModelledLength) -> None:
        self._session, self._length = session, length
        if isinstance(session, contracts.SeesTarget):
            self.see = session.see

    def propose(self, limit: int) -> Draft:
        return self.propose_while(limit, lambda evidence: Step.GO_ON)

    def propose_while(self, limit: int, goes_on: contracts.GoesOn) -> Draft:
        def counted(evidence: Sequence[contracts.Evidence]) -> Step:
            self._length.num_steps += not evidence[-1].is_free
            return goes_on(evidence)

        return self._session.propose_while(limit, counted)

    def observe(self, tokens: Sequence[int]) -> None:
        """Nothing: the loop tells the session itself."""


def replay_text(
    text: RecordedText,
    drafter: contracts.Drafter | None,
    length: DraftLength,
    cost: CostCurve,
    *,
    max_tokens: int,
    vocab_size: int,
    draft_seconds: float = 0.0,
) -> Modelled:
    """Run the loop on a recorded text, with a drafter or none (plain decoding).

    length: learns from the modelled seconds. cost: c(m), in seconds. max_tokens, vocab_size: as
    recorded. draft_seconds: of one draft token.
    """
    modelled = ModelledLength(length, cost, draft_seconds)
    target = RecordedTarget(text, vocab_size)
    options, context = Options(max_tokens=max_tokens), greedy_context(vocab_size)
    parts = assemble_around(target, list(text.prompt), drafter, modelled, options, context)
    generation = Generation.of(parts, options)
    generation.use_clock(_UndisturbedClock())
    stats = parts.stats
    with closing(generation.run(context)) as tokens:
        emitted = list(islice(tokens, len(text.generated)))
    assert [token.token for token in emitted] == text.generated
    accepted = sum(token.from_draft for token in emitted)
    seconds = modelled.seconds if drafter else cost(1) * stats.target_passes
    counts = len(emitted), stats.target_passes, stats.drafted, accepted
    return Modelled(text.category, *counts, seconds, plain_seconds=cost(1) * len(emitted))


def greedy_context(vocab_size: int | None = None) -> DraftContext:
    """The context of a generation at temperature 0."""
    return DraftContext(sampling=Sampling(), noise=Noise(0), vocab_size=vocab_size)


def top_rows(text: RecordedText, places: Sequence[int | None]) -> FeatureRows:
    """The target's likeliest tokens at places of a text, None for one outside; -1 if not known."""
    tops = text.top_tokens or [[token] for token in text.generated]
    unknown = [-1] * len(tops[0])
    rows = [unknown if place is None or place >= len(tops) else tops[place] for place in places]
    return FeatureRows({}, top_tokens=mx.array(rows, mx.int32))


def right_path(draft: Draft, coming: Sequence[int]) -> list[int]:
    """The draft's tokens that are right, from the first one down."""
    tokens, path, node = to_list(draft.tokens), list[int](), ROOT
    children = children_of(chain(len(tokens)) if draft.parents is None else draft.parents)
    for token in coming:
        node = next((child for child in children[node + 1] if tokens[child] == token), ROOT)
        if node == ROOT:
            break
        path.append(node)
    return path
