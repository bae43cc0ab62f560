"""All protocols: the same oddities of clients get the same answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdec_mlx.server.protocols.chat import CHAT
from specdec_mlx.server.protocols.messages import MESSAGES
from specdec_mlx.server.protocols.responses import RESPONSES
from specdec_mlx.server.requests import TextRequest, Wire

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
