"""What `bench --json` writes and `replay` reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specdec_mlx.bench.cost import CostCurve
from specdec_mlx.bench.identity import Difference
from specdec_mlx.bench.summary import Result
from specdec_mlx.bench.timing import Sample


@dataclass(frozen=True)
class Text:
    """A recorded text. prompt: [n] token ids. generated: [m] what plain decoding made of it.

    draft-independent at temperature 0, so that any drafter can be scored on it afterwards.
    """

    id: str
    category: str
    prompt: list[int]
    generated: list[int]


@dataclass(frozen=True)
class Record:
    """A whole benchmark: where and how it ran, and what came of it.

    command: as typed. settings: model, temp, max_tokens, repeats, seed, vocab_size. cost: measured
    c(m), None where it was not measured.
    """

    command: str
    machine: dict[str, str]
    settings: dict[str, Any]
    texts: list[Text]
    cost: CostCurve | None = None
    results: list[Result] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    @property
    def categories(self) -> list[str]:
        """Of the texts, in order of appearance."""
        return list(dict.fromkeys(text.category for text in self.texts))

    def live_ratio(self, drafter: str, draft_length: str, category: str) -> float | None:
        """The measured ratio to plain decoding, if that was run; with rules, under "auto"."""
        wanted = drafter, draft_length, category
        for result in self.results:
            own = result.drafter, result.draft_length, result.category
            if own == wanted and result.rule in ("", "auto"):
                return result.ratio
        return None

    def _repr_html_(self) -> str:
        from specdec_mlx.notebook.views import record_html

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
            texts=[Text(**text) for text in data["texts"]],
            cost=_cost(data["cost"]),
            results=[Result(**result) for result in data["results"]],
            differences=[Difference(**difference) for difference in data["differences"]],
        )
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} is no record of a benchmark ({error!r}). Make one with specdec-mlx bench "
            "--json FILE."
        ) from error


def _cost(data: dict[str, Sequence[Any]] | None) -> CostCurve | None:
    if data is None:
        return None
    return CostCurve(str(data["name"]), tuple(data["positions"]), tuple(data["seconds"]))
