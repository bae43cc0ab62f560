"""Other packages' prompt lookup, on the same model, prompts and clock.

    python -m benchmarks.peers --peer mlx-dspark --model M   # and the flags of specdec-mlx bench

Both draft by copying from the text, so that they need no checkpoint of their own. They are run as
they come, with their own defaults, and are imported only when asked for: importing either changes
parts of transformers and mlx-lm.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import mlx.nn as nn

from specdec_mlx.lab.bench.peers import PEERS, make_peer
from specdec_mlx.lab.bench.timing import Contender
from specdec_mlx.lab.commands import bench


def main(arguments: Sequence[str] | None = None) -> int:
    """A benchmark with other packages among the contenders."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers")
    bench.add_arguments(parser)
    parser.add_argument("--peer", action="append", required=True, choices=PEERS, help="repeatable")
    args = parser.parse_args(arguments)

    def others(model: nn.Module, tokenizer: Any) -> list[Contender]:
        return [make_peer(name, model, tokenizer, args.temp) for name in args.peer]

    return bench.main(args, others)


if __name__ == "__main__":
    sys.exit(main())
