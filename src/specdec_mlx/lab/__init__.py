"""A trained pair that ships: a small target and its drafter, real distributions offline.

    target, draft, tokenizer = lab.load_pair()

Both are ordinary mlx-lm model folders in float32, so that the commands take them too, as
`--model $(python -m specdec_mlx.lab target) --draft-model $(python -m specdec_mlx.lab draft)`.
They are kept in the cache; the package has them in 8 bits a weight. They read and write the manner
of Python's own reference manual, one byte a token, and nothing else. `MODEL_CARD.md` beside this
file says what they were trained on and how well they agree; `benchmarks/lab` in the repository
makes them. Heads were trained for the target too, one of each kind:

    drafter = lab.head("mtp", target)
"""

from specdec_mlx.lab.pair import HEADS as HEADS
from specdec_mlx.lab.pair import Pair as Pair
from specdec_mlx.lab.pair import draft_path as draft_path
from specdec_mlx.lab.pair import head as head
from specdec_mlx.lab.pair import head_path as head_path
from specdec_mlx.lab.pair import load_pair as load_pair
from specdec_mlx.lab.pair import target_path as target_path
