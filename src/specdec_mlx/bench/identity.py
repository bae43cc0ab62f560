"""Are the texts the same, and where not: was it a near tie of the target's own?"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step

from specdec_mlx.bench.contenders import PLAIN, Keyed
from specdec_mlx.bench.prompts import Task
from specdec_mlx.bench.timing import Sample

EXCUSED_GAP = 1e-4  # logits; several rows at once round otherwise than one row on some backends


@dataclass(frozen=True)
class Difference(Keyed):
    """First place where a sample's text parts from that of plain decoding.

    position: among the generated tokens. top_two_gap: of the target's logits there, in a
    single-token pass. excused: True if that is a tie but for rounding.
    """

    id: str
    category: str
    drafter: str
    draft_length: str
    repeat: int
    position: int
    top_two_gap: float
    excused: bool
    rule: str = ""


def reference_texts(samples: Sequence[Sample]) -> dict[str, list[int]]:
    """Tokens by plain decoding per task id, those of the first repeat."""
    return {s.id: s.tokens for s in samples if s.drafter == PLAIN and s.repeat == 0}


def find_differences(
    model: nn.Module, tasks: Sequence[Task], samples: Sequence[Sample]
) -> list[Difference]:
    """All samples whose text is not the reference, plain decoding's own repeats included."""
    prompts = {task.id: task.prompt for task in tasks}
    references = reference_texts(samples)
    gap_in = cache(lambda text, position: top_two_gap(model, prompts[text], position))
    differences = []
    for s in samples:
        position = first_difference(s.tokens, references[s.id])
        if position is not None:
            gap = gap_in(s.id, position)
            whose = s.id, s.category, s.drafter, s.draft_length, s.repeat
            differences.append(Difference(*whose, position, gap, gap < EXCUSED_GAP, s.rule))
    return differences


def first_difference(tokens: Sequence[int], reference: Sequence[int]) -> int | None:
    """Index of the first difference; where one is the other's beginning, its length; else None."""
    if list(tokens) == list(reference):
        return None
    pairs = enumerate(zip(tokens, reference, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(reference)))


def top_two_gap(model: nn.Module, prompt: Sequence[int], position: int) -> float:
    """Difference of the two greatest logits at generated token `position`, decoded plainly."""
    with closing(generate_step(mx.array(list(prompt)), model, max_tokens=position + 1)) as steps:
        ((_, logprobs),) = deque(steps, maxlen=1)
    second, best = mx.sort(logprobs.astype(mx.float32))[-2:]
    gap: float = (best - second).item()  # type: ignore[assignment]
    return gap
