"""What a stream must be in its protocol: the order of its events, and the clients' own types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from anthropic.types import Message, RawMessageStreamEvent
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from specdec_mlx.errors import GrammarError
from specdec_mlx.server.protocols.replies import Wire
from specdec_mlx.server.requests import RequestError

MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

DELTAS = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("thinking", "signature"),
    "input_json_delta": ("tool_use", "partial_json"),
}
GROWING = {
    "output_text": ("message", "text"),
    "reasoning_summary_text": ("reasoning", "text"),
    "function_call_arguments": ("function_call", "arguments"),
    "custom_tool_call_input": ("custom_tool_call", "input"),
}
PARTS = {"content_part": ("content", "text"), "reasoning_summary_part": ("summary", "text")}


def events_in(raw: bytes) -> list[dict[str, Any]]:
    """The events of a stream, without comments; each says its type twice if it says it at all."""
    assert raw.endswith(b"\n\n")
    events = []
    for block in raw.decode().split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        if not lines or lines["data"] == "[DONE]":
            continue
        events.append(json.loads(lines["data"]))
        assert lines.get("event", events[-1].get("type")) == events[-1].get("type")
    return events


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream tells of, checked event by event."""
    told = [event for event in events if event["type"] != "ping"]
    for event in told:
        MESSAGE_EVENT.validate_python(event)
    message = told[0]["message"]
    Message.model_validate(message)
    assert [event["type"] for event in told[-2:]] == ["message_delta", "message_stop"]
    content: list[dict[str, Any]] = []
    pieces: list[str] = []
    is_open, has_calls = False, told[-2]["delta"]["stop_reason"] == "tool_use"
    for event in told[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            is_open, pieces = True, []
            content.append(dict(event["content_block"]))
        assert is_open
        assert event["index"] == len(content) - 1
        if event["type"] == "content_block_delta":
            kind, name = DELTAS[event["delta"]["type"]]
            assert content[-1]["type"] == kind
            if kind == "tool_use":
                pieces.append(event["delta"][name])
            else:
                content[-1][name] += event["delta"][name]
        if event["type"] == "content_block_stop":
            is_open = False
            if content[-1]["type"] == "tool_use" and has_calls:  # else it was cut
                content[-1]["input"] = json.loads("".join(pieces) or "{}")
    assert not is_open
    ended = told[-2]
    usage = message["usage"] | ended["usage"]
    message |= {"content": content, **ended["delta"], "usage": usage}
    Message.model_validate(message)
    return message


def response_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The response that a stream ends with, checked event by event."""
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    for event in deepcopy(events):
        if event["type"] == "response.failed":  # their types lack a code
            event["response"]["error"]["code"] = "server_error"
        RESPONSE_EVENT.validate_python(event)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-1] in ("completed", "incomplete", "failed")
    done: list[dict[str, Any]] = []
    item: dict[str, Any] | None = None
    text, part, is_said = "", None, False
    for kind, event in zip(kinds[2:-1], events[2:-1], strict=True):
        assert event["output_index"] == len(done)
        what, step = kind.rsplit(".", 1)
        if kind == "output_item.added":
            assert item is None
            item, text, part, is_said = event["item"], "", None, False
            continue
        assert item is not None
        if kind == "output_item.done":
            assert part is None
            assert is_said
            assert (event["item"]["type"], event["item"]["id"]) == (item["type"], item["id"])
            done.append(event["item"])
            item = None
            continue
        assert event["item_id"] == item["id"]
        if what in PARTS:
            assert (part is None) == (step == "added")
            assert event["part"]["text"] == text
            part = event["part"] if step == "added" else None
            continue
        of, name = GROWING[what]
        assert item["type"] == of
        assert (part is not None) == (of in ("message", "reasoning"))
        if step == "delta":
            text += event["delta"]
        else:
            assert event[name] == text
            is_said = True
    final = events[-1]["response"]
    assert final["id"] == events[0]["response"]["id"]
    assert final["status"] == kinds[-1]
    if kinds[-1] != "failed":
        assert item is None
        assert final["output"] == done
        assert final["usage"]["total_tokens"] > 0
        Response.model_validate(final)
    return dict(final)


def chat_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The deltas of a chat completion with one choice, and the reason for its end."""
    deltas, reason = [], None
    for event in events:
        ChatCompletionChunk.model_validate(event)
        for choice in event["choices"]:
            assert reason is None  # nothing comes after the end
            deltas.append(choice["delta"])
            reason = choice["finish_reason"]
    assert reason is not None
    return {"deltas": deltas, "finish_reason": reason}


OTHERS: list[Any] = [None, True, 7, -1.5, "", "x", [], [[]], [7], {}, {"type": []}, {"type": "x"}]


def each_wrong(wire: Wire, body: dict[str, Any]) -> int:
    """Replace every value of a body by each of a dozen others; how many of them were refused.

    Anything but an error of the client's is raised.
    """
    num_refused = 0
    for path in _paths(body):
        for other in OTHERS:
            changed = deepcopy(body)
            inner: Any = changed
            for name in path[:-1]:
                inner = inner[name]
            inner[path[-1]] = other
            try:
                wire.read(changed)
            except (RequestError, GrammarError):
                num_refused += 1
    return num_refused


def _paths(value: Any) -> Iterator[tuple[Any, ...]]:
    """The ways to all values within one."""
    names: Any = value.keys() if isinstance(value, dict) else range(len(value))
    for name in names:
        yield (name,)
        if isinstance(value[name], dict | list):
            yield from ((name, *path) for path in _paths(value[name]))
