"""mlx-lm's commands with our flags: `specdec-mlx generate | chat | server | benchmark`."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any

import mlx.core as mx

from specdec_mlx.contracts import all_drafters
from specdec_mlx.draft_length.store import kept_tuning
from specdec_mlx.mlx_lm_plugin.compatible import check_version
from specdec_mlx.mlx_lm_plugin.flags import Flags, add_grammar_arguments, replaced_names, run_main
from specdec_mlx.mlx_lm_plugin.installation import Speculation, in_force
from specdec_mlx.models import explained, load_on_ranks


class _Terminated(KeyboardInterrupt):
    """SIGTERM came."""


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt in this block, and end the process if nobody caught it.

    Only in the main thread, without another handler, and on one rank: one of several would not come
    to it.
    """
    is_main = threading.current_thread() is threading.main_thread()
    is_alone = mx.distributed.init().size() == 1
    if not (is_main and is_alone and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL):
        yield
        return
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    except _Terminated:
        raise SystemExit(128 + signal.SIGTERM) from None
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _interrupt(number: int, frame: Any) -> None:
    raise _Terminated


def run_command(name: str, arguments: Sequence[str]) -> None:
    """Run mlx-lm's command of that name, one of `COMMANDS`; raises what it may raise."""
    check_version()
    with ExitStack() as stack:
        if mx.distributed.init().rank() > 0:  # the first rank speaks for all
            stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        stack.enter_context(terminated_as_interrupted())
        COMMANDS[name](arguments)


class Command:
    """A command of mlx-lm with one drafter, and with flags for structure unless it is a benchmark.

    Each kind of it may replace further names of the module, refuse arguments, and say more at the
    end.
    """

    def __init__(self, name: str) -> None:
        self.module = importlib.import_module(f"mlx_lm.{name}")
        self.flags = Flags()
        self.arguments = argparse.Namespace()
        self.speculation = Speculation(None)
        self.stack = ExitStack()

    def run(self, arguments: Sequence[str]) -> None:
        """Let mlx-lm's `main` run with our parser, and its calls speculate."""
        more = [] if isinstance(self, Benchmark) else [add_grammar_arguments]
        with self.stack, replaced_names(self.module, self.names()):
            run_main(self.module, arguments, self._take, *more)
        self.close()

    def _take(self, namespace: argparse.Namespace, flags: Flags) -> None:
        self.flags, self.arguments = flags, namespace
        self.check()
        self.speculation.drafter = None if flags.waits_for_target else flags.drafter()
        self.speculation.draft_length = flags.draft_length
        self.speculation.rule = flags.rule
        self.speculation.grammar = flags.grammar
        self.stack.callback(flags.save_memory)
        self.stack.enter_context(in_force(self.speculation))

    def names(self) -> dict[str, Any]:
        """Replacements for names of the module: of what loads, to learn the tokenizer."""
        loaders = [name for name in ("load", "sharded_load") if hasattr(self.module, name)]
        return {name: self.noting_tokenizer(getattr(self.module, name)) for name in loaders}

    def check(self) -> None:
        """Raise ValueError for arguments that do not go together."""

    def close(self) -> None:
        """Print the account, if one is wanted at the end."""

    def noting_tokenizer(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """`load`, which also notes the tokenizer, and takes up the model's tuning."""

        def loading(name: str, *args: Any, **kwargs: Any) -> Any:
            with explained(name):
                loaded = load(name, *args, **kwargs)
            self.speculation.tokenizer = loaded[1]
            if self.flags.waits_for_target:
                self.speculation.drafter = self.flags.drafter(loaded[0])
                for part in all_drafters(self.speculation.drafter):
                    if describe := getattr(part, "describe", None):  # heads, and what learns on
                        print(f"Drafting with {describe()}", file=sys.stderr)
            if self.flags.keeps_tuning:
                adapter = kwargs.get("adapter_path")
                self.stack.enter_context(kept_tuning(loaded[0], str(name), adapter))
            return loaded

        return loading


class Generate(Command):
    """`generate`: mlx-lm's closing lines, and a line of ours below; with --stats the account."""

    def names(self) -> dict[str, Any]:
        """On several ranks, `load` spreads the model over them, as in mlx-lm's other commands."""
        names = super().names()
        if mx.distributed.init().size() > 1:
            names["load"] = self.noting_tokenizer(load_on_ranks)
        return names

    def close(self) -> None:
        """Print what is wanted, the account to stderr if mlx-lm prints nothing but the text."""
        verbose = self.arguments.verbose
        if verbose:
            print(closing_line(self.speculation))
        if self.flags.stats:
            print_account(self.speculation, sys.stdout if verbose else sys.stderr)


class Chat(Command):
    """`chat`: with --stats a line after each turn; a grammar is that of each answer."""

    def names(self) -> dict[str, Any]:
        """Also the user interface, for the end of a turn and of the input."""
        command = self
        interface: Any = self.module.ChatUI

        class ChatUI(interface):  # type: ignore[misc]
            def prompt(self) -> str:
                try:
                    return str(super().prompt())
                except EOFError:
                    return "q"  # which leaves `chat`

            def end_turn(self, response: Any) -> None:
                super().end_turn(response)
                if command.flags.stats:
                    print(f"  {closing_line(command.speculation)}", flush=True)

        return {**super().names(), "ChatUI": ChatUI}


class Benchmark(Command):
    """`benchmark`: mlx-lm's speeds, with speculation; with --stats of the last trial."""

    def check(self) -> None:
        """Refuse batches, in which mlx-lm does not speculate, and to learn from random tokens."""
        if self.flags.online:
            raise ValueError(
                "argument --online: the benchmark's prompt is random tokens, from which nothing "
                "should be learnt. Leave it out."
            )
        if self.arguments.batch_size != 1 and self.flags.asked:
            raise ValueError(
                "argument --batch-size: mlx-lm does not speculate in batches. Leave the flags for "
                "speculative decoding out, or use --batch-size 1."
            )

    def close(self) -> None:
        """Print the account of the last trial."""
        if self.flags.stats:
            print(f"Last trial. {closing_line(self.speculation)}")
            print_account(self.speculation, sys.stdout)


def closing_line(speculation: Speculation) -> str:
    """Tokens per pass, accepted of drafted, and, if any were accepted, the measured speedup."""
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
    """The whole account of the latest generation."""
    stats = speculation.stats
    if stats is None or mx.distributed.init().rank() > 0:
        return
    print(stats, file=file)
    rounds = ", ".join(f"{n}: {count}" for n, count in enumerate(stats.accept_histogram))
    print(f"Rounds by accepted tokens: {rounds}", file=file)
    rates = ", ".join(f"{rate:.0%}" for rate in stats.acceptance_by_position)
    print(f"Acceptance by position: {rates or 'nothing drafted'}", file=file)


def _run_server(arguments: Sequence[str]) -> None:
    from specdec_mlx.mlx_lm_plugin.server import run_server

    run_server(arguments)


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "generate": lambda arguments: Generate("generate").run(arguments),
    "chat": lambda arguments: Chat("chat").run(arguments),
    "server": _run_server,
    "benchmark": lambda arguments: Benchmark("benchmark").run(arguments),
}
"""Commands of mlx-lm that are run with our flags."""
