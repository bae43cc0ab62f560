"""`specdec-mlx memory`: memories and n-gram tables, built, merged, cut and shared."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mlx_lm.utils import load_tokenizer

from specdec_mlx.drafters.ngram_table import NGramTable
from specdec_mlx.memory import Memory
from specdec_mlx.memory.file import read_header
from specdec_mlx.memory.kept import Kept
from specdec_mlx.memory.sources import texts_of, update
from specdec_mlx.models import explained
from specdec_mlx.options import argument, positive_int

MOST_TOKENS = 4_000_000  # bound of a memory that is built from files
KINDS = (Memory, NGramTable)  # kinds of files; all actions but `build` see which one it is


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `specdec-mlx memory`."""
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    count = argument(positive_int)

    build = actions.add_parser("build", help="from files and folders; again, it reads what changed")
    build.add_argument("paths", nargs="+", metavar="FILE|FOLDER", help="text files, or folders")
    build.add_argument("--tokenizer", required=True, metavar="MODEL", help="folder or name")
    build.add_argument("--out", required=True, type=Path, metavar="FILE", help="the memory")
    bound = build.add_mutually_exclusive_group()
    bound.add_argument(
        "--max-tokens", type=count, metavar="N", help=f"oldest go first ({MOST_TOKENS})"
    )
    bound.add_argument(
        "--ngrams",
        action="store_true",
        help="a new table of counts instead, for --drafter ngram:table=FILE",
    )
    build.set_defaults(action=_build)

    info = actions.add_parser("info", help="what a memory or a table holds")
    info.add_argument("file", type=Path, metavar="FILE")
    info.set_defaults(action=_info)

    merge = actions.add_parser("merge", help="put what others hold into a memory or a table")
    merge.add_argument("file", type=Path, metavar="FILE", help="made if there is none")
    merge.add_argument("others", nargs="+", type=Path, metavar="OTHER")
    merge.set_defaults(action=_merge)

    prune = actions.add_parser("prune", help="forget what is oldest")
    prune.add_argument("file", type=Path, metavar="FILE")
    bound = prune.add_mutually_exclusive_group(required=True)
    bound.add_argument("--max-tokens", type=count, metavar="N", help="of a memory")
    bound.add_argument("--max-entries", type=count, metavar="N", help="of each order of a table")
    prune.set_defaults(action=_prune)

    push = actions.add_parser("push", help="put one on the Hugging Face Hub, with a card")
    push.add_argument("file", type=Path, metavar="FILE")
    push.add_argument("repo", metavar="OWNER/NAME")
    push.add_argument("--source", required=True, metavar="TEXT", help="where its texts are from")
    push.add_argument("--licence", required=True, metavar="NAME", help="mit, apache-2.0, other ...")
    push.add_argument("--public", action="store_true", help="let everybody read the texts")
    push.set_defaults(action=_push)

    pull = actions.add_parser("pull", help="take one from the Hugging Face Hub")
    pull.add_argument("repo", metavar="OWNER/NAME")
    pull.add_argument("file", type=Path, metavar="FILE", help="new, or merged with what is there")
    pull.add_argument("--tokenizer", required=True, metavar="MODEL", help="to be drafted for")
    pull.set_defaults(action=_pull)


def main(args: argparse.Namespace) -> int:
    """Do what was asked."""
    return int(args.action(args))


def _build(args: argparse.Namespace) -> int:
    tokenizer = _tokenizer(args.tokenizer)
    if args.ngrams:
        return _count(args, tokenizer)
    memory = Memory.load(args.out) if args.out.exists() else Memory(MOST_TOKENS)
    if args.max_tokens is not None:
        memory.prune(args.max_tokens)
    found = update(memory, args.paths, tokenizer)
    memory.compact()
    memory.save(args.out)
    print(
        f"{args.out}: {len(memory):,} tokens. {found.read} files read, {found.unchanged} unchanged,"
        f" {found.gone} gone, {found.skipped} skipped as no text."
    )
    return 0


def _count(args: argparse.Namespace, tokenizer: Any) -> int:
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
        f"{args.out}: {table.facts()['n-grams']} n-grams. {len(texts) - skipped} files read, "
        f"{skipped} skipped as no text."
    )
    return 0


def _load(path: Path) -> Memory | NGramTable:
    is_table = read_header(path)[0]["kind"] == NGramTable.kind
    return NGramTable.load(path) if is_table else Memory.load(path)


def _info(args: argparse.Namespace) -> int:
    kept = _load(args.file)
    facts = dict(kept.facts()) | {"on disk": f"{args.file.stat().st_size:,} bytes"}
    if isinstance(kept, Memory):
        facts["tokens"] += f" of at most {kept.max_tokens:,}"
        facts |= {"files read": f"{len(kept.sources):,}", "in memory": f"{kept.num_bytes:,} bytes"}
    else:
        facts["n-grams"] += f", at most {kept.max_entries:,} of each order"
    facts["tokenizer"] = kept.tokenizer or "any"
    print(args.file, *(f"  {name:<15}{fact}" for name, fact in facts.items()), sep="\n")
    return 0


def _merge(args: argparse.Namespace) -> int:
    kept: Kept = _load(args.file) if args.file.exists() else _empty_like(_load(args.others[0]))
    for other in args.others:
        kept.merge(type(kept).load(other))
    if isinstance(kept, Memory):
        kept.compact()
    kept.save(args.file)
    return _info(args)


def _empty_like(kept: Memory | NGramTable) -> Memory | NGramTable:
    """One of the same kind; a table of the same orders and bound."""
    if isinstance(kept, Memory):
        return Memory(MOST_TOKENS)
    return NGramTable(kept.max_order, kept.min_order, kept.max_entries)


def _prune(args: argparse.Namespace) -> int:
    if args.max_entries is not None:
        table = NGramTable.load(args.file)
        table.prune(args.max_entries)
        table.save(args.file)
    else:
        memory = Memory.load(args.file)
        memory.prune(args.max_tokens)
        memory.save(args.file)
    return _info(args)


def _push(args: argparse.Namespace) -> int:
    from specdec_mlx.memory.hub import push

    kept = _load(args.file)
    where = push(kept, args.repo, source=args.source, licence=args.licence, private=not args.public)
    facts = ", ".join(f"{value} {name}" for name, value in kept.facts().items())
    print(f"{args.repo}: {facts}. {where}")
    return 0


def _pull(args: argparse.Namespace) -> int:
    from specdec_mlx.memory.hub import pull

    pull(args.repo, args.file, _tokenizer(args.tokenizer), KINDS)
    return _info(args)


def _tokenizer(model: str) -> Any:
    """The tokenizer of a model's folder or name; raises ModelFolderError."""
    with explained(model):
        return load_tokenizer(model)
