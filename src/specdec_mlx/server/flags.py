"""The server's flags, all of mlx-lm's and ours, and the settings that they make."""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from inspect import signature
from math import inf
from pathlib import Path
from typing import Any

from specdec_mlx.arguments import PROCESS, Parser, argument, number
from specdec_mlx.mlx_lm_plugin.flags import (
    EVERYBODY,
    KEY,
    RARE,
    USER,
    Flags,
    add_arguments,
    check_files,
    check_numbers,
    take_flags,
)
from specdec_mlx.server.requests import RequestError, TextRequest

ANY, TARGETS, GIVEN = "any", "targets", "given"  # values of --request-models
KEY_VARIABLE = "SPECDEC_MLX_API_KEY"  # environment variable of --api-key
DEFAULT_MODEL = "default_model"  # mlx-lm's name for the model given at the start

VARIABLES = {"kwargs", "documents", "continue_final_message", "role_mapping"}
"""Names beside the template's own variables that any request may set."""

RARE_HERE = (
    "allowed-origins chat-template chat-template-args decode-concurrency log-level "
    "prompt-concurrency prompt-cache-size prompt-cache-bytes any-model-name "
    "allow-chat-templates request-models memory-for allowed-hosts"
)

ACCESS, REQUESTS = "who may use the server", "what requests may bring along"
ON_DISK = "prompt caches on disk"
"""Groups of flags."""

SIZES = {"": 1, "M": 10**6, "MB": 10**6, "G": 10**9, "GB": 10**9}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([MG]?B?)", re.ASCII | re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of a size such as 500MB; ValueError for anything else."""
    if (match := _SIZE.fullmatch(text.strip())) is None or match[2].upper() not in SIZES:
        raise ValueError(f"expected a size such as 500MB or 20GB, got {text!r}")
    return int(float(match[1]) * SIZES[match[2].upper()])


def flag(value: Any, words: str, group: str = "", *, is_secret: bool = False, **how: Any) -> Any:
    """A setting with a flag of its name.

    Args:
        value: default of the setting.
        how: keyword arguments of argparse's `add_argument`.
    """
    if isinstance(value, bool):
        how = {"action": "store_true", **how}
    elif value is not None:
        how = {"type": type(value), **how}
    how = {"default": value, "help": words.replace("DEFAULT", str(value)), **how}
    about = {"group": group, "how": how}
    return field(default_factory=lambda: value, metadata=about, repr=not is_secret)


