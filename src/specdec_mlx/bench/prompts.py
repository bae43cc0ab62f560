"""What a benchmark is run on: prompts with a category each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

BUILTIN = Path(__file__).parent / "prompts.jsonl"
"""Six kinds of work, from much repetition of the prompt to none."""


@dataclass(frozen=True)
class Prompt:
    """One user message. id: unique name. category: results are reported per category."""

    id: str
    category: str
    text: str


@dataclass(frozen=True)
class Task:
    """A prompt as the model reads it. prompt: [n] token ids, chat template included."""

    id: str
    category: str
    prompt: list[int]


WithCategory = TypeVar("WithCategory", Prompt, Task)


def builtin_prompts() -> list[Prompt]:
    """Our own prompts, a handful per kind of work."""
    return read_prompts(BUILTIN)


def read_prompts(path: Path | str) -> list[Prompt]:
    """Prompts of a JSON-lines file: `id`, `category`, and `turns` (the first is taken) or `prompt`.

    Raises ValueError with the number of the line that is none.
    """
    prompts = []
    for number, line in numbered_lines(path):
        try:
            row = json.loads(line)
            text = row["turns"][0] if "turns" in row else row["prompt"]
            name, category = row.get("id", number), row.get("category", "prompts")
            prompts.append(Prompt(str(name), str(category), str(text)))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number}: expected a JSON object with `turns` (a list of messages) "
                f"or `prompt`, and `id` and `category`; got {line[:60]!r}."
            ) from error
    return prompts


def numbered_lines(path: Path | str) -> list[tuple[int, str]]:
    """The lines of a file that are not empty, with their numbers."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def choose(
    prompts: Iterable[WithCategory],
    categories: Sequence[str] | None = None,
    per_category: int | None = None,
) -> list[WithCategory]:
    """Some of the prompts, evenly spread over each category, in file order.

    Args:
        prompts: to choose from.
        categories: only these, in this order; all if None.
        per_category: most prompts of each; all if None.

    Raises:
        ValueError: for a category that no prompt has.
    """
    by_category: dict[str, list[WithCategory]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    for name in categories or ():
        if name not in by_category:
            known = ", ".join(sorted(by_category))
            raise ValueError(f"Unknown category {name!r}. The prompts have: {known}.")
    wanted = list(by_category) if categories is None else list(categories)
    return [prompt for name in wanted for prompt in spread(by_category[name], per_category)]


def spread(items: list[Any], count: int | None) -> list[Any]:
    """`count` of the items at equal distances, from the first on; all if None."""
    if count is None or count >= len(items):
        return items
    return [items[i * len(items) // count] for i in range(count)]


def encode_chat(tokenizer: Any, text: str) -> list[int]:
    """Token ids of one user message in the model's chat template, if it has one."""
    return encode_messages(tokenizer, [{"role": "user", "content": text}])


def encode_messages(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a conversation in the model's chat template, the answer about to begin.

    Without a template it is the messages' contents, a blank line between two.
    """
    if not tokenizer.has_chat_template:
        return list(tokenizer.encode("\n\n".join(message["content"] for message in messages)))
    return list(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True))
