"""What real agents send is answered, and what they get is valid in their protocol.

`shapes/` has requests in the shapes that agents were seen to send, one a line: path, headers, body.
CLIENT_SHAPES=FOLDER takes the files of another folder, as recordings of a new version of a client.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from anthropic import beta_tool
from anthropic.types import Message
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from pydantic import BaseModel

from live import Script, anthropic_at, openai_at, post
from specdec_mlx.files import json_lines
from wires import chat_of, events_in, message_of, response_of

SHAPES = Path(os.environ.get("CLIENT_SHAPES", Path(__file__).parent / "shapes"))
REQUESTS = {
    f"{file.stem} {number - 1}": request
    for file in sorted(SHAPES.glob("*.jsonl"))
    for number, request in json_lines(file)
}
USER: list[Any] = [{"role": "user", "content": "Read a and b."}]
FUNCTION: Any = {
    "type": "function",
    "name": "read",
    "description": "Read a file.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    "strict": False,
}


EFFORT: Any = {"effort": "medium"}
REPLIES: dict[str, tuple[Any, Any]] = {
    "/v1/messages": (Message, message_of),
    "/v1/responses": (Response, response_of),
    "/v1/chat/completions": (ChatCompletion, chat_of),
}
"""By path: the clients' own type of a whole reply, and the check of a stream."""


class Answer(BaseModel):
    is_read: bool


@pytest.fixture(autouse=True)
def begun(script: Script) -> None:
    script.texts, script.requests = [], []


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize("shape", REQUESTS.values(), ids=REQUESTS)
def test_what_agents_send_is_answered(shape: dict[str, Any], url: str, script: Script) -> None:
    """With thoughts, a text and, where there are tools, a call of the first one."""
    body, path = shape["body"], shape["path"].split("?")[0]
    tool = (body.get("tools") or [{}])[0]
    name = tool.get("name") or tool.get("function", {}).get("name")
    can_call = name is not None and body.get("max_tokens") != 1
    thinks = body.get("thinking", {}).get("type", "disabled") != "disabled"
    thinks |= body.get("reasoning", {}).get("effort", "none") != "none"
    text = ("Hm.</think>" if thinks else "") + "I will."
    script.texts = [text + (call(name, path="a") if can_call else "")]
    status, raw = post(url + shape["path"], body, [*shape["headers"].items()])
    assert status == 200, raw
    if path.endswith("count_tokens"):
        assert json.loads(raw)["input_tokens"] > 0
        return
    whole, streamed = REPLIES[path]
    reply = streamed(events_in(raw)) if body.get("stream") else json.loads(raw)
    if not body.get("stream"):
        whole.model_validate(reply)
    said = json.dumps(reply)
    assert not can_call or any(word in said for word in ("tool_use", "function_call", "tool_calls"))
    assert not thinks or '"Hm."' in said
    (request,) = script.requests
    assert "x-anthropic-billing-header" not in json.dumps(request.messages)
    assert "developer" not in [message["role"] for message in request.messages]


def test_anthropics_client_runs_tools_until_the_model_is_done(url: str, script: Script) -> None:
    """Whole and streamed: calls, their results, an end; later turns find the first ones cached."""

    @beta_tool
    def read(path: str) -> str:
        """Read a file.

        Args:
            path: which one.
        """
        return f"contents of {path}"

    for stream in False, True:
        script.texts = [f"Reading.{call('read', path='a')}{call('read', path='b')}", "All read."]
        script.requests = []
        runner = anthropic_at(url).beta.messages.tool_runner(
            model="claude-sonnet-5", max_tokens=200, messages=USER, tools=[read], stream=stream
        )
        replies = [turn.get_final_message() if stream else turn for turn in runner]
        assert [reply.stop_reason for reply in replies] == ["tool_use", "end_turn"]
        assert [block.type for block in replies[0].content] == ["text", "tool_use", "tool_use"]
        assert replies[1].content[0].text == "All read."
        results = [m for m in script.requests[1].messages if m["role"] == "tool"]
        assert [result["content"] for result in results] == ["contents of a", "contents of b"]
        assert replies[1].usage.cache_read_input_tokens > replies[0].usage.input_tokens / 2


