"""Anthropic's Messages protocol, as chat completions: requests, replies, streams and errors.

The fields are those of https://docs.anthropic.com/en/api/messages; ours (drafter, draft_length,
rule, ...) may stand beside them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import count
from typing import Any
from uuid import uuid4

from specdec_mlx.mlx_lm_plugin.openai_fields import RequestError, error_object, texts_in

MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
CHAT = "/v1/chat/completions"
FOREIGN_MODELS = "claude-"  # a client's default names; the model given at the start answers

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.INTERNAL_SERVER_ERROR: "api_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}
NEW_BLOCKS: dict[str, dict[str, Any]] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
}
DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


def chat_body(body: Mapping[str, Any], *, counting: bool = False) -> dict[str, Any]:
    """The body of a chat completion for that of a message.

    counting: of a request that counts tokens, which has no `max_tokens`. Raises RequestError.
    """
    chat = {name: value for name, value in body.items() if value is not None}
    if not counting and type(chat.get("max_tokens")) is not int:
        raise RequestError("max_tokens must be an int; Anthropic's protocol has no default.")
    messages = chat.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list of at least one message.")
    system = _text(chat.pop("system", ""), "system")
    chat["messages"] = [{"role": "system", "content": system}] if system else []
    for message in messages:
        chat["messages"] += _chat_messages(message)
    if str(chat.get("model", "")).startswith(FOREIGN_MODELS):
        del chat["model"]
    if "stop_sequences" in chat:
        chat["stop"] = chat.pop("stop_sequences")
    user = _is(chat.pop("metadata", {}), dict, "metadata").get("user_id")
    if user is not None:
        chat["user"] = user
    thinking = _is(chat.pop("thinking", {}), dict, "thinking").get("type")
    if thinking is not None:
        own = _is(chat.get("chat_template_kwargs", {}), dict, "chat_template_kwargs")
        chat["chat_template_kwargs"] = {"enable_thinking": thinking != "disabled", **own}
    choice = _is(chat.pop("tool_choice", {}), dict, "tool_choice").get("type", "auto")
    if choice not in ("auto", "none"):
        raise RequestError(f"tool_choice: {choice!r} cannot be forced here. Use auto or none.")
    tools = [_tool(tool) for tool in _is(chat.pop("tools", []), list, "tools")]
    if tools and choice == "auto":
        chat["tools"] = tools
    if chat.get("stream") is True:
        chat["stream_options"] = {"include_usage": True}
    return chat


def _is(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, kind):
        raise RequestError(f"{where}: expected a {kind.__name__}, not {value!r}")
    return value


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    """The blocks of a content, which may be a text."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for block in _is(blocks, list, where):
        if not isinstance(_is(block, dict, where).get("type"), str):
            raise RequestError(f"{where}: expected a block with a type, not {block!r}")
    return list(blocks)


def _text(content: Any, where: str) -> str:
    """The text of a content that has text alone."""
    blocks = _blocks(content, where)
    if others := {block["type"] for block in blocks} - {"text"}:
        raise RequestError(f"{where}: expected text, not {', '.join(sorted(others))}.")
    return "\n".join(_is(block.get("text"), str, f"{where}.text") for block in blocks)


def _chat_messages(message: Any) -> Iterator[dict[str, Any]]:
    """One of Anthropic's messages: the results of tools are messages of their own."""
    role = _is(message, dict, "messages").get("role")
    if role not in ("user", "assistant"):
        raise RequestError(f"messages: role must be user or assistant, not {role!r}")
    parts: list[dict[str, Any]] = []
    thoughts, calls = "", []
    for block in _blocks(message.get("content"), "content"):
        kind = block["type"]
        if kind == "text":
            text = _is(block.get("text"), str, "text")
            parts.append({"type": "text", "text": text})
        elif kind == "image" and role == "user":
            parts.append({"type": "image_url", "image_url": {"url": _image(block)}})
        elif kind == "tool_result" and role == "user":
            yield _result(block)
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call(block))
        elif kind == "thinking":
            thoughts += _is(block.get("thinking"), str, "thinking")
        elif kind != "redacted_thinking":
            raise RequestError(f"content: a block of type {kind!r} cannot be read from {role}.")
    said: dict[str, Any] = {"role": role, "content": parts}
    if thoughts:
        said["reasoning_content"] = thoughts
    if calls:
        said["tool_calls"] = calls
    if parts or calls or thoughts:
        yield said


def _image(block: Mapping[str, Any]) -> str:
    source = _is(block.get("source"), dict, "image.source")
    if source.get("type") == "url":
        return str(source.get("url"))
    return f"data:{source.get('media_type')};base64,{source.get('data')}"


def _result(block: Mapping[str, Any]) -> dict[str, Any]:
    text = _text(block.get("content", ""), "tool_result.content")
    failed = "Error: " if block.get("is_error") else ""
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": failed + text}


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    name, given = _is(block.get("name"), str, "tool_use.name"), block.get("input", {})
    function = {"name": name, "arguments": json.dumps(_is(given, dict, "tool_use.input"))}
    return {"id": block.get("id"), "type": "function", "function": function}


def _tool(tool: Any) -> dict[str, Any]:
    name = _is(tool, dict, "tools").get("name")
    if tool.get("type", "custom") != "custom" or not isinstance(name, str):
        raise RequestError(f"tools: expected a name and an input_schema, not {tool!r}")
    function = {"name": name, "description": tool.get("description", "")}
    function["parameters"] = _is(tool.get("input_schema", {}), dict, "input_schema")
    return {"type": "function", "function": function}


