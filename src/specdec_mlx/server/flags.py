"""The server's flags, all of mlx-lm's and ours, and the settings that they make."""

from __future__ import annotations

import argparse
import ipaddress
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from inspect import signature
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdec_mlx.memory.store import PROCESS
from specdec_mlx.mlx_lm_plugin.flags import (
    EVERYBODY,
    KEY,
    RARE,
    USER,
    Flags,
    add_arguments,
    take_flags,
)
from specdec_mlx.options import Parser, argument
from specdec_mlx.server.requests import RequestError, TextRequest

ANY, TARGETS, GIVEN = "any", "targets", "given"  # values of --request-models
DEFAULT_MODEL = "default_model"  # mlx-lm's name for the model given at the start

VARIABLES = {"kwargs", "documents", "continue_final_message", "role_mapping"}
"""Names beside the template's own variables that any request may set."""
TEMPLATE_ARGUMENTS = signature(
    PreTrainedTokenizerBase.apply_chat_template
).parameters.keys()
"""Names in `chat_template_kwargs` that are no variables of a template, such as `padding`."""

RARE_HERE = (
    "allowed-origins chat-template chat-template-args decode-concurrency log-level "
    "prompt-concurrency prompt-cache-size prompt-cache-bytes any-model-name "
    "allow-chat-templates request-models memory-for"
)

SIZES = {"": 1, "M": 10**6, "MB": 10**6, "G": 10**9, "GB": 10**9}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([MG]?B?)", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What the command line says, with mlx-lm's names and defaults.

    flags: of speculation. model, adapter_path: None for none, then each request names its own.
    max_tokens: None for as many as fit. prompt_cache_bytes, prompt_cache_limit: of caches in
    memory, and of their files in the folder `prompt_cache`. any_model_name: every name that is no
    folder and not in the Hugging Face cache is the given model.
    """

    flags: Flags = field(default_factory=Flags)
    model: str | None = None
    adapter_path: str | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    allowed_origins: Sequence[str] = ("*",)
    trust_remote_code: bool = False
    log_level: str = "INFO"
    chat_template: str = ""
    use_default_chat_template: bool = False
    chat_template_args: dict[str, Any] = field(default_factory=dict)
    temp: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = None
    decode_concurrency: int = 32
    prompt_concurrency: int = 8
    prefill_step_size: int = 2048
    prompt_cache_size: int = 10
    prompt_cache_bytes: int | None = None
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 5000
    pipeline: bool = False
    request_models: str = ANY
    allow_chat_templates: bool = False
    prompt_cache: Path | None = None
    prompt_cache_limit: int = 20 * 10**9
    any_model_name: bool = False

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of a body for what a request leaves out."""
        named = {name: getattr(self, name) for name in ("top_p", "top_k", "min_p")}
        return {"temperature": self.temp, **named}

    def check(self, request: TextRequest) -> None:
        """Raise RequestError for what a request may not bring along.

        A model's name is left to `allows_model`: any name may be the given model's.
        """
        may_draft = self.request_models == ANY or request.draft_model in (
            None,
            DEFAULT_MODEL,
            self.flags.choice.model.name,
        )
        given_adapter = request.adapter in (None, self.adapter_path)
        if not may_draft:
            raise refused("draft_model", request.draft_model)
        if self.request_models == GIVEN and not given_adapter:
            raise refused("adapters", request.adapter)
        free = VARIABLES | ({"chat_template"} if self.allow_chat_templates else set())
        if wrong := (TEMPLATE_ARGUMENTS - free) & request.template.keys():
            raise RequestError(
                f"chat_template_kwargs: {', '.join(sorted(wrong))} cannot be set by a request. "
                "A server that is started with --allow-chat-templates takes a chat_template."
            )

    def allows_model(self, name: str) -> bool:
        """True if a request may have this model loaded, or see it in the list."""
        own = ("", DEFAULT_MODEL, self.model, str(Path(self.model or "").resolve()))
        return self.request_models != GIVEN or name in own


DEFAULTS = {"num_draft_tokens": None, "draft_model": None, **vars(ServerSettings())}

HELP = {
    "model": "Folder or Hugging Face name of the model.",
    "adapter_path": "Folder of an adapter for the model.",
    "host": "Address to listen on (default: DEFAULT)",
    "port": "Port to listen on (default: DEFAULT)",
    "allowed_origins": "Origins of pages that may read the answers, with commas (default: *)",
    "draft_model": "A model to draft with, a trained head, or auto.",
    "num_draft_tokens": "mlx-lm's name for --draft-length.",
    "trust_remote_code": "Run code that a tokenizer brings along.",
    "log_level": "What is logged (default: DEFAULT)",
    "chat_template": "A chat template in place of the tokenizer's.",
    "use_default_chat_template": "Use the tokenizer's default chat template.",
    "temp": "Default temperature (default: DEFAULT)",
    "top_p": "Default top-p (default: DEFAULT)",
    "top_k": "Default top-k (default: DEFAULT, off)",
    "min_p": "Default min-p (default: DEFAULT, off)",
    "max_tokens": "Most tokens of an answer (default: as many as fit)",
    "chat_template_args": """Variables of the chat template, as '{"enable_thinking":false}'""",
    "decode_concurrency": "Most texts written together.",
    "prompt_concurrency": "Most prompts read together.",
    "prefill_step_size": "Most tokens of prompts read in a pass (default: DEFAULT)",
    "prompt_cache_size": "Most prompt caches kept in memory.",
    "prompt_cache_bytes": "Most bytes of these caches.",
    "kv_bits": "Bits of quantized key-value caches, 4 or 8.",
    "kv_group_size": "Group size of these (default: DEFAULT)",
    "quantized_kv_start": "Position from which caches are quantized (default: DEFAULT)",
    "pipeline": "Spread layers, not tensors, over the ranks.",
}
"""Flags of mlx-lm's server, each of them a setting."""


