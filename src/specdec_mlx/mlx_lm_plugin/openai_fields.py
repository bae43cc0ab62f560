"""OpenAI's protocol: fields of requests that mlx-lm's server does not read or check, and errors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from concurrent.futures import Future, wait
from http import HTTPStatus
from threading import Thread
from typing import Any, TypeVar

from specdec_mlx import errors
from specdec_mlx.drafters.grammar import Grammar
from specdec_mlx.errors import MissingPackageError
from specdec_mlx.sampling.distribution import TEMPS, is_temp

T = TypeVar("T")

NUM_SEEDS = 2**64  # MLX takes seeds of 64 bits
MOST_CHOICES = 32  # most choices of one request: each is a row of a batch
MOST_PROMPTS = 128  # most prompts of one request
MOST_DRAFTERS = 8  # most drafters tried in order by one request: all of them read the prompt

# Most characters, levels, and names of `patternProperties` of a JSON schema: each pattern is
# compared with all others; 100 take 0.2 s, 500 took 77 s.
LONGEST_SCHEMA, DEEPEST_SCHEMA, MOST_PATTERNS = 2**17, 100, 100
COMPILE_SECONDS = 10.0  # longest that a client waits for its grammar to be compiled
LONGEST_ANSWER = 1000  # most characters of an error's message: some repeat what the client sent


class RequestError(ValueError):
    """A request that cannot be served, in words for the client."""


class Refused(BaseException):
    """A request is not served, for a reason, an exception, that the client is told."""


def is_clients(error: BaseException) -> bool:
    """True if an error is the request's, not the server's: those are named here or in `errors`."""
    named = type(error).__module__ in (__name__, errors.__name__)
    return named and isinstance(error, ValueError | MissingPackageError)


def error_object(error: Exception, status: HTTPStatus) -> dict[str, Any]:
    """OpenAI's form of an error."""
    is_ours = status == HTTPStatus.INTERNAL_SERVER_ERROR
    words = f"{type(error).__name__}: {error}" if is_ours else str(error)
    is_server = status >= HTTPStatus.INTERNAL_SERVER_ERROR
    kind = "server_error" if is_server else "invalid_request_error"
    return {"error": {"message": words[:LONGEST_ANSWER], "type": kind, "code": status}}


def grammar_in(response_format: Any) -> Grammar | None:
    """The grammar that OpenAI's `response_format` asks for; None for any text."""
    if response_format is None:
        return None
    asked = response_format if isinstance(response_format, dict) else {}
    kind, described = asked.get("type"), asked.get("json_schema")
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        raise RequestError("response_format: type must be text, json_object or json_schema.")
    schema = asked.get("schema", {"type": "object"})
    if kind == "json_schema":
        schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise RequestError('response_format: expected {"json_schema": {"schema": {...}}}.')
    check_schema(schema)
    return within(lambda: Grammar.json_schema(schema))


def check_schema(schema: dict[str, Any]) -> None:
    """Raise RequestError for a schema that is too large to be compiled while others wait."""
    size, depth, patterns = len(json.dumps(schema)), 0, 0
    nodes: list[tuple[Any, int]] = [(schema, 1)]
    while nodes:
        node, level = nodes.pop()
        depth = max(depth, level)
        if isinstance(node, dict):
            names = node.get("patternProperties")
            patterns += len(names) if isinstance(names, dict) else 0
            node = list(node.values())
        nodes += [(child, level + 1) for child in node] if isinstance(node, list) else []
    if size > LONGEST_SCHEMA or depth > DEEPEST_SCHEMA or patterns > MOST_PATTERNS:
        raise RequestError(
            f"The schema has {size} characters, {depth} levels and {patterns} patternProperties; "
            f"at most {LONGEST_SCHEMA}, {DEEPEST_SCHEMA} and {MOST_PATTERNS} are compiled."
        )


def within(make: Callable[[], T]) -> T:
    """Return `make()`; raises RequestError, and abandons it, after `COMPILE_SECONDS`."""
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except Exception as error:
            made.set_exception(error)

    Thread(target=run, daemon=True).start()
    if made not in wait([made], COMPILE_SECONDS).done:
        raise RequestError(f"The grammar was not compiled in {COMPILE_SECONDS} s. Make it smaller.")
    return made.result()


def prediction_in(given: Any) -> str:
    """The text of OpenAI's `prediction`; "" for none."""
    if given is None:
        return ""
    content = given.get("content") if isinstance(given, dict) else None
    parts: Any = [{"type": "text", "text": content}] if isinstance(content, str) else content
    try:
        texts = [part["text"] for part in parts if part["type"] == "text"]
        if len(texts) == len(parts) and given.get("type", "content") == "content":
            return "".join(texts)
    except (KeyError, TypeError):
        pass
    raise RequestError(
        'prediction: expected {"type": "content", "content": TEXT}, or a list of parts '
        '{"type": "text", "text": TEXT} as its content.'
    )


