"""Processor time of a server a token, ours and stock, with a model that costs nothing.

    python -m benchmarks.server_cost --max-tokens 2000

The model looks up one row a position. Servers are asked in turn, one stream at a time and then
several at once; what counts is the processor time of their processes, which a busy machine changes
little. Ours answers plainly (`drafter` none), so that both make a pass a token, and as it does by
itself.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil  # type: ignore[import-untyped]
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from benchmarks.server import MODULES, OURS, STOCK, serving

FIRST, LAST = 33, 126  # bytes that are written, in turn
END = "<end>"
SOURCE = """\
import mlx.core as mx
import mlx.nn as nn


class ModelArgs:
    @classmethod
    def from_dict(cls, config):
        args = cls()
        args.model_type, args.following = config["model_type"], config["following"]
        return args


class Model(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args, self.model_type = args, args.model_type
        self.one, self.layers = mx.ones(1), [nn.Identity()]
        following = mx.array(args.following)
        self._rows = (following[:, None] == mx.arange(len(args.following))) * 20.0

    def __call__(self, inputs, cache=None, **_):
        if cache is not None:
            nothing = mx.zeros((*inputs.shape, 1))[:, None]
            cache[0].update_and_fetch(nothing, nothing)
        return self._rows[inputs]
"""


def write_model(folder: Path) -> Path:
    """Write the model as a folder of mlx-lm's, and return it."""
    pieces = {piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(pieces, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    following = [pieces[chr(FIRST)]] * tokenizer.get_vocab_size()
    for byte in range(FIRST, LAST):
        following[pieces[chr(byte)]] = pieces[chr(byte + 1)]
    (folder / "model.py").write_text(SOURCE, encoding="utf-8")
    mx.save_safetensors(str(folder / "model.safetensors"), {"one": mx.ones(1)}, {"format": "mlx"})
    config: dict[str, Any] = {"model_type": "nothing", "model_file": "model.py"}
    config |= {"following": following}
    config |= {"vocab_size": len(following), "num_hidden_layers": 1}
    config |= {"max_position_embeddings": 2**20, "eos_token_id": tokenizer.token_to_id(END)}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    how: dict[str, Any] = {"chat_template": template, "eos_token": END}
    how |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(how), encoding="utf-8")
    return folder


def processor_seconds(url: str) -> float:
    """Of the process that listens there."""
    port = int(url.rsplit(":", 1)[1])
    listening = (c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
    times = psutil.Process(next(c.pid for c in listening if c.laddr.port == port)).cpu_times()
    return float(times.user + times.system)


def ask(url: str, more: dict[str, Any], max_tokens: int) -> int:
    """Read a stream; its number of tokens."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600)
    options: dict[str, Any] = {"model": "default_model", "stream": True, "temperature": 0.0}
    options |= {"stream_options": {"include_usage": True}, "max_tokens": max_tokens}
    messages: Any = [{"role": "user", "content": "!"}]
    chunks = client.chat.completions.create(messages=messages, extra_body=more, **options)
    return sum(chunk.usage.completion_tokens for chunk in chunks if chunk.usage)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server_cost", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--max-tokens", type=int, default=1000, help="of a text (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of each row (%(default)s)")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4], help="at once (1 4)")
    args = parser.parse_args(arguments)
    rows = [(STOCK, STOCK, {}), (f"{OURS}, plain", OURS, {"drafter": "none"}), (OURS, OURS, {})]
    with ExitStack() as stack:
        folder = write_model(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        urls = {
            name: stack.enter_context(
                serving(name, str(folder), ("--trust-remote-code",), (module,))
            )
            for name, module in MODULES.items()
        }
        print(f"{'server':<28}" + "".join(f"{n:>8} at once" for n in args.clients))
        seconds = {(row[0], n): list[float]() for row in rows for n in args.clients}
        for _ in range(args.repeats + 1):  # the first is not counted
            for clients in args.clients:
                for row, name, more in rows:
                    before = processor_seconds(urls[name])
                    with ThreadPoolExecutor(clients) as pool:
                        asked = [
                            pool.submit(ask, urls[name], more, args.max_tokens)
                            for _ in range(clients)
                        ]
                        num_tokens = sum(one.result() for one in asked)
                    took = processor_seconds(urls[name]) - before
                    seconds[row, clients].append(took / num_tokens)
        for row, _, _ in rows:
            least = (min(seconds[row, n][1:]) * 1e3 for n in args.clients)
            print(f"{row:<28}" + "".join(f"{x:>13.3f} ms" for x in least))
    return 0


if __name__ == "__main__":
    sys.exit(main())
