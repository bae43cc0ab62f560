"""Grammars of forced calls, and the bounds of their schemas."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from written_texts import END, PARAMETERS, TOOLS, cut, events_of, said, tokenizer, written

from selection import in_one_test
from specdec_mlx.drafters.grammar import Grammar, GrammarPosition, compiled_tokenizer
from specdec_mlx.server import constraints
from specdec_mlx.server.requests import (
    CallBroken,
    RequestError,
    ServerBusyError,
    TextPiece,
    TextRequest,
    Transcript,
)

STRICT = {**PARAMETERS, "required": ["a"], "additionalProperties": False}
OTHER = {"type": "function", "function": {"name": "g"}}
REFERRED = {
    "type": "function",
    "function": {
        "name": "h",
        "parameters": {
            "$defs": {"x": {"type": "integer"}},
            "type": "object",
            "properties": {"n": {"$ref": "#/$defs/x"}},
            "required": ["n"],
            "additionalProperties": False,
        },
    },
}
ASKED = TextRequest(
    messages=[{"role": "user", "content": "go"}],
    tools=[{"type": "function", "function": {"name": "f", "parameters": STRICT}}, OTHER, REFERRED],
    tool_choice="required",
)
MARKED = ("json_tools", ("<tool_call>", "</tool_call>"))


def follows(request: TextRequest, how: tuple[Any, ...], text: str) -> int | None:
    """Number of characters until the grammar refuses a text; None if the text may end there."""
    wrapper = tokenizer(*how)
    grammar = constraints.grammar_for(request, wrapper)
    assert grammar is not None
    place = GrammarPosition(grammar.begin(compiled_tokenizer(wrapper)))
    tokens = wrapper.encode(text, add_special_tokens=False)
    place.go_to(tokens)
    taken = len(wrapper.decode(tokens[: len(place.path)]))
    end = wrapper.eos_token_id
    ends = bool(np.array(place.allowed(len(wrapper)))[end])
    return None if ends and taken == len(text) else taken


CALL = '{"name": "f", "arguments": {"a": 1}}'
BARE = ("qwen3_coder", ("<tool_call>", "</tool_call>"))


@pytest.mark.parametrize("marks", [(), ("<tool_call>", "</tool_call>")])
def test_a_forced_call_is_in_the_models_own_format_if_that_is_json(marks: tuple[str, ...]) -> None:
    how = ("json_tools", marks)
    one = f"<tool_call>\n{CALL}\n</tool_call>"
    assert follows(ASKED, how, one) is None
    assert follows(ASKED, how, one + "\n" + one) is None
    assert follows(ASKED, how, CALL) is not None
    assert follows(ASKED, how, one.replace("1", "x")) is not None
    assert follows(ASKED, how, one.replace('"f"', '"z"')) is not None
    assert follows(ASKED, how, "") is not None


def test_a_forced_call_of_other_formats_is_json_alone() -> None:
    for how in (BARE, (None, ())):
        assert follows(ASKED, how, CALL) is None
        assert follows(ASKED, how, CALL + "\n" + CALL) is not None
        assert follows(ASKED, how, f"<tool_call>\n{CALL}\n</tool_call>") is not None


def test_the_tool_that_is_named_is_called_once() -> None:
    named = replace(ASKED, tool_choice="g")
    one = '<tool_call>\n{"name": "g", "arguments": {"any": [1]}}\n</tool_call>'
    assert follows(named, MARKED, one) is None
    assert follows(named, MARKED, one.replace('"g"', '"f"')) is not None
    assert follows(named, MARKED, one + "\n" + one) is not None
    single = replace(ASKED, parallel_calls=False)
    assert follows(single, MARKED, one) is None
    assert follows(single, MARKED, one + "\n" + one) is not None
    with pytest.raises(RequestError, match="there is no tool 'z'"):
        constraints.grammar_for(replace(ASKED, tool_choice="z"), tokenizer())


def test_definitions_of_a_tools_schema_are_its_own() -> None:
    text = '{"name": "h", "arguments": {"n": 1}}'
    assert follows(ASKED, BARE, text) is None
    assert follows(ASKED, BARE, text.replace("1", '"1"')) is not None


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {str(i): {"type": "null"} for i in range(20_000)}},
        {"type": "object", "properties": {"a": {"$ref": "http://nowhere.example/x"}}},
        {"type": "object", "minProperties": "many"},
        [],
        None,
    ],
)
def test_a_tool_whose_schema_cannot_be_followed_takes_any_object(parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert follows(replace(ASKED, tools=[tool]), BARE, CALL) is None


def test_an_answers_grammar_is_the_requests_own() -> None:
    grammar = Grammar.regex("a+")
    for choice in ("auto", "none"):
        request = replace(ASKED, grammar=grammar, tool_choice=choice)
        assert constraints.grammar_for(request, tokenizer()) is grammar
    assert constraints.grammar_for(replace(ASKED, tool_choice="auto"), tokenizer()) is None
    assert constraints.grammar_for(replace(ASKED, tools=[]), tokenizer()) is None


def test_a_model_may_call_a_tool_before_it_answers_by_a_schema() -> None:
    request = replace(ASKED, tool_choice="auto", grammar=Grammar.json_schema(STRICT))
    for how in (MARKED, ("qwen3_coder", ())):
        assert follows(request, how, '{"a": 1}') is None
        assert follows(request, how, "<tool_call>\n<f>\n</tool_call> <think>") is None
        assert follows(request, how, "It is") == 0
    assert follows(request, (None, ()), '{"a": 1}') is None
    assert follows(request, (None, ()), "<tool_call>") == 0
    asked = {"grammar": request.grammar, "tools": TOOLS, "in_thought": True}
    call = f"<tool_call>\n{CALL}\n</tool_call>"
    assert said(written(call + END, **asked))[2:4] == ([("f", '{"a": 1}')], "tool_calls")
    text = '{"b": "<think> <tool_call>"}'
    assert said(written(text + END, **asked)) == (text, "", [], "stop", None)


def test_what_the_grammar_lets_through_is_read_as_a_call() -> None:
    calls = [("f", '{"a": 1}')]
    for how in (BARE, MARKED, ("mistral", ()), (None, ())):
        text = f"<tool_call>\n{CALL}\n</tool_call>" if how == MARKED else CALL
        kinds = {"parser": how[0], "marks": how[1]}
        whole = written(text + END, how=kinds, tools=TOOLS, tool_choice="f", in_thought=False)
        assert said(whole) == ("", "", calls, "tool_calls", None)
    short = written(CALL[:-3], how={"parser": None}, tools=TOOLS, tool_choice="required")
    assert said(short) == ("", "", [], "length", None)


CUT: list[tuple[dict[str, Any], str]] = [
    ({"marks": ("<tool_call>", "</tool_call>")}, "<tool_call>\n{}\n</tool_call>"),
    ({}, "<tool_call>\n{}\n</tool_call>"),  # marks of several tokens
    ({"parser": "mistral"}, "{}"),
    ({"parser": None}, "{}"),
]


@in_one_test(("how", "form"), CUT)
def test_a_forced_call_that_the_limit_cuts_leaves_no_marks(how: dict[str, Any], form: str) -> None:
    """Wherever it is cut: whole calls or none, and no text. A stream has its beginning at most."""
    arguments = json.dumps({"a": 1, "b": "x" * 80})
    text = form.replace("{}", f'{{"name": "f", "arguments": {arguments}}}')
    for whole in (text, text + "\n" + text) if how else (text,):
        tokens = cut(whole, **how)
        asked: dict[str, Any] = {"how": how, "tools": TOOLS, "tool_choice": "required"}
        for most in range(len(tokens)):
            events = [*events_of(tokens, most=most, **asked)]
            reply = Transcript()
            for event in events:
                reply.add(event)
            shown = said(reply)
            assert (shown[0], shown[1], shown[3]) in [("", "", "length"), ("", "", "tool_calls")]
            assert {call[1] for call in shown[2]} <= {arguments}
            pieces = [event.text for event in events if isinstance(event, TextPiece | CallBroken)]
            assert not any(pieces)


def test_an_answer_with_a_grammar_has_no_thoughts_and_no_calls() -> None:
    text = '{"a": "<think> <tool_call>{}</tool_call>"}'
    whole = written(text + END, tools=TOOLS, grammar=Grammar.regex(".*"), in_thought=True)
    assert said(whole) == (text, "", [], "stop", None)


def test_schemas_have_bounds() -> None:
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"properties": {"a": deep}}
    patterns = {"patternProperties": {f"^{i}$": {} for i in range(101)}}
    for schema in (deep, patterns, {"description": "x" * 2**17}):
        with pytest.raises(RequestError, match="at most 131072, 100 and 100"):
            constraints.check_schema(schema)
    constraints.check_schema(STRICT)


def test_a_grammar_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client is blamed for processor time alone: on a busy machine it may ask again."""
    until = threading.Event()

    def work() -> None:
        while not until.is_set():
            sum(range(1000))

    monkeypatch.setattr(constraints, "COMPILE_SECONDS", 0.05)
    if sys.platform == "linux":
        with pytest.raises(RequestError, match=r"not compiled in 0.05 s of processor time"):
            constraints.within(work)
    monkeypatch.setattr(constraints, "LONGEST_WAIT", 0.2)
    with pytest.raises(ServerBusyError, match="Send the request again later"):
        constraints.within(until.wait)
    until.set()
    assert constraints.within(lambda: 1) == 1
    for error in (ZeroDivisionError, TimeoutError):

        def failing(error: type[Exception] = error) -> None:
            raise error

        with pytest.raises(error):
            constraints.within(failing)


def test_a_forced_call_makes_up_no_names_and_its_numbers_end() -> None:
    request = replace(ASKED, tools=TOOLS)
    assert follows(request, BARE, '{"name": "f", "arguments": {}}') is None
    assert follows(request, BARE, '{"name": "f", "arguments": {"a": 9007199254740991}}') is None
    begins = '{"name": "f", "arguments": {"'
    assert follows(request, BARE, begins + 'z": 1}}') == len(begins)
    begins += 'a": 9007199254740991'
    assert follows(request, BARE, begins + "0}}") == len(begins)
    for more in ({"additionalProperties": True}, {"allOf": [{"properties": {"z": {}}}]}):
        function = {"name": "f", "parameters": {**PARAMETERS, **more}}
        free = replace(ASKED, tools=[{"type": "function", "function": function}])
        assert follows(free, BARE, '{"name": "f", "arguments": {"z": 1}}') is None
