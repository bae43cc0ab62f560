"""What a request to the server may say about speculation, and what its reply says."""

from __future__ import annotations

import argparse
import ipaddress
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache, partial
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

from mlx_lm.utils import load_tokenizer
from transformers import PreTrainedTokenizerBase

from specdec_mlx.contracts import Checks, DraftContext, Drafter
from specdec_mlx.draft_length.policy import parse_draft_length
from specdec_mlx.drafters.grammar import Grammar
from specdec_mlx.drafters.prompt_lookup import PromptLookupDrafter
from specdec_mlx.drafters.registry import (
    MODEL_DRAFTER,
    NO_DRAFTER,
    REMEMBERING,
    WITH_MODEL,
    drafter_names,
    first_of,
)
from specdec_mlx.errors import UnknownNameError
from specdec_mlx.memory import Memory
from specdec_mlx.mlx_lm_plugin.channel import Channel
from specdec_mlx.mlx_lm_plugin.flags import KEY, USER, Flags, name_in
from specdec_mlx.mlx_lm_plugin.heads import HeadToLoad
from specdec_mlx.mlx_lm_plugin.openai_fields import (
    RequestError,
    grammar_in,
    prediction_in,
    texts_in,
)
from specdec_mlx.options import split_spec
from specdec_mlx.rules.registry import make_rule
from specdec_mlx.stats.account import SpeculationStats

T = TypeVar("T")

DEFAULT_MODEL = "default_model"
"""mlx-lm's name for the model given at the start, also where a request names none."""

LONGEST_DRAFT = 64  # longest draft of a request: each token of it is a position in a pass

MOST_MEMORIES = 64  # users or keys whose memories are kept; the least recently used are forgotten


@dataclass(eq=False)
class Requested:
    """How one request is to be served, and how it was.

    name: the drafter's. prediction: expected text. batched: served with others at its end at least.
    error: why it cannot be served. check_client: raises ConnectionError if the client has gone.
    """

    drafter: Drafter | None
    name: str
    draft_length: int | str = "auto"
    rule: str = "auto"
    grammar: Grammar | None = None
    prediction: str = ""
    stats: SpeculationStats | None = None
    batched: bool = False
    error: Exception | None = None
    channel: Channel | None = None
    max_tokens: int | None = None
    check_client: Callable[[], None] = lambda: None

    def watched(self, responses: Iterable[T]) -> Iterator[T]:
        """The responses, for as long as the client is there."""
        for response in responses:
            self.check_client()
            yield response

    def __getstate__(self) -> dict[str, Any]:
        """Fields for other ranks, which draft nothing: any drafter stands for the first rank's."""
        drafter = None if self.drafter is None else PromptLookupDrafter()
        ours = dict.fromkeys(("stats", "error", "channel", "check_client"))
        return {**vars(self), **ours, "drafter": drafter}

    def usage(self) -> dict[str, Any]:
        """The `speculation` object of a reply."""
        account = self.stats.as_dict() if self.stats is not None else {}
        return {"drafter": self.name, "batched": self.batched, **account}


ANY, TARGETS, GIVEN = "any", "targets", "given"
NAMED = {ANY: (), TARGETS: ("draft_model",), GIVEN: ("model", "draft_model", "adapters")}
"""Values of --request-models, and the fields that may then name only what the start gave."""

TEMPLATE_ARGUMENTS: Set[str] = signature(
    PreTrainedTokenizerBase.apply_chat_template
).parameters.keys()
TEMPLATE_ARGUMENTS -= {"kwargs", "documents", "continue_final_message"}
"""Names in `chat_template_kwargs` that are no variables of a template, such as `padding`."""


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the server's flags about what requests may bring along."""
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


