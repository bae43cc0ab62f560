"""Samples to results: what a benchmark says about each contender and category."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from jaxtyping import Float

from specdec_mlx.bench.contenders import PLAIN
from specdec_mlx.bench.identity import Difference
from specdec_mlx.bench.timing import Sample

T = TypeVar("T")

ALL = "all"
NUM_RESAMPLES = 4000
SPEED_FIELDS = (
    "tokens_per_second",
    "total_tokens_per_second",
    "ratio",
    "ratio_low",
    "ratio_high",
    "mean_ratio",
    "end_to_end_ratio",
)

Array = Float[np.ndarray, " n"]


@dataclass(frozen=True)
class Result:
    """One contender on one category of texts.

    Speeds leave out the prefill and the first round, and of a text the median of the repeats
    counts. They are None where no text is longer than its first round.

    Attributes:
        drafter: as given on the command line.
        draft_length: the same; "" where it means nothing.
        category: of the texts; "all" is every text.
        texts: how many were generated, in one repeat.
        tokens: how many were generated, in one repeat.
        tokens_per_second: median over texts.
        total_tokens_per_second: all tokens over all seconds.
        ratio: that, over plain decoding's.
        ratio_low: lower end of its 95% bootstrap interval over texts.
        ratio_high: upper end.
        mean_ratio: mean over texts of their own ratios.
        end_to_end_ratio: as `ratio`, from the call to the last token.
        tokens_per_pass: tokens over target passes, of all repeats.
        target_passes: sum over all repeats.
        drafted: draft tokens proposed, sum over all repeats.
        accepted: draft tokens handed out, sum over all repeats.
        drafting_share: share of the passes that had a draft.
        host_ms_per_round: milliseconds in the loop outside the target's passes, over the texts that
            say; None for mlx-lm's own loops.
        peak_memory_gb: with the caches of all contenders that ran side by side.
        first_token_seconds: median.
        first_token_ratio: over plain decoding's; of all texts together, each at the median of its
            repeats. None without plain decoding, and in records of older versions.
        identical: texts that are plain decoding's in every repeat; None where tokens are drawn at
            random.
        excused: further texts that part from it at a near tie only; None as above.
        rule: as given on the command line; "" where it means nothing.
    """

    drafter: str
    draft_length: str
    category: str
    texts: int
    tokens: int
    tokens_per_second: float | None
    total_tokens_per_second: float | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    mean_ratio: float | None
    end_to_end_ratio: float | None
    tokens_per_pass: float
    target_passes: int
    drafted: int
    accepted: int
    drafting_share: float
    host_ms_per_round: float | None
    peak_memory_gb: float
    first_token_seconds: float
    identical: int | None
    excused: int | None
    rule: str = ""
    first_token_ratio: float | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """Its contender's key."""
        return self.drafter, self.draft_length, self.rule

    @property
    def accepted_share(self) -> float:
        """Share of all drafted tokens that was accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True)
class Speeds:
    """One contender's texts of a category, in a fixed order of texts.

    Attributes:
        tokens: [n] per text, mean over repeats.
        seconds: [n] for decoding them, at the median seconds per token of the repeats.
        total_seconds: [n] median, prefill included.
    """

    tokens: Array
    seconds: Array
    total_seconds: Array


def summarise(
    samples: Sequence[Sample], differences: Sequence[Difference], greedy: bool = True
) -> list[Result]:
    """A result per contender and category, "all" last, in order of appearance.

    Args:
        samples: every generation.
        differences: where texts part from plain decoding's.
        greedy: whether the texts were compared.
    """
    results = []
    categories = [*_unique(s.category for s in samples), ALL]
    for category in categories:
        chosen = [s for s in samples if category in (s.category, ALL)]
        baseline = [s for s in chosen if s.drafter == PLAIN]
        for key in _unique(s.key for s in samples):
            own = [s for s in chosen if s.key == key]
            parted = [d for d in differences if d.key == key]
            results.append(_result(category, own, baseline, parted, greedy))
    return results


def speeds(samples: Iterable[Sample], ids: Sequence[str]) -> Speeds:
    """Per-text medians of one contender's samples, for the texts `ids`."""
    by_id: dict[str, list[Sample]] = {name: [] for name in ids}
    for sample in samples:
        if sample.id in by_id:
            by_id[sample.id].append(sample)
    tokens = [statistics.mean(len(s.tokens) for s in by_id[name]) for name in ids]
    pace = [statistics.median(_paces(by_id[name])) for name in ids]
    total = [
        statistics.median(s.first_seconds + s.decode_seconds for s in by_id[name]) for name in ids
    ]
    return Speeds(np.array(tokens), np.array(tokens) * np.array(pace), np.array(total))


def throughput_ratio(ours: Speeds, plain: Speeds) -> float:
    """All tokens over all seconds, over the same of plain decoding."""
    return float(_ratio(ours, plain, np.arange(len(ours.tokens))))


