"""Anthropic's protocol at `specdec-mlx server`, by its own client; the model says as it is told."""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import mlx.core as mx
import mlx_lm
import openai
import pytest
from mlx_lm.models import qwen2

import tiny_model_folder
from serving import MESSAGES, MODEL, chat, post, serving, text_of, until
from tiny_model_folder import write_model_folder

TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}</s>{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% for tool_call in m.tool_calls or [] %}<tool_call>{{ tool_call.function.name }} "
    "{{ tool_call.function.arguments | tojson }}</tool_call>{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ '<think>' if enable_thinking }}{% endif %}"
    "{# tool_call.name #}"
)
TOOL: Any = {
    "name": "read",
    "description": "Read a file.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
}


@dataclass
class Script:
    """What the model says from a position on; its own text before and after."""

    tokenizer: Any = None
    start: int = 0
    tokens: list[int] = field(default_factory=list)

    def says(self, text: str, start: int) -> None:
        self.tokens = [*self.tokenizer.encode(text, add_special_tokens=False)]
        self.tokens.append(self.tokenizer.eos_token_id)
        self.start = start


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    """The next text of all Qwen 2 models."""
    script, own = Script(), qwen2.Model.__call__

    def call(self: Any, inputs: mx.array, cache: Any = None, **options: Any) -> mx.array:
        logits = own(self, inputs, cache=cache, **options)
        end = cache[0].offset if cache else inputs.shape[1]
        if not isinstance(end, int) or inputs.shape[0] > 1:
            return logits
        for i in range(inputs.shape[1]):
            place = end - inputs.shape[1] + i + 1 - script.start
            if 0 <= place < len(script.tokens):
                logits[:, i] = 50.0 * (mx.arange(logits.shape[-1]) == script.tokens[place])
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qwen2.Model, "__call__", call)
        special = [*tiny_model_folder.SPECIAL, "<think>", "</think>"]
        patch.setattr(tiny_model_folder, "SPECIAL", special)
        patch.setattr(tiny_model_folder, "CHAT_TEMPLATE", TEMPLATE)
        yield script


@pytest.fixture(scope="module")
def folder(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    write_model_folder(folder, max_position_embeddings=2**16)
    script.tokenizer = mlx_lm.utils.load_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def other(folder: Path) -> Iterator[openai.OpenAI]:
    """A client in OpenAI's protocol."""
    flags = ("--draft-length", "4", "--chat-template-args", '{"enable_thinking": false}')
    with serving("--model", str(folder), *flags) as client:
        chat(client, max_tokens=2)  # the model is loaded
        yield client


@pytest.fixture(scope="module")
def client(other: openai.OpenAI) -> anthropic.Anthropic:
    url = str(other.base_url).removesuffix("/v1/")
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


@pytest.fixture(autouse=True)
def silent(script: Script) -> None:
    """Until a test says otherwise, the model says its own."""
    script.tokens = []


def ask(client: anthropic.Anthropic, messages: Any = MESSAGES, **more: Any) -> Any:
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 200} | more
    return client.messages.create(messages=messages, **options)


def streamed(client: anthropic.Anthropic, messages: Any = MESSAGES, **more: Any) -> Any:
    """The message that the client's own reader makes of a stream."""
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 200} | more
    with client.messages.stream(messages=messages, **options) as stream:
        return stream.get_final_message()


def both(client: anthropic.Anthropic, script: Script, says: str, **request: Any) -> Iterator[Any]:
    """The replies to a request, whole and streamed, of a model that says this."""
    counted = {name: request[name] for name in request.keys() - {"max_tokens", "stop_sequences"}}
    messages = counted.pop("messages", MESSAGES)
    count = client.messages.count_tokens(model=MODEL, messages=messages, **counted)
    for way in ask, streamed:
        script.says(says, count.input_tokens)
        reply = way(client, **request)
        read = reply.usage.input_tokens + reply.usage.cache_read_input_tokens
        assert read == count.input_tokens
        yield reply


