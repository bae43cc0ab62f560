"""What is believed of look-ups before anything was learned, fitted to recorded texts.

Made by `python -m specdec_mlx.bench.prior`; see there for what is fitted, and to what.
"""

from __future__ import annotations

LOOK_UPS: dict[str, dict[str, tuple[float, ...]]] = {
    "PromptLookupDrafter": {
        "match": (0.0, -0.45, -0.26, 0.1, 0.12, 0.12, 0.19, 0.62, 1.13, 1.6, 2.0),
        "position": (0.42, 0.35, 0.46, 0.13, 0.3, 1.2, 1.5),
        "recent": (0.07, 0.18, 0.13, 0.2, 0.8, 1.0),
        "after one": (0.0, 0.02, 0.96, 1.02, -0.01, -0.49),
        "after two": (0.0, 0.64, 1.34, 0.44, -0.09, -0.82),
    },
    "NGramDrafter": {
        "match": (0.0, -1.51, -1.36, 0.08, -0.35, 0.75, 1.07, 2.04, 0.0, 0.0, 0.0),
        "position": (0.2, 0.25, 0.27, 0.0, 0.0, 0.0, 0.0),
        "recent": (-0.54, -0.17, -0.13, 0.37, 0.51, 0.68),
        "after one": (0.0, 0.45, 0.74, 0.0, -0.2, -0.27),
        "after two": (0.08, 1.5, 1.43, -0.72, -0.73, -0.85),
    },
    "SuffixDrafter": {
        "match": (0.0, -1.07, -0.48, -0.12, -0.04, -0.55, -0.1, -0.27, 0.96, 1.11, 1.85),
        "position": (-0.55, -0.33, -0.36, -0.12, 0.13, 1.16, 1.37),
        "recent": (-0.54, -0.29, -0.01, 0.48, 0.87, 0.78),
        "after one": (0.0, 0.16, 0.68, 0.27, 0.18, 0.01),
        "after two": (0.0, 0.0, 1.38, 0.92, -0.27, -0.73),
    },
}
"""Log-odds by the drafter's class, feature and class of the feature."""
