"""The body of a request, from bytes to checked fields.

The fields that all protocols share are OpenAI's, mlx-lm's (min_p, repetition_penalty,
chat_template_kwargs, ...) and our own (drafter, num_draft_tokens, rule, draft_model, adapters).
Fields that are not declared are left alone, because clients send many of them.
"""

from __future__ import annotations

import inspect
import re
from itertools import islice
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from specdec_mlx.arguments import parse_draft_length, short_repr, split_spec
from specdec_mlx.drafters.grammar import Grammar
from specdec_mlx.rules import make_rule
from specdec_mlx.sampling import TEMPS, is_temp
from specdec_mlx.server.constraints import grammar_of, levels_of
from specdec_mlx.server.protocols.turns import field_of, parts_in
from specdec_mlx.server.requests import (
    AUTO,
    NONE,
    REQUIRED,
    BodyError,
    Object,
    RequestError,
    TextRequest,
)

S = TypeVar("S", bound=Struct)

DEEPEST = 128  # levels of a body: everything that walks it later may call itself as often
# Most values of a body. Each takes a hundred bytes in memory where it may take two in JSON.
MOST_VALUES = 2**20
SMALL = 2**20  # bytes of a body whose values need not be counted

NUM_SEEDS = 2**64  # MLX takes seeds of 64 bits
MOST_DRAFTERS = 8  # most drafters tried in order by one request: all of them read the prompt
LONGEST_DRAFT = 64  # longest draft of a request: each token of it is a position in a pass
MOST_BIAS = 1e4  # most that is added to a logit: far more is infinite in 16 bits
MOST_LOGPROBS = 20  # most alternatives that are reported beside a token, as OpenAI does
BUDGETS = {"minimal": 512, "low": 1024, "medium": 8192, "high": 24576}
"""Most tokens of a thought, by the effort of reasoning; other efforts have no bound."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_VALUES = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{,]', re.DOTALL)
_SURROGATE = re.compile(rb"\\ud[89a-f]", re.IGNORECASE)
_ESCAPE = re.compile(
    rb"\\ud[89ab][\da-f]{2}\\ud[c-f][\da-f]{2}|(\\ud[89a-f][\da-f]{2})|\\.", re.I | re.S
)
"""An escape in a string of JSON; half a pair of surrogates is the group."""


def read_body(raw: bytes | bytearray) -> Object:
    """A body as an object without null fields; raises BodyError.

    A number that is whole is an int, as in languages that have no others. A bytearray is emptied,
    so that the body is in memory once.
    """
    if len(raw) > SMALL:
        num_values = sum(1 for _ in islice(_VALUES.finditer(raw), MOST_VALUES + 1))
        if num_values > MOST_VALUES:
            raise BodyError(
                f"The body of the request has more than {MOST_VALUES} values. Send fewer."
            )
    try:
        body = read_json(raw)
        if any(islice(levels_of(body), DEEPEST, None)):
            raise RecursionError(f"it has more than {DEEPEST} levels")
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise BodyError(f"The body of the request is no JSON: {error}") from error
    if isinstance(raw, bytearray):
        raw.clear()
    if not isinstance(body, dict):
        raise BodyError(
            f"The body of the request must be a JSON object, not {type(body).__name__}."
        )
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in without_nulls(body).items()
    }


def read_json(raw: bytes | bytearray) -> Any:
    """Values of JSON. Halves of surrogate pairs, of texts that were cut, are replaced.

    Raises msgspec.DecodeError, UnicodeError and RecursionError.
    """
    if raw.startswith(BYTE_ORDER_MARK):
        raw = raw[len(BYTE_ORDER_MARK) :]
    if _SURROGATE.search(raw):
        raw = _ESCAPE.sub(lambda escape: rb"\ufffd" if escape[1] else escape[0], raw)
    return msgspec.json.decode(raw)


def without_nulls(body: Object) -> Object:
    """An object without its null fields, which are absent ones."""
    return {name: value for name, value in body.items() if value is not None}


def checked(value: Any, kind: type[S]) -> S:
    """An object as fields of a kind; raises RequestError, which names field, value and type."""
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        words, _, path = str(error).partition(" - at `")
    name = path.rpartition("$")[2].strip("`.").removesuffix("[...]")
    for step in re.findall(r"[^.\[\]]+", name):
        value = value[int(step) if isinstance(value, list) else step]
    expected = words.replace("Expected", "expected").partition(", got ")[0]
    if name:
        expected = f"{name}: {expected.replace(' | null', '')}, got {short_repr(value)}"
    raise RequestError(expected, param=name or None)


Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=0)]
Size = Annotated[int, Meta(ge=0, lt=2**31)]  # MLX slices by 32 bits
Length = Annotated[int, Meta(ge=1)]
Stops = str | Annotated[list[str], Meta(max_length=256)]  # all are looked for after each token
NumTop = Annotated[int, Meta(ge=-1, le=MOST_LOGPROBS)]
ToolMode = Annotated[str, Meta(pattern="^(auto|none|required)$")]


class Tool(Struct, frozen=True):
    """A tool, a namespace of tools, or the choice of some, in any protocol's form."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    parameters: Object | None = None
    input_schema: Object | None = None
    format: Object = {}
    function: Tool | None = None
    tools: list[Tool] = []
    mode: ToolMode = AUTO
    allowed_tools: Tool | None = None
    disable_parallel_tool_use: bool = False


