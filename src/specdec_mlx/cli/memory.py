"""`specdec-mlx memory`: memories and n-gram tables, built, merged, cut and shared."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlx_lm.utils import load_tokenizer

from specdec_mlx.arguments import argument, positive_int
from specdec_mlx.drafters.ngram_table import NGramTable
from specdec_mlx.memory import Memory
from specdec_mlx.memory.file import read_header
from specdec_mlx.memory.kept import KeptFile
from specdec_mlx.memory.store import texts_of
from specdec_mlx.models.loading import explained

MOST_TOKENS = 4_000_000  # bound of a memory that is built from files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `specdec-mlx memory`."""
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    count = argument(positive_int)

    def add(name: str, action: Callable[[argparse.Namespace], None], text: str) -> Any:
        command = actions.add_parser(name, help=text)
        command.set_defaults(action=action)
        return command

    build = add("build", _build, "from files and folders; again, it reads what changed")
    build.add_argument(
        "paths", nargs="+", metavar="FILE|FOLDER", help="text files, or folders"
    )
    build.add_argument(
        "--tokenizer", required=True, metavar="MODEL", help="folder or name"
    )
    build.add_argument(
        "--out", required=True, type=Path, metavar="FILE", help="the memory"
    )
    bound = build.add_mutually_exclusive_group()
    bound.add_argument(
        "--max-tokens", type=count, metavar="N", help=f"oldest go first ({MOST_TOKENS})"
    )
    bound.add_argument(
        "--ngrams",
        action="store_true",
        help="a new table of counts instead, for --drafter ngram:table=FILE",
    )
    info = add("info", _info, "what a memory or a table holds")
    info.add_argument("file", type=Path, metavar="FILE")
    merge = add("merge", _merge, "put what others hold into a memory or a table")
    merge.add_argument("file", type=Path, metavar="FILE", help="made if there is none")
    merge.add_argument("others", nargs="+", type=Path, metavar="OTHER")
    prune = add("prune", _prune, "forget what is oldest")
    prune.add_argument("file", type=Path, metavar="FILE")
    bound = prune.add_mutually_exclusive_group(required=True)
    bound.add_argument("--max-tokens", type=count, metavar="N", help="of a memory")
    bound.add_argument(
        "--max-entries", type=count, metavar="N", help="of each order of a table"
    )
    export = add("export", _export, "a copy to share, without the names of files")
    export.add_argument("file", type=Path, metavar="FILE")
    export.add_argument("copy", type=Path, metavar="COPY", help="a new file")


def main(args: argparse.Namespace) -> int:
    """Do what was asked."""
    args.action(args)
    return 0


def _build(args: argparse.Namespace) -> None:
    tokenizer = _tokenizer(args.tokenizer)
    if args.ngrams:
        _count(args, tokenizer)
        return
    memory = Memory.load(args.out) if args.out.exists() else Memory(MOST_TOKENS)
    if args.max_tokens is not None:
        memory.prune(args.max_tokens)
    found = memory.update(args.paths, tokenizer)
    memory.compact()
    memory.save(args.out)
    print(
        f"{args.out}: {len(memory):,} tokens. {found.read} files read, {found.unchanged} unchanged,"
        f" {found.gone} gone, {found.skipped} skipped as no text."
    )


def _count(args: argparse.Namespace, tokenizer: Any) -> None:
    """Build a table; raises FileExistsError for one that is there."""
    if args.out.exists():
        raise FileExistsError(
            f"{args.out} is there already, and counts cannot be told apart again. Count into "
            "another file, and merge the two or delete the old one."
        )
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


def _load(path: Path) -> Memory | NGramTable:
    is_table = read_header(path)[0]["kind"] == NGramTable.kind
    return NGramTable.load(path) if is_table else Memory.load(path)


def _info(args: argparse.Namespace) -> None:
    kept, on_disk = _load(args.file), f"{args.file.stat().st_size:,} bytes"
    if isinstance(kept, Memory):
        facts = {
            "texts": f"{len(kept.texts()):,}",
            "tokens": f"{len(kept):,} of at most {kept.max_tokens:,}",
            "on disk": on_disk,
            "files read": f"{len(kept.sources):,}",
            "in memory": f"{kept.num_bytes:,} bytes",
        }
    else:
        facts = {
            "orders": f"{kept.min_order} to {kept.max_order}",
            "n-grams": f"{len(kept):,}, at most {kept.max_entries:,} of each order",
            "on disk": on_disk,
        }
    facts["tokenizer"] = kept.tokenizer or "any"
    print(args.file, *(f"  {name:<15}{fact}" for name, fact in facts.items()), sep="\n")


def _merge(args: argparse.Namespace) -> None:
    kept: KeptFile = (
        _load(args.file) if args.file.exists() else _empty_like(_load(args.others[0]))
    )
    for other in args.others:
        kept.merge(type(kept).load(other))
    if isinstance(kept, Memory):
        kept.compact()
    kept.save(args.file)
    _info(args)


def _empty_like(kept: Memory | NGramTable) -> Memory | NGramTable:
    """One of the same kind; a table of the same orders and bound."""
    if isinstance(kept, Memory):
        return Memory(MOST_TOKENS)
    return kept.empty()


def _prune(args: argparse.Namespace) -> None:
    is_table = args.max_entries is not None
    kept: Memory | NGramTable = (NGramTable if is_table else Memory).load(args.file)
    kept.prune(args.max_entries if is_table else args.max_tokens)
    kept.save(args.file)
    _info(args)


def _export(args: argparse.Namespace) -> None:
    """Write a copy; raises FileExistsError for one that is there."""
    if args.copy.exists():
        raise FileExistsError(f"{args.copy} is there already. Name a new file.")
    size = _load(args.file).export(args.copy)
    print(f"{args.copy}: {size:,} bytes")


def _tokenizer(model: str) -> Any:
    """The tokenizer of a model's folder or name; raises ModelFolderError."""
    with explained(model):
        return load_tokenizer(model)
