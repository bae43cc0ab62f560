"""A recorded agent session, turn by turn, on `specdec-mlx server` and on stock `mlx_lm.server`.

    python -m benchmarks.sessions --sessions agent_sessions.jsonl --id airline/23

Each turn is asked of both servers, who is first alternates, and the next turn goes on with what was
recorded. A scripted target runs the whole model and then says what was recorded, token by token;
with `--free` the model says what it likes, and with `--most-characters` messages are cut to fit it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import runpy
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm

from benchmarks.server import MODULES, OURS, STOCK, serving
from specdec_mlx.files import json_lines
from specdec_mlx.lab.demo_model import demo_model_path

FORCED = 1e4  # logit of the token that the script has next


@dataclass
class Answers:
    """One server's: seconds, those to first tokens, tokens read and said, passes, and the texts."""

    seconds: float = 0.0
    first: float = 0.0
    read: int = 0
    said: int = 0
    passes: int = 0
    texts: tuple[str, ...] = ()

    def add(self, stream: Any) -> None:
        """Read a streamed answer, and count it."""
        started, first, text, usage = time.perf_counter(), 0.0, "", None
        for chunk in stream:
            usage = chunk.usage or usage
            if chunk.choices and (said := chunk.choices[0].delta.content):
                first = first or time.perf_counter() - started
                text += said
        assert usage is not None
        details = getattr(usage, "prompt_tokens_details", None)
        account = getattr(usage, "speculation", None) or {}
        self.seconds += time.perf_counter() - started
        self.first += first
        self.read += usage.prompt_tokens - (details.cached_tokens if details else 0)
        self.said += usage.completion_tokens
        self.passes += account.get("target_passes", usage.completion_tokens)
        self.texts = (*self.texts, text)


def scripted(model: Any, script: Sequence[int]) -> Any:
    """The model, which computes as ever and then says what the script has at each position."""
    kind, tokens = type(model), mx.array(list(script))

    def call(self: Any, inputs: mx.array, cache: Any = None, **options: Any) -> mx.array:
        start = 0 if cache is None else cache[0].offset + 0
        logits = kind.__call__(self, inputs, cache=cache, **options)
        begin = start[:, None] if isinstance(start, mx.array) and start.ndim else start
        places = mx.minimum(begin + 1 + mx.arange(inputs.shape[1]), len(script) - 1)
        is_next = mx.arange(logits.shape[-1]) == tokens[places][..., None]
        return mx.where(is_next, FORCED, logits)

    model.__class__ = type(
        kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__}
    )
    return model


def serve(name: str, script: Path, arguments: Sequence[str]) -> None:
    """Run a server whose model says what the script has."""
    stock: Any = importlib.import_module("mlx_lm.server")
    load, tokens = mlx_lm.load, json.loads(script.read_text(encoding="utf-8"))

    def loading(*args: Any, **options: Any) -> Any:
        model, *rest = load(*args, **options)
        return scripted(model, tokens), *rest

    stock.load = mlx_lm.load = loading
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__")


def race(
    urls: dict[str, str], messages: list[dict[str, str]], num_turns: int, most: int
) -> dict[str, Answers]:
    """Ask both servers for each assistant message, after those recorded before it."""
    import openai

    clients = {name: openai.OpenAI(base_url=f"{u}/v1", api_key="none") for name, u in urls.items()}
    for client in clients.values():  # weights are read now, and a model's first pass is measured
        hello: Any = [{"role": "user", "content": "Say hello, and hello again."}]
        client.chat.completions.create(model="default_model", messages=hello, max_tokens=16)
    answers = {name: Answers() for name in clients}
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for turn, end in enumerate(turns[:num_turns]):
        for name in list(clients) if turn % 2 else list(reversed(clients)):
            asked: Any = messages[:end]
            options: dict[str, Any] = {"max_tokens": most, "temperature": 0.0, "stream": True}
            options["stream_options"] = {"include_usage": True}
            chat = clients[name].chat.completions
            answers[name].add(chat.create(model="default_model", messages=asked, **options))
    return answers


def table(answers: dict[str, Answers]) -> str:
    """For people to read."""
    stock, ours = answers[STOCK], answers[OURS]
    lines = [f"{'server':<20}{'seconds':>9}{'to first':>10}{'read':>8}{'said':>7}{'a pass':>8}"]
    for name, one in answers.items():
        a_pass = one.said / max(1, one.passes)
        seconds = f"{one.seconds:>9.1f}{one.first:>10.1f}"
        lines.append(f"{name:<20}{seconds}{one.read:>8}{one.said:>7}{a_pass:>8.2f}")
    same = sum(a == b for a, b in zip(stock.texts, ours.texts, strict=True))
    lines.append(f"{stock.seconds / ours.seconds:.2f} times stock; {same}/{len(ours.texts)} texts")
    return "\n".join(lines)


def main() -> int:
    """Race, and print; the exit status is 1 if a text differs."""
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
        return 0
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sessions", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--sessions", type=Path, required=True, metavar="FILE", help="JSON lines: id, messages")
    add("--id", required=True, help="of the session")
    add("--model", help="model folder or Hugging Face name (default: a small one)")
    add("--turns", type=int, default=20, help="answers (%(default)s)")
    add("--max-tokens", type=int, default=512, help="tokens an answer (%(default)s)")
    add("--most-characters", type=int, help="of a message")
    add("--free", action="store_true", help="let the model say what it likes")
    add("--flag", action="append", default=[], help="for our server, as --flag=--drafter=suffix")
    args = parser.parse_args()
    sessions = json_lines(args.sessions)
    messages = next(one["messages"] for _, one in sessions if one["id"] == args.id)
    messages = [m | {"content": m["content"][: args.most_characters]} for m in messages]
    model = str(args.model or demo_model_path())
    with ExitStack() as stack, tempfile.NamedTemporaryFile("w", suffix=".json") as script:
        if not args.free:
            from mlx_lm.utils import load_tokenizer

            tokens = load_tokenizer(model).apply_chat_template(messages)
            script.write(json.dumps(list(tokens)))
            script.flush()
        urls = {}
        for name, module in MODULES.items():
            program = ("benchmarks.sessions", "--serve", module, script.name)
            flags = args.flag if name == OURS else ()
            started = serving(name, model, flags, (module,) if args.free else program)
            urls[name] = stack.enter_context(started)
        answers = race(urls, messages, args.turns, args.max_tokens)
    print(table(answers))
    return int(answers[STOCK].texts != answers[OURS].texts)


if __name__ == "__main__":
    sys.exit(main())
