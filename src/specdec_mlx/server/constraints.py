"""Grammars of answers and of calls that a request forces, and bounds of schemas and thoughts."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from threading import Thread
from time import monotonic
from typing import Any, TypeVar

import mlx.core as mx

from specdec_mlx.drafters.grammar import JSON_STYLE, Grammar
from specdec_mlx.drafters.thoughts import Mark, Thought
from specdec_mlx.errors import GrammarError
from specdec_mlx.server.requests import (
    REQUIRED,
    Object,
    RequestError,
    ServerBusyError,
    TextRequest,
)

T = TypeVar("T")

# Most characters, levels, and names of `patternProperties` of a JSON schema: each pattern is
# compared with all others; 100 take 0.2 s, 500 took 77 s.
LONGEST_SCHEMA, DEEPEST_SCHEMA, MOST_PATTERNS = 2**17, 100, 100
# Most processor time that a grammar is compiled for, and the longest that a client waits for it on
# a machine that is busy with something else.
COMPILE_SECONDS, LONGEST_WAIT = 10.0, 60.0

CLOSED = {"type", "properties", "required", "title", "description", "$schema", "$defs"}
"""Words of a schema that names all properties in one place."""

BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "enum", "const"}


def is_bare_call(request: TextRequest, tokenizer: Any) -> bool:
    """True if the text is a forced call that stands alone, as JSON, and not between marks."""
    return request.is_forced and not _calls_in_json(tokenizer)


def _calls_in_json(tokenizer: Any) -> bool:
    """True if the model's own calls are JSON objects between two marks."""
    if not tokenizer.has_tool_calling or not tokenizer.tool_call_end:
        return False
    call = {"name": "f", "arguments": {"a": 1}}
    try:
        return bool(tokenizer.tool_parser(json.dumps(call), None) == call)
    except Exception:  # of a parser of another format
        return False


def reads_calls(request: TextRequest, tokenizer: Any) -> bool:
    """True if calls are read in the text, between the marks of the model's own format.

    Beside an answer that must match a grammar, calls are read only if a schema describes it.
    """
    grammar, is_forced = request.grammar, request.is_forced
    if grammar is not None and not is_forced and grammar.kind != "json_schema":
        return False
    may_call = bool(request.messages and request.offered_tools and tokenizer.has_tool_calling)
    return may_call and not is_bare_call(request, tokenizer)


def grammar_for(request: TextRequest, tokenizer: Any) -> Grammar | None:
    """What the text must match: a forced call, or the request's own grammar; None for any text.

    Where tools may be called as well, that is the grammar of an answer which is no call. A forced
    call is in the model's own format where that is JSON between marks, else an object with "name"
    and "arguments" alone. Raises RequestError and GrammarError.
    """
    if not request.is_forced:
        if request.grammar is None or not reads_calls(request, tokenizer):
            return request.grammar
        schema = {**json.loads(request.grammar.text), "x-guidance": JSON_STYLE}
        begins = _as_rule(tokenizer, "tool_call_start")
        return Grammar.lark(
            f"start: answer | {begins} <[*]>*\nanswer: %json {json.dumps(schema)}\n"
        )
    tools = {tool["function"]["name"]: tool["function"] for tool in request.tools}
    if request.tool_choice != REQUIRED:
        if request.tool_choice not in tools:
            raise RequestError(f"tool_choice: there is no tool {request.tool_choice!r}.")
        tools = {request.tool_choice: tools[request.tool_choice]}
    body = " | ".join(_call_rule(name, tool.get("parameters")) for name, tool in tools.items())
    is_bare = is_bare_call(request, tokenizer)
    is_single = is_bare or request.tool_choice != REQUIRED or not request.parallel_calls
    call = "body"
    if not is_bare:  # between marks, on lines of their own
        begin_mark = _as_rule(tokenizer, "tool_call_start")
        end_mark = _as_rule(tokenizer, "tool_call_end")
        call = f'{begin_mark} "\\n" body "\\n" {end_mark} "\\n"?'
    return Grammar.lark(f"start: call{'' if is_single else '+'}\ncall: {call}\nbody: {body}\n")


def _as_rule(tokenizer: Any, name: str) -> str:
    """The mark of a name by its tokens, if it is one or has special ones, which no text makes.

    Nothing is encoded here: another thread may be using the tokenizer.
    """
    tokens = getattr(tokenizer, f"{name}_tokens")
    if len(tokens) == 1 or {*tokens} & {*tokenizer.all_special_ids}:
        return " ".join(f"<[{token}]>" for token in tokens)
    return json.dumps(getattr(tokenizer, name))


def _call_rule(name: str, parameters: Any) -> str:
    """A call of one tool; its arguments are any object if their schema cannot be followed.

    Names that the schema does not know are not made up, unless it says that they may be there.
    """
    schema: Object = {"type": "object"}
    if isinstance(parameters, dict):
        followed = {**_with_bounds(parameters), "type": "object"}
        if parameters.keys() <= CLOSED and parameters.get("properties"):
            followed["additionalProperties"] = False
        try:
            check_schema(followed)
            Grammar.json_schema(followed)
            schema = followed
        except (GrammarError, RequestError):
            pass
    begins = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
    return f'{begins} %json {json.dumps({**schema, "x-guidance": JSON_STYLE})} "}}"'


