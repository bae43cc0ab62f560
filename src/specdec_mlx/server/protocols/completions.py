"""OpenAI's completions of texts: requests, replies, streams and errors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

from specdec_mlx.server.protocols import fields
from specdec_mlx.server.protocols.chat import ChunkStream, ChunkWire
from specdec_mlx.server.requests import (
    Asked,
    Ended,
    Event,
    Object,
    RequestError,
    Said,
    TextRequest,
    TokenLogprob,
    Written,
)

MOST_PROMPTS = 128  # most prompts of one request


def prompts_in(prompt: Any) -> list[Any]:
    """The prompts of a completion, texts or token ids: one, or several; raises RequestError."""
    prompts = [prompt] if _is_prompt(prompt) else prompt
    fits = isinstance(prompts, list) and all(map(_is_prompt, prompts))
    if fits and 0 < len(prompts) <= MOST_PROMPTS:
        return list(prompts)
    raise RequestError(
        f"prompt must be a text, token ids, or a list of 1 to {MOST_PROMPTS} of either, not "
        f"{prompt!r}"
    )


def _is_prompt(value: Any) -> bool:
    if isinstance(value, list) and value:
        return all(type(token) is int for token in value)
    return isinstance(value, str)


def _content(request: TextRequest, said: Said, offset: int) -> Object:
    """A text, or a piece of one that begins `offset` characters after the text."""
    logprobs = None if request.num_logprobs is None else _logprobs(said, offset)
    return {"text": said.text, "logprobs": logprobs}


def _logprobs(said: Said, offset: int) -> Object:
    """The form of completions, and mlx-lm's, `content`, of what was written.

    The first token of a text has no log-probability: null.
    """
    tokens = [token.data.decode(errors="replace") for token in said.logprobs]
    offsets = [*accumulate(map(len, tokens), initial=offset)]
    written = [token for token in said.logprobs if not math.isnan(token.logprob)]
    return {
        "tokens": tokens,
        "token_logprobs": [_number(token.logprob) for token in said.logprobs],
        "top_logprobs": [_top(token) for token in said.logprobs],
        "text_offset": offsets[:-1],
        "content": [fields.logprob(token) for token in written],
    }


def _number(logprob: float) -> float | None:
    return None if math.isnan(logprob) else max(logprob, fields.LEAST_LOGPROB)


def _top(token: TokenLogprob) -> dict[str, float] | None:
    """The likeliest texts there, the written one among them; of equal texts the likelier one."""
    if math.isnan(token.logprob):
        return None
    top: dict[str, float] = {}
    for _, data, logprob in (*token.top, (token.token, token.data, token.logprob)):
        text = data.decode(errors="replace")
        top[text] = max(logprob, top.get(text, fields.LEAST_LOGPROB))
    return top


class CompletionStream(ChunkStream):
    """Chunks of a streamed completion."""

    kind = "text_completion"

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self._lengths = Counter[int]()  # of the texts that were sent, by choice

    def content(self, choice: int, event: Event) -> Object | None:
        """A piece of a text."""
        match event:
            case Said() if event.text or event.logprobs:
                said = event
            case Ended():
                said = Said("")
            case _:
                return None
        offset = self._lengths[choice]
        self._lengths[choice] += len(said.text)
        return _content(self.asked.requests[choice], said, offset)


class Completions(ChunkWire):
    """The wire of `/v1/completions`."""

    stream = CompletionStream
    kind, prefix = "text_completion", "cmpl-"

    def prompts(self, request: TextRequest, body: Object) -> Iterator[TextRequest]:
        """A request for each prompt."""
        if body.get("suffix"):
            raise RequestError("suffix: models here continue a text, and do not fill one in.")
        count = body.get("n", 1)
        if body.get("best_of", count) != count:
            raise RequestError("best_of: texts are not chosen among here. Ask for n of them.")
        request.echo = body.get("echo", False)
        for prompt in prompts_in(body.get("prompt")):
            yield replace(request, prompt=prompt)

    def content(self, request: TextRequest, text: Written) -> Object:
        """A text."""
        said = Said(text.thoughts + text.text, logprobs=text.logprobs)
        return _content(request, said, 0)


COMPLETIONS = Completions()
