"""Policies for the draft length, beside each other on the same texts and costs.

    python -m benchmarks.policies texts.json --drafts drafts.json --page docs/policies.md

Each policy is a short program after its public description, knows the true cost of a pass, and
learns from text to text, as a server does. All replay the same recorded texts with the same
drafters, on every curve of chips.tsv. `texts.json` comes from `specdec-mlx bench --json`, and
`drafts.json` from `benchmarks.recorded_drafts`.
"""

from __future__ import annotations

import argparse
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from benchmarks.oracles import length_oracle
from benchmarks.recorded_drafts import load_drafts
from specdec_mlx.contracts import Draft, Drafter, RoundRecord
from specdec_mlx.draft_length.costs import CURVES, MILDEST
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.draft_length.value import DraftLength, Fixed, make_draft_length
from specdec_mlx.drafters.prompt_lookup import PromptLookupDrafter
from specdec_mlx.lab.bench.cost import CostCurve, parse_cost
from specdec_mlx.lab.bench.record import Record, load_record
from specdec_mlx.lab.bench.replay import record_of_sessions, replay_text
from specdec_mlx.lab.prompts import RecordedText

LONGEST = 63  # with the token before it a draft fills a pass of 64; beyond 16 costs go on by tiles
PROBE_AFTER = 16  # rounds without drafting, after which one token is drafted again
DECAY = 0.9  # of moving averages, for each round


class Described(DraftLength):
    """A policy of another project, for one drafter.

    Attributes:
        cost: c(m) over c(1).
        step: cost of one draft token over c(1).
        num_idle: rounds without a draft since the last one.
    """

    def __init__(self, cost: Callable[[int], float], step: float) -> None:
        """Begin without experience."""
        self.cost, self.step, self.num_idle = cost, step, 0

    @abstractmethod
    def best(self) -> int:
        """The length that the policy would choose, from 0 to `LONGEST`."""

    def limit(self, part: str, cheap: bool) -> int:
        """The best length, or one token where nothing was drafted for a while."""
        length = self.best()
        return length if length or self.num_idle < PROBE_AFTER else 1

    def record(self, round_: RoundRecord) -> None:
        """Count rounds without a draft, and learn from the others."""
        self.num_idle = 0 if round_.drafted else self.num_idle + 1
        if round_.drafted:
            self.learn(round_.drafted, round_.accepted)

    def learn(self, drafted: int, accepted: int) -> None:
        """Learn from a draft; by default nothing."""


class Heuristic(Described):
    """transformers' "heuristic" schedule: two more after a full acceptance, else one fewer."""

    length = 5

    def best(self) -> int:
        """The length, at least 1."""
        return self.length

    def learn(self, drafted: int, accepted: int) -> None:
        """Change the length."""
        longer = self.length + 2 if accepted == drafted else self.length - 1
        self.length = min(max(1, longer), LONGEST)


class PerDepth(Described):
    """Expected tokens over cost by depth, as Ollama's MLX runner describes it (pull 16791).

    The chance of each depth is a moving average; the depth with most tokens for its cost is taken.
    """

    def __init__(self, cost: Callable[[int], float], step: float) -> None:
        """Begin with an even chance at each depth."""
        super().__init__(cost, step)
        self.chances = [0.5] * LONGEST

    def best(self) -> int:
        """argmax over d of (1 + a_1 + a_1 a_2 + ... + a_1 ... a_d) / (c(d + 1) + d step)."""
        return most_for_its_cost(self.chances, self.cost, self.step)

    def learn(self, drafted: int, accepted: int) -> None:
        """A depth is judged where all before it were accepted."""
        for depth in range(min(accepted + 1, drafted)):
            self.chances[depth] *= DECAY
            self.chances[depth] += (1 - DECAY) * (depth < accepted)


def most_for_its_cost(
    chances: Sequence[float], cost: Callable[[int], float], step: float, drafted: int | None = None
) -> int:
    """Length with most expected tokens for its cost; 0 is plain decoding.

    chances: of each token, given that all before it were accepted. drafted: tokens that were paid
    for already; None where each is drafted only if it is verified.
    """
    tokens, reach, best, most = 1.0, 1.0, 0, 1.0
    if drafted is not None:
        most = 1.0 / (1.0 + step * drafted)
    for length, chance in enumerate(chances, start=1):
        reach *= chance
        tokens += reach
        rate = tokens / (cost(length + 1) + step * (length if drafted is None else drafted))
        if rate > most:
            best, most = length, rate
    return best


