"""Thoughts in the server: a schema or a call comes after them, in each protocol."""

from __future__ import annotations

import json
from typing import Any

import pytest
from written_texts import CALL, END, TOOLS, UNCALL, cut, events_of, said, tokenizer, written

from live import Script, post
from selection import in_one_test
from specdec_mlx.drafters.grammar import Grammar
from specdec_mlx.drafters.thoughts import Thought
from specdec_mlx.server.requests import Written
from wires import chat_of, events_in, message_of, response_of

USER: list[Any] = [{"role": "user", "content": "go"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["one", "two"]}},
    "required": ["a"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "name": "x", "schema": SCHEMA}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
ANSWER = '{"a": "two"}'

CHATS: dict[str, Any] = {
    "path": "/v1/chat/completions",
    "body": {"messages": USER, "max_tokens": 99},
    "thinks": [
        {"reasoning_effort": "low"},
        {"chat_template_kwargs": {"enable_thinking": True}},
    ],
    "schema": {"response_format": {"type": "json_schema", "json_schema": FORM}},
    "forced": {
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "required",
    },
}
MESSAGES: dict[str, Any] = {
    "path": "/v1/messages",
    "body": {"messages": USER, "max_tokens": 99},
    "thinks": [{"thinking": {"type": "enabled", "budget_tokens": 1024}}],
    "schema": {"output_config": {"format": FORM}},
    "forced": {
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any"},
    },
}
RESPONSES: dict[str, Any] = {
    "path": "/v1/responses",
    "body": {"input": "go", "max_output_tokens": 99},
    "thinks": [{"reasoning": {"effort": "low"}}],
    "schema": {"text": {"format": FORM}},
    "forced": {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
}


def parts(path: str, reply: dict[str, Any]) -> tuple[str, str, list[Any]]:
    """Thought, text, and the arguments of the calls of a reply."""
    if path == CHATS["path"]:
        message = reply["choices"][0]["message"]
        calls = [call["function"]["arguments"] for call in message.get("tool_calls") or []]
        return message.get("reasoning") or "", message["content"] or "", calls
    if path == MESSAGES["path"]:
        blocks = reply["content"]
        thought = "".join(b["thinking"] for b in blocks if b["type"] == "thinking")
        text = "".join(b["text"] for b in blocks if b["type"] == "text")
        return thought, text, [json.dumps(b["input"]) for b in blocks if b["type"] == "tool_use"]
    thought = text = ""
    calls = []
    for item in reply["output"]:
        thought += "".join(part["text"] for part in item.get("summary", []))
        text += "".join(part["text"] for part in item.get("content", []))
        calls += [item["arguments"]] if item["type"] == "function_call" else []
    return thought, text, calls


def asked(url: str, path: str, body: dict[str, Any]) -> tuple[str, str, list[Any]]:
    """The parts of a reply, which are those of a stream."""
    status, raw = post(url + path, {"model": "local", "temperature": 0, **body})
    assert status == 200, raw
    if not body.get("stream"):
        return parts(path, json.loads(raw))
    events = events_in(raw)
    if path != CHATS["path"]:
        whole = message_of if path == MESSAGES["path"] else response_of
        return parts(path, whole(events))
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for delta in chat_of(events)["deltas"]:
        for name in ("content", "reasoning"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                message["tool_calls"].append(call)
            else:
                arguments = call["function"]["arguments"]
                message["tool_calls"][-1]["function"]["arguments"] += arguments
    return parts(path, {"choices": [{"message": message}]})


@pytest.mark.parametrize("wire", [CHATS, MESSAGES, RESPONSES], ids=lambda wire: wire["path"][4:])
@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_comes_before_a_schema_and_before_a_forced_call(
    wire: dict[str, Any], stream: bool, url: str, script: Script
) -> None:
    """Where the request asks for thoughts; else the answer begins at once, with the same template.
    A prediction drafts beyond the end of the thought, rightly or not."""
    call = json.dumps({"name": "f", "arguments": json.loads(ANSWER)})
    for kind, answer, expected in (
        ("schema", ANSWER, (ANSWER, [])),
        ("forced", f"{CALL}\n{call}\n{UNCALL}", ("", [ANSWER])),
    ):
        for thinks in [{}, *wire["thinks"]]:
            for wrong in ("", "```json\n"):
                text = f"Hm.</think>{answer}" if thinks else answer
                guess = text.replace("</think>", f"</think>{wrong}")
                script.texts = [text]
                more = {"draft_length": 8, "prediction": {"type": "content", "content": guess}}
                body = {**wire["body"], **wire[kind], **thinks, **more, "stream": stream}
                got = asked(url, wire["path"], body)
                assert got == ("Hm." if thinks else "", *expected), (kind, thinks, wrong)


# the text alone

THOUGHT, MAY_THINK = "prompt", "model"


def thought_by(who: str, *, calls: bool = False) -> Thought:
    """The marks of a thought that the prompt opened, or that the model may open."""
    wrapper = tokenizer(marks=(CALL, UNCALL))
    return Thought(
        closes=wrapper.think_end_tokens,
        opens=() if who == THOUGHT else wrapper.think_start_tokens,
        calls=wrapper.tool_call_start_tokens if calls else (),
    )


FORCED = {"tools": TOOLS, "tool_choice": "required"}
ONE = '{"name": "f", "arguments": {"a": 1}}'
SCHEMED: dict[str, Any] = {"grammar": Grammar.json_schema(SCHEMA)}
BOTH = {**SCHEMED, "tools": TOOLS}
WITH_THOUGHTS: list[tuple[str, dict[str, Any], str, tuple[Any, ...]]] = [
    (
        THOUGHT,
        SCHEMED,
        '<think>hm</think>{"a": "</think><think>"}',
        ('{"a": "</think><think>"}', "<think>hm", [], "stop"),
    ),
    (
        MAY_THINK,
        SCHEMED,
        '<think>hm</think>{"a": "<think>"}',
        ('{"a": "<think>"}', "hm", [], "stop"),
    ),
    (
        MAY_THINK,
        SCHEMED,
        '{"a": "<think>hm</think>"}',
        ('{"a": "<think>hm</think>"}', "", [], "stop"),
    ),
    (
        THOUGHT,
        FORCED,
        f"hm</think>{CALL}{ONE}{UNCALL}",
        ("", "hm", [("f", '{"a": 1}')], "tool_calls"),
    ),
    (
        MAY_THINK,
        FORCED,
        f"<think>hm</think>{CALL}{ONE}{UNCALL}",
        ("", "hm", [("f", '{"a": 1}')], "tool_calls"),
    ),
    (MAY_THINK, FORCED, f"{CALL}{ONE}{UNCALL}", ("", "", [("f", '{"a": 1}')], "tool_calls")),
    (THOUGHT, FORCED, f"hm{CALL}{ONE}{UNCALL}", ("", "hm", [("f", '{"a": 1}')], "tool_calls")),
    (
        THOUGHT,
        BOTH,
        f"hm</think>{CALL}{ONE}{UNCALL}",
        ("", "hm", [("f", '{"a": 1}')], "tool_calls"),
    ),
    (THOUGHT, BOTH, 'hm</think>{"a": "one"}', ('{"a": "one"}', "hm", [], "stop")),
    (
        THOUGHT,
        SCHEMED | FORCED,
        f"hm</think>{CALL}{ONE}{UNCALL}",
        ("", "hm", [("f", '{"a": 1}')], "tool_calls"),
    ),
]


@in_one_test(("who", "asked_for", "text", "expected"), WITH_THOUGHTS)
def test_a_thought_before_a_grammar_is_told_from_the_answer(
    who: str, asked_for: dict[str, Any], text: str, expected: tuple[Any, ...]
) -> None:
    how = {"marks": (CALL, UNCALL)}
    thought = thought_by(who, calls="tools" in asked_for)
    given = {"in_thought": who == THOUGHT, "thought": thought, "how": how, **asked_for}
    assert said(written(text + END, **given))[:4] == expected


def test_a_bare_call_may_come_after_a_thought() -> None:
    """Where the model's own calls are no JSON."""
    how = {"parser": "qwen3_coder"}
    for who, begins in ((THOUGHT, "hm</think>"), (MAY_THINK, "<think>hm</think>"), (MAY_THINK, "")):
        given = {"in_thought": who == THOUGHT, "thought": thought_by(who), "how": how, **FORCED}
        got = said(written(begins + ONE + END, **given))[:4]
        assert got == ("", "hm" if begins else "", [("f", '{"a": 1}')], "tool_calls")


def test_a_thought_before_a_grammar_ends_with_its_token() -> None:
    """A mark in pieces is a part of the thought, for the grammar as for the client."""
    text = ' b</think>{"a": "one"}' + END
    given = {"in_thought": True, "thought": thought_by(THOUGHT), **SCHEMED}
    pieces = [tokenizer().get_vocab()[char] for char in "</think>"]
    whole = Written()
    for event in events_of([*cut("a"), *pieces, *cut(text)], **given):
        whole.add(event)
    assert said(whole)[:4] == ('{"a": "one"}', "a</think> b", [], "stop")
