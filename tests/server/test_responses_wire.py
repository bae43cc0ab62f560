"""OpenAI's Responses: what a body asks of the engine, and what is made of the engine's events."""

from __future__ import annotations

import json
import logging
from base64 import b64decode
from http import HTTPStatus
from typing import Any

import pytest
from openai.types.responses import Response

from specdec_mlx.server.pictures import take_pictures
from specdec_mlx.server.protocols.responses import RESPONSES
from specdec_mlx.server.requests import (
    CallArguments,
    CallBegan,
    CallBroken,
    Ended,
    Event,
    PromptProgress,
    RequestError,
    TextPiece,
    TextRequest,
    TokenLogprob,
    Transcript,
)
from wires import each_wrong, events_in, response_of

READ = {
    "type": "function",
    "name": "read",
    "description": "Read.",
    "parameters": {"type": "object"},
}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Change a file.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
SPACE = {
    "type": "namespace",
    "name": "agents",
    "description": "Helpers.",
    "tools": [READ | {"name": "ask"}],
}


def read(given: Any = "hello", **more: Any) -> TextRequest:
    (request,) = RESPONSES.read({"model": "m", "input": given, **more}).requests
    take_pictures(request, lambda request: False)
    return request


def both(*events: Event, **body: Any) -> list[dict[str, Any]]:
    """The response that these events make, whole and streamed."""
    asked = RESPONSES.read({"model": "m", "input": "hello", **body})
    written, stream = Transcript(), RESPONSES.reply(asked)
    raw = b"".join(stream.begin()) + stream.keepalive()
    for event in events:
        written.add(event)
        raw += b"".join(stream.write(0, event))
    raw += b"".join(stream.end())
    whole = RESPONSES.reply(asked).build([written])
    Response.model_validate(whole)
    return [whole, response_of(events_in(raw))]


def said(role: str, *texts: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": t} for t in texts]}


def test_items_become_a_chat() -> None:
    """One system message, neighbours of one role joined, calls with their thoughts and results."""
    items = [
        said("developer", "Use tools."),
        said("user", "Here is", "a folder."),
        {"type": None, "role": "user", "content": "Read a."},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
        said("assistant", "I read it.", kind="output_text"),
        {"type": "function_call", "call_id": "1", "name": "read", "arguments": '{"path": "a"}'},
        {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "*** a"},
        {"type": "function_call_output", "call_id": "1", "output": "words"},
        {
            "type": "custom_tool_call_output",
            "call_id": "2",
            "output": [
                {"type": "input_text", "text": "see"},
                {"type": "input_image", "image_url": "x"},
            ],
        },
        said("developer", "Now stop."),
    ]
    called = [
        {"id": "1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}},
        {
            "id": "2",
            "type": "function",
            "function": {"name": "patch", "arguments": {"input": "*** a"}},
        },
    ]
    assert read(items, instructions="Be brief.").messages == [
        {"role": "system", "content": "Be brief.\n\nUse tools."},
        {"role": "user", "content": "Here is\n\na folder.\n\nRead a."},
        {
            "role": "assistant",
            "content": "I read it.",
            "reasoning_content": "Hm.",
            "reasoning": "Hm.",
            "tool_calls": called,
        },
        {"role": "tool", "tool_call_id": "1", "name": "read", "content": "words"},
        {
            "role": "tool",
            "tool_call_id": "2",
            "name": "patch",
            "content": "see\n\n[input_image: not shown to this model]",
        },
        {"role": "user", "content": "Now stop."},
    ]


def test_tools_that_the_client_runs_are_offered(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    others = [{"type": "web_search"}, {"type": "local_shell"}, READ]
    request = read(tools=[READ, PATCH, SPACE, *others])
    offered = {tool["function"]["name"]: tool["function"] for tool in request.tools}
    assert [*offered] == ["read", "patch", "ask"]
    assert offered["patch"]["parameters"]["required"] == ["input"]
    assert "start: /.+/" in offered["patch"]["description"]
    assert [record.args[1] for record in caplog.records] == [
        "web_search",
        "local_shell",
        "function",
    ]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", ["read", "patch"])),
        ("none", ("none", ["read", "patch"])),
        ("required", ("required", ["read", "patch"])),
        ({"type": "function", "name": "read"}, ("read", ["read", "patch"])),
        ({"type": "custom", "name": "patch"}, ("patch", ["read", "patch"])),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [READ]},
            ("required", ["read"]),
        ),
    ],
)
def test_a_tool_may_be_chosen(choice: Any, expected: Any) -> None:
    request = read(tools=[READ, PATCH], tool_choice=choice)
    names = [tool["function"]["name"] for tool in request.tools]
    assert (request.tool_choice, names) == expected


