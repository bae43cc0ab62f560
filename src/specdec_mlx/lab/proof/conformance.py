"""The runner of all conformance tests: properties in turn, and how a broken one is reported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar


class Conformance:
    """Base of the tests of a contract.

    Attributes:
        properties: name of each property -> the next step for someone who broke it. A method with
            the property's name tests it.
        subject: the object under test.
        part: the property that is tested now.
    """

    properties: ClassVar[dict[str, str]]
    subject: Any
    part = ""

    def run(self, names: Iterable[str]) -> list[str]:
        lines = []
        for self.part in names:
            lines.append(f"{self.part}: {getattr(self, self.part.replace(' ', '_'))()}")
        return lines

    def require(self, holds: object, what: str, next_step: str = "", part: str = "") -> None:
        """Raise AssertionError if `holds` is false.

        Args:
            holds: the condition.
            what: a sentence that says what happened.
            next_step: advice without a full stop. The default is the property's.
            part: the broken property. The default is the property that is tested now.
        """
        if not holds:
            kind = self.subject if isinstance(self.subject, type) else type(self.subject)
            part = part or self.part
            step = next_step or self.properties[part]
            raise AssertionError(f"{kind.__name__}, {part}: {what} {step}.")

    @contextmanager
    def blaming(self, where: object, next_step: str = "", part: str = "") -> Iterator[None]:
        """Report exceptions of the subject inside this block as broken properties."""
        try:
            yield
        except AssertionError:
            raise
        except Exception as error:
            self.require(False, f"{where}: {type(error).__name__}: {error}", next_step, part)
