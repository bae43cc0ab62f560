"""Account of a generation: counts, histogram and seconds, made from round records only."""

from __future__ import annotations

import csv
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec_mlx.contracts import RoundRecord
from specdec_mlx.errors import MissingPackageError
from specdec_mlx.stats.theory import acceptance_from_counts, expected_tokens

if TYPE_CHECKING:
    from pandas import DataFrame

Row = dict[str, Any]  # column -> value; a column that a row lacks is empty


class Rows:
    """A result that is also a table."""

    def rows(self) -> Sequence[Row]:
        """The table, one dict for each row."""
        raise NotImplementedError  # no ABC: records of msgspec inherit it, and have a metaclass

    def to_csv(self, path: Path | str) -> None:
        """Write the table as UTF-8, comma-separated, with a header; None becomes empty."""
        rows = self.rows()
        with Path(path).open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns(rows))
            writer.writeheader()
            writer.writerows(rows)

    def to_pandas(self) -> DataFrame:
        """The table as a DataFrame; raises MissingPackageError without pandas."""
        try:
            from pandas import DataFrame
        except ImportError as error:
            what = "to_pandas() needs pandas, which is not installed. Use: pip install pandas, or "
            raise MissingPackageError(f"{what}to_csv(path), which needs nothing.") from error
        rows = self.rows()
        return DataFrame(list(rows), columns=columns(rows))


def columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


