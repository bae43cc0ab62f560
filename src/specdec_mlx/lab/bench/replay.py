"""Recorded texts scored offline, for any drafter, draft length and cost.

The loop itself runs; the target is replaced by one that knows its text, and its passes cost c(m).
At temperature 0 the counts equal the counts of a live run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from itertools import count, islice
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import load_tokenizer
from msgspec.structs import replace

from specdec_mlx.arguments import parse_draft_length
from specdec_mlx.caches import Rollback
from specdec_mlx.contracts import (
    Draft,
    DraftContext,
    Drafter,
    FeatureRows,
    Features,
    Outcome,
    RoundRecord,
)
from specdec_mlx.draft_length.costs import CURVES, MILDEST
from specdec_mlx.draft_length.drafting import Drafting
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.draft_length.value import Auto, DraftLength, Model, make_draft_length
from specdec_mlx.duck_typed import as_drafter
from specdec_mlx.errors import UnreadableError
from specdec_mlx.lab.bench.cost import MEASURED, CostCurve
from specdec_mlx.lab.bench.record import Record, read_sessions
from specdec_mlx.lab.bench.summary import Result, summarise
from specdec_mlx.lab.bench.timing import Sample, Settings
from specdec_mlx.lab.demo_model import demo_model_path
from specdec_mlx.lab.prompts import RecordedText
from specdec_mlx.loop import Generation, Round, RoundClock
from specdec_mlx.models.loading import explained
from specdec_mlx.options import Options
from specdec_mlx.progress import progress_bar
from specdec_mlx.sampling import Noise, Sampling
from specdec_mlx.sequence import SequenceState
from specdec_mlx.stats.account import SpeculationStats
from specdec_mlx.token_ids import to_list
from specdec_mlx.trees.shape import depths_of
from specdec_mlx.trees.tree_rules import walk


@dataclass
class _RecordedPass:
    """A pass of the recorded target. See `specdec_mlx.target.LazyPass`."""

    draft: Draft
    num_fed: int
    coming: list[int]
    logprobs: Any
    features: FeatureRows | None = None

    def draw_next(self) -> list[int]:
        return self.coming[:1]

    def wait(self) -> None:
        """Do nothing, because nothing is computed."""

    def read(self) -> Outcome:
        # The target is greedy, so a draft token is accepted if it is the recorded token.
        accepted = right_path(self.draft, self.coming)
        return Outcome(accepted, self.coming[: len(accepted) + 1] or [0])


class RecordedTarget:
    """A target whose greedy text is known. See `specdec_mlx.target.Verifier`."""

    remembers = False
    kernels = None

    def __init__(self, text: RecordedText, vocab_size: int) -> None:
        self.rollback = Rollback([], position=len(text.prompt) - 1)
        self._text, self.vocab_size = text, vocab_size
        # after the end: unknown, and nobody reads it
        self._known = [*text.generated, 0]
        self._is_tapped, self._num_fed = False, 0

    def measure_width(self) -> int | None:
        return None

    def takes_trees(self) -> bool:
        return True

    def tap(self, wanted: Features) -> None:
        """Show the likeliest tokens of the recording. UnreadableError for states.

        If a text has no `top_tokens`, only its own token is known, and scores are lower bounds.
        """
        if wanted != Features(top=wanted.top):
            raise UnreadableError(
                "A recorded text has no states to read, only the likeliest tokens. "
                "Replay drafters that work on tokens."
            )
        # The loop feeds the whole prompt to a target whose features are read.
        self._is_tapped, self.rollback = True, Rollback([])

    def fed_features(self) -> tuple[FeatureRows, int]:
        """Rows of the prompt, for which nothing was recorded."""
        return top_rows(self._text, [None] * self._num_fed), self._num_fed

    def extend_history(self, tokens: Sequence[int] | mx.array) -> None:
        """Do nothing, because there are no processors."""

    def show_end(self, logprobs: mx.array) -> None:
        """Do nothing, because there are no processors."""

    def quantize(self) -> None:
        """Do nothing, because there are no caches."""

    def feed(self, tokens: mx.array, embeddings: mx.array | None = None) -> mx.array:
        self._num_fed = tokens.shape[0]
        self.rollback.advance(self._num_fed)
        return mx.zeros((tokens.shape[0], self.vocab_size))

    def launch(
        self,
        pending: Sequence[int] | mx.array,
        draft: Draft,
        position: int,
        embeddings: mx.array | None = None,
    ) -> _RecordedPass:
        if draft.logprobs is not None:
            raise ValueError("Replay needs drafts that are not random. Drop stochastic=True.")
        num_fed = len(pending) + len(draft)
        self.rollback.advance(num_fed)
        coming = self._known[position : position + len(draft) + 1]
        pass_ = _RecordedPass(draft, num_fed, coming, [None] * (len(draft) + 1))
        if self._is_tapped:
            places: list[int | None] = [position - i for i in reversed(range(len(pending)))]
            # Wrong nodes have no row, because the recording knows only its own text.
            right = {node: position + 1 + i for i, node in enumerate(right_path(draft, coming))}
            places += [right.get(node) for node in range(len(draft))]
            pass_.features = top_rows(self._text, places)
        return pass_


@dataclass
class ModelledClock(RoundClock):
    """A clock whose seconds come from a cost curve.

    Attributes:
        cost: c(m) in seconds.
        drafting: of the generation.
        draft_seconds: for each token that a model drafts. Look-ups take no time.
        total: seconds of all rounds so far.
    """

    was_undisturbed = True
    cost: CostCurve = field(kw_only=True)
    drafting: Drafting = field(kw_only=True)
    draft_seconds: float = 0.0
    total: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.drafting.length, Auto):
            ticks = count()
            prices = self.drafting.length.prices
            # Each reading advances the clock, so "auto" measures `draft_seconds` for each step.
            prices.clock = lambda: self.draft_seconds * next(ticks)

    def record(
        self, current: Round, outcome: Outcome, ahead: Round | None, context: int, started: float
    ) -> RoundRecord:
        round_ = super().record(current, outcome, ahead, context, started)
        drafting = self.draft_seconds * self._num_steps(round_)
        verifying = self.cost(round_.fed)
        self.total += drafting + verifying
        return replaced(
            round_, seconds=drafting + verifying, draft_seconds=drafting, verify_seconds=verifying
        )

    def _num_steps(self, round_: RoundRecord) -> int:
        """Draft steps since the last round, also of drafts that were dropped."""
        length, selection = self.drafting.length, self.drafting.selection
        groups = selection.groups if selection else ()
        parts = length.parts.values() if isinstance(length, Auto) else ()
        steps = sum(part.num_steps for part in parts if isinstance(part, Model))
        is_free = {part.key: part.is_cheap for group in groups for part in group}
        # Without "auto" nothing counts the dropped drafts.
        return steps or (0 if is_free.get(round_.part) else round_.drafted)


def replay_text(
    text: RecordedText,
    drafter: Any,
    length: DraftLength,
    cost: CostCurve,
    *,
    max_tokens: int,
    vocab_size: int,
    draft_seconds: float = 0.0,
) -> Sample:
    """Run the loop on a recorded text, with the counts of a live run and modelled seconds.

    Args:
        text: the recording.
        drafter: None for plain decoding.
        length: learns from the modelled seconds.
        cost: c(m) in seconds.
        max_tokens: as recorded.
        vocab_size: as recorded.
        draft_seconds: for each token that a model drafts.
    """
    target: Any = RecordedTarget(text, vocab_size)
    options, context = Options(max_tokens=max_tokens), greedy_context(vocab_size)
    prompt, stats = list(text.prompt), SpeculationStats()
    sequence = SequenceState(prompt, len(prompt), max_tokens)
    drafting = Drafting(
        as_drafter(drafter), length, target, sequence, keeps_cache=False, stream=options.stream
    )
    clock = ModelledClock(cost=cost, drafting=drafting, draft_seconds=draft_seconds)
    generation = Generation(target, sequence, drafting, context, options, stats, clock)
    with closing(generation.run()) as tokens:
        emitted = list(islice(tokens, len(text.generated)))
    # A replay with another text would have other counts.
    assert [token.token for token in emitted] == text.generated
    accepted = sum(token.from_draft for token in emitted)
    counts = stats.target_passes, stats.drafted, accepted
    num_drafting = sum(drafted > 0 for drafted, _ in stats.rounds)
    return modelled(text, cost, clock.total, *counts, num_drafting)


def modelled(
    text: RecordedText,
    cost: CostCurve,
    seconds: float,
    passes: int,
    drafted: int,
    accepted: int,
    drafting_rounds: int = 0,
) -> Sample:
    return Sample(
        "",
        id=text.id,
        category=text.category,
        session=text.session,
        num_tokens=len(text.generated),
        tokens=text.generated,
        decode_seconds=seconds,
        plain_seconds=cost(1) * len(text.generated),
        passes=passes,
        drafted=drafted,
        accepted=accepted,
        drafting_rounds=drafting_rounds,
    )


def greedy_context(vocab_size: int | None = None) -> DraftContext:
    return DraftContext(sampling=Sampling(), noise=Noise(0), vocab_size=vocab_size)


def top_rows(text: RecordedText, places: Sequence[int | None]) -> FeatureRows:
    """The target's likeliest tokens at places of a text.

    A place is None outside of the recorded text, and its tokens are -1.
    """
    tops = text.top_tokens or [[token] for token in text.generated]
    unknown = [-1] * len(tops[0])
    rows = [unknown if place is None or place >= len(tops) else tops[place] for place in places]
    return FeatureRows({}, top_tokens=mx.array(rows, mx.int32))


def right_path(draft: Draft, coming: Sequence[int]) -> list[int]:
    """The correct nodes of a draft, from the root down."""
    tokens = to_list(draft.tokens)
    places = zip(tokens, depths_of(draft.tree), strict=True)
    known = len(coming)
    # Node at depth d is correct if its token is token d of the recorded text.
    is_right = [depth < known and coming[depth] == token for token, depth in places]
    return walk(is_right, draft.tree)


# Scores


def score_record(
    record: Record,
    drafters: Mapping[str, Drafter | Callable[[], Drafter | None] | None],
    draft_lengths: Sequence[str],
    cost: CostCurve,
    *,
    draft_cost: float = 0.0,
) -> Record:
    """Score every drafter with every draft length on all texts.

    Args:
        record: a benchmark, whose texts are scored.
        drafters: name -> drafter, None for plain decoding, or a function that makes the drafter.
            Give a function for a drafter with a memory, so that each draft length has a new memory.
        draft_lengths: numbers and policies, as on the command line. A policy that learns keeps its
            measurements from text to text. It starts from the prior of the curve's chip.
        cost: c(m) in seconds.
        draft_cost: cost of a drafted token, in c(1).

    Returns:
        The record with modelled results for each drafter, draft length, category and session, and
        for all texts together.

    Raises:
        ValueError: a drafter draws at random. Only deterministic drafts can be replayed.
    """
    results: list[Result] = []
    how = record.settings
    options: Any = {"max_tokens": how.max_tokens, "vocab_size": how.vocab_size}
    options["draft_seconds"] = draft_cost * cost(1)
    for name, made in drafters.items():
        for length in draft_lengths if made else [""]:
            drafter = made if made is None or isinstance(made, Drafter) else made()
            samples, tuning = [], Tuning(CURVES.get(cost.name, MILDEST))
            bar = progress_bar(record.texts, f"{name} {length}", unit="text", delay=1, leave=False)
            for text in bar:
                policy = make_draft_length(parse_draft_length(length or "0"), tuning)
                samples.append(replay_text(text, drafter, policy, cost, **options))
            results += modelled_results(record, cost, name, length, samples)
    return replace(record, results=results, differences=[], samples=[])


def modelled_results(
    record: Record, cost: CostCurve, drafter: str, length: str, samples: Sequence[Sample]
) -> list[Result]:
    """Results of a drafter and a draft length, relative to plain decoding at the same cost.

    At measured costs, the measured speed is included too.
    """
    named_samples = [replace(sample, drafter=drafter, draft_length=length) for sample in samples]
    results = []
    for result in summarise(named_samples, [], greedy=False):
        is_live = cost.name == MEASURED and not result.session
        live = record.live_ratio(drafter, length, result.category) if is_live else None
        results.append(replace(result, cost=cost.name, live_ratio=live))
    return results


def record_of_sessions(
    path: Path | str, model: Path | str | None = None, cost: CostCurve | None = None
) -> Record:
    name = model or demo_model_path()
    with explained(name):
        tokenizer = load_tokenizer(name)
    texts = read_sessions(path, tokenizer)
    longest = max(len(text.generated) for text in texts)
    how = Settings(longest, vocab_size=len(tokenizer))
    return Record(f"sessions of {path}", {}, how, texts, cost)
