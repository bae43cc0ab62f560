"""OpenAI's chat completions: requests, replies, streams and errors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from http import HTTPStatus
from typing import Any

from specdec_mlx.server.protocols import fields
from specdec_mlx.server.protocols.body import without_nulls
from specdec_mlx.server.protocols.turns import (
    THOUGHTS,
    as_result,
    as_text,
    given,
    parts_in,
    tool_choice,
)
from specdec_mlx.server.requests import (
    AUTO,
    REQUIRED,
    Asked,
    CallArguments,
    CallBegan,
    Ended,
    Event,
    Object,
    RequestError,
    Said,
    Sent,
    Stream,
    TextRequest,
    Written,
)

DONE = b"data: [DONE]\n\n"


def messages_in(messages: Any) -> list[Object]:
    """A chat as templates take it; raises RequestError unless each message has a role."""
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list of at least one message.")
    return [_templated(message) for message in messages]


def _templated(given: Any) -> Object:
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise RequestError(f"messages: expected objects with a role, not {given!r}")
    message = without_nulls(given)
    if message["role"] == "developer":
        message["role"] = "system"
    content = message.get("content", "")
    content = as_result(content) if message["role"] == "tool" else content
    message["content"] = "".join(map(as_text, parts_in(content, "messages: content")))
    thoughts = [message.pop(name) for name in THOUGHTS if name in message]
    if thoughts and isinstance(thoughts[0], str):
        message |= dict.fromkeys(THOUGHTS, thoughts[0])
    for call in fields.several(message.get("tool_calls", [])):
        _check_named(call, "messages: expected a call of a function")
    return message


def _check_named(given: Any, expected: str) -> None:
    """Raise RequestError unless there is a function with a name: a tool, or a call of one."""
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{expected}, not {given!r}")


def tools_in(tools: Sequence[Any]) -> Iterator[Object]:
    """The functions among the tools; raises RequestError for one without a name."""
    for tool in tools:
        if not isinstance(tool, dict) or tool.get("type", "function") == "function":
            _check_named(tool, "tools: expected a function with a name")
            yield tool


def logprobs_in(body: Object) -> int | None:
    """Number of alternatives to report; None to report nothing. `logprobs` may be the number."""
    wanted, most = body.get("logprobs", False), body.get("top_logprobs", 0)
    if not isinstance(wanted, bool):
        return int(wanted)
    return max(most, 0) if wanted or most > 0 else None


def reply_of(asked: Asked, kind: str, choices: Sequence[Object], **more: Any) -> Object:
    """A reply, or a chunk of one."""
    about = {"id": asked.id, "object": kind, "created": asked.created}
    return {**about, "model": asked.model, "choices": choices, **more}


def _logprobs(text: Written | Said) -> Object:
    return {"content": [fields.logprob(token) for token in text.logprobs]}


def _call(id: str, name: str, arguments: str) -> Object:
    called = {"name": name, "arguments": arguments}
    return {"id": id, "type": "function", "function": called}


class ChunkStream(Stream):
    """The chunks of a stream in OpenAI's protocols: what chats and completions have in common."""

    kind: str

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self._ends: dict[int, Ended] = {}  # by choice

    def write(self, choice: int, event: Event) -> Sent:
        """The chunk of an event, if there is something to say; a choice's last has its account."""
        if (content := self.content(choice, event)) is None:
            return
        reason, account = None, {}
        if isinstance(event, Ended):
            self._ends[choice], reason = event, event.reason
            account = {"speculation": fields.speculation(event)}
        yield self.chunk({"index": choice, **content, "finish_reason": reason}, **account)

    @abstractmethod
    def content(self, choice: int, event: Event) -> Object | None:
        """A choice's part in the chunk of an event."""

    def end(self) -> Sent:
        """The usage, if it was asked for, and the mark of the end."""
        body = self.asked.body
        if body.get("stream_options", {}).get("include_usage"):
            ends = [self._ends[choice] for choice in sorted(self._ends)]
            yield self.chunk(usage=fields.usage(ends, body.get("n", 1)))
        yield DONE

    def fail(self, error: Exception, status: HTTPStatus) -> Sent:
        """An error, and the mark of the end."""
        return fields.server_sent(CHAT.error(error, status)), DONE

    def chunk(self, *choices: Object, **more: Any) -> bytes:
        """A chunk with some choices."""
        return fields.server_sent(reply_of(self.asked, self.kind, choices, **more))


