"""OpenAI's Responses protocol, without state: every request brings the whole conversation along.

The fields are those of https://platform.openai.com/docs/api-reference/responses; ours (drafter,
draft_length, rule, ...) may stand beside them.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from uuid import uuid4

from specdec_mlx.server.prompts import has_grammar
from specdec_mlx.server.protocols import fields
from specdec_mlx.server.protocols.turns import (
    BETWEEN,
    UNSEEN,
    Turns,
    expect,
    function,
    given,
    leave_out,
    parts_in,
)
from specdec_mlx.server.requests import (
    AUTO,
    NONE,
    REQUIRED,
    Asked,
    CallArguments,
    CallBegan,
    CallBroken,
    Ended,
    Event,
    RequestError,
    Said,
    Written,
)

STATEFUL = ("previous_response_id", "conversation", "prompt", "background")
"""Fields that ask for what is kept at OpenAI; nothing is kept here."""

MORE_TOOLS = "additional_tools"  # an item of Codex's
ENCRYPTED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
FREE = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": AUTO,
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
}
"""Fields of a request that its response repeats, with their defaults."""

ITEMS = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "custom_tool_call": "ctc_"}
"""How the identifiers of each kind of item begin."""


@dataclass(frozen=True)
class Tool:
    """How a tool was offered. is_free: its input is any text, not JSON."""

    is_free: bool = False
    namespace: str | None = None


class Responses:
    """The wire of `/v1/responses`."""

    def read(self, body: Mapping[str, Any]) -> Asked:
        """Check a body; raises RequestError."""
        for name in STATEFUL:
            if body.get(name):
                raise RequestError(f"{name}: nothing is kept here. Send all of the input again.")
        request = fields.base(body)
        turns = Turns()
        if instructions := body.get("instructions"):
            turns.say("system", _texts(instructions, "instructions"))
        items = body.get("input")
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        items = expect(items, list, "input")
        for item in items:
            _add(turns, expect(item, dict, "input"))
        if not turns.messages:
            raise RequestError("input must be a text or a list of at least one item.")
        request.messages = turns.messages
        tools: dict[str, Tool] = {}
        brought = (given(item, "tools", list) for item in items if item.get("type") == MORE_TOOLS)
        all_tools: list[Any] = sum(brought, given(body, "tools", list))
        request.tools = list(_tools(all_tools, tools))
        request.tool_choice, named = _choice(body.get("tool_choice") or AUTO, tools)
        request.tools = [tool for tool in request.tools if tool["function"]["name"] in named]
        request.parallel_calls = body.get("parallel_tool_calls") is not False
        request.max_tokens = fields.count(body, "max_output_tokens", least=1)
        wanted = given(given(body, "text", dict), "format", dict)
        described = {"type": wanted.get("type", "text"), "json_schema": wanted}
        request.grammar = fields.grammar_in(described)
        effort = given(given(body, "reasoning", dict), "effort", str)
        if effort and not has_grammar(request):
            request.template = fields.thinking(effort) | request.template
        include = given(body, "include", list)
        if LOGPROBS in include or body.get("top_logprobs"):
            most = fields.MOST_LOGPROBS
            request.num_logprobs = fields.count(body, "top_logprobs", most=most) or 0
        echo = {name: body.get(name) or value for name, value in ECHOED.items()}
        echo["parallel_tool_calls"] = request.parallel_calls
        more = {"tools": tools, "encrypts": ENCRYPTED in include, "echo": echo}
        return fields.asked([request], body, "resp_", more)

    def reply(self, asked: Asked, texts: Sequence[Written]) -> dict[str, Any]:
        """The response: what a stream of the same events ends with."""
        (written,) = texts
        assert written.ended is not None
        stream = ResponseStream(asked)
        events: list[Event] = [Said(written.thoughts, is_thought=True)]
        events.append(Said(written.text, logprobs=written.logprobs))
        for index, call in enumerate(written.calls):
            events.append(CallBegan(index, call["id"], call["name"]))
            events.append(CallArguments(index, call["arguments"]))
        for event in [*events, written.ended]:
            for _ in stream.write(0, event):
                pass
        return stream.response

    def stream(self, asked: Asked) -> ResponseStream:
        """The way of a streamed response."""
        return ResponseStream(asked)

    def error(self, error: Exception, status: HTTPStatus) -> dict[str, Any]:
        """OpenAI's form of an error."""
        return fields.error_object(error, status)


RESPONSES = Responses()


def _text(part: Mapping[str, Any]) -> str:
    """A part of a content as text, whatever it is."""
    for name in ("text", "refusal"):
        if name in part:
            return str(expect(part[name], str, name))
    return UNSEEN.format(part["type"])


def _texts(content: Any, where: str) -> str:
    return BETWEEN.join(map(_text, parts_in(content, where)))


