"""Agents that people use, on `specdec-mlx server`: each reads a file, mends it, runs its test.

    python -m benchmarks.agents /tmp/agents [--client "Claude Code"] [--url http://127.0.0.1:8080]

They are installed into the folder, from npm and PyPI, and started with a home of their own in it
and nothing but what their block in docs/agents.md says. The target is scripted (`agent_model.py`),
so that what is tried is the server and the client. What is judged is what is on disk: the file, and
the test's own note of what it found; then the client's output and exit status, and the answers of
the server, which are counted on the way. docs/agents.md shows three columns of the table.

With SPECDEC_MLX_API_KEY in the environment the server wants that key, and all agents have it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks import agent_model
from benchmarks.agent_model import END, FILE, ROLES, TEST, mended
from benchmarks.server import MODULES, OURS, serving

ROOT = Path(__file__).parent.parent
VOCABULARY = 8192
CONTEXT = 200_000
MOST_SECONDS = 300
MODEL = "local"
KEY = os.environ.get("SPECDEC_MLX_API_KEY", "none")  # which the server wants, if it is set
WRONG = "    return width + height  # rule 7c1d"
PROGRAM = f'''def area(width, height):
    """The area of a rectangle."""
{WRONG}
'''
CHECK = """import area, hashlib, pathlib
ok = area.area(3, 4) == 12
number = hashlib.sha256(pathlib.Path("area.py").read_bytes()).hexdigest()[:8]
print(f"All checks passed with {number}" if ok else "FAILED: area(3, 4) is not 12")
with open("runs.txt", "a") as runs:
    print(ok, number, file=runs)
"""
TEMPLATE = (
    "{%- macro text(content) %}{% if content is string %}{{ content }}{% elif content %}"
    "{% for part in content %}{{ part.text or '' }}{% endfor %}{% endif %}{% endmacro %}"
    "{%- if tools %}<|system|>Tools: {{ tools | tojson }}\n"
    'Calls are <tool_call>{"name": tool_call.name}</tool_call></s>{% endif %}'
    "{%- for m in messages %}<|{{ m['role'] }}|>{{ text(m['content']) }}"
    "{%- for c in m.get('tool_calls') or [] %}\n<tool_call>\n"
    "{{ {'name': c['function']['name'], 'arguments': c['function']['arguments']} | tojson }}"
    "\n</tool_call>{% endfor %}</s>{% endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif %}"
)


# The scripted target ------------------------------------------------------------------------------


def write_target(folder: Path) -> Path:
    """Write the scripted target as a model folder of mlx-lm's, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copy(agent_model.__file__, folder / "model.py")
    mx.save_safetensors(str(folder / "model.safetensors"), {"one": mx.ones(1)}, {"format": "mlx"})
    config = {"model_type": "scripted", "model_file": "model.py", "num_hidden_layers": 1}
    config |= {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": CONTEXT}
    config["eos_token_id"] = tokenizer.token_to_id(END)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    how: dict[str, Any] = {"chat_template": TEMPLATE, "eos_token": END}
    how |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(how), encoding="utf-8")
    return folder


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE, learnt from this project's pages and sources."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [*(ROOT / "docs").glob("*.md"), *(ROOT / "src").rglob("*.py")]
    tokenizer.train_from_iterator(
        (text.read_text(encoding="utf-8") for text in sorted(texts)), trainer
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (END, *ROLES)])
    tokenizer.add_tokens([AddedToken(token) for token in ("<tool_call>", "</tool_call>")])
    return tokenizer


# What is asked of the server ----------------------------------------------------------------------


@dataclass
class Traffic:
    """What went by: requests, those not answered with 2xx, and errors inside of streams; and
    whether the file's content was among what was sent."""

    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    has_read: bool = False