@dataclass(frozen=True)
class Access:
    """What requests may bring along.

    given: names from the start, by field. limited: fields that may hold no others. refused: names
    that `chat_template_kwargs` may not hold.
    """

    given: Mapping[str, Sequence[str | None]]
    limited: Sequence[str] = ()
    refused: Set[str] = frozenset()

    @classmethod
    def of(cls, namespace: argparse.Namespace, draft_model: str | None) -> Access:
        """As the flags say; raises ValueError for a server that could serve nothing."""
        model = namespace.model
        models = namespace.request_models or (ANY if _is_loopback(namespace.host) else TARGETS)
        if models == GIVEN and model is None:
            raise ValueError(f"argument --request-models: {GIVEN} needs --model.")
        given = {
            "model": (DEFAULT_MODEL, model, str(Path(model or "").resolve())),
            "draft_model": (DEFAULT_MODEL, draft_model),
            "adapters": (namespace.adapter_path,),
        }
        own = {"chat_template"} if namespace.allow_chat_templates else set()
        return cls(given, NAMED[models], TEMPLATE_ARGUMENTS - own)

    def allows(self, field: str, name: Any) -> bool:
        """True if a field of a request may hold this name."""
        return field not in self.limited or name in self.given[field]

    def check(self, body: dict[str, Any]) -> None:
        """Raise RequestError for what was not allowed at the start."""
        for field in self.limited:
            if field in body and not self.allows(field, body[field]):
                raise RequestError(
                    f"{field}: this server loads no {body[field]!r} for a request. Leave it out, "
                    f"or start it with --request-models {ANY}."
                )
        if wrong := self.refused & body.get("chat_template_kwargs", {}).keys():
            raise RequestError(
                f"chat_template_kwargs: {', '.join(sorted(wrong))} cannot be set by a request. "
                "A server that is started with --allow-chat-templates takes a chat_template."
            )


def _is_loopback(host: str) -> bool:
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
        self._specs = {name_in(spec): spec for spec in flags.names}
        for name in self._specs:
            self._make(name)

    @property
    def tokenizer(self) -> Any:
        """The draft model's tokenizer, None without a draft model."""
        return getattr(self._made.get(MODEL_DRAFTER), "tokenizer", None)

    def check(self, tokenizer: Any) -> None:
        """Raise TokenizerMismatchError if the draft model is none for this tokenizer's models."""
        drafter = self._made.get(MODEL_DRAFTER)
        if isinstance(drafter, Checks):
            drafter.check(DraftContext(tokenizer=tokenizer))

    def requested(self, body: dict[str, Any], api_key: str = "") -> Requested:
        """How a request is to be served; raises ValueError and MissingPackageError."""
        self.access.check(body)
        own_model = body.get("draft_model", DEFAULT_MODEL) != DEFAULT_MODEL
        if "drafter" in body and own_model:
            raise RequestError("Give drafter or draft_model, not both.")
        chosen = [
            name for name in texts_in(body.get("drafter", [*self._specs])) if name != NO_DRAFTER
        ]
        memory = self._memory_of(str(body.get("user") or ""), api_key)
        drafter = None if own_model else first_of([self._make(name, memory) for name in chosen])
        length = body.get("draft_length", body.get("num_draft_tokens"))
        return Requested(
            drafter,
            MODEL_DRAFTER if own_model else "+".join(chosen) or NO_DRAFTER,
            self.flags.draft_length if length is None else _length(length),
            self.flags.rule if body.get("rule") is None else _rule(body["rule"]),
            grammar_in(body.get("response_format")),
            prediction_in(body.get("prediction")),
            max_tokens=body.get("max_completion_tokens", body.get("max_tokens")),
        )

    def _memory_of(self, user: str, api_key: str) -> Memory | None:
        """The memory of a user or a key; None where all share one, or nobody is named."""
        who = {USER: user, KEY: api_key}.get(self.flags.memory_for, "")
        return self._memory(who) if who else None

    def _make(self, name: str, memory: Memory | None = None) -> Drafter | None:
        flags, spec = self.flags, self._specs.get(name, name)
        if name not in self._specs and name not in drafter_names():
            known = ", ".join(drafter_names())
            raise UnknownNameError(f"Unknown drafter {name!r}. Known: {known}.")
        if memory is not None and name in REMEMBERING:
            return flags.make(spec, memory=memory)
        if name in self._made:
            return self._made[name]
        if flags.waits_for_target and name in WITH_MODEL:
            folder = str(flags.draft_model)
            tokenizer = None if flags.has_head else load_tokenizer(Path(folder).expanduser())
            self._made[name] = HeadToLoad(folder, partial(flags.make, spec), tokenizer)
        else:
            self._made[name] = flags.make(spec)
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
    if isinstance(given, str):
        for option, value in split_spec(given)[1].items():
            if not isinstance(value, int | float):
                raise RequestError(f"rule: {option} must be a number, true or false.")
    make_rule(given)
    return str(given)
