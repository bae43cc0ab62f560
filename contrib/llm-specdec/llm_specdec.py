"""Models of mlx-lm in `llm`, with speculative decoding: the same text, sooner.

llm install llm-specdec
llm specdec add mlx-community/Qwen3-8B-4bit
llm -m specdec/Qwen3-8B-4bit "Why is the sky blue?"
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import llm
from pydantic import Field

PREFIX = "specdec/"
ROLES = {"system", "user", "assistant"}


def registry() -> Path:
    """The file of the models that were added: {name: folder or Hugging Face name}."""
    return Path(llm.user_dir()) / "specdec.json"


def read_registry() -> tuple[dict[str, str], str]:
    """Models by the name that stands behind `specdec/`, and why the file cannot be read, or ""."""
    try:
        models = json.loads(registry().read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError, RecursionError) as error:
        return {}, str(error)
    if isinstance(models, dict) and all(isinstance(source, str) for source in models.values()):
        return models, ""
    return {}, "expected an object of names and sources"


def write_registry(models: dict[str, str]) -> None:
    """Write the file whole or not at all; a file that cannot be read is kept as `.damaged`."""
    path = registry()
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(json.dumps(models, indent=2), encoding="utf-8")
        if read_registry()[1]:
            os.replace(path, f"{path}.damaged")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def added() -> dict[str, str]:
    """Models by the name that stands behind `specdec/`; a warning for a file that is damaged."""
    models, problem = read_registry()
    if problem:
        warn(
            f"llm-specdec: {registry()} cannot be read ({problem}), so the models that were added "
            "are not known. Correct the file, or add the models again: llm specdec add MODEL. "
            f"The damaged file is then kept as {registry().name}.damaged."
        )
    return models


@cache
def warn(text: str) -> None:
    """Print a warning, once in a process."""
    click.echo(text, err=True)


@llm.hookimpl
def register_models(register: Any) -> None:
    """Register each model that was added."""
    for name, source in added().items():
        register(Specdec(PREFIX + name, source))


@llm.hookimpl
def register_commands(cli: Any) -> None:
    """Add `llm specdec add`, `list` and `remove`."""

    @cli.group(name="specdec")
    def specdec() -> None:
        """Models of mlx-lm with speculative decoding."""

    @specdec.command(name="add")
    @click.argument("model")
    @click.option("--name", help="Name behind specdec/ (default: the last part of MODEL).")
    def add(model: str, name: str | None) -> None:
        """Add MODEL, a folder or a Hugging Face name; it is fetched when it is first used."""
        folder = Path(model).expanduser()
        source = str(folder.resolve()) if folder.is_dir() else model
        name = name or Path(source).name
        write_registry({**added(), name: source})
        click.echo(f"Added: llm -m {PREFIX}{name}")

    @specdec.command(name="list")
    def list_models() -> None:
        """List the models that were added, and where they are from."""
        for name, source in added().items():
            click.echo(f"{PREFIX}{name}: {source}")

    @specdec.command(name="remove")
    @click.argument("name")
    def remove(name: str) -> None:
        """Forget a model; its files stay where they are."""
        models = added()
        if models.pop(name.removeprefix(PREFIX), None) is None:
            known = ", ".join(models) or "none"
            raise click.ClickException(f"There is no model {name!r}. Known: {known}.")
        write_registry(models)


class Specdec(llm.Model):
    """A model of mlx-lm; it is loaded when it is first asked, and kept."""

    can_stream = True

    class Options(llm.Options):
        """Options of one answer: `-o NAME VALUE`."""

        temperature: float = Field(0.0, ge=0, description="0 takes the likeliest token")
        top_p: float | None = Field(None, gt=0, le=1, description="Nucleus to draw from")
        top_k: int | None = Field(None, ge=0, description="Draw from so many likeliest tokens")
        max_tokens: int = Field(2048, ge=1, description="Most tokens to write")
        seed: int | None = Field(None, ge=0, description="One text for each seed")
        draft_model: str | None = Field(None, description="A small model or a head to draft with")
        drafter: str = Field("auto", description="Who drafts, as in specdec-mlx; none for nobody")
        memory: str | None = Field(None, description="File of earlier texts to draft from")
        thinking: bool | None = Field(None, description="Whether the chat template has thoughts")

    def __init__(self, model_id: str, source: str) -> None:
        self.model_id, self.source = model_id, source
        self._loaded: Any = None

    def execute(
        self, prompt: llm.Prompt, stream: bool, response: llm.Response, conversation: Any
    ) -> Iterator[str]:
        """Yield pieces of the answer; the account of the speculation goes to the log."""
        from mlx_lm import load

        import specdec_mlx as sd

        self._loaded = self._loaded or load(self.source)
        model, tokenizer = self._loaded
        options = prompt.options
        how = {"temp": options.temperature, "top_p": options.top_p, "top_k": options.top_k}
        sampling = sd.Sampling(**{name: value for name, value in how.items() if value is not None})
        template = {} if options.thinking is None else {"enable_thinking": options.thinking}
        last = None
        for last in sd.stream_generate(
            model,
            tokenizer,
            tokenizer.apply_chat_template(chat(prompt), add_generation_prompt=True, **template),
            options.max_tokens,
            drafter=drafter_of(options),
            sampler=sampling,
            seed=options.seed,
        ):
            yield last.text
        if last is not None:
            stats = last.stats
            response.set_usage(input=last.prompt_tokens, output=last.generation_tokens)
            response.response_json = {
                "drafter": last.drafter,
                "drafted": stats.drafted,
                "accepted": stats.accepted,
                "target_passes": stats.target_passes,
                "tokens_per_pass": round(stats.tokens_per_pass, 2),
                "finish_reason": last.finish_reason,
            }


def drafter_of(options: Any) -> Any:
    """The drafter and the draft model that the options name; a memory's file is read once in a
    process, and is written each minute and at the end."""
    import specdec_mlx as sd

    drafter = options.drafter
    if options.memory is not None:
        drafter = sd.drafters.make_drafter(drafter, memory=options.memory)
    return [drafter, options.draft_model]


def chat(prompt: llm.Prompt) -> list[dict[str, str]]:
    """The conversation as chat templates take it; of other parts than text, what they say."""
    messages = []
    for message in prompt.messages:
        texts = [text for part in message.parts if (text := getattr(part, "text", None))]
        role = message.role if message.role in ROLES else "user"
        messages.append({"role": role, "content": "\n".join(texts)})
    return messages
