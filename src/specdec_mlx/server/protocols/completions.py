"""OpenAI's completions of texts: requests, replies, streams and errors."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

from specdec_mlx.arguments import short_repr
from specdec_mlx.server.protocols.body import Count, fields_of
from specdec_mlx.server.protocols.chat import ChoicesBody, ChunkStream, reply
from specdec_mlx.server.protocols.replies import LEAST_LOGPROB, logprob, openai_error
from specdec_mlx.server.requests import (
    Asked,
    Ended,
    Event,
    Object,
    RequestError,
    Said,
    TextRequest,
    TokenLogprob,
    Wire,
    Written,
)

MOST_PROMPTS = 128  # most prompts of one request


class CompletionBody(ChoicesBody, kw_only=True):
    """The fields of a completion. prompt: a text, token ids, or a list of either."""

    prompt: str | list[int | str | list[int]]
    max_tokens: Count | None = None
    echo: bool = False
    suffix: Any = None
    best_of: Any = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts, texts or token ids; raises RequestError."""
        prompts: Any = self.prompt
        if isinstance(prompts, str) or (prompts and not any(map(_is_prompt, prompts))):
            prompts = [prompts]
        if 0 < len(prompts) <= MOST_PROMPTS and all(map(_is_prompt, prompts)):
            return list(prompts)
        raise RequestError(
            f"prompt: expected a text, token ids, or a list of 1 to {MOST_PROMPTS} of either, got "
            f"{short_repr(prompts)}"
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: expected `int` >= 1, or `echo`, got 0")


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and value != [])


def read(body: Object) -> Asked:
    """Check the body of a completion; raises RequestError."""
    fields = fields_of(body, CompletionBody)
    if fields.suffix:
        raise RequestError("suffix: models here continue a text, and do not fill one in.")
    if fields.best_of not in (None, fields.n):
        raise RequestError("best_of: texts are not chosen among here. Ask for n of them.")
    request = fields.request()
    request.echo = fields.echo
    requests = [
        choice
        for prompt in fields.prompts()
        for choice in fields.choices(replace(request, prompt=prompt))
    ]
    return Asked(requests, body, "cmpl-")


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
        "content": [logprob(token) for token in written],
    }


def _number(logprob: float) -> float | None:
    return None if math.isnan(logprob) else max(logprob, LEAST_LOGPROB)


def _top(token: TokenLogprob) -> dict[str, float] | None:
    """The likeliest texts there, the written one among them; of equal texts the likelier one."""
    if math.isnan(token.logprob):
        return None
    top: dict[str, float] = {}
    for _, data, value in (*token.top, (token.token, token.data, token.logprob)):
        text = data.decode(errors="replace")
        top[text] = max(value, top.get(text, LEAST_LOGPROB))
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


def _text(request: TextRequest, text: Written) -> Object:
    """A choice of a completion: a text."""
    said = Said(text.thoughts + text.text, logprobs=text.logprobs)
    return _content(request, said, 0)


COMPLETIONS = Wire(read, CompletionStream, partial(reply, "text_completion", _text), openai_error)
"""The protocol of `/v1/completions`."""
