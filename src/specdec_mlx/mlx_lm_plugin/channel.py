"""The way from the generation thread to one client, across a change from speculation to a batch.

mlx-lm's server puts everything that happens to a request on a queue: a context, progress, one
response a token, and None at the end. When other requests arrive, a request that was served alone
goes on in a batch, as a new request that begins with what was said so far. Its client must not
notice, so its queue is wrapped in a `Channel`, which hides the seam.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_lm.server import GenerationContext


class ServerEndingError(RuntimeError):
    """A request is ended because the server is."""

    def __init__(self) -> None:
        """In words for the client."""
        super().__init__("The server is ending. Send the request again when it is back.")


@dataclass
class Continuation:
    """A request in the place of one that is half served.

    It has no messages and no images.

    Args:
        prompt: the tokens of its prompt and of what was said.
    """

    prompt: list[int]
    messages: Sequence[Any] = ()
    request_type: str = "text"


@dataclass(eq=False)
class Channel:
    """Stands in for a client's queue.

    Args:
        queue: where the client reads.
        context: what the client holds on to, and says stop by.
        tokens: all that was said.
        num_before: how many of them by those who served it before.
        pausing: whether the end of the current service is not the end of the request.
        finished: whether the client was told the end.
        is_watched: whether the client's stop is for us to see, and hidden from who serves it alone:
            on several ranks mlx-lm cannot stop there.
    """

    queue: Any
    context: GenerationContext | None = None
    tokens: list[int] = field(default_factory=list)
    num_before: int = 0
    pausing: bool = False
    finished: bool = False
    is_watched: bool = False
    _later: GenerationContext | None = None
    _is_alone: bool = False
    _detokenizer: Any = None
    _matcher: Any = None

    @property
    def alive(self) -> bool:
        """True if somebody waits for more."""
        hung_up = self.context is not None and self.context._should_stop
        return not self.finished and not hung_up

    @property
    def num_said(self) -> int:
        """Tokens said in the current service."""
        return len(self.tokens) - self.num_before

    def stop(self) -> None:
        """End the current service, as a client does that hangs up."""
        served = self._later or self.context
        if served is not None:
            served.stop()

    def resume(self, detokenizer: Any, matcher: Any) -> None:
        """Begin to hide that the request is served by others.

        They are told what was said so far, so that a word or a stop sequence may lie across the
        seam.

        Args:
            detokenizer: a new one of the tokenizer.
            matcher: a new one of the stop sequences.
        """
        self.pausing = False
        self.num_before = len(self.tokens)
        for token in self.tokens:
            detokenizer.add_token(token)
            matcher.advance(token)
        _ = detokenizer.last_segment  # the client has it
        self._detokenizer, self._matcher = detokenizer, matcher

    @contextmanager
    def served_alone(self) -> Iterator[None]:
        """Within this block it is served alone, not in a batch."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def put(self, item: Any) -> None:
        """What the server calls."""
        if self.finished:
            return
        if item is None or isinstance(item, Exception):
            if item is not None or not self.pausing:
                self._finish(item)
        elif isinstance(item, GenerationContext):
            self._take_context(item)
        elif isinstance(item, tuple):
            if self._detokenizer is None:
                self.queue.put(item)
        else:
            self._take_response(item)

    def _take_context(self, context: GenerationContext) -> None:
        """The client keeps its first context, or a copy; it stops the later ones."""
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
        hidden = self.is_watched and self._is_alone
        if self._later is not None and not hidden and (stopped or not self.alive):
            self.stop()
        if stopped:
            self._finish(None)

    def _respoken(self, response: Any, finish_reason: str | None) -> Any:
        """The response with the text that follows what was said before the seam."""
        if finish_reason != "stop":
            self._detokenizer.add_token(response.token)
        if finish_reason is not None:
            self._detokenizer.finalize()
        text = self._detokenizer.last_segment
        return replace(response, text=text, finish_reason=finish_reason)

    def _finish(self, item: Exception | None) -> None:
        self.finished = True
        self.queue.put(item)
