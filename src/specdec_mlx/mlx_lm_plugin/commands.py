"""mlx-lm's commands with our flags: `specdec-mlx generate | chat | benchmark`."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler

from specdec_mlx.contracts import all_drafters
from specdec_mlx.draft_length.store import kept_tuning
from specdec_mlx.mlx_lm_plugin.flags import Flags, add_grammar_arguments, replaced_names, run_main
from specdec_mlx.mlx_lm_plugin.generation_config import ARGUMENTS, described, recommended_sampling
from specdec_mlx.mlx_lm_plugin.installation import Speculation, check_version, in_force
from specdec_mlx.models.loading import explained, folder_of, load_on_ranks
from specdec_mlx.sampling import Sampling

COMMANDS = "generate", "chat", "benchmark"  # mlx-lm's commands that run with our flags


class _Terminated(KeyboardInterrupt):
    """SIGTERM came."""


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt in this block; end the process if nobody caught it."""

    def interrupt(number: int, frame: Any) -> None:
        raise _Terminated

    # Only the main thread can set handlers. On several ranks not all would end.
    is_main = threading.current_thread() is threading.main_thread()
    is_alone = mx.distributed.init().size() == 1
    if not (is_main and is_alone and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL):
        yield
        return
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except _Terminated:
        raise SystemExit(128 + signal.SIGTERM) from None
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def run_command(name: str, arguments: Sequence[str]) -> None:
    check_version()
    with ExitStack() as stack:
        if mx.distributed.init().rank() > 0:  # the first rank speaks for all
            stack.enter_context(
                redirect_stdout(stack.enter_context(open(os.devnull, "w", encoding="utf-8")))
            )
        stack.enter_context(terminated_as_interrupted())
        Command(name).run(arguments)


