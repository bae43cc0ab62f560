"""Fields that the protocols share: their checks, with words that name the field, and their forms.

Beside OpenAI's there are mlx-lm's (min_p, repetition_penalty, chat_template_kwargs, ...) and ours
(drafter, draft_length, rule, draft_model, adapters).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any
from uuid import uuid4

import msgspec

from specdec_mlx.draft_length.policy import parse_draft_length
from specdec_mlx.drafters.grammar import Grammar
from specdec_mlx.options import split_spec
from specdec_mlx.rules.registry import make_rule
from specdec_mlx.sampling.distribution import TEMPS, Sampling, is_temp
from specdec_mlx.server.forced import check_schema, within
from specdec_mlx.server.requests import (
    Asked,
    Ended,
    RequestError,
    TextRequest,
    TokenLogprob,
    Wire,
)

Body = Mapping[str, Any]

NUM_SEEDS = 2**64  # MLX takes seeds of 64 bits
MOST_CHOICES = 32  # most choices of one request: each is a row of a batch
# most drafters tried in order by one request: all of them read the prompt
# longest draft of a request: each token of it is a position in a pass
MOST_DRAFTERS = 8
LONGEST_DRAFT = 64
MOST_LOGPROBS = 20  # most alternatives that are reported beside a token, as OpenAI does

# most characters of an error's message: some repeat what the client sent
LONGEST_ANSWER = 1000
LEAST_LOGPROB = -9999.0  # said for a token that cannot be drawn; JSON has no infinity

PENALTIES = "repetition_penalty", "presence_penalty", "frequency_penalty"


def read_body(raw: bytes) -> dict[str, Any]:
    """A body as an object without null fields; raises RequestError.

    A number that is whole is an int, as in languages that have no others.
    """
    try:
        body = without_surrogates(json.loads(raw.decode("utf-8-sig")))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body of the request is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(
            f"The body of the request must be a JSON object, not {body!r}"
        )
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in without_nulls(body).items()
    }


def without_surrogates(value: Any) -> Any:
    """What was read from JSON; halves of surrogate pairs, of texts that were cut, are replaced."""
    text = json.dumps(value)
    if "\\ud" not in text:
        return value
    units = json.dumps(value, ensure_ascii=False).encode("utf-16-le", "surrogatepass")
    return json.loads(units.decode("utf-16-le", "replace"))


def without_nulls(body: Body) -> dict[str, Any]:
    """An object without its null fields, which are absent ones."""
    return {name: value for name, value in body.items() if value is not None}


def base(body: Body) -> TextRequest:
    """What all protocols say in the same way; raises RequestError."""
    for name, (fits, expected) in FIELDS.items():
        if body.get(name) is not None and not fits(body[name]):
            raise RequestError(f"{name} must be {expected}, not {body[name]!r}")
    length = body.get("draft_length", body.get("num_draft_tokens"))
    seed = -1 if body.get("seed") is None else body["seed"]
    drafters = body.get("drafter")
    return TextRequest(
        model=body.get("model") or "",
        adapter=body.get("adapters"),
        draft_model=body.get("draft_model"),
        template=dict(body.get("chat_template_kwargs") or {}),
        sampling=_sampling(body),
        penalties=_penalties(body),
        seed=None if seed == -1 else seed % NUM_SEEDS,
        prediction=_prediction(body.get("prediction")),
        drafters=None if drafters is None else several(drafters),
        draft_length=None if length is None else _length(length),
        rule=None if body.get("rule") is None else _rule(body["rule"]),
        user=str(body.get("user") or ""),
    )


def asked(
    requests: list[TextRequest],
    body: Body,
    prefix: str,
    more: dict[str, Any] | None = None,
) -> Asked:
    """What was asked for in a body; the reply's id begins with `prefix`."""
    return Asked(
        requests=requests,
        model=body.get("model") or "default_model",
        id=f"{prefix}{uuid4().hex}",
        created=int(time.time()),
        stream=body.get("stream") or False,
        more=more or {},
    )


def choices(request: TextRequest, count: int) -> list[TextRequest]:
    """A request for each choice of its text; each has a seed of its own."""
    if request.seed is None:
        return [replace(request) for _ in range(count)]
    return [replace(request, seed=(request.seed + i) % NUM_SEEDS) for i in range(count)]


def count(body: Body, name: str, most: int | None = None, least: int = 0) -> int | None:
    """A field that is a number of things, None for none; raises RequestError."""
    value: int | None = body.get(name)
    if value is None or is_a(int, least, math.inf if most is None else most)(value):
        return value
    limit = "" if most is None else f" to {most}"
    raise RequestError(
        f"{name} must be an int from {least}{limit or ' on'}, not {value!r}"
    )