def test_tools_that_come_with_the_input_are_offered() -> None:
    """As Codex sends those of a model that it knows, in a namespace; what is called is in it."""
    space = {"type": "namespace", "name": "functions", "tools": [PATCH, READ]}
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [space]},
        {"role": "user", "content": "hello"},
    ]
    assert [tool["function"]["name"] for tool in read(items).tools] == ["patch", "read"]
    assert read(items).messages == [{"role": "user", "content": "hello"}]
    called = CallBegan(0, "call_0", "patch"), CallArguments(0, '{"input": "a"}')
    for response in both(*called, Ended("tool_calls", num_written=2), input=items):
        (call,) = response["output"]
        expected = "custom_tool_call", "functions", "a"
        assert (call["type"], call["namespace"], call["input"]) == expected


def test_all_other_fields_reach_the_engine() -> None:
    request = read(
        max_output_tokens=50,
        temperature=0.5,
        top_p=0.9,
        parallel_tool_calls=False,
        reasoning={"effort": "none", "summary": "auto"},
        include=["message.output_text.logprobs"],
        top_logprobs=3,
        store=True,
        truncation="auto",
        prompt_cache_key="x",
        client_metadata={"turn": "1"},
        some_field_of_next_year=[1],
    )
    assert (request.model, request.max_tokens, request.num_logprobs) == ("m", 50, 3)
    assert request.sampling == {"temp": 0.5, "top_p": 0.9}
    assert not request.parallel_calls
    assert request.template == {"enable_thinking": False}
    forced = read(reasoning={"effort": "low"}, tools=[READ], tool_choice="required")
    assert forced.template == {"enable_thinking": True, "reasoning_effort": "low"}
    plain = read()
    assert (plain.max_tokens, plain.num_logprobs, plain.template) == (None, None, {})
    assert plain.parallel_calls


def test_the_answer_keeps_to_a_format() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "name": "A", "strict": True, "schema": schema}
    assert json.loads(read(text={"format": wanted, "verbosity": "low"}).grammar.text) == schema
    anything = read(text={"format": {"type": "json_object"}}).grammar
    assert json.loads(anything.text) == {"type": "object"}
    assert read(text={"format": {"type": "text"}}).grammar is None


def test_thoughts_that_are_referred_to_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """As the AI SDK does unless store is false: what else it refers to cannot be done without."""
    caplog.set_level("INFO")
    thought = {"type": "item_reference", "id": "rs_1"}
    request = read(
        input=[{"role": "user", "content": "a"}, thought, {"role": "user", "content": "b"}]
    )
    assert request.messages == [{"role": "user", "content": "a\n\nb"}]
    assert "Left out: a reference of type reasoning" in caplog.text
    with pytest.raises(RequestError, match="Set store to false"):
        read(input=[{"type": "item_reference", "id": "msg_1"}])


KEPT: list[dict[str, Any]] = [
    {"previous_response_id": "resp_1"},
    {"conversation": "conv_1"},
    {"prompt": {"id": "pmpt_1"}},
    {"background": True},
    {"input": [{"type": "item_reference", "id": "msg_1"}]},
    {"input": [{"type": "item_reference", "id": "fc_1"}]},
    {"input": [{"type": "item_reference"}]},
]
WRONG: list[dict[str, Any]] = [
    {"input": []},
    {"input": None},
    {"input": [1]},
    {"input": [{"role": "robot", "content": "x"}]},
    {"input": [{"role": "user", "content": 1}]},
    {"input": [{"type": "function_call", "call_id": "1", "name": "a"}]},
    {"instructions": 1},
    {"max_output_tokens": "9"},
    {"max_output_tokens": 0},
    {"tools": [{"type": "function"}]},
    {"tools": [{"type": "function", "name": "a", "parameters": []}]},
    {"tool_choice": "any"},
    {"tool_choice": {"type": "function", "name": "write"}},
    {"tool_choice": {"type": "file_search"}},
    {"text": {"format": {"type": "json_schema"}}},
    {"text": {"format": {"type": "xml"}}},
    {"top_logprobs": 21},
]


@pytest.mark.parametrize("wrong", KEPT + WRONG, ids=map(json.dumps, KEPT + WRONG))
def test_a_wrong_body_is_refused_in_words(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="nothing is kept here" if wrong in KEPT else None):
        read(wrong.pop("input", "hello"), **wrong)


def test_a_body_is_read_or_refused_whatever_stands_where() -> None:
    """Every value of a body, replaced by each of a dozen others."""
    call = {"type": "function_call", "call_id": "1", "name": "read", "arguments": "{}"}
    body = {
        "model": "m",
        "instructions": "Be brief.",
        "input": [
            said("user", "x"),
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
            call,
            {"type": "function_call_output", "call_id": "1", "output": "words"},
        ],
        "tools": [READ, PATCH, SPACE],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [READ]},
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        "include": ["reasoning.encrypted_content"],
        "max_output_tokens": 9,
        "stream": True,
    }
    assert each_wrong(RESPONSES, body) > 100