def refused(name: str, value: Any) -> RequestError:
    """The error for a model or adapter that requests may not name."""
    return RequestError(
        f"{name}: this server loads no {value!r} for a request. Leave it out, or start it with "
        f"--request-models {ANY}."
    )


def parse_settings(arguments: Sequence[str]) -> ServerSettings:
    """The settings of a command line; ends the process, with one line, for a wrong one."""
    parser = make_parser()
    namespace = parser.parse_args(arguments)
    try:
        return settings_of(namespace)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def settings_of(namespace: argparse.Namespace) -> ServerSettings:
    """The settings of parsed arguments; raises ValueError and OSError for what cannot be done."""
    is_local = is_loopback(namespace.host)
    if namespace.request_models == GIVEN and namespace.model is None:
        raise ValueError(f"argument --request-models: {GIVEN} needs --model.")
    if not isinstance(namespace.chat_template_args, dict):
        raise ValueError("argument --chat-template-args: expected a JSON object.")
    namespace.request_models = namespace.request_models or (
        ANY if is_local else TARGETS
    )
    if namespace.any_model_name is None:
        namespace.any_model_name = is_local and namespace.model is not None
    has_memory = namespace.memory is not None
    whose = namespace.memory_for
    if whose != EVERYBODY and namespace.memory != PROCESS:
        raise ValueError(
            f"argument --memory-for: {whose} needs --memory {PROCESS}, got {namespace.memory}. A "
            "file is for everybody who may write to it."
        )
    flags = replace(take_flags(namespace), memory_for=whose)
    if is_local and not has_memory:
        flags = replace(flags, memory=PROCESS)  # one person's
    names = [named.name for named in fields(ServerSettings) if named.name != "flags"]
    return ServerSettings(
        flags=flags, **{name: getattr(namespace, name) for name in names}
    )


def is_loopback(host: str) -> bool:
    """True if only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def parse_size(text: str) -> int:
    """Bytes of a size such as 500MB; ValueError for anything else."""
    if (found := _SIZE.fullmatch(text.strip())) is None or found[
        2
    ].upper() not in SIZES:
        raise ValueError(f"expected a size such as 500MB or 20GB, got {text!r}")
    return int(float(found[1]) * SIZES[found[2].upper()])


_TEXT, _INT = {"type": str}, {"type": int}
HOW: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("model", "adapter_path", "draft_model"), _TEXT),
    **dict.fromkeys(("num_draft_tokens", "max_tokens", "kv_bits"), _INT),
    "allowed_origins": {"type": lambda text: tuple(text.split(","))},
    "log_level": {"choices": ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")},
    "chat_template_args": {"type": json.loads, "metavar": "JSON"},
    "prompt_cache_bytes": {"type": argument(parse_size), "metavar": "SIZE"},
}
"""How flags are read whose default does not say it."""


def make_parser() -> Parser:
    """The parser of `specdec-mlx server`."""
    parser = Parser(
        prog="specdec-mlx server",
        description="A server for agents, with speculation: OpenAI's and Anthropic's protocols.",
    )
    for name, help_text in HELP.items():
        _add_argument(parser, name, help_text)
    add_arguments(parser)
    parser.set_defaults(num_draft_tokens=None)  # to see whether it was given
    _add_request_arguments(parser)
    parser.add_help_all(f"{RARE} {RARE_HERE}".split())
    return parser


def _add_argument(parser: argparse.ArgumentParser, name: str, help_text: str) -> None:
    """Add the flag of a setting, whose default says of what type it is."""
    default = DEFAULTS[name]
    how: dict[str, Any] = {"type": type(default)}
    if isinstance(default, bool):
        how = {"action": "store_true"}
    parser.add_argument(
        f"--{name.replace('_', '-')}",
        default=default,
        help=help_text.replace("DEFAULT", str(default)),
        **(how | HOW.get(name, {})),
    )


def _add_request_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what requests may bring along")
    group.add_argument(
        "--memory-for",
        choices=(EVERYBODY, USER, KEY),
        default=EVERYBODY,
        help=f"One memory for all requests, or with --memory {PROCESS} one for each `user` of the "
        "requests or for each API key (default: all)",
    )
    group.add_argument(
        "--request-models",
        choices=(ANY, TARGETS, GIVEN),
        help="Models that requests may name, which are folders here or Hugging Face names: any; "
        "targets, but no draft models; or only those given at the start (default: any where --host "
        "is a loopback address, else targets)",
    )
    group.add_argument(
        "--any-model-name",
        action=argparse.BooleanOptionalAction,
        help="Take every name that is no folder and not in the Hugging Face cache for the given "
        "model: agents ask for names of their own (default: where --host is a loopback address and "
        "--model is given)",
    )
    group.add_argument(
        "--allow-chat-templates",
        action="store_true",
        help="Let requests bring a chat template, a program that is run here.",
    )
    group = parser.add_argument_group("prompt caches on disk")
    group.add_argument(
        "--prompt-cache",
        type=Path,
        metavar="DIR",
        help="Keep the caches of conversations in files there, for the next start too. They tell "
        "what was said; only this user can read them.",
    )
    group.add_argument(
        "--prompt-cache-limit",
        type=argument(parse_size),
        default="20GB",
        metavar="SIZE",
        help="Most bytes of these files; the oldest are deleted (default: 20GB)",
    )
