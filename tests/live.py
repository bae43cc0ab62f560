"""The server over a tiny model that says as it is told, in this process, and its clients."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import mlx.core as mx
import openai
import pytest
import uvicorn
from mlx_lm.models import qwen2
from mlx_lm.utils import load_tokenizer

import tiny_model_folder
from engines import running
from specdec_mlx.server.app import make_app
from specdec_mlx.server.engine import Engine
from specdec_mlx.server.requests import TextRequest
from tiny_model_folder import write_model_folder

TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}</s>{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% for tool_call in m.tool_calls or [] %}<tool_call>{{ tool_call.function.name }} "
    "{{ tool_call.function.arguments | tojson }}</tool_call>{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ '<think>' if enable_thinking }}{% endif %}"
    "{# tool_call.name #}"
)
"""A template with tools, thoughts and results."""


@dataclass
class Script:
    """The next texts of all Qwen 2 models, one a request; their own after that."""

    tokenizer: Any = None
    texts: list[str] = field(default_factory=list)
    requests: list[TextRequest] = field(default_factory=list)
    _tokens: list[int] = field(default_factory=list)
    _start: int = 0

    def begin(self, request: TextRequest, num_prompt: int) -> None:
        """Take the text for a request with a prompt of so many tokens."""
        self.requests.append(request)
        self._start, self._tokens = num_prompt, []
        if self.texts:
            self._tokens = [*self.tokenizer.encode(self.texts.pop(0), add_special_tokens=False)]
            self._tokens.append(self.tokenizer.eos_token_id)

    def write(self, logits: mx.array, end: int) -> None:
        """Put the text into the logits [1, T, V] of the positions before `end`."""
        num_rows, vocab_size = logits.shape[1:]
        for i in range(num_rows):
            place = end - num_rows + i + 1 - self._start
            if 0 <= place < len(self._tokens):
                logits[:, i] = 50.0 * (mx.arange(vocab_size) == self._tokens[place])


@contextmanager
def scripted() -> Iterator[Script]:
    """A script for all engines and all Qwen 2 models of the block."""
    script, own, submit = Script(), qwen2.Model.__call__, Engine.submit

    def call(self: Any, inputs: mx.array, cache: Any = None, **options: Any) -> mx.array:
        logits: mx.array = own(self, inputs, cache=cache, **options)
        end = cache[0].offset if cache else inputs.shape[1]
        if isinstance(end, int) and inputs.shape[0] == 1:
            script.write(logits, end)
        return logits

    def begin(self: Engine, request: TextRequest, put: Any) -> Any:
        script.begin(request, self.num_tokens(request))
        return submit(self, request, put)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qwen2.Model, "__call__", call)
        patch.setattr(Engine, "submit", begin)
        special = [*tiny_model_folder.SPECIAL, "<think>", "</think>"]
        patch.setattr(tiny_model_folder, "SPECIAL", special)
        patch.setattr(tiny_model_folder, "CHAT_TEMPLATE", TEMPLATE)
        yield script


@contextmanager
def served(script: Script, folder: Path, **settings: Any) -> Iterator[str]:
    """The address of a server of such a model, which is written to a new folder."""
    write_model_folder(folder, max_position_embeddings=2**16)
    script.tokenizer = load_tokenizer(folder)
    plain = {"enable_thinking": False}
    with (
        running(folder, any_model_name=True, chat_template_args=plain, **settings) as engine,
        listening(make_app(engine, engine.settings)) as port,
    ):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def listening(app: Any, **options: Any) -> Iterator[int]:
    """The port of an application that is served in a thread."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, **options))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
    (listener,) = server.servers[0].sockets
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def anthropic_at(url: str) -> anthropic.Anthropic:
    """Anthropic's own client."""
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


def openai_at(url: str) -> openai.OpenAI:
    """OpenAI's own client."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def post(url: str, body: Any, headers: Sequence[tuple[str, str]] = ()) -> tuple[int, bytes]:
    """Status and text of the answer to a request as it stands."""
    request = urllib.request.Request(url, json.dumps(body).encode(), dict(headers))
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=240) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
