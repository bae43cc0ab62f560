"""OpenAI's chat completions: requests, replies, streams and errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from specdec_mlx.server.protocols import fields
from specdec_mlx.server.protocols.turns import THOUGHTS, as_result, parts_in, unseen
from specdec_mlx.server.requests import (
    AUTO,
    NONE,
    REQUIRED,
    Asked,
    CallArguments,
    CallBegan,
    Ended,
    Event,
    RequestError,
    Said,
    Stream,
    Written,
)

DONE = b"data: [DONE]\n\n"


def messages_in(messages: Any) -> list[dict[str, Any]]:
    """A chat as templates take it; raises RequestError unless each message has a role."""
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list of at least one message.")
    return [_templated(message) for message in messages]


def _templated(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise RequestError(f"messages: expected objects with a role, not {given!r}")
    message = fields.without_nulls(given)
    if message["role"] == "developer":
        message["role"] = "system"
    content = message.get("content", "")
    content = as_result(content) if message["role"] == "tool" else content
    message["content"] = "".join(map(_part, parts_in(content, "messages: content")))
    thoughts = [message.pop(name) for name in THOUGHTS if name in message]
    if thoughts and isinstance(thoughts[0], str):
        message |= dict.fromkeys(THOUGHTS, thoughts[0])
    for call in fields.several(message.get("tool_calls", [])):
        if not _is_named(call):
            raise RequestError(f"messages: expected a call of a function, not {call!r}")
    return message


def _is_named(given: Any) -> bool:
    """True for an object whose function has a name: a tool, or a call of one."""
    function = given.get("function") if isinstance(given, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _part(part: Mapping[str, Any]) -> str:
    text = part.get("text", part.get("refusal"))
    return text if isinstance(text, str) else unseen(part.get("type"))


def tools_in(tools: Any) -> list[dict[str, Any]]:
    """The functions among the tools; raises RequestError for one without a name."""
    if tools is not None and not isinstance(tools, list):
        raise RequestError(f"tools must be a list, not {tools!r}")
    found = [tool for tool in tools or [] if _kind(tool) == "function"]
    for tool in found:
        if not _is_named(tool):
            raise RequestError(f"tools: expected a function with a name, not {tool!r}")
    return found


def _kind(tool: Any) -> Any:
    return tool.get("type", "function") if isinstance(tool, dict) else "function"


def _choice(choice: Any, tools: Sequence[dict[str, Any]]) -> str:
    """What of tools is to be called; raises RequestError for one that is not there."""
    if isinstance(choice, dict):
        choice = choice.get("function")
        name = choice.get("name") if isinstance(choice, dict) else None
        if name not in [tool["function"]["name"] for tool in tools]:
            raise RequestError(
                f"tool_choice: there is no tool {name!r} among the tools."
            )
        return str(name)
    if choice not in (None, AUTO, NONE, REQUIRED):
        raise RequestError(
            f"tool_choice must be auto, none, required or a tool, not {choice!r}"
        )
    if choice == REQUIRED and not tools:
        raise RequestError("tool_choice: required needs tools.")
    return choice or AUTO


def logprobs_in(body: Mapping[str, Any]) -> int | None:
    """Number of alternatives to report; None to report nothing. `logprobs` may be the number."""
    wanted = body.get("logprobs", False)
    if not isinstance(wanted, bool):
        return fields.count(body, "logprobs", most=fields.MOST_LOGPROBS)
    count = fields.count(body, "top_logprobs", most=fields.MOST_LOGPROBS, least=-1)
    return max(count or 0, 0) if wanted or (count or 0) > 0 else None


def wants_usage(body: Mapping[str, Any]) -> bool:
    """True if the last chunk of a stream is to be the usage."""
    return bool(body.get("stream_options", {}).get("include_usage"))


def head(asked: Asked, kind: str) -> dict[str, Any]:
    """What stands first in each reply, and in each chunk of one."""
    return {
        "id": asked.id,
        "object": kind,
        "created": asked.created,
        "model": asked.model,
    }


def _logprobs(text: Written | Said) -> dict[str, Any]:
    return {"content": [fields.logprob(token) for token in text.logprobs]}


def _message(text: Written) -> dict[str, Any]:
    calls = [_call(**call) for call in text.calls]
    content = text.text or (None if calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content}
    message |= dict.fromkeys(THOUGHTS, text.thoughts) if text.thoughts else {}
    return message | ({"tool_calls": calls} if calls else {})


def _call(id: str, name: str, arguments: str) -> dict[str, Any]:
    called = {"name": name, "arguments": arguments}
    return {"id": id, "type": "function", "function": called}


class ChunkStream(Stream):
    """The chunks of a stream in OpenAI's protocols: what chats and completions have in common."""

    kind: str

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self._ends: dict[int, Ended] = {}  # by choice

    def end(self) -> Iterator[bytes]:
        """The usage, if it was asked for, and the mark of the end."""
        if self.asked.more["with_usage"]:
            ends = [self._ends[choice] for choice in sorted(self._ends)]
            yield self.chunk(usage=fields.usage(ends, self.asked.more["num_choices"]))
        yield DONE

    def fail(self, error: Exception, status: HTTPStatus) -> Iterable[bytes]:
        """An error, and the mark of the end."""
        return fields.server_sent(CHAT.error(error, status)), DONE

    def chunk(self, *choices: dict[str, Any], **more: Any) -> bytes:
        """A chunk with some choices; the last one of a choice has its account."""
        ends = [
            self._ends[one["index"]]
            for one in choices
            if one["finish_reason"] is not None
        ]
        account = {"speculation": fields.speculation(ends[0])} if ends else {}
        whole = {**head(self.asked, self.kind), "choices": choices, **account, **more}
        return fields.server_sent(whole)


