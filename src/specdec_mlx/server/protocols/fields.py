"""Fields that the protocols share: their checks, with words that name the field, and their forms.

Beside OpenAI's there are mlx-lm's (min_p, repetition_penalty, chat_template_kwargs, ...) and ours
(drafter, num_draft_tokens, rule, draft_model, adapters). Below them stands what replies have in
common.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from http import HTTPStatus
from math import inf
from typing import Any

import msgspec

from specdec_mlx.arguments import parse_draft_length, split_spec
from specdec_mlx.drafters.grammar import Grammar
from specdec_mlx.rules import make_rule
from specdec_mlx.sampling import TEMPS, is_temp
from specdec_mlx.server.forced import grammar_of
from specdec_mlx.server.protocols.body import without_nulls
from specdec_mlx.server.protocols.turns import expect, parts_in
from specdec_mlx.server.requests import (
    Asked,
    CallArguments,
    CallBegan,
    CallBroken,
    Ended,
    Event,
    Object,
    RequestError,
    Said,
    Sent,
    Stream,
    TextRequest,
    TokenLogprob,
    Wire,
    Written,
)

Field = tuple[Callable[[Any], bool], str]
"""The test of a field's value, and the words for what it expects."""

NUM_SEEDS = 2**64  # MLX takes seeds of 64 bits
MOST_CHOICES = 32  # most choices of one request: each is a row of a batch
MOST_DRAFTERS = 8  # most drafters tried in order by one request: all of them read the prompt
LONGEST_DRAFT = 64  # longest draft of a request: each token of it is a position in a pass
MOST_LOGPROBS = 20  # most alternatives that are reported beside a token, as OpenAI does

LONGEST_ANSWER = 1000  # most characters of an error's message: some repeat what the client sent
LEAST_LOGPROB = -9999.0  # said for a token that cannot be drawn; JSON has no infinity

PENALTIES = "repetition_penalty", "presence_penalty", "frequency_penalty"
SIZES = [name.replace("penalty", "context_size") for name in PENALTIES]
BUDGETS = {"minimal": 512, "low": 1024, "medium": 8192, "high": 24576}
"""Most tokens of a thought, by the effort of reasoning; other efforts have no bound."""

LENGTHS = "max_completion_tokens", "max_output_tokens", "max_tokens"
"""Names of the most tokens of an answer; the first one that is there counts."""


def base(body: Object) -> TextRequest:
    """What all protocols say in the same way; raises RequestError.

    A seed of -1, and a length of -1, stands for none.
    """
    given = {
        name: value
        for name, value in without_nulls(body).items()
        if value != -1 or name not in ("seed", *LENGTHS)
    }
    least = 0 if given.get("echo") else 1
    for name, (fits, expected) in {**FIELDS, "max_tokens": number(int, least)}.items():
        if name in given and not fits(given[name]):
            raise RequestError(f"{name} must be {expected}, not {given[name]!r}")
    drafters, seed = given.get("drafter"), given.get("seed")
    return TextRequest(
        model=given.get("model", ""),
        adapter=given.get("adapters"),
        draft_model=given.get("draft_model"),
        parallel_calls=given.get("parallel_tool_calls", True),
        template=dict(given.get("chat_template_kwargs", {})),
        max_tokens=next((given[name] for name in LENGTHS if name in given), None),
        sampling=_sampling(given),
        penalties=_penalties(given),
        seed=None if seed is None else seed % NUM_SEEDS,
        prediction=_prediction(given.get("prediction")),
        drafters=None if drafters is None else several(drafters),
        num_draft_tokens=_length(given.get("num_draft_tokens", given.get("draft_length"))),
        rule=_rule(given.get("rule")),
        user=str(given.get("user") or ""),
    )


def choices(request: TextRequest, count: int) -> list[TextRequest]:
    """A request for each choice of its text; each has a seed of its own."""
    seed = request.seed
    seeds = [None if seed is None else (seed + i) % NUM_SEEDS for i in range(count)]
    return [replace(request, seed=seed) for seed in seeds]


def texts(value: Any, name: str) -> list[str]:
    """What stands in a field that holds one text, several or none; raises RequestError."""
    found = [] if value is None else several(value)
    if not all(isinstance(text, str) for text in found):
        raise RequestError(f"{name} must be a text or a list of texts, not {value!r}")
    return [text for text in found if text]


def several(value: Any) -> list[Any]:
    """What stands in a field that holds one thing or a list of them."""
    return value if isinstance(value, list) else [value]


def think(request: TextRequest, effort: Any) -> None:
    """Let a request think with an effort of reasoning: as its template says, and within a budget.

    What the request says to its template itself has the last word.
    """
    if not effort:
        return
    names: Object = {"enable_thinking": False}
    if effort != "none":
        names = {"enable_thinking": True, "reasoning_effort": effort}
    request.template = names | request.template
    request.thought_budget = BUDGETS.get(effort)