@contextmanager
def counting(
    url: str, traffic: Traffic, log: Path, change: Callable[[bytes], bytes] = bytes
) -> Iterator[str]:
    """The address of a proxy before a server, which counts.

    Args:
        url: of the server.
        traffic: what is filled.
        log: file that gets all requests and answers, as JSON lines.
        change: changes the body of a request before the server gets it.
    """
    upstream = urlsplit(url)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            body = change(self.body())
            headers = {k: v for k, v in self.headers.items() if k.lower() not in HOP_BY_HOP}
            headers |= {"Content-Length": str(len(body))} if body else {}
            connection = http.client.HTTPConnection(upstream.hostname or "", upstream.port or 80)
            connection.request(self.command, self.path, body or None, headers)
            reply = connection.getresponse()
            self.send_response(reply.status)
            for name, value in reply.getheaders():
                if name.lower() not in (*HOP_BY_HOP, "date", "server"):
                    self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection, answer = True, b""
            while part := reply.read1(65536):
                answer += part
                self.wfile.write(part)
                self.wfile.flush()
            self.note(body, reply.status, answer)
            connection.close()

        def body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def note(self, body: bytes, status: int, answer: bytes) -> None:
            what = f"{self.command} {self.path}"
            traffic.requests.append(what)
            traffic.has_read |= b"rule 7c1d" in body
            has_failed = status >= 400 and status != HTTPStatus.UPGRADE_REQUIRED  # Codex posts then
            if has_failed or b"event: error" in answer or b'data: {"error"' in answer:
                traffic.errors.append(f"{what}: {status} {answer[-200:].decode(errors='replace')}")
            sent, came = (one.decode(errors="replace") for one in (body, answer))
            line = {"request": what, "headers": dict(self.headers), "body": sent}
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line | {"status": status, "answer": came}) + "\n")

        def log_message(self, *_: Any) -> None:
            pass

        do_GET = do_POST = do_HEAD = do_PUT = do_DELETE = do_OPTIONS = handle_one  # noqa: N815

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy.handle_error = lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}"
    finally:
        proxy.shutdown()
        proxy.server_close()


HOP_BY_HOP = "connection", "transfer-encoding", "content-length", "host", "keep-alive"


# Clients ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Client:
    """An agent, and how it is pointed at a server.

    Args:
        name: of the agent.
        package: at npm, or at PyPI with `is_python`.
        command: the program and its arguments, from the server's address and the task.
        settings: environment variables, from the address.
        files: path in the home folder -> content, from the address.
        before: a command that runs once before, from the address.
        is_python: it is Python's.
    """

    name: str
    package: str
    command: Callable[[str, str], list[str]]
    settings: Callable[[str], dict[str, str]] = lambda url: {}
    files: Callable[[str], dict[str, str]] = lambda url: {}
    before: Callable[[str], list[str]] | None = None
    is_python: bool = False


CODEX = "codex", "exec", "--skip-git-repo-check", "-s", "danger-full-access"


def codex_config(url: str) -> dict[str, str]:
    """Of Codex: a provider, and a model that it does not know, which is offered plain tools."""
    lines = f'model = "{MODEL}"', 'model_provider = "specdec"', "", "[model_providers.specdec]"
    more = ['name = "specdec"', f'base_url = "{url}/v1"', ""]
    if KEY != "none":
        more.insert(2, 'env_key = "SPECDEC_MLX_API_KEY"')
    return {".codex/config.toml": "\n".join([*lines, *more])}


def opencode_config(url: str) -> dict[str, str]:
    """Of opencode: one provider with one model."""
    options = {"baseURL": f"{url}/v1", "apiKey": KEY}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "specdec", "options": options}
    provider["models"] = {MODEL: {"name": MODEL}}
    config = {"provider": {"specdec": provider}, "model": f"specdec/{MODEL}"}
    return {".config/opencode/opencode.json": json.dumps(config, indent=2)}


def continue_config(url: str) -> dict[str, str]:
    """Of Continue: one model."""
    lines = "name: local", "version: 1.0.0", "schema: v1", "models:", "  - name: local"
    more = "provider: openai", f"model: {MODEL}", f"apiBase: {url}/v1", f"apiKey: {KEY}"
    text = "\n".join(
        [*lines, *(f"    {line}" for line in more), "    capabilities: [tool_use]", ""]
    )
    return {".continue/config.yaml": text}


def pi_config(url: str) -> dict[str, str]:
    """Of pi: one provider with one model."""
    provider = {"baseUrl": f"{url}/v1", "api": "openai-completions", "apiKey": KEY}
    config = {"providers": {"specdec": provider | {"models": [{"id": MODEL}]}}}
    return {".pi/agent/models.json": json.dumps(config, indent=2)}


