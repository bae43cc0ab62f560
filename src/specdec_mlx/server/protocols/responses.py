"""OpenAI's Responses protocol, without state: every request brings the whole conversation along.

The fields are those of https://platform.openai.com/docs/api-reference/responses; ours (drafter,
num_draft_tokens, rule, ...) may stand beside them.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any
from uuid import uuid4

from msgspec import Struct

from specdec_mlx.arguments import short_repr
from specdec_mlx.server.protocols.body import (
    Body,
    Config,
    NumTop,
    Tool,
    checked,
    choose_tool,
    fields_of,
    text_request,
    think,
)
from specdec_mlx.server.protocols.replies import (
    ItemStream,
    logprob,
    openai_error,
    server_sent,
    speculation,
    whole_reply,
    words_of,
)
from specdec_mlx.server.protocols.turns import (
    Turn,
    Turns,
    as_result,
    function,
    joined,
    leave_out,
    named,
)
from specdec_mlx.server.requests import (
    AUTO,
    Asked,
    CallBegan,
    Ended,
    Object,
    RequestError,
    Sent,
    TokenLogprob,
    Wire,
)

STATEFUL = ("previous_response_id", "conversation", "prompt", "background")
"""Fields that ask for what is kept at OpenAI; nothing is kept here."""

MORE_TOOLS = "additional_tools"  # an item of Codex's
ENCRYPTED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
FREE = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
CALLS = {"function": "function_call", "custom": "custom_tool_call"}
"""Items of calls, by the type of their tool."""

ECHOED: Object = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "reasoning": {"effort": None, "summary": None},
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": AUTO,
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
}
"""Fields of a request that its response repeats, with their defaults."""

UNKNOWN = "error", "incomplete_details", "previous_response_id", "usage"
"""Fields of a response that are null at first."""


@dataclass(frozen=True)
class Growth:
    """How an item of one kind grows, in the names of the protocol.

    prefix: of its id. told: its text in the names of events. name: the field of that text, in the
    item or in its only part. empty: a new item. part: its only part, in the names of events.
    parts: the list of parts; empty_part: a new one.
    """

    prefix: str
    told: str
    name: str
    empty: Object
    part: str = ""
    parts: str = ""
    empty_part: Object | None = None


STATUS = {"status": "in_progress"}
GROWTH = {
    "message": Growth(
        "msg",
        "output_text",
        "text",
        {"role": "assistant", **STATUS, "content": []},
        "content_part",
        "content",
        {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    ),
    "reasoning": Growth(
        "rs",
        "reasoning_summary_text",
        "text",
        {"summary": []},
        "reasoning_summary_part",
        "summary",
        {"type": "summary_text", "text": ""},
    ),
    "function_call": Growth(
        "fc", "function_call_arguments", "arguments", {**STATUS, "arguments": ""}
    ),
    "custom_tool_call": Growth("ctc", "custom_tool_call_input", "input", {**STATUS, "input": ""}),
}


class MoreTools(Struct):
    """An item that brings tools along."""

    tools: list[Tool] = []


class ResponsesBody(Body, kw_only=True):
    """The fields of a response."""

    input: str | list[Object]
    instructions: Any = None
    text: Config = Config()
    reasoning: Config = Config()
    include: tuple[str, ...] = ()
    top_logprobs: NumTop = 0


def _add(turns: Turns, item: Object) -> None:
    """Add an item of the input."""
    match kind := item["type"]:
        case "message":
            said = checked(item, Turn)
            turns.say(said.role, joined(said.content, "input: content"))
        case "reasoning":
            thoughts = joined(item.get("content"), "reasoning.content")
            turns.think(thoughts or joined(item.get("summary"), "reasoning.summary"))
        case "function_call" | "custom_tool_call":
            text = named(item, GROWTH[kind].name)
            arguments = text if kind == "function_call" else {"input": text}
            turns.call(str(item.get("call_id")), named(item, "name"), arguments)
        case "function_call_output" | "custom_tool_call_output":
            output = joined(as_result(item.get("output")), f"{kind}.output")
            turns.answer(str(item.get("call_id")), output)
        case "item_reference":
            if not str(item.get("id")).startswith(GROWTH["reasoning"].prefix):
                raise RequestError(
                    "item_reference: nothing is kept here. Set store to false in your client, "
                    "which then sends the items themselves."
                )
            leave_out("reference", "reasoning")
        case _ if kind != MORE_TOOLS:
            leave_out("item", kind)


def _tools(tools: Sequence[Tool], offered: dict[str, Object], **space: str) -> Iterator[Object]:
    """The tools that a client runs. All others are left out.

    offered: what the items of a tool's calls have, by its name. space: the namespace, if any.
    """
    for tool in tools:
        if tool.type == "namespace":
            yield from _tools(tool.tools, offered, namespace=str(tool.name))
        elif tool.type not in CALLS or tool.name in offered:
            leave_out("tool", tool.type)
        elif tool.name is None:
            raise RequestError(f"tools: expected a name, got {short_repr(tool)}")
        else:
            offered[tool.name] = {"type": CALLS[tool.type], **space}
            schema = FREE if tool.type == "custom" else tool.parameters
            yield function(tool.name, _described(tool), schema)


def _described(tool: Tool) -> str:
    """The description of a tool, with the grammar of the text that it takes if it has one."""
    words, form = tool.description or "", tool.format
    if "definition" not in form:
        return words
    return f"{words}\n\nThe input, in {form.get('syntax')} notation:\n{form['definition']}"


def read(body: Object) -> Asked:
    """Check a body; raises RequestError."""
    for name in STATEFUL:
        if body.get(name):
            raise RequestError(f"{name}: nothing is kept here. Send all of the input again.")
    fields = fields_of(body, ResponsesBody)
    request, turns, tools = text_request(fields, fields.text.format), Turns(), fields.tools
    if fields.instructions:
        turns.say("system", joined(fields.instructions, "instructions"))
    items = fields.input
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    for each in items:
        item = {"type": "message", **each}
        _add(turns, item)
        if item["type"] == MORE_TOOLS:
            tools = tools + checked(item, MoreTools).tools
    if not turns.messages:
        raise RequestError("input: expected a text, or a list of at least one item.")
    request.messages = turns.messages
    offered: dict[str, Object] = {}
    request.tools = list(_tools(tools, offered))
    choose_tool(request, fields.tool_choice)
    think(request, fields.reasoning.effort)
    if LOGPROBS in fields.include or fields.top_logprobs:
        request.num_logprobs = max(0, fields.top_logprobs)
    return Asked([request], body, "resp_", offered)


def _usage(ended: Ended) -> Object:
    return {
        "input_tokens": ended.num_prompt,
        "input_tokens_details": {"cached_tokens": ended.num_cached, "cache_write_tokens": 0},
        "output_tokens": ended.num_written,
        "output_tokens_details": {"reasoning_tokens": ended.num_thought},
        "total_tokens": ended.num_prompt + ended.num_written,
        "speculation": speculation(ended),
    }


class ResponseStream(ItemStream):
    """A streamed response. Its items come one after another: each is added, grows, and is done."""

    kinds = "message", "reasoning"

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked, {"id": asked.id, "object": "response", "model": asked.model})
        self.whole |= {
            "created_at": asked.created,
            "output": self.items,
            "store": False,
            **STATUS,
            **dict.fromkeys(UNKNOWN),
            **{name: asked.body.get(name) or value for name, value in ECHOED.items()},
            "parallel_tool_calls": asked.requests[0].parallel_calls,
        }
        self._holder: Object = {}  # of the text: the item, or its part
        self._number = -1

    def begin(self) -> Sent:
        """The response, still empty."""
        for kind in ("created", "in_progress"):
            yield self._event(kind, response=self.whole)

    def add(self, call: CallBegan | None) -> Sent:
        """Add an item, and its part."""
        if call is not None:
            how = self.asked.tools.get(call.name, {"type": "function_call"})
            self.item |= {"call_id": call.id, "name": call.name, **how}
        growth = self._growth
        self.item |= {"id": f"{growth.prefix}_{uuid4().hex}", **deepcopy(growth.empty)}
        yield self._of_item("output_item.added", item=self.item)
        self._holder = self.item
        if growth.part:
            self._holder = deepcopy(growth.empty_part or {})
            yield self._grown(f"{growth.part}.added", part=self._holder)
            self.item[growth.parts].append(self._holder)

    def grow(self, text: str, logprobs: Sequence[TokenLogprob]) -> Sent:
        """More of an item; an input that is any text is said once it is whole."""
        more = {}
        if self.item["type"] == "message":
            more["logprobs"] = [logprob(token) for token in logprobs]
            self._holder["logprobs"] += more["logprobs"]
        if self.item["type"] != "custom_tool_call":
            yield self._delta(text, **more)

    def close(self, status: str) -> Sent:
        """The end of an item."""
        item, growth = self.item, self._growth
        if item["type"] == "custom_tool_call" and self.text:
            self.text = _free_text(self.text)
            yield self._delta(self.text)
        names = growth.name, "logprobs"
        done = {name: self._holder[name] for name in names if name in self._holder}
        yield self._grown(f"{growth.told}.done", **done)
        if growth.part:
            yield self._grown(f"{growth.part}.done", part=self._holder)
        if item["type"] == "reasoning" and ENCRYPTED in (self.asked.body.get("include") or ()):
            item["encrypted_content"] = b64encode(self.text.encode()).decode()
        if "status" in item:
            item["status"] = status
        yield self._of_item("output_item.done", item=item)

    def finish(self, ended: Ended) -> Sent:
        """The whole response."""
        is_cut = ended.reason == "length"
        status = "incomplete" if is_cut else "completed"
        details = {"reason": "max_output_tokens"} if is_cut else None
        self.whole |= {"status": status, "incomplete_details": details}
        self.whole["usage"] = _usage(ended)
        yield self._event(status, response=self.whole)

    def fail(self, error: Exception, status: HTTPStatus) -> Sent:
        """The response, failed."""
        code = getattr(error, "code", None) or "server_error"
        said = {"code": code, "message": words_of(error, status)}
        self.whole |= {"status": "failed", "error": said}
        yield self._event("failed", response=self.whole)

    @property
    def _growth(self) -> Growth:
        return GROWTH[self.item["type"]]

    def _delta(self, text: str, **more: Any) -> bytes:
        self._holder[self._growth.name] = self.text
        return self._grown(f"{self._growth.told}.delta", delta=text, **more)

    def _grown(self, kind: str, **more: Any) -> bytes:
        """An event of the open item's text."""
        if parts := self._growth.parts:
            more[f"{parts}_index"] = 0
        return self._of_item(kind, item_id=self.item["id"], **more)

    def _of_item(self, kind: str, **more: Any) -> bytes:
        return self._event(kind, output_index=len(self.items) - 1, **more)

    def _event(self, kind: str, **more: Any) -> bytes:
        self._number += 1
        kind = f"response.{kind}"
        return server_sent({"type": kind, "sequence_number": self._number, **more}, kind)


def _free_text(arguments: str) -> str:
    """The text that stands for a call's arguments as `FREE` has it."""
    try:
        return str(json.loads(arguments)["input"])
    except (ValueError, KeyError, TypeError):
        return arguments


RESPONSES = Wire(read, ResponseStream, partial(whole_reply, ResponseStream), openai_error)
"""The protocol of `/v1/responses`."""
