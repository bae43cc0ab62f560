"""Samples to results: the numbers of each contender and category."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from specdec_mlx.bench.contenders import PLAIN, Keyed
from specdec_mlx.bench.identity import Difference
from specdec_mlx.bench.timing import Sample

OfText = TypeVar("OfText", Sample, Difference)

ALL = "all"


@dataclass(frozen=True)
class Result(Keyed):
    """One contender on one category of texts ("all" is every text).

    Speeds leave out prefill and first round, take the median of the repeats of each text, and are
    None where no text is longer than its first round.

    texts, tokens: in one repeat; other counts are of all. ratio: tokens per second over plain
    decoding's, with a 95% bootstrap interval over texts; end_to_end_ratio: prefill included.
    drafting_share: of the passes. host_ms_per_round: in the loop outside the target's passes, None
    for mlx-lm's own. peak_memory_gb: with all that ran side by side. first_token_seconds: median;
    first_token_ratio: over plain decoding's. identical: texts that are plain decoding's in every
    repeat, None where drawn at random; excused: further ones that part at a near tie only.
    """

    drafter: str
    draft_length: str
    category: str
    texts: int
    tokens: int
    total_tokens_per_second: float | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
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
    def accepted_share(self) -> float:
        """Share of all drafted tokens that was accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0


def summarise(
    samples: Sequence[Sample], differences: Sequence[Difference], greedy: bool = True
) -> list[Result]:
    """A result per contender and category, "all" last; greedy: True if texts were compared."""
    results = []
    for category in [*dict.fromkeys(s.category for s in samples), ALL]:
        chosen = [s for s in samples if category in (s.category, ALL)]
        baseline = [s for s in chosen if s.drafter == PLAIN]
        for key in dict.fromkeys(s.key for s in samples):
            own = [s for s in chosen if s.key == key]
            parted = [d for d in differences if d.key == key] if greedy else None
            results.append(_result(category, own, baseline, parted))
    return results


def throughput_ratio(ours: np.ndarray, plain: np.ndarray) -> np.ndarray:
    """All tokens over all seconds, over the same of plain decoding; [..., n, 2] each."""
    own, base = ours.sum(axis=-2), plain.sum(axis=-2)
    pace, plain_pace = own[..., 0] / own[..., 1], base[..., 0] / base[..., 1]
    return np.asarray(pace / plain_pace)


def bootstrap_interval(
    ours: np.ndarray, plain: np.ndarray, seed: int = 0, num_resamples: int = 4000
) -> np.ndarray:
    """95% percentile interval [2] of the throughput ratio, texts [n, 2] drawn with replacement."""
    rows = np.random.default_rng(seed).integers(0, len(ours), (num_resamples, len(ours)))
    return np.asarray(np.quantile(throughput_ratio(ours[rows], plain[rows]), [0.025, 0.975]))


def _result(
    category: str, own: list[Sample], baseline: list[Sample], parted: list[Difference] | None
) -> Result:
    """One contender's samples of a category; parted: None where texts were not compared."""
    passes, known = sum(s.passes for s in own), [s for s in own if s.host_seconds is not None]
    host_seconds = sum(s.host_seconds or 0.0 for s in known)
    identical, excused = (None, None) if parted is None else _identity(own, parted)
    return Result(
        drafter=own[0].drafter,
        draft_length=own[0].draft_length,
        category=category,
        texts=len({s.id for s in own}),
        tokens=sum(len(s.tokens) for s in own if s.repeat == 0),
        **_speeds(own, baseline),
        tokens_per_pass=sum(len(s.tokens) for s in own) / passes,
        target_passes=passes,
        drafted=sum(s.drafted for s in own),
        accepted=sum(s.accepted for s in own),
        drafting_share=sum(s.drafting_rounds for s in own) / passes,
        host_ms_per_round=1e3 * host_seconds / sum(s.passes for s in known) if known else None,
        peak_memory_gb=max(s.peak_bytes for s in own) / 1e9,
        first_token_seconds=statistics.median(s.first_seconds for s in own),
        identical=identical,
        excused=excused,
        rule=own[0].rule,
        first_token_ratio=_to_first(own) / _to_first(baseline) if baseline else None,
    )


def _speeds(own: list[Sample], baseline: list[Sample]) -> dict[str, float | None]:
    """The fields of a result that are speeds, by name, of texts that both sides have a pace for."""
    names = ("total_tokens_per_second", "ratio", "ratio_low", "ratio_high", "end_to_end_ratio")
    timed = [_by_id(s for s in side if s.seconds_per_token is not None) for side in (own, baseline)]
    ids = [name for name in timed[0] if name in timed[1]]
    if not ids:
        return dict.fromkeys(names)
    # [n, 3] each: tokens, seconds for decoding them, and seconds in all
    ours, plain = (
        np.array([_tokens_and_seconds(side[name]) for name in ids])
        for side in (_by_id(own), _by_id(baseline))
    )
    tokens, seconds, _ = ours.sum(axis=0)
    decoding = ours[:, :2], plain[:, :2]
    ends = throughput_ratio(*decoding), *bootstrap_interval(*decoding)
    values = tokens / seconds, *ends, throughput_ratio(ours[:, ::2], plain[:, ::2])
    return {name: float(value) for name, value in zip(names, values, strict=True)}


def _tokens_and_seconds(text: list[Sample]) -> tuple[float, float, float]:
    """Mean tokens of the repeats, at their median seconds a token, and median seconds in all."""
    tokens = statistics.mean(len(s.tokens) for s in text)
    pace = statistics.median(s.seconds_per_token for s in text if s.seconds_per_token)
    in_all = statistics.median(s.first_seconds + s.decode_seconds for s in text)
    return tokens, tokens * pace, in_all


def _to_first(samples: list[Sample]) -> float:
    """Seconds to the first token, of all texts together."""
    texts = _by_id(samples).values()
    return sum(statistics.median(s.first_seconds for s in text) for text in texts)


def _identity(own: list[Sample], parted: list[Difference]) -> tuple[int, int]:
    """Texts without any difference, and texts whose differences are all excused."""
    ids = {s.id for s in own}
    texts = _by_id(difference for difference in parted if difference.id in ids).values()
    return len(ids) - len(texts), sum(all(d.excused for d in text) for text in texts)


def _by_id(items: Iterable[OfText]) -> dict[str, list[OfText]]:
    by_id: dict[str, list[OfText]] = {}
    for item in items:
        by_id.setdefault(item.id, []).append(item)
    return by_id
