"""`python -m specdec_mlx.lab target` prints the target's folder, `draft` the drafter's.

`prompts` prints openings of text that neither was trained on, as prompts for `specdec-mlx bench`.
`texts` and `held-out` print what was trained on and what was held out, as `.jsonl` for
`specdec-mlx train`.
"""

import argparse
import json

from specdec_mlx.lab import corpus
from specdec_mlx.lab.pair import draft_path, target_path


def main() -> None:
    """Print a folder, prompts, or texts."""
    parser = argparse.ArgumentParser(prog="python -m specdec_mlx.lab", description=__doc__)
    parser.add_argument("which", choices=["target", "draft", "prompts", "texts", "held-out"])
    which = parser.parse_args().which
    if which == "prompts":
        for topic, i, text in corpus.held_out_openings():
            print(json.dumps({"id": f"{topic}/{i}", "category": topic, "prompt": text}))
    elif which in ("texts", "held-out"):
        for text in corpus.split_topics()[which == "held-out"]:
            print(json.dumps({"text": text}))
    else:
        print(target_path() if which == "target" else draft_path())


if __name__ == "__main__":
    main()
