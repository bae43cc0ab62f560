"""A chat put together so that every template takes it, whatever its protocol's turns are."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta, Struct

from specdec_mlx.server.pictures import KINDS, mark, unseen
from specdec_mlx.server.requests import Object, RequestError

BETWEEN = "\n\n"  # between two texts of one turn
THOUGHTS = "reasoning_content", "reasoning"  # names of thoughts in templates


class Turn(Struct):
    """A message: a role that says a text, or parts."""

    role: Annotated[str, Meta(pattern="^(user|assistant|system|developer)$")]
    content: Any = None


def check_kind(value: Any, kind: type, where: str) -> Any:
    """The value, if it is of a kind; raises RequestError that says where it stands."""
    if not isinstance(value, kind):
        raise RequestError(f"{where} must be a {kind.__name__}, not {value!r}")
    return value


def field_of(part: Object, name: str, kind: type = str) -> Any:
    """A field that a part of this type has to have; raises RequestError."""
    return check_kind(part.get(name), kind, f"{part['type']}: {name}")


def parts_in(content: Any, where: str) -> list[Object]:
    """The parts of a content, each with a type; a text is one part, None is no part."""
    if not isinstance(content, list):
        content = [] if content is None else [content]
    parts: list[Object] = [
        {"type": "text", "text": part} if isinstance(part, str) else part for part in content
    ]
    for part in parts:
        check_kind(check_kind(part, dict, where).get("type"), str, f"{where}: type")
    return parts


def as_text(part: Object) -> str:
    """A part of a content as text, whatever it is; a picture is the mark of its place."""
    text = part.get("text", part.get("refusal"))
    if isinstance(text, str):
        return text
    return mark(part) if part["type"] in KINDS else unseen(part["type"])


def joined(content: Any, where: str, to_text: Callable[[Object], str] = as_text) -> str:
    return BETWEEN.join(map(to_text, parts_in(content, where)))


def as_result(output: Any) -> Any:
    """What a tool gave back: a text, parts with a type, or the JSON text of any other value."""
    parts = output if isinstance(output, list) else []
    if isinstance(output, str | None) or (parts and all(map(_is_part, parts))):
        return output
    return json.dumps(output, ensure_ascii=False)


def _is_part(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and "type" in value)


def leave_out(what: str, kind: Any) -> None:
    """Note in the log that something of a request is not served."""
    logging.info("Left out: a %s of type %s, which is not run here.", what, kind)


@dataclass
class Turns:
    """The messages of a chat: one system message, at the start, and neighbours of one role joined.

    Many templates refuse a system message that comes later, and roles that do not alternate. So a
    later system message becomes part of the user's turn beside it.
    """

    messages: list[Object] = field(default_factory=list)
    # of called tools, by the call's id
    _names: dict[str, str] = field(default_factory=dict)

    def say(self, role: str, text: str) -> None:
        """More text of a role; `developer` is `system`."""
        if role in ("system", "developer"):
            is_later = self.messages and self.messages[-1]["role"] != "system"
            role = "user" if is_later else "system"
        turn = self._turn(role)
        turn["content"] += (BETWEEN if turn["content"] else "") + text

    def think(self, text: str) -> None:
        turn = self._turn("assistant")
        turn |= dict.fromkeys(THOUGHTS, turn.get(THOUGHTS[0], "") + text)

    def call(self, call_id: str, name: str, arguments: Any) -> None:
        """A call by the assistant, with an object or its JSON text."""
        called = {"name": name, "arguments": arguments}
        made = {"id": call_id, "type": "function", "function": called}
        self._turn("assistant").setdefault("tool_calls", []).append(made)
        self._names[call_id] = name

    def answer(self, call_id: str, text: str) -> None:
        """What a called tool gave back."""
        name_field = {"name": self._names[call_id]} if call_id in self._names else {}
        self.messages.append(
            {"role": "tool", "tool_call_id": call_id, **name_field, "content": text}
        )

    def _turn(self, role: str) -> Object:
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": ""})
        return self.messages[-1]


def with_folded_system(messages: Sequence[Object], first_role: str) -> list[Object]:
    """A chat whose system messages stand where `Turns` puts them.

    first_role: of a system message at the start, "system" or "user".
    """
    turns = Turns()
    for message in messages:
        role, content = message["role"], message["content"]
        if role in ("system", "user") and isinstance(content, str):
            turns.say(first_role if role == "system" else role, content)
        else:
            turns.messages.append(message)
    return turns.messages
