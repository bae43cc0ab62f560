"""Acceptance by context and window: `python -m benchmarks.windows`.

The lab's heads that have caches, and its draft model, on held-out text. The target writes greedily
after prompts of the length that a drafter was trained on, and of four times that length. Each
drafter then drafts along the same texts from the same states of the target, with and without a
window. The counts are exact.

The lab's target was trained on 1,024 tokens. So that it writes well after longer prompts too, it
attends to its first positions and to as many latest positions as the drafter was trained on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.arguments import number
from specdec_mlx.contracts import (
    NO_DRAFT,
    Draft,
    DraftContext,
    Drafter,
    FeatureRows,
    Features,
    Session,
)
from specdec_mlx.drafters.heads.loading import load_head
from specdec_mlx.drafters.model import ModelDrafter
from specdec_mlx.lab import draft_path, head_path, target_path
from specdec_mlx.lab.pair import HELD_OUT
from specdec_mlx.lab.tables import markdown_table
from specdec_mlx.loop import speculate
from specdec_mlx.models.loading import load_model
from specdec_mlx.token_ids import to_list
from specdec_mlx.window_cache import limit_to_window

TRAINED = {"mtp": 512, "eagle3": 512, "draft model": 1024}
"""Tokens of the texts that the lab's drafters were trained on (see the lab's model card)."""

FACTOR = 4  # contexts are as long as the trained length, and so many times as long
NUM_DRAFT = 4  # tokens of a draft


@dataclass(frozen=True)
class WindowRow:
    """A drafter after prompts of one length.

    Attributes:
        window: latest positions that it sees, 0 for the whole text.
        share: accepted tokens of drafted tokens.
    """

    drafter: str
    context: int
    window: int
    accepted: int
    drafted: int

    @property
    def share(self) -> float:
        return self.accepted / max(1, self.drafted)


@dataclass
class Recording(Session):
    """The target's states at the positions of a text, in parts."""

    shown: list[FeatureRows] = field(default_factory=list)

    def propose(self, limit: int) -> Draft:
        return NO_DRAFT

    def observe(self, tokens: Sequence[int]) -> None:
        """Nothing: the text is kept by the caller."""

    def see(self, features: FeatureRows) -> None:
        self.shown.append(features)


@dataclass(frozen=True)
class Recorder(Drafter):
    """Drafts nothing, and keeps the states that it was made to read."""

    wanted: Features
    sessions: list[Recording] = field(default_factory=list)

    @property
    def features(self) -> Features:
        return self.wanted

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Session:
        self.sessions.append(Recording())
        return self.sessions[-1]


@dataclass(frozen=True)
class RecordedStates:
    """A greedy text of the target, and its states at all positions except the last."""

    tokens: list[int]
    num_prompt: int
    states: FeatureRows


def record(
    target: nn.Module, prompt: list[int], wanted: Features, num: int, window: int
) -> RecordedStates:
    """A text that the target writes after a prompt, with a window of its own."""
    recorder, caches = Recorder(wanted), limit_to_window(make_prompt_cache(target), window)
    tokens = speculate(target, prompt, recorder, max_tokens=num, prompt_cache=caches)
    written = [token.token for token in tokens]
    states = FeatureRows.joined(recorder.sessions[0].shown)
    return RecordedStates([*prompt, *written], len(prompt), states)


def count(drafter: Drafter, text: RecordedStates, vocab_size: int) -> tuple[int, int]:
    """Accepted and drafted tokens along a recorded text, in rounds as in a generation."""
    end = text.num_prompt
    session = drafter.begin(text.tokens[:end], DraftContext(vocab_size=vocab_size))
    accepted = drafted = shown = 0
    while True:
        if drafter.features is not None:
            # The target has read all tokens except the last.
            session.see(text.states.rows(range(shown, end - 1)))
            shown = end - 1
        if end + NUM_DRAFT >= len(text.tokens):
            return accepted, drafted
        draft = to_list(session.propose(NUM_DRAFT).tokens)
        following = text.tokens[end : end + NUM_DRAFT + 1]
        right = 0
        while right < len(draft) and draft[right] == following[right]:
            right += 1
        accepted, drafted, end = accepted + right, drafted + len(draft), end + right + 1
        session.observe(following[: right + 1])


def drafter_of(name: str, target: nn.Module, window: int) -> Drafter:
    if name == "draft model":
        return ModelDrafter(load_model(draft_path())[0], window=window or None)
    return load_head(head_path(name), target, window=window)


def compare(names: Sequence[str], num_texts: int, num_tokens: int) -> Iterator[WindowRow]:
    """Rows of the table, drafter by drafter."""
    target, tokenizer = load_model(target_path())
    ids = list(tokenizer.encode("\n\n".join(topics[name] for name in HELD_OUT)))
    wanted = Features(layers=tuple(range(4)), head_input=True)
    recorded: dict[tuple[int, int], list[RecordedStates]] = {}
    longest = FACTOR * max(TRAINED[name] for name in names)
    step = (len(ids) - longest) // num_texts
    for name in names:
        trained = TRAINED[name]
        for context in (trained, FACTOR * trained):
            if (context, trained) not in recorded:
                # Texts of both lengths go on after the same tokens.
                ends = [longest + i * step for i in range(num_texts)]
                prompts = [ids[end - context : end] for end in ends]
                how = wanted, num_tokens, trained
                recorded[context, trained] = [record(target, p, *how) for p in prompts]
            for window in dict.fromkeys((0, trained, trained // 2)):
                drafter = drafter_of(name, target, window)
                own: Any = drafter.features
                texts = [
                    text
                    if own is None
                    else RecordedStates(text.tokens, text.num_prompt, text.states.only(own))
                    for text in recorded[context, trained]
                ]
                vocab = target.model.embed_tokens.weight.shape[0]
                counts = [count(drafter, text, vocab) for text in texts]
                accepted, drafted = (sum(numbers) for numbers in zip(*counts, strict=True))
                yield WindowRow(name, context, window, accepted, drafted)
                mx.clear_cache()


def format_rows(rows: Sequence[WindowRow]) -> str:
    """A table in Markdown. The last column compares with the trained length and no window."""
    at_trained = {row.drafter: row.share for row in reversed(rows) if row.window == 0}
    cells = [
        [
            row.drafter,
            str(row.context),
            str(row.window or "none"),
            f"{row.accepted} of {row.drafted}",
            f"{row.share:.3f}",
            f"{row.share / at_trained[row.drafter]:.3f}",
        ]
        for row in rows
    ]
    header = ["drafter", "context", "window", "accepted", "share", "of the trained length"]
    return markdown_table(header, cells, num_text_columns=1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.windows", description=__doc__)
    add = parser.add_argument
    add("--drafter", action="append", choices=TRAINED, help="(again for more; default: all)")
    add("--texts", type=number(int, 1), default=8, help="prompts of each length (%(default)s)")
    add("--max-tokens", type=number(int, 8), default=64, help="tokens of a text (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the rows")
    args = parser.parse_args(arguments)
    rows = []
    for row in compare(args.drafter or list(TRAINED), args.texts, args.max_tokens):
        rows.append(row)
        print(f"{row.drafter} {row.context} {row.window}: {row.share:.3f}", flush=True)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), "utf-8")
    print(f"\n{format_rows(rows)}")


if __name__ == "__main__":
    main()
