"""OpenAI's chat completions: requests, replies, streams and errors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
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
    Stops,
    Tool,
    choose_tool,
    fields_of,
    text_request,
    texts,
    think,
    without_nulls,
)
from specdec_mlx.server.protocols.replies import (
    ParsedBody,
    Pieces,
    Reply,
    Wire,
    logprob,
    openai_error,
    server_sent,
    speculation,
)
from specdec_mlx.server.protocols.turns import (
    THOUGHTS,
    as_result,
    as_text,
    leave_out,
    parts_in,
)
from specdec_mlx.server.requests import (
    REQUIRED,
    CallArguments,
    CallBegan,
    Ended,
    Event,
    Object,
    RequestError,
    TextPiece,
    TextRequest,
    Transcript,
)

DONE = b"data: [DONE]\n\n"
MOST_CHOICES = 32  # most choices of one request: each is a row of a batch


class Call(Struct):
    function: Tool


class Message(Struct):
    """A message. Its other fields are for the chat template."""

    role: str
    tool_calls: list[Call] | None = None


class ChoicesBody(Body, kw_only=True):
    """The fields of OpenAI's protocols with choices. `logprobs` may be the number itself."""

    response_format: AnswerFormat | None = None
    stop: Stops = ""
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
    messages: Annotated[list[Message], Meta(min_length=1)]
    role_mapping: Object | None = None
    continue_final_message: bool = False


def read(body: Object) -> ParsedBody:
    """Check the body of a chat; raises RequestError."""
    fields = fields_of(body, ChatBody)
    request = fields.request()
    request.messages = list(map(_templated, body["messages"]))
    for tool, content in zip(fields.tools, body.get("tools") or (), strict=True):
        if tool.type in (None, "function"):
            if tool.function is None or tool.function.name is None:
                raise RequestError(
                    f"tools: expected a function with a name, got {short_repr(content)}"
                )
            request.tools.append(content)
        else:
            leave_out("tool", tool.type)
    choose_tool(request, fields.tool_choice)
    if request.tool_choice == REQUIRED and not request.tools:
        raise RequestError("tool_choice: required needs tools.")
    think(request, fields.reasoning_effort)
    if fields.role_mapping is not None:
        request.template["role_mapping"] = fields.role_mapping
    last = request.template.pop("continue_final_message", fields.continue_final_message)
    request.continues = bool(last)
    return ParsedBody(fields.choices(request), body, "chatcmpl-")


def _templated(message: Object) -> Object:
    """A message as templates take it."""
    message = without_nulls(message)
    if message["role"] == "developer":
        message["role"] = "system"
    content = message.get("content", "")
    content = as_result(content) if message["role"] == "tool" else content
    message["content"] = "".join(map(as_text, parts_in(content, "messages: content")))
    thoughts = [message.pop(name) for name in THOUGHTS if name in message]
    if thoughts and isinstance(thoughts[0], str):
        message |= dict.fromkeys(THOUGHTS, thoughts[0])
    return message