def openclaw_config(url: str) -> dict[str, str]:
    """Of OpenClaw: one provider with one model, and no chats beside the terminal."""
    model = {"id": MODEL, "name": MODEL, "contextWindow": CONTEXT, "maxTokens": 8192}
    provider = {"baseUrl": f"{url}/v1", "api": "openai-completions", "apiKey": KEY}
    defaults = {"model": {"primary": f"specdec/{MODEL}"}, "skipBootstrap": True}
    defaults["workspace"] = "."  # where it is started
    config = {
        "models": {"providers": {"specdec": provider | {"models": [model]}}},
        "agents": {"defaults": defaults},
    }
    return {".openclaw/openclaw.json": json.dumps(config, indent=2)}


QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "COPILOT_OFFLINE": "true",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "PI_OFFLINE": "1",
    "PI_TELEMETRY": "0",
}
"""Environment variables that keep clients from reporting to their authors, and from updates."""

CLIENTS = (
    Client(
        "Claude Code",
        "@anthropic-ai/claude-code",
        lambda url, task: ["claude", "-p", task, "--allowedTools", "Read,Edit,Bash"],
        lambda url: {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": KEY},
    ),
    Client(
        "Codex",
        "@openai/codex",
        lambda url, task: [*CODEX, "-c", f'openai_base_url="{url}/v1"', task],
        lambda url: {"CODEX_API_KEY": KEY},
    ),
    Client(
        "Codex, with a provider",
        "@openai/codex",
        lambda url, task: [*CODEX, task],
        lambda url: {"SPECDEC_MLX_API_KEY": KEY},
        files=codex_config,
    ),
    Client(
        "opencode",
        "opencode-ai",
        lambda url, task: ["opencode", "run", task],
        files=opencode_config,
    ),
    Client(
        "Qwen Code",
        "@qwen-code/qwen-code",
        lambda url, task: ["qwen", "--auth-type", "openai", "--yolo", "-p", task],
        lambda url: {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": KEY,
            "OPENAI_MODEL": MODEL,
        },
    ),
    Client(
        "Continue",
        "@continuedev/cli",
        lambda url, task: ["cn", "--auto", "--config", "../home/.continue/config.yaml", "-p", task],
        files=continue_config,
    ),
    Client(
        "Cline",
        "cline",
        lambda url, task: ["cline", "-P", "openai", "-m", MODEL, task],
        before=lambda url: [
            *("cline", "auth", "-p", "openai", "-k", KEY, "-m", MODEL, "-b", f"{url}/v1")
        ],
    ),
    Client(
        "pi",
        "@mariozechner/pi-coding-agent",
        lambda url, task: ["pi", "--model", f"specdec/{MODEL}", "-p", task],
        files=pi_config,
    ),
    Client(
        "Copilot CLI",
        "@github/copilot",
        lambda url, task: ["copilot", "--allow-all-tools", "-p", task],
        lambda url: {
            "COPILOT_PROVIDER_BASE_URL": f"{url}/v1",
            "COPILOT_PROVIDER_API_KEY": KEY,
            "COPILOT_MODEL": MODEL,
        },
    ),
    Client(
        "OpenClaw",  # needs Node 24.16
        "openclaw",
        lambda url, task: ["openclaw", "agent", "--local", "--agent", "main", "-m", task],
        files=openclaw_config,
    ),
    Client(
        "Aider",
        "aider-chat",
        lambda url, task: [
            *("aider", "--model", f"openai/{MODEL}", "--yes-always", "--no-git"),
            *("--test-cmd", TEST, "--auto-test", "--message", task, FILE),
        ],
        lambda url: {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": KEY},
        is_python=True,
    ),
)


def install(client: Client, scratch: Path) -> tuple[Path, str]:
    """Install a client, unless it is; its folder of programs, and its version."""
    folder = scratch / "installed" / client.package.replace("/", "_").strip("@")
    programs = folder / ("bin" if client.is_python else "node_modules/.bin")
    if not (programs / client.command("", "")[0]).exists():
        folder.mkdir(parents=True, exist_ok=True)
        if client.is_python:
            _run([sys.executable, "-m", "venv", str(folder)])
            _run([str(programs / "pip"), "install", "-q", client.package])
        else:
            _run(["npm", "install", "--prefix", str(folder), client.package])
    if client.is_python:
        show = [str(programs / "pip"), "show", client.package]
        lines = subprocess.run(show, capture_output=True, text=True, check=True).stdout
        version = next(x for x in lines.splitlines() if x.startswith("Version:")).split()[1]
    else:
        package = folder / "node_modules" / client.package / "package.json"
        version = json.loads(package.read_text(encoding="utf-8"))["version"]
    return programs, version


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True)


# What they do -------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What a client did, by what is on disk, and what it said."""

    version: str
    status: int | None
    read: bool
    edited: bool
    tested: bool
    said: bool
    traffic: Traffic

    @property
    def is_done(self) -> bool:
        """True if all was done, without an error."""
        done = self.read and self.edited and self.tested and self.said
        return done and self.status == 0 and not self.traffic.errors


def try_client(client: Client, url: str, scratch: Path) -> Outcome:
    """Install a client, give it the task, and look at what it did."""
    programs, version = install(client, scratch)
    here = scratch / "runs" / re.sub(r"\W+", "-", client.name.lower())
    shutil.rmtree(here, ignore_errors=True)
    home, work = here / "home", here / "work"
    for folder in (home, work):
        folder.mkdir(parents=True)
    (work / FILE).write_text(PROGRAM, encoding="utf-8")
    (work / "check.py").write_text(CHECK, encoding="utf-8")
    task = (
        f"The area in {work / FILE} is wrong. Read the file, correct it, then run `{TEST}` in "
        f"{work} and tell me what it prints."
    )
    traffic = Traffic()
    with counting(url, traffic, here / "traffic.jsonl") as address:
        for path, content in client.files(address).items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(content, encoding="utf-8")
        places = f"{programs}{os.pathsep}{os.environ['PATH']}"
        env = {"PATH": places, "HOME": str(home), "TERM": "dumb", "LANG": "C.UTF-8"}
        env |= QUIET | client.settings(address)
        if client.before:
            finished(client.before(address), work, env, here / "before.txt")
        status = finished(client.command(address, task), work, env, here / "output.txt")
    runs = work / "runs.txt"
    last = (runs.read_text(encoding="utf-8").split() if runs.exists() else []) or ["False", "none"]
    output = (here / "output.txt").read_text(errors="replace", encoding="utf-8")
    return Outcome(
        version,
        status,
        traffic.has_read,
        (work / FILE).read_text(encoding="utf-8") == PROGRAM.replace(WRONG, mended(WRONG)),
        last[-2] == "True",
        f"All checks passed with {last[-1]}" in output,
        traffic,
    )


def finished(command: Sequence[str], folder: Path, env: dict[str, str], output: Path) -> int | None:
    """The exit status of a command; None if it had to be ended."""
    with (
        output.open("wb") as file,
        subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            return process.wait(MOST_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return None


def table(outcomes: dict[str, Outcome]) -> str:
    """Markdown."""
    lines = ["| agent | version | read | edited | tested | said so | exit | requests | errors |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for name, one in outcomes.items():
        did = ("yes" if done else "no" for done in (one.read, one.edited, one.tested, one.said))
        status = "timeout" if one.status is None else one.status
        counts = len(one.traffic.requests), len(one.traffic.errors)
        cells = name, one.version, *did, status, *counts
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> int:
    """Try the clients; the exit status is 1 if one did not do all of it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agents", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("scratch", type=Path, help="folder for installed clients, their homes, and logs")
    add("--client", action="append", help="name (default: all of them)")
    add("--url", help="of a server that is up (default: start one on the scripted target)")
    add("--flag", action="append", default=[], help="for the server, as --flag=--drafter=suffix")
    add("--write-target", action="store_true", help="write the model folder to SCRATCH, and end")
    args = parser.parse_args()
    scratch = args.scratch.resolve()
    target = write_target(scratch / "target")
    if args.write_target:
        print(target)
        return 0
    with ExitStack() as stack:
        flags = "--trust-remote-code", *args.flag
        url = args.url or stack.enter_context(serving(OURS, str(target), flags, (MODULES[OURS],)))
        outcomes = {}
        for client in CLIENTS:
            if not args.client or client.name in args.client:
                outcomes[client.name] = try_client(client, url, scratch)
                print(table(outcomes).splitlines()[-1], flush=True)
                for error in outcomes[client.name].traffic.errors:
                    print("   ", error, file=sys.stderr)
    print("\n" + table(outcomes))
    return int(not all(one.is_done for one in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
