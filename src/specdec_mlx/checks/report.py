"""What a check found, as text, as JSON and in a notebook."""

from __future__ import annotations

import html
import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from specdec_mlx.stats.rows import Row, Rows

Status = Literal["passed", "failed", "not run", "not applicable"]

WIDTH = 100

SURE = 0.9
"""Power from which a fault counts as one that would have been found."""


@dataclass(frozen=True)
class Part:
    """One question of the check, and its answer.

    Attributes:
        name: of the part, and its key in the report.
        status: whether it passed, failed, had not enough to go on, or asks nothing here.
        verdict: one line that names what is wrong and what to do next.
        numbers: what was measured, ready for JSON.
        seconds: how long it took.
    """

    name: str
    status: Status
    verdict: str
    numbers: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """True if nothing is left to be asked here."""
        return self.status in ("passed", "not applicable")


def judge_power(name: str, samples: str, verdict: str, numbers: dict[str, Any]) -> Part:
    """A part that found nothing wrong; not run if it would not have found any named fault.

    Args:
        name: of the part.
        samples: what was drawn, and how many.
        verdict: what they follow.
        numbers: what was measured, with the power for each fault.
    """
    unsure = [fault for fault, power in numbers["power"].items() if power < SURE]
    if len(unsure) == len(numbers["power"]):
        verdict = f"{samples} are too few for any of the named faults to be found."
        return Part(name, "not run", f"{verdict} Give more time (--budget).", numbers)
    found = f"each named fault would have been found, with a chance above {SURE}"
    found = f"not enough to be sure of: {', '.join(unsure)}" if unsure else found
    return Part(name, "passed", f"{verdict}; {found}.", numbers)


@dataclass(frozen=True)
class CheckReport(Rows):
    """All parts of a check.

    Attributes:
        parts: in the order in which they ran.
        settings: what was checked, ready for JSON.
    """

    parts: Sequence[Part]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """True if every part passed; one that had no time did not."""
        return all(part.passed for part in self.parts)

    @property
    def seconds(self) -> float:
        """What the check took."""
        return sum(part.seconds for part in self.parts)

    def __getitem__(self, name: str) -> Part:
        """The part of a name; KeyError lists those there are."""
        for part in self.parts:
            if part.name == name:
                return part
        raise KeyError(f"{name!r}; the parts are {', '.join(part.name for part in self.parts)}")

    @property
    def verdict(self) -> str:
        """One line on the whole."""
        failed = [part.name for part in self.parts if part.status == "failed"]
        skipped = [part.name for part in self.parts if part.status == "not run"]
        if failed:
            return f"FAILED: {', '.join(failed)}."
        if skipped:
            return f"NOT PASSED: {', '.join(skipped)} had not enough to go on. See there."
        return "PASSED: what is emitted is the target's own text."

    def as_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return {
            "passed": self.passed,
            "verdict": self.verdict,
            "seconds": self.seconds,
            "settings": self.settings,
            "parts": [asdict(part) | {"passed": part.passed} for part in self.parts],
        }

    def rows(self) -> list[Row]:
        """A row for each part; each of its single numbers is a column, lists and tables are not."""
        rows = []
        for entry in self.as_dict()["parts"]:
            single = {k: v for k, v in entry["numbers"].items() if not isinstance(v, list | dict)}
            columns = ("name", "status", "passed", "verdict", "seconds")
            row = {name: entry[name] for name in columns} | single
            rows.append({"part": row.pop("name"), **row})
        return rows

    def to_json(self) -> str:
        """JSON text, one line an entry."""
        return json.dumps(self.as_dict(), indent=2) + "\n"

    def __str__(self) -> str:
        """The settings, a line or two a part with its numbers below, and the verdict."""
        lines = _wrapped(_settings_line(self.settings), "") if self.settings else []
        for part in self.parts:
            lines += ["", f"{part.status:<15}{part.name}  ({part.seconds:.1f} s)"]
            lines += _wrapped(part.verdict, " " * 15)
            lines += [f"{' ' * 15}{line}" for line in _number_lines(part.numbers)]
        return "\n".join([*lines, "", f"{self.verdict}  ({self.seconds:.0f} s)"])

    def _repr_html_(self) -> str:
        """A table in the notebook's own colours, each part's numbers to be unfolded."""
        rows = ""
        for part in self.parts:
            numbers = "\n".join(_number_lines(part.numbers))
            status = f"{SIGNS[part.status]} {part.status}"
            cells = [html.escape(text) for text in (status, part.name, part.verdict, numbers)]
            cells[3] = f"<details><summary>numbers</summary><pre>{cells[3]}</pre></details>"
            left = '<td style="text-align:left;vertical-align:top">'
            rows += f"<tr>{''.join(f'{left}{cell}</td>' for cell in cells)}</tr>"
        return (
            f"<div><strong>{html.escape(self.verdict)}</strong> ({self.seconds:.0f} s)<br>"
            f"<small>{html.escape(_settings_line(self.settings))}</small>"
            f"<table><tbody>{rows}</tbody></table></div>"
        )


SIGNS: dict[Status, str] = {"passed": "✓", "failed": "✗", "not run": "…", "not applicable": "–"}


def _settings_line(settings: dict[str, Any]) -> str:
    return ", ".join(f"{k.replace('_', ' ')} {_number(v)}" for k, v in settings.items())


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)


def _number_lines(numbers: dict[str, Any]) -> list[str]:
    """A line a number; tables of named numbers, and lists of them, one line an entry."""
    lines = []
    for name, value in numbers.items():
        label = name.replace("_", " ")
        if isinstance(value, dict):
            lines.append(f"{label}:")
            lines += [f"  {key:<33} {_number(entry)}" for key, entry in value.items()]
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            lines.append(f"{label}:")
            lines += [f"  {_settings_line(entry)}" for entry in value]
        elif isinstance(value, list):
            lines.append(f"{label}: {', '.join(map(_number, value)) or 'none'}")
        else:
            lines.append(f"{label}: {_number(value)}")
    return lines


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