def most_tokens(body: Body, least: int = 1) -> int | None:
    """Most tokens of an answer; None, or -1, for as many as fit."""
    name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    return None if body.get(name) == -1 else count(body, name, least=least)


def texts(value: Any, name: str) -> list[str]:
    """What stands in a field that holds one text, several or none; raises RequestError."""
    found = [] if value is None else several(value)
    if not all(isinstance(text, str) for text in found):
        raise RequestError(f"{name} must be a text or a list of texts, not {value!r}")
    return [text for text in found if text]


def several(value: Any) -> list[Any]:
    """What stands in a field that holds one thing or a list of them."""
    return value if isinstance(value, list) else [value]


def thinking(effort: Any) -> dict[str, Any]:
    """Names for the chat template that an effort of reasoning stands for."""
    if effort is None or effort == "none":
        return {} if effort is None else {"enable_thinking": False}
    return {"enable_thinking": True, "reasoning_effort": effort}


def grammar_in(response_format: Any) -> Grammar | None:
    """The grammar that OpenAI's `response_format` asks for; None for any text."""
    if response_format is None:
        return None
    given = response_format if isinstance(response_format, dict) else {}
    kind, described = given.get("type"), given.get("json_schema")
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        raise RequestError(
            "response_format: type must be text, json_object or json_schema."
        )
    schema = given.get("schema", {"type": "object"})
    if kind == "json_schema":
        schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise RequestError(
            'response_format: expected {"json_schema": {"schema": {...}}}.'
        )
    check_schema(schema)
    return within(lambda: Grammar.json_schema(schema))


def is_a(
    kind: type, least: float = -math.inf, most: float = math.inf
) -> Callable[[Any], bool]:
    """A test for a kind of value, and for numbers that are finite and within bounds."""
    if kind not in (int, float):
        return lambda value: isinstance(value, kind)
    kinds = (int,) if kind is int else (int, float)
    return lambda v: type(v) in kinds and abs(v) < math.inf and least <= v <= most


def _are_drafters(value: Any) -> bool:
    names = several(value)
    return len(names) <= MOST_DRAFTERS and all(isinstance(name, str) for name in names)


_TEXT, _OBJECT, _BOOLEAN = (
    (is_a(str), "a text"),
    (is_a(dict), "an object"),
    (is_a(bool), "boolean"),
)
_NUMBER, _SHARE = (
    (is_a(float), "a finite number"),
    (is_a(float, 0, 1), "a number from 0 to 1"),
)
_COUNT = is_a(int, 0), "an int from 0 on"
FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "drafter": (_are_drafters, f"a name or a list of at most {MOST_DRAFTERS} names"),
    "seed": (is_a(int), "an int, -1 for none"),
    "n": (is_a(int, 1, MOST_CHOICES), f"an int from 1 to {MOST_CHOICES}"),
    **dict.fromkeys(("model", "draft_model", "adapters", "reasoning_effort"), _TEXT),
    **dict.fromkeys(("stream_options", "chat_template_kwargs", "logit_bias"), _OBJECT),
    **dict.fromkeys(("stream", "echo", "parallel_tool_calls"), _BOOLEAN),
    "temperature": (lambda value: is_a(float)(value) and is_temp(value), TEMPS),
    **dict.fromkeys(("top_p", "min_p", "xtc_probability"), _SHARE),
    "xtc_threshold": (is_a(float, 0, 0.5), "a number from 0 to 0.5"),
    "top_k": _COUNT,
    "repetition_penalty": (is_a(float, 0), "a number from 0 on"),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), _NUMBER),
    **{name.replace("penalty", "context_size"): _COUNT for name in PENALTIES},
}
"""Tests of fields, and the words for what they expect."""


def _sampling(body: Body) -> Sampling:
    names = "top_p", "min_p", "top_k", "xtc_probability", "xtc_threshold"
    given = {name: body[name] for name in names if body.get(name) is not None}
    return Sampling(temp=body.get("temperature", 0.0), **given)


def _penalties(body: Body) -> dict[str, Any]:
    """Arguments of mlx-lm's `make_logits_processors`; none if nothing is penalized."""
    penalties: dict[str, Any] = {}
    for name in PENALTIES:
        if body.get(name):
            size = name.replace("penalty", "context_size")
            penalties |= {key: body[key] for key in (name, size) if key in body}
    bias = {}
    for token, value in (body.get("logit_bias") or {}).items():
        if not (token.isascii() and token.isdecimal() and is_a(float)(value)):
            raise RequestError(
                f"logit_bias: expected a number for token {token}, not {value!r}"
            )
        bias[int(token)] = float(value)
    return penalties | ({"logit_bias": bias} if bias else {})