def message_error(error: Exception, status: HTTPStatus) -> dict[str, Any]:
    """Anthropic's form of an error."""
    words = error_object(error, status)["error"]["message"]
    kind = ERRORS.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": words}}


@dataclass(eq=False)
class Reply:
    """A reply to a message, made from that of a chat completion, whole or by its chunks.

    model: the name that the client gave. stopped_by: tells which of the stop sequences ended the
    text, None for none. prompt_usage: counts of the prompt, known when the text begins.
    """

    model: str
    stopped_by: Callable[[], str | None]
    prompt_usage: Callable[[], dict[str, int]]
    id: str = field(default_factory=lambda: f"msg_{uuid4().hex}")
    _index: Any = field(default_factory=lambda: count(0))
    _open: tuple[int, str] | None = None
    _begun: bool = False
    _finish_reason: str | None = None

    def whole(self, reply: Mapping[str, Any]) -> dict[str, Any]:
        """The message of a chat completion that is no stream."""
        choice = reply["choices"][0]
        said, content = choice["message"], []
        if thoughts := said.get("reasoning"):
            content.append({"type": "thinking", "thinking": thoughts, "signature": ""})
        if text := said.get("content"):
            content.append({"type": "text", "text": text})
        for call in said.get("tool_calls", ()):
            given = json.loads(call["function"]["arguments"])
            content.append(_use(call) | {"input": given})
        reason, stop = self._stop(choice["finish_reason"])
        usage = reply["usage"]
        ours = {"speculation": usage["speculation"]} if "speculation" in usage else {}
        counts = self.prompt_usage() | {"output_tokens": usage["completion_tokens"]}
        return self._message(content, reason, stop, counts | ours)

    def events(self, chunk: Mapping[str, Any]) -> Iterator[bytes]:
        """The events of one chunk; `end` has the last ones."""
        if not self._begun:
            self._begun = True
            empty = self._message([], None, None, self.prompt_usage() | {"output_tokens": 0})
            yield _event("message_start", message=empty)
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for kind, name in (("thinking", "reasoning"), ("text", "content")):
                if delta.get(name):
                    yield from self._go_on(kind, delta[name])
            for call in delta.get("tool_calls", ()):
                yield from self._close()
                index = next(self._index)
                yield _event("content_block_start", index=index, content_block=_use(call))
                given = {"type": "input_json_delta", "partial_json": call["function"]["arguments"]}
                yield _event("content_block_delta", index=index, delta=given)
                yield _event("content_block_stop", index=index)
            self._finish_reason = choice["finish_reason"] or self._finish_reason

    def end(self, usage: Mapping[str, Any]) -> Iterator[bytes]:
        """The last events of a stream, with the usage of its last chunk."""
        yield from self._close()
        reason, stop = self._stop(self._finish_reason)
        ours = {"speculation": usage["speculation"]} if "speculation" in usage else {}
        counts = self.prompt_usage() | {"output_tokens": usage["completion_tokens"]} | ours
        ended = {"stop_reason": reason, "stop_sequence": stop}
        yield _event("message_delta", delta=ended, usage=counts)
        yield _event("message_stop")

    def _go_on(self, kind: str, text: str) -> Iterator[bytes]:
        """More of a text or of thoughts, in the open block of that kind or a new one."""
        if self._open is None or self._open[1] != kind:
            yield from self._close()
            self._open = next(self._index), kind
            block = {"type": kind} | NEW_BLOCKS[kind]
            yield _event("content_block_start", index=self._open[0], content_block=block)
        delta, name = DELTAS[kind]
        yield _event("content_block_delta", index=self._open[0], delta={"type": delta, name: text})

    def _close(self) -> Iterator[bytes]:
        if self._open is not None:
            yield _event("content_block_stop", index=self._open[0])
            self._open = None

    def _stop(self, finish_reason: str | None) -> tuple[str, str | None]:
        """Anthropic's reason for the end, and the stop sequence."""
        sequence = self.stopped_by() if finish_reason == "stop" else None
        reason = STOP_REASONS.get(finish_reason or "", "end_turn")
        return ("stop_sequence" if sequence is not None else reason), sequence

    def _message(
        self, content: list[Any], reason: str | None, stop: str | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        fixed = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        ended = {"stop_reason": reason, "stop_sequence": stop}
        return fixed | {"content": content} | ended | {"usage": usage}


def _use(call: Mapping[str, Any]) -> dict[str, Any]:
    """A block for a call of a tool, without its input."""
    name = call["function"]["name"]
    return {"type": "tool_use", "id": f"toolu_{call['id']}", "name": name, "input": {}}


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def prompt_usage(num_tokens: int, num_cached: int) -> dict[str, int]:
    """Counts of a prompt of which so many tokens were on a cache."""
    read = {"input_tokens": num_tokens - num_cached, "cache_read_input_tokens": num_cached}
    return read | {"cache_creation_input_tokens": 0}


def stop_in(text: str, sequences: Any) -> str | None:
    """The stop sequence that a text with its last token ends in; None for none."""
    found = [sequence for sequence in texts_in(sequences or []) if sequence in text]
    return max(found, key=text.rfind, default=None)
