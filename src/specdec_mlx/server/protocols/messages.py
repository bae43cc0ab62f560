"""Anthropic's Messages protocol: requests, replies, streams and errors.

The fields are those of https://docs.anthropic.com/en/api/messages; ours (drafter, num_draft_tokens,
rule, ...) may stand beside them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from importlib.resources import files
from typing import Any

from msgspec import DecodeError, Struct

from specdec_mlx.server.pictures import mark, unseen
from specdec_mlx.server.protocols.body import (
    BUDGETS,
    AnswerFormat,
    Body,
    Config,
    Count,
    Stops,
    Tool,
    choose_tool,
    fields_of,
    function,
    read_json,
    text_request,
    texts,
)
from specdec_mlx.server.protocols.replies import (
    ItemReply,
    ParsedBody,
    Pieces,
    Wire,
    server_sent,
    speculation,
    words_of,
)
from specdec_mlx.server.protocols.turns import (
    Turn,
    Turns,
    as_result,
    check_kind,
    field_of,
    joined,
    leave_out,
    parts_in,
)
from specdec_mlx.server.requests import (
    AUTO,
    CallBegan,
    Ended,
    Event,
    Object,
    PromptProgress,
    RequestError,
    TokenLogprob,
)

BILLING = "x-anthropic-billing-header:"  # differs by conversation, and says nothing to a model
NO_THREADS = "thread_unsupported_request"  # the protocol's name for it
SIGNATURE = "bG9jYWw="  # of thoughts: clients send back only those that have one
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
UNKNOWN = "stop_reason", "stop_sequence", "usage"  # null at first
EMPTY: dict[str, Object] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}
"""Blocks before they have grown, without their types."""

OWN_TOOLS: dict[str, Object] = json.loads(
    files(__package__).joinpath("anthropic_tools.json").read_text("utf-8")
)
"""Anthropic's tools that clients run, by how their types begin: what they do, and their input."""


def _text(block: Object) -> str:
    """A block as text, whatever it is."""
    match kind := block["type"]:
        case "text":
            return str(field_of(block, "text"))
        case "document" | "image":
            source = field_of(block, "source", dict)
            title = f"{block['title']}\n" if block.get("title") else ""
            if source.get("type") == "text":
                return title + str(source.get("data"))
            if source.get("type") == "content":
                return title + _joined(source.get("content"), kind)
            return mark(block) if kind == "image" else unseen(f"{kind} {title}".strip())
        case "search_result":
            result = _joined(block.get("content"), kind)
            return f"{block.get('title')}\n{block.get('source')}\n{result}"
        case "tool_reference":
            return f"The tool {block.get('tool_name')} can be called now."
        case _:
            return unseen(kind)


_joined = partial(joined, to_text=_text)


class Thinking(Struct, frozen=True):
    """Whether to think, and the most tokens of the thought."""

    type: str | None = None
    budget_tokens: Count | None = None


class MessagesBody(Body, kw_only=True):
    messages: list[Turn]
    system: Any = None
    tool_choice: Tool = Tool(type=AUTO)
    stop_sequences: Stops = ""
    thinking: Thinking = Thinking()
    output_config: Config = Config()
    output_format: AnswerFormat | None = None
    thread: Any = None


def _add(turns: Turns, message: Turn) -> None:
    """Add one of Anthropic's messages."""
    # a later system message stands where it does for a reason
    role = "user" if message.role == "system" else message.role
    for block in parts_in(message.content, "content"):
        match kind := block["type"]:
            case "tool_result":
                failed = "Error: " if block.get("is_error") else ""
                result = _joined(as_result(block.get("content")), f"{kind}.content")
                turns.answer(str(block.get("tool_use_id")), failed + result)
            case "tool_use":
                arguments = block.get("input") or {}
                if not isinstance(arguments, str):  # what a client kept of a broken call
                    check_kind(arguments, dict, f"{kind}: input")
                turns.call(str(block.get("id")), field_of(block, "name"), arguments)
            case "thinking":
                turns.think(field_of(block, kind))
            case _ if kind != "redacted_thinking":
                turns.say(role, _text(block))


def _tools(tools: Sequence[Tool]) -> Iterator[Object]:
    """The tools that a client runs. Those that Anthropic's servers run are left out."""
    for tool in tools:
        kind = tool.type or "custom"
        if kind == "custom":
            yield function(tool, tool.description, tool.input_schema)
        elif known := [OWN_TOOLS[name] for name in OWN_TOOLS if kind.startswith(name)]:
            yield function(tool, known[0].get("description"), known[0]["input_schema"])
        else:
            leave_out("tool", kind)


