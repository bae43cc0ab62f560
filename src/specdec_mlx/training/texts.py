"""Texts to train on: files as documents, documents as windows of token ids.

With each token stands whether it is learnt: what a user or a system said is only read. So streams
are int32 [n, 2], and windows [n, window, 2]: token id, and 1 or 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np

from specdec_mlx.errors import TrainingError
from specdec_mlx.generation import encode

HELD_OUT_SHARE = 0.05
"""Part of the windows, or of the questions, that is held out where nothing is given for it."""

Document = list[tuple[int, int]]
"""Each token, and 1 if it is learnt."""


def read_documents(paths: Sequence[str], tokenizer: Any) -> Iterator[Document]:
    """The tokens of each document, and which of them are learnt.

    A `.jsonl` file has one in each line, in mlx-lm's formats for fine-tuning: `text`, `prompt` and
    `completion`, of which the latter is learnt, or `messages`, of which the assistant's are. Any
    other file is one document.

    Raises:
        TrainingError: a file is not there, is not UTF-8, or a line is none of these.
    """
    for path in map(Path, paths):
        if path.suffix != ".jsonl":
            yield _learnt(_encode(tokenizer, read_text(path)))
            continue
        for where, line in _lines(path):
            yield _of_line(where, line, tokenizer)


def read_prompts(paths: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Token ids of each prompt in the chat template, the answer about to begin.

    A `.jsonl` file has objects with `turns`, of which the first is taken, with `messages`, less an
    answer at their end, or with `prompt`. Any other file has a question a line.

    Raises:
        TrainingError: a file is not there, is not UTF-8, or a line is none of these.
    """
    prompts = []
    for path in map(Path, paths):
        for where, line in _lines(path):
            messages = [{"role": "user", "content": line}]
            if path.suffix == ".jsonl":
                messages = _messages_of(where, line)
            chat = tokenizer.has_chat_template
            prompts.append(encode(tokenizer, messages if chat else messages[-1]["content"]))
    return prompts


def read_text(path: Path) -> str:
    """A file of text; raises TrainingError."""
    if not path.is_file():
        raise TrainingError(f"There is no file {path}. Give texts that the target might read.")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TrainingError(f"{path} is not UTF-8 text: {error}. Convert it first.") from error


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Where each line stands, in words, and the line, without empty ones."""
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if line.strip():
            yield f"{path}, line {number}", line


def _record(where: str, line: str) -> Any:
    """A line of JSON."""
    try:
        return json.loads(line)
    except ValueError as error:
        raise TrainingError(f"{where} is no JSON: {error}.") from error


def _of_line(where: str, line: str, tokenizer: Any) -> Document:
    """The document of a line of JSON."""
    match _record(where, line):
        case {"text": str(text)}:
            return _learnt(_encode(tokenizer, text))
        case {"prompt": str(prompt), "completion": str(completion)}:
            whole = _encode(tokenizer, prompt + completion)
            return _learnt(whole, [(len(_encode(tokenizer, prompt)), len(whole))])
        case {"messages": list(messages)}:
            whole = list(tokenizer.apply_chat_template(messages))
            answers = [i for i, m in enumerate(messages) if m.get("role") == "assistant"]
            return _learnt(whole, [_place(tokenizer, messages, i) for i in answers])
    raise TrainingError(
        f"{where}: expected an object with text, with prompt and completion, or with messages."
    )


def _place(tokenizer: Any, messages: list[Any], index: int) -> tuple[int, int]:
    """Where an answer begins and ends in its conversation."""
    before = tokenizer.apply_chat_template(messages[:index], add_generation_prompt=True)
    return len(before), len(tokenizer.apply_chat_template(messages[: index + 1]))


def _messages_of(where: str, line: str) -> list[Any]:
    """A conversation that the target is to go on with, of a line of JSON."""
    match _record(where, line):
        case {"turns": [str(text), *_]} | {"prompt": str(text)}:
            return [{"role": "user", "content": text}]
        case {"messages": [*messages, {"role": "assistant"}]} | {"messages": [*messages]} if (
            messages
        ):
            return messages
    raise TrainingError(f"{where}: expected an object with turns, with messages, or with prompt.")


def _learnt(tokens: list[int], places: Sequence[tuple[int, int]] | None = None) -> Document:
    """Tokens of which those in some places are learnt; None for all."""
    if places is None:
        return [(token, 1) for token in tokens]
    return [(t, int(any(a <= i < b for a, b in places))) for i, t in enumerate(tokens)]


def _encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a document; it may be longer than what the target reads at once."""
    return list(tokenizer.encode(text, verbose=False))


def stream_of(documents: Iterator[Document], end_of_text: int | None) -> np.ndarray:
    """All documents in one row, each after an end-of-text token if there is one."""
    before = [] if end_of_text is None else [(end_of_text, 1)]
    return np.array([pair for one in documents for pair in before + one], np.int32).reshape(-1, 2)


def windows_of(stream: np.ndarray, window: int, stride: int) -> np.ndarray:
    """Pieces [n, window, ...] of a row of tokens, which begin `stride` tokens apart."""
    starts = range(0, len(stream) - window + 1, stride)
    empty = np.zeros((0, window, *stream.shape[1:]), np.int32)
    return np.stack([stream[i : i + window] for i in starts]) if starts else empty


def padded(prompt: list[int], answer: list[int], window: int) -> np.ndarray:
    """A window [window, 2] of a prompt and its answer, which is learnt."""
    pairs = _learnt([*prompt, *answer], [(len(prompt), len(prompt) + len(answer))])
    return np.array(pairs + [(0, 0)] * (window - len(pairs)), np.int32)


def split(windows: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Windows to train on, and those held out, drawn by the seed."""
    count = num_held_out(windows)
    order = np.random.default_rng(seed).permutation(len(windows))
    return windows[np.sort(order[count:])], windows[np.sort(order[:count])]


def num_held_out(rows: Sized) -> int:
    """How many of them to hold out."""
    return max(1, round(HELD_OUT_SHARE * len(rows)))