def grammar_in(wanted: Any) -> Grammar | None:
    """The grammar that OpenAI's `response_format` asks for; None for any text.

    The schema may stand in `json_schema`, as in chats, or beside the type.
    """
    if wanted is None:
        return None
    kind = expect(wanted, dict, "response_format").get("type")
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        raise RequestError("response_format: type must be text, json_object or json_schema.")
    holder = {"schema": {"type": "object"}, **wanted}
    if kind == "json_schema":
        holder = wanted.get("json_schema", wanted)
    schema = holder.get("schema") if isinstance(holder, dict) else None
    if not isinstance(schema, dict):
        raise RequestError('response_format: expected {"json_schema": {"schema": {...}}}.')
    return grammar_of(schema)


def number(kind: type, least: float = -inf, most: float = inf) -> Field:
    """A field that is a finite number within bounds; `kind` is int or float."""
    kinds = (int,) if kind is int else (int, float)
    noun = "an int" if kind is int else "a number"
    bounds = "" if least == -inf else f" from {least}"
    bounds += (" on" if bounds else "") if most == inf else f" to {most}"
    return (lambda v: type(v) in kinds and abs(v) < inf and least <= v <= most), noun + bounds


def _are_drafters(value: Any) -> bool:
    names = several(value)
    return len(names) <= MOST_DRAFTERS and all(isinstance(name, str) for name in names)


def _are_logprobs(value: Any) -> bool:
    return isinstance(value, bool) or number(int, 0, MOST_LOGPROBS)[0](value)


def _is(kind: type, words: str) -> Field:
    return (lambda value: isinstance(value, kind)), words


FIELDS: dict[str, Field] = {
    name: field
    for names, field in (
        ("model draft_model adapters reasoning_effort rule", _is(str, "a text")),
        ("stream_options chat_template_kwargs logit_bias", _is(dict, "an object")),
        ("stream echo parallel_tool_calls", _is(bool, "boolean")),
        ("top_p min_p xtc_probability", number(float, 0, 1)),
        ("xtc_threshold", number(float, 0, 0.5)),
        ("repetition_penalty", number(float, 0)),
        ("presence_penalty frequency_penalty", number(float)),
        ("top_k", number(int, 0)),
        ("n", number(int, 1, MOST_CHOICES)),
        ("top_logprobs", number(int, -1, MOST_LOGPROBS)),
        ("logprobs", (_are_logprobs, number(int, 0, MOST_LOGPROBS)[1])),
        ("seed", (number(int)[0], "an int, -1 for none")),
        ("temperature", (lambda v: number(float)[0](v) and is_temp(v), TEMPS)),
        ("drafter", (_are_drafters, f"a name or a list of at most {MOST_DRAFTERS} names")),
    )
    for name in names.split()
}
FIELDS |= dict.fromkeys(SIZES, number(int, 0)) | dict.fromkeys(LENGTHS, number(int, 1))
"""The fields that all protocols have in common, but for those that have a form."""


def _sampling(given: Object) -> Object:
    """Arguments of `Sampling`, of the fields that are there."""
    names = "top_p", "min_p", "top_k", "xtc_probability", "xtc_threshold"
    fields = {"temperature": "temp", **dict(zip(names, names, strict=True))}
    return {own: given[name] for name, own in fields.items() if name in given}


def _penalties(given: Object) -> Object:
    """Arguments of mlx-lm's `make_logits_processors`."""
    penalties = {
        name: value
        for name, value in given.items()
        if name in SIZES or (name in PENALTIES and value)
    }
    bias = {}
    for token, value in given.get("logit_bias", {}).items():
        if not (token.isascii() and token.isdecimal() and number(float)[0](value)):
            raise RequestError(f"logit_bias: expected a number for token {token}, not {value!r}")
        bias[int(token)] = float(value)
    return penalties | ({"logit_bias": bias} if bias else {})


def _prediction(given: Any) -> str:
    """The text of OpenAI's `prediction`; "" for none."""
    if given is None:
        return ""
    content = several(expect(given, dict, "prediction").get("content"))
    parts = parts_in(content, "prediction: content")
    return "".join(expect(part.get("text"), str, "prediction: text") for part in parts)


def _length(given: Any) -> int | str | None:
    if given is None:
        return None
    try:
        length = parse_draft_length("" if isinstance(given, bool) else str(given))
    except ValueError:
        raise RequestError(
            f"num_draft_tokens must be an int >= 0 (at most {LONGEST_DRAFT} count) or auto, "
            f"not {given!r}"
        ) from None
    return length if isinstance(length, str) else min(length, LONGEST_DRAFT)


def _rule(given: str | None) -> str | None:
    """A rule's name with options, which are numbers, true or false; raises RequestError."""
    if given is None:
        return None
    try:
        for option, value in split_spec(given)[1].items():
            if not isinstance(value, int | float):
                raise ValueError(f"rule: {option} must be a number, true or false.")
        make_rule(given)
    except ValueError as error:
        raise RequestError(str(error)) from error
    return given


# What replies have in common


