"""The text that the pair is trained on: the language reference in `pydoc_data.topics`."""

from __future__ import annotations

from collections.abc import Iterator
from pydoc_data.topics import topics

HELD_OUT = ("binary", "booleans", "calls", "global", "objects", "power", "return", "slicings")
"""Topics that are never trained on, about a twentieth of the text; nothing else quotes them."""

OPENING_LENGTH = 400  # characters of a held-out topic that make a prompt
SHORTEST_QUOTE = 60  # characters from which a repeated paragraph counts as a quotation: a heuristic


def held_out_openings() -> Iterator[tuple[str, int, str]]:
    """Name, number and text of two pieces of each held-out topic, its start and its middle."""
    for name in HELD_OUT:
        text = topics[name]
        for i, start in enumerate((0, len(text) // 2)):
            yield name, i, text[start : start + OPENING_LENGTH]


def split_topics() -> tuple[list[str], list[str]]:
    """Documents to train on and documents held out; no paragraph of some length stands twice."""
    held_out = [topics[name] for name in HELD_OUT]
    seen = {paragraph for text in held_out for paragraph in text.split("\n\n")}
    trained = []
    for name in sorted(topics.keys() - set(HELD_OUT)):
        paragraphs = topics[name].split("\n\n")
        kept = [p for p in paragraphs if len(p) < SHORTEST_QUOTE or p not in seen]
        seen.update(paragraphs)
        if sum(map(len, kept)) >= SHORTEST_QUOTE:
            trained.append("\n\n".join(kept))
    return trained, held_out
