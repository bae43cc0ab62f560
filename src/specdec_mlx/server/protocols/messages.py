"""Anthropic's Messages protocol: requests, replies, streams and errors.

The fields are those of https://docs.anthropic.com/en/api/messages; ours (drafter, draft_length,
rule, ...) may stand beside them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

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
    Ended,
    Event,
    PromptProgress,
    RequestError,
    Said,
    Stream,
    Wire,
    Written,
)

# differs by conversation, and says nothing to a model
BILLING = "x-anthropic-billing-header:"
NO_THREADS = "thread_unsupported_request"  # the protocol's name for it
SIGNATURE = "bG9jYWw="  # of thoughts: clients send back only those that have one
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
CHOICES = {"auto": AUTO, "any": REQUIRED, "none": NONE}
ERRORS = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.INTERNAL_SERVER_ERROR: "api_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}
BEGUN: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}


def _files(commands: list[str], *texts: str) -> dict[str, Any]:
    """The input of a tool that works on files: a command, and what the commands need."""
    names = "path", "file_text", "old_str", "new_str", "insert_text", *texts
    lines = {"insert_line": NUMBER, "view_range": {"type": "array", "items": NUMBER}}
    properties = {
        "command": TEXT | {"enum": commands},
        **dict.fromkeys(names, TEXT),
        **lines,
    }
    return {"type": "object", "properties": properties, "required": ["command"]}


EDITS = ["view", "create", "str_replace", "insert"]
OWN_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "bash_": (
        "Run a command in a shell that stays open between calls, or restart that shell.",
        {
            "type": "object",
            "properties": {"command": TEXT, "restart": {"type": "boolean"}},
        },
    ),
    "text_editor_": (
        "View, create and edit files. str_replace replaces old_str, which must occur once, by "
        "new_str; insert puts insert_text after line insert_line.",
        _files(EDITS),
    ),
    "memory_": (
        "View, create, edit, delete and rename files that are remembered, in /memories.",
        _files([*EDITS, "delete", "rename"], "old_path", "new_path"),
    ),
}
"""Anthropic's tools that clients run, by how their types begin: what they do, and their input."""


def _text(block: Mapping[str, Any]) -> str:
    """A block as text, whatever it is."""
    match kind := block["type"]:
        case "text":
            return str(expect(block.get("text"), str, "text"))
        case "document" | "image":
            source = expect(block.get("source"), dict, f"{kind}.source")
            title = f"{block['title']}\n" if block.get("title") else ""
            if source.get("type") == "text":
                return title + str(source.get("data"))
            if source.get("type") == "content":
                return title + _texts(source.get("content"), "document")
            return unseen(" ".join([kind, *title.split()]))
        case "search_result":
            found = _texts(block.get("content"), "search_result")
            return f"{block.get('title')}\n{block.get('source')}\n{found}"
        case "tool_reference":
            return f"The tool {block.get('tool_name')} can be called now."
        case _:
            return unseen(kind)


def _texts(content: Any, where: str) -> str:
    return BETWEEN.join(map(_text, parts_in(content, where)))


def _add(turns: Turns, message: Mapping[str, Any]) -> None:
    """Add one of Anthropic's messages."""
    role = message.get("role")
    if role not in ("user", "assistant", "system"):
        raise RequestError(
            f"messages: role must be user, assistant or system, not {role!r}"
        )
    said = "user" if role == "system" else role  # it stands where it does for a reason
    for block in parts_in(message.get("content"), "content"):
        kind = block["type"]
        if kind == "tool_result":
            failed = "Error: " if block.get("is_error") else ""
            result = _texts(as_result(block.get("content")), "tool_result.content")
            turns.answer(str(block.get("tool_use_id")), failed + result)
        elif kind == "tool_use":
            name = expect(block.get("name"), str, "tool_use.name")
            turns.call(str(block.get("id")), name, _input(block.get("input")))
        elif kind == "thinking":
            turns.think(expect(block.get("thinking"), str, "thinking"))
        elif kind != "redacted_thinking":
            turns.say(said, _text(block))


