"""Our flags on mlx-lm's own parsers.

Every command of mlx-lm makes an `argparse.ArgumentParser`. Its module gets, under the name
`argparse`, a parser that adds our flags and takes their values out again, so that all of mlx-lm's
flags stay.

MLX is imported when the values are used. `--help` and a wrong flag are answered without it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from specdec_mlx.arguments import (
    AUTO,
    DEFAULT_DRAFTER,
    DRAFTER_GROUP,
    KERNELS,
    MODEL_DRAFTER,
    NO_DRAFTER,
    PLACES,
    PROCESS,
    RULE_GROUP,
    RULES,
    Parser,
    add_lighter_arguments,
    argument,
    existing_file,
    installed,
    known,
    load,
    parse_draft_length,
    registered_names,
)
from specdec_mlx.errors import MissingPackageError
from specdec_mlx.files import read_text

if TYPE_CHECKING:
    import mlx.nn as nn

    from specdec_mlx.contracts import Drafter
    from specdec_mlx.drafters.choosing.choice import DrafterChoice
    from specdec_mlx.drafters.grammar import Grammar
    from specdec_mlx.kernels import Kernels
    from specdec_mlx.memory.store import Memory

LEARNERS = "specdec_mlx.learners"  # entry points; `online` is what --online makes of a model
EVERYBODY, USER, KEY = "all", "user", "key"  # who shares a memory of a server


def default_choice() -> DrafterChoice:
    from specdec_mlx.drafters.choosing.choice import DrafterChoice

    return DrafterChoice()


@dataclass(frozen=True)
class Flags:
    """Values of our flags.

    Attributes:
        choice: of --drafter and --draft-model.
        kernels: other kernels for passes over several rows.
        memory: path of a file, or "process".
        memory_for: who shares a memory of a server.
    """

    choice: DrafterChoice = field(default_factory=default_choice)
    num_draft_tokens: int | str = "auto"
    rule: str = "auto"
    stats: bool = False
    grammar: Grammar | None = None
    keeps_tuning: bool = True
    kernels: Kernels | None = None
    memory: str | None = None
    memory_for: str = EVERYBODY
    online: bool = False

    @property
    def waits_for_target(self) -> bool:
        """True if the draft model is made from the target."""
        return self.online or self.choice.waits_for_target

    def drafter(self, target: nn.Module | None = None) -> Drafter | None:
        return self.drafting.resolve(target)

    @cached_property
    def drafting(self) -> DrafterChoice:
        learner = learners()(self.choice.model).drafter if self.online else None
        return replace(self.choice, memory=self.remembered, learner=learner)

    @cached_property
    def remembered(self) -> Memory | None:
        from specdec_mlx.memory.store import as_memory

        return as_memory(self.memory) if self.memory_for == EVERYBODY else None

    def save_memory(self) -> None:
        if self.memory not in (None, PROCESS) and self.remembered is not None:
            self.remembered.save()


def learners() -> Any:
    entry = installed(LEARNERS, "learner").get("online")
    if entry is None:
        raise MissingPackageError(
            "argument --online: the installation does not know specdec_mlx.lab. Install "
            "specdec-mlx again."
        )
    return load(entry, "learner")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    taken = parser._option_string_actions
    # argparse raises on a flag that exists unless told to replace it.
    parser.conflict_handler = "resolve"
    drafters = sorted(registered_names(DRAFTER_GROUP, NO_DRAFTER))
    rules = registered_names(RULE_GROUP, *RULES)
    group = parser.add_argument_group("speculative decoding")
    add = group.add_argument
    add(
        "--drafter",
        action="append",
        default=[],
        type=known("drafter", drafters, PLACES),
        metavar="NAME[:KEY=VALUE,...]",
        help=f"Drafter: {', '.join(drafters)}, or the folder or repository of a model or a head. "
        "Several, and what --draft-model names, compete for each draft (default: "
        f"{DEFAULT_DRAFTER}; {MODEL_DRAFTER}:branches=4 has the draft model propose trees)",
    )
    if "--draft-model" not in taken:
        add("--draft-model", default=None, help="A model to draft with, a trained head, or auto.")
    add_lighter_arguments(group)
    add(
        "--num-draft-tokens",
        type=argument(parse_draft_length),
        metavar="K",
        help=f"Most tokens to draft in a round, or {AUTO}, which drafts what pays (the default)",
    )
    add(
        "--rule",
        type=known("rule", rules),
        default="auto",
        metavar="NAME[:KEY=VALUE,...]",
        help=f"Acceptance rule: {', '.join(rules)}; lenient and typical change the text's "
        "distribution (default: auto)",
    )
    add(
        "--kernels",
        type=known("kernels", KERNELS),
        default=NO_DRAFTER,
        metavar="NAME",
        help=f"Other kernels for passes over several rows, where they are faster: "
        f"{', '.join(KERNELS)} (default: {NO_DRAFTER})",
    )
    add(
        "--no-tuning",
        action="store_true",
        help="Neither use nor keep what --num-draft-tokens auto learned in earlier commands.",
    )
    add(
        "--memory",
        metavar=f"FILE|{PROCESS}|{NO_DRAFTER}",
        help="Draft from what was written before, as kept in FILE, and add what is written now; "
        f"'{PROCESS}' keeps it for as long as the process runs (default: that for a server on a "
        f"loopback address, else '{NO_DRAFTER}')",
    )
    add(
        "--online",
        action="store_true",
        help="Let a trained head or a draft model learn on from what the model writes, and save it "
        "at the end.",
    )
    add("--stats", action="store_true", help="Print the account of the speculation.")


def add_grammar_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("structured output (needs the extra `grammar`)")
    only = group.add_mutually_exclusive_group()
    for kind, metavar, words in (
        ("json_schema", "FILE", "Write JSON that fits it."),
        ("regex", "PATTERN", "Write what it matches as a whole."),
        ("lark", "FILE", "Write what its rule `start` says."),
    ):
        only.add_argument(
            f"--{kind.replace('_', '-')}",
            dest="grammar",
            type=argument(partial(grammar_of, kind)),
            metavar=metavar,
            help=words,
        )


def grammar_of(kind: str, source: str) -> Grammar:
    from specdec_mlx.drafters.grammar import Grammar

    make: Callable[[str], Grammar] = getattr(Grammar, kind)
    return make(source if kind == "regex" else read_text(existing_file(source)))


def take_flags(namespace: argparse.Namespace) -> Flags:
    from specdec_mlx.drafters.choosing.choice import choice_of
    from specdec_mlx.kernels import make_kernels

    check_numbers(namespace)
    check_values(namespace)
    check_files(namespace)
    length = namespace.num_draft_tokens
    same = "rule", "stats", "online"
    flags = Flags(
        choice_of(namespace),
        num_draft_tokens="auto" if length is None else length,
        grammar=getattr(namespace, "grammar", None),
        keeps_tuning=not namespace.no_tuning,
        kernels=make_kernels(namespace.kernels),
        memory=None if namespace.memory == NO_DRAFTER else namespace.memory,
        **{name: getattr(namespace, name) for name in same},
    )
    if flags.online:
        learners().check(flags.choice.model)
    # mlx-lm would load it once more.
    namespace.draft_model = None
    return flags


RARE = (
    "trust-remote-code extra-eos-token prefill-response xtc-probability xtc-threshold "
    "min-tokens-to-keep ignore-chat-template use-default-chat-template chat-template-config "
    "max-kv-size prefill-step-size quantize-activations kv-bits kv-group-size "
    "quantized-kv-start pipeline draft-layers draft-vocab rule kernels ties no-tuning online "
    "lark"
)
"""Flags of mlx-lm's and ours that most people never need."""

