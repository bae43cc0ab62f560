"""Programs on mlx-lm, run as `docs/cookbook.md` says: is the text stock's, and what is gained?

    python -m benchmarks.hosts FOLDER [NAME ...]

Each program is installed into a folder of its own, which sees the packages of this environment, and
the page's block of its name is run there, on the lab's target in the place of the model that it
names: with us, and without. Through a server that is ours, and mlx-lm's.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx_lm

from benchmarks.server import OURS, STOCK, serving
from specdec_mlx import lab

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "cookbook.md"
PLUGIN = str(ROOT / "contrib" / "llm-specdec")
MODEL = "mlx-community/Qwen3-4B-Instruct-2507-4bit"
URL = "http://localhost:8080"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

BEFORE = """
import sys, mlx.core as mx
if "outlines" in sys.argv and not mx.metal.is_available():  # its kernel, in MLX's operations
    import outlines_core.kernels.mlx as kernels
    def masked(logits, mask):
        bits = (mx.array(mask)[..., None] >> mx.arange(32)) & 1
        return mx.where(bits.reshape(1, -1)[:, :logits.shape[-1]] == 1, logits, -mx.inf)
    kernels.apply_token_bitmask = masked
if sys.argv[1] == "stock":
    import specdec_mlx
    specdec_mlx.install = lambda *args, **options: None
    import importlib
    steps = importlib.import_module("mlx_lm.generate")
    step = steps.generate_step
    steps.generate_step = lambda *args, history=None, **options: step(*args, **options)
"""
AFTER = """
import json
from importlib.metadata import version
stats = getattr(globals().get("speculation"), "stats", None)
told = None if stats is None else [stats.emitted, stats.target_passes, str(stats)]
print(json.dumps([str(text), told]))
"""


@dataclass(frozen=True)
class Host:
    """A program: its heading on the page, its module, what to install, and what it goes through.

    way: "install()", "server", or "plugin". stock: what its text is compared with.
    """

    name: str
    module: str
    packages: Sequence[str]
    way: str
    stock: str = "itself without us"


HOSTS = {
    host.module: host
    for host in (
        Host("llm", "llm", ("llm", PLUGIN), "plugin", "mlx_lm.generate"),
        Host("smolagents", "smolagents", ("smolagents",), "install()"),
        Host("Outlines", "outlines", ("outlines[mlxlm]",), "install()"),
        Host("lm-eval", "lm_eval", ("lm-eval",), "install()"),
        Host("A program that reads the prompt itself", "mlx_lm", (), "install(), history="),
        Host("litellm", "litellm", ("litellm",), "server", STOCK),
        Host("dspy", "dspy", ("dspy",), "server", STOCK),
        Host("instructor", "instructor", ("instructor",), "server", f"{OURS} --drafter none"),
        Host("openai", "openai", ("openai",), "server", STOCK),
    )
}


@dataclass(frozen=True)
class Result:
    """What came of a program. passes: tokens, and passes of the target; account: in words."""

    host: Host
    version: str
    text: str
    stock: str
    passes: tuple[int, int] = (0, 0)
    account: str = ""

    @property
    def row(self) -> str:
        """Its row of the page's table."""
        same = self.host.stock if self.text == self.stock else "OTHER TEXT"
        emitted, passes = self.passes
        gained = f"{emitted / passes:.2f}" if passes else "not told"
        cells = self.host.name, self.version, f"`{self.host.way}`", same, gained
        return f"| {' | '.join(cells)} |"


def block_of(host: Host, page: str) -> str:
    """The program's block on the page, under the heading of its name."""
    section = re.split(rf"^##+ {re.escape(host.name)}$", page, flags=re.M)[1]
    section = re.split(r"^##+ ", section, flags=re.M)[0]
    language = "shell" if host.way == "plugin" else "python"
    found: str = re.findall(rf"^```{language}\n(.*?)^```$", section, re.M | re.S)[0]
    return found


def model_folder(folder: Path) -> Path:
    """The lab's target, with a chat template, where LM Studio keeps models."""
    place = folder / ".lmstudio" / "models" / MODEL
    if not place.exists():
        shutil.copytree(lab.target_path(), place)
        config = place / "tokenizer_config.json"
        settings = json.loads(config.read_text(encoding="utf-8")) | {"chat_template": TEMPLATE}
        config.write_text(json.dumps(settings), encoding="utf-8")
    return place


def environment(host: Host, folder: Path) -> str:
    """The Python of a folder with the program, and with the packages of this environment."""
    place = folder / host.module
    python = place / "bin" / "python"
    if not (place / "is-complete").exists():
        run(sys.executable, "-m", "venv", "--without-pip", str(place))
        here = json.dumps([path for path in sys.path if path.endswith("site-packages")])
        sites = next((place / "lib").glob("python*")) / "site-packages"
        (sites / "shared.pth").write_text(
            f"import site; [*map(site.addsitedir, {here})]\n", encoding="utf-8"
        )
        if host.packages:
            run(str(python), "-m", "pip", "install", "--quiet", *host.packages)
        (place / "is-complete").touch()
    return str(python)


