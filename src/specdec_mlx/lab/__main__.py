"""`python -m specdec_mlx.lab target` prints the target's folder, `draft` the drafter's.

`prompts` prints openings of text that neither was trained on, as prompts for `specdec-mlx bench`.
"""

import argparse
import json

from specdec_mlx.lab import corpus
from specdec_mlx.lab.pair import draft_path, target_path


def main() -> None:
    """Print a folder, or prompts."""
    parser = argparse.ArgumentParser(prog="python -m specdec_mlx.lab", description=__doc__)
    parser.add_argument("which", choices=["target", "draft", "prompts"])
    which = parser.parse_args().which
    if which == "prompts":
        for topic, i, text in corpus.held_out_openings():
            print(json.dumps({"id": f"{topic}/{i}", "category": topic, "prompt": text}))
    else:
        print(target_path() if which == "target" else draft_path())


if __name__ == "__main__":
    main()
