"""OpenAI's Responses protocol, without state: every request brings the whole conversation along.

The fields are those of https://platform.openai.com/docs/api-reference/responses; ours (drafter,
num_draft_tokens, rule, ...) may stand beside them.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator, Sequence
from copy import deepcopy
from http import HTTPStatus
from typing import Any, NamedTuple
from uuid import uuid4

from msgspec import Struct

from specdec_mlx.server.protocols.body import (
    Body,
    Config,
    NumTop,
    Tool,
    checked,
    choose_tool,
    fields_of,
    function,
    text_request,
    think,
)
from specdec_mlx.server.protocols.replies import (
    ItemReply,
    ParsedBody,
    Pieces,
    Wire,
    logprob,
    openai_error,
    server_sent,
    speculation,
    words_of,
)
from specdec_mlx.server.protocols.turns import (
    Turn,
    Turns,
    as_result,
    field_of,
    joined,
    leave_out,
)
from specdec_mlx.server.requests import (
    AUTO,
    CallBegan,
    Ended,
    Object,
    RequestError,
    TokenLogprob,
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


class ItemKind(NamedTuple):
    """How an item of one type grows, in the names of the protocol.

    Attributes:
        prefix: of its id.
        text_event: its text in the names of events; the last word is the text's field.
        item: a new item.
        part_event: its only part in the names of events; "" if the text is the item's own.
        parts: the field with the list of parts.
        part: a new part.
    """

    prefix: str
    text_event: str
    item: Object
    part_event: str = ""
    parts: str = ""
    part: Object | None = None

    @property
    def text_field(self) -> str:
        """The field of the text, in the item or in its part."""
        return self.text_event.rpartition("_")[2]


STATUS = {"status": "in_progress"}
KINDS = {
    "message": ItemKind(
        "msg",
        "output_text",
        {"role": "assistant", **STATUS, "content": []},
        "content_part",
        "content",
        {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    ),
    "reasoning": ItemKind(
        "rs",
        "reasoning_summary_text",
        {"summary": []},
        "reasoning_summary_part",
        "summary",
        {"type": "summary_text", "text": ""},
    ),
    "function_call": ItemKind("fc", "function_call_arguments", {**STATUS, "arguments": ""}),
    "custom_tool_call": ItemKind("ctc", "custom_tool_call_input", {**STATUS, "input": ""}),
}


class MoreTools(Struct):
    tools: list[Tool] = []


class ResponsesBody(Body, kw_only=True):
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
            turn = checked(item, Turn)
            turns.say(turn.role, joined(turn.content, "input: content"))
        case "reasoning":
            thoughts = joined(item.get("content"), "reasoning.content")
            turns.think(thoughts or joined(item.get("summary"), "reasoning.summary"))
        case "function_call" | "custom_tool_call":
            text = field_of(item, KINDS[kind].text_field)
            arguments = text if kind == "function_call" else {"input": text}
            turns.call(str(item.get("call_id")), field_of(item, "name"), arguments)
        case "function_call_output" | "custom_tool_call_output":
            output = joined(as_result(item.get("output")), f"{kind}.output")
            turns.answer(str(item.get("call_id")), output)
        case "item_reference":
            if not str(item.get("id")).startswith(KINDS["reasoning"].prefix):
                raise RequestError(
                    "item_reference: nothing is kept here. Set store to false in your client, "
                    "which then sends the items themselves."
                )
            leave_out("reference", "reasoning")
        case _ if kind != MORE_TOOLS:
            leave_out("item", kind)


def _tools(tools: Sequence[Tool], call_items: dict[str, Object], **space: str) -> Iterator[Object]:
    """The tools that a client runs. All others are left out.

    Args:
        call_items: filled with the fields of a call's items, by the name of the tool.
        space: the namespace, if any.
    """
    for tool in tools:
        if tool.type == "namespace":
            yield from _tools(tool.tools, call_items, namespace=str(tool.name))
        elif tool.type not in CALLS or tool.name in call_items:
            leave_out("tool", tool.type)
        else:
            is_custom = tool.type == "custom"
            yield function(tool, _described(tool), FREE if is_custom else tool.parameters)
            call_items[str(tool.name)] = {"type": CALLS[tool.type], **space}


def _described(tool: Tool) -> str:
    """The description of a tool, with the grammar of the text that it takes if it has one."""
    words, form = tool.description or "", tool.format
    if "definition" not in form:
        return words
    return f"{words}\n\nThe input, in {form.get('syntax')} notation:\n{form['definition']}"


def read(body: Object) -> ParsedBody:
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
        item = {**each, "type": each.get("type") or "message"}
        _add(turns, item)
        if item["type"] == MORE_TOOLS:
            tools = tools + checked(item, MoreTools).tools
    if not turns.messages:
        raise RequestError("input: expected a text, or a list of at least one item.")
    request.messages = turns.messages
    call_items: dict[str, Object] = {}
    request.tools = list(_tools(tools, call_items))
    choose_tool(request, fields.tool_choice)
    think(request, fields.reasoning.effort)
    if LOGPROBS in fields.include or fields.top_logprobs:
        request.num_logprobs = max(0, fields.top_logprobs)
    return ParsedBody([request], body, "resp_", call_items)


class ResponseReply(ItemReply):
    kinds = "message", "reasoning"

    def __init__(self, parsed: ParsedBody) -> None:
        body = parsed.body
        content = {
            "id": parsed.id,
            "object": "response",
            "model": parsed.model,
            "created_at": parsed.created,
            "store": False,
            **STATUS,
            **dict.fromkeys(UNKNOWN),
            **{name: body.get(name) or value for name, value in ECHOED.items()},
            "parallel_tool_calls": parsed.requests[0].parallel_calls,
        }
        super().__init__(parsed, content, "output")
        self._holder: Object = {}  # of the text: the item, or its part
        self._number = -1

    def begin(self) -> Pieces:
        """The response, still empty."""
        for kind in ("created", "in_progress"):
            yield self._event(kind, response=self.content)

    def add(self, call: CallBegan | None) -> Pieces:
        if call is not None:
            about = self.parsed.call_items.get(call.name, {"type": "function_call"})
            self.item |= {"call_id": call.id, "name": call.name, **about}
        kind = self._kind
        self.item |= {"id": f"{kind.prefix}_{uuid4().hex}", **deepcopy(kind.item)}
        yield self._of_item("output_item.added", item=self.item)
        self._holder = self.item
        if kind.part is not None:
            self._holder = deepcopy(kind.part)
            yield self._of_text(f"{kind.part_event}.added", part=self._holder)
            self.item[kind.parts].append(self._holder)

    def grow(self, text: str, logprobs: Sequence[TokenLogprob]) -> Pieces:
        """More of an item; an input that is any text is sent once it is whole."""
        more = {}
        if self.item["type"] == "message":
            more["logprobs"] = [logprob(token) for token in logprobs]
            self._holder["logprobs"] += more["logprobs"]
        if self.item["type"] != "custom_tool_call":
            yield self._delta(text, **more)

    def close(self, status: str) -> Pieces:
        item, kind = self.item, self._kind
        if item["type"] == "custom_tool_call" and self.text:
            # The model writes a JSON object. The client wants the text in it.
            self.text = _free_text(self.text)
            yield self._delta(self.text)
        names = {kind.text_field, "logprobs"} & self._holder.keys()
        yield self._of_text(f"{kind.text_event}.done", **{n: self._holder[n] for n in names})
        if kind.part is not None:
            yield self._of_text(f"{kind.part_event}.done", part=self._holder)
        if item["type"] == "reasoning" and ENCRYPTED in (self.parsed.body.get("include") or ()):
            # Nothing is kept here, so that the client brings the thought along in the next request.
            item["encrypted_content"] = b64encode(self.text.encode()).decode()
        if "status" in item:
            item["status"] = status
        yield self._of_item("output_item.done", item=item)

    def finish(self, ended: Ended) -> Pieces:
        """The whole response."""
        is_cut = ended.reason == "length"
        status = "incomplete" if is_cut else "completed"
        details = {"reason": "max_output_tokens"} if is_cut else None
        usage = {
            "input_tokens": ended.num_prompt,
            "input_tokens_details": {"cached_tokens": ended.num_cached, "cache_write_tokens": 0},
            "output_tokens": ended.num_written,
            "output_tokens_details": {"reasoning_tokens": ended.num_thought},
            "total_tokens": ended.num_prompt + ended.num_written,
            "speculation": speculation(ended),
        }
        self.content |= {"status": status, "incomplete_details": details, "usage": usage}
        yield self._event(status, response=self.content)

    def fail(self, error: Exception, status: HTTPStatus) -> Pieces:
        code = getattr(error, "code", None) or "server_error"
        failure = {"code": code, "message": words_of(error, status)}
        self.content |= {"status": "failed", "error": failure}
        yield self._event("failed", response=self.content)

    @property
    def _kind(self) -> ItemKind:
        return KINDS[self.item["type"]]

    def _delta(self, text: str, **more: Any) -> bytes:
        self._holder[self._kind.text_field] = self.text
        return self._of_text(f"{self._kind.text_event}.delta", delta=text, **more)

    def _of_text(self, event: str, **more: Any) -> bytes:
        """An event of the open item's text."""
        if parts := self._kind.parts:
            more[f"{parts}_index"] = 0
        return self._of_item(event, item_id=self.item["id"], **more)

    def _of_item(self, event: str, **more: Any) -> bytes:
        return self._event(event, output_index=len(self.items) - 1, **more)

    def _event(self, event: str, **more: Any) -> bytes:
        self._number += 1
        event = f"response.{event}"
        return server_sent({"type": event, "sequence_number": self._number, **more}, event)


def _free_text(arguments: str) -> str:
    """The text that stands for a call's arguments as `FREE` has it."""
    try:
        return str(json.loads(arguments)["input"])
    except (ValueError, KeyError, TypeError):
        return arguments


RESPONSES = Wire(read, ResponseReply, openai_error)
"""The protocol of `/v1/responses`."""
