"""What the replies of all protocols have in common: accounts, errors, and streams of items."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from specdec_mlx.server.requests import (
    Asked,
    CallArguments,
    CallBegan,
    CallBroken,
    Ended,
    Event,
    Object,
    Said,
    Sent,
    Stream,
    TokenLogprob,
    Written,
)

LONGEST_ANSWER = 1000  # most characters of an error's message: some repeat what the client sent
LEAST_LOGPROB = -9999.0  # said for a token that cannot be drawn; JSON has no infinity


def speculation(ended: Ended) -> Object:
    """The account of a text, in our own field of the usage."""
    account = ended.stats.as_dict() if ended.stats is not None else {}
    return {"drafter": ended.drafter, "batched": ended.is_batched, **account}


def usage(ends: Sequence[Ended], num_choices: int = 1) -> Object:
    """OpenAI's usage of all choices; the prompt of several is counted once."""
    prompts = ends[::num_choices]
    prompt, written = (sum(end.num_prompt for end in prompts), sum(end.num_written for end in ends))
    accounts = [speculation(end) for end in ends]
    whole = accounts[0]
    if len(ends) > 1:
        batched = any(account["batched"] for account in accounts)
        whole = {"drafter": whole["drafter"], "batched": batched, "choices": accounts}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": sum(end.num_cached for end in prompts)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(end.num_thought for end in ends),
            "accepted_prediction_tokens": sum(end.accepted for end in ends),
            "rejected_prediction_tokens": sum(end.rejected for end in ends),
        },
        "speculation": whole,
    }


def logprob(written: TokenLogprob) -> Object:
    """OpenAI's form of a token's log-probability, with mlx-lm's `id`."""

    def one(token: int, data: bytes, value: float) -> Object:
        said = max(value, LEAST_LOGPROB)
        named = {"id": token, "token": data.decode(errors="replace"), "logprob": said}
        return {**named, "bytes": list(data)}

    top = [one(*alternative) for alternative in written.top]
    return {**one(written.token, written.data, written.logprob), "top_logprobs": top}


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
    said = {
        "message": words_of(error, status),
        "type": "server_error" if is_server else "invalid_request_error",
        "param": getattr(error, "param", None),
        "code": getattr(error, "code", None) or status,
    }
    return {"error": said}


class ItemStream(Stream):
    """A streamed reply of items, one after another: each is added, grows, and is closed.

    Attributes:
        kinds: the types of items that are answers, and of thoughts.
        whole: the reply so far.
        items: the reply's items.
        item: the open item, {} for none.
        text: the text of the open item.
    """

    kinds: tuple[str, str]

    def __init__(self, asked: Asked, whole: Object) -> None:
        super().__init__(asked)
        self.items, self.item, self.text = list[Object](), Object(), ""
        self.whole = whole

    def write(self, choice: int, event: Event) -> Sent:
        """The bytes of an event."""
        match event:
            case Said() if event.text or event.logprobs:
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

    def _next(self, kind: str, call: CallBegan | None = None) -> Sent:
        yield from self._end("completed")
        self.item, self.text = {"type": kind}, ""
        self.items.append(self.item)
        yield from self.add(call)

    def _more(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Sent:
        self.text += text
        if text or logprobs:
            yield from self.grow(text, logprobs)

    def _end(self, status: str) -> Sent:
        if self.item:
            yield from self.close(status)
            self.item = {}

    @abstractmethod
    def add(self, call: CallBegan | None) -> Sent:
        """Begin the open item, which has a type unless it is a call."""

    @abstractmethod
    def grow(self, text: str, logprobs: Sequence[TokenLogprob]) -> Sent:
        """More text of the open item."""

    @abstractmethod
    def close(self, status: str) -> Sent:
        """End the open item: it is "completed", or "incomplete"."""

    @abstractmethod
    def finish(self, ended: Ended) -> Sent:
        """End the reply."""


def whole_reply(
    stream: Callable[[Asked], ItemStream], asked: Asked, texts: Sequence[Written]
) -> Object:
    """The reply of a protocol with items: what a stream of the same events comes to."""
    items = stream(asked)
    for event in texts[0].events():
        list(items.write(0, event))
    return items.whole