def speculation(ended: Ended) -> Object:
    """The account of a text, in our own field of the usage."""
    account = ended.stats.as_dict() if ended.stats is not None else {}
    return {"drafter": ended.drafter, "batched": ended.is_batched, **account}


def usage(ends: Sequence[Ended], num_choices: int = 1) -> Object:
    """OpenAI's usage of all choices; the prompt of several is counted once."""
    prompts = ends[::num_choices]
    prompt, written = (sum(end.num_prompt for end in prompts), sum(end.num_written for end in ends))
    accounts = [speculation(end) for end in ends]
    whole = accounts[0]
    if len(ends) > 1:
        batched = any(account["batched"] for account in accounts)
        whole = {"drafter": whole["drafter"], "batched": batched, "choices": accounts}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": sum(end.num_cached for end in prompts)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(end.num_thought for end in ends),
            "accepted_prediction_tokens": sum(end.accepted for end in ends),
            "rejected_prediction_tokens": sum(end.rejected for end in ends),
        },
        "speculation": whole,
    }


def logprob(written: TokenLogprob) -> Object:
    """OpenAI's form of a token's log-probability, with mlx-lm's `id`."""

    def one(token: int, data: bytes, value: float) -> Object:
        said = max(value, LEAST_LOGPROB)
        named = {"id": token, "token": data.decode(errors="replace"), "logprob": said}
        return {**named, "bytes": list(data)}

    top = [one(*alternative) for alternative in written.top]
    return {**one(written.token, written.data, written.logprob), "top_logprobs": top}


def words_of(error: Exception, status: HTTPStatus) -> str:
    """An error in words for the client, with its kind if it is ours.

    The system's errors name files, and other errors may: neither they nor the home folder are told.
    """
    words = str(error)
    if status == HTTPStatus.INTERNAL_SERVER_ERROR:
        if isinstance(error, OSError):
            words = "The server's log says why."
        words = f"{type(error).__name__}: {words}"
    home = os.path.expanduser("~")
    return (words if len(home) < 2 else words.replace(home, "~"))[:LONGEST_ANSWER]  # not of "/"


def server_sent(data: Any, event: str | None = None) -> bytes:
    """A server-sent event: its data, which become JSON, and its name."""
    name = b"" if event is None else f"event: {event}\n".encode()
    return b"%sdata: %s\n\n" % (name, msgspec.json.encode(data))


class OpenAIWire(Wire):
    """What OpenAI's protocols have in common."""

    def error(self, error: Exception, status: HTTPStatus) -> Object:
        """OpenAI's form of an error."""
        is_server = status >= HTTPStatus.INTERNAL_SERVER_ERROR
        said = {
            "message": words_of(error, status),
            "type": "server_error" if is_server else "invalid_request_error",
            "param": None,
            "code": getattr(error, "code", None) or status,
        }
        return {"error": said}


class ItemStream(Stream):
    """A streamed reply of items, one after another: each is added, grows, and is closed.

    kinds: of items that are answers, and thoughts. whole: the reply so far. item, text: the open
    item, {} for none, and what it has grown by.
    """

    kinds: tuple[str, str]
    whole: Object

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self.item, self.text = Object(), ""

    def write(self, choice: int, event: Event) -> Sent:
        """The bytes of an event."""
        match event:
            case Said() if event.text or event.logprobs:
                kind = self.kinds[event.is_thought]
                if self.item.get("type") != kind:
                    yield from self._next({"type": kind})
                yield from self._more(event.text, event.logprobs)
            case CallBegan():
                yield from self._next(self.called(event))
                yield from self._more(event.text)
            case CallArguments():
                yield from self._more(event.text)
            case CallBroken():
                yield from self._end("incomplete")
            case Ended():
                is_cut = event.reason == "length"
                yield from self._end("incomplete" if is_cut else "completed")
                yield from self.finish(event)

    def _next(self, item: Object) -> Sent:
        yield from self._end("completed")
        self.item, self.text = item, ""
        yield from self.add()

    def _more(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Sent:
        self.text += text
        if text or logprobs:
            yield from self.grow(text, logprobs)

    def _end(self, status: str) -> Sent:
        if self.item:
            yield from self.close(status)
            self.item = {}

    @abstractmethod
    def called(self, event: CallBegan) -> Object:
        """A call as an item."""

    @abstractmethod
    def add(self) -> Sent:
        """Begin the open item, which has a type, and what `called` gives."""

    @abstractmethod
    def grow(self, text: str, logprobs: Sequence[TokenLogprob]) -> Sent:
        """More text of the open item."""

    @abstractmethod
    def close(self, status: str) -> Sent:
        """End the open item: it is "completed", or "incomplete"."""

    @abstractmethod
    def finish(self, ended: Ended) -> Sent:
        """End the reply."""


class ItemWire(Wire):
    """A protocol whose replies are items."""

    stream: type[ItemStream]

    def reply(self, asked: Asked, texts: Sequence[Written]) -> Object:
        """The reply: what a stream of the same events comes to."""
        stream = self.stream(asked)
        for event in texts[0].events():
            list(stream.write(0, event))
        return stream.whole
