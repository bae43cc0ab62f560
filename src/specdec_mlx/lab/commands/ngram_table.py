"""`specdec-mlx ngram-table`: counts of n-grams that were written before, to draft from."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specdec_mlx.arguments import argument, positive_int
from specdec_mlx.cli.memory import export_copy, print_facts, tokenizer_of
from specdec_mlx.lab.papers.ngram_table import NGramTable
from specdec_mlx.memory.store import texts_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `specdec-mlx ngram-table`."""
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")

    def add(name: str, action: Callable[[argparse.Namespace], None], text: str) -> Any:
        command = actions.add_parser(name, help=text)
        command.set_defaults(action=action)
        return command

    build = add("build", _build, "from files and folders, for --drafter ngram-table:table=FILE")
    build.add_argument("paths", nargs="+", metavar="FILE|FOLDER", help="text files, or folders")
    build.add_argument("--tokenizer", required=True, metavar="MODEL", help="folder or name")
    build.add_argument("--out", required=True, type=Path, metavar="FILE", help="a new table")
    info = add("info", _info, "what a table holds")
    info.add_argument("file", type=Path, metavar="FILE")
    merge = add("merge", _merge, "put what others hold into a table")
    merge.add_argument("file", type=Path, metavar="FILE", help="made if there is none")
    merge.add_argument("others", nargs="+", type=Path, metavar="OTHER")
    prune = add("prune", _prune, "forget what was not seen for longest")
    prune.add_argument("file", type=Path, metavar="FILE")
    count = argument(positive_int)
    prune.add_argument("--max-entries", type=count, required=True, help="of each order")
    export = add("export", _export, "a copy to share")
    export.add_argument("file", type=Path, metavar="FILE")
    export.add_argument("copy", type=Path, metavar="COPY", help="a new file")


def main(args: argparse.Namespace) -> int:
    """Do what was asked."""
    args.action(args)
    return 0


def _build(args: argparse.Namespace) -> None:
    """Build a table; raises FileExistsError for one that is there."""
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


def _info(args: argparse.Namespace) -> None:
    table = NGramTable.load(args.file)
    facts = {
        "orders": f"{table.min_order} to {table.max_order}",
        "n-grams": f"{len(table):,}, at most {table.max_entries:,} of each order",
        "on disk": f"{args.file.stat().st_size:,} bytes",
        "tokenizer": table.tokenizer or "any",
    }
    print_facts(args.file, facts)


def _merge(args: argparse.Namespace) -> None:
    """Merge tables; a new one has the orders and the bound of the first."""
    is_there = args.file.exists()
    table = NGramTable.load(args.file if is_there else args.others[0])
    table = table if is_there else table.empty()
    for other in args.others:
        table.merge(NGramTable.load(other))
    table.save(args.file)
    _info(args)


def _prune(args: argparse.Namespace) -> None:
    table = NGramTable.load(args.file)
    table.prune(args.max_entries)
    table.save(args.file)
    _info(args)


def _export(args: argparse.Namespace) -> None:
    export_copy(NGramTable.load(args.file), args.copy)
