"""All protocols: the same oddities of clients get the same answers."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

import pytest

from specdec_mlx.server.pictures import take_pictures
from specdec_mlx.server.protocols.body import read_body
from specdec_mlx.server.protocols.chat import CHAT
from specdec_mlx.server.protocols.completions import COMPLETIONS
from specdec_mlx.server.protocols.messages import MESSAGES
from specdec_mlx.server.protocols.replies import Wire
from specdec_mlx.server.protocols.responses import RESPONSES
from specdec_mlx.server.requests import (
    CallArguments,
    CallBegan,
    CallBroken,
    Ended,
    Event,
    RequestError,
    TextPiece,
    TextRequest,
    Transcript,
)
from wires import events_in, message_of, response_of

PNG = "iVBORw0KGgo"
URL = f"data:image/png;base64,{PNG}"
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
SEEN = {"type": "text", "text": "see"}
IMAGES: list[tuple[str, Wire, dict[str, Any]]] = [
    (
        "image_url",
        CHAT,
        {
            "messages": [
                {
                    "role": role,
                    "tool_call_id": "1",
                    "content": [SEEN, {"type": "image_url", "image_url": {"url": URL}}],
                }
                for role in ("user", "tool")
            ]
        },
    ),
    (
        "image",
        MESSAGES,
        {
            "messages": [
                {"role": "user", "content": [SEEN, IMAGE]},
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "1", "content": [SEEN, IMAGE]}
                    ],
                },
            ]
        },
    ),
    (
        "input_image",
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": [SEEN, {"type": "input_image", "image_url": URL}]},
                {
                    "type": "function_call_output",
                    "call_id": "1",
                    "output": [SEEN, {"type": "input_image", "image_url": URL}],
                },
            ]
        },
    ),
]


def read(wire: Wire, body: dict[str, Any]) -> TextRequest:
    (request,) = wire.read(body).requests
    take_pictures(request, lambda request: False)
    return request


@pytest.mark.parametrize(("kind", "wire", "body"), IMAGES, ids=[kind for kind, _, _ in IMAGES])
def test_an_image_becomes_a_text_that_names_it_and_a_line_in_the_log(
    kind: str, wire: Wire, body: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """In what a user says, and in what a tool gives back."""
    caplog.set_level("INFO")
    messages = read(wire, body).messages
    assert messages is not None
    assert [message["role"] for message in messages] == ["user", "tool"]
    for message in messages:
        assert f"[{kind}: not shown to this model]" in message["content"]
        assert "see" in message["content"]
    assert PNG not in json.dumps(messages)
    assert caplog.text.count(f"Not shown: a part of type {kind}.") == 2


RESULTS: list[tuple[Any, str]] = [
    ("a text", "a text"),
    ("", ""),
    (None, ""),
    ([], "[]"),
    ({"rows": [1, None], "é": "ü"}, '{"rows": [1, null], "é": "ü"}'),
    ([{"id": 1}, {"id": 2}], '[{"id": 1}, {"id": 2}]'),
    ([1, "a"], '[1, "a"]'),
    (["one"], "one"),
    ([{"type": "text", "text": "one"}], "one"),
    (5, "5"),
    (False, "false"),
]


def result_in(wire: Wire, result: Any) -> list[dict[str, Any]]:
    """A user's words, a call, and what it gave back."""
    user: dict[str, Any] = {"role": "user", "content": "go"}
    if wire is CHAT:
        called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        said = {"role": "assistant", "content": None, "tool_calls": [called]}
        return [user, said, {"role": "tool", "tool_call_id": "1", "content": result}]
    if wire is MESSAGES:
        use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
        given = {"type": "tool_result", "tool_use_id": "1", "content": result}
        return [user, {"role": "assistant", "content": [use]}, {"role": "user", "content": [given]}]
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    return [user, call, {"type": "function_call_output", "call_id": "1", "output": result}]


@pytest.mark.parametrize("wire", [CHAT, MESSAGES, RESPONSES], ids=["chat", "messages", "responses"])
@pytest.mark.parametrize(("result", "text"), RESULTS)
def test_whatever_a_tool_gave_back_is_shown(result: Any, text: str, wire: Wire) -> None:
    """Objects, numbers and lists of them too: agents hand on what their tools return."""
    name = "input" if wire is RESPONSES else "messages"
    messages = read(wire, {name: result_in(wire, result)}).messages
    assert messages is not None
    assert (messages[-1]["role"], messages[-1]["content"]) == ("tool", text)