def test_anthropics_client_counts_streams_and_parses(url: str, script: Script) -> None:
    client = anthropic_at(url)
    asked: Any = {"model": "claude-sonnet-5", "messages": USER}
    count = client.messages.count_tokens(**asked).input_tokens
    script.texts = ["so so</think>One STOP two"]
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    limits: Any = {"max_tokens": 200, "stop_sequences": ["STOP"]}
    with client.messages.stream(**asked, **limits, thinking=thinking) as stream:
        kinds = [event.type for event in stream]
        reply = stream.get_final_message()
    assert {"thinking", "signature", "text"} <= {*kinds}
    assert [block.type for block in reply.content] == ["thinking", "text"]
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "STOP")
    assert reply.usage.input_tokens + reply.usage.cache_read_input_tokens == count + 1  # <think>
    parsed = client.messages.parse(**asked, max_tokens=200, output_format=Answer)
    assert isinstance(parsed.parsed_output, Answer)
    filled = client.messages.create(
        model="m", max_tokens=3, messages=[*USER, {"role": "assistant", "content": "I am"}]
    )
    assert filled.stop_reason == "max_tokens"
    assert script.requests[-1].continues


def test_anthropics_client_is_told_by_how_much_a_prompt_is_too_long(url: str) -> None:
    words: Any = [{"role": "user", "content": "a b " * 2**16}]
    with pytest.raises(
        anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ max"
    ):
        anthropic_at(url).messages.create(model="m", max_tokens=9, messages=words)


def test_openais_client_runs_tools_until_the_model_is_done(url: str, script: Script) -> None:
    """Whole and streamed, with thoughts that go back to the model."""
    for stream in False, True:
        script.texts = [f"Hm.</think>Reading.{call('read', path='a')}", "</think>All read."]
        script.requests = []
        items: list[Any] = [*USER]
        for _ in range(2):
            reply = respond(url, stream, input=items, tools=[FUNCTION], reasoning=EFFORT)
            items += [item.to_dict() for item in reply.output]
            items += [
                {"type": "function_call_output", "call_id": item.call_id, "output": "contents"}
                for item in reply.output
                if item.type == "function_call"
            ]
        assert reply.output_text == "All read."
        user, said, result = script.requests[1].messages
        assert (said["content"], said["reasoning_content"]) == ("Reading.", "Hm.")
        assert said["tool_calls"][0]["function"]["arguments"] == '{"path": "a"}'
        assert (user["role"], result["content"]) == ("user", "contents")
        assert reply.usage.input_tokens_details.cached_tokens > 0


def test_openais_client_parses_and_reads_ends_and_log_probabilities(url: str) -> None:
    client = openai_at(url)
    parsed = client.responses.parse(model="m", input="x", text_format=Answer)
    assert isinstance(parsed.output_parsed, Answer)
    for stream in False, True:
        include: Any = ["message.output_text.logprobs"]
        reply = respond(
            url, stream, input="x", max_output_tokens=3, top_logprobs=2, include=include
        )
        assert (reply.status, reply.incomplete_details.reason) == (
            "incomplete",
            "max_output_tokens",
        )
        logprobs = reply.output[0].content[0].logprobs
        assert "".join(entry.token for entry in logprobs) == reply.output_text
        assert {len(entry.top_logprobs) for entry in logprobs} == {2}
        assert reply.usage.output_tokens == 3
    with pytest.raises(openai.BadRequestError, match="nothing is kept here"):
        respond(url, False, input="x", previous_response_id="resp_1")


def respond(url: str, stream: bool, **body: Any) -> Any:
    """A response, whole or of a stream, as the client's own reader makes it."""
    client = openai_at(url)
    if not stream:
        return client.responses.create(model="m", **body)
    with client.responses.stream(model="m", **body) as events:
        for event in events:
            last = event
    assert last.type in ("response.completed", "response.incomplete")
    return last.response
