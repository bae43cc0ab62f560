"""What a request to the server may say about speculation, and the way of its reply to the client.

A request that is served alone goes on in a batch when others arrive, as a new request that begins
with what was said so far. A `Channel` around the client's queue hides this from the client.
"""

from __future__ import annotations

import argparse
import ipaddress
from collections.abc import Callable, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from inspect import signature
from pathlib import Path
from typing import Any

from mlx_lm.server import GenerationContext
from mlx_lm.utils import _parse_size, load_tokenizer
from transformers import PreTrainedTokenizerBase

from specdec_mlx.contracts import Checks, DraftContext, Drafter, all_drafters
from specdec_mlx.draft_length.policy import parse_draft_length
from specdec_mlx.drafters.choosing import registry
from specdec_mlx.drafters.choosing.registry import MODEL_DRAFTER, NO_DRAFTER, WITH_MODEL, first_of
from specdec_mlx.drafters.grammar import Grammar
from specdec_mlx.drafters.prompt_lookup import PromptLookupDrafter
from specdec_mlx.errors import UnknownNameError
from specdec_mlx.memory import Memory
from specdec_mlx.memory.kept import KeptFile
from specdec_mlx.mlx_lm_plugin import openai_fields
from specdec_mlx.mlx_lm_plugin.flags import KEY, USER, Flags
from specdec_mlx.mlx_lm_plugin.heads import HeadToLoad
from specdec_mlx.mlx_lm_plugin.openai_fields import RequestError, texts_in
from specdec_mlx.options import argument, name_in, split_spec
from specdec_mlx.rules.registry import make_rule
from specdec_mlx.stats.account import SpeculationStats

DEFAULT_MODEL = "default_model"  # mlx-lm's name for the model given at the start
LONGEST_DRAFT = 64  # longest draft of a request: each token of it is a position in a pass
MOST_MEMORIES = 64  # users or keys whose memories are kept; the least recently used are forgotten


class ServerEndingError(RuntimeError):
    """A request is ended because the server is."""

    def __init__(self) -> None:
        super().__init__("The server is ending. Send the request again when it is back.")


@dataclass(eq=False)
class Channel:
    """A client's queue, which takes a context, progress (tuples), responses, and None at the end.

    context: by which the client says stop. tokens: all that was said, num_before of them before the
    current service. pausing: the request goes on after it. is_watched: on several ranks, where
    mlx-lm cannot stop a request that is served alone, and must not see a stop.
    """

    queue: Any
    context: Any = None
    tokens: list[int] = field(default_factory=list)
    num_before: int = 0
    pausing: bool = False
    finished: bool = False
    is_watched: bool = False
    is_alone: bool = False
    _later: GenerationContext | None = None
    _detokenizer: Any = None
    _matcher: Any = None

    @property
    def alive(self) -> bool:
        """True if the client waits for more."""
        hung_up = self.context is not None and self.context._should_stop
        return not self.finished and not hung_up

    def stop(self) -> None:
        """End the current service, as a client that hangs up does."""
        served = self._later or self.context
        if served is not None:
            served.stop()

    def resume(self, detokenizer: Any, matcher: Any) -> None:
        """Begin the next service; its new detokenizer and stop matcher are told what was said."""
        self.pausing = self.is_alone = False
        self.num_before = len(self.tokens)
        for token in self.tokens:
            detokenizer.add_token(token)
            matcher.advance(token)
        _ = detokenizer.last_segment  # the client has it
        self._detokenizer, self._matcher = detokenizer, matcher

    def put(self, item: Any) -> None:
        """Take what the server has for the client."""
        if self.finished or (item is None and self.pausing):
            return
        if item is None or isinstance(item, Exception):
            self.finished = True
            self.queue.put(item)
        elif isinstance(item, GenerationContext):
            self._take_context(item)
        elif not isinstance(item, tuple):
            self._take_response(item)
        elif self._detokenizer is None:  # progress
            self.queue.put(item)

    def _take_context(self, context: GenerationContext) -> None:
        if self.context is None:
            self.context = copy(context) if self.is_watched else context
            self.queue.put(self.context)
        if self.context is not context:
            self._later = context

    def _take_response(self, response: Any) -> None:
        self.tokens.append(response.token)
        stopped = False
        if self._detokenizer is not None:
            stopped = self._matcher.advance(response.token) and response.finish_reason is None
            response = self._respoken(response, "stop" if stopped else response.finish_reason)
        self.queue.put(response)
        hidden = self.is_watched and self.is_alone
        if self._later is not None and not hidden and (stopped or not self.alive):
            self.stop()
        if stopped:
            self.put(None)

    def _respoken(self, response: Any, finish_reason: str | None) -> Any:
        """The response with the text that follows what the client has."""
        if finish_reason != "stop":
            self._detokenizer.add_token(response.token)
        if finish_reason is not None:
            self._detokenizer.finalize()
        text = self._detokenizer.last_segment
        return replace(response, text=text, finish_reason=finish_reason)


