"""Prompts: what a template is given, and what the tokens of a request are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer
from tokenizers.processors import TemplateProcessing

from selection import in_one_test
from specdec_mlx.drafters.grammar import Grammar
from specdec_mlx.server.flags import ServerSettings
from specdec_mlx.server.prompts import read_prompt
from specdec_mlx.server.protocols.chat import CHAT
from specdec_mlx.server.protocols.messages import MESSAGES
from specdec_mlx.server.protocols.responses import RESPONSES
from specdec_mlx.server.requests import RequestError, TextRequest
from tiny_model_folder import SPECIAL, make_tokenizer

MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|system|>{{ tools | tojson }}</s>{% endif %}"
    "{% for m in messages %}"
    "{% if m['role'] == 'nobody' %}{{ raise_exception('nobody is no role') }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{% for k, v in c.function.arguments.items() %}"
    "{{ k }}={{ v }}{% endfor %}</tool_call>{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>\n{% endif %}"
    "{% endif %}{# tool_call.name #}"
)
USER: dict[str, Any] = {"role": "user", "content": "the hat"}
TOOL = {"type": "function", "function": {"name": "cat", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One whose template thinks, calls, and says the BOS."""
    return write_tokenizer(tmp_path_factory.mktemp("chat"), TEMPLATE)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One without a template."""
    return write_tokenizer(tmp_path_factory.mktemp("bare"), None)


def write_tokenizer(folder: Path, template: str | None) -> Any:
    made = make_tokenizer()
    made.add_tokens(MARKS)
    bos = ("<s>", made.token_to_id("<s>"))
    made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[bos])
    made.save(str(folder / "tokenizer.json"))
    roles = {"bos_token": "<s>", "eos_token": "</s>", "clean_up_tokenization_spaces": False}
    how = {"tokenizer_class": "PreTrainedTokenizerFast", **roles}
    how |= {"chat_template": template} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(how))
    loaded = load_tokenizer(folder)
    assert SPECIAL[0] == loaded.bos_token
    return loaded


def prompt(
    tokenizer: Any, settings: ServerSettings | None = None, **fields: Any
) -> tuple[str, bool]:
    """The prompt as text, special tokens and all, and whether a thought is open at its end."""
    read = read_prompt(TextRequest(**fields), tokenizer, settings or ServerSettings())
    return tokenizer.decode(read.tokens), read.in_thought


def test_a_text_has_one_bos_whoever_writes_it(tokenizer: Any) -> None:
    """A template's is not doubled, nor that of a prompt; token ids are taken as they are."""
    assert prompt(tokenizer, messages=[USER])[0].count("<s>") == 1
    for text in ("the hat", "<s>the hat"):
        assert prompt(tokenizer, prompt=text)[0] == "<s>the hat"
    assert prompt(tokenizer, prompt=[7, 8])[0] == tokenizer.decode([7, 8])


THOUGHTS: list[tuple[dict[str, Any], bool]] = [
    ({"messages": [USER]}, True),
    ({"messages": [USER], "template": {"enable_thinking": False}}, False),
    ({"messages": [USER], "grammar": Grammar.regex("a+")}, False),
    ({"messages": [USER], "tools": [TOOL], "tool_choice": "required"}, False),
    ({"messages": [USER], "tools": [TOOL]}, True),
    (
        {
            "messages": [{**USER, "content": "what is <think>?"}],
            "template": {"enable_thinking": False},
        },
        False,
    ),
    ({"prompt": "what is <think>"}, False),
    (
        {"messages": [USER, {"role": "assistant", "content": "<think>so"}], "continues": True},
        True,
    ),
    (
        {"messages": [USER, {"role": "assistant", "content": "<think>so</think>yes"}]}
        | {"continues": True},
        False,
    ),
]


@in_one_test(("fields", "expected"), THOUGHTS)
def test_a_thought_is_open_where_the_template_opened_it(
    fields: dict[str, Any], expected: bool, tokenizer: Any
) -> None:
    """And not where a user wrote of one, or where a grammar holds from the first token on."""
    text, in_thought = prompt(tokenizer, **fields)
    assert in_thought == expected
    if "grammar" in fields or "tool_choice" in fields:
        assert not text.endswith("<think>\n")


def test_the_last_message_is_continued(tokenizer: Any) -> None:
    said = {"role": "assistant", "content": "the cat in"}
    names = {"enable_thinking": False}
    text = prompt(tokenizer, messages=[USER, said], continues=True, template=names)[0]
    assert text == "<s><|user|>the hat</s><|assistant|>the cat in"


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "cat", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}


ARGUMENTS: list[tuple[Any, str]] = [
    ('{"hat": 3}', "<tool_call>hat=3</tool_call>"),
    ({"hat": 3}, "<tool_call>hat=3</tool_call>"),
    ("", "<tool_call></tool_call>"),
    (None, "<tool_call></tool_call>"),
    ('{"hat": ', '<tool_call>{"name": "cat", "arguments": {"hat": }</tool_call>'),
    ("[3]", '<tool_call>{"name": "cat", "arguments": [3]}</tool_call>'),
]


