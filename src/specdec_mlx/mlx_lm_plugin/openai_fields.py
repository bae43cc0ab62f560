"""Fields of OpenAI's requests that mlx-lm's server passes over, and checks of those it reads."""

from __future__ import annotations

import math
from typing import Any

from specdec_mlx.drafters.grammar import Grammar

NUM_SEEDS = 2**64
"""MLX takes seeds of 64 bits."""

MOST_CHOICES = 32
"""Most choices of one request: each is a row of a batch."""


class RequestError(ValueError):
    """A request that cannot be served, in words for the client."""


def grammar_in(response_format: Any) -> Grammar | None:
    """The grammar that OpenAI's `response_format` asks for; None for any text."""
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        schema = response_format.get("schema", {"type": "object"})
    elif kind == "json_schema":
        described = response_format.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
    else:
        raise RequestError("response_format: type must be text, json_object or json_schema.")
    if not isinstance(schema, dict):
        raise RequestError('response_format: expected {"json_schema": {"schema": {...}}}.')
    return Grammar.json_schema(schema)


def prediction_in(given: Any) -> str:
    """The text of OpenAI's `prediction`; "" for none."""
    if given is None:
        return ""
    content = given.get("content") if isinstance(given, dict) else None
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = [_text_in(part) for part in parts] if isinstance(parts, list) else [None]
    if None in texts or given.get("type", "content") != "content":
        raise RequestError(
            'prediction: expected {"type": "content", "content": TEXT}, or a list of parts '
            '{"type": "text", "text": TEXT} as its content.'
        )
    return "".join(text for text in texts if text is not None)


def _text_in(part: Any) -> str | None:
    """The text of a part of a message; None if it is none."""
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    return text if isinstance(text, str) else None


def check_body(body: dict[str, Any]) -> None:
    """Raise RequestError for values that mlx-lm takes and cannot get along with."""
    seed = body.get("seed")
    if seed is not None and (type(seed) is not int or not 0 <= seed < NUM_SEEDS):
        raise RequestError(f"seed must be an int from 0 to 2**64 - 1, not {seed!r}")
    num_choices = body.get("n")
    if num_choices is not None and (
        type(num_choices) is not int or not 1 <= num_choices <= MOST_CHOICES
    ):
        raise RequestError(f"n must be an int from 1 to {MOST_CHOICES}, not {num_choices!r}")
    bias = body.get("logit_bias")
    for token, value in bias.items() if isinstance(bias, dict) else ():
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise RequestError(f"logit_bias: expected a number for token {token}, not {value!r}")
    stop = body.get("stop")
    if stop is not None and not all(
        isinstance(word, str) for word in (stop if isinstance(stop, list) else [stop])
    ):
        raise RequestError(f"stop must be a text or a list of texts, not {stop!r}")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise RequestError("stream_options must be an object.")


def check_prompt(prompt: Any) -> None:
    """Raise RequestError unless the prompt of a completion is one text."""
    if isinstance(prompt, list):
        raise RequestError("prompt must be a text. Send one request for each of several prompts.")
    if not isinstance(prompt, str):
        raise RequestError(f"prompt must be a text, not {prompt!r}")


def check_messages(messages: Any) -> None:
    """Raise RequestError unless the messages of a chat are some, each with a role."""
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
