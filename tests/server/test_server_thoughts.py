"""Thoughts in the server: a schema or a call comes after them, in each protocol."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from written_texts import CALL, END, TOOLS, UNCALL, cut, events_of, said, tokenizer, written

import tiny_model_folder
from engines import ask, queued_together, running, submit, with_flags
from live import TEMPLATE, Script, post
from selection import in_one_test
from specdec_mlx.drafters.grammar import Grammar
from specdec_mlx.drafters.thoughts import Thought
from specdec_mlx.server.protocols.body import BUDGETS
from specdec_mlx.server.protocols.chat import CHAT
from specdec_mlx.server.protocols.messages import MESSAGES as MESSAGES_WIRE
from specdec_mlx.server.protocols.replies import Wire
from specdec_mlx.server.protocols.responses import RESPONSES as RESPONSES_WIRE
from specdec_mlx.server.requests import RequestError, Transcript
from tiny_model_folder import write_model_folder
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
    whole = Transcript()
    for event in events_of([*cut("a"), *pieces, *cut(text)], **given):
        whole.add(event)
    assert said(whole)[:4] == ('{"a": "one"}', "a</think> b", [], "stop")


# Budgets

EFFORTS: list[tuple[Wire, dict[str, Any], int | None]] = [
    (CHAT, {"reasoning_effort": "minimal"}, 512),
    (CHAT, {"reasoning_effort": "low"}, 1024),
    (CHAT, {"reasoning_effort": "xhigh"}, None),
    (CHAT, {"reasoning_effort": "none"}, None),
    (CHAT, {}, None),
    (RESPONSES_WIRE, {"reasoning": {"effort": "medium"}}, 8192),
    (RESPONSES_WIRE, {"reasoning": {"summary": "auto"}}, None),
    (MESSAGES_WIRE, {"thinking": {"type": "enabled", "budget_tokens": 2000}}, 2000),
    (MESSAGES_WIRE, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, 24576),
    (
        MESSAGES_WIRE,
        {"thinking": {"type": "enabled", "budget_tokens": 9}, "output_config": {"effort": "low"}},
        9,
    ),
    (MESSAGES_WIRE, {"output_config": {"effort": "max"}}, None),
]


@in_one_test(("wire", "body", "expected"), EFFORTS)
def test_an_effort_stands_for_a_budget(wire: Wire, body: dict[str, Any], expected: Any) -> None:
    base = {"model": "m", "messages": USER, "input": "go", "max_tokens": 9}
    assert wire.read({**base, **body}).requests[0].thought_budget == expected


@in_one_test("budget", [-1, "9", True, 1.5, [9]])
def test_a_budget_that_is_none_is_refused(budget: Any) -> None:
    body = {
        "max_tokens": 9,
        "messages": USER,
        "thinking": {"type": "enabled", "budget_tokens": budget},
    }
    with pytest.raises(RequestError, match=r"thinking\.budget_tokens: expected `int`"):
        MESSAGES_WIRE.read(body)


@pytest.mark.parametrize("wire", [CHATS, MESSAGES, RESPONSES], ids=lambda wire: wire["path"][4:])
def test_a_thought_ends_with_its_budget(
    wire: dict[str, Any], url: str, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole and streamed, with drafts that go on thinking; a shorter thought is left as it is."""
    monkeypatch.setitem(BUDGETS, "low", 5)
    thinks = {"thinking": {"type": "enabled", "budget_tokens": 5}}
    thinks = thinks if wire is MESSAGES else wire["thinks"][0]
    for text, expected in (
        ("ABCDEFGHIJ", ("ABCDE", "GHIJ", [])),  # the mark stands in the place of F
        ("ABC</think>XYZ", ("ABC", "XYZ", [])),
        ("ABCDE</think>XYZ", ("ABCDE", "XYZ", [])),
    ):
        for stream in False, True:
            script.texts = [text]
            more = {"draft_length": 4, "prediction": {"type": "content", "content": text}}
            body = {**wire["body"], **thinks, **more, "stream": stream}
            assert asked(url, wire["path"], body) == expected


THINKS: dict[str, Any] = {"template": {"enable_thinking": True}, "max_tokens": 60}
LIMITED: list[dict[str, Any]] = [
    {"thought_budget": 7},
    {"thought_budget": 20, "num_draft_tokens": 6, "drafters": ["ngram"]},
    {"thought_budget": 11, "seed": 3, "sampling": {"temp": 0.9}},
    {"thought_budget": 9, **SCHEMED},
    {"thought_budget": 15, **SCHEMED, "seed": 4, "sampling": {"temp": 1.0}},
    {"thought_budget": 12, "penalties": {"repetition_penalty": 1.3}},
    {"thought_budget": 3, "tools": TOOLS, "tool_choice": "required"},
    {"thought_budget": 50, "drafters": ["none"]},
    {"thought_budget": 500},
]


def test_thoughts_are_closed_in_rows_of_a_batch_as_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request gets the text that it gets alone and without a drafter: greedy, with a seed,
    with a schema after the thought."""
    marks = "<think>", "</think>"
    special = [*dict.fromkeys([*tiny_model_folder.SPECIAL, *marks])]
    monkeypatch.setattr(tiny_model_folder, "SPECIAL", special)
    monkeypatch.setattr(tiny_model_folder, "CHAT_TEMPLATE", TEMPLATE)
    folder = write_model_folder(tmp_path, "llama", max_position_embeddings=4096)

    def kind(i: int) -> dict[str, Any]:
        prompt = f"{chr(65 + i)} the cat in the hat and the other cat in the hat"
        return {"messages": [{"role": "user", "content": prompt}], **THINKS, **LIMITED[i]}

    def told(text: Transcript) -> tuple[Any, ...]:
        assert text.ended
        return *said(text), text.ended.num_written, text.ended.num_thought

    with running(folder, flags=with_flags(num_draft_tokens=3)) as engine:
        plain = [
            told(ask(engine, **{**kind(i), "drafters": ["none"]})) for i in range(len(LIMITED))
        ]
        assert [told(ask(engine, **kind(i))) for i in range(len(LIMITED))] == plain
        with queued_together(engine):
            clients = [submit(engine, **kind(i)) for i in range(len(LIMITED))]
        texts = [client.wait() for client in clients]
        assert [*map(told, texts)] == plain
        assert any(text.ended.is_batched for text in texts if text.ended)
    for i, asked_for in enumerate(LIMITED):
        budget, (text, _, calls, _, _, _, num_thought) = asked_for["thought_budget"], plain[i]
        assert num_thought == min(budget + 1, 60)  # with the mark
        if "grammar" in asked_for:
            assert json.loads(text)["a"] in ("one", "two")
        assert bool(calls) == ("tools" in asked_for)