def test_a_message_is_the_chat_completion(
    client: anthropic.Anthropic, other: openai.OpenAI
) -> None:
    """Text, counts and account; names of Anthropic's models stand for the model that is here."""
    system = {"role": "system", "content": "the cat"}
    expected = chat(other, [system, *MESSAGES], max_tokens=60)
    for way in ask, streamed:
        reply = way(client, system="the cat", model="claude-sonnet-4-5", max_tokens=60)
        assert [block.type for block in reply.content] == ["text"]
        assert reply.content[0].text == text_of(expected)
        assert (reply.stop_reason, reply.model) == ("max_tokens", "claude-sonnet-4-5")
        assert reply.usage.output_tokens == expected.usage.completion_tokens == 60
    assert ask(client).usage.speculation["accepted"] > 0
    assert ask(client, extra_body={"drafter": "none"}).usage.speculation["accepted"] == 0


def test_a_text_ends_for_a_reason(client: anthropic.Anthropic, script: Script) -> None:
    for reply in both(client, script, "Done. STOP and more", stop_sequences=["xyz", "STOP"]):
        assert reply.content[0].text == "Done. "
        assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "STOP")
    for reply in both(client, script, "Done.", stop_sequences=["STOP"]):
        assert (reply.content[0].text, reply.stop_reason) == ("Done.", "end_turn")
        assert reply.stop_sequence is None


def test_thoughts_and_calls_of_tools_are_blocks(
    client: anthropic.Anthropic, script: Script
) -> None:
    """A stream sends them in the order in which they were said."""
    said = (
        'so so</think>Reading.<tool_call>{"name": "read", "arguments": {"path": "a"}}</tool_call>'
    )
    thinking = {"type": "enabled", "budget_tokens": 1024}
    for reply in both(client, script, said, tools=[TOOL], thinking=thinking):
        thought, text, call = reply.content
        assert (thought.type, thought.thinking) == ("thinking", "so so")
        assert (text.type, text.text) == ("text", "Reading.")
        assert (call.type, call.name, call.input) == ("tool_use", "read", {"path": "a"})
        assert reply.stop_reason == "tool_use"


def test_an_agent_of_ten_turns(client: anthropic.Anthropic, script: Script) -> None:
    """Results of tools reach the model, and what was read before is not read again."""
    messages: list[Any] = [{"role": "user", "content": "Read all files."}]
    read: list[int] = []
    for turn in range(10):
        call = json.dumps({"name": "read", "arguments": {"path": f"file {turn}"}})
        says = "All read." if turn == 9 else f"Next.<tool_call>{call}</tool_call>"
        whole, reply = both(client, script, says, messages=messages, tools=[TOOL])
        assert [b.type for b in whole.content] == [b.type for b in reply.content]
        read.append(whole.usage.input_tokens)
        messages.append({"role": "assistant", "content": reply.content})
        results = [
            {
                "type": "tool_result",
                "tool_use_id": b.id,
                "content": f"contents of {b.input['path']}",
            }
            for b in reply.content
            if b.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results or "Thanks."})
    assert reply.stop_reason == "end_turn"
    count = client.messages.count_tokens(model=MODEL, messages=messages, tools=[TOOL])
    assert max(read[1:]) < 0.4 * count.input_tokens
    with_results = [m for m in messages if isinstance(m["content"], list)]
    assert len(with_results) == 19


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"max_tokens": "many"}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "role must be user or assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "video"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "input_schema"),
        ({"tool_choice": {"type": "any"}, "tools": [TOOL]}, "tool_choice"),
        ({"temperature": "hot"}, "temperature"),
        ({"drafter": "eagle"}, "Unknown drafter"),
        ({"stop_sequences": 3}, "stop"),
    ],
)
def test_what_is_wrong_is_said_in_its_form(
    client: anthropic.Anthropic, wrong: dict[str, Any], words: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client, extra_body=wrong)
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert words in body["error"]["message"]


