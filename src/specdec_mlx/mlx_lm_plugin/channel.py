"""The way from the generation thread to one client.

A request that is served alone goes on in a batch when others arrive, as a new request that begins
with what was said so far. A `Channel` around the client's queue hides this from the client.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_lm.server import GenerationContext


class ServerEndingError(RuntimeError):
    """A request is ended because the server is."""

    def __init__(self) -> None:
        super().__init__("The server is ending. Send the request again when it is back.")


@dataclass
class Continuation:
    """The rest of a request. prompt: [n] tokens of its prompt and of what was said."""

    prompt: list[int]
    messages: Sequence[Any] = ()
    request_type: str = "text"


@dataclass(eq=False)
class Channel:
    """A client's queue, which takes a context, progress (tuples), responses, and None at the end.

    context: by which the client says stop. tokens: all that was said, num_before of them before the
    current service. pausing: the request goes on after it. is_watched: on several ranks, where
    mlx-lm cannot stop a request that is served alone, and must not see a stop.
    """

    queue: Any
    context: GenerationContext | None = None
    tokens: list[int] = field(default_factory=list)
    num_before: int = 0
    pausing: bool = False
    finished: bool = False
    is_watched: bool = False
    is_alone: bool = False
    _later: GenerationContext | None = None
    _detokenizer: Any = None
    _matcher: Any = None

    @property
    def alive(self) -> bool:
        """True if the client waits for more."""
        hung_up = self.context is not None and self.context._should_stop
        return not self.finished and not hung_up

    def stop(self) -> None:
        """End the current service, as a client that hangs up does."""
        served = self._later or self.context
        if served is not None:
            served.stop()

    def resume(self, detokenizer: Any, matcher: Any) -> None:
        """Begin the next service; its new detokenizer and stop matcher are told what was said."""
        self.pausing = self.is_alone = False
        self.num_before = len(self.tokens)
        for token in self.tokens:
            detokenizer.add_token(token)
            matcher.advance(token)
        _ = detokenizer.last_segment  # the client has it
        self._detokenizer, self._matcher = detokenizer, matcher

    def put(self, item: Any) -> None:
        """Take what the server has for the client."""
        if self.finished or (item is None and self.pausing):
            return
        if item is None or isinstance(item, Exception):
            self._finish(item)
        elif isinstance(item, GenerationContext):
            self._take_context(item)
        elif not isinstance(item, tuple):
            self._take_response(item)
        elif self._detokenizer is None:  # progress
            self.queue.put(item)

    def _take_context(self, context: GenerationContext) -> None:
        if self.context is None:
            self.context = copy(context) if self.is_watched else context
            self.queue.put(self.context)
        if self.context is not context:
            self._later = context

    def _take_response(self, response: Any) -> None:
        self.tokens.append(response.token)
        stopped = False
        if self._detokenizer is not None:
            stopped = self._matcher.advance(response.token) and response.finish_reason is None
            response = self._respoken(response, "stop" if stopped else response.finish_reason)
        self.queue.put(response)
        hidden = self.is_watched and self.is_alone
        if self._later is not None and not hidden and (stopped or not self.alive):
            self.stop()
        if stopped:
            self._finish(None)

    def _respoken(self, response: Any, finish_reason: str | None) -> Any:
        """The response with the text that follows what the client has."""
        if finish_reason != "stop":
            self._detokenizer.add_token(response.token)
        if finish_reason is not None:
            self._detokenizer.finalize()
        text = self._detokenizer.last_segment
        return replace(response, text=text, finish_reason=finish_reason)

    def _finish(self, item: Exception | None) -> None:
        self.finished = True
        self.queue.put(item)