def read(body: Object) -> ParsedBody:
    """Check a body; raises RequestError. Tokens are counted without max_tokens."""
    fields = fields_of(body, MessagesBody)
    if fields.thread:  # clients that are told so send the whole conversation
        raise RequestError("thread: nothing is kept here. Send all messages again.", NO_THREADS)
    thinking, config = fields.thinking, fields.output_config
    request = text_request(fields, config.format or fields.output_format)
    turns = Turns()
    for block in parts_in(fields.system, "system"):
        if not (text := _text(block)).startswith(BILLING):
            turns.say("system", text)
    for message in fields.messages:
        _add(turns, message)
    request.messages = turns.messages
    if not turns.messages or turns.messages[-1]["role"] == "system":
        raise RequestError("messages: expected a list of at least one message.")
    last = turns.messages[-1]
    request.continues = last["role"] == "assistant" and "tool_calls" not in last
    request.tools = list(_tools(fields.tools))
    choose_tool(request, fields.tool_choice)
    request.parallel_calls = not fields.tool_choice.disable_parallel_tool_use
    request.stop = texts(fields.stop_sequences)
    request.user = str(fields.metadata.get("user_id") or request.user)
    if thinking.type:
        enabled = {"enable_thinking": thinking.type != "disabled"}
        request.template = enabled | request.template
    request.thought_budget = thinking.budget_tokens
    if request.thought_budget is None:
        request.thought_budget = BUDGETS.get(config.effort or "")
    return ParsedBody([request], body, "msg_")


def _usage(num_prompt: int, num_cached: int, num_written: int = 0) -> Object:
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_read_input_tokens": num_cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": num_written,
    }


class MessageReply(ItemReply):
    """A message, streamed as a message_start, its blocks, the reason for its end and a stop."""

    kinds = "text", "thinking"

    def __init__(self, parsed: ParsedBody) -> None:
        about = {"id": parsed.id, "type": "message", "role": "assistant", "model": parsed.model}
        super().__init__(parsed, {**about, **dict.fromkeys(UNKNOWN)}, "content")

    def write(self, choice: int, event: Event) -> Pieces:
        if self.content["usage"] is None:
            self.content["usage"] = _usage(0, 0)
            if isinstance(event, PromptProgress):
                self.content["usage"] = _usage(event.total, event.num_cached)
            # Sent with the first event, because the progress of the prompt gives the usage.
            yield _event("message_start", message=self.content)
        yield from super().write(choice, event)

    def add(self, call: CallBegan | None) -> Pieces:
        if call is not None:
            self.item |= {"type": "tool_use", "id": call.id, "name": call.name}
        self.item |= EMPTY[self.item["type"]]
        yield self._of_block("start", content_block=self.item)

    def grow(self, text: str, logprobs: Sequence[TokenLogprob]) -> Pieces:
        kind = self.item["type"]
        if kind == "tool_use":
            yield self._delta("input_json_delta", "partial_json", text)
        else:
            self.item[kind] = self.text
            yield self._delta(f"{kind}_delta", kind, text)

    def close(self, status: str) -> Pieces:
        """End a block; the whole reply has a call's input as an object."""
        if self.item["type"] == "tool_use":
            with suppress(DecodeError, RecursionError):  # of a call that broke
                self.item["input"] = read_json(self.text.encode())
        if self.item["type"] == "thinking":
            self.item["signature"] = SIGNATURE
            yield self._delta("signature_delta", "signature", SIGNATURE)
        yield self._of_block("stop")

    def finish(self, ended: Ended) -> Pieces:
        """Why the text ended, the stop sequence if one did it, and the usage."""
        reason = STOP_REASONS[ended.reason] if ended.stop is None else "stop_sequence"
        delta = {"stop_reason": reason, "stop_sequence": ended.stop}
        usage = {
            **_usage(ended.num_prompt, ended.num_cached, ended.num_written),
            "output_tokens_details": {"thinking_tokens": ended.num_thought},
            "speculation": speculation(ended),
        }
        self.content |= {**delta, "usage": usage}
        yield _event("message_delta", delta=delta, usage=usage)
        yield _event("message_stop")

    def keepalive(self) -> bytes:
        return _event("ping")

    def fail(self, error: Exception, status: HTTPStatus) -> Pieces:
        yield _event(**_error(error, status))

    def _delta(self, kind: str, name: str, text: str) -> bytes:
        return self._of_block("delta", delta={"type": kind, name: text})

    def _of_block(self, step: str, **more: Any) -> bytes:
        index = len(self.items) - 1
        return _event(f"content_block_{step}", index=index, **more)


def _event(type: str, **more: Any) -> bytes:
    return server_sent({"type": type, **more}, type)


def _error(error: Exception, status: HTTPStatus) -> Object:
    """Anthropic's form of an error."""
    words = words_of(error, status)
    # clients read it, and compact
    if isinstance(error, RequestError) and error.most:
        words = f"prompt is too long: {error.num_tokens} tokens > {error.most} maximum"
    content: Object = {"type": ERRORS.get(status, "invalid_request_error"), "message": words}
    if code := getattr(error, "code", None):
        content["details"] = {"error_code": code}
    return {"type": "error", "error": content}


MESSAGES = Wire(read, MessageReply, _error)
"""The protocol of `/v1/messages`, and of `/v1/messages/count_tokens`."""