@in_one_test(("arguments", "expected"), ARGUMENTS)
def test_arguments_that_are_no_object_are_text(
    arguments: Any, expected: str, tokenizer: Any
) -> None:
    """The history goes on with them, and the client's own messages are as they were."""
    messages = [USER, call(arguments), {"role": "tool", "content": "no such hat"}]
    before = json.dumps(messages)
    text = prompt(tokenizer, messages=messages)[0]
    assert f"<|assistant|>{expected}</s>" in text
    assert json.dumps(messages) == before


def test_templates_get_the_names_of_the_server_and_of_the_request(tokenizer: Any) -> None:
    """A request's have the last word; tools that may not be called are not shown."""
    settings = ServerSettings(chat_template_args={"enable_thinking": False})
    assert not prompt(tokenizer, settings, messages=[USER])[1]
    assert prompt(tokenizer, settings, messages=[USER], template={"enable_thinking": True})[1]
    for choice, is_shown in (("auto", True), ("none", False)):
        text = prompt(tokenizer, messages=[USER], tools=[TOOL], tool_choice=choice)[0]
        assert ('"name": "cat"' in text) == is_shown


def test_what_a_template_raises_is_the_clients(tokenizer: Any) -> None:
    with pytest.raises(RequestError):
        prompt(tokenizer, messages=[{**USER, "role": "nobody"}])


CHECKS = {
    "any": "",
    "at the start": "{% if m['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}",
    "none": "{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% elif (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}",
}
"""Which system messages a template takes."""

TOLD = [("system", "be"), ("system", "so"), ("user", "a"), ("system", "now"), ("user", "b")]
FOLDED = {
    "any": "<|system|>be</s><|system|>so</s><|user|>a</s><|system|>now</s><|user|>b</s>",
    "at the start": "<|system|>be\n\nso</s><|user|>a\n\nnow\n\nb</s>",
    "none": "<|user|>be\n\nso\n\na\n\nnow\n\nb</s>",
}


@pytest.mark.parametrize("takes", CHECKS)
def test_system_messages_are_folded_where_a_template_refuses_them(
    takes: str, tmp_path: Path
) -> None:
    """By one place for all protocols: two of them at the start, and one in the middle."""
    loop = "{% for m in messages %}"
    wrapper = write_tokenizer(tmp_path, TEMPLATE.replace(loop, loop + CHECKS[takes], 1))
    chat = [{"role": role, "content": text} for role, text in TOLD]
    kept = {"max_tokens": 9, "model": "m"}
    asked = {
        "chat": CHAT.read({"messages": chat, **kept}),
        "messages": MESSAGES.read({"system": "be\n\nso", "messages": chat[2:], **kept}),
        "responses": RESPONSES.read({"input": chat, "model": "m"}),
    }
    names = {"enable_thinking": False}
    for protocol, read in asked.items():
        messages = read.requests[0].messages
        text = prompt(wrapper, messages=messages, template=names)[0]
        accepted = "at the start" if takes == "any" and protocol != "chat" else takes
        assert text == f"<s>{FOLDED[accepted]}<|assistant|>", protocol
        ends = read_prompt(
            read.requests[0], wrapper, ServerSettings(), finds_stops=True
        ).prefill_stops
        assert ends
    answered = [*chat[:3], {"role": "assistant", "content": "c"}, *chat[3:]]
    if takes != "any":
        text = prompt(wrapper, messages=answered, template=names)[0]
        assert text.endswith("a</s><|assistant|>c</s><|user|>now\n\nb</s><|assistant|>")
    with pytest.raises(RequestError, match="nobody is no role"):
        prompt(wrapper, messages=[*chat, {**USER, "role": "nobody"}])


def test_a_chat_without_a_template_is_text(bare: Any) -> None:
    messages = [{"role": "system", "content": "be"}, USER, {"role": "assistant", "content": "so"}]
    text = prompt(bare, messages=messages[:2])[0]
    assert text.removeprefix("<s>") == "ASSISTANT's RULE: be\nUSER: the hat\nASSISTANT:"
    text = prompt(bare, messages=messages, continues=True)[0]
    assert text.removeprefix("<s>") == "ASSISTANT's RULE: be\nUSER: the hat\nASSISTANT: so"
    mapped = prompt(bare, messages=[USER], template={"role_mapping": {"user": "U ", "stop": "|"}})
    assert mapped[0].removeprefix("<s>") == "U the hat|ASSISTANT:"


def test_states_are_kept_at_the_ends_of_what_later_prompts_share(tokenizer: Any) -> None:
    """After the system prompt, before the thought that is left out later, and at the end."""
    messages = [{"role": "system", "content": "be so"}, USER]
    settings = ServerSettings()
    read = read_prompt(TextRequest(messages=messages), tokenizer, settings, finds_stops=True)
    ends = [tokenizer.decode(read.tokens[:end]) for end in read.prefill_stops]
    assert ends[0] == "<s><|system|>be so</s><|user|>"
    assert ends[1].endswith("the hat</s><|assistant|>")
    assert ends[2].endswith("<think>\n")
