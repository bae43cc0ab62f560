"""Answers of the target itself, to learn from: what speculation is about.

A drafter has to agree with the target on the target's own text, which differs from what people
write (Zhou et al. 2023, arXiv 2310.08461, section 3).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler
from tqdm import tqdm

from specdec_mlx.training.files import save_text
from specdec_mlx.training.texts import padded

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
) -> dict[Turn, np.ndarray]:
    """The target's own answers, each to its end of text if that is in the window.

    Args:
        target: what writes.
        tokenizer: its tokenizer.
        prompts: token ids, each shorter than the window.
        window: tokens of a prompt and its answer.
        todo: what to answer at which temperature; 0 is greedy.
        path: file of the answers, a line each as they end; what stands there is not written anew.
        is_time: whether to begin no more of them.

    Returns:
        int32 [window, 2] each, see `texts`, in the order of rounds and prompts.
    """
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0] if path.exists() else ""
    lines = [json.loads(line) for line in whole.splitlines()]
    found = {tuple(line["turn"]): line["tokens"] for line in lines}
    save_text(path, whole + "\n" * bool(whole))  # a line that was cut off is left out
    missing = (turn for turn in todo if turn not in found)
    with path.open("a", encoding="utf-8") as file:
        for turn, tokens in written(target, tokenizer, prompts, window, missing, is_time):
            found[turn] = tokens
            file.write(json.dumps({"turn": turn, "tokens": tokens}) + "\n")
            file.flush()
    return {turn: padded(prompts[turn[1]], found[turn], window) for turn in sorted(found)}


def written(
    target: nn.Module,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    window: int,
    missing: Iterator[Turn],
    is_time: Callable[[], bool],
) -> Iterator[tuple[Turn, list[int]]]:
    """Answers as they end, the end-of-text token included; see `answers`."""
    texts: dict[int, tuple[Turn, list[int]]] = {}
    stops = [[token] for token in tokenizer.eos_token_ids]
    num_tokens = 0
    with (
        closing(BatchGenerator(target, stop_tokens=stops, completion_batch_size=ROWS)) as batch,
        tqdm(desc="answers", unit="", leave=False, miniters=0, mininterval=1) as bar,
    ):
        while True:
            for turn in islice(missing, 0 if is_time() else ROWS - len(texts)):
                prompt = prompts[turn[1]]
                sampler = make_sampler(temp=turn[2])
                uids = batch.insert([prompt], [window - len(prompt)], samplers=[sampler])
                texts[uids[0]] = turn, []
            if not texts:
                return
            for response in batch.next_generated():
                texts[response.uid][1].append(int(response.token))
                num_tokens += 1
                if response.finish_reason is not None:
                    yield texts.pop(response.uid)
                    bar.update()
            bar.set_postfix(tokens=num_tokens, refresh=False)
            bar.update(0)