def read_body(raw: bytes) -> dict[str, Any]:
    """The body of a request, checked, without null fields; raises RequestError."""
    try:
        body = json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body of the request is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(f"The body of the request must be a JSON object, not {body!r}")
    body = {name: value for name, value in body.items() if value is not None}
    for name, (fits, expected) in FIELDS.items():
        if name in body and not fits(body[name]):
            raise RequestError(f"{name} must be {expected}, not {body[name]!r}")
    for token, value in body.get("logit_bias", {}).items():
        if not _is(float)(value):
            raise RequestError(f"logit_bias: expected a number for token {token}, not {value!r}")
    num_logprobs = body.get("logprobs")
    if type(num_logprobs) is int:
        body["logprobs"] = True
        if num_logprobs > 0:
            body["top_logprobs"] = num_logprobs
    return body


def texts_in(value: Any) -> list[Any]:
    """What stands in a field that holds one text or several."""
    return value if isinstance(value, list) else [value]


def _is(kind: type, least: float = -math.inf, most: float = math.inf) -> Callable[[Any], bool]:
    """True if a value is of a kind, and finite and within bounds if it is a number."""
    if kind not in (int, float):
        return lambda value: isinstance(value, kind)
    kinds = (int,) if kind is int else (int, float)
    return lambda v: type(v) in kinds and math.isfinite(v) and least <= v <= most


FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "drafter": (
        lambda value: len(texts_in(value)) <= MOST_DRAFTERS and all(map(_is(str), texts_in(value))),
        f"a name or a list of at most {MOST_DRAFTERS} names",
    ),
    "seed": (_is(int, 0, NUM_SEEDS - 1), "an int from 0 to 2**64 - 1"),
    "n": (_is(int, 1, MOST_CHOICES), f"an int from 1 to {MOST_CHOICES}"),
    "stop": (lambda value: all(map(_is(str), texts_in(value))), "a text or a list of texts"),
    "stream_options": (_is(dict), "an object"),
    "chat_template_kwargs": (_is(dict), "an object"),
    "logit_bias": (_is(dict), "an object"),
    "draft_model": (_is(str), "a text"),
    "logprobs": (lambda v: _is(bool)(v) or _is(int, 0, 11)(v), "a boolean or an int up to 11"),
    "temperature": (lambda value: _is(float)(value) and is_temp(value), TEMPS),
    "top_p": (_is(float, 0, 1), "a number from 0 to 1"),
    "min_p": (_is(float, 0, 1), "a number from 0 to 1"),
    "xtc_probability": (_is(float, 0, 1), "a number from 0 to 1"),
    "xtc_threshold": (_is(float, 0, 0.5), "a number from 0 to 0.5"),
    "presence_penalty": (_is(float), "a finite number"),
    "frequency_penalty": (_is(float), "a finite number"),
}
"""Fields that mlx-lm checks too little: a test, and its words."""


def prompts_in(prompt: Any) -> list[Any]:
    """The prompts of a completion, texts or token ids: one, or several; raises RequestError."""
    prompts = [prompt] if isinstance(prompt, str) or _are_ids(prompt) else prompt
    fits = isinstance(prompts, list) and all(isinstance(p, str) or _are_ids(p) for p in prompts)
    if fits and 0 < len(prompts) <= MOST_PROMPTS:
        return list(prompts)
    raise RequestError(
        f"prompt must be a text, token ids, or a list of 1 to {MOST_PROMPTS} of either, not "
        f"{prompt!r}"
    )


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(_is(int), value))


def check_messages(messages: Any) -> None:
    """Raise RequestError unless there is a message, and each has a role."""
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list of at least one message.")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages: expected objects with a role, not {message!r}")


def check_bias(bias: dict[int, float] | None, vocab_size: int) -> None:
    """Raise RequestError for a biased token that the model does not have."""
    for token in bias or ():
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"logit_bias: there is no token {token}; the model has 0 to {vocab_size - 1}."
            )


def room_after(num_read: int, longest: int, wanted: int | None) -> int:
    """Most tokens that fit after a prompt of `num_read`; raises RequestError if `wanted` do not."""
    if not num_read:
        raise RequestError("The prompt is empty. Give at least one token.")
    room = longest - num_read + 1  # the last token is not fed
    if room < max(1, wanted or 1):
        asked = "" if wanted is None else f", and max_tokens is {wanted}"
        raise RequestError(
            f"The prompt has {num_read} tokens{asked}; there are {longest} positions for a text."
        )
    return room
