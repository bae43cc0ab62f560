"""Anthropic's protocol: what a body asks of the engine, and what is made of the engine's events."""

from __future__ import annotations

import json
import logging
from http import HTTPStatus
from typing import Any

import pytest
from anthropic.types import Message

from specdec_mlx.server.pictures import take_pictures
from specdec_mlx.server.protocols.messages import MESSAGES
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
    Transcript,
)
from wires import each_wrong, events_in, message_of

USER: list[Any] = [{"role": "user", "content": "hello"}]
READ: dict[str, Any] = {"name": "read", "description": "Read.", "input_schema": {"type": "object"}}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


def read(messages: Any = USER, **more: Any) -> TextRequest:
    (request,) = MESSAGES.read(
        {"model": "m", "max_tokens": 9, "messages": messages, **more}
    ).requests
    take_pictures(request, lambda request: False)
    return request


def both(*events: Event, **body: Any) -> list[dict[str, Any]]:
    """The message that these events make, whole and streamed."""
    asked = MESSAGES.read({"model": "m", "max_tokens": 9, "messages": USER, **body})
    written, stream = Transcript(), MESSAGES.reply(asked)
    raw = b"".join(stream.begin()) + stream.keepalive()
    for event in events:
        written.add(event)
        raw += b"".join(stream.write(0, event))
    raw += b"".join(stream.end())
    whole = MESSAGES.reply(asked).build([written])
    Message.model_validate(whole)
    return [whole, message_of(events_in(raw))]


def test_neighbours_of_one_role_become_one_turn_and_the_billing_block_is_dropped() -> None:
    system = [{"type": "text", "text": f"x-anthropic-billing-header: {n}"} for n in "ab"]
    system.insert(1, {"type": "text", "text": "Be brief."})
    later = {"role": "system", "content": [{"type": "text", "text": "Today is Monday."}]}
    assert read([*USER, later], system=system).messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello\n\nToday is Monday."},
    ]
    assert read([later, *USER], system="Be brief.").messages[1] == {
        "role": "user",
        "content": "Today is Monday.\n\nhello",
    }


RESULTS: dict[str, tuple[Any, str]] = {
    "text": ("done", "done"),
    "null": (None, ""),
    "image": ([{"type": "text", "text": "see"}, PNG], "see\n\n[image: not shown to this model]"),
    "plain document": (
        [{"type": "document", "title": "T", "source": {"type": "text", "data": "words"}}],
        "T\nwords",
    ),
    "document of blocks": (
        [{"type": "document", "source": {"type": "content", "content": "words"}}],
        "words",
    ),
    "pdf": (
        [{"type": "document", "title": "T", "source": {"type": "base64", "data": "AA=="}}],
        "[document T: not shown to this model]",
    ),
    "search_result": (
        [
            {
                "type": "search_result",
                "title": "T",
                "source": "S",
                "content": [{"type": "text", "text": "F"}],
            }
        ],
        "T\nS\nF",
    ),
    "tool_reference": (
        [{"type": "tool_reference", "tool_name": "edit"}],
        "The tool edit can be called now.",
    ),
    "a block of next year": ([{"type": "hologram"}], "[hologram: not shown to this model]"),
}


@pytest.mark.parametrize(("content", "text"), RESULTS.values(), ids=RESULTS)
def test_a_result_is_text_whatever_it_holds(content: Any, text: str) -> None:
    calls: list[Any] = [{"type": "thinking", "thinking": "Read it.", "signature": "x"}]
    calls += [{"type": "tool_use", "id": "1", "name": "read", "input": {"path": "a"}}]
    result = {"type": "tool_result", "tool_use_id": "1", "content": content}
    failed = result | {"is_error": True}
    more = {"type": "text", "text": "go on"}
    history = [*USER, {"role": "assistant", "content": calls}]
    history += [{"role": "user", "content": [result, failed, more]}]
    assert read(history).messages[1:] == [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Read it.",
            "reasoning": "Read it.",
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "function": {"name": "read", "arguments": {"path": "a"}},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "1", "name": "read", "content": text},
        {"role": "tool", "tool_call_id": "1", "name": "read", "content": f"Error: {text}"},
        {"role": "user", "content": "go on"},
    ]