def bootstrap_interval(
    ours: Speeds, plain: Speeds, seed: int = 0, num_resamples: int = NUM_RESAMPLES
) -> tuple[float, float]:
    """95% percentile interval of the throughput ratio, texts drawn with replacement.

    It covers the choice of texts, which moves a ratio far more than the clock does.

    Args:
        ours: one contender's texts.
        plain: the same texts by plain decoding.
        seed: of the draws.
        num_resamples: how many times texts are drawn.
    """
    n = len(ours.tokens)
    rows = np.random.default_rng(seed).integers(0, n, (num_resamples, n))
    low, high = np.quantile(_ratio(ours, plain, rows), [0.025, 0.975])
    return float(low), float(high)


def _ratio(ours: Speeds, plain: Speeds, rows: np.ndarray) -> np.ndarray:
    """Throughput ratio of chosen texts [..., n]."""
    own = ours.tokens[rows].sum(-1) / ours.seconds[rows].sum(-1)
    base = plain.tokens[rows].sum(-1) / plain.seconds[rows].sum(-1)
    return np.asarray(own / base)


def _result(
    category: str,
    own: list[Sample],
    baseline: list[Sample],
    parted: list[Difference],
    greedy: bool,
) -> Result:
    passes = sum(s.passes for s in own)
    drafted = sum(s.drafted for s in own)
    accepted = sum(s.accepted for s in own)
    identical, excused = _identity(own, parted)
    first = own[0]
    return Result(
        drafter=first.drafter,
        draft_length=first.draft_length,
        category=category,
        texts=len({s.id for s in own}),
        tokens=sum(len(s.tokens) for s in own if s.repeat == 0),
        **_speed_fields(own, baseline),
        tokens_per_pass=sum(len(s.tokens) for s in own) / passes,
        target_passes=passes,
        drafted=drafted,
        accepted=accepted,
        drafting_share=sum(s.drafting_rounds for s in own) / passes,
        host_ms_per_round=_host_ms(own),
        peak_memory_gb=max(s.peak_bytes for s in own) / 1e9,
        first_token_seconds=statistics.median(s.first_seconds for s in own),
        identical=identical if greedy else None,
        excused=excused if greedy else None,
        rule=first.rule,
        first_token_ratio=_first_token_ratio(own, baseline),
    )


def _speed_fields(own: list[Sample], baseline: list[Sample]) -> dict[str, float | None]:
    """The fields of a result that come from the clock, by name."""
    ids = _timed_ids(own, baseline)
    if not ids:
        return dict.fromkeys(SPEED_FIELDS)
    ours, plain = speeds(own, ids), speeds(baseline, ids)
    end_to_end = ours.tokens.sum() / ours.total_seconds.sum()
    end_to_end /= plain.tokens.sum() / plain.total_seconds.sum()
    own_pace, plain_pace = ours.tokens / ours.seconds, plain.tokens / plain.seconds
    values = (
        np.median(own_pace),
        ours.tokens.sum() / ours.seconds.sum(),
        throughput_ratio(ours, plain),
        *bootstrap_interval(ours, plain),
        np.mean(own_pace / plain_pace),
        end_to_end,
    )
    return {name: float(value) for name, value in zip(SPEED_FIELDS, values, strict=True)}


def _first_token_ratio(own: list[Sample], baseline: list[Sample]) -> float | None:
    """Time to the first token over plain decoding's, all texts together."""
    totals = []
    for samples in (own, baseline):
        by_id: dict[str, list[float]] = {}
        for sample in samples:
            by_id.setdefault(sample.id, []).append(sample.first_seconds)
        totals.append(sum(statistics.median(seconds) for seconds in by_id.values()))
    return totals[0] / totals[1] if baseline else None


def _identity(own: list[Sample], parted: list[Difference]) -> tuple[int, int]:
    """Texts without any difference, and texts whose differences are all excused."""
    ids = {s.id for s in own}
    by_id: dict[str, list[bool]] = {}
    for difference in parted:
        if difference.id in ids:
            by_id.setdefault(difference.id, []).append(difference.excused)
    return len(ids) - len(by_id), sum(all(excuses) for excuses in by_id.values())


def _host_ms(own: list[Sample]) -> float | None:
    known = [s for s in own if s.host_seconds is not None]
    seconds = sum(s.host_seconds or 0.0 for s in known)
    return 1e3 * seconds / sum(s.passes for s in known) if known else None


def _timed_ids(own: list[Sample], baseline: list[Sample]) -> list[str]:
    """Texts that both sides have a pace for: a text of one round has none."""
    timed = [{s.id for s in side if s.seconds_per_token is not None} for side in (own, baseline)]
    return [name for name in _unique(s.id for s in own) if name in timed[0] & timed[1]]


def _paces(samples: list[Sample]) -> list[float]:
    return [s.seconds_per_token for s in samples if s.seconds_per_token is not None]


def _unique(items: Iterable[T]) -> list[T]:
    """Each item once, in order of appearance."""
    return list(dict.fromkeys(items))