def run(*command: str, **variables: str) -> str:
    """The output of a command; RuntimeError with the end of what it said where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables})
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)[:200]}:\n{done.stdout}{done.stderr}"[-3000:])
    return done.stdout


def run_block(host: Host, python: str, source: str, how: str) -> tuple[str, Any]:
    """The text of a block of Python, and the account where it has one; how: "ours" or "stock"."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "block.py")
        program.write_text(BEFORE + source + AFTER, encoding="utf-8")
        out = run(python, str(program), how, host.module, HF_HUB_OFFLINE="1", PYTHONPATH=str(ROOT))
    text, told = json.loads(out.splitlines()[-1])
    return text, told


def run_shell(host: Host, python: str, source: str, model: Path) -> Result:
    """The plugin's block, and mlx-lm's text of the same prompt."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {"LLM_USER_PATH": folder, "HF_HUB_OFFLINE": "1"}
        llm = f"{python} -m llm"
        script = re.sub(r"^llm ", f"{llm} ", source, flags=re.M)
        said = run("bash", "-ec", script, **variables)
        logged = json.loads(run("bash", "-ec", f"{llm} logs --json", **variables))[0]
    text = said.split("\n", 1)[1].removesuffix("\n")  # after what `add` said
    target, tokenizer = mlx_lm.load(str(model))[:2]
    messages = [{"role": "user", "content": logged["prompt"]}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    stock = mlx_lm.generate(target, tokenizer, prompt, max_tokens=96)
    told = logged["response_json"]
    passes = told["target_passes"]
    emitted = round(told["tokens_per_pass"] * passes)
    return Result(host, "", text, stock, (emitted, passes))


def counts(url: str) -> tuple[int, int]:
    """Tokens written and passes of our server so far."""
    with urllib.request.urlopen(f"{url}/metrics") as page:
        told = page.read().decode()
    return tuple(  # type: ignore[return-value]
        int(float(re.findall(rf"^\S*:{name}_total\S* (\S+)$", told, re.M)[0]))
        for name in ("generation_tokens", "iterations")
    )


Serve = Callable[[str], str]
"""The address of a server by its name, started when it is first asked for."""


@contextmanager
def servers(model: Path) -> Iterator[Serve]:
    """The servers that blocks are run on, until the end of the block."""
    with ExitStack() as stack:
        started: dict[str, str] = {}

        def serve(name: str) -> str:
            if name not in started:
                kind, *flags = name.split(" --")
                given = [word for flag in flags for word in f"--{flag}".split()]
                started[name] = stack.enter_context(serving(kind, str(model), given))
            return started[name]

        yield serve


def try_host(host: Host, python: str, model: Path, serve: Serve) -> Result:
    """Run a program's block with us and without; RuntimeError where one fails."""
    source = block_of(host, PAGE.read_text(encoding="utf-8")).replace(MODEL, str(model))
    if host.way == "plugin":
        return run_shell(host, python, source, model)
    run_it = partial(run_block, host, python)
    if host.way != "server":
        text, told = run_it(source, "ours")
        stock, _ = run_it(source, "stock")
        return Result(host, "", text, stock, (told[0], told[1]), told[2])
    ours = serve(OURS)
    before = counts(ours)
    text, _ = run_it(source.replace(URL, ours), "ours")
    after = counts(ours)
    stock, _ = run_it(source.replace(URL, serve(host.stock)), "stock")
    return Result(host, "", text, stock, (after[0] - before[0], after[1] - before[1]))


def version_of(host: Host, python: str) -> str:
    """The version of a program's package."""
    name = host.module.replace("_", "-").replace("mlx-lm", "mlx_lm")
    code = f"from importlib.metadata import version; print(version({name!r}))"
    return run(python, "-c", code).strip()


def are_here() -> list[Host]:
    """The programs that can be imported in this environment."""
    needed = {module: (module,) for module in HOSTS} | {"llm": ("llm", "llm_specdec")}
    return [
        HOSTS[module]
        for module, names in needed.items()
        if all(importlib.util.find_spec(name) for name in names)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and say which programs could not be run; 1 where texts differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__)
    parser.add_argument("folder", type=Path, help="Where programs are installed, and kept.")
    parser.add_argument("names", nargs="*", help=f"Of {', '.join(HOSTS)}; all of them if none.")
    given = parser.parse_args(arguments)
    model, differ = model_folder(given.folder.resolve()), 0
    print("| program | version | how | same text as | tokens a pass |\n|---|---|---|---|---|")
    for host in (HOSTS[name] for name in given.names or HOSTS):
        try:
            python = environment(host, given.folder.resolve())
            with servers(model) as serve:
                result = try_host(host, python, model, serve)
            told = {**vars(result), "version": version_of(host, python)}
            print(Result(**told).row, flush=True)
            differ |= result.text != result.stock
        except RuntimeError as error:
            print(f"| {host.name} | | `{host.way}` | not run | |", flush=True)
            print(f"{host.name}: {error}", file=sys.stderr)
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
