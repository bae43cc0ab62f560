"""The report of a check, as text, as JSON and in a notebook."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from specdec_mlx.lab.tables import table_html
from specdec_mlx.stats.account import Row, Rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Status = Literal["passed", "failed", "not run", "not applicable"]

WIDTH, MARGIN = 100, 15  # columns of a text, and those left of its lines


class Finding(NamedTuple):
    """Result of a part.

    Attributes:
        status: "not run" if there was too little time or data.
        verdict: a line that names the problem and the next step.
        numbers: ready for JSON.
    """

    status: Status
    verdict: str
    numbers: dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One question of the check, and its `Finding`."""

    name: str
    status: Status
    verdict: str
    numbers: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """True if it passed, or does not apply."""
        return self.status in ("passed", "not applicable")


@dataclass(frozen=True)
class CheckReport(Rows):
    """All parts of a check, in the order in which they ran.

    Attributes:
        parts: a `Part` each.
        settings: the configuration that was checked.
    """

    parts: Sequence[Part]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """True if every part passed. A part without time did not pass."""
        return all(part.passed for part in self.parts)

    @property
    def seconds(self) -> float:
        """Duration of the check in seconds."""
        return sum(part.seconds for part in self.parts)

    def __getitem__(self, name: str) -> Part:
        """The part with this name. KeyError lists the names."""
        parts = {part.name: part for part in self.parts}
        if name not in parts:
            raise KeyError(f"{name!r}; the parts are {', '.join(parts)}")
        return parts[name]

    @property
    def verdict(self) -> str:
        """One line for the whole check."""
        failed = [part.name for part in self.parts if part.status == "failed"]
        skipped = [part.name for part in self.parts if part.status == "not run"]
        if failed:
            return f"FAILED: {', '.join(failed)}."
        if skipped:
            return f"INCOMPLETE: {', '.join(skipped)} had not enough to go on. See there."
        return "PASSED: what is emitted is the target's own text."

    def rows(self) -> list[Row]:
        """A row for each part, with its single numbers as columns."""
        names = ("status", "passed", "verdict", "seconds")
        return [
            {"part": part.name}
            | {name: getattr(part, name) for name in names}
            | {k: v for k, v in part.numbers.items() if not isinstance(v, list | dict)}
            for part in self.parts
        ]

    def plot(self) -> Figure:
        """Draw the probability to find each named fault. Needs matplotlib."""
        from specdec_mlx.lab.plots import power_of_check

        return power_of_check(self.parts)

    def to_json(self) -> str:
        """The report as JSON, a line for each entry."""
        names = ("passed", "verdict", "seconds", "settings")
        parts = [asdict(part) | {"passed": part.passed} for part in self.parts]
        report = {name: getattr(self, name) for name in names} | {"parts": parts}
        return json.dumps(report, indent=2) + "\n"

    def __str__(self) -> str:
        """The settings, each part with its numbers, and the verdict."""
        lines = textwrap.wrap(_listed(self.settings), WIDTH)
        for part in self.parts:
            lines += ["", f"{part.status:<15}{part.name}  ({part.seconds:.1f} s)"]
            body = [*textwrap.wrap(part.verdict, WIDTH - MARGIN), *_number_lines(part.numbers)]
            lines += [" " * MARGIN + line for line in body]
        return "\n".join([*lines, "", f"{self.verdict}  ({self.seconds:.0f} s)"])

    def _repr_html_(self) -> str:
        rows = [
            (part.status, part.name, part.verdict, "; ".join(_number_lines(part.numbers)))
            for part in self.parts
        ]
        head = f"<p><strong>{escape(self.verdict)}</strong> ({self.seconds:.0f} s)</p>"
        table = table_html(["status", "part", "verdict", "numbers"], rows, 4)
        return f"{head}{table}<p><small>{escape(_listed(self.settings))}</small></p>"


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{k.replace('_', ' ')} {_number(v)}" for k, v in values.items())


def _number_lines(numbers: dict[str, Any]) -> list[str]:
    lines = []
    for name, value in numbers.items():
        title = f"{name.replace('_', ' ')}:"
        if isinstance(value, dict):
            lines += [title, *(f"  {key:<33} {_number(entry)}" for key, entry in value.items())]
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            lines += [title, *(f"  {_listed(entry)}" for entry in value)]
        else:
            lines.append(f"{title} {_number(value)}")
    return lines


def _number(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_number, value)) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