@dataclass
class SpeculationStats(Rows):
    """Running account of one generation. Every response has the same object, always up to date.

    It counts complete rounds. Identities: `emitted + cut = accepted + target_passes`, and the
    histogram sums to `target_passes`.

    Attributes:
        target_passes: passes after the prefill, one for each round.
        ahead: of these, launched before the token before them was read.
        fed: positions computed.
        replayed: of these, computed again for recurrent caches.
        drafted, accepted: draft tokens.
        cut: tokens verified beyond max_tokens.
        ties: rounds whose last token a further, plain pass decided (see `Options.ties`).
        rounds: (drafted, accepted) of each round.
        by_drafter: key -> [drafted, accepted].
        decode_seconds: of all rounds except the first.
        plain_seconds, num_plain: of rounds without a draft that took one pass.
        prefill_seconds, draft_seconds, verify_seconds, other_seconds: host seconds for the prompt,
            for proposing, for launching and waiting (lazy draft steps included), and for the rest
            without the caller's time.
        why_none: reason for the latest round without a draft.
        num_unnamed: tokens in the caller's caches that drafters do not know.
    """

    target_passes: int = 0
    ahead: int = 0
    fed: int = 0
    replayed: int = 0
    drafted: int = 0
    accepted: int = 0
    cut: int = 0
    ties: int = 0
    rounds: list[tuple[int, int]] = field(default_factory=list)
    by_drafter: dict[str, list[int]] = field(default_factory=dict)
    decode_seconds: float = 0.0
    plain_seconds: float = 0.0
    num_plain: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    other_seconds: float = 0.0
    why_none: str = ""
    num_unnamed: int = 0

    def record(self, round_: RoundRecord) -> None:
        # The first round also reads the end of the prompt.
        if self.target_passes:
            self.decode_seconds += round_.seconds
            if not round_.drafted and round_.steady:
                self.plain_seconds += round_.seconds
                self.num_plain += 1
        self.target_passes += 1
        self.ahead += round_.ahead
        self.fed += round_.fed
        # A round needs one pending token and the draft. Further positions were fed before.
        self.replayed += round_.fed - round_.drafted - 1
        self.drafted += round_.drafted
        self.accepted += round_.accepted
        # A round verifies accepted + 1 tokens. Those that were not emitted fell to max_tokens.
        self.ties += round_.tied
        self.cut += round_.accepted + 1 - round_.emitted
        self.draft_seconds += round_.draft_seconds
        self.verify_seconds += round_.verify_seconds
        self.rounds.append((round_.drafted, round_.accepted))
        if round_.drafted:
            counts = self.by_drafter.setdefault(round_.part, [0, 0])
            counts[0] += round_.drafted
            counts[1] += round_.accepted

    @property
    def accept_histogram(self) -> list[int]:
        """[n] rounds that accepted exactly n draft tokens."""
        counts = Counter(accepted for _, accepted in self.rounds)
        return [counts[n] for n in range(max(counts, default=-1) + 1)]

    @property
    def drafted_at(self) -> list[int]:
        """[i] rounds that drafted position i of the draft."""
        drafted = [drafted for drafted, _ in self.rounds]
        return _num_above(drafted, max(drafted, default=0))

    @property
    def accepted_at(self) -> list[int]:
        """[i] rounds that accepted position i, with the length of `drafted_at`."""
        return _num_above([accepted for _, accepted in self.rounds], len(self.drafted_at))

    @property
    def emitted(self) -> int:
        """Tokens produced: accepted tokens and one for each pass, without the cut tokens."""
        return self.accepted + self.target_passes - self.cut

    @property
    def tokens_per_pass(self) -> float:
        """Tokens emitted per pass of the target, ties included; plain decoding has 1."""
        return self.emitted / (self.target_passes + self.ties) if self.target_passes else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Likeliest α (Leviathan et al. 2023, definition 3.1): accepted of judged tokens."""
        # A round judges draft tokens only up to its first rejection, so that each round has at most
        # one.
        rejections = sum(accepted < drafted for drafted, accepted in self.rounds)
        return acceptance_from_counts(self.accepted, rejections)

    @property
    def accepted_share(self) -> float:
        """Share of all drafted tokens that was accepted, at most the acceptance rate."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """[i] share of the rounds that drafted position i in which it was accepted."""
        return [a / d for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def observed_speedup(self) -> float | None:
        """Tokens a second, relative to plain rounds. None without plain rounds and drafts."""
        return self._speedup(sum(accepted + 1 for _, accepted in self.rounds[1:]))

    @property
    def expected_speedup(self) -> float | None:
        """Speedup if every draft token were accepted independently with chance α."""
        alpha, lengths = (self.acceptance_rate, Counter(drafted for drafted, _ in self.rounds[1:]))
        tokens = (expected_tokens(alpha, drafted) * num for drafted, num in lengths.items())
        return self._speedup(sum(tokens))

    def _speedup(self, tokens: float) -> float | None:
        if not (self.drafted and self.num_plain and self.decode_seconds):
            return None
        return tokens * self.plain_seconds / self.num_plain / self.decode_seconds

    def rows(self) -> list[Row]:
        """One row for each round."""
        rows: list[Row] = [
            {"round": i, "drafted": drafted, "accepted": accepted, "emitted": accepted + 1}
            for i, (drafted, accepted) in enumerate(self.rounds)
        ]
        if rows:
            # Only the last round can be cut.
            rows[-1]["emitted"] -= self.cut
        return rows

    def as_dict(self) -> dict[str, Any]:
        """All counts and rates, ready for JSON."""
        names = ["emitted", "accept_histogram", "acceptance_by_position", "tokens_per_pass"]
        names += ["acceptance_rate", "accepted_share", "observed_speedup", "expected_speedup"]
        numbers = {name: x for name, x in vars(self).items() if isinstance(x, int | float)}
        return {
            **numbers,
            "by_drafter": {key: list(counts) for key, counts in self.by_drafter.items()},
            **{name: getattr(self, name) for name in names},
        }

    def __str__(self) -> str:
        share = f" ({self.accepted_share:.0%})" if self.drafted else ""
        counts = self.by_drafter.items()
        shares = [f"{kind_of(key)} {accepted} of {drafted}" for key, (drafted, accepted) in counts]
        by_drafter = "\naccepted of drafted: " + ", ".join(shares) if len(shares) > 1 else ""
        if self.why_none and not self.drafted:
            by_drafter = f"\nnothing drafted: {self.why_none}"
        if self.ties:
            by_drafter += f"\nnear ties decided by a plain pass: {self.ties}"
        if self.num_unnamed:
            unknown = f"the caches hold {self.num_unnamed} tokens that nobody named"
            by_drafter += f"\nhistory unknown: {unknown}"
        return (
            f"{self.emitted} tokens in {self.target_passes} target passes: "
            f"{self.tokens_per_pass:.2f} tokens per pass, "
            f"accepted {self.accepted} of {self.drafted} drafted{share}\n"
            f"drafting {self.draft_seconds:.2f} s, verifying {self.verify_seconds:.2f} s, "
            f"prefill {self.prefill_seconds:.2f} s, elsewhere {self.other_seconds:.2f} s"
            f"{by_drafter}"
        )

    def __repr__(self) -> str:
        return f"<SpeculationStats: {str(self).splitlines()[0]}>"

    def _repr_html_(self) -> str:
        views: Any = import_module("specdec_mlx.views.html")
        return str(views.stats_html(self))


def kind_of(key: str) -> str:
    return re.split(r"[^\w.]", key, maxsplit=1)[0].rpartition(".")[2]


def _num_above(numbers: Sequence[int], length: int) -> list[int]:
    """[i] number of numbers above i, for i < length."""
    ordered = sorted(numbers)
    return [len(ordered) - bisect_right(ordered, i) for i in range(length)]