class Schema(Struct):
    schema: Object


class AnswerFormat(Struct):
    """What an answer must match. The schema may stand in `json_schema`, or beside the type."""

    type: Annotated[str, Meta(pattern="^(text|json_object|json_schema)$")]
    schema: Object | None = None
    json_schema: Schema | None = None

    def grammar(self) -> Grammar | None:
        """The grammar of the answer, None for any text; raises RequestError and GrammarError."""
        if self.type == "text":
            return None
        is_named = self.type == "json_schema"
        schema = self.json_schema.schema if is_named and self.json_schema else self.schema
        if schema is None and is_named:
            raise RequestError('response_format: expected {"json_schema": {"schema": {...}}}.')
        return grammar_of({"type": "object"} if schema is None else schema)


class Config(Struct, frozen=True):
    effort: str | None = None
    format: AnswerFormat | None = None


class SamplingFields(Struct, kw_only=True):
    """The arguments of `Sampling` that a request may give."""

    temp: float | None = field(default=None, name="temperature")
    top_p: Share | None = None
    min_p: Share | None = None
    top_k: Count | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Annotated[float, Meta(ge=0, le=0.5)] | None = None

    def __post_init__(self) -> None:
        if self.temp is not None and not is_temp(self.temp):
            raise ValueError(f"temperature: expected {TEMPS}, got {self.temp}")


class PenaltyFields(SamplingFields, kw_only=True):
    """The arguments of mlx-lm's `make_logits_processors` that a request may give."""

    repetition_penalty: Annotated[float, Meta(ge=0)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-MOST_BIAS)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-MOST_BIAS)] | None = None
    repetition_context_size: Size | None = None
    presence_context_size: Size | None = None
    frequency_context_size: Size | None = None
    logit_bias: dict[Count, Annotated[float, Meta(le=MOST_BIAS)]] | None = None


class Body(PenaltyFields, kw_only=True):
    """The fields that all protocols have in common."""

    model: str = ""
    adapters: str | None = None
    draft_model: str | None = None
    stream: bool = False
    stream_options: Object = {}
    metadata: Object = {}
    parallel_tool_calls: bool = True
    chat_template_kwargs: Object = {}
    reasoning_effort: str = ""
    tools: list[Tool] = []
    tool_choice: ToolMode | Tool = AUTO
    max_completion_tokens: Length | None = None
    max_output_tokens: Length | None = None
    max_tokens: Length | None = None
    seed: int | None = None
    prediction: Object = {}
    drafter: str | Annotated[list[str], Meta(max_length=MOST_DRAFTERS)] | None = None
    num_draft_tokens: Any = None
    draft_length: Any = None
    rule: str | None = None
    user: Any = None


B = TypeVar("B", bound=Body)
LENGTHS = "max_completion_tokens", "max_output_tokens", "max_tokens"
"""Names of the most tokens of an answer; the first of them that a body has counts."""


