"""Session files: conversations whose every assistant message is a text, in the order of writing.

One JSON object a line, of one of two kinds:

- `messages`, a list of objects with `role` and `content`: a conversation. Every assistant message
  is a text, and what stands before it is its prompt.
- `turns`, of which the first is a prompt, and `reference`, its answer: a text. Lines with the same
  `session` are one conversation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specdec_mlx.bench.cost import CostCurve
from specdec_mlx.bench.prompts import Task, encode_messages
from specdec_mlx.bench.record import Record, RecordedText

ASSISTANT = "assistant"


def read_sessions(path: Path | str, tokenizer: Any) -> list[RecordedText]:
    """The texts of a session file, in its order.

    Args:
        path: JSON lines, see above.
        tokenizer: encodes them, prompts by its chat template; where it has an end token, a text
            ends with it.

    Raises:
        ValueError: with the number of the line that is neither kind.
    """
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    numbered = [(n, line) for n, line in enumerate(lines, start=1) if line.strip()]
    texts = [text for n, line in numbered for text in _texts_of(path, n, line, tokenizer)]
    if not texts:
        raise ValueError(f"{path} has no assistant message and no reference. Give another file.")
    return texts


def session_record(
    path: Path | str, tokenizer: Any, vocab_size: int, cost: CostCurve | None = None
) -> Record:
    """The texts of a session file as a record that can be replayed.

    Args:
        path: of the file.
        tokenizer: encodes it.
        vocab_size: V.
        cost: c(m) as it was measured somewhere; None where it was not.

    Raises:
        ValueError: for a file that is none.
    """
    texts = read_sessions(path, tokenizer)
    longest = max(len(text.generated) for text in texts)
    settings = {"vocab_size": vocab_size, "max_tokens": longest, "temp": 0.0}
    return Record(f"sessions of {path}", {}, settings, texts, cost)


def session_tasks(path: Path | str, tokenizer: Any) -> list[Task]:
    """The prompts of a session file, in its order, for a model to write answers of its own."""
    texts = read_sessions(path, tokenizer)
    return [Task(text.id, text.category, text.prompt) for text in texts]


def _texts_of(path: Path | str, number: int, line: str, tokenizer: Any) -> Iterator[RecordedText]:
    """The texts of a line."""
    try:
        row = json.loads(line)
        category = str(row.get("category", "sessions"))
        name = str(row.get("id", number))
        if "messages" in row:
            messages = [{"role": m["role"], "content": m["content"] or ""} for m in row["messages"]]
            told, session = _answers(messages), name
        else:
            prompt = {"role": "user", "content": row["turns"][0]}
            told, session = [([prompt], str(row["reference"]))], str(row.get("session", number))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}, line {number}: expected a JSON object with `messages` (role and content), or "
            f"with `turns` and `reference`; got {line[:60]!r}."
        ) from error
    for turn, (before, answer) in enumerate(told):
        prompt_ids = encode_messages(tokenizer, before)
        own = name if len(told) == 1 else f"{name}/{turn}"
        yield RecordedText(own, category, prompt_ids, _encode(tokenizer, answer), session)


def _answers(messages: Sequence[dict[str, str]]) -> list[tuple[Sequence[dict[str, str]], str]]:
    """What the assistant said, each with all messages before it."""
    return [
        (messages[:i], message["content"])
        for i, message in enumerate(messages)
        if message["role"] == ASSISTANT and i and message["content"]
    ]


def _encode(tokenizer: Any, answer: str) -> list[int]:
    """Token ids of an answer, the end token last."""
    end = getattr(tokenizer, "eos_token_id", None)
    ids = list(tokenizer.encode(answer, add_special_tokens=False))
    return ids if end is None else [*ids, int(end)]