@dataclass(eq=False)
class Requested:
    """How one request is to be served, and how it was.

    name: the drafter's. prediction: expected text. batched: served with others at its end at least.
    check_client: raises ConnectionError if the client has gone. prompt, ends: its tokens, and where
    its parts end; none if it has images.
    """

    drafter: Drafter | None
    name: str
    draft_length: int | str = "auto"
    rule: str = "auto"
    grammar: Grammar | None = None
    prediction: str = ""
    stats: SpeculationStats | None = None
    batched: bool = False
    channel: Channel = field(default_factory=lambda: Channel(None))
    max_tokens: int | None = None
    check_client: Callable[[], None] = lambda: None
    prompt: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        """Fields for other ranks, which draft nothing: any drafter stands for the first rank's."""
        drafter = None if self.drafter is None else PromptLookupDrafter()
        ours = dict.fromkeys(("stats", "channel", "check_client"))
        return {**vars(self), **ours, "drafter": drafter}

    def usage(self) -> dict[str, Any]:
        """The `speculation` object of a reply."""
        account = self.stats.as_dict() if self.stats is not None else {}
        return {"drafter": self.name, "batched": self.batched, **account}


ANY, TARGETS, GIVEN = "any", "targets", "given"
NAMED = {ANY: (), TARGETS: ("draft_model",), GIVEN: ("model", "draft_model", "adapters")}
"""Values of --request-models, and the fields that may then name only what the start gave."""

VARIABLES = {"kwargs", "documents", "continue_final_message"}  # which any request may set
TEMPLATE_ARGUMENTS = signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys()
"""Names in `chat_template_kwargs` that are no variables of a template, such as `padding`."""


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that are the server's alone."""
    group = parser.add_argument_group("what requests may bring along")
    group.add_argument(
        "--request-models",
        choices=tuple(NAMED),
        help="Models that requests may name, which are folders here or Hugging Face names: any; "
        "targets, but no draft models; or only those given at the start (default: any where --host "
        "is a loopback address, else targets)",
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
        type=argument(_size),
        default="20GB",
        metavar="SIZE",
        help="Most bytes of these files; the oldest are deleted (default: 20GB)",
    )


@dataclass(frozen=True)
class Access:
    """What requests may bring along.

    named: the only names that some fields may hold. refused: those that `chat_template_kwargs` may
    not hold.
    """

    named: Mapping[str, Sequence[str | None]]
    refused: Set[str] = frozenset()

    @classmethod
    def of(cls, namespace: argparse.Namespace, draft_model: Any) -> Access:
        """As the flags say; raises ValueError for a server that could serve nothing."""
        model = namespace.model
        models = namespace.request_models or (ANY if is_loopback(namespace.host) else TARGETS)
        if models == GIVEN and model is None:
            raise ValueError(f"argument --request-models: {GIVEN} needs --model.")
        given = {
            "model": (DEFAULT_MODEL, model, str(Path(model or "").resolve())),
            "draft_model": (DEFAULT_MODEL, draft_model),
            "adapters": (namespace.adapter_path,),
        }
        free = VARIABLES | ({"chat_template"} if namespace.allow_chat_templates else set())
        return cls({name: given[name] for name in NAMED[models]}, TEMPLATE_ARGUMENTS - free)

    def allows(self, field: str, name: Any) -> bool:
        """True if a field of a request may hold this name."""
        return name in self.named.get(field, (name,))

    def check(self, body: dict[str, Any]) -> None:
        """Raise RequestError for what was not allowed at the start."""
        for name in self.named:
            if name in body and not self.allows(name, body[name]):
                raise RequestError(
                    f"{name}: this server loads no {body[name]!r} for a request. Leave it out, "
                    f"or start it with --request-models {ANY}."
                )
        if wrong := self.refused & body.get("chat_template_kwargs", {}).keys():
            raise RequestError(
                f"chat_template_kwargs: {', '.join(sorted(wrong))} cannot be set by a request. "
                "A server that is started with --allow-chat-templates takes a chat_template."
            )


def _size(text: str) -> int:
    """Bytes of a size in mlx-lm's form; ValueError for anything else."""
    try:
        return int(_parse_size(text))
    except (KeyError, ArithmeticError):
        raise ValueError(f"expected a size such as 500MB or 20GB, got {text!r}") from None


