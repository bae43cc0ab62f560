"""Recorded texts scored offline, for any drafter, draft length and cost.

The loop itself runs; the target is replaced by one that knows its text, and its passes cost c(m).
At temperature 0 the counts are those of a live run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
from mlx_lm.utils import load_tokenizer

from specdec_mlx.arguments import parse_draft_length
from specdec_mlx.caches import Rollback
from specdec_mlx.contracts import (
    Draft,
    DraftContext,
    Drafter,
    FeatureRows,
    Features,
    Outcome,
    PendingPass,
    RoundRecord,
)
from specdec_mlx.draft_length.costs import CURVES, MILDEST
from specdec_mlx.draft_length.drafting import Drafting
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.draft_length.value import Auto, DraftLength, Model, make_draft_length
from specdec_mlx.errors import UnreadableError
from specdec_mlx.lab.bench.cost import MEASURED, CostCurve
from specdec_mlx.lab.bench.record import Record, RecordedText, or_dash, read_sessions
from specdec_mlx.lab.bench.summary import ALL
from specdec_mlx.lab.demo_model import demo_model_path
from specdec_mlx.lab.tables import markdown_table, table_html
from specdec_mlx.loop import Generation, Round, RoundClock, assemble_around
from specdec_mlx.models.loading import explained
from specdec_mlx.options import Options
from specdec_mlx.progress import progress_bar
from specdec_mlx.sampling import Noise, Sampling
from specdec_mlx.stats.account import Row, Rows
from specdec_mlx.token_ids import to_list
from specdec_mlx.trees.rules import walk
from specdec_mlx.trees.shape import depths_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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

    def read(self) -> Outcome:
        kept = right_path(self.draft, self.coming)
        return Outcome(kept, self.coming[: len(kept) + 1] or [0])


class RecordedTarget:
    """A target whose greedy text is known; see `specdec_mlx.contracts.Target`."""

    remembers = False

    def __init__(self, text: RecordedText, vocab_size: int) -> None:
        self.rollback = Rollback([], position=len(text.prompt) - 1)
        self._text, self._vocab_size = text, vocab_size
        # after the end: unknown, and nobody reads it
        self._known = [*text.generated, 0]
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
    ) -> PendingPass:
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


@dataclass
class ModelledClock(RoundClock):
    """A clock of rounds whose seconds come from a table, so that nothing disturbs them.

    cost: c(m), in seconds. drafting: of the generation. draft_seconds: of one draft token of a
    drafter that takes time; look-ups take none. total: of all rounds so far.
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
            prices.clock = lambda: self.draft_seconds * next(ticks)

    def record(
        self, current: Round, outcome: Outcome, ahead: Round | None, context: int, started: float
    ) -> RoundRecord:
        """The account of a round, with its modelled seconds."""
        round_ = super().record(current, outcome, ahead, context, started)
        drafting = self.draft_seconds * self._num_steps(round_)
        verifying = self.cost(round_.fed)
        self.total += drafting + verifying
        return replace(
            round_, seconds=drafting + verifying, draft_seconds=drafting, verify_seconds=verifying
        )

    def _num_steps(self, round_: RoundRecord) -> int:
        """Draft steps since the last round, those of drafts that were dropped too."""
        length, selection = self.drafting.length, self.drafting.selection
        groups = selection.groups if selection else ()
        parts = length.parts.values() if isinstance(length, Auto) else ()
        steps = sum(part.num_steps for part in parts if isinstance(part, Model))
        is_free = {part.key: part.is_cheap for group in groups for part in group}
        return steps or (0 if is_free.get(round_.part) else round_.drafted)


