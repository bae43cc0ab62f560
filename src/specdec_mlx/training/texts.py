"""Texts to train on: files as documents, documents as windows of token ids.

With each token stands whether it is learnt: what a user or a system said is only read. So streams
are int32 [n, 2], and windows [n, window, 2]: token id, and 1 or 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specdec_mlx.errors import TrainingError
from specdec_mlx.generation import encode

HELD_OUT_SHARE = 0.05
"""Part of the windows, or of the prompts, that is held out where nothing is given for it."""

Document = list[tuple[int, int]]
"""Each token, and 1 if it is learnt."""


def read_documents(paths: Sequence[str], tokenizer: Any) -> Iterator[Document]:
    """The tokens of each document, and which of them are learnt.

    A `.jsonl` file has one in each line, in mlx-lm's formats for fine-tuning: `text`, `prompt` and
    `completion`, of which the latter is learnt, or `messages`, of which the last is. Any other file
    is one document.

    Raises:
        TrainingError: a file is not there, is not UTF-8, or a line is none of these.
    """
    for path in map(Path, paths):
        if path.suffix == ".jsonl":
            yield from (_document(where, line, tokenizer) for where, line in _lines(path))
        else:
            yield learnt(_encode(tokenizer, _read(path)))


def read_prompts(paths: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Token ids of each prompt in the chat template, the answer about to begin.

    A `.jsonl` file has objects with `turns`, of which the first is taken, with `messages`, less an
    answer at their end, or with `prompt`. Any other file has a question a line.

    Raises:
        TrainingError: a file is not there, is not UTF-8, or a line is none of these.
    """
    prompts = []
    for where, line in (found for path in paths for found in _lines(Path(path))):
        match line:
            case {"turns": [str(text), *_]} | {"prompt": str(text)} | str(text):
                messages = [{"role": "user", "content": text}]
            case {"messages": [*messages, {"role": "assistant"}] | [*messages]} if messages:
                pass
            case _:
                raise TrainingError(f"{where}: expected an object with turns, messages or prompt.")
        chat = tokenizer.has_chat_template
        prompts.append(encode(tokenizer, messages if chat else messages[-1]["content"]))
    return prompts


def _read(path: Path) -> str:
    """A file of text; raises TrainingError."""
    if not path.is_file():
        raise TrainingError(f"There is no file {path}. Give texts that the target might read.")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TrainingError(f"{path} is not UTF-8 text: {error}. Convert it first.") from error


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Where each line stands, and what it holds: JSON in a `.jsonl` file, or else text."""
    for number, line in enumerate(_read(path).splitlines(), 1):
        where = f"{path}, line {number}"
        try:
            if line.strip():
                yield where, json.loads(line) if path.suffix == ".jsonl" else line
        except ValueError as error:
            raise TrainingError(f"{where} is no JSON: {error}.") from error


def _document(where: str, line: Any, tokenizer: Any) -> Document:
    """The document of a line of JSON."""
    match line:
        case {"text": str(text)}:
            return learnt(_encode(tokenizer, text))
        case {"prompt": str(prompt), "completion": str(completion)}:
            begin = len(_encode(tokenizer, prompt))
            return learnt(_encode(tokenizer, prompt + completion), begin)
        case {"messages": [*before, {"role": "assistant"} as answer]}:
            read = tokenizer.apply_chat_template(before, add_generation_prompt=True)
            return learnt(tokenizer.apply_chat_template([*before, answer]), len(read))
    raise TrainingError(
        f"{where}: expected an object with text, with prompt and completion, or with messages, the "
        "last of them the assistant's."
    )


def learnt(tokens: Sequence[int], begin: int = 0) -> Document:
    """Tokens that are learnt from a place on."""
    return [(token, int(i >= begin)) for i, token in enumerate(tokens)]


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


def padded(document: Document, window: int) -> np.ndarray:
    """A window [window, 2] of a document that is no longer than that."""
    return np.array(document + [(0, 0)] * (window - len(document)), np.int32)


def split(count: int, seed: int) -> tuple[list[int], list[int]]:
    """Which of so many to train on, and which to hold out, drawn by the seed."""
    order = np.random.default_rng(seed).permutation(count).tolist()
    held_out = max(1, round(HELD_OUT_SHARE * count))
    return order[held_out:], order[:held_out]