def names_in(text: str) -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, text.split(","))))


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The settings of the command line, with mlx-lm's names and defaults.

    Attributes:
        model, adapter_path: None for none; then each request names a model.
        max_tokens: None for as many as fit.
        prompt_cache_bytes: of caches in memory.
        prompt_cache_limit: bytes of the files in the folder `prompt_cache`.
        any_model_name: a name that is no path, no folder and not in the Hugging Face cache stands
            for the given model.
        flags: of speculation.
    """

    model: str | None = flag(None, "Folder or Hugging Face name of the model.")
    adapter_path: str | None = flag(None, "Folder of an adapter for the model.")
    host: str = flag("127.0.0.1", "Address to listen on (default: DEFAULT)")
    port: int = flag(8080, "Port to listen on (default: DEFAULT)", type=number(int, 0, 65_535))
    allowed_origins: Sequence[str] = flag(
        (),
        "Further origins of web pages that may use the server, with commas between them, as "
        "https://chat.example.com; * stands for any characters (default: pages of this machine and "
        "of applications such as editors)",
        type=names_in,
    )
    trust_remote_code: bool = flag(False, "Run code that a tokenizer brings along.")
    log_level: str = flag(
        "INFO",
        "What is logged (default: DEFAULT)",
        choices=("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"),
    )
    chat_template: str = flag("", "A chat template in place of the tokenizer's.")
    use_default_chat_template: bool = flag(False, "Use the tokenizer's default chat template.")
    chat_template_args: dict[str, Any] = flag(  # noqa: RUF009 - never changed
        {},
        """Variables of the chat template, as '{"enable_thinking":false}'""",
        type=json.loads,
        metavar="JSON",
    )
    temp: float | None = flag(
        None, "Default temperature (default: the model's own, or 0)", type=number(float, 0, 1e30)
    )
    top_p: float | None = flag(
        None, "Default top-p (default: the model's own, or off)", type=number(float, 0, 1)
    )
    top_k: int | None = flag(
        None, "Default top-k (default: the model's own, or off)", type=number(int, 0, inf)
    )
    min_p: float | None = flag(
        None, "Default min-p (default: the model's own, or off)", type=number(float, 0, 1)
    )
    max_tokens: int | None = flag(
        None, "Most tokens of an answer (default: as many as fit)", type=int
    )
    decode_concurrency: int = flag(32, "Most texts written together.")
    prompt_concurrency: int = flag(8, "Most prompts read together.")
    prefill_step_size: int = flag(2048, "Most tokens of prompts read in a pass (default: DEFAULT)")
    prompt_cache_size: int = flag(10, "Most prompt caches kept in memory.")
    prompt_cache_bytes: int | None = flag(
        None, "Most bytes of these caches.", type=argument(parse_size), metavar="SIZE"
    )
    kv_bits: int | None = flag(None, "Bits of quantized key-value caches, 4 or 8.", type=int)
    kv_group_size: int = flag(64, "Group size of these (default: DEFAULT)")
    quantized_kv_start: int = flag(
        5000, "Position from which caches are quantized (default: DEFAULT)"
    )
    keep_alive: float | None = flag(
        None,
        "Seconds without a request after which the model's memory is given back; the next request "
        "loads it again (default: never)",
        type=number(float, 1e-3, 1e9),
        metavar="SECONDS",
    )
    pipeline: bool = flag(False, "Spread layers, not tensors, over the ranks.")
    flags: Flags = field(default_factory=Flags)
    api_key: str | None = flag(
        None,
        f"The key that all requests must bring along. Other users of this machine see flags; they "
        f"do not see the environment variable {KEY_VARIABLE}, which does the same (default: none, "
        "and any key is taken)",
        ACCESS,
        is_secret=True,
        metavar="KEY",
    )
    allowed_hosts: Sequence[str] = flag(
        (),
        "Further names by which clients address the server, with commas between them, as "
        "mac.local; * is any name (default: localhost, --host, and addresses: loopback ones if "
        "--host is one, else all)",
        ACCESS,
        type=lambda text: names_in(text.lower()),
    )
    request_models: str = flag(
        ANY,
        "Models that requests may name, which are folders here or Hugging Face names: any; "
        "targets, but no draft models; or only those given at the start (default: any where --host "
        "is a loopback address, else targets)",
        REQUESTS,
        choices=(ANY, TARGETS, GIVEN),
        default=None,
    )
    any_model_name: bool = flag(
        False,
        "Take every name that is no path, no folder and not in the Hugging Face cache for the "
        "given model: agents ask for names of their own (default: where --host is a loopback "
        "address and --model is given)",
        REQUESTS,
        action=argparse.BooleanOptionalAction,
        default=None,
    )
    allow_chat_templates: bool = flag(
        False, "Let requests bring a chat template, a program that is run here.", REQUESTS
    )
    prompt_cache: Path | None = flag(  # noqa: RUF009 - never changed
        None,
        "Keep the caches of conversations in files there, for the next start too. They tell what "
        "was said; only this user can read them.",
        ON_DISK,
        type=Path,
        metavar="DIR",
    )
    prompt_cache_limit: int = flag(
        20 * 10**9,
        "Most bytes of these files; the oldest are deleted (default: 20GB)",
        ON_DISK,
        type=argument(parse_size),
        metavar="SIZE",
    )

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of a body for what a request leaves out, of the flags that are given."""
        same_names = {name: getattr(self, name) for name in ("top_p", "top_k", "min_p")}
        fields = {"temperature": self.temp, **same_names}
        return {name: value for name, value in fields.items() if value is not None}

    def check(self, request: TextRequest) -> None:
        """Raise RequestError for what a request may not bring along.

        A model's name is left to `allows_model`: any name may be the given model's.
        """
        may_draft = self.request_models == ANY or request.draft_model in (
            None,
            DEFAULT_MODEL,
            self.flags.choice.model.name,
        )
        is_own_adapter = request.adapter in (None, self.adapter_path)
        if not may_draft:
            raise refused("draft_model", request.draft_model)
        if self.request_models == GIVEN and not is_own_adapter:
            raise refused("adapters", request.adapter)
        free = VARIABLES | ({"chat_template"} if self.allow_chat_templates else set())
        if reserved := (template_arguments() - free) & request.template.keys():
            raise RequestError(
                f"chat_template_kwargs: {', '.join(sorted(reserved))} cannot be set by a request. "
                "A server that is started with --allow-chat-templates takes a chat_template."
            )

    def allows_model(self, name: str) -> bool:
        """True if a request may have this model loaded, or see it in the list."""
        started_with = ("", DEFAULT_MODEL, self.model, str(Path(self.model or "").resolve()))
        return self.request_models != GIVEN or name in started_with