class ChatStream(ChunkStream):
    """Chunks of a streamed chat."""

    kind = "chat.completion.chunk"

    def begin(self) -> Iterator[bytes]:
        """The role, for each choice."""
        for choice in range(len(self.asked.requests)):
            yield self._delta(choice, {"role": "assistant", "content": ""})

    def write(self, choice: int, event: Event) -> Iterator[bytes]:
        """The chunks of an event."""
        match event:
            case CallBegan():
                call = _call(event.id, event.name, event.text)
                yield self._delta(
                    choice, {"tool_calls": [{"index": event.index, **call}]}
                )
            case CallArguments():
                call = {"index": event.index, "function": {"arguments": event.text}}
                yield self._delta(choice, {"tool_calls": [call]})
            case Said() if event.text or event.logprobs:
                names = THOUGHTS if event.is_thought else ("content",)
                more = {"logprobs": _logprobs(event)} if event.logprobs else {}
                yield self._delta(choice, dict.fromkeys(names, event.text), **more)
            case Ended():
                self._ends[choice] = event
                yield self._delta(choice, {}, finish_reason=event.reason)

    def _delta(self, choice: int, delta: dict[str, Any], **more: Any) -> bytes:
        return self.chunk(
            {"index": choice, "delta": delta, "finish_reason": None, **more}
        )


class Chat(fields.OpenAIWire):
    """The wire of `/v1/chat/completions`."""

    stream = ChatStream

    def read(self, body: Mapping[str, Any]) -> Asked:
        """Check a body; raises RequestError."""
        body = fields.without_nulls(body)
        request = fields.base(body)
        request.messages = messages_in(body.get("messages"))
        request.tools = tools_in(body.get("tools"))
        request.tool_choice = _choice(body.get("tool_choice"), request.tools)
        request.parallel_calls = body.get("parallel_tool_calls", True)
        request.grammar = fields.grammar_in(body.get("response_format"))
        request.template = (
            fields.thinking(body.get("reasoning_effort")) | request.template
        )
        if (role_mapping := body.get("role_mapping")) is not None:
            request.template["role_mapping"] = role_mapping
        last = request.template.pop(
            "continue_final_message", body.get("continue_final_message")
        )
        request.continues = bool(last)
        request.max_tokens = fields.most_tokens(body)
        request.stop = fields.texts(body.get("stop"), "stop")
        request.num_logprobs = logprobs_in(body)
        count = body.get("n", 1)
        more = {"num_choices": count, "with_usage": wants_usage(body)}
        return fields.asked(fields.choices(request, count), body, "chatcmpl-", more)

    def reply(self, asked: Asked, texts: Sequence[Written]) -> dict[str, Any]:
        """The whole reply."""
        ends = [text.ended for text in texts if text.ended is not None]
        choices = [
            {
                "index": index,
                "message": _message(text),
                "logprobs": _logprobs(text)
                if asked.requests[0].num_logprobs is not None
                else None,
                "finish_reason": end.reason,
            }
            for index, (text, end) in enumerate(zip(texts, ends, strict=True))
        ]
        usage = fields.usage(ends, asked.more["num_choices"])
        return {**head(asked, "chat.completion"), "choices": choices, "usage": usage}


CHAT = Chat()
