"""Draw the figures of the documentation from the committed benchmark: `make figures`.

    python docs/figures.py              # docs/data/benchmark.json -> docs/figures/*.png
    python docs/figures.py RECORD.json  # first takes over what a new `bench --json` wrote

Of a record only what is drawn is kept: results, machine, settings and costs, no texts.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from specdec_mlx import plots
from specdec_mlx.bench.cost import CostCurve
from specdec_mlx.bench.summary import Result

DOCS = Path(__file__).parent
DATA = DOCS / "data" / "benchmark.json"
FIGURES = DOCS / "figures"
KEPT = ("machine", "settings", "cost", "results")


def take_over(record: Path) -> None:
    """Keep of a record what may be committed and is drawn."""
    data = json.loads(record.read_text(encoding="utf-8"))
    kept = {key: data[key] for key in KEPT}
    DATA.parent.mkdir(exist_ok=True)
    DATA.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def figures(data: dict[str, Any]) -> dict[str, Any]:
    """File name -> figure."""
    drawn: dict[str, Any] = {
        "speed_by_text": plots.speed_by_text([Result(**r) for r in data["results"]])
    }
    if data["cost"] is not None:
        cost = data["cost"]
        curve = CostCurve(cost["name"], tuple(cost["positions"]), tuple(cost["seconds"]))
        drawn["cost"] = plots.cost_curve(curve)
    return drawn


def digest() -> str:
    """Fingerprint of the data; a figure carries that of what it was drawn from."""
    return hashlib.sha256(DATA.read_bytes()).hexdigest()


def main() -> None:
    """Take a record over if one is given, and draw."""
    if len(sys.argv) > 1:
        take_over(Path(sys.argv[1]))
    FIGURES.mkdir(exist_ok=True)
    for name, plot in figures(json.loads(DATA.read_text(encoding="utf-8"))).items():
        metadata = {"Source": digest()}
        plot.savefig(FIGURES / f"{name}.png", dpi=160, facecolor="white", metadata=metadata)


if __name__ == "__main__":
    main()
