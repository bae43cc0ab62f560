"""OpenAI's chat completions: what a body becomes, and what events become."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Literal

import openai
import pytest
from openai import pydantic_function_tool
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from live import Script, openai_at
from selection import in_one_test
from specdec_mlx.server.pictures import take_pictures
from specdec_mlx.server.protocols.body import LONGEST_DRAFT, read_body
from specdec_mlx.server.protocols.chat import CHAT
from specdec_mlx.server.protocols.replies import LEAST_LOGPROB, LONGEST_ANSWER
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
from wires import chat_of, each_wrong, events_in

USER = {"role": "user", "content": "go"}
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "read", "parameters": PARAMETERS}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def request_of(**body: Any) -> TextRequest:
    """The one request of a body."""
    (request,) = CHAT.read({"messages": [USER], **body}).requests
    take_pictures(request, lambda request: False)
    return request


# What a body becomes


def test_messages_are_as_templates_take_them() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    call = {"id": "1", "type": "function", "function": {"name": "read", "arguments": "{broken"}}
    given = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "See "}, image], "name": None},
        {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [call]},
        {"role": "assistant", "reasoning_content": "So.", "content": "Yes."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "tool", "tool_call_id": "1", "content": "bad", "tool_calls": None},
    ]
    assert request_of(messages=given).messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "See [image_url: not shown to this model]"},
        {
            "role": "assistant",
            "content": "",
            "reasoning": "Hm.",
            "reasoning_content": "Hm.",
            "tool_calls": [call],
        },
        {
            "role": "assistant",
            "content": "Yes.",
            "reasoning": "So.",
            "reasoning_content": "So.",
        },
        {"role": "assistant", "content": "No."},
        {"role": "tool", "tool_call_id": "1", "content": "bad"},
    ]


NAMED = {"type": "function", "function": {"name": "read"}}


@in_one_test(
    ("choice", "expected"),
    [(None, "auto"), ("auto", "auto"), ("none", "none"), ("required", "required"), (NAMED, "read")],
)
def test_a_tool_may_be_chosen(choice: Any, expected: str) -> None:
    request = request_of(tools=[TOOL, {"type": "custom", "custom": {}}], tool_choice=choice)
    assert (request.tool_choice, request.tools) == (expected, [TOOL])


def test_a_tool_that_is_left_out_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert request_of(tools=[{"type": "custom", "custom": {"name": "f"}}]).tools == []
    assert "a tool of type custom" in caplog.text


def test_some_tools_may_be_allowed() -> None:
    other = {"type": "function", "function": {"name": "write"}}
    allowed = {"mode": "required", "tools": [NAMED]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    request = request_of(tools=[TOOL, other], tool_choice=choice)
    assert (request.tool_choice, request.tools) == ("required", [TOOL])


def test_all_fields_reach_the_engine() -> None:
    request = request_of(
        model="m",
        adapters="a",
        draft_model="d",
        tools=[TOOL],
        parallel_tool_calls=False,
        chat_template_kwargs={"x": 1, "continue_final_message": True},
        role_mapping={"user": "U: "},
        max_completion_tokens=7,
        max_tokens=9,
        stop=["a", "", "b"],
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        xtc_probability=0.2,
        xtc_threshold=0.3,
        repetition_penalty=1.2,
        repetition_context_size=5,
        presence_penalty=0,
        frequency_penalty=-0.5,
        logit_bias={"5": -1},
        seed=4,
        logprobs=True,
        top_logprobs=20,
        prediction={"type": "content", "content": [{"type": "text", "text": "like this"}]},
        drafter="ngram",
        num_draft_tokens=100,
        rule="match",
        user="u",
    )
    assert request == TextRequest(
        model="m",
        adapter="a",
        draft_model="d",
        messages=[USER],
        tools=[TOOL],
        parallel_calls=False,
        template={"x": 1, "role_mapping": {"user": "U: "}},
        continues=True,
        max_tokens=7,
        stop=["a", "b"],
        sampling={
            "temp": 0.5,
            "top_p": 0.9,
            "min_p": 0.1,
            "top_k": 3,
            "xtc_probability": 0.2,
            "xtc_threshold": 0.3,
        },
        penalties={
            "repetition_penalty": 1.2,
            "presence_penalty": 0.0,
            "frequency_penalty": -0.5,
            "repetition_context_size": 5,
            "logit_bias": {5: -1.0},
        },
        seed=4,
        num_logprobs=20,
        prediction="like this",
        drafters=["ngram"],
        num_draft_tokens=LONGEST_DRAFT,
        rule="match",
        user="u",
    )


@in_one_test(
    ("body", "field", "value"),
    [
        ({"seed": -1}, "seed", None),
        ({"max_tokens": -1}, "max_tokens", None),
        ({"num_draft_tokens": 3}, "num_draft_tokens", 3),
        ({"draft_length": "auto"}, "num_draft_tokens", "auto"),
        ({"logprobs": True}, "num_logprobs", 0),
        ({"logprobs": 3}, "num_logprobs", 3),
        ({"top_logprobs": -1}, "num_logprobs", None),
        ({"logprobs": False, "top_logprobs": 2}, "num_logprobs", 2),
        ({"reasoning_effort": "none"}, "template", {"enable_thinking": False}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            "template",
            {"enable_thinking": False, "reasoning_effort": "low"},
        ),
        ({"prediction": {"content": "x"}}, "prediction", "x"),
        ({"response_format": {"type": "text"}}, "grammar", None),
        ({"stop": "x"}, "stop", ["x"]),
    ],
)
def test_fields_that_are_said_in_several_ways(body: Any, field: str, value: Any) -> None:
    assert getattr(request_of(**body), field) == value


def test_each_choice_has_a_seed_of_its_own() -> None:
    asked = CHAT.read({"messages": [USER], "n": 3, "seed": 2**64 - 2})
    assert [request.seed for request in asked.requests] == [2**64 - 2, 2**64 - 1, 0]
    unseeded = CHAT.read({"messages": [USER], "n": 2}).requests
    assert [request.seed for request in unseeded] == [None, None]
    assert unseeded[0] is not unseeded[1]


def nested(levels: int) -> dict[str, Any]:
    return {"items": nested(levels - 1)} if levels else {}


def schema_of(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages: expected `array` of length >= 1, got []"),
    (
        {"messages": [{"content": "x"}]},
        "messages[0]: Object missing required field `role`",
    ),
    ({"messages": [{"role": "user", "content": 5}]}, "content must be"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [5]}]},
        ".tool_calls[0]: expected `object`, got 5",
    ),
    ({"tools": {}}, "tools: expected `array`, got {}"),
    ({"tools": [5]}, "tools[0]: expected `object`, got 5"),
    ({"tools": [{"type": "function", "function": {}}]}, "a function with a name"),
    ({"tool_choice": "required"}, "needs tools"),
    ({"tool_choice": NAMED}, "no tool 'read'"),
    (
        {"tools": [TOOL], "tool_choice": "sometimes"},
        "(auto|none|required)$', got 'some",
    ),
    ({"drafter": ["ngram"] * 9}, "drafter: expected `array` of length <= 8, got ['ngram'"),
    ({"draft_length": -1}, "num_draft_tokens: expected an int"),
    ({"draft_length": True}, "num_draft_tokens: expected an int"),
    ({"rule": "nothing"}, "Unknown rule"),
    ({"rule": "lenient:lenience=" + "(" * 300_000}, "lenience must be a number, true or fa"),
    ({"rule": 5}, "rule: expected `str`, got 5"),
    ({"temperature": float("nan")}, "a finite number"),
    ({"top_p": 2}, "top_p: expected `float` <= 1.0, got 2"),
    ({"top_k": -1}, "top_k: expected `int` >= 0, got -1"),
    ({"seed": 0.5}, "seed: expected `int`, got 0.5"),
    ({"n": 33}, "n: expected `int` <= 32, got 33"),
    ({"stop": ["x"] * 257}, "stop: expected `array` of length <= 256, got ['x'"),
    ({"stop": 5}, "stop: expected `str | array`, got 5"),
    ({"logprobs": "3"}, "logprobs: expected `bool | int`, got '3'"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: expected `int` <= 20, got 21"),
    ({"logit_bias": {"5": None}}, "logit_bias: expected `float`, got {'5': None}"),
    ({"logit_bias": {"x": 1}}, "logit_bias: expected `int`, got {'x': 1}"),
    ({"logit_bias": {"5": 1e300}}, "logit_bias: expected `float` <= 10000.0, got {'5': 1e+300}"),
    ({"presence_penalty": -1e300}, "presence_penalty: expected `float` >= -10000.0, got -1e+300"),
    (
        {"repetition_context_size": 2**32},
        "repetition_context_size: expected `int` <= 2147483647, got 4294967296",
    ),
    ({"max_tokens": 0}, "max_tokens: expected `int` >= 1, got 0"),
    ({"max_completion_tokens": "5"}, "max_completion_tokens: expected `int`, got '5'"),
    ({"model": 5}, "model: expected `str`, got 5"),
    ({"stream_options": []}, "stream_options: expected `object`, got []"),
    (
        {"prediction": {"content": [{"type": "image_url"}]}},
        "image_url: text must be",
    ),
    ({"response_format": {"type": "json_schema"}}, 'expected {"json_schema": {"schema": {.'),
    ({"response_format": schema_of(nested(150))}, "levels"),
    ({"response_format": schema_of({"const": "x" * 2**17})}, "characters"),
    (
        {"response_format": {"type": "xml"}},
        "response_format.type: expected `str` matching",
    ),
]


@in_one_test(("body", "words"), REFUSED)
def test_a_wrong_body_is_refused_in_words(body: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as refused:
        request_of(**body)
    assert words in str(refused.value)
    told = CHAT.error(refused.value, HTTPStatus.BAD_REQUEST)["error"]
    assert len(told["message"]) <= LONGEST_ANSWER
    assert told["type"] == "invalid_request_error"


def test_a_body_is_read_or_refused_whatever_stands_where() -> None:
    body = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}], "reasoning": "y"},
            {"role": "assistant", "content": "z", "tool_calls": [{**NAMED, "id": "1"}]},
        ],
        "tools": [TOOL],
        "tool_choice": NAMED,
        "response_format": schema_of(SCHEMA),
        "prediction": {"type": "content", "content": "x"},
        "logit_bias": {"5": 1.0},
        "chat_template_kwargs": {"x": 1},
        "stream_options": {"include_usage": True},
        **dict.fromkeys(("n", "seed", "max_tokens", "top_logprobs", "draft_length"), 1),
        **dict.fromkeys(("temperature", "top_p", "min_p", "presence_penalty"), 0.5),
        "stop": ["ngram"],
        "drafter": ["ngram"],
        **dict.fromkeys(("rule", "reasoning_effort"), "match"),
        **dict.fromkeys(("stream", "logprobs", "parallel_tool_calls"), True),
    }
    CHAT.read(body)
    assert each_wrong(CHAT, body) > 100


def test_a_code_and_an_error_of_the_servers_own_are_told() -> None:
    too_long = RequestError("Too long.", "context_length_exceeded", 9, 8)
    told = CHAT.error(too_long, HTTPStatus.BAD_REQUEST)
    assert told["error"]["code"] == "context_length_exceeded"
    own = CHAT.error(KeyError("x"), HTTPStatus.INTERNAL_SERVER_ERROR)["error"]
    assert (own["type"], own["message"]) == ("server_error", "KeyError: 'x'")


@in_one_test(
    ("raw", "body"),
    [
        (rb'{"a": "x\ud800", "b": ["\udc00\ud83d\ude00"]}', {"a": "x�", "b": ["�😀"]}),
        (rb'{"a": "\\ud800", "b": null}', {"a": "\\ud800"}),
    ],
)
def test_half_a_pair_of_surrogates_is_replaced(raw: bytes, body: Any) -> None:
    assert read_body(raw) == body


@in_one_test("raw", [b"", b"{", b"[]", b"5", b"\xff", b'{"a": ' + b"[" * 100_000])
def test_what_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(RequestError, match="The body of the request"):
        read_body(raw)


# What events become

ENDED = Ended("stop", num_prompt=10, num_cached=4, num_written=6, num_thought=2, accepted=3)
PLAIN: Sequence[Event] = [
    PromptProgress(10, 10, 4),
    TextPiece("Hm.", is_thought=True),
    TextPiece("Yes."),
    ENDED,
]


def streamed(events: Sequence[Event], **body: Any) -> list[dict[str, Any]]:
    """The chunks of events of one choice."""
    asked = CHAT.read({"messages": [USER], **body})
    stream = CHAT.reply(asked)
    raw = b"".join(stream.begin())
    raw += b"".join(part for event in events for part in [*stream.write(0, event)])
    raw += stream.keepalive() + b"".join(stream.end())
    assert raw.endswith(b"data: [DONE]\n\n")
    return events_in(raw)


def whole(*texts: Sequence[Event], **body: Any) -> dict[str, Any]:
    """The reply of events of each choice."""
    written = []
    for events in texts:
        written.append(Transcript())
        for event in events:
            written[-1].add(event)
    asked = CHAT.read({"messages": [USER], "n": len(texts), **body})
    reply = CHAT.reply(asked).build(written)
    ChatCompletion.model_validate(reply)
    return reply


def test_thoughts_have_both_names_and_text_is_text() -> None:
    message = whole(PLAIN)["choices"][0]["message"]
    thoughts = {"reasoning": "Hm.", "reasoning_content": "Hm."}
    assert message == {"role": "assistant", "content": "Yes.", **thoughts}
    deltas = chat_of(streamed(PLAIN))["deltas"]
    assert deltas == [{"role": "assistant", "content": ""}, thoughts, {"content": "Yes."}, {}]


def test_the_usage_counts_a_prompt_once_and_all_that_was_written() -> None:
    usage = whole(PLAIN, PLAIN)["usage"]
    assert usage["speculation"].pop("choices") == [{"drafter": "", "batched": False}] * 2
    assert usage == {
        "prompt_tokens": 10,
        "completion_tokens": 12,
        "total_tokens": 22,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {
            "reasoning_tokens": 4,
            "accepted_prediction_tokens": 6,
            "rejected_prediction_tokens": 0,
        },
        "speculation": {"drafter": "", "batched": False},
    }


def test_a_stream_has_its_usage_only_if_it_is_asked_for() -> None:
    *chunks, last = streamed(PLAIN, stream_options={"include_usage": True})
    assert (last["object"], last["choices"]) == ("chat.completion.chunk", [])
    assert last["usage"]["completion_tokens"] == 6
    for others in (streamed(PLAIN), streamed(PLAIN, stream_options={"include_usage": False})):
        assert [chunk["choices"] for chunk in others] == [chunk["choices"] for chunk in chunks]
        assert not any("usage" in chunk for chunk in others)
    assert chunks[-1]["speculation"] == {"drafter": "", "batched": False}


CALLS_ENDED = Ended("tool_calls")


def test_calls_are_sent_as_they_come() -> None:
    """A short one in one piece; the whole reply has each of them once."""
    events = [
        CallBegan(0, "id0", "read", '{"a": 1}'),
        CallBegan(1, "id1", "read", '{"path": '),
        CallArguments(1, '"x"'),
        CallArguments(1, "}"),
        CallBegan(2, "id2", "read"),
        CALLS_ENDED,
    ]
    deltas = chat_of(streamed(events, tools=[TOOL]))["deltas"]
    sent = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    function = {"name": "read", "arguments": '{"a": 1}'}
    assert sent[0] == {"index": 0, "id": "id0", "type": "function", "function": function}
    assert sent[1]["function"] == {"name": "read", "arguments": '{"path": '}
    assert sent[2:4] == [{"index": 1, "function": {"arguments": piece}} for piece in ('"x"', "}")]
    assert sent[4]["function"] == {"name": "read", "arguments": ""}
    choice = whole(events, tools=[TOOL])["choices"][0]
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == [
        '{"a": 1}',
        '{"path": "x"}',
        "",
    ]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")


def test_a_call_that_broke_is_text_and_a_stream_leaves_it_at_that() -> None:
    events = [CallBegan(0, "1", "read", '{"a": '), CallBroken(0, "<call>{"), Ended("length")]
    deltas = chat_of(streamed(events))["deltas"]
    assert [list(delta) for delta in deltas[1:]] == [["tool_calls"], []]
    assert whole(events)["choices"][0]["message"] == {"role": "assistant", "content": "<call>{"}


ENTRY = TokenLogprob(7, "é".encode()[:1], -0.5, [(7, b"\xc3", -0.5), (8, b"x", -float("inf"))])


def test_log_probabilities_are_in_openais_form_with_ids() -> None:
    events: list[Event] = [TextPiece("é", logprobs=[ENTRY]), TextPiece("", logprobs=[ENTRY]), ENDED]
    shown = {"id": 7, "token": "�", "logprob": -0.5, "bytes": [0xC3]}
    other = {"id": 8, "token": "x", "logprob": LEAST_LOGPROB, "bytes": [0x78]}
    entry = {**shown, "top_logprobs": [shown, other]}
    body = {"logprobs": True, "top_logprobs": 2}
    assert whole(events, **body)["choices"][0]["logprobs"]["content"] == [entry, entry]
    chunks = [chunk["choices"][0] for chunk in streamed(events, **body)]
    assert [c["logprobs"]["content"] for c in chunks if "logprobs" in c] == [[entry], [entry]]
    assert whole(PLAIN)["choices"][0]["logprobs"] is None


def test_an_error_ends_a_stream() -> None:
    stream = CHAT.reply(CHAT.read({"messages": [USER]}))
    told = b"".join(stream.fail(KeyError("x"), HTTPStatus.INTERNAL_SERVER_ERROR))
    (event,) = events_in(told)
    assert event["error"]["message"] == "KeyError: 'x'"
    assert told.endswith(b"data: [DONE]\n\n")


# OpenAI's own client


class Read(BaseModel):
    """Read a file."""

    path: str


class Answer(BaseModel):
    yes: bool


@pytest.fixture
def client(script: Script, url: str) -> openai.OpenAI:
    script.texts, script.requests = [], []
    return openai_at(url)


def ask(client: openai.OpenAI, stream: bool, **body: Any) -> Any:
    """A completion, whole or of a stream, as the client's own reader makes it."""
    asked: dict[str, Any] = {"model": "gpt-4o-mini", "messages": [USER], "max_tokens": 99} | body
    if not stream:
        return client.chat.completions.parse(**asked)
    with client.chat.completions.stream(**asked) as events:
        for _ in events:
            pass
        return events.get_final_completion()


