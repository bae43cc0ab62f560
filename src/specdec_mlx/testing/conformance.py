"""The runner of all conformance tests: properties in turn, and how one is reported as broken."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar, NoReturn


class Conformance:
    """The test of a contract: each property is a method that returns what it found.

    properties: name -> what to do where it is broken, unless a failure says something better.
    subject: what is tested; its class is named in a failure.
    part: the property that is being checked.
    """

    properties: ClassVar[dict[str, str]]

    def __init__(self, subject: object) -> None:
        """Nothing was checked yet."""
        self.subject = subject
        self.part = ""

    def run(self, names: Iterable[str]) -> list[str]:
        """A line for each of the properties; AssertionError for the first that is broken."""
        lines = []
        for name in names:
            self.part = name
            check: Callable[[], str] = getattr(self, name.replace(" ", "_"))
            lines.append(f"{name}: {check()}")
        return lines

    def require(self, holds: object, what: str, next_step: str = "") -> None:
        """Raise unless it holds; see `fail`."""
        if not holds:
            self.fail(what, next_step)

    def fail(self, what: str, next_step: str = "", part: str = "") -> NoReturn:
        """Raise AssertionError: whose fault, which property, what happened, what to do.

        Args:
            what: what happened and what was expected, a sentence.
            next_step: what to do, without the full stop; by default the property's own.
            part: the property, if not the one that is being checked.
        """
        kind = self.subject if isinstance(self.subject, type) else type(self.subject)
        part = part or self.part
        next_step = next_step or self.properties[part]
        raise AssertionError(f"{kind.__name__}, {part}: {what} {next_step}.")
