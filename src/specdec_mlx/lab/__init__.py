"""A trained pair that ships: a small target and its drafter, real distributions offline.

    target, draft, tokenizer = lab.load_pair()
    drafter = lab.head("mtp", target)

They are ordinary mlx-lm model folders in float32 in the cache; the package has them in 8 bits a
weight. They know the manner of Python's own reference manual, one byte a token, and nothing else.
`MODEL_CARD.md` beside this file says how they were trained and how well they agree;
`benchmarks/lab` in the repository makes them.
"""

from specdec_mlx.lab.demo_model import demo_model_path
from specdec_mlx.lab.pair import (
    HEADS,
    Pair,
    draft_path,
    head,
    head_path,
    load_pair,
    target_path,
)

__all__ = [
    "HEADS",
    "Pair",
    "demo_model_path",
    "draft_path",
    "head",
    "head_path",
    "load_pair",
    "target_path",
]
