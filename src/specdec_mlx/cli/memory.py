"""`specdec-mlx memory`: memories of texts, built, merged, cut and shared."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlx_lm.utils import load_tokenizer

from specdec_mlx.arguments import argument, positive_int
from specdec_mlx.memory import Memory
from specdec_mlx.memory.kept import KeptFile
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
    build.add_argument("paths", nargs="+", metavar="FILE|FOLDER", help="text files, or folders")
    build.add_argument("--tokenizer", required=True, metavar="MODEL", help="folder or name")
    build.add_argument("--out", required=True, type=Path, metavar="FILE", help="the memory")
    build.add_argument(
        "--max-tokens", type=count, metavar="N", help=f"oldest go first ({MOST_TOKENS})"
    )
    info = add("info", _info, "what a memory holds")
    info.add_argument("file", type=Path, metavar="FILE")
    merge = add("merge", _merge, "put what others hold into a memory")
    merge.add_argument("file", type=Path, metavar="FILE", help="made if there is none")
    merge.add_argument("others", nargs="+", type=Path, metavar="OTHER")
    prune = add("prune", _prune, "forget what is oldest")
    prune.add_argument("file", type=Path, metavar="FILE")
    prune.add_argument("--max-tokens", type=count, required=True, metavar="N")
    export = add("export", _export, "a copy to share, without the names of files")
    export.add_argument("file", type=Path, metavar="FILE")
    export.add_argument("copy", type=Path, metavar="COPY", help="a new file")


def main(args: argparse.Namespace) -> int:
    """Do what was asked."""
    args.action(args)
    return 0


def _build(args: argparse.Namespace) -> None:
    tokenizer = tokenizer_of(args.tokenizer)
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


def _info(args: argparse.Namespace) -> None:
    memory = Memory.load(args.file)
    facts = {
        "texts": f"{len(memory.texts()):,}",
        "tokens": f"{len(memory):,} of at most {memory.max_tokens:,}",
        "on disk": f"{args.file.stat().st_size:,} bytes",
        "files read": f"{len(memory.sources):,}",
        "in memory": f"{memory.num_bytes:,} bytes",
        "tokenizer": memory.tokenizer or "any",
    }
    print_facts(args.file, facts)


def print_facts(path: Path, facts: dict[str, str]) -> None:
    """Print what a file holds, a line for each fact."""
    print(path, *(f"  {name:<15}{fact}" for name, fact in facts.items()), sep="\n")


def _merge(args: argparse.Namespace) -> None:
    memory = Memory.load(args.file) if args.file.exists() else Memory(MOST_TOKENS)
    for other in args.others:
        memory.merge(Memory.load(other))
    memory.compact()
    memory.save(args.file)
    _info(args)


def _prune(args: argparse.Namespace) -> None:
    memory = Memory.load(args.file)
    memory.prune(args.max_tokens)
    memory.save(args.file)
    _info(args)


def _export(args: argparse.Namespace) -> None:
    export_copy(Memory.load(args.file), args.copy)


def export_copy(kept: KeptFile, path: Path) -> None:
    """Write a copy to share; raises FileExistsError for a file that is there."""
    if path.exists():
        raise FileExistsError(f"{path} is there already. Name a new file.")
    print(f"{path}: {kept.export(path):,} bytes")


def tokenizer_of(model: str) -> Any:
    """The tokenizer of a model's folder or name; raises ModelFolderError."""
    with explained(model):
        return load_tokenizer(model)
