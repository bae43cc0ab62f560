"""Drafters that need no second model, on all 480 questions of Spec-Bench.

    python -m benchmarks.specbench question.jsonl --model M --record spec.json --page PAGE.md

`question.jsonl` is data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench, which is not
shipped here. The target answers each question once, greedily, and `--record` keeps its texts and
its likeliest tokens. A record that exists is read, and the target is not needed. Every method then
replays these texts, and a pass accepts what equals the text, so that the counts are those of a live
run. Token Recycling alone has a lower bound, because a replay does not know what the target thinks
after rejected tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator
from msgspec.structs import replace
from tqdm import tqdm

from specdec_mlx.contracts import Draft, DraftContext, Drafter, LookUpSession
from specdec_mlx.drafters.ngram import NGramDrafter
from specdec_mlx.drafters.prompt_lookup import PromptLookupDrafter
from specdec_mlx.drafters.suffix import SuffixDrafter
from specdec_mlx.lab.bench.cost import linear_cost
from specdec_mlx.lab.bench.record import Record, describe_dtype, load_record, save_record
from specdec_mlx.lab.bench.replay import score_record
from specdec_mlx.lab.bench.summary import ALL
from specdec_mlx.lab.bench.timing import Settings
from specdec_mlx.lab.papers.recycling import RecyclingDrafter, RecyclingIndex, SuccessorTable
from specdec_mlx.lab.papers.tree_drafts import TokenPath, draft_of
from specdec_mlx.lab.papers.trees_of_several import default_trees
from specdec_mlx.lab.prompts import RecordedText, encode_messages, read_lines
from specdec_mlx.lab.tables import markdown_table
from specdec_mlx.loop import speculate
from specdec_mlx.memory.store import Memory
from specdec_mlx.models.loading import load_model

MARK = "<!-- The rest of this page is written by benchmarks.specbench. -->\n"
TOP = 8  # likeliest tokens that are recorded of each place, as Token Recycling keeps
IN_A_BATCH = 32
SORTED_TOGETHER = 4 * IN_A_BATCH  # texts of like length share a batch, which has less padding

PARTS = {
    "mt_bench": [
        "writing",
        "roleplay",
        "reasoning",
        "math",
        "coding",
        "extraction",
        "stem",
        "humanities",
    ],
    "translation": ["translation"],
    "summarization": ["summarization"],
    "qa": ["qa"],
    "math_reasoning": ["math_reasoning"],
    "rag": ["rag"],
}
"""The six parts of Spec-Bench. The categories of MT-bench are one part."""


class Question(NamedTuple):
    """A question.

    Attributes:
        id: unique name.
        category: part of Spec-Bench.
        turns: messages of the user.
    """

    id: str
    category: str
    turns: list[str]


def text_id(question: Question, turn: int) -> str:
    """Unique name of the answer to a turn."""
    return f"{question.id}/{turn}"


def read_questions(path: Path | str) -> list[Question]:
    """The questions of question.jsonl. ValueError has the number of a wrong line."""
    part_of = {category: part for part, names in PARTS.items() for category in names}

    def question(row: Any, number: int) -> Iterator[Question]:
        yield Question(str(row["question_id"]), part_of[row["category"]], list(row["turns"]))

    return read_lines(path, question, "`question_id`, a `category` of Spec-Bench, and `turns`")


def record_texts(
    model: nn.Module, tokenizer: Any, questions: Sequence[Question], max_tokens: int
) -> Iterator[RecordedText]:
    """Greedy answers to all turns, with the likeliest tokens of each place.

    The second turn of a conversation follows the recorded answer to the first turn.

    Args:
        model: the target.
        tokenizer: of the target.
        questions: conversations.
        max_tokens: of each answer.
    """
    conversations = {question.id: list[dict[str, str]]() for question in questions}
    for turn in range(max(len(question.turns) for question in questions)):
        asked = [question for question in questions if turn < len(question.turns)]
        prompts = []
        for question in asked:
            conversations[question.id] += [{"role": "user", "content": question.turns[turn]}]
            prompts.append(encode_messages(tokenizer, conversations[question.id]))
        answers = answer(model, prompts, tokenizer.eos_token_ids, max_tokens)
        for number, generated, top_tokens in answers:
            question = asked[number]
            text = tokenizer.decode(generated, skip_special_tokens=True)
            conversations[question.id] += [{"role": "assistant", "content": text}]
            yield RecordedText(
                text_id(question, turn),
                question.category,
                prompts[number],
                generated,
                top_tokens=top_tokens,
            )


def answer(
    model: nn.Module, prompts: Sequence[list[int]], ends: Sequence[int], max_tokens: int
) -> Iterator[tuple[int, list[int], list[list[int]]]]:
    """Number of a prompt, its greedy text, and the likeliest tokens of each place, when it ends."""
    numbers: list[int] = []
    for start in range(0, len(prompts), SORTED_TOGETHER):
        some = range(start, min(start + SORTED_TOGETHER, len(prompts)))
        numbers += sorted(some, key=lambda number: len(prompts[number]))
    generator = BatchGenerator(
        model, stop_tokens=[[end] for end in ends], completion_batch_size=IN_A_BATCH
    )
    ids = generator.insert([prompts[number] for number in numbers], [max_tokens] * len(numbers))
    number_of = dict(zip(ids, numbers, strict=True))
    texts: dict[int, tuple[list[int], list[list[int]]]] = {uid: ([], []) for uid in ids}
    while responses := generator.next_generated():
        rows = mx.stack([response.logprobs for response in responses])
        best = mx.argpartition(-rows, TOP, axis=-1)[:, :TOP]
        order = mx.argsort(-mx.take_along_axis(rows, best, axis=-1), axis=-1)
        likeliest: Any = mx.take_along_axis(best, order, axis=-1).tolist()
        for response, top in zip(responses, likeliest, strict=True):
            generated, tops = texts[response.uid]
            generated.append(response.token)
            tops.append(top)
            if response.finish_reason is not None:
                yield number_of[response.uid], *texts.pop(response.uid)
    generator.close()


class Method(NamedTuple):
    """A way to draft.

    Attributes:
        name: for the table.
        length: most tokens of a draft.
        make: makes a drafter.
    """

    name: str
    length: int
    make: Callable[[], Drafter]


def recycling() -> RecyclingDrafter:
    """Token Recycling with a table that outlives texts, as published, in chains of 7 tokens."""
    return RecyclingDrafter(num_draft=7, table=SuccessorTable())


@dataclass(frozen=True)
class RecyclingTree(RecyclingDrafter):
    """Token Recycling in trees with children at all nodes, as published.

    The published template has 80 nodes and 6 levels. It is close to this rule, which is ours: nodes
    enter by the product of the ranks (1 to 8) on their path, the smallest first.
    """

    num_draft: int = 80
    depth: ClassVar[int] = 6

    def begin(self, prompt: Sequence[int], context: DraftContext) -> LookUpSession:
        """As `RecyclingDrafter`, with another index."""
        index: Any = super().begin(prompt, context).index
        return LookUpSession(BranchingIndex(**vars(index)))


class BranchingIndex(RecyclingIndex):
    """A text whose drafts branch at all nodes."""

    def draft(self, limit: int, more: Sequence[int] = ()) -> Draft:
        """The tree of the likeliest successors of successors."""
        last = (*self.tokens[-1:], *more)[-1]
        nodes, waiting = list[TokenPath](), list[tuple[int, TokenPath]]([(1, ())])
        while waiting and len(nodes) < min(limit, self.config.num_draft):
            product, path = heappop(waiting)
            if path:
                nodes.append(path)
            if len(path) == RecyclingTree.depth:
                continue
            known = self.table.successors.get((path or (last,))[-1:])
            for rank, text in enumerate(known.texts if known else (), start=1):
                # The product of a node is at least its parent's, so that parents come first.
                heappush(waiting, (product * rank, path + text))
        return draft_of(nodes)


METHODS = (
    # The published look-up takes the earliest place of the last 3, 2 or 1 tokens.
    Method("prompt lookup as published", 10, lambda: PromptLookupDrafter(3, 1, 10, "earliest")),
    Method("prompt lookup", 10, PromptLookupDrafter),
    Method("suffix", 10, SuffixDrafter),
    Method("suffix", 40, SuffixDrafter),
    Method("n-gram", 10, lambda: NGramDrafter(num_draft=10)),
    Method("recycling, a chain", 7, recycling),
    Method("recycling, a tree", 80, lambda: RecyclingTree(table=SuccessorTable())),
    Method("memory (suffix)", 10, lambda: SuffixDrafter(Memory())),
    Method("memory (suffix)", 40, lambda: SuffixDrafter(Memory())),
    Method("all of these, a tree", 64, lambda: default_trees(Memory(), recycling=True)),
)


def table(record: Record, methods: Sequence[Method] = METHODS) -> str:
    """Tokens a pass of each method, on each part of Spec-Bench and on all texts.

    Spec-Bench calls this number its mean accepted tokens. It counts the token of the target too, so
    that plain decoding has 1.
    """
    parts = [part for part in PARTS if part in record.categories]
    header = ["method", "K", *(part.replace("_", " ") for part in parts), "all", "of a draft token"]
    counts = Counter(text.category for text in record.texts)
    rows = [["answers", "", *(str(counts[part]) for part in parts), str(counts.total()), ""]]
    for method in tqdm(methods, leave=False):
        scored = score_record(
            record, {method.name: method.make}, [str(method.length)], linear_cost(0.0)
        )
        result = {r.category: r for r in scored.results if not r.session}
        row = [f"{result[part].tokens_per_pass:.2f}" for part in (*parts, ALL)]
        share = result[ALL].accepted / max(1, result[ALL].drafted)
        rows.append([method.name, str(method.length), *row, f"{share:.0%}"])
    return markdown_table(header, rows, 1)


def first_of_each_part(record: Record, num_answers: int) -> Record:
    """The record with the first answers to each part."""
    of_part = defaultdict[str, list[RecordedText]](list)
    for text in record.texts:
        of_part[text.category].append(text)
    return replace(record, texts=[t for part in of_part.values() for t in part[:num_answers]])


def live_recycling(model_name: str, record: Record) -> str:
    """Tokens a pass of Token Recycling's tree from an empty table, live and replayed."""
    (method,) = (one for one in METHODS if one.name == "recycling, a tree")
    model, _ = load_model(model_name)
    drafter, passes, emitted = method.make(), 0, 0
    for text in tqdm(record.texts, leave=False):
        tokens = speculate(
            model,
            text.prompt,
            drafter,
            max_tokens=record.settings.max_tokens,
            num_draft_tokens=method.length,
        )
        with closing(tokens):
            emitted_here = list(islice(tokens, len(text.generated)))
        emitted += len(emitted_here)
        passes += emitted_here[-1].stats.target_passes
    return f"{table(record, [method])}\n\nLive: {emitted / passes:.2f} tokens a pass."


