"""Session files: conversations whose every assistant message is a text, in the order of writing.

One JSON object a line: `messages` (role and content), of which every assistant message is a text;
or `turns`, the first a prompt, and `reference`, its answer, by `session`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdec_mlx.bench.prompts import encode_messages, read_lines
from specdec_mlx.bench.record import RecordedText


def read_sessions(path: Path | str, tokenizer: Any) -> list[RecordedText]:
    """The texts of a session file in its order; ValueError with the number of a wrong line."""

    def texts_of(row: Any, number: int) -> Iterator[RecordedText]:
        name, category = str(row.get("id", number)), str(row.get("category", "sessions"))
        if "messages" in row:
            said = [{"role": m["role"], "content": m["content"] or ""} for m in row["messages"]]
            answers, session = list(_answers(said)), name
        else:
            prompt = {"role": "user", "content": row["turns"][0]}
            answers, session = [([prompt], str(row["reference"]))], str(row.get("session", number))
        end = getattr(tokenizer, "eos_token_id", None)
        for turn, (before, answer) in enumerate(answers):
            own = name if len(answers) == 1 else f"{name}/{turn}"
            tokens = list(tokenizer.encode(answer, add_special_tokens=False))
            tokens += [] if end is None else [int(end)]
            yield RecordedText(own, category, encode_messages(tokenizer, before), tokens, session)

    expected = "`messages` (role and content), or with `turns` and `reference`"
    texts = read_lines(path, texts_of, expected)
    if not texts:
        raise ValueError(f"{path} has no assistant message and no reference. Give another file.")
    return texts


def _answers(said: list[dict[str, str]]) -> Iterator[tuple[list[dict[str, str]], str]]:
    """Each message of the assistant, with all messages before it."""
    for i, message in enumerate(said):
        if message["role"] == "assistant" and i and message["content"]:
            yield said[:i], message["content"]
