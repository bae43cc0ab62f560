"""What the demo shows: its texts, and who writes them.

An edit and a summary, which quote their prompts; a chat, which quotes nothing; and a text by the
trained pair that ships.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from specdec_mlx.bench.contenders import Contender, Emitted, ours, plain
from specdec_mlx.bench.prompts import Task, encode_chat
from specdec_mlx.cli.plan import Scene, measure_pace
from specdec_mlx.draft_length.store import tuning_for
from specdec_mlx.drafters.model import ModelDrafter
from specdec_mlx.drafters.ngram import NGramDrafter
from specdec_mlx.drafters.prompt_lookup import PromptLookupDrafter
from specdec_mlx.lab.corpus import held_out_openings
from specdec_mlx.lab.pair import load_pair
from specdec_mlx.types import Drafter

CODE = """\
import math

def circle_area(radius):
    if radius < 0:
        raise ValueError("radius must not be negative")
    return math.pi * radius * radius

def circle_perimeter(radius):
    if radius < 0:
        raise ValueError("radius must not be negative")
    return 2 * math.pi * radius
"""

TEXT = """\
The lighthouse at Carrow Point was built in 1871, after two cargo ships had been lost on the reef
below it in a single winter. For ninety years a keeper and his family lived in the stone house
beside the tower, trimmed the lamp every four hours, and kept a diary of every ship that passed.
In 1961 the lamp was replaced by an electric one, and the last keeper, Anna Reyes, moved to the
village. She gave the diaries to the school, where they are still read every spring. Today the
tower is open to visitors from May to October, and the reef is a nature reserve."""

LIST = """\
def shopping_list(items):
    for item in items:
        print("- " + item)
    print("That is all.")
"""

PROMPTS = {
    "edit": f"Rename radius to r in this code and change nothing else:\n```python\n{CODE}```",
    "summary": f"Summarise this text in three sentences:\n\n{TEXT}",
    "chat": "I have two days in Lisbon in spring. What should I see, and in which order?",
}
LIVE_PROMPT = f"Rename items to things in this code and show all of it:\n```python\n{LIST}```"

REHEARSAL_TOKENS = 40

PAIR = "lab pair"
PAIR_TOPIC = "power"
PAIR_TOKENS = 192  # of one letter each

CONTRAST = "4"
"""A fixed draft length, such as most programs take."""


@dataclass(frozen=True)
class Show:
    """The texts that one model writes.

    Attributes:
        model: the target.
        tokenizer: the target's.
        drafters: by name, the most important one first.
        rehearsal: a further prompt, from which "auto" learns what passes cost before any is timed.
        rehearsal_tokens: how much is written for it.
        scenes: the texts.
    """

    model: nn.Module
    tokenizer: Any
    drafters: Mapping[str, Drafter]
    rehearsal: list[int]
    rehearsal_tokens: int
    scenes: Sequence[Scene]


def three_prompts(model: nn.Module, tokenizer: Any, draft_length: str, max_tokens: int) -> Show:
    """An edit, a summary and a chat, each by plain mlx-lm and with the drafters that need no model.

    Where there is nothing to gain, a fixed length shows what there is to lose.

    Args:
        model: the target.
        tokenizer: the target's.
        draft_length: a number or a policy, as on the command line.
        max_tokens: most tokens of a text.
    """
    drafters: dict[str, Drafter] = {
        "prompt-lookup": PromptLookupDrafter(),
        "ngram": NGramDrafter(),
    }
    ways = [
        after_rehearsal(model, tokenizer, drafter, name, draft_length)
        for name, drafter in drafters.items()
    ]
    contrast = [after_rehearsal(model, tokenizer, drafters["ngram"], "ngram", CONTRAST)]
    pace = measure_pace(model)
    scenes = [
        Scene(
            Task(name, name, encode_chat(tokenizer, prompt)),
            [plain(model), *ways, *(contrast if name == "chat" and draft_length == "auto" else ())],
            pace,
            max_tokens,
            tokenizer.eos_token_ids,
        )
        for name, prompt in PROMPTS.items()
    ]
    rehearsal = encode_chat(tokenizer, LIVE_PROMPT)
    return Show(model, tokenizer, drafters, rehearsal, REHEARSAL_TOKENS, scenes)


def pair_that_ships(draft_length: str) -> Show:
    """The lab pair, on a text of its own kind that it was not trained on; a fixed length beside it.

    Args:
        draft_length: a number or a policy, as on the command line.
    """
    target, draft, tokenizer = load_pair()
    opening, later = (
        list(tokenizer.encode(text)) for name, _, text in held_out_openings() if name == PAIR_TOPIC
    )
    drafter = ModelDrafter(draft, tokenizer=tokenizer)
    ways = [
        after_rehearsal(target, tokenizer, drafter, "model", length)
        for length in dict.fromkeys((draft_length, CONTRAST))
    ]
    pace = measure_pace(target)
    scene = Scene(Task(PAIR, PAIR, opening), [plain(target), *ways], pace, PAIR_TOKENS)
    return Show(target, tokenizer, {"model": drafter}, later, PAIR_TOKENS, [scene])


def after_rehearsal(
    model: nn.Module, tokenizer: Any, drafter: Drafter, name: str, draft_length: str
) -> Contender:
    """Speculation that begins each text with what "auto" has learned in the rehearsal.

    What it learns on the way stays with that text: the others are written at the same time.

    Args:
        model: the target.
        tokenizer: the target's.
        drafter: who proposes.
        name: what the table calls it.
        draft_length: a number or a policy, as on the command line.
    """

    def start(prompt: list[int], max_tokens: int, seed: int) -> Generator[Emitted, None, None]:
        tuning = copy.deepcopy(tuning_for(model))
        way = ours(model, drafter, name, draft_length, tokenizer=tokenizer, tuning=tuning)
        return way.start(prompt, max_tokens, seed)

    return Contender(name, draft_length, start, "auto")
