"""`specdec-mlx memory`: memories made from files, looked at, merged, cut, and shared."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mlx_lm.utils import load_tokenizer

from specdec_mlx.memory import Memory
from specdec_mlx.memory.sources import update
from specdec_mlx.models import explained
from specdec_mlx.options import argument, positive_int

MOST_TOKENS = 4_000_000
"""Of a memory that is built from files."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `specdec-mlx memory`."""
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    count = argument(positive_int)

    build = actions.add_parser("build", help="from files and folders; again, it reads what changed")
    build.add_argument("paths", nargs="+", metavar="FILE|FOLDER", help="text files, or folders")
    build.add_argument("--tokenizer", required=True, metavar="MODEL", help="folder or name")
    build.add_argument("--out", required=True, type=Path, metavar="FILE", help="the memory")
    build.add_argument(
        "--max-tokens", type=count, metavar="N", help=f"oldest go first ({MOST_TOKENS})"
    )
    build.set_defaults(action=_build)

    info = actions.add_parser("info", help="what a memory holds")
    info.add_argument("file", type=Path, metavar="FILE")
    info.set_defaults(action=_info)

    merge = actions.add_parser("merge", help="put what others hold into a memory")
    merge.add_argument("file", type=Path, metavar="FILE", help="made if there is none")
    merge.add_argument("others", nargs="+", type=Path, metavar="OTHER")
    merge.set_defaults(action=_merge)

    prune = actions.add_parser("prune", help="forget the oldest texts")
    prune.add_argument("file", type=Path, metavar="FILE")
    prune.add_argument("--max-tokens", type=count, required=True, metavar="N")
    prune.set_defaults(action=_prune)

    push = actions.add_parser("push", help="put a memory on the Hugging Face Hub, with a card")
    push.add_argument("file", type=Path, metavar="FILE")
    push.add_argument("repo", metavar="OWNER/NAME")
    push.add_argument("--source", required=True, metavar="TEXT", help="where its texts are from")
    push.add_argument("--licence", required=True, metavar="NAME", help="mit, apache-2.0, other ...")
    push.add_argument("--public", action="store_true", help="let everybody read the texts")
    push.set_defaults(action=_push)

    pull = actions.add_parser("pull", help="take a memory from the Hugging Face Hub")
    pull.add_argument("repo", metavar="OWNER/NAME")
    pull.add_argument("file", type=Path, metavar="FILE", help="new, or merged with what is there")
    pull.add_argument("--tokenizer", required=True, metavar="MODEL", help="to be drafted for")
    pull.set_defaults(action=_pull)


def main(args: argparse.Namespace) -> int:
    """Do what was asked."""
    return int(args.action(args))


def _build(args: argparse.Namespace) -> int:
    tokenizer = _tokenizer(args.tokenizer)
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


def _info(args: argparse.Namespace) -> int:
    memory = Memory.load(args.file)
    print(
        f"{args.file}\n"
        f"  tokens         {len(memory):,} of at most {memory.max_tokens:,}\n"
        f"  texts          {len(memory.texts()):,}\n"
        f"  files read     {len(memory.sources):,}\n"
        f"  on disk        {args.file.stat().st_size:,} bytes\n"
        f"  in memory      {memory.num_bytes:,} bytes\n"
        f"  tokenizer      {memory.tokenizer or 'any'}"
    )
    return 0


def _merge(args: argparse.Namespace) -> int:
    memory = Memory.load(args.file) if args.file.exists() else Memory(MOST_TOKENS)
    for other in args.others:
        memory.merge(Memory.load(other))
    memory.compact()
    memory.save(args.file)
    return _info(args)


def _prune(args: argparse.Namespace) -> int:
    memory = Memory.load(args.file)
    memory.prune(args.max_tokens)
    memory.save(args.file)
    return _info(args)


def _push(args: argparse.Namespace) -> int:
    from specdec_mlx.memory.hub import push

    memory = Memory.load(args.file)
    where = push(
        memory, args.repo, source=args.source, licence=args.licence, private=not args.public
    )
    print(f"{args.repo}: {len(memory):,} tokens. {where}")
    return 0


def _pull(args: argparse.Namespace) -> int:
    from specdec_mlx.memory.hub import pull

    pull(args.repo, args.file, _tokenizer(args.tokenizer))
    return _info(args)


def _tokenizer(model: str) -> Any:
    """The tokenizer of a model's folder or name; raises ModelFolderError."""
    with explained(model):
        return load_tokenizer(model)