def is_loopback(host: str) -> bool:
    """True if only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Menu:
    """The drafters that requests may name, each made once, with options from the server's flags."""

    def __init__(self, flags: Flags, access: Access | None = None) -> None:
        """Make the default drafter; raises what `Flags.make` raises."""
        self.flags, self.access = flags, access or Access({})
        self._made: dict[str, Drafter | None] = {}
        self._memory = lru_cache(MOST_MEMORIES)(lambda who: Memory())
        self.choice = flags.drafting
        self._specs = {name_in(str(spec)): str(spec) for spec in self.choice.ordered}
        for name in self._specs:
            self._make(name)

    def check(self, tokenizer: Any) -> None:
        """Raise TokenizerMismatchError if the draft model is none for this tokenizer's models."""
        drafter = self._made.get(MODEL_DRAFTER)
        if isinstance(drafter, Checks):
            drafter.check(DraftContext(tokenizer=tokenizer))

    def bind_files(self, tokenizer: Any = None) -> None:
        """Hold memories and tables to the server's own tokenizer; for others they are left out.

        Raises TokenizerMismatchError for a file that was named and has another one's token ids.
        """
        parts = [part for drafter in self._made.values() for part in all_drafters(drafter)]
        options = [value for part in parts for value in getattr(part, "__dict__", {}).values()]
        for kept in (*options, self.flags.remembered):
            if isinstance(kept, KeptFile):
                if tokenizer is not None:
                    kept.check_tokenizer(tokenizer)
                kept.refuses_others = False

    def requested(self, body: dict[str, Any], api_key: str = "") -> Requested:
        """How a request is to be served; raises ValueError and MissingPackageError."""
        self.access.check(body)
        own_model = body.get("draft_model", DEFAULT_MODEL) != DEFAULT_MODEL
        if "drafter" in body and own_model:
            raise RequestError("Give drafter or draft_model, not both.")
        names = texts_in(body.get("drafter", list(self._specs)))
        chosen = [name for name in names if name != NO_DRAFTER]
        who = {USER: str(body.get("user") or ""), KEY: api_key}.get(self.flags.memory_for, "")
        memory = self._memory(who) if who else None  # one for all, or nobody is named
        parts = [] if own_model else [self._make(name, memory) for name in chosen]
        drafter = first_of(parts) if "drafter" in body else self.choice.combined(parts)
        length = body.get("draft_length", body.get("num_draft_tokens"))
        return Requested(
            drafter,
            MODEL_DRAFTER if own_model else "+".join(chosen) or NO_DRAFTER,
            self.flags.draft_length if length is None else _length(length),
            self.flags.rule if body.get("rule") is None else _rule(body["rule"]),
            openai_fields.grammar_in(body.get("response_format")),
            openai_fields.prediction_in(body.get("prediction")),
            max_tokens=body.get("max_completion_tokens", body.get("max_tokens")),
        )

    def _make(self, name: str, memory: Memory | None = None) -> Drafter | None:
        choice, spec = self.choice, self._specs.get(name, name)
        if name not in self._specs and name not in registry.drafter_names():
            known = ", ".join(registry.drafter_names())
            raise UnknownNameError(f"Unknown drafter {name!r}. Known: {known}.")
        if memory is not None and name in registry.REMEMBERING:
            return choice.make(spec, memory=memory)
        if name not in self._made:
            if self.flags.waits_for_target and name in WITH_MODEL:
                folder, is_head = str(choice.model.name), choice.model.is_head
                tokenizer = None if is_head else load_tokenizer(Path(folder).expanduser())
                self._made[name] = HeadToLoad(folder, partial(choice.make, spec), tokenizer)
            else:
                self._made[name] = choice.make(spec)
        return self._made[name]


def _length(given: Any) -> int | str:
    try:
        length = parse_draft_length("" if isinstance(given, bool) else str(given))
    except ValueError:
        raise RequestError(
            f"draft_length must be an int >= 0 (at most {LONGEST_DRAFT} count), auto or heuristic, "
            f"not {given!r}"
        ) from None
    return length if isinstance(length, str) else min(length, LONGEST_DRAFT)


def _rule(given: Any) -> str:
    """A rule's name with options, which are numbers, true or false; raises ValueError."""
    options = split_spec(given)[1] if isinstance(given, str) else {}
    for option, value in options.items():
        if not isinstance(value, int | float):
            raise RequestError(f"rule: {option} must be a number, true or false.")
    make_rule(given)
    return str(given)
