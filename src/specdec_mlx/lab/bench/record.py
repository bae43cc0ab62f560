"""The record of a benchmark: a file that `bench --json` writes and `replay` reads, and tables."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx.utils import tree_flatten
from msgspec import Struct
from msgspec.structs import asdict

from specdec_mlx.cli.blas import blas_name
from specdec_mlx.files import parse, read_text
from specdec_mlx.lab.bench.cost import CostCurve
from specdec_mlx.lab.bench.summary import Difference, Result
from specdec_mlx.lab.bench.timing import Sample, Settings
from specdec_mlx.lab.prompts import RecordedText, encode_messages, read_lines
from specdec_mlx.lab.tables import Columns, Table, markdown_table, or_dash, table_html, table_of
from specdec_mlx.stats.account import Row, Rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Record(Struct, Rows, frozen=True, forbid_unknown_fields=True):
    """A whole benchmark, live or modelled.

    Attributes:
        command: the command line.
        machine: hardware and versions.
        settings: of all contenders.
        texts: prompts, and their texts by plain decoding.
        cost: measured c(m), or None.
        results: by category and contender.
        differences: places where texts differ from plain decoding.
        samples: every run.
    """

    command: str
    machine: dict[str, str]
    settings: Settings
    texts: list[RecordedText]
    cost: CostCurve | None = None
    results: list[Result] = []
    differences: list[Difference] = []
    samples: list[Sample] = []

    @property
    def categories(self) -> list[str]:
        return list(dict.fromkeys(text.category for text in self.texts))

    def live_ratio(self, drafter: str, draft_length: str, category: str) -> float | None:
        """Measured speed under rule "auto" relative to plain decoding, or None."""
        # Records of plain decoding have no rule.
        wanted = [(drafter, draft_length, rule, "") for rule in ("", "auto")]
        ratios = (r.ratio for r in self.results if r.key in wanted and r.category == category)
        return next(ratios, None)

    def rows(self) -> list[Row]:
        return [asdict(r) | {"accepted_share": r.accepted_share} for r in self.results]

    def plot(self) -> Figure:
        """Draw the speed on each kind of text. Needs matplotlib."""
        plots: Any = import_module("specdec_mlx.lab.plots")
        figure: Figure = plots.speed_by_text(self.results)
        return figure

    def speeds(self) -> Table:
        return results_table([r for r in self.results if not r.session], SPEEDS)

    def __repr__(self) -> str:
        return markdown_table(*self.speeds())

    def _repr_html_(self) -> str:
        notes = f"{escape(SPEED_NOTE)}<br><small>{escape(_listed(self.machine))}</small>"
        return f"{table_html(*self.speeds())}<p>{notes}</p>"


def save_record(record: Record, path: Path | str) -> None:
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))


def load_record(path: Path | str) -> Record:
    """Read a file of `save_record`. ValueError says what is wrong in another file."""
    text = read_text(path)
    try:
        return parse(text, Record)
    except ValueError as error:
        raise ValueError(
            f"{path} is no record of a benchmark: {error}. Make one with "
            "specdec-mlx bench --json FILE."
        ) from error


def read_sessions(path: Path | str, tokenizer: Any) -> list[RecordedText]:
    """The texts of a session file, in order. ValueError has the number of a wrong line."""

    def texts_of(row: Any, number: int) -> Iterator[RecordedText]:
        name, category = (str(row.get("id", number)), str(row.get("category", "sessions")))
        messages, session = row.get("messages"), name
        if messages is None:
            session = row.get("session", number)
            messages = [{"role": "user", "content": row["turns"][0]}]
            messages += [{"role": "assistant", "content": row["reference"]}]
        messages = [{"role": m["role"], "content": m["content"] or ""} for m in messages]
        # An empty answer, such as a call of a tool, has no text to replay.
        answers = [
            i for i, m in enumerate(messages) if i and m["role"] == "assistant" and m["content"]
        ]
        end = getattr(tokenizer, "eos_token_id", None)
        for turn, i in enumerate(answers):
            text_id = name if len(answers) == 1 else f"{name}/{turn}"
            tokens = list(tokenizer.encode(messages[i]["content"], add_special_tokens=False))
            tokens += [] if end is None else [int(end)]
            prompt = encode_messages(tokenizer, messages[:i])
            yield RecordedText(text_id, category, prompt, tokens, str(session))

    texts = read_lines(path, texts_of, "`messages` (role and content), or `turns` and `reference`")
    if not texts:
        raise ValueError(f"{path} has no assistant message and no reference. Give another file.")
    return texts


SPEED_NOTE = (
    "ratio: tokens per second over all texts, relative to plain mlx-lm, prefill and first round "
    "left out, with a 95% bootstrap interval over texts; end to end: prefill included; tok/s: all "
    "tokens over all seconds; accepted: of the drafted tokens."
)
DIFFERENCES_NOTE = (
    "Texts that differ; excused: its own top two are a near tie there, no further apart than "
    "passes over several positions move logits by rounding (specdec-mlx probe)."
)
ROUNDS_NOTE = (
    "drafting: share of target passes that verified a draft (the others are plain steps); ties: "
    "plain passes that decided near ties (--ties plain); first: "
    "time to the first token, in seconds and over plain mlx-lm's (1.020: 2% later)."
)


def _listed(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _identical(result: Result) -> str:
    excused = f" (+{result.excused})" if result.excused else ""
    return "-" if result.identical is None else f"{result.identical}{excused} of {result.texts}"


SPEEDS: Columns = {
    "ratio": lambda r: or_dash(r.ratio),
    "95%": lambda r: f"{or_dash(r.ratio_low)} to {or_dash(r.ratio_high)}",
    "end to end": lambda r: or_dash(r.end_to_end_ratio),
    "tok/s": lambda r: or_dash(r.total_tokens_per_second, 1),
    "tok/pass": lambda r: f"{r.tokens_per_pass:.2f}",
    "accepted": lambda r: f"{r.accepted} of {r.drafted}" if r.drafted else "-",
    "identical": _identical,
    "live": lambda r: or_dash(r.live_ratio),
}
ROUNDS: Columns = {
    "drafting": lambda r: f"{r.drafting_share:.2f}",
    "ties": lambda r: f"{r.ties}" if r.ties else "-",
    "peak GB": lambda r: f"{r.peak_memory_gb:.2f}",
    "first s": lambda r: f"{r.first_token_seconds:.3f}",
    "of plain's": lambda r: or_dash(r.first_token_ratio, 3),
}


def format_record(record: Record) -> str:
    parts = [
        f"    {record.command}\n\n{_listed(record.machine)}\n\n{_listed(asdict(record.settings))}",
        markdown_table(*record.speeds()),
        SPEED_NOTE,
        markdown_table(*results_table(record.results, ROUNDS)),
        ROUNDS_NOTE,
    ]
    if record.differences:
        parts += [DIFFERENCES_NOTE, "\n".join(map(_differing, record.differences))]
    return "\n\n".join([*parts, *([format_cost(record.cost)] if record.cost else [])])


def _differing(place: Difference) -> str:
    whose = ", ".join(filter(None, (place.id, *place.key)))
    where = f"repeat {place.repeat}, token {place.position}, top-two gap {place.top_two_gap:.2e}"
    return f"- {whose}: {where}, {'excused' if place.excused else 'NOT excused'}"


def results_table(results: Sequence[Result], columns: Columns, category: str = "category") -> Table:
    """A row for each result. Columns without any value are left out.

    Args:
        results: rows of the table.
        columns: columns after drafter, draft length and rule.
        category: heading of the column of categories.
    """
    rules = {r.rule for r in results if r.rule}
    whose: Columns = {
        category: lambda r: r.category,
        "drafter": lambda r: r.drafter,
        "K": lambda r: r.draft_length or "-",
        "rule": lambda r: (len(rules) > 1 and r.rule) or "-",
        "kernels": lambda r: r.kernels or "-",
    }
    return table_of(results, whose, columns)


def format_cost(curve: CostCurve) -> str:
    header = ["positions", *(str(m) for m in curve.positions)]
    rows = [
        ["ms", *(f"{1e3 * s:.1f}" for s in curve.seconds)],
        ["relative", *(f"{x:.2f}" for x in curve.relative())],
    ]
    if curve.low:
        one = curve.seconds[0]
        intervals = zip(curve.low, curve.high, strict=True)
        rows.append(["95%", *(f"{low / one:.2f} to {high / one:.2f}" for low, high in intervals)])
    return f"A pass of the target, {curve.name}:\n\n{markdown_table(header, rows, 1)}"


def describe_machine() -> dict[str, str]:
    num_ranks = mx.distributed.init().size()
    info = Path("/proc/cpuinfo")
    cpu_name = re.search(
        r"model name\s*: (.+)", info.read_text(encoding="utf-8") if info.exists() else ""
    )
    return {
        # Records of a single machine do not mention ranks.
        **({"ranks": str(num_ranks)} if num_ranks > 1 else {}),
        "platform": platform.platform(),
        "processor": cpu_name[1] if cpu_name else platform.processor() or platform.machine(),
        "cores": str(os.cpu_count()),
        "load": " ".join(f"{x:.2f}" for x in os.getloadavg()),
        "device": str(mx.default_device()),
        "blas": blas_name(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("mlx", "mlx-lm", "specdec-mlx")},
    }


def describe_dtype(model: nn.Module) -> str:
    values = (value for _, value in tree_flatten(model.parameters()))
    floating = (value for value in values if mx.issubdtype(value.dtype, mx.floating))
    dtype = str(max(floating, key=lambda value: value.size).dtype).removeprefix("mlx.core.")
    bits = {module.bits for module in model.modules() if hasattr(module, "bits")}
    return ", ".join([dtype, *(f"{bits} bits" for bits in sorted(bits))])
