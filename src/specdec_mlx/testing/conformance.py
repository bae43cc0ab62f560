"""The runner of all conformance tests: properties in turn, and how a broken one is reported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar, NoReturn


class Conformance:
    """The test of a contract: each property, name -> next step, is a method."""

    properties: ClassVar[dict[str, str]]

    def __init__(self, subject: object) -> None:
        self.subject, self.part = subject, ""

    def run(self, names: Iterable[str]) -> list[str]:
        """A line for each of the properties; AssertionError for the first that is broken."""
        lines = []
        for self.part in names:
            lines.append(f"{self.part}: {getattr(self, self.part.replace(' ', '_'))()}")
        return lines

    def require(self, holds: object, what: str, next_step: str = "", part: str = "") -> None:
        """Raise unless it holds; see `fail`."""
        if not holds:
            self.fail(what, next_step, part)

    def fail(self, what: str, next_step: str = "", part: str = "") -> NoReturn:
        """Raise AssertionError: whose fault, which property, what happened, what to do.

        what: a sentence. next_step: without the full stop; by default the property's own.
        """
        kind = self.subject if isinstance(self.subject, type) else type(self.subject)
        part = part or self.part
        next_step = next_step or self.properties[part]
        raise AssertionError(f"{kind.__name__}, {part}: {what} {next_step}.")

    @contextmanager
    def blaming(self, where: object) -> Iterator[None]:
        """Report errors of the subject, or of what it is used for, as failures."""
        try:
            yield
        except AssertionError:
            raise
        except Exception as error:
            self.fail(f"{where}: {type(error).__name__}: {error}")