@cache
def template_arguments() -> Set[str]:
    """Names in `chat_template_kwargs` that are no variables of a template, such as `padding`."""
    # Imported here, because the import is slow.
    from transformers import PreTrainedTokenizerBase

    return signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys()


def refused(name: str, value: Any) -> RequestError:
    """The error for a model or adapter that requests may not name."""
    return RequestError(
        f"{name}: this server loads no {value!r} for a request. Leave it out, or start it with "
        f"--request-models {ANY}."
    )


def parse_settings(arguments: Sequence[str]) -> ServerSettings:
    """The settings of a command line; ends the process, with one line, for a wrong one."""
    parser, namespace = parse_flags(arguments)
    return parser.check(partial(settings_of, namespace))


def parse_flags(arguments: Sequence[str]) -> tuple[Parser, argparse.Namespace]:
    """The parser and the values of a command line, checked as far as that needs no MLX.

    Ends the process, with one line, for a wrong flag.
    """
    parser = make_parser()
    namespace = parser.parse_args(arguments)
    parser.check(partial(complete, namespace))
    return parser, namespace


def complete(namespace: argparse.Namespace) -> None:
    """Fill in what depends on other flags; raises ValueError and OSError for wrong flags."""
    check_numbers(namespace)
    check_files(namespace)
    is_local = is_loopback(namespace.host)
    if namespace.max_tokens == -1:
        namespace.max_tokens = None  # as many as fit
    if namespace.request_models == GIVEN and namespace.model is None:
        raise ValueError(f"argument --request-models: {GIVEN} needs --model.")
    if not isinstance(namespace.chat_template_args, dict):
        raise ValueError("argument --chat-template-args: expected a JSON object.")
    namespace.api_key = key_of(namespace.api_key, os.environ.get(KEY_VARIABLE))
    # Only the user of this machine reaches a loopback address.
    namespace.request_models = namespace.request_models or (ANY if is_local else TARGETS)
    if namespace.any_model_name is None:
        namespace.any_model_name = is_local and namespace.model is not None
    whose = namespace.memory_for
    if whose != EVERYBODY and namespace.memory != PROCESS:
        raise ValueError(
            f"argument --memory-for: {whose} needs --memory {PROCESS}, got {namespace.memory}. A "
            "file is for everybody who may write to it."
        )
    if is_local and namespace.memory is None:
        namespace.memory = PROCESS  # one person's


def settings_of(namespace: argparse.Namespace) -> ServerSettings:
    """The settings of parsed arguments; raises ValueError and OSError for what cannot be done."""
    namespace.flags = replace(take_flags(namespace), memory_for=namespace.memory_for)
    names = [setting.name for setting in fields(ServerSettings)]
    return ServerSettings(**{name: getattr(namespace, name) for name in names})


def key_of(flag: str | None, variable: str | None) -> str | None:
    """The key of the flag, else of the environment variable, None for none; raises ValueError."""
    if flag is not None and not flag.strip():
        raise ValueError("argument --api-key: the key is empty. Leave it out for none.")
    return (flag or variable or "").strip() or None


def is_loopback(host: str) -> bool:
    """True if only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_parser() -> Parser:
    """The parser of `specdec-mlx server`: a flag for each setting, ours where `flags` stands."""
    parser = Parser(
        prog="specdec-mlx server",
        description="A server for agents, with speculation: OpenAI's and Anthropic's protocols.",
    )
    groups: dict[str, Any] = {"": parser}
    for setting in fields(ServerSettings):
        if setting.name == "flags":
            add_arguments(parser)
            continue
        group = setting.metadata["group"]
        groups[group] = groups.get(group) or parser.add_argument_group(group)
        name = f"--{setting.name.replace('_', '-')}"
        groups[group].add_argument(name, **setting.metadata["how"])
    groups[REQUESTS].add_argument(
        "--memory-for",
        choices=(EVERYBODY, USER, KEY),
        default=EVERYBODY,
        help=f"One memory for all requests, or with --memory {PROCESS} one for each `user` of the "
        "requests or for each API key (default: all)",
    )
    parser.add_help_all(f"{RARE} {RARE_HERE}".split())
    return parser