def _with_bounds(schema: Any) -> Any:
    """A schema whose integers end: those without bounds are such as all readers of JSON know.

    Source: RFC 8259, section 6. A small model that is held to digits writes them for ever.
    """
    if isinstance(schema, list):
        return [_with_bounds(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    bounded = {
        key: value if key in ("const", "enum", "default", "examples") else _with_bounds(value)
        for key, value in schema.items()
    }
    if schema.get("type") == "integer" and not schema.keys() & BOUNDS:
        bounded |= {"minimum": 1 - 2**53, "maximum": 2**53 - 1}
    return bounded


def grammar_of(schema: Object) -> Grammar:
    """The grammar of a JSON schema; raises RequestError and GrammarError."""
    check_schema(schema)
    return within(lambda: Grammar.json_schema(schema))


def check_schema(schema: Object) -> None:
    """Raise RequestError for a schema that is too large to be compiled while others wait."""
    levels = list(levels_of(schema))
    nodes = [node for level in levels for node in level if isinstance(node, dict)]
    name_lists = [node.get("patternProperties") for node in nodes]
    patterns = sum(len(names) for names in name_lists if isinstance(names, dict))
    size, depth = len(json.dumps(schema)), len(levels)
    if size > LONGEST_SCHEMA or depth > DEEPEST_SCHEMA or patterns > MOST_PATTERNS:
        raise RequestError(
            f"The schema has {size} characters, {depth} levels and {patterns} patternProperties; "
            f"at most {LONGEST_SCHEMA}, {DEEPEST_SCHEMA} and {MOST_PATTERNS} are compiled."
        )


def levels_of(value: Any) -> Iterator[list[Any]]:
    """The lists and objects within a value of JSON, itself among them, level by level."""
    level = [value]
    while level := [node for node in level if isinstance(node, dict | list)]:
        yield level
        inner = [node.values() if isinstance(node, dict) else node for node in level]
        level = [child for children in inner for child in children]


def within(make: Callable[[], T]) -> T:
    """Return `make()`, unless it takes too long.

    Raises:
        RequestError: it has taken `COMPILE_SECONDS` of processor time; the grammar is too large.
        ServerBusyError: it is not done after `LONGEST_WAIT` seconds, and the processor time is less
            or cannot be told, as on macOS.
    """
    made: Future[T] = Future()
    clock: Future[int | None] = Future()

    def run() -> None:
        clock.set_result(_clock_of_this_thread())
        try:
            made.set_result(make())
        except Exception as error:
            made.set_exception(error)

    # A daemon, because llguidance cannot be stopped once it compiles.
    Thread(target=run, daemon=True).start()
    until, spent = monotonic() + LONGEST_WAIT, 0.0
    while monotonic() < until:
        # The least time in which the thread can have used up its processor time.
        at_least = max(COMPILE_SECONDS - spent, LONGEST_WAIT / 1000)
        if wait([made], min(at_least, until - monotonic())).done:
            return made.result()
        spent = _seconds_of(clock.result())
        if spent >= COMPILE_SECONDS:
            raise RequestError(
                f"The grammar was not compiled in {COMPILE_SECONDS} s of processor time. Make it "
                "smaller."
            )
    raise ServerBusyError(f"The grammar was not compiled in {LONGEST_WAIT} s.")


def _clock_of_this_thread() -> int | None:
    """The clock of this thread's processor time; None on systems that have none for each thread."""
    if sys.platform == "linux":
        return time.pthread_getcpuclockid(threading.get_ident())
    return None


def _seconds_of(clock: int | None) -> float:
    """Processor time on a thread's clock; 0 once the thread has ended, or for None."""
    try:
        return 0.0 if clock is None else time.clock_gettime(clock)
    except OSError:
        return 0.0


class ThoughtBudget:
    """Logits processor that closes the thought at the beginning of a text after `most` tokens.

    It then leaves no token but the next of `thought.closes`. A row depends on nothing but the
    tokens before it, so that drafts change no text. Nothing is read on the host.
    """

    pure = True

    def __init__(self, thought: Thought, most: int, start: int | None = None) -> None:
        """start: tokens before the text; None for those of the first call."""
        self.thought, self.most, self.start = thought, most, start

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Logits [1, V]; all but one are -inf where the thought that `tokens` [n] hold is full."""
        # Set once: later calls have more tokens of the text.
        if self.start is None:
            self.start = tokens.shape[0]
        begin = self.start + len(self.thought.opens)
        if tokens.shape[0] < begin + self.most:
            return logits
        text, closes = tokens[begin:], self.thought.closes
        is_full = _stands_at(self.thought.opens, tokens, self.start)
        is_full &= ~(_stands_in(closes, text) | _stands_in(self.thought.calls, text))
        token = mx.array(closes[0])
        for i in range(1, min(len(closes), text.shape[0] + 1)):  # how much of the mark is written
            is_begun = _stands_at(closes[:i], text, text.shape[0] - i)
            token = mx.where(is_begun, closes[i], token)
        is_next = mx.arange(logits.shape[-1]) == token
        only_next = mx.where(is_next, mx.zeros_like(logits), -mx.inf)
        return mx.where(is_full, only_next, logits)


def _stands_at(mark: Mark, text: mx.array, place: int) -> mx.array:
    """True if a mark stands at a place of a text [n], which has tokens enough."""
    return mx.all(text[place : place + len(mark)] == mx.array(mark, text.dtype))


def _stands_in(mark: Mark, text: mx.array) -> mx.array:
    """True if a mark stands anywhere in a text [n]; False for an empty mark."""
    num_places = text.shape[0] - len(mark) + 1
    if not mark or num_places < 1:
        return mx.array(False)
    is_here = text[:num_places] == mark[0]
    for i, token in enumerate(mark[1:], 1):
        is_here &= text[i : i + num_places] == token
    return mx.any(is_here)
