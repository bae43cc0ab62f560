"""How a conformance test fails: whose fault, which property, what happened, what to do."""

from __future__ import annotations

from typing import NoReturn


def fail(subject: object, part: str, what: str, next_step: str) -> NoReturn:
    """Raise the AssertionError of a conformance test.

    Args:
        subject: what is tested; its class is named.
        part: the property that it breaks, as in the table of its page.
        what: what happened and what was expected, a sentence.
        next_step: what to do, without the full stop.
    """
    name = subject.__name__ if isinstance(subject, type) else type(subject).__name__
    raise AssertionError(f"{name}, {part}: {what} {next_step}.")
