"""The runner of all conformance tests: properties in turn, and how a broken one is reported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar


class Conformance:
    """The test of a contract: each property, name -> next step, is a method."""

    properties: ClassVar[dict[str, str]]
    subject: Any
    part = ""

    def run(self, names: Iterable[str]) -> list[str]:
        """A line for each of the properties; AssertionError for the first that is broken."""
        lines = []
        for self.part in names:
            lines.append(f"{self.part}: {getattr(self, self.part.replace(' ', '_'))()}")
        return lines

    def require(self, holds: object, what: str, next_step: str = "", part: str = "") -> None:
        """Raise AssertionError unless it holds: whose fault, which property, what, what to do.

        what: a sentence. next_step: without the full stop; by default the property's own. part: the
        property; by default the one that runs.
        """
        if not holds:
            kind = self.subject if isinstance(self.subject, type) else type(self.subject)
            part = part or self.part
            step = next_step or self.properties[part]
            raise AssertionError(f"{kind.__name__}, {part}: {what} {step}.")

    @contextmanager
    def blaming(self, where: object, next_step: str = "", part: str = "") -> Iterator[None]:
        """Report errors of the subject, or of what it is used for, as failures."""
        try:
            yield
        except AssertionError:
            raise
        except Exception as error:
            self.require(False, f"{where}: {type(error).__name__}: {error}", next_step, part)
