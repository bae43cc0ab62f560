"""OpenAI's completions of texts: requests, replies, streams and errors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from specdec_mlx.server.protocols import fields
from specdec_mlx.server.protocols.chat import (
    ChunkStream,
    head,
    logprobs_in,
    wants_usage,
)
from specdec_mlx.server.requests import (
    Asked,
    Ended,
    Event,
    RequestError,
    Said,
    TextRequest,
    TokenLogprob,
    Written,
)

MOST_PROMPTS = 128  # most prompts of one request
KIND = "text_completion"


def prompts_in(prompt: Any) -> list[Any]:
    """The prompts of a completion, texts or token ids: one, or several; raises RequestError."""
    prompts = [prompt] if isinstance(prompt, str) or _are_ids(prompt) else prompt
    fits = isinstance(prompts, list) and all(
        isinstance(p, str) or _are_ids(p) for p in prompts
    )
    if fits and 0 < len(prompts) <= MOST_PROMPTS:
        return list(prompts)
    raise RequestError(
        f"prompt must be a text, token ids, or a list of 1 to {MOST_PROMPTS} of either, not "
        f"{prompt!r}"
    )


def _are_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(token) is int for token in value)
    )


def _choice(
    asked: Asked, index: int, said: Said, offset: int, reason: str | None = None
) -> dict[str, Any]:
    """A choice, or a piece of one whose text begins `offset` characters after the choice's."""
    request: TextRequest = asked.requests[index]
    logprobs = None if request.num_logprobs is None else _logprobs(said, offset)
    return {
        "index": index,
        "text": said.text,
        "logprobs": logprobs,
        "finish_reason": reason,
    }


def _logprobs(said: Said, offset: int) -> dict[str, Any]:
    """The form of completions, and mlx-lm's, `content`, of what was written.

    The first token of a text has no log-probability: null.
    """
    tokens = [token.data.decode(errors="replace") for token in said.logprobs]
    offsets = [offset]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
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

    kind = KIND

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self._lengths = Counter[int]()  # of the texts that were sent, by choice

    def write(self, choice: int, event: Event) -> Iterator[bytes]:
        """The chunks of an event."""
        if isinstance(event, Said) and (event.text or event.logprobs):
            yield self.chunk(_choice(self.asked, choice, event, self._lengths[choice]))
            self._lengths[choice] += len(event.text)
        if isinstance(event, Ended):
            self._ends[choice] = event
            yield self.chunk(_choice(self.asked, choice, Said(""), 0, event.reason))


class Completions(fields.OpenAIWire):
    """The wire of `/v1/completions`."""

    stream = CompletionStream

    def read(self, body: Mapping[str, Any]) -> Asked:
        """Check a body; raises RequestError."""
        body = fields.without_nulls(body)
        request = fields.base(body)
        if body.get("suffix"):
            raise RequestError(
                "suffix: models here continue a text, and do not fill one in."
            )
        count = body.get("n", 1)
        if body.get("best_of", count) != count:
            raise RequestError(
                "best_of: texts are not chosen among here. Ask for n of them."
            )
        request.echo = body.get("echo", False)
        request.grammar = fields.grammar_in(body.get("response_format"))
        request.max_tokens = fields.most_tokens(body, least=0 if request.echo else 1)
        request.stop = fields.texts(body.get("stop"), "stop")
        request.num_logprobs = logprobs_in(body)
        prompts = [
            replace(request, prompt=prompt) for prompt in prompts_in(body.get("prompt"))
        ]
        requests = [one for prompt in prompts for one in fields.choices(prompt, count)]
        more = {"num_choices": count, "with_usage": wants_usage(body)}
        return fields.asked(requests, body, "cmpl-", more)

    def reply(self, asked: Asked, texts: Sequence[Written]) -> dict[str, Any]:
        """The whole reply."""
        ends = [text.ended for text in texts if text.ended is not None]
        choices = []
        for index, (text, end) in enumerate(zip(texts, ends, strict=True)):
            said = Said(text.thoughts + text.text, logprobs=text.logprobs)
            choices.append(_choice(asked, index, said, 0, end.reason))
        usage = fields.usage(ends, asked.more["num_choices"])
        return {**head(asked, KIND), "choices": choices, "usage": usage}


COMPLETIONS = Completions()