class ChunkWire(fields.OpenAIWire):
    """A protocol with choices."""

    kind: str
    prefix: str

    def read(self, body: Object) -> Asked:
        """Check a body; raises RequestError."""
        body = without_nulls(body)
        request = fields.base(body)
        request.grammar = fields.grammar_in(body.get("response_format"))
        request.stop = fields.texts(body.get("stop"), "stop")
        request.num_logprobs = logprobs_in(body)
        requests = [
            choice
            for prompt in self.prompts(request, body)
            for choice in fields.choices(prompt, body.get("n", 1))
        ]
        return Asked(requests, body, self.prefix)

    def reply(self, asked: Asked, texts: Sequence[Written]) -> Object:
        """The whole reply."""
        ends = [text.ended for text in texts if text.ended is not None]
        choices = [
            {
                "index": index,
                **self.content(asked.requests[index], text),
                "finish_reason": end.reason,
            }
            for index, (text, end) in enumerate(zip(texts, ends, strict=True))
        ]
        usage = fields.usage(ends, asked.body.get("n", 1))
        return reply_of(asked, self.kind, choices, usage=usage)

    @abstractmethod
    def prompts(self, request: TextRequest, body: Object) -> Iterable[TextRequest]:
        """A request for each prompt of a body, from one that has all the rest."""

    @abstractmethod
    def content(self, request: TextRequest, text: Written) -> Object:
        """A choice of the reply, without its number and its end."""


class ChatStream(ChunkStream):
    """Chunks of a streamed chat."""

    kind = "chat.completion.chunk"

    def begin(self) -> Sent:
        """The role, for each choice."""
        delta = {"role": "assistant", "content": ""}
        for choice in range(len(self.asked.requests)):
            yield self.chunk({"index": choice, "delta": delta, "finish_reason": None})

    def content(self, choice: int, event: Event) -> Object | None:
        """What is new in a message."""
        match event:
            case CallBegan():
                call = _call(event.id, event.name, event.text)
                return {"delta": {"tool_calls": [{"index": event.index, **call}]}}
            case CallArguments():
                call = {"index": event.index, "function": {"arguments": event.text}}
                return {"delta": {"tool_calls": [call]}}
            case Said() if event.text or event.logprobs:
                names = THOUGHTS if event.is_thought else ("content",)
                more = {"logprobs": _logprobs(event)} if event.logprobs else {}
                return {"delta": dict.fromkeys(names, event.text), **more}
            case Ended():
                return {"delta": {}}
        return None


class Chat(ChunkWire):
    """The wire of `/v1/chat/completions`."""

    stream = ChatStream
    kind, prefix = "chat.completion", "chatcmpl-"

    def prompts(self, request: TextRequest, body: Object) -> Iterator[TextRequest]:
        """The one request of a chat."""
        request.messages = messages_in(body.get("messages"))
        request.tools = list(tools_in(given(body, "tools", list)))
        choice = body.get("tool_choice", AUTO)
        if isinstance(choice, dict):
            choice = given(choice, "function", dict)
        request.tool_choice = tool_choice(choice, request.tools)
        if choice == REQUIRED and not request.tools:
            raise RequestError("tool_choice: required needs tools.")
        fields.think(request, body.get("reasoning_effort"))
        if (role_mapping := body.get("role_mapping")) is not None:
            request.template["role_mapping"] = role_mapping
        last = request.template.pop("continue_final_message", body.get("continue_final_message"))
        request.continues = bool(last)
        yield request

    def content(self, request: TextRequest, text: Written) -> Object:
        """A message."""
        calls = [_call(**call) for call in text.calls]
        content = text.text or (None if calls else "")
        message: Object = {"role": "assistant", "content": content}
        message |= dict.fromkeys(THOUGHTS, text.thoughts) if text.thoughts else {}
        message |= {"tool_calls": calls} if calls else {}
        logprobs = None if request.num_logprobs is None else _logprobs(text)
        return {"message": message, "logprobs": logprobs}


CHAT = Chat()
