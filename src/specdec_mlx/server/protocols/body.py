"""The body of a request, from bytes to an object."""

from __future__ import annotations

import json
from typing import Any

from specdec_mlx.server.requests import Object, RequestError


def read_body(raw: bytes) -> Object:
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


def without_nulls(body: Object) -> Object:
    """An object without its null fields, which are absent ones."""
    return {name: value for name, value in body.items() if value is not None}
