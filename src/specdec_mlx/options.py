"""Options in a name: NAME:key=value,key=value, as on the command line."""

from __future__ import annotations

import ast
from typing import Any


def split_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """Name and options out of NAME:key=value,...; raises ValueError."""
    name, _, rest = spec.partition(":")
    return name, parse_options(rest)


def parse_options(text: str) -> dict[str, Any]:
    """Options out of `key=value,key=value`; values are Python literals, anything else is text."""
    options: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, separator, value = part.partition("=")
        if not separator:
            raise ValueError(f"Option {part!r}: expected key=value.")
        options[key.strip().replace("-", "_")] = _literal(value.strip())
    return options


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text.capitalize() if text in ("true", "false", "none") else text)
    except (ValueError, SyntaxError):
        return text
