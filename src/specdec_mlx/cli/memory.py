"""`specdec-mlx memory`: memories of texts, built, merged, cut and shared."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_lm.utils import load_tokenizer

from specdec_mlx.arguments import number
from specdec_mlx.memory import Memory
from specdec_mlx.models.loading import explained

MOST_TOKENS = 4_000_000  # bound of a memory that is built from files


@dataclass(frozen=True)
class Actions:
    """The actions of a command on the files of one kind.

    Attributes:
        kind: the class of the objects in the files, a `PersistentStore`.
        facts: facts about one object, by name.
        empty: makes an object to merge others into, from their paths.
        finish: called before a merged object is saved.
        bound: flag of the limit that `prune` takes.
    """

    kind: Any
    facts: Callable[[Any], dict[str, str]]
    empty: Callable[[list[Path]], Any]
    finish: Callable[[Any], object]
    bound: str

    def add_to(
        self, parser: argparse.ArgumentParser, build: Callable[[argparse.Namespace], None], how: str
    ) -> argparse.ArgumentParser:
        """Add the actions to a parser. Returns the parser of `build`, for more flags.

        how: help of `build`.
        """
        actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")

        def add(name: str, action: Callable[[argparse.Namespace], None], text: str) -> Any:
            command = actions.add_parser(name, help=text)
            command.set_defaults(action=action)
            return command

        building: argparse.ArgumentParser = add("build", build, how)
        building.add_argument(
            "paths", nargs="+", metavar="FILE|FOLDER", help="text files, or folders"
        )
        building.add_argument("--tokenizer", required=True, metavar="MODEL", help="folder or name")
        building.add_argument("--out", required=True, type=Path, metavar="FILE", help="to write")
        info = add("info", lambda args: self.show(args.file), f"what a {self.kind.what} holds")
        merge = add("merge", self._merge, f"put what others hold into a {self.kind.what}")
        merge.add_argument("file", type=Path, metavar="FILE", help="made if there is none")
        merge.add_argument("others", nargs="+", type=Path, metavar="OTHER")
        prune = add("prune", self._prune, "forget what is oldest")
        count = number(int, 1)
        prune.add_argument(self.bound, dest="most", type=count, required=True, metavar="N")
        export = add("export", self._export, "a copy to share, without the names of files")
        for command in (info, prune, export):
            command.add_argument("file", type=Path, metavar="FILE")
        export.add_argument("copy", type=Path, metavar="COPY", help="a new file")
        return building

    def show(self, path: Path) -> None:
        content = self.kind.load(path)
        facts = {
            **self.facts(content),
            "on disk": f"{path.stat().st_size:,} bytes",
            "tokenizer": content.tokenizer or "any",
        }
        print(path, *(f"  {name:<15}{fact}" for name, fact in facts.items()), sep="\n")

    def _merge(self, args: argparse.Namespace) -> None:
        content = self.kind.load(args.file) if args.file.exists() else self.empty(args.others)
        for other in args.others:
            content.merge(self.kind.load(other))
        self.finish(content)
        content.save(args.file)
        self.show(args.file)

    def _prune(self, args: argparse.Namespace) -> None:
        content = self.kind.load(args.file)
        content.prune(args.most)
        content.save(args.file)
        self.show(args.file)

    def _export(self, args: argparse.Namespace) -> None:
        if args.copy.exists():
            raise FileExistsError(f"{args.copy} is there already. Name a new file.")
        print(f"{args.copy}: {self.kind.load(args.file).export(args.copy):,} bytes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = Actions(
        Memory, _facts, lambda others: Memory(MOST_TOKENS), Memory.compact, "--max-tokens"
    )
    build = actions.add_to(parser, _build, "from files and folders; again, it reads what changed")
    oldest = f"oldest go first ({MOST_TOKENS})"
    build.add_argument("--max-tokens", type=number(int, 1), metavar="N", help=oldest)


def main(args: argparse.Namespace) -> int:
    args.action(args)
    return 0


def _build(args: argparse.Namespace) -> None:
    tokenizer = tokenizer_of(args.tokenizer)
    # A second build reads only the files that have changed.
    memory = Memory.load(args.out) if args.out.exists() else Memory(MOST_TOKENS)
    if args.max_tokens is not None:
        memory.prune(args.max_tokens)
    update = memory.update(args.paths, tokenizer)
    memory.compact()
    memory.save(args.out)
    print(
        f"{args.out}: {len(memory):,} tokens. {update.read} files read, "
        f"{update.unchanged} unchanged, {update.gone} gone, {update.skipped} skipped as no text."
    )


def _facts(memory: Memory) -> dict[str, str]:
    return {
        "texts": f"{len(memory.texts()):,}",
        "tokens": f"{len(memory):,} of at most {memory.max_tokens:,}",
        "files read": f"{len(memory.sources):,}",
        "in memory": f"{memory.num_bytes:,} bytes",
    }


def tokenizer_of(model: str) -> Any:
    # A file may be longer than a prompt, and nothing here reads it in one pass.
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    with explained(model):
        return load_tokenizer(model)