def test_a_text_with_thoughts_and_calls() -> None:
    """Items in the order of their events; counts of what was read, found and written."""
    events = [
        PromptProgress(0, 30, 20),
        TextPiece("Let me ", is_thought=True),
        TextPiece("think.", is_thought=True),
        TextPiece("I read "),
        TextPiece(""),
        TextPiece("two."),
        CallBegan(0, "call_0", "read"),
        CallArguments(0, '{"path": '),
        CallArguments(0, '"a"}'),
        CallBegan(1, "call_1", "patch"),
        CallArguments(1, '{"input": "*** '),
        CallArguments(1, 'a\\n"}'),
        CallBegan(2, "call_2", "ask"),
        CallArguments(2, "{}"),
        Ended("tool_calls", num_prompt=30, num_cached=20, num_written=12, num_thought=5),
    ]
    body = {"tools": [READ, PATCH, SPACE], "include": ["reasoning.encrypted_content"]}
    for response in both(*events, **body):
        thoughts, message, *calls = response["output"]
        assert thoughts["summary"] == [{"type": "summary_text", "text": "Let me think."}]
        assert b64decode(thoughts["encrypted_content"]) == b"Let me think."
        assert message["content"][0]["text"] == "I read two."
        names = "type", "call_id", "name", "arguments", "input", "namespace"
        assert [[call.get(name) for name in names] for call in calls] == [
            ["function_call", "call_0", "read", '{"path": "a"}', None, None],
            ["custom_tool_call", "call_1", "patch", None, "*** a\n", None],
            ["function_call", "call_2", "ask", "{}", None, "agents"],
        ]
        assert {item.get("status", "completed") for item in response["output"]} == {"completed"}
        assert (response["status"], response["incomplete_details"]) == ("completed", None)
        usage = response["usage"]
        assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (
            30,
            12,
            42,
        )
        assert usage["input_tokens_details"]["cached_tokens"] == 20
        assert usage["output_tokens_details"]["reasoning_tokens"] == 5
        assert "speculation" in usage
        assert response["tools"] == body["tools"]
        assert (response["store"], response["previous_response_id"]) == (False, None)


def test_a_text_that_is_cut_is_incomplete() -> None:
    for response in both(TextPiece("x"), Ended("length", num_prompt=3, num_written=1)):
        assert response["status"] == response["output"][0]["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}


def test_a_call_that_is_cut_is_text_and_a_stream_leaves_it_at_that() -> None:
    cut = '<tool_call>{"name": "read", "arguments": {"pa'
    events = CallBegan(0, "1", "read"), CallArguments(0, '{"pa'), CallBroken(0, cut)
    whole, streamed = both(*events, Ended("length", num_prompt=3))
    assert whole["output"][0]["content"][0]["text"] == cut
    (call,) = streamed["output"]
    assert (call["arguments"], call["status"]) == ('{"pa', "incomplete")


def test_log_probabilities_stand_beside_the_text() -> None:
    tokens = [TokenLogprob(7, b"a", -0.5, [(7, b"a", -0.5), (8, b"b", -1.5)])]
    tokens += [TokenLogprob(9, "é".encode()[:1], -0.25)]
    events = [TextPiece("a", logprobs=tokens[:1]), TextPiece("é", logprobs=tokens[1:])]
    include = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    for response in both(*events, Ended("stop", num_prompt=3, num_written=2), **include):
        first, second = response["output"][0]["content"][0]["logprobs"]
        assert (first["token"], first["bytes"], first["logprob"]) == ("a", [97], -0.5)
        assert [top["logprob"] for top in first["top_logprobs"]] == [-0.5, -1.5]
        assert second["bytes"] == [0xC3]


def test_errors_are_in_the_protocols_form() -> None:
    """A failed response names the reason for which clients make a prompt shorter."""
    too_long = RequestError("It does not fit.", "context_length_exceeded", 300, 200)
    bad = RESPONSES.error(too_long, HTTPStatus.BAD_REQUEST)["error"]
    assert (bad["message"], bad["code"]) == ("It does not fit.", "context_length_exceeded")
    for error, code in (too_long, "context_length_exceeded"), (RuntimeError("x"), "server_error"):
        stream = RESPONSES.reply(RESPONSES.read({"input": "hello"}))
        raw = b"".join([*stream.begin(), *stream.write(0, TextPiece("x"))])
        raw += b"".join(stream.fail(error, HTTPStatus.INTERNAL_SERVER_ERROR))
        response = response_of(events_in(raw))
        assert (response["status"], response["error"]["code"]) == ("failed", code)
