"""`specdec-mlx server` against stock `mlx_lm.server`, as a client sees them.

    python -m benchmarks.server --prompts FILE.jsonl --num 20 --max-tokens 96

Both serve the same model on the loopback, as processes, and are asked in turn, so that what else
the machine does hits both: first one request after another, then several clients at once, for each
number of them. Answers are streamed, and each client notes when its tokens come.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

from specdec_mlx.drafters.choosing.choice import add_lighter_arguments, named_model
from specdec_mlx.errors import MissingPackageError
from specdec_mlx.lab.bench.record import describe_machine
from specdec_mlx.lab.demo_model import demo_model_path
from specdec_mlx.lab.prompts import choose, encode_chat, read_prompts

STOCK, OURS = "mlx_lm.server", "specdec-mlx server"
MODULES = {STOCK: "mlx_lm", OURS: "specdec_mlx"}
START_SECONDS = 300.0


@dataclass(frozen=True)
class Answer:
    """What a client got: the text, its length in tokens, our part of the usage, and any error.

    Attributes:
        first: seconds to the first token.
        per_token: seconds to each token after it.
        last: seconds to the last one.
    """

    text: str = ""
    tokens: int = 0
    speculation: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    first: float = 0.0
    per_token: float = 0.0
    last: float = 0.0


@dataclass
class Phase:
    """Both servers on the same requests.

    Attributes:
        name: of the phase.
        seconds: server -> total.
        answers: server -> one for each request.
    """

    name: str
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(MODULES, 0.0))
    answers: dict[str, list[Answer]] = field(default_factory=lambda: {name: [] for name in MODULES})

    @property
    def ratio(self) -> float:
        """Stock's time over ours: above 1 is sooner."""
        return self.seconds[STOCK] / self.seconds[OURS] if self.seconds[OURS] else 0.0

    @property
    def num_same(self) -> int:
        """Requests that both answered with the same text."""
        pairs = zip(self.answers[STOCK], self.answers[OURS], strict=True)
        return sum(a.error is b.error is None and a.text == b.text for a, b in pairs)

    def per_token(self, server: str) -> tuple[float, float]:
        """Seconds to a token as clients see it: of the median client, and of the slowest."""
        each = [answer.per_token for answer in self.answers[server] if answer.per_token]
        return (median(each), max(each)) if each else (0.0, 0.0)

    @property
    def latest(self) -> float:
        """Our time to an answer's last token over stock's, of the answer where it is largest."""
        pairs = zip(self.answers[STOCK], self.answers[OURS], strict=True)
        return max((ours.last / stock.last for stock, ours in pairs if stock.last), default=0.0)

    @property
    def num_errors(self) -> dict[str, int]:
        """Server -> requests that failed."""
        return {
            name: sum(answer.error is not None for answer in answers)
            for name, answers in self.answers.items()
        }


Ask = Callable[[str], Answer]


def one_after_another(servers: dict[str, Ask], prompts: Sequence[str]) -> Phase:
    """Each prompt to each server; who is first alternates."""
    return _measure("one after another", servers, [[prompt] for prompt in prompts])


def several_at_once(servers: dict[str, Ask], prompts: Sequence[str], clients: int) -> Phase:
    """As many prompts at a time as there are clients, until all of them are answered.

    Args:
        servers: name -> how to ask it.
        prompts: each is asked of each server.
        clients: how many ask at once.
    """
    groups = [prompts[i : i + clients] for i in range(0, len(prompts), clients)]
    return _measure(f"{clients} at once", servers, groups)


def _measure(name: str, servers: dict[str, Ask], groups: Sequence[Sequence[str]]) -> Phase:
    phase = Phase(name)
    with ThreadPoolExecutor(max(map(len, groups), default=1)) as pool:
        for turn, group in enumerate(groups):
            for server in list(servers) if turn % 2 == 0 else reversed(servers):
                started = time.perf_counter()
                phase.answers[server] += pool.map(servers[server], group)
                phase.seconds[server] += time.perf_counter() - started
    return phase