def _prediction(given: Any) -> str:
    """The text of OpenAI's `prediction`; "" for none."""
    if given is None:
        return ""
    content = given.get("content") if isinstance(given, dict) else None
    parts: Any = (
        [{"type": "text", "text": content}] if isinstance(content, str) else content
    )
    try:
        found = [part["text"] for part in parts if part["type"] == "text"]
        if len(found) == len(parts) and given.get("type", "content") == "content":
            return "".join(found)
    except (KeyError, TypeError):
        pass
    raise RequestError(
        'prediction: expected {"type": "content", "content": TEXT}, or a list of parts '
        '{"type": "text", "text": TEXT} as its content.'
    )


def _length(given: Any) -> int | str:
    try:
        length = parse_draft_length("" if isinstance(given, bool) else str(given))
    except ValueError:
        raise RequestError(
            f"draft_length must be an int >= 0 (at most {LONGEST_DRAFT} count), auto or heuristic, "
            f"not {given!r}"
        ) from None
    return length if isinstance(length, str) else min(length, LONGEST_DRAFT)


def _rule(given: Any) -> str:
    """A rule's name with options, which are numbers, true or false; raises RequestError."""
    try:
        options = split_spec(given)[1] if isinstance(given, str) else {}
        for option, value in options.items():
            if not isinstance(value, int | float):
                raise ValueError(f"rule: {option} must be a number, true or false.")
        make_rule(given)
    except ValueError as error:
        raise RequestError(str(error)) from error
    return str(given)


# What replies have in common


def speculation(ended: Ended) -> dict[str, Any]:
    """The account of a text, in our own field of the usage."""
    account = ended.stats.as_dict() if ended.stats is not None else {}
    return {"drafter": ended.drafter, "batched": ended.is_batched, **account}


def usage(ends: Sequence[Ended], num_choices: int = 1) -> dict[str, Any]:
    """OpenAI's usage of all choices; the prompt of several is counted once."""
    prompts = ends[::num_choices]
    prompt, written = (
        sum(end.num_prompt for end in prompts),
        sum(end.num_written for end in ends),
    )
    accounts = [speculation(end) for end in ends]
    whole = accounts[0]
    if len(ends) > 1:
        batched = any(account["batched"] for account in accounts)
        whole = {"drafter": whole["drafter"], "batched": batched, "choices": accounts}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {
            "cached_tokens": sum(end.num_cached for end in prompts)
        },
        "completion_tokens_details": {
            "reasoning_tokens": sum(end.num_thought for end in ends),
            "accepted_prediction_tokens": sum(end.accepted for end in ends),
            "rejected_prediction_tokens": sum(end.rejected for end in ends),
        },
        "speculation": whole,
    }


def logprob(written: TokenLogprob) -> dict[str, Any]:
    """OpenAI's form of a token's log-probability, with mlx-lm's `id`."""

    def one(token: int, data: bytes, value: float) -> dict[str, Any]:
        said = max(value, LEAST_LOGPROB)
        named = {"id": token, "token": data.decode(errors="replace"), "logprob": said}
        return {**named, "bytes": list(data)}

    top = [one(*alternative) for alternative in written.top]
    return {**one(written.token, written.data, written.logprob), "top_logprobs": top}


def words_of(error: Exception, status: HTTPStatus) -> str:
    """An error in words for the client, with its kind if it is ours."""
    is_ours = status == HTTPStatus.INTERNAL_SERVER_ERROR
    return (f"{type(error).__name__}: {error}" if is_ours else str(error))[
        :LONGEST_ANSWER
    ]


def server_sent(data: Any, event: str | None = None) -> bytes:
    """A server-sent event: its data, which become JSON, and its name."""
    name = b"" if event is None else f"event: {event}\n".encode()
    return b"%sdata: %s\n\n" % (name, msgspec.json.encode(data))


class OpenAIWire(Wire):
    """What OpenAI's protocols have in common."""

    def error(self, error: Exception, status: HTTPStatus) -> dict[str, Any]:
        """OpenAI's form of an error."""
        is_server = status >= HTTPStatus.INTERNAL_SERVER_ERROR
        said = {
            "message": words_of(error, status),
            "type": "server_error" if is_server else "invalid_request_error",
            "param": None,
            "code": getattr(error, "code", None) or status,
        }
        return {"error": said}
