"""`python -m specdec_mlx.lab NAME`: folders and texts of the trained pair.

`target`, `draft`, `mtp`, `eagle3`, `medusa` and `exit` print folders. `prompts` prints openings for
`specdec-mlx bench`, on which neither model was trained. `texts` and `held-out` print the training
texts and the held-out texts as `.jsonl` for `specdec-mlx train`.
"""

import argparse
import json
import signal

from specdec_mlx.lab import pair
from specdec_mlx.lab.pair import HEADS, draft_path, head_path, target_path

FOLDERS = {"target": target_path, "draft": draft_path}
TEXTS = ("texts", "held-out")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m specdec_mlx.lab", description=__doc__)
    parser.add_argument("which", choices=[*FOLDERS, *HEADS, *TEXTS, "prompts"])
    which = parser.parse_args().which
    if which == "prompts":
        for topic, i, text in pair.held_out_openings():
            print(json.dumps({"id": f"{topic}/{i}", "category": topic, "prompt": text}))
    elif which in TEXTS:
        for text in pair.split_topics()[TEXTS.index(which)]:
            print(json.dumps({"text": text}))
    else:
        print(head_path(which) if which in HEADS else FOLDERS[which]())


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` is no error
    main()
