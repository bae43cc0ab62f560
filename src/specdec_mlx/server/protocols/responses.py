"""OpenAI's Responses protocol, without state: every request brings the whole conversation along.

The fields are those of https://platform.openai.com/docs/api-reference/responses; ours (drafter,
draft_length, rule, ...) may stand beside them.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from uuid import uuid4

from specdec_mlx.server.prompts import has_grammar
from specdec_mlx.server.protocols import fields
from specdec_mlx.server.protocols.turns import (
    BETWEEN,
    Turns,
    as_result,
    expect,
    function,
    given,
    leave_out,
    parts_in,
    unseen,
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
    Stream,
    Written,
)

STATEFUL = ("previous_response_id", "conversation", "prompt", "background")
"""Fields that ask for what is kept at OpenAI; nothing is kept here."""

MORE_TOOLS = "additional_tools"  # an item of Codex's
ENCRYPTED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
FREE = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
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


@dataclass(frozen=True)
class Growth:
    """How an item of one kind grows, in the names of the protocol.

    prefix: of its id. told: its text in the names of events. name: the field of that text, in the
    item or in its only part. parts, part, empty: the list of parts, the part in the names of
    events, and a new one.
    """

    prefix: str
    told: str
    name: str
    parts: str = ""
    part: str = ""
    empty: Mapping[str, Any] = field(default_factory=dict)


WORDS = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
SUMMARY = {"type": "summary_text", "text": ""}
GROWTH = {
    "message": Growth("msg", "output_text", "text", "content", "content_part", WORDS),
    "reasoning": Growth(
        "rs",
        "reasoning_summary_text",
        "text",
        "summary",
        "reasoning_summary_part",
        SUMMARY,
    ),
    "function_call": Growth("fc", "function_call_arguments", "arguments"),
    "custom_tool_call": Growth("ctc", "custom_tool_call_input", "input"),
}


@dataclass(frozen=True)
class Tool:
    """How a tool was offered. is_free: its input is any text, not JSON."""

    is_free: bool = False
    namespace: str | None = None


def _text(part: Mapping[str, Any]) -> str:
    """A part of a content as text, whatever it is."""
    for name in ("text", "refusal"):
        if name in part:
            return str(expect(part[name], str, name))
    return unseen(part["type"])


def _texts(content: Any, where: str) -> str:
    return BETWEEN.join(map(_text, parts_in(content, where)))


def _add(turns: Turns, item: Mapping[str, Any]) -> None:
    """Add an item of the input."""
    kind = item.get("type", "message")
    if kind == "message":
        if (role := item.get("role")) not in (
            "user",
            "assistant",
            "system",
            "developer",
        ):
            raise RequestError(
                f"input: role must be user, assistant or developer, not {role!r}"
            )
        turns.say(role, _texts(item.get("content"), "input: content"))
    elif kind == "reasoning":
        parts = parts_in(item.get("content"), "reasoning.content")
        parts = parts or parts_in(item.get("summary"), "reasoning.summary")
        turns.think(BETWEEN.join(map(_text, parts)))
    elif kind in ("function_call", "custom_tool_call"):
        text = expect(item.get(GROWTH[kind].name), str, kind)
        arguments = text if kind == "function_call" else {"input": text}
        name = expect(item.get("name"), str, f"{kind}.name")
        turns.call(str(item.get("call_id")), name, arguments)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        output = _texts(as_result(item.get("output")), f"{kind}.output")
        turns.answer(str(item.get("call_id")), output)
    elif kind == "item_reference":
        if not str(item.get("id")).startswith(GROWTH["reasoning"].prefix):
            raise RequestError(
                "item_reference: nothing is kept here. Set store to false in your client, which "
                "then sends the items themselves."
            )
        leave_out("reference", "reasoning")
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
        elif (
            kind not in ("function", "custom")
            or expect(name, str, "tools: name") in offered
        ):
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
    return (
        f"{words}\n\nThe input, in {form.get('syntax')} notation:\n{form['definition']}"
    )


def _choice(choice: Any, offered: Mapping[str, Tool]) -> tuple[str, Iterable[str]]:
    """A tool choice, and the names of the tools that may be called."""
    if choice in (AUTO, NONE, REQUIRED):
        return choice, offered
    named = expect(choice, dict, "tool_choice")
    if named.get("type") == "allowed_tools":
        tools = given(named, "tools", list)
        names = [expect(tool, dict, "tool_choice: tools").get("name") for tool in tools]
        return _choice(named.get("mode"), offered)[0], names
    if (name := named.get("name")) in [*offered]:
        return name, offered
    raise RequestError(f"tool_choice: there is no tool {name!r} among the tools.")


def _usage(ended: Ended) -> dict[str, Any]:
    return {
        "input_tokens": ended.num_prompt,
        "input_tokens_details": {
            "cached_tokens": ended.num_cached,
            "cache_write_tokens": 0,
        },
        "output_tokens": ended.num_written,
        "output_tokens_details": {"reasoning_tokens": ended.num_thought},
        "total_tokens": ended.num_prompt + ended.num_written,
        "speculation": fields.speculation(ended),
    }


class ResponseStream(Stream):
    """A streamed response. Its items come one after another: each is added, grows, and is done."""

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self._open: dict[str, Any] = {}  # the item that grows
        self._holder: dict[str, Any] = {}  # of the text: the item, or its part
        self._arguments = ""  # of a call whose input is any text
        self._number = -1
        none = "error", "incomplete_details", "previous_response_id", "usage"
        self.response: dict[str, Any] = {
            "id": self.asked.id,
            "object": "response",
            "created_at": self.asked.created,
            "status": "in_progress",
            "model": self.asked.model,
            "output": [],
            "store": False,
            **dict.fromkeys(none),
            **self.asked.more["echo"],
        }

    def begin(self) -> Iterator[bytes]:
        """The response, still empty."""
        yield self._event("created", response=self.response)
        yield self._event("in_progress", response=self.response)

    def write(self, choice: int, event: Event) -> Iterator[bytes]:
        """The bytes of an event."""
        match event:
            case Said() if event.is_thought and event.text:
                if self._open.get("type") != "reasoning":
                    yield from self._start("reasoning", summary=[])
                yield self._grow(event.text)
            case Said() if not event.is_thought and (event.text or event.logprobs):
                if self._open.get("type") != "message":
                    more = {"role": "assistant", "status": "in_progress"}
                    yield from self._start("message", content=[], **more)
                logprobs = [fields.logprob(token) for token in event.logprobs]
                self._holder["logprobs"] += logprobs
                yield self._grow(event.text, logprobs=logprobs)
            case CallBegan():
                tool = self.asked.more["tools"].get(event.name, Tool())
                kind = "custom_tool_call" if tool.is_free else "function_call"
                more = {
                    "call_id": event.id,
                    "name": event.name,
                    "status": "in_progress",
                }
                more |= {"namespace": tool.namespace} if tool.namespace else {}
                yield from self._start(kind, **more, **{GROWTH[kind].name: ""})
                yield from self._called(event.text)
            case CallArguments():
                yield from self._called(event.text)
            case CallBroken():
                yield from self._close("incomplete")
            case Ended():
                is_cut = event.reason == "length"
                status = "incomplete" if is_cut else "completed"
                yield from self._close(status)
                self.response |= {
                    "status": status,
                    "incomplete_details": {"reason": "max_output_tokens"}
                    if is_cut
                    else None,
                    "usage": _usage(event),
                }
                yield self._event(status, response=self.response)

    def _called(self, arguments: str) -> Iterator[bytes]:
        """More arguments; an input that is any text is said once they are whole."""
        if "input" in self._open:
            self._arguments += arguments
        elif arguments:
            yield self._grow(arguments)

    def fail(self, error: Exception, status: HTTPStatus) -> Iterator[bytes]:
        """The response, failed."""
        code = getattr(error, "code", None) or "server_error"
        said = {"code": code, "message": fields.words_of(error, status)}
        self.response |= {"status": "failed", "error": said}
        yield self._event("failed", response=self.response)

    def _start(self, kind: str, **more: Any) -> Iterator[bytes]:
        """Add an item, once the open one is done."""
        yield from self._close("completed")
        growth = GROWTH[kind]
        self._open = {"type": kind, "id": f"{growth.prefix}_{uuid4().hex}", **more}
        self._holder, self._arguments = self._open, ""
        self.response["output"].append(self._open)
        yield self._event(
            "output_item.added", output_index=self._index, item=self._open
        )
        if growth.part:
            self._holder = deepcopy(dict(growth.empty))
            yield self._grown(f"{growth.part}.added", part=self._holder)
            self._open[growth.parts].append(self._holder)

    def _close(self, status: str) -> Iterator[bytes]:
        """The end of the open item."""
        if not (item := self._open):
            return
        if self._arguments:
            yield self._grow(_free_text(self._arguments))
        growth, holder = GROWTH[item["type"]], self._holder
        done = {
            name: holder[name] for name in (growth.name, "logprobs") if name in holder
        }
        yield self._grown(f"{growth.told}.done", **done)
        if growth.part:
            yield self._grown(f"{growth.part}.done", part=holder)
        if item["type"] == "reasoning" and self.asked.more["encrypts"]:
            item["encrypted_content"] = b64encode(holder["text"].encode()).decode()
        if "status" in item:
            item["status"] = status
        yield self._event("output_item.done", output_index=self._index, item=item)
        self._open = {}

    @property
    def _index(self) -> int:
        """Place of the open item in the output."""
        return len(self.response["output"]) - 1

    def _grow(self, text: str, **more: Any) -> bytes:
        growth = GROWTH[self._open["type"]]
        self._holder[growth.name] += text
        return self._grown(f"{growth.told}.delta", delta=text, **more)

    def _grown(self, kind: str, **more: Any) -> bytes:
        """An event of the open item."""
        if parts := GROWTH[self._open["type"]].parts:
            more[f"{parts}_index"] = 0
        return self._event(
            kind, item_id=self._open["id"], output_index=self._index, **more
        )

    def _event(self, kind: str, **more: Any) -> bytes:
        self._number += 1
        kind = f"response.{kind}"
        return fields.server_sent(
            {"type": kind, "sequence_number": self._number, **more}, kind
        )


def _free_text(arguments: str) -> str:
    """The text that stands for a call's arguments as `FREE` has it."""
    try:
        return str(json.loads(arguments)["input"])
    except (ValueError, KeyError, TypeError):
        return arguments


class Responses(fields.OpenAIWire):
    """The wire of `/v1/responses`."""

    stream = ResponseStream

    def read(self, body: Mapping[str, Any]) -> Asked:
        """Check a body; raises RequestError."""
        for name in STATEFUL:
            if body.get(name):
                raise RequestError(
                    f"{name}: nothing is kept here. Send all of the input again."
                )
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
        brought = (
            given(item, "tools", list)
            for item in items
            if item.get("type") == MORE_TOOLS
        )
        all_tools: list[Any] = sum(brought, given(body, "tools", list))
        request.tools = list(_tools(all_tools, tools))
        request.tool_choice, named = _choice(body.get("tool_choice") or AUTO, tools)
        request.tools = [
            tool for tool in request.tools if tool["function"]["name"] in named
        ]
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
        words = Said(written.text, logprobs=written.logprobs)
        events: list[Event] = [Said(written.thoughts, is_thought=True), words]
        for index, call in enumerate(written.calls):
            events.append(CallBegan(index, call["id"], call["name"], call["arguments"]))
        for event in [*events, written.ended]:
            list(stream.write(0, event))
        return stream.response


RESPONSES = Responses()
