"""What real agents send is answered, and what they get is valid in their protocol.

`shapes/` has requests in the shapes that agents were seen to send, one a line: path, headers, body.
CLIENT_SHAPES=FOLDER takes the files of another folder, as recordings of a new version of a client.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import Message
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from live import Script, post, scripted, served
from wires import chat_of, events_in, message_of, response_of

SHAPES = Path(os.environ.get("CLIENT_SHAPES", Path(__file__).parent / "shapes"))
REQUESTS = {
    f"{file.stem} {number}": json.loads(line)
    for file in sorted(SHAPES.glob("*.jsonl"))
    for number, line in enumerate(file.read_text().splitlines())
}
USER: list[Any] = [{"role": "user", "content": "Read a and b."}]
FUNCTION: Any = {
    "type": "function",
    "name": "read",
    "description": "Read a file.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    "strict": False,
}


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    with scripted() as script:
        yield script


@pytest.fixture(scope="module")
def url(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(script, tmp_path_factory.mktemp("models") / "model") as url:
        yield url


@pytest.fixture(autouse=True)
def begun(script: Script) -> None:
    script.texts, script.requests = [], []


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize("shape", REQUESTS.values(), ids=REQUESTS)
def test_what_agents_send_is_answered(shape: dict[str, Any], url: str, script: Script) -> None:
    """With thoughts, a text and, where there are tools, a call of the first one."""
    body, path = shape["body"], shape["path"]
    names = [tool.get("name") or tool["function"]["name"] for tool in body.get("tools") or []]
    can_call = bool(names) and body.get("max_tokens") != 1
    thinks = body.get("thinking", {}).get("type", "disabled") != "disabled"
    thinks |= body.get("reasoning", {}).get("effort", "none") != "none"
    text = ("Hm.</think>" if thinks else "") + "I will."
    script.texts = [text + (call(names[0], path="a") if can_call else "")]
    status, raw = post(url + path, body, [*shape["headers"].items()])
    assert status == 200, raw
    if "count_tokens" in path:
        assert json.loads(raw)["input_tokens"] > 0
        return
    if body.get("stream"):
        reply: Any = {"messages": message_of, "responses": response_of, "completions": chat_of}
        made = reply[path.split("?")[0].rsplit("/", 1)[1]](events_in(raw))
    else:
        kinds: Any = {"messages": Message, "responses": Response, "completions": ChatCompletion}
        made = json.loads(raw)
        kinds[path.split("?")[0].rsplit("/", 1)[1]].model_validate(made)
    if can_call:
        assert f'"{names[0]}"' in json.dumps(made)
    (request,) = script.requests
    assert "x-anthropic-billing-header" not in json.dumps(request.messages)
    assert [m["role"] for m in request.messages].count("system") <= 1