def test_tools_that_the_client_runs_are_offered(caplog: pytest.LogCaptureFixture) -> None:
    """Anthropic's own by their published schemas; those that its servers run are left out."""
    caplog.set_level(logging.INFO)
    tools = [READ | {"defer_loading": True, "cache_control": {"type": "ephemeral"}}]
    tools += [{"type": "custom", "name": "plain"}, {"type": "bash_20250124", "name": "bash"}]
    tools += [{"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}]
    tools += [{"type": "memory_20250818", "name": "memory"}]
    tools += [{"type": "web_search_20250305", "name": "web_search"}, {"type": "mcp_toolset"}]
    offered = {tool["function"]["name"]: tool["function"] for tool in read(tools=tools).tools}
    assert [*offered] == ["read", "plain", "bash", "str_replace_based_edit_tool", "memory"]
    assert offered["read"]["parameters"] == {"type": "object"}
    assert {"command", "restart"} == {*offered["bash"]["parameters"]["properties"]}
    editor = offered["str_replace_based_edit_tool"]["parameters"]["properties"]
    assert {"command", "path", "old_str", "new_str", "insert_line", "view_range"} <= {*editor}
    assert "rename" not in editor["command"]["enum"]
    assert "rename" in offered["memory"]["parameters"]["properties"]["command"]["enum"]
    assert [record.args[1] for record in caplog.records] == ["web_search_20250305", "mcp_toolset"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", True)),
        ({"type": "auto"}, ("auto", True)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", False)),
        ({"type": "none"}, ("none", True)),
        ({"type": "tool", "name": "read"}, ("read", True)),
    ],
)
def test_a_tool_may_be_chosen(choice: Any, expected: tuple[str, bool]) -> None:
    request = read(tools=[READ], tool_choice=choice)
    assert (request.tool_choice, request.parallel_calls) == expected


def test_all_other_fields_reach_the_engine() -> None:
    request = read(
        max_tokens=128000,
        stop_sequences=["END"],
        metadata={"user_id": "me"},
        thinking={"type": "adaptive", "display": "omitted"},
        context_management={"edits": []},
        output_config={"effort": "low"},
        some_field_of_next_year=[1],
    )
    assert (request.model, request.max_tokens, request.user) == ("m", 128000, "me")
    assert [*request.stop] == ["END"]
    assert request.template == {"enable_thinking": True}
    assert read(thinking={"type": "disabled"}).template == {"enable_thinking": False}
    assert read().template == {}
    own = {"chat_template_kwargs": {"enable_thinking": False}}
    assert read(thinking={"type": "enabled", "budget_tokens": 2000}, **own).template == {
        "enable_thinking": False
    }
    assert MESSAGES.read({"messages": USER}).requests[0].max_tokens is None  # tokens are counted


@pytest.mark.parametrize(
    "forced",
    [
        {"tool_choice": {"type": "any"}, "tools": [READ]},
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
    ],
)
def test_a_text_that_is_forced_may_be_thought_about(forced: dict[str, Any]) -> None:
    asked = read(thinking={"type": "adaptive"}, **forced)
    assert asked.template == {"enable_thinking": True}
    assert read(**forced).template == {}


def test_the_answer_keeps_to_a_format() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "schema": schema}
    for where in {"output_config": {"format": wanted}}, {"output_format": wanted}:
        assert json.loads(read(**where).grammar.text) == schema


def test_a_last_message_of_the_assistant_is_continued() -> None:
    request = read([*USER, {"role": "assistant", "content": "I am"}])
    assert request.continues
    assert request.messages[-1] == {"role": "assistant", "content": "I am"}
    assert not read().continues


WRONG: list[dict[str, Any]] = [
    {"messages": []},
    {"messages": "hello"},
    {"messages": [1]},
    {"messages": [{"role": "robot", "content": "x"}]},
    {"messages": [{"role": "user", "content": 1}]},
    {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
    {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": {}}]}]},
    {
        "messages": [
            {"role": "assistant", "content": [{"type": "tool_use", "name": "a", "input": 1}]}
        ]
    },
    {"system": 1},
    {"max_tokens": "9"},
    {"max_tokens": 0},
    {"stop_sequences": [1]},
    {"stop_sequences": ["x"] * 257},
    {"metadata": "me"},
    {"thinking": True},
    {"tools": {"name": "a"}},
    {"tools": [{"type": "custom"}]},
    {"tools": [{"name": "a", "input_schema": []}]},
    {"tool_choice": "auto"},
    {"tool_choice": {"type": "tool", "name": "write"}},
    {"output_config": {"format": "json"}},
    {"output_config": {"format": {"type": "json_schema"}}},
]


@pytest.mark.parametrize("wrong", WRONG, ids=[json.dumps(wrong)[:99] for wrong in WRONG])
def test_a_wrong_body_is_refused_in_words(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        read(wrong.pop("messages", USER), **wrong)


def test_a_body_is_read_or_refused_whatever_stands_where() -> None:
    """Every value of a body, replaced by each of a dozen others."""
    result = {"type": "tool_result", "tool_use_id": "1", "content": [PNG]}
    use = {"type": "tool_use", "id": "1", "name": "read", "input": {"path": "a"}}
    turns = [{"role": "assistant", "content": [use]}]
    turns += [{"role": "user", "content": [result, {"type": "text", "text": "go on"}]}]
    body = {
        "model": "m",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [*USER, *turns],
        "tools": [READ, {"type": "bash_20250124", "name": "bash"}],
        "tool_choice": {"type": "tool", "name": "read"},
        "thinking": {"type": "enabled"},
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        "metadata": {"user_id": "me"},
        "stop_sequences": ["END"],
        "stream": True,
    }
    assert each_wrong(MESSAGES, body) > 100


def test_a_text_with_thoughts_and_calls() -> None:
    """Blocks in the order of their events; counts of what was read, found and written."""
    events = [
        PromptProgress(0, 30, 20),
        TextPiece("Let me ", is_thought=True),
        TextPiece("think.", is_thought=True),
        PromptProgress(30, 30, 20),
        TextPiece("I read "),
        TextPiece(""),
        TextPiece("two."),
        CallBegan(0, "call_0", "read"),
        CallArguments(0, '{"path": '),
        CallArguments(0, '"a"}'),
        CallBegan(1, "call_1", "list"),
        CallArguments(1, "{}"),
        Ended(
            "tool_calls", num_prompt=30, num_cached=20, num_written=12, num_thought=5, drafter="mtp"
        ),
    ]
    for message in both(*events):
        thoughts, text, *calls = message["content"]
        assert (thoughts["type"], thoughts["thinking"]) == ("thinking", "Let me think.")
        assert thoughts["signature"]  # clients send back only what is signed
        assert text == {"type": "text", "text": "I read two."}
        assert calls == [
            {"type": "tool_use", "id": "call_0", "name": "read", "input": {"path": "a"}},
            {"type": "tool_use", "id": "call_1", "name": "list", "input": {}},
        ]
        assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
        usage = message["usage"]
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (10, 20)
        assert usage["output_tokens"] == 12
        assert usage["output_tokens_details"] == {"thinking_tokens": 5}
        assert usage["speculation"]["drafter"] == "mtp"


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        (Ended("stop"), ("end_turn", None)),
        (Ended("length"), ("max_tokens", None)),
        (Ended("stop", stop="END"), ("stop_sequence", "END")),
        (Ended("tool_calls"), ("tool_use", None)),
    ],
)
def test_the_reason_is_what_really_stopped_the_text(ended: Ended, expected: Any) -> None:
    for message in both(TextPiece("x"), ended):
        assert (message["stop_reason"], message["stop_sequence"]) == expected


def test_a_call_that_is_cut_is_text_and_a_stream_leaves_it_at_that() -> None:
    cut = '<tool_call>{"name": "read", "arguments": {"pa'
    events = CallBegan(0, "1", "read"), CallArguments(0, '{"pa'), CallBroken(0, cut)
    whole, streamed = both(*events, Ended("length"))
    assert whole["content"] == [{"type": "text", "text": cut}]
    assert [block["type"] for block in streamed["content"]] == ["tool_use"]
    assert whole["stop_reason"] == streamed["stop_reason"] == "max_tokens"


def test_a_stream_begins_with_the_counts_of_the_prompt() -> None:
    stream = MESSAGES.reply(MESSAGES.read({"messages": USER}))
    assert b"".join(stream.begin()) == b""
    (started,) = events_in(b"".join(stream.write(0, PromptProgress(0, 30, 20))))
    assert started["message"]["usage"]["input_tokens"] == 10
    assert started["message"]["usage"]["cache_read_input_tokens"] == 20
    assert b"".join(stream.write(0, PromptProgress(30, 30, 20))) == b""


def test_errors_are_in_the_protocols_form() -> None:
    too_long = RequestError("The prompt does not fit.", "context_length_exceeded", 300, 200)
    bad = MESSAGES.error(too_long, HTTPStatus.BAD_REQUEST)
    assert (bad["type"], bad["error"]["type"]) == ("error", "invalid_request_error")
    assert bad["error"]["message"] == "prompt is too long: 300 tokens > 200 maximum"
    with pytest.raises(RequestError, match="nothing is kept here") as caught:
        read(thread={"type": "create"})
    details = MESSAGES.error(caught.value, HTTPStatus.BAD_REQUEST)["error"]["details"]
    assert details == {"error_code": "thread_unsupported_request"}
    busy = MESSAGES.error(RuntimeError("x"), HTTPStatus.SERVICE_UNAVAILABLE)
    assert busy["error"]["type"] == "overloaded_error"
    stream = MESSAGES.reply(MESSAGES.read({"messages": USER}))
    (event,) = events_in(b"".join(stream.fail(RuntimeError("x"), HTTPStatus.INTERNAL_SERVER_ERROR)))
    assert event["type"] == "error"
    assert event["error"]["type"] == "api_error"