def _input(given: Any) -> Any:
    """The input of a call: an object, or what a client kept of a broken one."""
    return given if isinstance(given, str) else expect(given or {}, dict, "input")


def _tools(tools: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """The tools that a client runs. Those that Anthropic's servers run are left out."""
    for tool in tools:
        kind = expect(tool, dict, "tools").get("type") or "custom"
        name = tool.get("name")
        own = next((known for known in OWN_TOOLS if str(kind).startswith(known)), None)
        if kind == "custom" or own:
            expect(name, str, "tools: name")
        if kind == "custom":
            yield function(name, tool.get("description"), tool.get("input_schema"))
        elif own:
            yield function(name, *OWN_TOOLS[own])
        else:
            leave_out("tool", kind)


def _choice(choice: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> str:
    kind, name = choice.get("type", "auto"), choice.get("name")
    if isinstance(kind, str) and kind in CHOICES:
        return CHOICES[kind]
    if kind == "tool" and name in [tool["function"]["name"] for tool in tools]:
        return str(name)
    raise RequestError(
        f"tool_choice: expected auto, any, none or a tool of tools, not {choice!r}"
    )


def _use(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def _read(num_prompt: int, num_cached: int) -> dict[str, Any]:
    counts = {
        "input_tokens": num_prompt - num_cached,
        "cache_read_input_tokens": num_cached,
    }
    return counts | {"cache_creation_input_tokens": 0}


def _usage(ended: Ended) -> dict[str, Any]:
    thoughts = {"output_tokens_details": {"thinking_tokens": ended.num_thought}}
    counts = _read(ended.num_prompt, ended.num_cached) | {
        "output_tokens": ended.num_written
    }
    return counts | thoughts | {"speculation": fields.speculation(ended)}


def _stopped(ended: Ended) -> dict[str, Any]:
    """Why the text ended, and the stop sequence, if one did it."""
    reason = STOP_REASONS[ended.reason] if ended.stop is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": ended.stop}


def _message(asked: Asked, content: list[Any], usage: dict[str, Any]) -> dict[str, Any]:
    fixed = {
        "id": asked.id,
        "type": "message",
        "role": "assistant",
        "model": asked.model,
    }
    stopped = {"stop_reason": None, "stop_sequence": None}
    return fixed | {"content": content} | stopped | {"usage": usage}


class MessageStream(Stream):
    """A streamed message: a message_start, blocks one after another, why it ended, message_stop."""

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self._begun, self._index = False, -1
        self._open: str | None = None  # kind of the open block

    def write(self, choice: int, event: Event) -> Iterator[bytes]:
        """The bytes of an event."""
        if not self._begun:
            self._begun = True
            read = (
                _read(event.total, event.num_cached)
                if isinstance(event, PromptProgress)
                else {}
            )
            empty = _message(self.asked, [], _read(0, 0) | read | {"output_tokens": 0})
            yield _event("message_start", message=empty)
        match event:
            case Said() if event.text:
                kind, name = ("thinking",) * 2 if event.is_thought else ("text", "text")
                if self._open != kind:
                    yield from self._start(BEGUN[kind])
                yield self._delta(f"{kind}_delta", name, event.text)
            case CallBegan():
                yield from self._start(_use(event.id, event.name, {}))
                yield from self._called(event.text)
            case CallArguments():
                yield from self._called(event.text)
            case Ended():
                yield from self._close()
                yield _event(
                    "message_delta", delta=_stopped(event), usage=_usage(event)
                )
                yield _event("message_stop")

    def keepalive(self) -> bytes:
        """A ping."""
        return _event("ping")

    def fail(self, error: Exception, status: HTTPStatus) -> Iterable[bytes]:
        """An event of the error."""
        yield _event(**MESSAGES.error(error, status))

    def _called(self, arguments: str) -> Iterator[bytes]:
        if arguments:
            yield self._delta("input_json_delta", "partial_json", arguments)

    def _start(self, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        self._index += 1
        self._open = block["type"]
        yield _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, kind: str, name: str, text: str) -> bytes:
        delta = {"type": kind, name: text}
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> Iterator[bytes]:
        if self._open == "thinking":
            yield self._delta("signature_delta", "signature", SIGNATURE)
        if self._open is not None:
            yield _event("content_block_stop", index=self._index)
        self._open = None


def _event(type: str, **more: Any) -> bytes:
    return fields.server_sent({"type": type, **more}, type)


class Messages(Wire):
    """The wire of `/v1/messages`, and of `/v1/messages/count_tokens`, which needs no max_tokens."""

    stream = MessageStream

    def read(self, body: Mapping[str, Any]) -> Asked:
        """Check a body; raises RequestError."""
        if body.get("thread"):  # clients that are told so send the whole conversation
            raise RequestError(
                "thread: nothing is kept here. Send all messages again.", NO_THREADS
            )
        request = fields.base(body)
        turns = Turns()
        for block in parts_in(body.get("system"), "system"):
            if not (text := _text(block)).startswith(BILLING):
                turns.say("system", text)
        for message in expect(body.get("messages"), list, "messages"):
            _add(turns, expect(message, dict, "messages"))
        if not any(message["role"] != "system" for message in turns.messages):
            raise RequestError("messages must be a list of at least one message.")
        request.messages = turns.messages
        last = turns.messages[-1]
        request.continues = last["role"] == "assistant" and "tool_calls" not in last
        request.tools = list(_tools(given(body, "tools", list)))
        choice = given(body, "tool_choice", dict)
        request.tool_choice = _choice(choice, request.tools)
        request.parallel_calls = choice.get("disable_parallel_tool_use") is not True
        request.max_tokens = fields.most_tokens(body)
        request.stop = fields.texts(body.get("stop_sequences"), "stop_sequences")
        metadata = given(body, "metadata", dict)
        request.user = str(metadata.get("user_id") or request.user)
        wanted = given(body, "output_config", dict).get("format") or body.get(
            "output_format"
        )
        if wanted is not None:
            wanted = expect(wanted, dict, "output_config.format")
            described = {"type": wanted.get("type"), "json_schema": wanted}
            request.grammar = fields.grammar_in(described)
        thinking = given(body, "thinking", dict).get("type")
        if thinking and not has_grammar(request):
            request.template = {
                "enable_thinking": thinking != "disabled"
            } | request.template
        return fields.asked([request], body, "msg_")

    def reply(self, asked: Asked, texts: Sequence[Written]) -> dict[str, Any]:
        """The message; raises the errors of `Written`."""
        (written,) = texts
        content: list[dict[str, Any]] = []
        if written.thoughts:
            thoughts = {"thinking": written.thoughts, "signature": SIGNATURE}
            content.append({"type": "thinking", **thoughts})
        if written.text:
            content.append({"type": "text", "text": written.text})
        for call in written.calls:
            arguments = fields.without_surrogates(json.loads(call["arguments"]))
            content.append(_use(call["id"], call["name"], arguments))
        assert written.ended is not None
        return _message(asked, content, _usage(written.ended)) | _stopped(written.ended)

    def error(self, error: Exception, status: HTTPStatus) -> dict[str, Any]:
        """Anthropic's form of an error."""
        words = fields.words_of(error, status)
        # clients read it, and compact
        if isinstance(error, RequestError) and error.most:
            words = (
                f"prompt is too long: {error.num_tokens} tokens > {error.most} maximum"
            )
        said: dict[str, Any] = {"type": ERRORS.get(status, "invalid_request_error")}
        said["message"] = words
        if code := getattr(error, "code", None):
            said["details"] = {"error_code": code}
        return {"type": "error", "error": said}


MESSAGES = Messages()
