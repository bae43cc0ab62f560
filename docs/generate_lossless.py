"""Rewrite the tables of lossless.md: by enumeration, in seconds; with --measure, both.

A test compares the enumerated ones with the page. The measured table, acceptance by the temperature
of the drafts on the pair in `specdec_mlx.lab`, takes a minute.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "lossless.md"
sys.path.insert(0, str(ROOT / "tests"))

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

import specdec_mlx as sd  # noqa: E402
from exact import (  # noqa: E402
    COIN_RULES,
    DRAFT,
    TARGET,
    WRONG_RULES,
    ByCoupling,
    ByMatch,
    ByRule,
    Deciding,
    Drawn,
    Rounds,
    at_temperature,
    longest_joint,
    up_to,
)
from specdec_mlx.lab import load_pair  # noqa: E402
from specdec_mlx.lab.counterfactual import BY_TOKEN, chances  # noqa: E402
from specdec_mlx.lab.pair import split_topics  # noqa: E402
from specdec_mlx.rules import make_rule  # noqa: E402

ZERO = 1e-12
LOSSY_EXAMPLES = ("lenient:lenience=0.8", "typical:epsilon=0.3,delta=0.6")
NUM_TOKENS = 200
DRAFT_TEMPS = (0.6, 1.0, 1.4)


def ways() -> dict[str, tuple[Deciding, dict]]:
    """Every rule, right and wrong, and how its drafts are made otherwise than declared."""
    rules = {"match": (ByMatch(), {}), "coupled": (ByCoupling(), {})}
    rules |= {name: (ByRule(rule), {}) for name, rule in COIN_RULES.items()}
    rules |= {f"lossy: {spec}": (ByRule(make_rule(spec)), {}) for spec in LOSSY_EXAMPLES}
    rules |= {f"wrong: {name}": (ByRule(rule), {}) for name, rule in WRONG_RULES.items()}
    by_token = ByRule(COIN_RULES["rejection"])
    rules["wrong: declared q other than drawn"] = by_token, {"declared": at_temperature(DRAFT, 0.7)}
    rules["wrong: drawn token dropped"] = by_token, {"dropped_below": 0.25}
    return rules


def distances(deciding: Deciding, how: dict) -> list[float]:
    """Total variation of the text after 1, 2 and 3 rounds of a way to decide."""
    rounds = Rounds(TARGET, Drawn(DRAFT, up_to(2), **how), deciding)
    return [rounds.total_variation(n, longest_joint(3, n, 2)) for n in (1, 2, 3)]


def enumerated() -> str:
    """Table of the largest distance and of accepted tokens on the stated example."""
    lines = ["| rule | distance | kept, K = 1 | K = 3 |", "|---|---|---|---|"]
    for name, (deciding, how) in ways().items():
        largest = max(distances(deciding, how))
        cells = ["< 1e-12" if largest < ZERO else f"{largest:.3f}"]
        for k in (1, 3):
            kept = Rounds(TARGET, Drawn(DRAFT, up_to(k), **how), deciding).expected_accepted()
            cells.append(f"{kept:.3f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def measured() -> str:
    """Table of acceptance by the drafts' temperature, along texts of the lab's target at 1."""
    pair = load_pair()
    rows = {temp: [] for temp in DRAFT_TEMPS}
    for topic in split_topics()[1]:
        prompt = list(topic.encode()[:100])
        items = sd.speculate(
            pair.target, prompt, max_tokens=NUM_TOKENS, sampler=sd.Sampling(temp=1.0), seed=0
        )
        text = mx.array([[*prompt, *[item.token for item in items]]])
        p, q = (law(model, text, 1.0) for model in (pair.target, pair.draft))
        for temp in DRAFT_TEMPS:
            flat = q ** (1 / temp)
            flat /= flat.sum(axis=-1, keepdims=True)
            tokens = np.argmax(flat, axis=-1)
            table = chances(np.vstack([p, p[-1:]]), tokens, flat)
            rows[temp].append(table[:, : len(BY_TOKEN)])
    lines = [f"| draft_temp | {' | '.join(BY_TOKEN)} |", "|---" * (len(BY_TOKEN) + 1) + "|"]
    for temp, tables in rows.items():
        means = np.concatenate(tables).mean(axis=0)
        lines.append(f"| {temp} | {' | '.join(f'{m:.3f}' for m in means)} |")
    return "\n".join(lines)


def law(model, text: mx.array, temp: float) -> np.ndarray:
    """Laws [NUM_TOKENS, V], float64, of the last tokens of a text."""
    logits = model(text)[0, -NUM_TOKENS - 1 : -1]
    return np.exp(np.array(sd.Sampling(temp=temp).log_distribution(logits), np.float64))


def section(page: str, name: str) -> str:
    """What stands between the markers of a table."""
    return page.split(f"<!-- {name} -->\n")[1].split(f"\n<!-- /{name} -->")[0]


def replaced(page: str, name: str, table: str) -> str:
    """The page with another table between its markers."""
    start, end = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
    before, rest = page.split(start)
    return before + start + table + end + rest.split(end)[1]


if __name__ == "__main__":
    page = replaced(PAGE.read_text(encoding="utf-8"), "enumerated", enumerated())
    if "--measure" in sys.argv:
        page = replaced(page, "draft-temp", measured())
    PAGE.write_text(page, encoding="utf-8")
