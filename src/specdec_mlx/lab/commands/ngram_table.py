"""`specdec-mlx ngram-table`: counts of n-grams that were written before, to draft from."""

from __future__ import annotations

import argparse

from specdec_mlx.cli.memory import Actions, tokenizer_of
from specdec_mlx.cli.memory import main as main
from specdec_mlx.lab.papers.ngram_table import NGramTable
from specdec_mlx.memory.store import texts_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `specdec-mlx ngram-table`. A merged table has the settings of the first."""
    actions = Actions(
        NGramTable,
        _facts,
        lambda others: NGramTable.load(others[0]).empty(),
        lambda table: None,
        "--max-entries",
    )
    how = "from files and folders, for --drafter ngram-table:table=FILE"
    actions.add_to(parser, _build, how)


def _build(args: argparse.Namespace) -> None:
    if args.out.exists():
        raise FileExistsError(
            f"{args.out} is there already, and counts cannot be told apart again. Count into "
            "another file, and merge the two or delete the old one."
        )
    tokenizer = tokenizer_of(args.tokenizer)
    table = NGramTable(tokenizer=tokenizer)
    texts = list(texts_of(args.paths, tokenizer))
    for text in texts:
        table.add(text or [])
    table.save(args.out)
    skipped = texts.count(None)
    print(
        f"{args.out}: {len(table):,} n-grams. {len(texts) - skipped} files read, "
        f"{skipped} skipped as no text."
    )


def _facts(table: NGramTable) -> dict[str, str]:
    return {
        "orders": f"{table.min_order} to {table.max_order}",
        "n-grams": f"{len(table):,}, at most {table.max_entries:,} of each order",
    }
