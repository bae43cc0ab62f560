"""The body of a request, from bytes to an object."""

from __future__ import annotations

import json
import re
from itertools import islice
from typing import Any

from specdec_mlx.server.requests import BodyError, Object

DEEPEST = 128  # levels of a body: everything that walks it later may call itself as often
# Most values of a body. Each takes a hundred bytes in memory where it may take two in JSON.
MOST_VALUES = 2**20
SMALL = 2**20  # bytes of a body whose values need not be counted

_VALUES = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{,]', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_body(raw: bytes | bytearray) -> Object:
    """A body as an object without null fields; raises BodyError.

    A number that is whole is an int, as in languages that have no others. A bytearray is emptied,
    so that the body is in memory once.
    """
    if len(raw) > SMALL:
        found = sum(1 for _ in islice(_VALUES.finditer(raw), MOST_VALUES + 1))
        if found > MOST_VALUES:
            raise BodyError(
                f"The body of the request has more than {MOST_VALUES} values. Send fewer."
            )
    has_surrogates = _SURROGATE.search(raw) is not None
    try:
        text = raw.decode("utf-8-sig")
        if isinstance(raw, bytearray):
            raw.clear()
        body = json.loads(text)
        del text
        check_depth(body)
    except (ValueError, RecursionError) as error:
        raise BodyError(f"The body of the request is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise BodyError(
            f"The body of the request must be a JSON object, not {type(body).__name__}."
        )
    if has_surrogates:
        body = without_surrogates(body)
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in without_nulls(body).items()
    }


def check_depth(value: Any) -> None:
    """Raise RecursionError for a value with more than `DEEPEST` levels of lists and objects."""
    level = [value]
    for _ in range(DEEPEST + 1):
        inner = [
            node.values() if isinstance(node, dict) else node
            for node in level
            if isinstance(node, dict | list)
        ]
        if not inner:
            return
        level = [child for children in inner for child in children]
    raise RecursionError(f"it has more than {DEEPEST} levels")


def without_surrogates(value: Any) -> Any:
    """What was read from JSON; halves of surrogate pairs, of texts that were cut, are replaced."""
    if isinstance(value, str):
        units = value.encode("utf-16-le", "surrogatepass")
        return units.decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [*map(without_surrogates, value)]
    if isinstance(value, dict):
        return {without_surrogates(name): without_surrogates(each) for name, each in value.items()}
    return value


def without_nulls(body: Object) -> Object:
    """An object without its null fields, which are absent ones."""
    return {name: value for name, value in body.items() if value is not None}
