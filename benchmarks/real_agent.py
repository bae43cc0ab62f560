"""opencode with a real small model on `specdec-mlx server`, with and without drafting.

    python -m benchmarks.real_agent /tmp/agents

The model is SmolLM2-135M-Instruct, which a package at PyPI has. It is far too small for an agent,
and never calls a tool by itself. A proxy therefore sets `tool_choice`. A grammar makes the first
answer a call of the tool `write`, whose arguments the model fills in, and later answers call no
tool. The task is to write a file with a sentence of the prompt. opencode has a short prompt, two
tools and temperature 0. The exit status is 1 if the files of both runs differ.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from benchmarks.agents import CLIENTS, QUIET, Traffic, counting, finished, install
from benchmarks.server import MODULES, OURS, serving
from specdec_mlx.lab.demo_model import demo_model_path

WAYS = {"without drafts": ("--drafter", "none"), "with drafts": ()}
FILE, TOOL = "lighthouse.txt", "write"
TEXT = (
    "The lighthouse at Carrow Point was built in 1871, after two cargo ships had been lost on the "
    "reef below it."
)
CONTEXT, MOST_TOKENS = 8192, 200
TEMPLATE = (
    "<|im_start|>system\n{{ messages[0]['content'] }}\n"
    "{% if tools %}Tools:\n{% for tool in tools %}{{ tool['function'] | tojson }}\n{% endfor %}"
    'A call is <tool_call>\n{"name": tool_call.name, "arguments": {}}\n</tool_call>\n{% endif %}'
    "<|im_end|>\n{% for m in messages[1:] %}"
    "<|im_start|>{{ 'user' if m['role'] == 'tool' else m['role'] }}\n{{ m['content'] or '' }}"
    "{% for c in m.get('tool_calls') or [] %}<tool_call>\n"
    "{{ {'name': c['function']['name'], 'arguments': c['function']['arguments']} | tojson }}"
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The model's own template, with tools."""


@dataclass
class Run:
    """A task of the agent.

    Attributes:
        seconds: from the agent's start to its end.
        processor_seconds: of the server, during the task.
        accounts: `speculation` of each answer.
        answers: text or call of each answer.
        files: path -> content, at the end.
    """

    seconds: float
    processor_seconds: float
    accounts: list[dict[str, Any]] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)

    def total(self, name: str) -> float:
        return float(sum(account.get(name, 0) for account in self.accounts))


def write_model(folder: Path) -> Path:
    """The model with a chat template that names tools. Its weights are linked."""
    source = demo_model_path()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in source.iterdir():
        (folder / path.name).symlink_to(path)
    config = folder / "tokenizer_config.json"
    content = json.loads(config.read_text(encoding="utf-8")) | {"chat_template": TEMPLATE}
    config.unlink()
    config.write_text(json.dumps(content), encoding="utf-8")
    return folder


def config_of(url: str) -> str:
    """opencode's configuration: one model, a short prompt, and tools that write."""
    limit = {"context": CONTEXT, "output": MOST_TOKENS}
    model = {"name": "local", "tool_call": True, "temperature": True, "limit": limit}
    options = {"baseURL": f"{url}/v1", "apiKey": "none"}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "specdec", "options": options}
    build = {"prompt": f"You write files with the tool {TOOL}.", "temperature": 0}
    config = {
        "provider": {"specdec": {**provider, "models": {"local": model}}},
        "model": "specdec/local",
        "share": "disabled",
        "autoupdate": False,
        "permission": "allow",
        "agent": {
            "build": {**build, "tools": {"*": False, TOOL: True}},
            "title": {"disable": True},
        },
    }
    return json.dumps(config)


def force_call(body: bytes) -> bytes:
    """The request with a forced call of the tool, or without calls after the tool's answer."""
    request = json.loads(body) if body else {}
    if not request.get("tools"):
        return body
    has_called = request["messages"][-1]["role"] == "tool"
    choice: Any = {"type": "function", "function": {"name": TOOL}}
    return json.dumps(request | {"tool_choice": "none" if has_called else choice}).encode()


def run_task(scratch: Path, flags: tuple[str, ...]) -> Run:
    """The task on a new server, in an empty folder."""
    (opencode,) = (client for client in CLIENTS if client.name == "opencode")
    programs, _ = install(opencode, scratch)
    model = write_model(scratch / "model")
    here = scratch / "real"
    shutil.rmtree(here, ignore_errors=True)
    home, work = here / "home", here / "work"
    work.mkdir(parents=True)
    settings = home / ".config/opencode/opencode.json"
    settings.parent.mkdir(parents=True)
    task = f"Write the file {work / FILE} with this text: {TEXT}"
    with serving(OURS, str(model), flags, (MODULES[OURS],)) as url:
        server = max(psutil.Process().children(), key=lambda process: process.create_time())
        with counting(url, Traffic(), log := here / "traffic.jsonl", force_call) as address:
            settings.write_text(config_of(address), encoding="utf-8")
            env = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "HOME": str(home)}
            before, began = processor_seconds(server), time.perf_counter()
            command = ["opencode", "run", task]
            status = finished(command, work, env | QUIET | {"TERM": "dumb"}, here / "output.txt")
            run = Run(time.perf_counter() - began, processor_seconds(server) - before)
    if status != 0:
        raise RuntimeError(f"opencode ended with {status}: see {here / 'output.txt'}")
    for line in log.read_text(encoding="utf-8").splitlines():
        text, account = read_answer(json.loads(line)["answer"])
        run.answers.append(text)
        run.accounts.append(account)
    for path in sorted(work.rglob("*")):
        run.files[str(path.relative_to(work))] = path.read_text(encoding="utf-8")
    return run


def processor_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def read_answer(stream: str) -> tuple[str, dict[str, Any]]:
    """Text or call of a streamed answer, and its account."""
    text, account = "", dict[str, Any]()
    for line in stream.splitlines():
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line.removeprefix("data: "))
        account = (chunk.get("usage") or {}).get("speculation") or account
        for choice in chunk.get("choices", []):
            text += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls") or []:
                function = call["function"]
                text += (function.get("name") or "") + (function.get("arguments") or "")
    return text, account


def table(runs: dict[str, Run]) -> str:
    lines = [
        "| | requests | tokens | target passes | seconds of decoding | processor seconds | s |"
    ]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    for name, run in runs.items():
        numbers = f"{run.total('emitted'):.0f} | {run.total('target_passes'):.0f}"
        seconds = run.total("decode_seconds"), run.processor_seconds, run.seconds
        times = " | ".join(f"{value:.1f}" for value in seconds)
        lines.append(f"| {name} | {len(run.accounts)} | {numbers} | {times} |")
    return "\n".join(lines)


def main() -> int:
    """Run the task both ways, and compare the files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_agent", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("scratch", type=Path, help="folder for the installed agent, and logs")
    args = parser.parse_args()
    runs = {}
    for name, flags in WAYS.items():
        runs[name] = run = run_task(args.scratch.resolve(), flags)
        print(f"{name}:", *(f"  {answer}" for answer in run.answers), sep="\n")
    print(f"\n{table(runs)}\n")
    first, second = (run.files for run in runs.values())
    is_copy = first.get(FILE, "").split() == TEXT.split()
    print(f"files: {', '.join(first) or 'none'}; equal: {first == second}; the text: {is_copy}")
    return int(first != second)


if __name__ == "__main__":
    sys.exit(main())