class Command:
    flags: Flags
    arguments: argparse.Namespace

    def __init__(self, name: str) -> None:
        self.name, self.module = name, importlib.import_module(f"mlx_lm.{name}")
        self.speculation, self.stack = Speculation(None), ExitStack()

    def run(self, arguments: Sequence[str]) -> None:
        more = [add_grammar_arguments, add_sampling_arguments]
        more = [] if self.name == "benchmark" else more
        with self.stack, replaced_names(self.module, self._names()):
            run_main(self.module, arguments, self._take, *more)
        self._close()

    def _take(self, namespace: argparse.Namespace, flags: Flags) -> None:
        self.flags, self.arguments = flags, namespace
        if self.name == "benchmark" and flags.online:
            raise ValueError(
                "argument --online: the benchmark's prompt is random tokens, from which nothing "
                "should be learnt. Leave it out."
            )
        drafter = None if flags.waits_for_target else flags.drafter()
        how = flags.num_draft_tokens, flags.rule, None, flags.grammar
        # Commands without the flag always seed MLX.
        is_seeded = getattr(namespace, "seed", 0) is not None
        more: dict[str, Any] = {"kernels": flags.kernels, "ties": getattr(namespace, "ties", None)}
        self.speculation = Speculation(drafter, *how, is_seeded=is_seeded, **more)
        self.stack.callback(flags.save_memory)
        self.stack.enter_context(in_force(self.speculation))

    def _names(self) -> dict[str, Any]:
        loaders = [name for name in ("load", "sharded_load") if hasattr(self.module, name)]
        names = {name: self._noting(getattr(self.module, name)) for name in loaders}
        if self.name == "generate" and mx.distributed.init().size() > 1:
            names["load"] = self._noting(load_on_ranks)  # as mlx-lm's other commands do
        if self.name == "chat":
            names |= {"ChatUI": self._interface(), "make_sampler": self._sampler}
        return names

    def _noting(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """`load`, which also notes the tokenizer and the model's tuning."""

        def loading(name: str, *args: Any, **kwargs: Any) -> Any:
            with explained(name):
                loaded = load(name, *args, **kwargs)
            self.speculation.tokenizer = loaded[1]
            if self.name != "benchmark":
                self._choose_sampling(folder_of(name))
            # Only now is the target there that such a drafter is made for.
            if self.flags.waits_for_target:
                self.speculation.drafter = self.flags.drafter(loaded[0])
                for part in all_drafters(self.speculation.drafter):
                    # only heads and learning drafters describe themselves
                    if line := part.describe():
                        print(f"Drafting with {line}", file=sys.stderr)
            if self.flags.keeps_tuning:
                whose = str(name), kwargs.get("adapter_path"), self.flags.kernels
                self.stack.enter_context(kept_tuning(loaded[0], *whose))
            return loaded

        return loading

    def _choose_sampling(self, folder: Path) -> None:
        recommended, problems = recommended_sampling(folder)
        missing = [name for name in ARGUMENTS.values() if getattr(self.arguments, name) is None]
        used = {name: recommended[name] for name in missing if name in recommended}
        vars(self.arguments).update({name: getattr(Sampling(), name) for name in missing}, **used)
        words = [f"Sampling: {described(used)}"] if used else []
        if mx.distributed.init().rank() == 0:
            for line in [*problems, *words]:
                print(line, file=sys.stderr)

    def _sampler(self, *args: Any, **kwargs: Any) -> Any:
        """The sampler of `chat`, with two filters that `chat` lacks."""
        filters = {"top_k": self.arguments.top_k, "min_p": self.arguments.min_p}
        return make_sampler(*args, **filters, **kwargs)

    def _interface(self) -> Any:
        command = self

        class Interface(self.module.ChatUI):  # type: ignore[misc, name-defined]
            def prompt(self) -> str:
                try:
                    return str(super().prompt())
                except EOFError:
                    return "q"  # leaves the chat

            def end_turn(self, response: Any) -> None:
                super().end_turn(response)
                if command.flags.stats:
                    print(f"  {closing_line(command.speculation)}", flush=True)

        return Interface

    def _close(self) -> None:
        shows_lines = self.name == "generate" and self.arguments.verbose
        if shows_lines:
            print(closing_line(self.speculation))
        if self.name == "benchmark" and self.flags.stats:
            print(f"Last trial. {closing_line(self.speculation)}")
        if self.name != "chat" and self.flags.stats:
            # stdout has the text only, for pipes
            is_bare = self.name == "generate" and not shows_lines
            print_account(self.speculation, sys.stderr if is_bare else sys.stdout)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the filters that a command lacks. The default None means that no flag was given."""
    for flag, kind in (("--top-k", int), ("--min-p", float)):
        if flag not in parser._option_string_actions:
            parser.add_argument(flag, type=kind, help=f"Sampling {flag[2:]}")
    what = "Let plain passes decide where rounding could exchange two tokens (greedy, or a seed)."
    parser.add_argument("--ties", choices=("plain",), help=what)
    parser.set_defaults(**dict.fromkeys(ARGUMENTS.values()))


def closing_line(speculation: Speculation) -> str:
    stats = speculation.stats
    if speculation.drafter is None or stats is None:
        return "Speculation: none"
    line = (
        f"Speculation: {stats.tokens_per_pass:.2f} tokens per pass, "
        f"accepted {stats.accepted} of {stats.drafted} drafted"
    )
    speedup = stats.observed_speedup if stats.accepted else None
    return line if speedup is None else f"{line}, {speedup:.2f} times the plain pace"


def print_account(speculation: Speculation, file: Any) -> None:
    stats = speculation.stats
    if stats is None or mx.distributed.init().rank() > 0:
        return
    print(stats, file=file)
    rounds = ", ".join(f"{n}: {count}" for n, count in enumerate(stats.accept_histogram))
    print(f"Rounds by accepted tokens: {rounds}", file=file)
    rates = ", ".join(f"{rate:.0%}" for rate in stats.acceptance_by_position)
    print(f"Acceptance by position: {rates or 'nothing drafted'}", file=file)
