"""The record of a benchmark, which `bench --json` writes and `replay` reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from specdec_mlx.bench.cost import CostCurve
from specdec_mlx.bench.identity import Difference
from specdec_mlx.bench.prompts import encode_messages, read_lines
from specdec_mlx.bench.report import record_html
from specdec_mlx.bench.summary import Result
from specdec_mlx.bench.timing import Sample
from specdec_mlx.stats.account import Row, Rows


@dataclass(frozen=True)
class RecordedText:
    """A prompt with its text by plain decoding; any drafter can be scored on it.

    prompt, generated: token ids. session: its conversation, or "". top_tokens: [m, top] the
    target's likeliest at each generated token, or [].
    """

    id: str
    category: str
    prompt: list[int]
    generated: list[int]
    session: str = ""
    top_tokens: list[list[int]] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Record(Rows):
    """A whole benchmark: where and how it ran, and its results by category and contender.

    cost: measured c(m) or None. samples: every generation; not saved.
    """

    command: str
    machine: dict[str, str]
    settings: dict[str, Any]
    texts: list[RecordedText] = field(repr=False)
    cost: CostCurve | None = None
    results: list[Result] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list, repr=False)

    @property
    def categories(self) -> list[str]:
        """Of the texts, in order of appearance."""
        return list(dict.fromkeys(text.category for text in self.texts))

    def live_ratio(self, drafter: str, draft_length: str, category: str) -> float | None:
        """Measured tokens per second over plain decoding's under rule "auto"; None if not run."""
        wanted = [(drafter, draft_length, rule) for rule in ("", "auto")]
        found = (r.ratio for r in self.results if r.key in wanted and r.category == category)
        return next(found, None)

    def rows(self) -> list[Row]:
        """A row for each result, a column for each of its fields."""
        return [asdict(r) | {"accepted_share": r.accepted_share} for r in self.results]

    def _repr_html_(self) -> str:
        return record_html(self)


def save_record(record: Record, path: Path | str) -> None:
    """Write JSON: one key a field. Samples go without their tokens, which `texts` has."""
    data = asdict(record)
    for sample in data["samples"]:
        sample["num_tokens"] = len(sample.pop("tokens"))
    Path(path).write_text(json.dumps(data, indent=1), encoding="utf-8")


def load_record(path: Path | str) -> Record:
    """Read what `save_record` wrote, without the samples. Raises ValueError for another file."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        return Record(
            command=data["command"],
            machine=data["machine"],
            settings=data["settings"],
            texts=[RecordedText(**text) for text in data["texts"]],
            cost=read_cost(data["cost"]),
            results=[read_result(result) for result in data["results"]],
            differences=[Difference(**difference) for difference in data["differences"]],
        )
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        what = f"{path} is no record of a benchmark ({error!r})"
        raise ValueError(f"{what}. Make one with specdec-mlx bench --json FILE.") from error


def read_result(data: dict[str, Any]) -> Result:
    """A result as JSON has it; fields of older versions are left out."""
    return Result(**{f.name: data[f.name] for f in fields(Result) if f.name in data})


def read_cost(data: dict[str, Any] | None) -> CostCurve | None:
    """A cost curve as JSON has it; None if it was not measured."""
    if data is None:
        return None
    points = {name: tuple(values) for name, values in data.items() if name != "name"}
    return CostCurve(str(data["name"]), **points)


def read_sessions(path: Path | str, tokenizer: Any) -> list[RecordedText]:
    """The texts of a session file in its order; ValueError with the number of a wrong line."""

    def texts_of(row: Any, number: int) -> Iterator[RecordedText]:
        name, category = str(row.get("id", number)), str(row.get("category", "sessions"))
        if "messages" in row:
            said = [{"role": m["role"], "content": m["content"] or ""} for m in row["messages"]]
            answers, session = list(_answers(said)), name
        else:
            prompt = {"role": "user", "content": row["turns"][0]}
            answers, session = [([prompt], str(row["reference"]))], str(row.get("session", number))
        end = getattr(tokenizer, "eos_token_id", None)
        for turn, (before, answer) in enumerate(answers):
            own = name if len(answers) == 1 else f"{name}/{turn}"
            tokens = list(tokenizer.encode(answer, add_special_tokens=False))
            tokens += [] if end is None else [int(end)]
            yield RecordedText(own, category, encode_messages(tokenizer, before), tokens, session)

    texts = read_lines(path, texts_of, "`messages` (role and content), or `turns` and `reference`")
    if not texts:
        raise ValueError(f"{path} has no assistant message and no reference. Give another file.")
    return texts


def _answers(said: Sequence[dict[str, str]]) -> Iterator[tuple[Sequence[dict[str, str]], str]]:
    """Each message of the assistant, with all messages before it."""
    for i, message in enumerate(said):
        if message["role"] == "assistant" and i and message["content"]:
            yield said[:i], message["content"]