def replay_text(
    text: RecordedText,
    drafter: Drafter | None,
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
    target = RecordedTarget(text, vocab_size)
    options, context = Options(max_tokens=max_tokens), greedy_context(vocab_size)
    parts = assemble_around(target, list(text.prompt), drafter, length, options, context)
    generation, stats = Generation.of(parts, options), parts.stats
    clock = ModelledClock(cost=cost, drafting=parts.drafting, draft_seconds=draft_seconds)
    generation.clock = clock
    with closing(generation.run(context)) as tokens:
        emitted = list(islice(tokens, len(text.generated)))
    assert [token.token for token in emitted] == text.generated
    accepted = sum(token.from_draft for token in emitted)
    counts = len(emitted), stats.target_passes, stats.drafted, accepted
    return Modelled(text.category, *counts, clock.total, plain_seconds=cost(1) * len(emitted))


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
    tokens = to_list(draft.tokens)
    places = zip(tokens, depths_of(draft.tree), strict=True)
    known = len(coming)
    is_right = [depth < known and coming[depth] == token for token, depth in places]
    return walk(is_right, draft.tree)


# Scores


@dataclass(frozen=True)
class Score:
    """One way of drafting on one category of texts ("all" for every one), under one cost curve.

    drafter, draft_length: as on the command line. speedup: plain seconds over modelled ones.
    live_ratio: as measured live on the same curve, or None. session: of the texts, or "".
    """

    cost: str
    drafter: str
    draft_length: str
    category: str
    texts: int
    tokens: int
    target_passes: int
    drafted: int
    accepted: int
    tokens_per_pass: float
    speedup: float
    live_ratio: float | None = None
    session: str = ""


class Scores(list[Score], Rows):
    """Scores: a table in text and in a notebook; a row for each in CSV and pandas.

    Speedups per category; tokens per pass, acceptance and the measured ratio over all.
    """

    def rows(self) -> list[Row]:
        """A row for each score, a column for each field."""
        return [asdict(score) for score in self]

    def plot(self, cost: str = "") -> Figure:
        """Draw the speeds by kind of text at one cost, the first if none is named; matplotlib."""
        plots: Any = import_module("specdec_mlx.lab.plots")
        figure: Figure = plots.modelled_speed([s for s in self if s.cost == (cost or self[0].cost)])
        return figure

    def __str__(self) -> str:
        """Markdown."""
        return markdown_table(*_table(self), 3)

    def _repr_html_(self) -> str:
        note = "<p>modelled speed relative to plain decoding</p>"
        return table_html(*_table(self), 3) + note


def _table(scores: Sequence[Score]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: one for each cost curve, drafter and draft length, all sessions together."""
    ways: dict[tuple[str, str, str], dict[str, Score]] = {}
    for score in scores:
        if not score.session:
            way = ways.setdefault((score.cost, score.drafter, score.draft_length), {})
            way[score.category] = score
    categories = list(dict.fromkeys(score.category for score in scores))
    rows = [
        [
            *(part or "-" for part in key),
            *(f"{way[name].speedup:.2f}" for name in categories),
            f"{way[ALL].tokens_per_pass:.2f}",
            f"{way[ALL].accepted / way[ALL].drafted:.2f}" if way[ALL].drafted else "-",
            or_dash(way[ALL].live_ratio),
        ]
        for key, way in ways.items()
    ]
    return ["cost", "drafter", "K", *categories, "tok/pass", "accepted", "live"], rows


def score_record(
    record: Record,
    drafters: Mapping[str, Drafter | Callable[[], Drafter | None] | None],
    draft_lengths: Sequence[str],
    cost: CostCurve,
    *,
    draft_cost: float = 0.0,
) -> Scores:
    """Every drafter with every draft length on all texts.

    Args:
        record: of a benchmark; its texts are scored.
        drafters: name -> drafter, None for plain decoding, or a function that makes it, so that one
            that remembers has a memory for each way of drafting.
        draft_lengths: numbers and policies, as on the command line. What one learns it keeps from
            text to text; it begins with the prior of the chip whose curve is named.
        cost: c(m), in seconds.
        draft_cost: of a draft token, in c(1).

    Returns:
        A score for each way of drafting and each category, session, and all texts.

    Raises:
        ValueError: a drafter draws at random; only drafts that are certain can be replayed.
    """
    scores = Scores()
    options: Any = {name: int(record.settings[name]) for name in ("max_tokens", "vocab_size")}
    options["draft_seconds"] = draft_cost * cost(1)
    for name, made in drafters.items():
        for length in draft_lengths if made else [""]:
            drafter = made if made is None or isinstance(made, Drafter) else made()
            modelled, tuning = [], Tuning(CURVES.get(cost.name, MILDEST))
            bar = progress_bar(record.texts, f"{name} {length}", unit="text", delay=1, leave=False)
            for text in bar:
                policy = make_draft_length(parse_draft_length(length or "0"), tuning)
                modelled.append(replay_text(text, drafter, policy, cost, **options))
            scores += scores_of(record, cost.name, name, length, modelled)
    return scores


def record_of_sessions(
    path: Path | str, model: Path | str | None = None, cost: CostCurve | None = None
) -> Record:
    """A session file as a record, by a model's tokenizer (a small one if None)."""
    name = model or demo_model_path()
    with explained(name):
        tokenizer = load_tokenizer(name)
    texts = read_sessions(path, tokenizer)
    longest = max(len(text.generated) for text in texts)
    settings = {"vocab_size": len(tokenizer), "max_tokens": longest, "temp": 0.0}
    return Record(f"sessions of {path}", {}, settings, texts, cost)


def scores_of(
    record: Record, cost: str, drafter: str, length: str, modelled: Sequence[Modelled]
) -> list[Score]:
    """One score per category, "all", and one for each session, of what became of each text."""
    groups: dict[tuple[str, str], list[Modelled]] = {
        (category, ""): [] for category in (*record.categories, ALL)
    }
    for text, one in zip(record.texts, modelled, strict=True):
        for key in {(text.category, ""), (ALL, ""), (text.category, text.session)}:
            groups.setdefault(key, []).append(one)
    scores = []
    for (category, session), group in groups.items():
        tokens, passes, drafted, accepted, seconds, plain_seconds = (
            sum(numbers) for numbers in zip(*(m[1:] for m in group), strict=True)
        )
        counts = len(group), tokens, passes, drafted, accepted
        rates = tokens / passes, plain_seconds / seconds
        is_live = cost == MEASURED and not session
        live = record.live_ratio(drafter, length, category) if is_live else None
        scores.append(Score(cost, drafter, length, category, *counts, *rates, live, session))
    return scores
