"""OpenAI's completions of texts: requests, replies, streams and errors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from specdec_mlx.arguments import short_repr
from specdec_mlx.server.protocols.body import Count, fields_of
from specdec_mlx.server.protocols.chat import ChoicesBody, ChoicesReply
from specdec_mlx.server.protocols.replies import ParsedBody, Wire, logprob, openai_error
from specdec_mlx.server.requests import (
    Ended,
    Event,
    Object,
    RequestError,
    TextPiece,
    TextRequest,
    TokenLogprob,
    Transcript,
)

MOST_PROMPTS = 128  # most prompts of one request


class CompletionBody(ChoicesBody, kw_only=True):
    """The fields of a completion. prompt: a text, token ids, or a list of either."""

    prompt: str | list[Count | str | list[Count]]
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


def read(body: Object) -> ParsedBody:
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
    return ParsedBody(requests, body, "cmpl-")


def _content(request: TextRequest, text: TextPiece | Transcript, offset: int) -> Object:
    """A text, or a piece of a text that begins at a character `offset`."""
    has_logprobs = request.num_logprobs is not None
    logprobs = _logprobs(text.logprobs, offset) if has_logprobs else None
    return {"text": text.text, "logprobs": logprobs}


def _logprobs(entries: Sequence[TokenLogprob], offset: int) -> Object:
    """The form of completions, and mlx-lm's, `content`, of what was written.

    The first token of a text has no log-probability: null.
    """
    tokens = [entry.data.decode(errors="replace") for entry in entries]
    offsets = accumulate(map(len, tokens), initial=offset)
    forms = [None if math.isnan(entry.logprob) else logprob(entry) for entry in entries]
    return {
        "tokens": tokens,
        "token_logprobs": [form and form["logprob"] for form in forms],
        "top_logprobs": [form and _likeliest(form) for form in forms],
        "text_offset": list(offsets)[:-1],
        "content": list(filter(None, forms)),
    }


def _likeliest(form: Object) -> dict[str, float]:
    """The likeliest texts there, the written one among them; of equal texts the likelier one."""
    likeliest: dict[str, float] = {}
    for entry in (*form["top_logprobs"], form):
        text, value = entry["token"], entry["logprob"]
        likeliest[text] = max(value, likeliest.get(text, value))
    return likeliest


class CompletionReply(ChoicesReply):
    """A completion's reply: its choices are texts."""

    kind = chunk_kind = "text_completion"

    def __init__(self, parsed: ParsedBody) -> None:
        super().__init__(parsed)
        self._lengths = Counter[int]()  # of the texts that were sent, by choice

    def delta(self, index: int, event: Event) -> Object | None:
        """A piece of a text; the end has none."""
        match event:
            case TextPiece() if event.text or event.logprobs:
                piece = event
            case Ended():
                piece = TextPiece("")
            case _:
                return None
        offset = self._lengths[index]
        self._lengths[index] += len(piece.text)
        return _content(self.parsed.requests[index], piece, offset)

    def choice(self, index: int, text: Transcript) -> Object:
        return _content(self.parsed.requests[index], text, 0)


COMPLETIONS = Wire(read, CompletionReply, openai_error)
"""The protocol of `/v1/completions`."""