def main(arguments: Sequence[str] | None = None) -> int:
    """Record the texts unless they are recorded, and print or write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.specbench")
    add = parser.add_argument
    add("questions", help="question.jsonl of Spec-Bench")
    add("--model", help="folder or Hugging Face name of the target, if there is no record yet")
    add("--max-tokens", type=int, default=128, help="of each answer (%(default)s)")
    add("--record", type=Path, help="the texts: read if the file exists, else written")
    add("--page", type=Path, help="a page whose table is replaced")
    add(
        "--live",
        type=int,
        metavar="N",
        help="generate the first N answers of each part again, drafted by Token Recycling",
    )
    args = parser.parse_args(arguments)
    if args.record and args.record.exists():
        record = load_record(args.record)
    elif args.model:
        record = make_record(args.model, read_questions(args.questions), args.max_tokens)
        if args.record:
            save_record(record, args.record)
    else:
        parser.error("Nothing to replay. Give --model, or a --record that exists.")
    if args.live:
        if not args.model:
            parser.error("--live generates. Give the --model of the record.")
        print(live_recycling(args.model, first_of_each_part(record, args.live)))
        return 0
    lines = table(record)
    print(lines)
    if args.page:
        words, _, _ = args.page.read_text("utf-8").partition(MARK)
        args.page.write_text(f"{words}{MARK}\n{lines}\n", "utf-8")
    return 0


def make_record(model_name: str, questions: Sequence[Question], max_tokens: int) -> Record:
    """Record the target's answers, in the order of the questions."""
    model, tokenizer = load_model(model_name)
    ids = [text_id(question, turn) for question in questions for turn in range(len(question.turns))]
    place = {one: i for i, one in enumerate(ids)}
    texts = record_texts(model, tokenizer, questions, max_tokens)
    answers = sorted(tqdm(texts, total=len(ids)), key=lambda text: place[text.id])
    vocab_size = len(tokenizer)
    name = Path(model_name).name
    how = Settings(max_tokens, model=name, dtype=describe_dtype(model), vocab_size=vocab_size)
    return Record("python -m benchmarks.specbench", {}, how, answers)


if __name__ == "__main__":
    sys.exit(main())
