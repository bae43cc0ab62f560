"""Texts to train on: files as documents, documents as windows of token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specdec_mlx.errors import TrainingError

HELD_OUT_SHARE = 0.05
"""Part of the windows that is held out where no held-out texts are given."""


def read_documents(paths: Sequence[Path], tokenizer: Any) -> Iterator[list[int]]:
    """Token ids of each document.

    A `.jsonl` file has one in each line, in mlx-lm's formats for fine-tuning: `text`, `prompt` and
    `completion`, or `messages`. Any other file is one document.

    Raises:
        TrainingError: a file is not there, is not UTF-8, or a line is none of these.
    """
    for path in paths:
        if not path.is_file():
            raise TrainingError(f"There is no file {path}. Give texts that the target might read.")
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise TrainingError(f"{path} is not UTF-8 text: {error}. Convert it first.") from error
        if path.suffix != ".jsonl":
            yield _encode(tokenizer, text)
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield _of_line(f"{path}, line {number}", line, tokenizer)


def _of_line(where: str, line: str, tokenizer: Any) -> list[int]:
    """Token ids of a line of JSON."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise TrainingError(f"{where} is no JSON: {error}.") from error
    match record:
        case {"text": str(text)}:
            return _encode(tokenizer, text)
        case {"prompt": str(prompt), "completion": str(completion)}:
            return _encode(tokenizer, prompt + completion)
        case {"messages": list(messages)}:
            return list(tokenizer.apply_chat_template(messages))
    raise TrainingError(
        f"{where}: expected an object with text, with prompt and completion, or with messages."
    )


def _encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a document; it may be longer than what the target reads at once."""
    return list(tokenizer.encode(text, verbose=False))


def stream_of(documents: Iterator[list[int]], end_of_text: int | None) -> np.ndarray:
    """All documents in one row, int32 [n], each after an end-of-text token if there is one."""
    before = [] if end_of_text is None else [end_of_text]
    return np.array([token for ids in documents for token in before + ids], np.int32)


def windows_of(stream: np.ndarray, window: int, stride: int) -> np.ndarray:
    """Pieces [n, window] of a row of tokens, which begin `stride` tokens apart."""
    starts = range(0, len(stream) - window + 1, stride)
    return np.stack([stream[i : i + window] for i in starts]) if starts else _none(window)


def _none(window: int) -> np.ndarray:
    return np.zeros((0, window), np.int32)


def split(windows: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Windows to train on, and those held out, drawn by the seed."""
    count = max(1, round(HELD_OUT_SHARE * len(windows)))
    order = np.random.default_rng(seed).permutation(len(windows))
    return windows[np.sort(order[count:])], windows[np.sort(order[:count])]