def asking(url: str, max_tokens: int) -> Ask:
    """A function that asks a server for a greedy answer, as a stream, with the openai client."""
    try:
        import openai
    except ImportError as error:
        raise MissingPackageError("This benchmark needs the client: pip install openai") from error
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def ask(prompt: str) -> Answer:
        started, came, text = time.perf_counter(), [], ""
        usage: Any = None
        try:
            for chunk in client.chat.completions.create(
                model="default_model",
                messages=[{"role": "user", "content": prompt}],
                max_tokens=max_tokens,
                temperature=0.0,
                stream=True,
                stream_options={"include_usage": True},
            ):
                usage = chunk.usage or usage
                if chunk.choices and chunk.choices[0].delta.content:
                    text += chunk.choices[0].delta.content
                    came.append(time.perf_counter())
        except openai.OpenAIError as error:
            return Answer(error=str(error))
        account = dict(getattr(usage, "speculation", None) or {})
        first, last = (came[0], came[-1]) if came else (started, started)
        tokens = usage.completion_tokens
        per_token = (last - first) / max(1, tokens - 1)
        return Answer(text, tokens, account, None, first - started, per_token, last - started)

    return ask


@contextmanager
def serving(
    name: str, model: str, flags: Sequence[str], program: Sequence[str] = ()
) -> Iterator[str]:
    """A server as a process on a free port; its address.

    Args:
        name: one of `MODULES`.
        model: folder or Hugging Face name.
        flags: further ones of the server's.
        program: module and arguments that run it, where it is not the one of that name.

    Raises:
        RuntimeError: it does not start.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", *(program or (MODULES[name],)), "server", "--model", model]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, "--port", str(port), *flags], stdout=log, stderr=subprocess.STDOUT
        )
        try:
            url = f"http://127.0.0.1:{port}"
            if not _is_up(url, process):
                log.seek(0)
                raise RuntimeError(f"{name} did not start:\n{log.read().decode()[-2000:]}")
            yield url
        finally:
            process.terminate()
            process.wait(timeout=60)


def _is_up(url: str, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return True
        except OSError:
            time.sleep(0.2)
    return False


def run(
    model: str,
    prompts: Sequence[str],
    num: int,
    clients: Sequence[int],
    max_tokens: int,
    flags: Sequence[str],
) -> list[Phase]:
    """All phases: `num` prompts one after another, then as many at once as there are clients.

    The prompts of each phase are others, if there are enough.

    The first answer of each server is not timed: weights are read and kernels compiled then.

    Args:
        model: folder or Hugging Face name.
        prompts: user messages.
        num: prompts in each phase.
        clients: at once; a phase for each number.
        max_tokens: of an answer.
        flags: of our server.

    Raises:
        RuntimeError: a server does not start.
    """
    with ExitStack() as stack:
        servers = {
            name: asking(
                stack.enter_context(serving(name, model, flags if name == OURS else ())), max_tokens
            )
            for name in MODULES
        }
        for ask in servers.values():
            ask("Say hello, and hello again.")
        first, *later = of_phases(prompts, num, 1 + len(clients))
        return [
            one_after_another(servers, first),
            *(
                several_at_once(servers, asked, number)
                for number, asked in zip(clients, later, strict=True)
            ),
        ]


def of_phases(prompts: Sequence[str], num: int, count: int) -> list[list[str]]:
    """The prompts of each phase: `num` others each time, as long as there are any.

    What a server has read before it reads no more, and so the phases could not be compared.
    """
    around = cycle(prompts)
    return [list(islice(around, min(num, len(prompts)))) for _ in range(count)]


def time_library(
    model: str, prompts: Sequence[str], max_tokens: int, draft_length: int | str
) -> float:
    """The library's own ratio on the same prompts, in this process: mlx-lm's time over ours.

    From before the prompt to the last token, like a request, and with prompt lookup.

    Args:
        model: folder or Hugging Face name.
        prompts: user messages.
        max_tokens: of an answer.
        draft_length: a number or a policy.
    """
    import mlx_lm

    from specdec_mlx.generation import stream_generate

    loaded, tokenizer = mlx_lm.load(model)[:2]
    calls: list[Callable[[list[int]], Any]] = [
        lambda ids: mlx_lm.stream_generate(loaded, tokenizer, ids, max_tokens=max_tokens),
        lambda ids: stream_generate(
            loaded,
            tokenizer,
            ids,
            max_tokens,
            drafter="prompt-lookup",
            num_draft_tokens=draft_length,
        ),
    ]
    seconds = [0.0, 0.0]
    for turn, prompt in enumerate([prompts[0], *prompts]):
        ids = encode_chat(tokenizer, prompt)
        for i in (0, 1) if turn % 2 else (1, 0):
            started = time.perf_counter()
            for _ in calls[i](ids):
                pass
            seconds[i] += (time.perf_counter() - started) if turn else 0.0  # the first warms up
    return seconds[0] / seconds[1]


def table(phases: Sequence[Phase]) -> str:
    """For people to read."""
    lines = [
        f"{'phase':<20}{'server':<20}{'requests':>9}{'tokens':>8}{'seconds':>9}{'ratio':>7}"
        f"{'ms/token':>10}{'slowest':>9}{'latest':>8}{'errors':>8}{'same text':>11}"
    ]
    for phase in phases:
        for name, answers in phase.answers.items():
            ours = name == OURS
            typical, slowest = phase.per_token(name)
            lines.append(
                f"{phase.name:<20}{name:<20}{len(answers):>9}"
                f"{sum(answer.tokens for answer in answers):>8}{phase.seconds[name]:>9.1f}"
                f"{f'{phase.ratio:.2f}' if ours else '':>7}"
                f"{1e3 * typical:>10.1f}{1e3 * slowest:>9.1f}"
                f"{f'{phase.latest:.2f}' if ours else '':>8}{phase.num_errors[name]:>8}"
                f"{f'{phase.num_same}/{len(answers)}' if ours else '':>11}"
            )
    lines += [
        "ratio: mlx_lm.server's time over ours; above 1 is sooner.",
        "ms/token: from a client's first token to its last, of the median client and the slowest.",
        "latest: our time to a last token over mlx_lm.server's, of the request that fares worst.",
    ]
    return "\n".join(lines)


def record(phases: Sequence[Phase], texts: bool) -> dict[str, Any]:
    """All figures, ready for JSON; the texts of the answers only where asked for."""
    rows = []
    for phase in phases:
        row = asdict(phase) | {"ratio": phase.ratio, "same": phase.num_same}
        row["latest"] = phase.latest
        row["errors"] = phase.num_errors
        for answers in row["answers"].values() if not texts else ():
            for answer in answers:
                del answer["text"]
        rows.append(row)
    return {"machine": describe_machine(), "phases": rows}


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server", description=__doc__)
    add = parser.add_argument
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add("--model", help="model folder or Hugging Face name (default: a small one)")
    add("--prompts", metavar="FILE", help="JSON lines with id, category, turns (default: ours)")
    add("--num", type=int, default=20, help="prompts in each phase (%(default)s)")
    add("--max-tokens", type=int, default=96, help="tokens an answer (%(default)s)")
    add("--category", action="append", default=[], help="of prompts, repeatable (default: all)")
    add("--clients", type=int, nargs="+", default=[2, 4], help="at once (2 4)")
    add("--drafter", action="append", default=[], help="for our server; repeatable")
    add("--draft-model", help="for our server")
    add_lighter_arguments(parser)
    add("--num-draft-tokens", default="auto", help="for our server (%(default)s)")
    add("--in-process", action="store_true", help="also time the library itself on these prompts")
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    add("--texts", action="store_true", help="with the texts of the answers")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; the exit status is 1 if a request failed or a text differs."""
    args = make_parser().parse_args(arguments)
    prompts = read_prompts(args.prompts)
    if args.category:
        prompts = [prompt for prompt in prompts if prompt.category in args.category]
    kinds = len({prompt.category for prompt in prompts})
    spread = choose(prompts, per_category=-(-(1 + len(args.clients)) * args.num // kinds))
    texts = [prompt.text for prompt in _mixed(spread)]
    model = str(args.model or demo_model_path())
    flags = ["--num-draft-tokens", args.num_draft_tokens]
    flags += [word for name in args.drafter for word in ("--drafter", name)]
    flags += ["--draft-model", args.draft_model] if args.draft_model else []
    flags += [word for flag in named_model(args).flags.items() for word in flag]
    try:
        phases = run(model, texts, args.num, args.clients, args.max_tokens, flags)
    except (MissingPackageError, RuntimeError) as error:
        print(f"specdec-mlx: {error}", file=sys.stderr)
        return 2
    print(table(phases))
    figures = record(phases, args.texts)
    if args.in_process:
        length = (
            args.num_draft_tokens
            if not args.num_draft_tokens.isdigit()
            else int(args.num_draft_tokens)
        )
        figures["library"] = time_library(model, texts[: args.num], args.max_tokens, length)
        print(f"The library itself, on the prompts of the first phase: {figures['library']:.2f}")
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    failed = any(sum(phase.num_errors.values()) for phase in phases)
    return 1 if failed or phases[0].num_same < len(phases[0].answers[OURS]) else 0


def _mixed(prompts: Sequence[Any]) -> list[Any]:
    """One prompt of each category, then the next of each, and so on."""
    by_category: dict[str, list[Any]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    longest = max(map(len, by_category.values()), default=0)
    return [group[i] for i in range(longest) for group in by_category.values() if i < len(group)]


if __name__ == "__main__":
    sys.exit(main())