CALLING = 'Hm.</think>Reading.<tool_call>{"name": "Read", "arguments": {"path": "a"}}</tool_call>'
THINKING = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}


def test_the_client_runs_tools_until_the_model_is_done(
    client: openai.OpenAI, script: Script
) -> None:
    """Whole and streamed, with thoughts that go back to the model."""
    for stream in False, True:
        script.texts = [CALLING, "</think>All read."]
        script.requests = []
        messages: list[Any] = [USER]
        for _ in range(2):
            tools = [pydantic_function_tool(Read)]
            reply = ask(client, stream, messages=messages, tools=tools, **THINKING)
            message = reply.choices[0].message
            messages.append(message.to_dict())
            for call in message.tool_calls or []:
                assert call.function.parsed_arguments == Read(path="a")
                result = {"role": "tool", "tool_call_id": call.id, "content": "contents"}
                messages.append(result)
        assert (reply.choices[0].finish_reason, message.content) == ("stop", "All read.")
        _, said, result = script.requests[1].messages
        assert (said["content"], said["reasoning_content"]) == ("Reading.", "Hm.")
        assert (said["tool_calls"][0]["function"]["name"], result["role"]) == ("Read", "tool")
        if not stream:
            assert reply.usage.prompt_tokens_details.cached_tokens > 0


