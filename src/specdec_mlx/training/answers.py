"""The target's own answers, to learn from: what speculation is about.

A drafter has to agree with the target on the target's own text, which differs from what people
write (Zhou et al. 2023, arXiv 2310.08461, section 3).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler
from tqdm import tqdm

ROWS = 32
"""Answers that are written side by side."""

Turn = tuple[int, int, float]
"""Round, number of the prompt, and the temperature of that round."""


def answers(
    target: nn.Module,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    window: int,
    todo: Iterable[Turn],
    path: Path,
    is_time: Callable[[], bool],
) -> dict[Turn, list[int]]:
    """Answers to prompts, each with its end-of-text token if that is in the window.

    Args:
        target: what writes.
        tokenizer: its tokenizer.
        prompts: token ids, each shorter than the window.
        window: tokens of a prompt and its answer.
        todo: what to answer at which temperature; 0 is greedy.
        path: file of the answers, a line each as they end; what stands there is not written anew.
        is_time: whether to begin no more of them.
    """
    found = stored(path)
    under_way: dict[int, tuple[Turn, list[int]]] = {}
    missing = (turn for turn in todo if turn not in found)
    stops = [[token] for token in tokenizer.eos_token_ids]
    num_tokens = 0
    with (
        path.open("a", encoding="utf-8") as file,
        closing(BatchGenerator(target, stop_tokens=stops, completion_batch_size=ROWS)) as batch,
        tqdm(desc="answers", unit="", leave=False, miniters=0, mininterval=1) as bar,
    ):
        while True:
            for turn in islice(missing, 0 if is_time() else ROWS - len(under_way)):
                prompt, sampler = prompts[turn[1]], make_sampler(temp=turn[2])
                uids = batch.insert([prompt], [window - len(prompt)], samplers=[sampler])
                under_way[uids[0]] = turn, []
            if not under_way:
                return dict(sorted(found.items()))
            for response in batch.next_generated():
                under_way[response.uid][1].append(int(response.token))
                num_tokens += 1
                if response.finish_reason is not None:
                    turn, found[turn] = under_way.pop(response.uid)
                    print(json.dumps([turn, found[turn]]), file=file, flush=True)
                    bar.update()
            bar.set_postfix(tokens=num_tokens, refresh=False)
            bar.update(0)


def stored(path: Path) -> dict[Turn, list[int]]:
    """Answers that a file has; a line that was cut off is taken out of it."""
    if not path.exists():
        return {}
    whole = path.read_bytes().rpartition(b"\n")[0]
    os.truncate(path, len(whole) + bool(whole))
    return {tuple(turn): tokens for turn, tokens in map(json.loads, whole.splitlines())}
