"""`SuffixDrafter` beside SuffixDecoding's own code, at equal draft lengths: tokens a pass.

    pip install arctic-inference==0.3.0
    python -m benchmarks.suffix_reference sessions.jsonl ...

Its limits by the match and by probability are off, so that both draft as many as they find. With
texts kept, each one may be copied into those after it; without, the text and its prompt alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import product
from typing import Any

from specdec_mlx.contracts import ROOT, Draft
from specdec_mlx.drafters.suffix import SuffixDrafter
from specdec_mlx.lab.bench.cost import linear_cost
from specdec_mlx.lab.bench.record import Record
from specdec_mlx.lab.bench.replay import record_of_sessions, right_path, score_record
from specdec_mlx.lab.bench.summary import ALL
from specdec_mlx.lab.papers.suffix_trees import SuffixTreeDrafter
from specdec_mlx.lab.prompts import RecordedText
from specdec_mlx.lab.tables import markdown_table
from specdec_mlx.memory.store import Memory

MOST_CONTEXT = 64  # its default depth


def reference_passes(
    cache: Any, number: int, text: RecordedText, size: int, *, trees: bool
) -> Iterator[int]:
    """Tokens of each pass of a text, drafted by the reference."""
    cache.start_request(number, text.prompt)
    done, tokens = 0, [*text.prompt, *text.generated]
    while done < len(text.generated):
        coming = text.generated[done:]
        context = tokens[: len(text.prompt) + done][-MOST_CONTEXT:]
        most = min(size, len(coming) - 1)
        found: Any = Draft()
        if most > 0:
            how = {"max_spec_factor": 0.0, "max_spec_offset": float(most)}
            found = cache.speculate(
                number, context, most, min_token_prob=0.0, use_tree_spec=trees, **how
            )
            parents = [ROOT if parent < 0 else parent for parent in found.parents]
            found = Draft(list(found.token_ids), parents=parents)
        emitted = coming[: len(right_path(found, coming)) + 1]
        cache.add_active_response(number, emitted)
        done += len(emitted)
        yield len(emitted)
    cache.stop_request(number)


def reference(record: Record, size: int, *, trees: bool, keeps: bool) -> float:
    """Tokens a pass of the reference on all texts."""
    package: Any = import_module("arctic_inference.suffix_decoding")
    cache, passes = package.SuffixDecodingCache(), list[int]()
    for number, text in enumerate(record.texts):
        if not keeps:
            cache = package.SuffixDecodingCache()
        passes += reference_passes(cache, number, text, size, trees=trees)
    return sum(passes) / len(passes)


def ours(record: Record, size: int, *, trees: bool, keeps: bool) -> float:
    """Tokens a pass of `SuffixDrafter` on all texts."""
    make = SuffixTreeDrafter if trees else SuffixDrafter
    drafter = make(Memory()) if keeps else make()
    scored = score_record(record, {"ours": drafter}, [str(size)], linear_cost(0.0))
    return next(r.tokens_per_pass for r in scored.results if r.category == ALL)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sessions", nargs="+")
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[8, 32])
    args = parser.parse_args(arguments)
    rows = []
    for name in args.sessions:
        record = record_of_sessions(name)
        for size, keeps, trees in product(args.num_draft_tokens, (False, True), (False, True)):
            both = (way(record, size, trees=trees, keeps=keeps) for way in (reference, ours))
            shape, kept = "tree" if trees else "chain", "yes" if keeps else "no"
            rows.append([f"{record.texts[0].category}, K = {size}", kept, shape])
            rows[-1] += [f"{tokens:.3f}" for tokens in both]
    print(markdown_table(["texts", "kept", "draft", "reference", "ours"], rows, 3))


if __name__ == "__main__":
    main()
