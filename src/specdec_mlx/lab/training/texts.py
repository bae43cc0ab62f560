"""Texts to train on: files, or the target's answers, as documents and as windows of token ids.

Beside each token stands 1 if it is learnt, else 0: windows are int32 [n, window, 2]. A drafter has
to agree with the target on the target's own text (Zhou et al. 2023, arXiv 2310.08461, section 3).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np

from specdec_mlx.batch_generation import batch_stream_generate
from specdec_mlx.errors import TrainingError
from specdec_mlx.files import read_text, text_lines
from specdec_mlx.lab.prompts import encode_messages, messages_of, read_lines
from specdec_mlx.progress import progress_bar

HELD_OUT_SHARE = 0.05  # part of the windows, or of the prompts, that is held out by default
ROWS = 32  # answers that are written side by side
# round, index of the prompt, and temperature; 0 is greedy
Turn = tuple[int, int, float]
Document = list[tuple[int, int]]  # each token, and 1 if it is learnt


def read_documents(paths: Sequence[str], tokenizer: Any) -> Iterator[Document]:
    """The tokens of each document. Raises TrainingError for files that cannot be read.

    A `.jsonl` file has a document on each line, in mlx-lm's formats. These are `text`, or `prompt`
    and a learnt `completion`, or `messages` of which the last is learnt. Any other file is a single
    document.
    """

    def document(line: Any, number: int) -> list[Document]:
        match line:
            case {"text": str(text)}:
                return [learnt(_encode(tokenizer, text))]
            case {"prompt": str(prompt), "completion": str(completion)}:
                begin = len(_encode(tokenizer, prompt))
                return [learnt(_encode(tokenizer, prompt + completion), begin)]
            case {"messages": [*before, {"role": "assistant"} as answer]}:
                read = tokenizer.apply_chat_template(before, add_generation_prompt=True)
                return [learnt(tokenizer.apply_chat_template([*before, answer]), len(read))]
        raise TypeError

    formats = "text, with prompt and completion, or with messages, the last of them the assistant's"
    for path in map(Path, paths):
        with _readable(path):
            if path.suffix == ".jsonl":
                yield from read_lines(path, document, formats)
            else:
                yield learnt(_encode(tokenizer, read_text(path)))


def read_prompts(paths: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Token ids of each prompt in the chat template. Raises TrainingError for unreadable files.

    A `.jsonl` file has on each line `turns`, of which the first is used, `messages` without a final
    answer, or `prompt`. Any other file has a question on each line.
    """
    conversations: list[list[dict[str, str]]] = []
    for path in map(Path, paths):
        with _readable(path):
            if path.suffix == ".jsonl":
                each = lambda line, number: [messages_of(line)]  # noqa: E731
                conversations += read_lines(path, each, "turns, messages or prompt")
            else:
                conversations += [messages_of(line) for _, line in text_lines(path)]
    return [encode_messages(tokenizer, messages) for messages in conversations]


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TrainingError(f"There is no file {path}. Give texts that can be read.") from error
    except ValueError as error:
        raise TrainingError(str(error)) from error


def learnt(tokens: Sequence[int], begin: int = 0) -> Document:
    return [(token, int(i >= begin)) for i, token in enumerate(tokens)]


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, verbose=False))  # no warning that it is long


def windows_of(paths: Sequence[str], tokenizer: Any, window: int, stride: int) -> np.ndarray:
    """Windows of all documents, `stride` tokens apart, with an end-of-text token before each."""
    end, documents = tokenizer.eos_token_id, read_documents(paths, tokenizer)
    before = [] if end is None else [(end, 1)]
    stream = [pair for document in documents for pair in before + document]
    starts = range(0, len(stream) - window + 1, stride)
    rows = np.array([stream[i : i + window] for i in starts], np.int32).reshape(-1, window, 2)
    return rows[rows[:, 1:, 1].any(axis=1)]


def padded(document: Document, window: int) -> np.ndarray:
    return np.array(document + [(0, 0)] * (window - len(document)), np.int32)


def split(count: int, seed: int) -> tuple[list[int], list[int]]:
    order = np.random.default_rng(seed).permutation(count).tolist()
    held_out = max(1, round(HELD_OUT_SHARE * count))
    return order[held_out:], order[:held_out]


def answers(
    target: nn.Module,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    window: int,
    todo: Iterable[Turn],
    path: Path,
    is_time: Callable[[], bool],
) -> dict[Turn, list[int]]:
    """Answers to prompts that are shorter than the window, up to their end or the window's.

    Args:
        target: answers the prompts.
        tokenizer: the target's.
        prompts: token ids.
        window: limit on prompt and answer together.
        todo: turns to answer, sorted by temperature.
        path: file of the answers, which a later call continues.
        is_time: returns True when no more answers may begin.
    """
    finished = stored(path)
    missing = [turn for turn in todo if turn not in finished]
    with (
        path.open("a", encoding="utf-8") as file,
        progress_bar(desc="answers", total=len(missing), leave=False) as bar,
    ):
        # A batch has a single temperature.
        for temp, of_temp in groupby(missing, key=lambda turn: turn[2]):
            turns = list(of_temp)
            generated: list[list[int]] = [[] for _ in turns]
            # The batch asks for a prompt when a slot is free, so no answer begins after the time.
            begun = takewhile(lambda _: not is_time(), turns)
            for response in batch_stream_generate(
                target,
                tokenizer,
                (prompts[i] for _, i, _ in begun),
                [window - len(prompts[i]) for _, i, _ in turns],
                drafter=None,
                temp=temp,
                completion_batch_size=ROWS,
            ):
                turn, answer = turns[response.index], generated[response.index]
                answer.append(response.token)
                if response.finish_reason is not None:
                    finished[turn] = answer
                    print(json.dumps([turn, answer]), file=file, flush=True)
                    bar.update()
    return dict(sorted(finished.items()))


def stored(path: Path) -> dict[Turn, list[int]]:
    """Answers in a file. An incomplete last line is removed from the file."""
    if not path.exists():
        return {}
    complete = path.read_bytes().rpartition(b"\n")[0]
    os.truncate(path, len(complete) + bool(complete))
    return {tuple(turn): tokens for turn, tokens in map(json.loads, complete.splitlines())}