def test_the_client_parses_an_answer(client: openai.OpenAI) -> None:
    for stream in False, True:
        reply = ask(client, stream, response_format=Answer)
        assert isinstance(reply.choices[0].message.parsed, Answer)


class Pick(BaseModel):
    which: Literal["a", "b"]


def test_a_tool_that_is_required_is_called(client: openai.OpenAI) -> None:
    choices: list[Any] = ["required", {"type": "function", "function": {"name": "Pick"}}]
    for choice in choices:
        tools = [pydantic_function_tool(Pick)]
        reply = ask(client, False, tools=tools, tool_choice=choice, parallel_tool_calls=False)
        (call,) = reply.choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, Pick)


def test_a_stream_says_what_a_whole_reply_says(client: openai.OpenAI) -> None:
    """Log-probabilities, sorted, and choices with their indexes among it."""
    asked: dict[str, Any] = {"model": "m", "messages": [USER], "max_tokens": 8, "n": 2}
    asked |= {"temperature": 1.0, "seed": 5, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**asked).choices
    chunks = [*client.chat.completions.create(stream=True, **asked)]
    parts = [chunk.choices[0] for chunk in chunks]
    for choice in whole:
        own = [part for part in parts if part.index == choice.index]
        assert "".join(part.delta.content or "" for part in own) == choice.message.content
        assert own[-1].finish_reason == choice.finish_reason == "length"
        entries = choice.logprobs.content
        assert [
            entry for part in own if part.logprobs for entry in part.logprobs.content
        ] == entries
        assert len(entries) == 8
        for entry in entries:
            values = [top.logprob for top in entry.top_logprobs]
            assert values == sorted(values, reverse=True)
    assert whole[0].message.content != whole[1].message.content


def test_a_prompt_that_does_not_fit_has_openais_code(client: openai.OpenAI) -> None:
    words = [{"role": "user", "content": "a b " * 2**16}]
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, False, messages=words)
    assert refused.value.code == "context_length_exceeded"
    stopped = ask(client, False, max_tokens=2**40, stop=list("abcdefgh")).choices[0]
    assert stopped.finish_reason == "stop"
