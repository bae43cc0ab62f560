"""Flags that other programs have for speculation, and what they are called here."""

from __future__ import annotations

from collections.abc import Sequence

LENGTH = "--draft-length N"
PAYS = "--draft-length auto, which drafts no more than pays"
MODEL = "--draft-model MODEL"
LOOKUP = "--drafter prompt-lookup"

FLAGS = {
    "llama.cpp": {
        "--draft": LENGTH,
        "--draft-n": LENGTH,
        "--draft-max": LENGTH,
        "--draft-min": PAYS,
        "--draft-n-min": PAYS,
        "--draft-p-min": PAYS,
        "--model-draft": MODEL,
        "--lookup-cache-static": "--drafter ngram",
        "--lookup-cache-dynamic": "--drafter ngram",
        "--spec-type": "--drafter NAME",
        "--spec-draft-model": MODEL,
        "--spec-draft-n-max": LENGTH,
        "--spec-draft-n-min": PAYS,
        "--spec-draft-p-min": PAYS,
    },
    "transformers": {
        "--prompt-lookup-num-tokens": f"{LOOKUP} {LENGTH}",
        "--max-matching-ngram-size": f"{LOOKUP}:max_ngram=N",
        "--assistant-model": MODEL,
        "--num-assistant-tokens": LENGTH,
        "--assistant-confidence-threshold": PAYS,
    },
    "vLLM": {
        "--speculative-model": MODEL,
        "--num-speculative-tokens": LENGTH,
        "--ngram-prompt-lookup-max": f"{LOOKUP}:max_ngram=N",
        "--ngram-prompt-lookup-min": f"{LOOKUP}:min_ngram=N",
        "--spec-decoding-acceptance-method": "--rule NAME",
    },
    "SGLang": {
        "--speculative-algorithm": "--drafter NAME",
        "--speculative-draft-model-path": MODEL,
        "--speculative-num-draft-tokens": LENGTH,
        "--speculative-num-steps": LENGTH,
    },
    "mlx-lm": {"--num-draft-tokens": LENGTH},
}
"""Whose flag it is: the flag, and what to write here. `mlx-lm`'s is for commands that lack it."""

ANY_OTHER = "--drafter NAME, --draft-model MODEL and --draft-length N"


def refusal(unknown: Sequence[str]) -> str:
    """What to say about arguments that a command does not know.

    Args:
        unknown: as they were typed, values included.

    Returns:
        One sentence: our flag for the first one that is known elsewhere, or argparse's own words.
    """
    for argument in unknown:
        flag = argument.partition("=")[0].replace("_", "-")
        for program, flags in FLAGS.items():
            if flag in flags:
                name = argument.partition("=")[0]
                return f"{name} is a flag of {program}; here it is {flags[flag]}"
        if flag.startswith("--spec"):
            return f"{flag} is not known here; speculation is set by {ANY_OTHER}"
    return f"unrecognized arguments: {' '.join(unknown)}"
