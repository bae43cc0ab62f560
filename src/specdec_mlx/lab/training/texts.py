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
    """The tokens of each document; raises TrainingError for files that cannot be read.

    A `.jsonl` file has one a line, in mlx-lm's formats: `text`, `prompt` and `completion`, of which
    the latter is learnt, or `messages`, of which the last is. Any other file is one document.
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
    """Token ids of each prompt in the chat template; raises TrainingError as `read_documents` does.

    A `.jsonl` file has `turns`, of which the first is taken, `messages`, less an answer at their
    end, or `prompt`; any other file a question a line.
    """
    found: list[list[dict[str, str]]] = []
    for path in map(Path, paths):
        with _readable(path):
            if path.suffix == ".jsonl":
                each = lambda line, number: [messages_of(line)]  # noqa: E731
                found += read_lines(path, each, "turns, messages or prompt")
            else:
                found += [messages_of(line) for _, line in text_lines(path)]
    return [encode_messages(tokenizer, messages) for messages in found]


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise TrainingError for a file that cannot be read."""
    try:
        yield
    except OSError as error:
        raise TrainingError(f"There is no file {path}. Give texts that can be read.") from error
    except ValueError as error:
        raise TrainingError(str(error)) from error


def learnt(tokens: Sequence[int], begin: int = 0) -> Document:
    """Tokens that are learnt from a place on."""
    return [(token, int(i >= begin)) for i, token in enumerate(tokens)]


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, verbose=False))  # no warning that it is long


def windows_of(paths: Sequence[str], tokenizer: Any, window: int, stride: int) -> np.ndarray:
    """Windows of all documents, `stride` tokens apart, each document after an end-of-text token."""
    end, documents = tokenizer.eos_token_id, read_documents(paths, tokenizer)
    before = [] if end is None else [(end, 1)]
    stream = [pair for document in documents for pair in before + document]
    starts = range(0, len(stream) - window + 1, stride)
    rows = np.array([stream[i : i + window] for i in starts], np.int32).reshape(-1, window, 2)
    return rows[rows[:, 1:, 1].any(axis=1)]


def padded(document: Document, window: int) -> np.ndarray:
    """A window [window, 2] of a document that is no longer than that."""
    return np.array(document + [(0, 0)] * (window - len(document)), np.int32)


def split(count: int, seed: int) -> tuple[list[int], list[int]]:
    """Indices to train on, and those held out, drawn by the seed."""
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
    """Answers to prompts shorter than the window, to their end or the window's; kept in `path`.

    todo: turns to answer, those of a temperature together. is_time: True if no more answers are to
    be begun.
    """
    found = stored(path)
    missing = [turn for turn in todo if turn not in found]
    with (
        path.open("a", encoding="utf-8") as file,
        progress_bar(desc="answers", total=len(missing), leave=False) as bar,
    ):
        for temp, of_temp in groupby(missing, key=lambda turn: turn[2]):
            turns = list(of_temp)
            written: list[list[int]] = [[] for _ in turns]
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
                turn, answer = turns[response.index], written[response.index]
                answer.append(response.token)
                if response.finish_reason is not None:
                    found[turn] = answer
                    print(json.dumps([turn, answer]), file=file, flush=True)
                    bar.update()
    return dict(sorted(found.items()))


def stored(path: Path) -> dict[Turn, list[int]]:
    """Answers in a file; a last line that was cut off is removed from it."""
    if not path.exists():
        return {}
    whole = path.read_bytes().rpartition(b"\n")[0]
    os.truncate(path, len(whole) + bool(whole))
    return {tuple(turn): tokens for turn, tokens in map(json.loads, whole.splitlines())}