COUNTS = (
    "max-tokens max-kv-size prefill-step-size prompt-tokens generation-tokens num-trials batch-size"
)
"""mlx-lm's flags whose numbers it does not check itself."""


def check_numbers(namespace: argparse.Namespace) -> None:
    for flag in COUNTS.split():
        value = getattr(namespace, flag.replace("-", "_"), None)
        unlimited = flag == "max-tokens"
        if value is not None and value < 1 and not (unlimited and value == -1):
            expected = f"an int >= 1{', or -1 for no limit' if unlimited else ''}"
            raise ValueError(f"argument --{flag}: {value}: expected {expected}.")


def check_values(namespace: argparse.Namespace) -> None:
    from specdec_mlx.rules import make_rule
    from specdec_mlx.sampling import Sampling

    sampling = {name: getattr(namespace, name, None) for name in vars(Sampling())}
    Sampling(**{name: value for name, value in sampling.items() if value is not None})
    try:
        make_rule(namespace.rule)
    except ValueError as error:
        raise ValueError(f"argument --rule: {error}") from error


def check_files(namespace: argparse.Namespace) -> None:
    check_adapter(getattr(namespace, "adapter_path", None))
    cache = getattr(namespace, "prompt_cache_file", None)
    if cache is not None and not Path(cache).is_file():
        raise FileNotFoundError(
            f"argument --prompt-cache-file: there is no file {cache}. mlx_lm.cache_prompt makes "
            "one."
        )


def check_adapter(folder: str | None) -> None:
    if folder is not None and not (Path(folder) / "adapter_config.json").is_file():
        raise FileNotFoundError(
            f"Adapter {folder} is no folder with an adapter_config.json. mlx_lm.lora makes one."
        )


OnFlags = Callable[[argparse.Namespace, Flags], None]
AddArguments = Callable[[argparse.ArgumentParser], None]


def run_main(module: Any, arguments: Sequence[str], on_flags: OnFlags, *more: AddArguments) -> None:
    program = f"specdec-mlx {module.__name__.rpartition('.')[2]}"
    with (
        replaced_names(module, {"argparse": argparse_with_flags(on_flags, *more)}),
        replaced_names(sys, {"argv": [program, *arguments]}),
    ):
        module.main()


def argparse_with_flags(on_flags: OnFlags, *more: AddArguments) -> Any:
    """A stand-in for the module `argparse` whose parsers take our flags.

    Args:
        on_flags: called with arguments and flags before `main` goes on. Its ValueError or OSError
            ends the command as a wrong argument does.
        more: functions that add further flags.
    """

    class WithFlags(Parser):
        def parse_args(self, *args: Any, **kwargs: Any) -> Any:
            for add in (add_arguments, *more):
                add(self)
            self.add_help_all(RARE.split())
            # None tells whether the flag was given. mlx-lm gets its own default back below.
            theirs = self.get_default("num_draft_tokens")
            self.set_defaults(num_draft_tokens=None)
            namespace = super().parse_args(*args, **kwargs)
            try:
                on_flags(namespace, take_flags(namespace))
            except (ValueError, OSError) as error:
                self.error(str(error))
            if not isinstance(namespace.num_draft_tokens, int):  # mlx-lm's own loop takes an int
                namespace.num_draft_tokens = theirs
            return namespace

    return SimpleNamespace(**{**vars(argparse), "ArgumentParser": WithFlags})


@contextmanager
def replaced_names(module: Any, names: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(module, name) for name in names}
    vars(module).update(names)
    try:
        yield
    finally:
        vars(module).update(before)