FIELDS: list[tuple[str, Any, Any]] = [
    ("max_tokens", "1", 1),
    ("max_tokens", "1.0", 1),
    ("max_tokens", "null", None),
    ("max_tokens", "-1", None),
    ("max_tokens", "0", "max_tokens: expected `int`"),
    ("max_tokens", "1.5", "max_tokens: expected `int`"),
    ("max_tokens", '"9"', "max_tokens: expected `int`"),
    ("max_tokens", "true", "max_tokens: expected `int`"),
    ("max_tokens", "1" * 400, int("1" * 400)),
    ("seed", "-1", None),
    ("seed", "null", None),
    ("seed", "-5", 2**64 - 5),
    ("seed", "7.0", 7),
    ("seed", str(2**64 + 3), 3),
    ("seed", "9" * 400, int("9" * 400) % 2**64),
    ("seed", "0.5", "seed: expected `int`, got 0.5"),
    ("seed", '"x"', "seed: expected `int`, got 'x'"),
]


@pytest.mark.parametrize(("name", "value", "expected"), FIELDS)
def test_numbers_are_taken_as_clients_write_them(name: str, value: str, expected: Any) -> None:
    """In all protocols: whole ones as floats, large and negative seeds, null for none."""
    user = '[{"role": "user", "content": "go"}]'
    for wire, about in (
        (CHAT, f'"messages": {user}'),
        (MESSAGES, f'"messages": {user}'),
        (
            COMPLETIONS,
            '"prompt": "go"',
        ),
        (RESPONSES, f'"input": {user}'),
    ):
        its_name = "max_output_tokens" if wire is RESPONSES and name == "max_tokens" else name
        if wire is RESPONSES and value == "-1":
            continue
        body = read_body(f'\ufeff{{{about}, "{its_name}": {value}}}'.encode())
        if isinstance(expected, str):
            with pytest.raises(RequestError, match=expected.replace(name, its_name)):
                wire.read(body)
        else:
            assert getattr(read(wire, body), name) == expected


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"top_p": 2}, "top_p", "top_p: expected `float` <= 1.0, got 2"),
    ({"max_tokens": "9"}, "max_tokens", "max_tokens: expected `int`, got '9'"),
    ({"drafter": ["ngram", 5]}, "drafter[1]", "drafter[1]: expected `str`, got 5"),
    ({"logit_bias": {"7": "x"}}, "logit_bias", "logit_bias: expected `float`, got {'7': 'x'}"),
    ({"tools": [{"name": 5}]}, "tools[0].name", "tools[0].name: expected `str`, got 5"),
]


@pytest.mark.parametrize(("wrong", "field", "words"), WRONG, ids=[field for _, field, _ in WRONG])
def test_an_error_names_the_field_its_value_and_what_is_expected(
    wrong: dict[str, Any], field: str, words: str
) -> None:
    """In the form of each protocol: OpenAI's has a name for the field."""
    said = {"messages": [{"role": "user", "content": "go"}], "prompt": "go", "input": "go"}
    for wire in (CHAT, COMPLETIONS, MESSAGES, RESPONSES):
        own = {**said, "prompt": None} if wire is RESPONSES else said
        with pytest.raises(RequestError) as refused:
            wire.read({**own, **wrong})
        told = wire.error(refused.value, HTTPStatus.BAD_REQUEST)["error"]
        assert (told["type"], told["message"]) == ("invalid_request_error", words)
        assert wire is MESSAGES or told["param"] == field


def test_broken_arguments_in_a_history_of_messages_are_left_to_the_prompt() -> None:
    use = {"type": "tool_use", "id": "1", "name": "f", "input": "{broken"}
    messages = read(MESSAGES, {"messages": [{"role": "assistant", "content": [use]}]}).messages
    assert messages is not None
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == "{broken"


def test_half_a_pair_of_surrogates_in_a_call_is_replaced() -> None:
    """As of a model whose text was cut: nothing else could be sent."""
    written = Transcript()
    written.add(CallBegan(0, "1", "f", '{"b": "\\ud83d"}'))
    written.add(Ended("tool_calls"))
    asked = MESSAGES.read({"messages": [{"role": "user", "content": "go"}]})
    assert MESSAGES.reply(asked).build([written])["content"][0]["input"] == {"b": "\ufffd"}


