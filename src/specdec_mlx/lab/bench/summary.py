"""Samples to results: where texts differ, and the numbers of each contender and category."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import cache
from itertools import zip_longest
from math import nan
from statistics import mean, median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step
from msgspec.structs import replace

from specdec_mlx.files import Count
from specdec_mlx.lab.bench.timing import PLAIN, Amount, Sample, Way
from specdec_mlx.lab.estimates import ratio_of
from specdec_mlx.lab.probing import near_tie, probe
from specdec_mlx.lab.prompts import RecordedText

ALL = "all"


class Difference(Way, frozen=True, kw_only=True):
    """First place where a text differs from plain decoding.

    Attributes:
        id: of the prompt.
        category: of the prompt.
        repeat: run of the prompt.
        position: index among the generated tokens.
        top_two_gap: gap between the target's two greatest logits there, in a single-token pass.
        excused: True if rounding in passes over several positions explains the gap.
    """

    id: str
    category: str
    repeat: Count
    position: Count
    top_two_gap: Amount
    excused: bool


class Result(Way, frozen=True, kw_only=True):
    """Comparison of a contender with plain decoding, on the texts of a category.

    Speeds leave out the prefill and the first round. They use the median of the repeats of each
    text. They are None if no text is longer than its first round.

    Attributes:
        category: "all" for every text.
        session: of the texts, or "".
        cost: curve of a modelled run, or "".
        texts: number of texts in one repeat.
        tokens: number of tokens in one repeat. Other counts are over all repeats.
        ratio: tokens per second relative to plain decoding, with a 95% bootstrap interval over
            texts from `ratio_low` to `ratio_high`.
        end_to_end_ratio: the ratio with prefill. None for a modelled run.
        live_ratio: for a modelled run, the ratio measured at the same cost, or None.
        drafting_share: share of passes with a draft.
        peak_memory_gb: includes all contenders that ran side by side.
        first_token_seconds: median.
        first_token_ratio: relative to plain decoding.
        identical: texts that equal plain decoding in every repeat. None if they were not compared.
        excused: other texts that differ only at near ties.
        ties: passes that decided near ties.
    """

    category: str
    session: str = ""
    cost: str = ""
    texts: Count
    tokens: Count
    total_tokens_per_second: Amount | None = None
    ratio: Amount | None = None
    ratio_low: Amount | None = None
    ratio_high: Amount | None = None
    end_to_end_ratio: Amount | None = None
    live_ratio: Amount | None = None
    tokens_per_pass: Amount
    target_passes: Count
    drafted: Count
    accepted: Count
    drafting_share: Amount
    peak_memory_gb: Amount
    first_token_seconds: Amount
    identical: Count | None
    excused: Count | None
    first_token_ratio: Amount | None = None
    ties: Count = 0

    @property
    def accepted_share(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


def find_differences(
    model: nn.Module, tasks: Sequence[RecordedText], samples: Sequence[Sample]
) -> list[Difference]:
    prompts = {task.id: task.prompt for task in tasks}
    plain = {(s.id, s.repeat): s.tokens for s in samples if s.drafter == PLAIN}
    # Repeats and contenders often differ at the same place.
    gap_in = cache(lambda text, position: top_two_gap(model, prompts[text], position))
    tie = cache(lambda: near_tie(probe(model, past_window=False).differences))
    differences = []
    for s in samples:
        position = first_difference(s.tokens, plain[s.id, s.repeat])
        if position is not None:
            gap = gap_in(s.id, position)
            where: Any = {"id": s.id, "category": s.category, "repeat": s.repeat}
            where |= {"position": position, "top_two_gap": gap, "excused": gap <= tie()}
            differences.append(Difference(*s.key, **where))
    return differences


def first_difference(tokens: Sequence[int], reference: Sequence[int]) -> int | None:
    """Index of the first difference, or None. A missing token counts as a difference."""
    pairs = enumerate(zip_longest(tokens, reference))
    return next((i for i, (a, b) in pairs if a != b), None)


def top_two_gap(model: nn.Module, prompt: Sequence[int], position: int) -> float:
    """Gap between the two greatest logits at generated token `position`, in plain decoding."""
    with closing(generate_step(mx.array(list(prompt)), model, max_tokens=position + 1)) as steps:
        *_, (_, logprobs) = steps
    top: Any = mx.sort(logprobs.astype(mx.float32))[-2:].tolist()
    return float(top[1] - top[0])


def summarise(
    samples: Sequence[Sample], differences: Sequence[Difference], greedy: bool = True
) -> list[Result]:
    """A result for each contender and category, for all categories together, and for each session.

    Args:
        samples: runs of all contenders. Without plain decoding among them, its modelled seconds are
            the baseline.
        differences: places where texts differ.
        greedy: True if texts were compared.
    """
    groups = dict.fromkeys((s.category, "") for s in samples) | {(ALL, ""): None}
    groups |= dict.fromkeys((s.category, s.session) for s in samples if s.session)
    keys, results = dict.fromkeys(s.key for s in samples), []
    for category, session in groups:
        chosen = [
            s for s in samples if category in (s.category, ALL) and session in (s.session, "")
        ]
        plain = [s for s in chosen if s.drafter == PLAIN]
        for key in keys:
            runs = [s for s in chosen if s.key == key]
            # A replay has no runs of plain decoding, and each sample knows the modelled time.
            modelled = [replace(s, decode_seconds=s.plain_seconds) for s in runs]
            passes, ids = sum(s.passes for s in runs), {s.id for s in runs}
            identity: dict[str, Any] = {"identical": None, "excused": None}
            if greedy:
                parted = [d for d in differences if d.key == key and d.id in ids]
                different = {d.id for d in parted}
                # A text is excused if all its differences are near ties.
                excused = different - {d.id for d in parted if not d.excused}
                identity = {"identical": len(ids - different), "excused": len(excused)}
            results.append(
                Result(
                    *key,
                    category=category,
                    session=session,
                    texts=len(ids),
                    tokens=sum(s.num_tokens for s in runs if s.repeat == 0),
                    tokens_per_pass=sum(s.num_tokens for s in runs) / passes,
                    target_passes=passes,
                    drafted=sum(s.drafted for s in runs),
                    accepted=sum(s.accepted for s in runs),
                    ties=sum(s.ties for s in runs),
                    drafting_share=sum(s.drafting_rounds for s in runs) / passes,
                    peak_memory_gb=max(s.peak_bytes for s in runs) / 1e9,
                    first_token_seconds=median(s.first_seconds for s in runs),
                    **identity | _speeds(_times(runs), _times(plain or modelled)),
                )
            )
    return results


def _times(samples: list[Sample]) -> dict[str, list[float]]:
    """For each text: mean tokens, and median seconds of decoding, in all, and to the first token.

    Decoding seconds are NaN if a text is no longer than its first round.
    """
    times = {}
    for name in dict.fromkeys(s.id for s in samples):
        runs = [s for s in samples if s.id == name]
        # Sampled texts of several repeats differ in length.
        tokens = mean(s.num_tokens for s in runs)
        pace = median([s.seconds_per_token for s in runs if s.seconds_per_token] or [nan])
        in_all, first = (median(s.seconds for s in runs), median(s.first_seconds for s in runs))
        times[name] = [tokens, tokens * pace, in_all, first]
    return times


def _speeds(contender: dict[str, list[float]], baseline: dict[str, list[float]]) -> dict[str, Any]:
    speeds: dict[str, float] = {}
    names = [name for name in contender if name in baseline]
    if not names:
        return speeds
    ours, plain = (np.array([side[name] for name in names]) for side in (contender, baseline))
    is_live = plain[:, 3].sum() > 0  # a modelled text takes no time to its first token
    if is_live:
        speeds["first_token_ratio"] = ours[:, 3].sum() / plain[:, 3].sum()
    is_timed = ~np.isnan(ours + plain).any(axis=1)
    ours, plain = ours[is_timed], plain[is_timed]
    if len(ours):
        tokens, seconds, *_ = ours.sum(axis=0)
        # Total tokens over total seconds, so long texts weigh more.
        ratio = ratio_of(ours[:, :2], plain[:, :2])
        speeds |= {"total_tokens_per_second": tokens / seconds, "ratio": ratio.mean}
        speeds |= {"ratio_low": ratio.low, "ratio_high": ratio.high}
        if is_live:
            speeds["end_to_end_ratio"] = ratio_of(ours[:, :3:2], plain[:, :3:2]).mean
    return {name: float(speed) for name, speed in speeds.items()}
