"""Batches of recorded texts, scored offline: the rows of `batch`, with known texts for a target.

Groups of texts are written together as `batch_generate` would; of the target only what its passes
cost is left. Rows are padded to the longest draft, so that a pass of R rows and width m costs
c(R m), and the plain batch of R rows c(R).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TypeVar

import mlx.nn as nn

from specdec_mlx.arguments import parse_draft_length
from specdec_mlx.batch.passes import BatchPasses, OneByOne
from specdec_mlx.batch.rounds import BatchGeneration, PassClock
from specdec_mlx.batch.schedule import BatchText, Request, Rounds, Schedule
from specdec_mlx.contracts import Draft, Drafter
from specdec_mlx.draft_length.drafting import Drafting
from specdec_mlx.draft_length.value import DraftLength
from specdec_mlx.lab.bench.cost import CostCurve
from specdec_mlx.lab.bench.record import Record
from specdec_mlx.lab.bench.replay import RecordedTarget, greedy_context
from specdec_mlx.lab.bench.timing import PLAIN, Sample
from specdec_mlx.lab.prompts import RecordedText, spread
from specdec_mlx.lab.tables import markdown_table
from specdec_mlx.loop import Generation
from specdec_mlx.options import Options
from specdec_mlx.sequence import SequenceState

Kind = TypeVar("Kind")


def groups_of(
    texts: Sequence[Kind], num_rows: int, count: int | None = None
) -> list[Sequence[Kind]]:
    """Groups of neighbours; what is left over is left out.

    Args:
        texts: in order.
        num_rows: texts of a group.
        count: most groups, at equal distances; all if None.
    """
    starts = list(range(0, len(texts) - num_rows + 1, num_rows))
    return [texts[start : start + num_rows] for start in spread(starts, count)]


class RecordedRows(OneByOne):
    """Passes over recorded texts, which take no time."""

    is_together = True


class RecordedRow(RecordedTarget):
    """One of several recorded texts."""

    def checked(self, draft: Draft, *, may_fork: bool) -> Draft:
        """The draft: nothing is computed with it."""
        return draft


@dataclass
class BilledPasses(PassClock):
    """Passes take what a curve says: texts are padded, so that one has texts times width positions.

    cost: c(m), in seconds. total: seconds of all passes.
    """

    cost: CostCurve = field(kw_only=True)
    total: float = 0.0

    def time_of_pass(self, current: Rounds, ahead: Rounds) -> tuple[float, bool]:
        """The curve's seconds."""
        width = max(round_.under_way.num_fed for _, round_ in current)
        seconds = self.cost(len(current) * width)
        self.total += seconds
        return seconds, True


@dataclass
class RecordedBatch(BatchGeneration):
    """`BatchGeneration` over recorded texts, which come in their order.

    vocab_size: V, as recorded.
    """

    vocab_size: int = field(kw_only=True)
    texts: Sequence[RecordedText] = field(kw_only=True)
    clock: BilledPasses = field(kw_only=True)

    def make_passes(self) -> BatchPasses:
        """Passes that know what comes."""
        return RecordedRows()

    def begin_text(self, uid: int, request: Request) -> BatchText:
        """A text before anything is generated."""
        text = self.texts[uid]
        target: Any = RecordedRow(text, self.vocab_size)
        sequence = SequenceState(list(text.prompt), len(text.prompt), len(text.generated))
        drafting = Drafting(
            self.drafter,
            self.length_of_text(),
            target,
            sequence,
            keeps_cache=False,
            stream=self.options.stream,
        )
        context = greedy_context(self.vocab_size)
        generation = Generation(target, sequence, drafting, context)
        generation.begin()
        return BatchText(uid, request, generation, target)