class ByConfidence(Described):
    """The draft model's confidence and profiled costs choose how much is verified (vLLM, DSpark).

    A full draft is made. Its prefix with most expected tokens for its cost is verified, where the
    confidence of a token counts as its chance. A drafter without confidence gets `length` tokens.
    """

    length = 7

    def best(self) -> int:
        """Always the whole draft."""
        return self.length

    def cut(self, part: str, draft: Draft) -> int:
        """The best prefix; at least one token, because the draft was paid for."""
        by_token = [getattr(one, "confidence", None) for one in draft.evidence or ()]
        confidence = [chance for chance in by_token if chance is not None]
        if len(confidence) < len(draft):
            return len(draft)
        return most_for_its_cost(confidence, self.cost, self.step, len(draft))


class Caps(Described):
    """A cap from measured costs and one acceptance rate, as mlx-dspark describes it.

    With acceptance a, a draft of d tokens brings (1 - a^(d + 1)) / (1 - a). The cap is at most 7,
    and the policy parks where no cap beats plain decoding. Look-ups draft up to 32 tokens after
    longer matches; that a draft may be as long as its match is our reading.
    """

    rate = 0.5

    def limit(self, part: str, cheap: bool) -> int:
        """The cap; more may be asked of a look-up, and `cut` decides by the match."""
        length = super().limit(part, cheap)
        return 32 if cheap and length else length

    def cut(self, part: str, draft: Draft) -> int:
        """The cap, or the length of the match if that is longer."""
        return min(len(draft), max(super().limit(part, True), draft.match))

    def best(self) -> int:
        """The cap, or 0."""
        return most_for_its_cost([self.rate] * 7, self.cost, self.step)

    def learn(self, drafted: int, accepted: int) -> None:
        """Move the acceptance rate."""
        tried = min(accepted + 1, drafted)
        self.rate = DECAY * self.rate + (1 - DECAY) * accepted / tried


class Streaks(Described):
    """A depth that follows streaks: two full acceptances add one, two misses in a row take one.

    Our reading of MTPLX's adaptive depth, which was seen described as streaks. The start at 3 and
    the streaks of two are ours.
    """

    depth, hits, misses = 3, 0, 0

    def best(self) -> int:
        """The depth."""
        return self.depth

    def learn(self, drafted: int, accepted: int) -> None:
        """Count the streaks."""
        self.hits = self.hits + 1 if accepted == drafted else 0
        self.misses = self.misses + 1 if accepted == 0 else 0
        if self.hits == 2:
            self.depth, self.hits = min(self.depth + 1, LONGEST), 0
        if self.misses == 2:
            self.depth, self.misses = max(self.depth - 1, 0), 0


Seconds = tuple[float, float]
"""Of a text: without drafts, and with them."""

FIXED = (1, 2, 4, 8)
DESCRIBED: dict[str, type[Described]] = {
    "heuristic (transformers)": Heuristic,
    "expected value by depth (Ollama)": PerDepth,
    "confidence and cost (vLLM)": ByConfidence,
    "caps (mlx-dspark)": Caps,
    "streaks (MTPLX)": Streaks,
}
OF_SESSIONS = ("m1-m2", "m3-max", "m4-pro", "m5-max-27b")
"""Curves for sessions, which are as long as hundreds of prompts."""

AUTO, BEST, ORACLE = "**`auto`**", "best fixed K for each curve", "length oracle"


def scores(
    texts: Sequence[RecordedText], drafter: Drafter, cost: CostCurve, draft_cost: float, **how: Any
) -> dict[str, list[Seconds]]:
    """Modelled seconds of every text, by policy."""
    unit = cost(1)

    def relative(rows: int) -> float:
        return cost(rows) / unit

    tuning = Tuning(CURVES.get(cost.name, MILDEST))
    makers: dict[str, Callable[[], DraftLength]] = {
        f"K = {length}": lambda length=length: Fixed(length)  # type: ignore[misc]
        for length in FIXED
    }
    for name, kind in DESCRIBED.items():
        policy = kind(relative, draft_cost)
        makers[name] = lambda policy=policy: policy  # type: ignore[misc]
    makers[AUTO] = lambda: make_draft_length("auto", tuning)
    found: dict[str, list[Seconds]] = {}
    options: dict[str, Any] = how | {"draft_seconds": draft_cost * unit}
    for name, make in makers.items():
        samples = [replay_text(text, drafter, make(), cost, **options) for text in texts]
        found[name] = [(sample.plain_seconds, sample.decode_seconds) for sample in samples]
    options.pop("max_tokens")
    bounds = [length_oracle(text, drafter, cost, longest=LONGEST, **options) for text in texts]
    found[ORACLE] = [(bound.plain_seconds, bound.decode_seconds) for bound in bounds]
    return found


