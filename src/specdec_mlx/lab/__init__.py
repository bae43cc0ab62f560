"""A trained pair that ships: a small target and its drafter, real distributions offline.

    target, draft, tokenizer = lab.load_pair()
    drafter = lab.head("mtp", target)

They are ordinary mlx-lm model folders in float32 in the cache; the package has them in 8 bits a
weight. They know the manner of Python's own reference manual, one byte a token, and nothing else.
`MODEL_CARD.md` beside this file says how they were trained and how well they agree;
`benchmarks/lab` in the repository makes them.
"""

from specdec_mlx.lab.pair import HEADS as HEADS
from specdec_mlx.lab.pair import Pair as Pair
from specdec_mlx.lab.pair import draft_path as draft_path
from specdec_mlx.lab.pair import head as head
from specdec_mlx.lab.pair import head_path as head_path
from specdec_mlx.lab.pair import load_pair as load_pair
from specdec_mlx.lab.pair import target_path as target_path