def replay_rows(
    texts: Sequence[RecordedText],
    drafter: Drafter | None,
    length: int | str | DraftLength,
    cost: CostCurve,
    *,
    vocab_size: int,
    memory: nn.Module,
) -> Sample:
    """Run a batch over recorded texts, all of them together.

    Args:
        texts: what plain decoding made of prompts.
        drafter: None for plain decoding.
        length: as of `BatchGeneration`; learns from the modelled seconds.
        cost: c(m), in seconds, of a pass over m positions of all rows together.
        vocab_size: V.
        memory: stands for the model that what is learned is kept with.

    Returns:
        The group as one text; plain seconds are those of one pass for a token of every text that
        has not ended.
    """
    batch = RecordedBatch(
        memory,
        drafter,
        Options(num_draft_tokens=length),
        Schedule(len(texts)),
        vocab_size=vocab_size,
        texts=texts,
        clock=BilledPasses(cost=cost),
    )
    for text in texts:
        batch.insert(Request(text.prompt, len(text.generated)))
    written: list[list[int]] = [[] for _ in texts]
    accepted, stats = 0, {}
    with closing(batch.run()) as tokens:
        for uid, token, *_ in tokens:
            written[uid].append(token.token)
            accepted += token.from_draft
            stats[uid] = token.stats
    assert written == [text.generated for text in texts]
    return Sample(
        PLAIN,
        id="+".join(text.id for text in texts),
        category="+".join(sorted({text.category for text in texts})),
        num_tokens=sum(map(len, written)),
        passes=batch.num_rounds,
        drafted=sum(account.drafted for account in stats.values()),
        accepted=accepted,
        decode_seconds=batch.clock.total,
        plain_seconds=plain_seconds([len(text.generated) for text in texts], cost),
    )


def plain_seconds(lengths: Sequence[int], cost: CostCurve) -> float:
    """Seconds of a batch of texts without drafts: one token of each a pass, until it ends."""
    return sum(
        cost(sum(length > step for length in lengths)) for step in range(max(lengths, default=0))
    )


@dataclass(frozen=True)
class RowsScore:
    """One way of drafting in batches of one size, under one cost curve.

    speedup: seconds of the plain batch over modelled ones, sums over the groups. least: of a group.
    """

    cost: str
    rows: int
    drafter: str
    draft_length: str
    groups: int
    tokens: int
    target_passes: int
    drafted: int
    accepted: int
    speedup: float
    least: float


def score_rows(
    record: Record,
    drafters: Mapping[str, Callable[[], Drafter | None]],
    draft_lengths: Sequence[str],
    num_rows: Sequence[int],
    cost: CostCurve,
) -> list[RowsScore]:
    """Every drafter with every draft length, in batches of every size.

    Args:
        record: of a benchmark; its texts are taken in groups of neighbours.
        drafters: name -> what makes the drafter.
        draft_lengths: numbers and policies, as on the command line.
        num_rows: texts of a group.
        cost: c(m), in seconds; see the module.
    """
    return [
        _score(record, name, make(), length, rows, cost)
        for rows in num_rows
        for name, make in drafters.items()
        for length in draft_lengths
    ]


def _score(
    record: Record, name: str, drafter: Drafter | None, length: str, rows: int, cost: CostCurve
) -> RowsScore:
    memory = nn.Module()
    done = [
        replay_rows(
            group,
            drafter,
            parse_draft_length(length),
            cost,
            vocab_size=record.settings.vocab_size,
            memory=memory,
        )
        for group in groups_of(record.texts, rows)
    ]
    return RowsScore(
        cost.name,
        rows,
        name,
        length,
        groups=len(done),
        tokens=sum(m.num_tokens for m in done),
        target_passes=sum(m.passes for m in done),
        drafted=sum(m.drafted for m in done),
        accepted=sum(m.accepted for m in done),
        speedup=sum(m.plain_seconds for m in done) / sum(m.seconds for m in done),
        least=min(m.plain_seconds / m.seconds for m in done),
    )


def format_rows(scores: Sequence[RowsScore]) -> str:
    """A table in Markdown."""
    header = ["rows", "drafter", "K", "groups", "speed", "least", "tok/pass", "accepted"]
    cells = [
        [
            *(str(s.rows), s.drafter, s.draft_length, str(s.groups)),
            *(f"{s.speedup:.2f}", f"{s.least:.2f}", f"{s.tokens / s.target_passes:.2f}"),
            f"{s.accepted / s.drafted:.2f}" if s.drafted else "-",
        ]
        for s in scores
    ]
    return markdown_table(header, cells, num_text_columns=3)