def fields_of(body: Object, kind: type[B]) -> B:
    """A body as fields; raises RequestError. A seed or a length of -1, or null, stands for none."""
    fields = {
        name: value
        for name, value in without_nulls(body).items()
        if value != -1 or name not in ("seed", *LENGTHS)
    }
    return checked(fields, kind)


def arguments_in(body: Body, kind: type[SamplingFields]) -> Object:
    """The arguments that a body gives, of those that a class of fields adds to its base."""
    names = inspect.get_annotations(kind)
    return {name: value for name in names if (value := getattr(body, name)) is not None}


def text_request(body: Body, answer_format: AnswerFormat | None = None) -> TextRequest:
    """A request with what all protocols say in the same way; raises RequestError."""
    drafters, seed = body.drafter, body.seed
    predicted = parts_in(body.prediction.get("content"), "prediction: content")
    return TextRequest(
        model=body.model,
        adapter=body.adapters,
        draft_model=body.draft_model,
        parallel_calls=body.parallel_tool_calls,
        template=dict(body.chat_template_kwargs),
        max_tokens=body.max_completion_tokens or body.max_output_tokens or body.max_tokens,
        sampling=arguments_in(body, SamplingFields),
        penalties=arguments_in(body, PenaltyFields),
        seed=None if seed is None else seed % NUM_SEEDS,
        prediction="".join(field_of(part, "text") for part in predicted),
        drafters=[drafters] if isinstance(drafters, str) else drafters,
        grammar=None if answer_format is None else answer_format.grammar(),
        num_draft_tokens=_draft_length(body),
        rule=_rule(body.rule),
        user=str(body.user or ""),
    )


def function(tool: Tool, description: str | None, parameters: Object | None) -> Object:
    """A tool as templates take it; raises RequestError for a tool without a name."""
    if tool.name is None:
        raise RequestError(f"tools: expected a name, got {tool}")
    content = {"name": tool.name, "description": description or "", "parameters": parameters or {}}
    return {"type": "function", "function": content}


def choose_tool(request: TextRequest, choice: str | Tool) -> None:
    """Note which of the request's tools are to be called; raises RequestError."""
    if isinstance(choice, str):
        request.tool_choice = choice
    elif choice.type in (AUTO, NONE):
        request.tool_choice = choice.type
    elif choice.type == "any":
        request.tool_choice = REQUIRED
    elif choice.type == "allowed_tools":
        allowed = choice.allowed_tools or choice  # of chats, and of responses
        names = [(tool.function or tool).name for tool in allowed.tools]
        request.tools = [tool for tool in request.tools if tool["function"]["name"] in names]
        request.tool_choice = allowed.mode
    else:
        name = (choice.function or choice).name
        if name is None or name not in [tool["function"]["name"] for tool in request.tools]:
            raise RequestError(f"tool_choice: there is no tool {name!r} among the tools.")
        request.tool_choice = name


def texts(value: str | list[str]) -> list[str]:
    """The texts in a field that holds one or several; empty ones are none."""
    return list(filter(None, [value] if isinstance(value, str) else value))


def think(request: TextRequest, effort: str | None) -> None:
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


def _draft_length(body: Body) -> int | str | None:
    value = body.draft_length if body.num_draft_tokens is None else body.num_draft_tokens
    if value is None:
        return None
    try:
        length = parse_draft_length("" if isinstance(value, bool) else str(value))
    except ValueError:
        raise RequestError(
            f"num_draft_tokens: expected an int >= 0 (at most {LONGEST_DRAFT} count) or auto, got "
            f"{short_repr(value)}"
        ) from None
    return length if isinstance(length, str) else min(length, LONGEST_DRAFT)


def _rule(rule: str | None) -> str | None:
    """A rule's name with options, which are numbers, true or false; raises RequestError."""
    if rule is None:
        return None
    try:
        for option, value in split_spec(rule)[1].items():
            if not isinstance(value, int | float):
                raise ValueError(f"rule: {option} must be a number, true or false.")
        make_rule(rule)
    except ValueError as error:
        raise RequestError(str(error)) from error
    return rule
