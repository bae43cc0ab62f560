"""Several choices of one request, by `n` or of several prompts, which run as their own requests.

Each choice is answered by a copy of the connection's handler, in a thread, as mlx-lm answers a
request with one choice. What the copies write comes together here: a stream's chunks as they come,
each with the index of its choice, or one reply with all of them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

from specdec_mlx.mlx_lm_plugin.openai_fields import NUM_SEEDS

if TYPE_CHECKING:
    from specdec_mlx.mlx_lm_plugin.handler import SpeculatingHandler

DATA, DONE = b"data: ", b"[DONE]"


class ChoiceEndedError(ConnectionError):
    """A choice is not wanted any more: another one failed, or the client has gone."""


@dataclass
class Usage:
    """Tokens of a choice."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None


@dataclass(eq=False)
class Choice:
    """One of several, and the file that its handler writes to.

    handler: a copy of the connection's. reply: what it wrote, if it is not a stream.
    """

    choices: Choices
    index: int
    handler: SpeculatingHandler
    usage: Usage = field(default_factory=Usage)
    reply: dict[str, Any] | None = None

    def write(self, data: bytes) -> int:
        """Take a whole reply, or what belongs to a stream."""
        if self.choices.failure is not None:
            raise ChoiceEndedError("Another choice has ended the request.")
        if not self.handler.stream:
            self.reply = json.loads(data)
        elif not data.startswith(DATA + DONE):
            is_chunk = data.startswith(DATA)
            if not is_chunk or json.loads(data.removeprefix(DATA))["choices"]:
                self.choices.send(data)
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""


@dataclass(eq=False)
class Choices:
    """All choices of a request.

    handler: of its connection. answer: answers one of them, with its handler and a request of its
    own; what it raises ends all of them. num_choices: of each prompt.
    """

    handler: SpeculatingHandler
    answer: Callable[[SpeculatingHandler, Any], None]
    num_choices: int
    failure: Exception | None = None
    parts: list[Choice] = field(default_factory=list)
    _lock: Any = field(default_factory=Lock)

    def run(self, requests: Sequence[Any]) -> None:
        """Answer the client, with the choices of the first request, then those of the next one.

        Raises:
            Exception: what the first that failed raised.
        """
        own = [copy.deepcopy(request) for request in requests for _ in range(self.num_choices)]
        self.parts = [self._part(index) for index in range(len(own))]
        threads = [
            Thread(target=self._run_one, args=pair) for pair in zip(self.parts, own, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        if self.handler.stream:
            self._end_stream()
        else:
            self._reply()

    def _part(self, index: int) -> Choice:
        """A choice, with a handler, an account and a seed of its own."""
        handler = copy.copy(self.handler)
        part = Choice(self, index, handler)
        assert handler.speculation is not None
        handler.speculation = replace(handler.speculation)
        handler.choice, handler.wfile = part, part
        if handler.seed is not None:
            handler.seed = (handler.seed + index % self.num_choices) % NUM_SEEDS
        return part

    def _run_one(self, part: Choice, request: Any) -> None:
        try:
            self.answer(part.handler, request)
        except Exception as error:
            with self._lock:
                self.failure = self.failure or error

    def send(self, data: bytes) -> None:
        """Send a part of a stream, and before the first one the head of the reply."""
        with self._lock:
            self._begin_stream()
            self.handler.wfile.write(data)
            self.handler.wfile.flush()

    def _begin_stream(self) -> None:
        if not self.handler.replying:
            self.handler._set_stream_headers(200)
            self.handler.end_headers()

    def _end_stream(self) -> None:
        """The usage of all choices, if it was asked for, and the end."""
        self._begin_stream()
        if self.handler.stream_options is not None:
            chunk = self.handler.completion_usage_response(*self._total())
            chunk["usage"]["speculation"] = self._accounts()
            self.handler.wfile.write(DATA + json.dumps(chunk).encode() + b"\n\n")
        self.handler.wfile.write(DATA + DONE + b"\n\n")
        self.handler.wfile.flush()

    def _reply(self) -> None:
        """One reply with all choices."""
        replies = [part.reply for part in self.parts if part.reply is not None]
        reply = replies[0]
        usage, usages = reply["usage"], [other["usage"] for other in replies]
        reply["choices"] = [choice for other in replies for choice in other["choices"]]
        usage["completion_tokens"] = sum(one["completion_tokens"] for one in usages)
        usage["prompt_tokens"] = sum(one["prompt_tokens"] for one in usages[:: self.num_choices])
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        usage["speculation"] = self._accounts()
        data = json.dumps(reply).encode()
        self.handler._set_completion_headers(200)
        self.handler.send_header("Content-Length", str(len(data)))
        self.handler.end_headers()
        self.handler.wfile.write(data)
        self.handler.wfile.flush()

    def _total(self) -> tuple[int, int, int | None]:
        """Tokens of the prompts, of all choices, and of the first prompt from a cache."""
        usages = [part.usage for part in self.parts]
        completion = sum(usage.completion_tokens for usage in usages)
        prompts = sum(usage.prompt_tokens for usage in usages[:: self.num_choices])
        return prompts, completion, usages[0].cached_tokens

    def _accounts(self) -> dict[str, Any]:
        """The `speculation` object of the reply, with the account of each choice."""
        accounts = [part.handler.account() for part in self.parts]
        return {
            "drafter": accounts[0]["drafter"],
            "batched": any(account["batched"] for account in accounts),
            "choices": accounts,
        }