def test_any_body_gets_an_answer(client: anthropic.Anthropic, other: openai.OpenAI) -> None:
    """300 bodies with something wrong in them; a neighbour's text is as before."""
    coins, before = random.Random(0), text_of(chat(other))
    values: list[Any] = [None, -1, 0.5, "", "x", [], [1], {}, {"type": "text"}, [{"type": "image"}]]
    whole: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 2,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "the cat"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "name": "read", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "content": "in the hat"}]},
        ],
        "system": [{"type": "text", "text": "a"}],
        "tools": [TOOL],
        "tool_choice": {"type": "auto"},
        "metadata": {"user_id": "me"},
        "thinking": {"type": "disabled"},
        "stop_sequences": ["z"],
    }
    statuses = []
    for _ in range(300):
        body = json.loads(json.dumps(whole))
        node: Any = body
        while isinstance(node, dict | list) and node:
            key = coins.choice(list(node) if isinstance(node, dict) else range(len(node)))
            if coins.random() < 0.4 or not isinstance(node[key], dict | list):
                node[key] = coins.choice(values)
                break
            node = node[key]
        path = coins.choice(["messages", "messages?beta=true", "messages/count_tokens"])
        status, text = post(other, path, body)
        statuses.append(status)
        answer = json.loads(text)
        assert status in (200, 400, 404), text
        assert status == 200 or answer["type"] == "error"
    assert statuses.count(200) > 50
    assert statuses.count(400) > 50
    assert text_of(chat(other)) == before


def test_totals_are_told_in_vllms_names_and_on_a_page(
    client: anthropic.Anthropic, other: openai.OpenAI
) -> None:
    """Counts of both protocols, whole, streamed, and of several choices."""
    before = metrics(other)
    reply = chat(other)
    details = reply.usage.completion_tokens_details
    account = reply.usage.speculation
    assert details.accepted_prediction_tokens == account["accepted"] > 0
    assert details.rejected_prediction_tokens == account["drafted"] - account["accepted"]
    streamed(client)
    several = chat(other, n=2, seed=1, temperature=1.0).usage
    answered = "vllm:request_success_total"
    until(lambda: metrics(other)[answered] == before[answered] + 4)
    after = metrics(other)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    told = account["emitted"] + 200 + several.completion_tokens
    assert grown["vllm:generation_tokens_total"] == told
    assert grown["vllm:iterations_total"] < told
    accepted = grown["vllm:spec_decode_num_accepted_tokens_total"]
    at = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert sum(n for name, n in grown.items() if name.startswith(at)) == accepted > 0
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    with urllib.request.urlopen(str(other.base_url).removesuffix("v1/")) as page:
        html = page.read().decode()
    assert "tokens per pass" in html
    assert "SuffixDrafter" in html
    assert "<script" not in html


@pytest.mark.parametrize("flags", [(), ("--memory", "none")])
def test_on_a_loopback_address_what_was_said_is_remembered(
    flags: tuple[str, ...], folder: Path, script: Script
) -> None:
    """Within the process, and not with --memory none: words that stand in no prompt."""
    with serving("--model", str(folder), "--draft-length", "4", *flags) as openai_client:
        url = str(openai_client.base_url).removesuffix("/v1/")
        client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        ask(client, max_tokens=1)
        count = client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens
        accepted = []
        for _ in range(2):
            script.says("A quick brown fox jumps over lazy dogs.", count)
            accepted.append(ask(client).usage.speculation["accepted"])
    assert (accepted[1] > accepted[0] + 10) == (not flags)


def metrics(client: openai.OpenAI) -> dict[str, float]:
    with urllib.request.urlopen(str(client.base_url).replace("v1/", "metrics")) as reply:
        lines = reply.read().decode().splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in samples}