def table(
    by_curve: dict[str, dict[str, list[Seconds]]], categories: Sequence[str], title: str
) -> list[str]:
    """Rows of policies: mean speed over all curves, worst kind of text, regret to the oracle."""
    kinds = sorted(set(categories))
    curves = list(by_curve)
    names = list(by_curve[curves[0]])

    def mean(curve: str, name: str, kind: str | None = None) -> float:
        seconds = zip(by_curve[curve][name], categories, strict=True)
        plain, drafted = zip(*(s for s, c in seconds if kind in (None, c)), strict=True)
        return float(sum(plain) / sum(drafted))

    fixed = {curve: max(FIXED, key=lambda k: mean(curve, f"K = {k}")) for curve in curves}

    def row(name: str, of: Callable[[str], str]) -> str:
        means = [mean(curve, of(curve)) for curve in curves]
        worst = min((mean(curve, of(curve), k), k, curve) for curve in curves for k in kinds)
        regret = fmean(1 - mean(curve, of(curve)) / mean(curve, ORACLE) for curve in curves)
        losing = sum(m < 0.995 for m in means)
        cells = [f"{fmean(means):.2f}", f"{min(means):.2f}", f"{losing} of {len(curves)}"]
        cells += [f"{worst[0]:.2f} ({worst[1]}, {worst[2]})", f"{regret:.0%}"]
        return f"| {name} | {' | '.join(cells)} |"

    lines = [f"## {title}", ""]
    lines += ["| policy | mean | worst curve | curves that lose | worst kind of text | regret |"]
    lines += ["|---|---|---|---|---|---|"]
    lines += [row(name, lambda _, name=name: name) for name in names]  # type: ignore[misc]
    lines.insert(-1, row(BEST, lambda curve: f"K = {fixed[curve]}"))
    return [*lines, ""]


MARK = "<!-- The rest of this page is written by benchmarks.policies. -->\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay, and print or write the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policies")
    parser.add_argument("texts", type=Path, help="what specdec-mlx bench --json wrote")
    parser.add_argument("--sessions", type=Path, action="append", default=[], help="repeatable")
    parser.add_argument("--drafts", type=Path, help="what benchmarks.recorded_drafts wrote")
    parser.add_argument("--draft-cost", type=float, default=0.1, help="of a draft token, in passes")
    parser.add_argument("--curve", action="append", choices=CURVES, help="repeatable; default all")
    parser.add_argument("--page", type=Path, help="a page whose tables are replaced")
    args = parser.parse_args(arguments)
    record = load_record(args.texts)
    look_up = PromptLookupDrafter()
    parts: list[tuple[str, Record, Drafter, float]] = [
        ("Prompt lookup on 40 prompts", record, look_up, 0.0)
    ]
    if args.drafts:
        title = f"A draft model on 40 prompts, where its token costs {args.draft_cost:g} of a pass"
        parts.append((title, record, load_drafts(args.drafts, record.texts), args.draft_cost))
    for path in args.sessions:
        name = path.stem.replace("_", " ")
        parts.append((f"Prompt lookup on {name}", record_of_sessions(path), look_up, 0.0))
    lines: list[str] = []
    for title, one, drafter, draft_cost in parts:
        how = {"vocab_size": one.settings.vocab_size, "max_tokens": one.settings.max_tokens}
        curves = args.curve or (OF_SESSIONS if one is not record else CURVES)
        bar: Iterable[str] = tqdm(curves, title[:30], leave=False)
        by_curve = {
            name: scores(one.texts, drafter, parse_cost(name, None), draft_cost, **how)
            for name in bar
        }
        rows = table(by_curve, [text.category for text in one.texts], title)
        print("\n".join(rows), flush=True)
        lines += rows
    if args.page:
        words = args.page.read_text("utf-8").partition(MARK)[0] if args.page.exists() else ""
        args.page.write_text(words + MARK + "\n" + "\n".join(lines), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
