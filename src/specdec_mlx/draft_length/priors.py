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
        "match": (0.0, -1.82, -1.22, 0.12, -0.56, 1.08, 1.13, 2.04, 0.0, 0.0, 0.0),
        "position": (0.36, 0.27, 0.15, 0.0, 0.0, 0.0, 0.0),
        "recent": (-0.79, -0.56, -0.14, 0.59, 0.71, 0.96),
        "after one": (0.0, 0.47, 0.59, 0.13, -0.15, -0.28),
        "after two": (0.41, 1.56, 1.55, -1.12, -0.72, -0.9),
    },
    "SuffixDrafter": {
        "match": (0.0, -1.12, -0.53, -0.01, -0.1, -0.4, -0.07, -0.5, 1.13, 0.96, 1.95),
        "position": (-0.36, -0.23, -0.29, -0.12, -0.04, 1.09, 1.24),
        "recent": (-0.42, -0.14, 0.02, 0.4, 0.62, 0.81),
        "after one": (0.0, 0.44, 1.27, 0.3, -0.39, -0.32),
        "after two": (0.0, 0.0, 1.01, 0.62, -0.06, -0.27),
    },
}
"""Log-odds by the drafter's class, feature and class of the feature."""