def _add(turns: Turns, item: Mapping[str, Any]) -> None:
    """Add an item of the input."""
    kind = item.get("type", "message")
    if kind == "message":
        if (role := item.get("role")) not in ("user", "assistant", "system", "developer"):
            raise RequestError(f"input: role must be user, assistant or developer, not {role!r}")
        turns.say(role, _texts(item.get("content"), "input: content"))
    elif kind == "reasoning":
        parts = parts_in(item.get("content"), "reasoning.content")
        parts = parts or parts_in(item.get("summary"), "reasoning.summary")
        turns.think(BETWEEN.join(map(_text, parts)))
    elif kind in ("function_call", "custom_tool_call"):
        name, is_free = expect(item.get("name"), str, f"{kind}.name"), kind == "custom_tool_call"
        arguments = expect(item.get("input" if is_free else "arguments"), str, kind)
        call_id = str(item.get("call_id"))
        if is_free:
            turns.call(call_id, name, {"input": arguments})
        else:
            turns.call_with_text(call_id, name, arguments)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        turns.answer(str(item.get("call_id")), _texts(item.get("output"), f"{kind}.output"))
    elif kind == "item_reference":
        raise RequestError("item_reference: nothing is kept here. Send the items themselves.")
    elif kind != MORE_TOOLS:
        leave_out("item", kind)


def _tools(
    tools: Sequence[Any], offered: dict[str, Tool], namespace: str | None = None
) -> Iterator[dict[str, Any]]:
    """The tools that a client runs, noted by name as offered. All others are left out."""
    for tool in tools:
        kind, name = expect(tool, dict, "tools").get("type"), tool.get("name")
        if kind == "namespace":
            inner = expect(tool.get("tools"), list, "tools: namespace")
            yield from _tools(inner, offered, expect(name, str, "tools: name"))
        elif kind not in ("function", "custom") or expect(name, str, "tools: name") in offered:
            leave_out("tool", kind)
        else:
            offered[name] = Tool(kind == "custom", namespace)
            described, schema = tool.get("description"), tool.get("parameters")
            if kind == "custom":
                described, schema = _described(tool), FREE
            yield function(name, described, schema)


def _described(tool: Mapping[str, Any]) -> str:
    """The description of a tool that takes any text, with the grammar of that text."""
    form = given(tool, "format", dict)
    words = str(tool.get("description") or "")
    if "definition" not in form:
        return words
    return f"{words}\n\nThe input, in {form.get('syntax')} notation:\n{form['definition']}"


def _choice(choice: Any, offered: Mapping[str, Tool]) -> tuple[str, Iterable[str]]:
    """A tool choice, and the names of the tools that may be called."""
    if choice in (AUTO, NONE, REQUIRED):
        return choice, offered
    named = choice if isinstance(choice, dict) else {}
    if named.get("type") == "allowed_tools" and named.get("mode") in (AUTO, REQUIRED):
        tools = expect(named.get("tools"), list, "tool_choice: tools")
        return named["mode"], [expect(tool, dict, "tool_choice").get("name") for tool in tools]
    if named.get("type") in ("function", "custom") and named.get("name") in [*offered]:
        return named["name"], offered
    raise RequestError(f"tool_choice: expected auto, none, required or a tool, not {choice!r}")


def _usage(ended: Ended) -> dict[str, Any]:
    return {
        "input_tokens": ended.num_prompt,
        "input_tokens_details": {"cached_tokens": ended.num_cached, "cache_write_tokens": 0},
        "output_tokens": ended.num_written,
        "output_tokens_details": {"reasoning_tokens": ended.num_thought},
        "total_tokens": ended.num_prompt + ended.num_written,
        "speculation": fields.speculation(ended),
    }


