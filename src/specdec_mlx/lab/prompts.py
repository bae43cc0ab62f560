"""Built-in prompts, and prompts of a file. Each has a category."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct

from specdec_mlx.files import Count, json_lines

Item = TypeVar("Item")


class Prompt(NamedTuple):
    """A user message.

    Attributes:
        id: unique name.
        category: group for which results are reported.
        text: the message.
    """

    id: str
    category: str
    text: str


class RecordedText(Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt, and its text by plain decoding if it is known.

    Attributes:
        id: unique name.
        category: group for which results are reported.
        prompt: token ids with the chat template.
        generated: token ids of the text.
        session: name of the conversation, or "".
        top_tokens: [m, top] the target's likeliest tokens at each generated token, or [].
    """

    id: str
    category: str
    prompt: list[Count]
    generated: list[Count] = []
    session: str = ""
    top_tokens: list[list[int]] = []


def read_prompts(path: Path | str | None = None) -> list[Prompt]:
    """Prompts of a JSON-lines file with `id`, `category`, and `turns` or `prompt`.

    The first of `turns` is used. None reads the built-in prompts, which are six kinds of work with
    more or less repetition. ValueError has the number of a wrong line.
    """

    def prompt(row: Any, number: int) -> Iterator[Prompt]:
        text = messages_of({name: row[name] for name in ("turns", "prompt") if name in row})
        name, category = str(row.get("id", number)), str(row.get("category", "prompts"))
        yield Prompt(name, category, text[0]["content"])

    return read_lines(
        path or Path(__file__).with_name("prompts.jsonl"),
        prompt,
        "`turns` (a list of messages) or `prompt`, and `id` and `category`",
    )


def messages_of(line: Any) -> list[dict[str, str]]:
    """The messages before an answer, from a question, `turns`, `prompt` or `messages`.

    A final answer in `messages` is left out. Raises TypeError for anything else.
    """
    match line:
        case {"turns": [str(text), *_]} | {"prompt": str(text)} | str(text):
            return [{"role": "user", "content": text}]
        case {"messages": [*messages, {"role": "assistant"}] | [*messages]} if messages:
            return messages
    raise TypeError


def read_lines(
    path: Path | str, read: Callable[[Any, int], Iterable[Item]], expected: str
) -> list[Item]:
    """Items that `read` makes of each line and its number. ValueError for a wrong line."""
    items: list[Item] = []
    for number, line in json_lines(path):
        try:
            items += read(line, number)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number}: expected a JSON object with {expected}; got "
                f"{str(line)[:60]!r}."
            ) from error
    return items


def choose(
    prompts: Sequence[Any], categories: Sequence[str] | None = None, per_category: int | None = None
) -> list[Any]:
    """Choose at most `per_category` prompts of each category, evenly spread.

    Raises ValueError for an unknown category.
    """
    known = dict.fromkeys(prompt.category for prompt in prompts)
    wanted = known if categories is None else categories
    if unknown := set(wanted) - set(known):
        names = ", ".join(sorted(known))
        raise ValueError(f"Unknown category {min(unknown)!r}. The prompts have: {names}.")
    of_each = ([p for p in prompts if p.category == name] for name in wanted)
    return [prompt for some in of_each for prompt in spread(some, per_category)]


def spread(items: list[Any], count: int | None) -> list[Any]:
    if count is None or count >= len(items):
        return items
    # floor(i n / count) for i = 0 ... count - 1
    return [items[i * len(items) // count] for i in range(count)]


def encode_chat(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a user message in the model's chat template, if there is a template."""
    return encode_messages(tokenizer, [{"role": "user", "content": text}])


def encode_messages(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a conversation in the chat template, where the answer comes next.

    Without a template, the contents of the messages are joined by blank lines.
    """
    if not tokenizer.has_chat_template:
        return list(tokenizer.encode("\n\n".join(message["content"] for message in messages)))
    return list(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True))