class ChoicesReply(Reply):
    """A reply of choices: what chats and completions have in common.

    Attributes:
        kind: of the whole reply, in the protocol's words.
        chunk_kind: of a part of a stream.
    """

    kind: str
    chunk_kind: str

    def __init__(self, parsed: ParsedBody) -> None:
        super().__init__(parsed)
        self._ended: dict[int, Ended] = {}  # by choice

    @abstractmethod
    def choice(self, index: int, text: Transcript) -> Object:
        """A choice of the whole reply, without its number and its end."""

    @abstractmethod
    def delta(self, index: int, event: Event) -> Object | None:
        """A choice's part in the chunk of an event."""

    def build(self, texts: Sequence[Transcript]) -> Object:
        choices = []
        for index, text in enumerate(texts):
            assert text.ended is not None
            self._ended[index] = text.ended
            content = self.choice(index, text)
            choices.append({"index": index, **content, "finish_reason": text.ended.reason})
        return self._object(self.kind, choices, usage=self._usage())

    def write(self, choice: int, event: Event) -> Pieces:
        """The chunk of an event, if there is something to say; a choice's last has its account."""
        if (content := self.delta(choice, event)) is None:
            return
        reason, account = None, {}
        if isinstance(event, Ended):
            self._ended[choice], reason = event, event.reason
            account = {"speculation": speculation(event)}
        yield self.chunk({"index": choice, **content, "finish_reason": reason}, **account)

    def end(self) -> Pieces:
        """The usage, if it was asked for, and the mark of the end."""
        if (self.parsed.body.get("stream_options") or {}).get("include_usage"):
            yield self.chunk(usage=self._usage())
        yield DONE

    def fail(self, error: Exception, status: HTTPStatus) -> Pieces:
        return server_sent(openai_error(error, status)), DONE

    def chunk(self, *choices: Object, **more: Any) -> bytes:
        return server_sent(self._object(self.chunk_kind, choices, **more))

    def _object(self, kind: str, choices: Sequence[Object], **more: Any) -> Object:
        parsed = self.parsed
        about = {"id": parsed.id, "object": kind, "created": parsed.created, "model": parsed.model}
        return {**about, "choices": choices, **more}

    def _usage(self) -> Object:
        """The usage of all choices; the prompt of several is counted once."""
        endings = [self._ended[choice] for choice in sorted(self._ended)]
        prompts = endings[:: self.parsed.body.get("n") or 1]
        num_prompt = sum(end.num_prompt for end in prompts)
        num_written = sum(end.num_written for end in endings)
        account, *others = accounts = [speculation(end) for end in endings]
        if others:
            batched = any(account["batched"] for account in accounts)
            account = {"drafter": account["drafter"], "batched": batched, "choices": accounts}
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_written,
            "total_tokens": num_prompt + num_written,
            "prompt_tokens_details": {"cached_tokens": sum(end.num_cached for end in prompts)},
            "completion_tokens_details": {
                "reasoning_tokens": sum(end.num_thought for end in endings),
                "accepted_prediction_tokens": sum(end.accepted for end in endings),
                "rejected_prediction_tokens": sum(end.rejected for end in endings),
            },
            "speculation": account,
        }


def _logprobs(text: Transcript | TextPiece) -> Object:
    return {"content": [logprob(token) for token in text.logprobs]}


def _call(id: str, name: str, arguments: str) -> Object:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


class ChatReply(ChoicesReply):
    """A chat's reply: its choices are messages."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def begin(self) -> Pieces:
        """The role, for each choice."""
        delta = {"role": "assistant", "content": ""}
        for choice in range(len(self.parsed.requests)):
            yield self.chunk({"index": choice, "delta": delta, "finish_reason": None})

    def delta(self, index: int, event: Event) -> Object | None:
        match event:
            case CallBegan():
                call = _call(event.id, event.name, event.text)
                return {"delta": {"tool_calls": [{"index": event.index, **call}]}}
            case CallArguments():
                call = {"index": event.index, "function": {"arguments": event.text}}
                return {"delta": {"tool_calls": [call]}}
            case TextPiece() if event.text or event.logprobs:
                names = THOUGHTS if event.is_thought else ("content",)
                more = {"logprobs": _logprobs(event)} if event.logprobs else {}
                return {"delta": dict.fromkeys(names, event.text), **more}
            case Ended():
                return {"delta": {}}
        return None

    def choice(self, index: int, text: Transcript) -> Object:
        """A message. Clients count on a text where there is no call."""
        calls = [_call(**call) for call in text.calls]
        message: Object = {"role": "assistant", "content": text.text or (None if calls else "")}
        message |= dict.fromkeys(THOUGHTS, text.thoughts) if text.thoughts else {}
        message |= {"tool_calls": calls} if calls else {}
        has_logprobs = self.parsed.requests[index].num_logprobs is not None
        return {"message": message, "logprobs": _logprobs(text) if has_logprobs else None}


CHAT = Wire(read, ChatReply, openai_error)
"""The protocol of `/v1/chat/completions`."""
