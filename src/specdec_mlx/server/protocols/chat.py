"""OpenAI's chat completions: requests, replies, streams and errors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any

from msgspec import Meta, Struct

from specdec_mlx.arguments import short_repr
from specdec_mlx.server.protocols.body import (
    MOST_LOGPROBS,
    NUM_SEEDS,
    AnswerFormat,
    Body,
    NumTop,
    Tool,
    choose_tool,
    fields_of,
    text_request,
    texts,
    think,
    without_nulls,
)
from specdec_mlx.server.protocols.replies import (
    logprob,
    openai_error,
    server_sent,
    speculation,
    usage,
)
from specdec_mlx.server.protocols.turns import THOUGHTS, as_result, as_text, parts_in
from specdec_mlx.server.requests import (
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
    Wire,
    Written,
)

DONE = b"data: [DONE]\n\n"
MOST_CHOICES = 32  # most choices of one request: each is a row of a batch


class Call(Struct):
    """A call of a function."""

    function: Tool


class Message(Struct):
    """A message. Its other fields are for the chat template."""

    role: str
    tool_calls: list[Call] | None = None


class ChoicesBody(Body, kw_only=True):
    """The fields of OpenAI's protocols with choices. `logprobs` may be the number itself."""

    response_format: AnswerFormat | None = None
    stop: str | list[str] = ""
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] = 1
    logprobs: bool | Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)] = False
    top_logprobs: NumTop = 0

    def request(self) -> TextRequest:
        """A request without its prompt; raises RequestError."""
        request = text_request(self, self.response_format)
        request.stop = texts(self.stop)
        if not isinstance(self.logprobs, bool):
            request.num_logprobs = self.logprobs
        elif self.logprobs or self.top_logprobs > 0:
            request.num_logprobs = max(self.top_logprobs, 0)
        return request

    def choices(self, request: TextRequest) -> list[TextRequest]:
        """A request for each choice of its text; each has a seed of its own."""
        seed = request.seed
        seeds = [None if seed is None else (seed + i) % NUM_SEEDS for i in range(self.n)]
        return [replace(request, seed=seed) for seed in seeds]


class ChatBody(ChoicesBody, kw_only=True):
    """The fields of a chat."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    role_mapping: Object | None = None
    continue_final_message: bool = False


def read(body: Object) -> Asked:
    """Check the body of a chat; raises RequestError."""
    fields = fields_of(body, ChatBody)
    request = fields.request()
    request.messages = list(map(_templated, body["messages"]))
    for tool, given in zip(fields.tools, body.get("tools") or (), strict=True):
        if tool.type in (None, "function"):
            if tool.function is None or tool.function.name is None:
                raise RequestError(
                    f"tools: expected a function with a name, got {short_repr(given)}"
                )
            request.tools.append(given)
    choose_tool(request, fields.tool_choice)
    if request.tool_choice == REQUIRED and not request.tools:
        raise RequestError("tool_choice: required needs tools.")
    think(request, fields.reasoning_effort)
    if fields.role_mapping is not None:
        request.template["role_mapping"] = fields.role_mapping
    last = request.template.pop("continue_final_message", fields.continue_final_message)
    request.continues = bool(last)
    return Asked(fields.choices(request), body, "chatcmpl-")


def _templated(given: Object) -> Object:
    """A message as templates take it."""
    message = without_nulls(given)
    if message["role"] == "developer":
        message["role"] = "system"
    content = message.get("content", "")
    content = as_result(content) if message["role"] == "tool" else content
    message["content"] = "".join(map(as_text, parts_in(content, "messages: content")))
    thoughts = [message.pop(name) for name in THOUGHTS if name in message]
    if thoughts and isinstance(thoughts[0], str):
        message |= dict.fromkeys(THOUGHTS, thoughts[0])
    return message


def reply_of(asked: Asked, kind: str, choices: Sequence[Object], **more: Any) -> Object:
    """A reply, or a chunk of one."""
    about = {"id": asked.id, "object": kind, "created": asked.created}
    return {**about, "model": asked.model, "choices": choices, **more}


def _logprobs(text: Written | Said) -> Object:
    return {"content": [logprob(token) for token in text.logprobs]}


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
            account = {"speculation": speculation(event)}
        yield self.chunk({"index": choice, **content, "finish_reason": reason}, **account)

    @abstractmethod
    def content(self, choice: int, event: Event) -> Object | None:
        """A choice's part in the chunk of an event."""

    def end(self) -> Sent:
        """The usage, if it was asked for, and the mark of the end."""
        body = self.asked.body
        if (body.get("stream_options") or {}).get("include_usage"):
            ends = [self._ends[choice] for choice in sorted(self._ends)]
            yield self.chunk(usage=usage(ends, body.get("n") or 1))
        yield DONE

    def fail(self, error: Exception, status: HTTPStatus) -> Sent:
        """An error, and the mark of the end."""
        return server_sent(openai_error(error, status)), DONE

    def chunk(self, *choices: Object, **more: Any) -> bytes:
        """A chunk with some choices."""
        return server_sent(reply_of(self.asked, self.kind, choices, **more))


def reply(
    kind: str,
    content: Callable[[TextRequest, Written], Object],
    asked: Asked,
    texts: Sequence[Written],
) -> Object:
    """The whole reply. content: makes a choice, without its number and its end."""
    ends = [text.ended for text in texts if text.ended is not None]
    choices = [
        {"index": index, **content(request, text), "finish_reason": end.reason}
        for index, (request, text, end) in enumerate(zip(asked.requests, texts, ends, strict=True))
    ]
    return reply_of(asked, kind, choices, usage=usage(ends, asked.body.get("n") or 1))


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


def _message(request: TextRequest, text: Written) -> Object:
    """A choice of a chat: a message."""
    calls = [_call(**call) for call in text.calls]
    content = text.text or (None if calls else "")
    message: Object = {"role": "assistant", "content": content}
    message |= dict.fromkeys(THOUGHTS, text.thoughts) if text.thoughts else {}
    message |= {"tool_calls": calls} if calls else {}
    logprobs = None if request.num_logprobs is None else _logprobs(text)
    return {"message": message, "logprobs": logprobs}


CHAT = Wire(read, ChatStream, partial(reply, "chat.completion", _message), openai_error)
"""The protocol of `/v1/chat/completions`."""