@dataclass
class ResponseStream:
    """A streamed response. Its items come one after another: each is added, grows, and is done."""

    asked: Asked
    response: dict[str, Any] = field(init=False)
    _open: dict[str, Any] = field(default_factory=dict)  # the item that grows
    _arguments: str = ""  # of a call of a tool that takes any text
    _number: int = -1

    def __post_init__(self) -> None:
        fixed = {"id": self.asked.id, "object": "response", "created_at": self.asked.created}
        none = dict.fromkeys(("error", "incomplete_details", "previous_response_id", "usage"))
        more = {"status": "in_progress", "model": self.asked.model, "output": [], "store": False}
        self.response = fixed | more | none | self.asked.more["echo"]

    def begin(self) -> Iterator[bytes]:
        """The response, still empty."""
        yield self._event("created", response=self.response)
        yield self._event("in_progress", response=self.response)

    def write(self, choice: int, event: Event) -> Iterator[bytes]:
        """The bytes of an event."""
        match event:
            case Said() if event.text or event.logprobs:
                yield from self._think(event) if event.is_thought else self._say(event)
            case CallBegan():
                yield from self._call(event)
            case CallArguments() if event.text:
                if "input" in self._open:
                    self._arguments += event.text
                else:
                    self._open["arguments"] += event.text
                    yield self._grown("function_call_arguments.delta", delta=event.text)
            case CallBroken():
                yield from self._close("incomplete")
            case Ended():
                is_cut = event.reason == "length"
                status = "incomplete" if is_cut else "completed"
                yield from self._close(status)
                why = {"reason": "max_output_tokens"} if is_cut else None
                self.response |= {"status": status, "incomplete_details": why}
                self.response["usage"] = _usage(event)
                yield self._event(status, response=self.response)

    def keepalive(self) -> bytes:
        """A comment, which is no event."""
        return b": keepalive\n\n"

    def end(self) -> Iterable[bytes]:
        """Nothing: the text's own end has it."""
        return ()

    def fail(self, error: Exception, status: HTTPStatus) -> Iterator[bytes]:
        """The response, failed."""
        words = RESPONSES.error(error, status)["error"]
        code = getattr(error, "code", None) or "server_error"
        said = {"code": code, "message": words["message"]}
        self.response |= {"status": "failed", "error": said}
        yield self._event("failed", response=self.response)

    def _say(self, said: Said) -> Iterator[bytes]:
        if self._open.get("type") != "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield from self._start("message", role="assistant", status="in_progress", content=[])
            yield self._grown("content_part.added", content_index=0, part=part)
            self._open["content"].append(part)
        (part,) = self._open["content"]
        logprobs = [fields.logprob(token) for token in said.logprobs]
        part["text"] += said.text
        part["logprobs"] += logprobs
        more = {"content_index": 0, "delta": said.text, "logprobs": logprobs}
        yield self._grown("output_text.delta", **more)

    def _think(self, said: Said) -> Iterator[bytes]:
        if self._open.get("type") != "reasoning":
            part = {"type": "summary_text", "text": ""}
            yield from self._start("reasoning", summary=[])
            yield self._grown("reasoning_summary_part.added", summary_index=0, part=part)
            self._open["summary"].append(part)
        self._open["summary"][0]["text"] += said.text
        yield self._grown("reasoning_summary_text.delta", summary_index=0, delta=said.text)

    def _call(self, call: CallBegan) -> Iterator[bytes]:
        tool = self.asked.more["tools"].get(call.name, Tool())
        kind = "custom_tool_call" if tool.is_free else "function_call"
        named = {"call_id": call.id, "name": call.name, "status": "in_progress"}
        named |= {"namespace": tool.namespace} if tool.namespace else {}
        yield from self._start(kind, **named, **{"input" if tool.is_free else "arguments": ""})

    def _start(self, kind: str, **more: Any) -> Iterator[bytes]:
        """Add an item, once the open one is done."""
        yield from self._close("completed")
        self._open = {"type": kind, "id": ITEMS[kind] + uuid4().hex, **more}
        self.response["output"].append(self._open)
        self._arguments = ""
        yield self._event("output_item.added", output_index=self._index, item=self._open)

    def _close(self, status: str) -> Iterator[bytes]:
        """The end of the open item."""
        item = self._open
        match item.get("type"):
            case "message":
                part = item["content"][0]
                done = {"text": part["text"], "logprobs": part["logprobs"]}
                yield self._grown("output_text.done", content_index=0, **done)
                yield self._grown("content_part.done", content_index=0, part=part)
            case "reasoning":
                part = item["summary"][0]
                done = {"summary_index": 0, "text": part["text"]}
                yield self._grown("reasoning_summary_text.done", **done)
                yield self._grown("reasoning_summary_part.done", summary_index=0, part=part)
                if self.asked.more["encrypts"]:  # a client that keeps nothing else wants it
                    item["encrypted_content"] = b64encode(part["text"].encode()).decode()
            case "function_call":
                done = {"arguments": item["arguments"], "name": item["name"]}
                yield self._grown("function_call_arguments.done", **done)
            case "custom_tool_call":
                item["input"] = _free_text(self._arguments)
                yield self._grown("custom_tool_call_input.delta", delta=item["input"])
                yield self._grown("custom_tool_call_input.done", input=item["input"])
        if "status" in item:
            item["status"] = status
        if item:
            yield self._event("output_item.done", output_index=self._index, item=item)
        self._open = {}

    @property
    def _index(self) -> int:
        """Place of the open item in the output."""
        return len(self.response["output"]) - 1

    def _grown(self, kind: str, **more: Any) -> bytes:
        """An event of the open item."""
        return self._event(kind, item_id=self._open["id"], output_index=self._index, **more)

    def _event(self, kind: str, **more: Any) -> bytes:
        self._number += 1
        kind = f"response.{kind}"
        return fields.server_sent({"type": kind, "sequence_number": self._number, **more}, kind)


def _free_text(arguments: str) -> str:
    """The text that stands for a call's arguments as `FREE` has it."""
    try:
        return str(json.loads(arguments)["input"])
    except (ValueError, KeyError, TypeError):
        return arguments
