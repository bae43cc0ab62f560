"""A protocol, and what the replies of all protocols have in common: accounts, errors, items."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from time import time
from typing import Any
from uuid import uuid4

import msgspec

from specdec_mlx.server.requests import (
    CallArguments,
    CallBegan,
    CallBroken,
    Ended,
    Event,
    Object,
    TextPiece,
    TextRequest,
    TokenLogprob,
    Transcript,
)

LONGEST_ANSWER = 1000  # most characters of an error's message: some repeat what the client sent
LEAST_LOGPROB = -9999.0  # said for a token that cannot be drawn; JSON has no infinity

Pieces = Iterable[bytes]
"""Server-sent events, or parts of them."""


class ParsedBody:
    """A body as requests.

    Attributes:
        requests: for each choice, prompt by prompt.
        id: of the reply.
        call_items: what the items of a tool's calls have, by its name; for responses.
    """

    def __init__(
        self,
        requests: list[TextRequest],
        body: Object,
        prefix: str,
        call_items: Object | None = None,
    ) -> None:
        # Each protocol's ids have a prefix of their own, by which clients tell them apart.
        self.requests, self.body, self.call_items = requests, body, call_items or {}
        self.id, self.created = f"{prefix}{uuid4().hex}", int(time())
        self.model: str = body.get("model") or "default_model"
        self.stream: bool = body.get("stream") or False


class Reply(ABC):
    """The reply to a body: a stream of server-sent events, or one object."""

    def __init__(self, parsed: ParsedBody) -> None:
        self.parsed = parsed

    def begin(self) -> Pieces:
        """What a stream has before all events."""
        return ()

    @abstractmethod
    def write(self, choice: int, event: Event) -> Pieces:
        """The bytes of an event (never `Failed`) of a choice."""

    def keepalive(self) -> bytes:
        """What is sent in a silence: a comment, which is no event."""
        return b": keepalive\n\n"

    def end(self) -> Pieces:
        """What comes after the ends of all choices."""
        return ()

    @abstractmethod
    def fail(self, error: Exception, status: HTTPStatus) -> Pieces:
        """What comes instead, after an error in the middle."""

    @abstractmethod
    def build(self, texts: Sequence[Transcript]) -> Object:
        """The reply to a client that wants no stream, of the texts of all choices."""


@dataclass(frozen=True)
class Wire:
    """One protocol: pure translation, without a model and without a thread.

    Attributes:
        read: checks a body; raises RequestError.
        reply: begins a reply.
        error: the body of an error.
    """

    read: Callable[[Object], ParsedBody]
    reply: Callable[[ParsedBody], Reply]
    error: Callable[[Exception, HTTPStatus], Object]


def speculation(ended: Ended) -> Object:
    """The account of a text, in our own field of the usage."""
    account = ended.stats.as_dict() if ended.stats is not None else {}
    return {"drafter": ended.drafter, "batched": ended.is_batched, **account}


def logprob(entry: TokenLogprob) -> Object:
    """OpenAI's form of a token's log-probability, with mlx-lm's `id`."""

    def alternative(token: int, data: bytes, value: float) -> Object:
        text, value = data.decode(errors="replace"), max(value, LEAST_LOGPROB)
        return {"id": token, "token": text, "logprob": value, "bytes": list(data)}

    top = [alternative(*other) for other in entry.top]
    return {**alternative(entry.token, entry.data, entry.logprob), "top_logprobs": top}


def words_of(error: Exception, status: HTTPStatus) -> str:
    """An error in words for the client, with its kind if it is ours.

    The system's errors name files, and other errors may: neither they nor the home folder are told.
    """
    words = str(error)
    if status == HTTPStatus.INTERNAL_SERVER_ERROR:
        if isinstance(error, OSError):
            words = "The server's log says why."
        words = f"{type(error).__name__}: {words}"
    home = os.path.expanduser("~")
    return (words if len(home) < 2 else words.replace(home, "~"))[:LONGEST_ANSWER]  # not of "/"


def server_sent(data: Any, event: str | None = None) -> bytes:
    """A server-sent event: its data, which become JSON, and its name."""
    name = b"" if event is None else f"event: {event}\n".encode()
    return b"%sdata: %s\n\n" % (name, msgspec.json.encode(data))


def openai_error(error: Exception, status: HTTPStatus) -> Object:
    """OpenAI's form of an error."""
    is_server = status >= HTTPStatus.INTERNAL_SERVER_ERROR
    content = {
        "message": words_of(error, status),
        "type": "server_error" if is_server else "invalid_request_error",
        "param": getattr(error, "param", None),
        "code": getattr(error, "code", None) or status,
    }
    return {"error": content}


class ItemReply(Reply):
    """A reply of items, one after another: each is added, grows, and is closed.

    Attributes:
        kinds: the types of items that are answers, and of thoughts.
        content: the reply so far.
        items: the reply's items.
        item: the open item, {} for none.
        text: the text of the open item.
    """

    kinds: tuple[str, str]

    def __init__(self, parsed: ParsedBody, content: Object, items: str) -> None:
        """items: the field with the items."""
        super().__init__(parsed)
        self.items, self.item, self.text = list[Object](), Object(), ""
        self.content = {**content, items: self.items}

    def build(self, texts: Sequence[Transcript]) -> Object:
        """The object that a stream of the same text comes to."""
        for event in texts[0].events:
            list(self.write(0, event))
        return self.content

    def write(self, choice: int, event: Event) -> Pieces:
        match event:
            case TextPiece() if event.text or event.logprobs:
                kind = self.kinds[event.is_thought]
                if self.item.get("type") != kind:
                    yield from self._next(kind)
                yield from self._more(event.text, event.logprobs)
            case CallBegan():
                yield from self._next("", event)
                yield from self._more(event.text)
            case CallArguments():
                yield from self._more(event.text)
            case CallBroken():
                yield from self._end("incomplete")
            case Ended():
                is_cut = event.reason == "length"
                yield from self._end("incomplete" if is_cut else "completed")
                yield from self.finish(event)

    def _next(self, kind: str, call: CallBegan | None = None) -> Pieces:
        yield from self._end("completed")
        self.item, self.text = {"type": kind}, ""
        self.items.append(self.item)
        yield from self.add(call)

    def _more(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Pieces:
        self.text += text
        if text or logprobs:
            yield from self.grow(text, logprobs)

    def _end(self, status: str) -> Pieces:
        if self.item:
            yield from self.close(status)
            self.item = {}

    @abstractmethod
    def add(self, call: CallBegan | None) -> Pieces:
        """Begin the open item, which has a type unless it is a call."""

    @abstractmethod
    def grow(self, text: str, logprobs: Sequence[TokenLogprob]) -> Pieces:
        """More text of the open item."""

    @abstractmethod
    def close(self, status: str) -> Pieces:
        """End the open item: it is "completed", or "incomplete"."""

    @abstractmethod
    def finish(self, ended: Ended) -> Pieces:
        """End the reply."""