def test_an_answer_without_a_text_is_an_empty_one() -> None:
    """Clients count on a text where there is no call."""
    written = Transcript()
    written.add(Ended("stop"))
    asked = CHAT.read({"messages": [{"role": "user", "content": "go"}]})
    assert CHAT.reply(asked).build([written])["choices"][0]["message"]["content"] == ""
    written.add(CallBegan(0, "1", "f", "{}"))
    assert CHAT.reply(asked).build([written])["choices"][0]["message"]["content"] is None


PARTS: list[tuple[Any, str]] = [
    ({"type": "text", "text": "words"}, "words"),
    ({"type": "refusal", "refusal": "No."}, "No."),
    ({"type": "input_audio", "text": 5}, "[input_audio: not shown to this model]"),
    ("words", "words"),
]


@pytest.mark.parametrize(("part", "text"), PARTS)
def test_a_part_is_its_text_or_is_named(part: Any, text: str) -> None:
    """In both of OpenAI's protocols with parts."""
    for wire, name in ((CHAT, "messages"), (RESPONSES, "input")):
        messages = read(wire, {name: [{"role": "user", "content": [part]}]}).messages
        assert messages is not None
        assert messages[0]["content"] == text


ROLES = [
    {"role": "robot", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "x"}]},
    {"role": None, "content": "x"},
    {"role": ["user"], "content": []},
]


@pytest.mark.parametrize("message", ROLES, ids=repr)
def test_a_role_that_is_none_is_refused_whatever_is_said(message: dict[str, Any]) -> None:
    for wire, name in ((MESSAGES, "messages"), (RESPONSES, "input")):
        with pytest.raises(RequestError, match="role: expected `str`"):
            wire.read({name: [{"role": "user", "content": "go"}, message]})


def test_a_chosen_tool_is_one_of_the_tools() -> None:
    """In all protocols that have tools, in the same words."""
    chosen: list[tuple[Wire, dict[str, Any]]] = [
        (CHAT, {"type": "function", "function": {"name": "g"}}),
        (MESSAGES, {"type": "tool", "name": "g"}),
        (RESPONSES, {"type": "function", "name": "g"}),
    ]
    for wire, choice in chosen:
        name = "input" if wire is RESPONSES else "messages"
        body = {name: [{"role": "user", "content": "go"}], "tool_choice": choice}
        with pytest.raises(RequestError, match="there is no tool 'g' among the tools"):
            wire.read(body)


@pytest.mark.parametrize(
    ("wire", "field", "of_stream", "parts", "kinds"),
    [
        (MESSAGES, "messages", message_of, "content", ["text", "tool_use", "text", "thinking"]),
        (
            RESPONSES,
            "input",
            response_of,
            "output",
            ["message", "function_call", "message", "reasoning"],
        ),
    ],
    ids=["messages", "responses"],
)
def test_a_whole_reply_has_the_order_of_its_stream(
    wire: Wire, field: str, of_stream: Any, parts: str, kinds: list[str]
) -> None:
    """A text after a call comes after the call, and a thought after that text."""
    events: list[Event] = [
        *(TextPiece("I "), TextPiece("go.")),
        *(CallBegan(0, "1", "f", '{"a": '), CallArguments(0, "1}")),
        TextPiece("Then"),
        *(TextPiece("so ", is_thought=True), TextPiece("so", is_thought=True)),
        Ended("tool_calls", num_prompt=3),
    ]
    asked = wire.read({field: [{"role": "user", "content": "go"}]})
    written, stream = Transcript(), wire.reply(asked)
    raw = b"".join(stream.begin())
    for event in events:
        written.add(event)
        raw += b"".join(stream.write(0, event))
    whole, streamed = wire.reply(asked).build([written]), of_stream(events_in(raw))
    assert [part["type"] for part in whole[parts]] == kinds
    for part in (*whole[parts], *streamed[parts]):
        part.pop("id", None)
    assert whole[parts] == streamed[parts]


def test_a_call_that_broke_is_text_in_its_place() -> None:
    written = Transcript()
    begun, broken = CallBegan(1, "2", "g", "{"), CallBroken(1, "<call>{")
    events = [CallBegan(0, "1", "f", "{}"), begun, CallArguments(1, '"'), broken, Ended("stop")]
    for event in events:
        written.add(event)
    assert written.events == [events[0], TextPiece("<call>{"), Ended("stop")]
    assert (written.text, [call["name"] for call in written.calls]) == ("<call>{", ["f"])
