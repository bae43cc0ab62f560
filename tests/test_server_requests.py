"""Requests to the server: what they may ask for, and the answers to those that ask too much."""

from __future__ import annotations

import importlib
import json
import threading
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_lm
import openai
import pytest

from selection import FULL, in_one_test
from serving import MESSAGES, MODEL, PROMPT, chat, complete, post, said, serving, text_of
from specdec_mlx.contracts import Draft
from specdec_mlx.drafters import grammar
from specdec_mlx.drafters.grammar import Grammar
from specdec_mlx.drafters.suffix import SuffixSession
from specdec_mlx.mlx_lm_plugin import openai_fields
from specdec_mlx.mlx_lm_plugin.requests import Access
from specdec_mlx.mlx_lm_plugin.server import SpeculatingGenerator
from tiny_model_folder import write_model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[openai.OpenAI]:
    with serving("--model", str(folder), "--draft-length", "4", "--memory", "none") as running:
        yield running


def both(client: openai.OpenAI, **more: Any) -> tuple[str, list[dict[str, Any]]]:
    """The text of a request, which is that of its stream, and the accounts of the two."""
    reply, chunks = chat(client, **more), list(chat(client, stream=True, **more))
    assert said(chunks)[0] == text_of(reply)
    return text_of(reply), [reply.usage.speculation, chunks[-1].speculation]


# Refused


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "completions", {"prompt": PROMPT, "max_tokens": 2, **fields}


def chatting(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "chat/completions", {"messages": MESSAGES, "max_tokens": 2, **fields}


def schema_of(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


def nested(levels: int) -> dict[str, Any]:
    return {"items": nested(levels - 1)} if levels else {}


MANY_PATTERNS = {"patternProperties": {f"^{i}.*$": {} for i in range(5000)}}

REFUSED: list[tuple[tuple[str, Any], str]] = [
    (("completions", '{"prompt": ' + "[" * 100_000), "The body of the request is no JSON"),
    (completion(drafter="nothing"), "Unknown drafter 'nothing'. Known: auto, cascade, lookahead, "),
    (completion(drafter="ngram:max_order=9"), "Unknown drafter"),
    (completion(drafter=["ngram"] * 1000), "at most 8"),
    (completion(drafter="ngram", draft_model="some/model"), "not both"),
    (completion(draft_length=-1), "draft_length must be"),
    (completion(drafter="x" * 100_000), "Unknown drafter 'xxx"),
    (completion(rule="nothing"), "Unknown rule 'nothing'. Known: auto"),
    (completion(rule="lenient:lenience=" + "(" * 300_000), "lenience must be a number, true or fa"),
    (completion(rule="lenient:leniency=1"), "leniency"),
    (completion(temperature=float("nan")), "a finite number"),
    (completion(prompt=""), "The prompt is empty."),
    (completion(prompt=["a", 3]), "prompt must be a text"),
    (completion(prompt=[5, 10**6]), "holds token 1000000"),
    (
        completion(prompt="ab" * 1000),
        "The prompt has 2000 tokens, and max_tokens is 2",
    ),
    (completion(prompt="abc", max_tokens=10**30), "The prompt has 3 tokens, and max_tokens is 1"),
    (
        chatting(max_completion_tokens=5000),
        "there are 512 positions for a text",
    ),
    (completion(logprobs="3"), "logprobs must be a boolean"),
    (chatting(chat_template_kwargs={"chat_template": "{{ a }}"}), "chat_template cannot be set by"),
    (chatting(chat_template_kwargs={"padding": 1, "max_length": 10**8}), "max_length, padding can"),
    (chatting(response_format=schema_of(MANY_PATTERNS)), "5000 patternProperties; at most "),
    (chatting(response_format=schema_of({"const": "x" * 2**17})), "characters"),
    (chatting(response_format=schema_of(nested(150))), "levels"),
    (chatting(response_format=schema_of({"type": 3})), "This is no json_schema that can be foll"),
    (chatting(response_format={"type": "json_schema"}), 'expected {"json_schema": {"schema": {.'),
    (chatting(messages=[]), "at least one message"),
    (chatting(messages=[{"content": "hello"}]), "objects with a role"),
    (completion(logit_bias={"5": None}), "expected a number for token 5"),
    (completion(logit_bias={"500000": 1.0}), "there is no token 500000; the model has 0 to "),
    (completion(seed=2**64), "seed must be an int from 0"),
    (chatting(n=33), "n must be an int from 1 to 32, not 33"),
    (completion(stop=5), "stop must be a text"),
    (chatting(prediction={"type": "content", "content": [{"type": "image_url"}]}), "prediction: "),
]


@in_one_test(("request_", "words"), REFUSED)
def test_a_bad_request_gets_400_in_words(
    request_: tuple[str, Any], words: str, client: openai.OpenAI
) -> None:
    """Before a stream begins, its answer is the same."""
    path, body = request_
    for stream in (False, True):
        asked = {**body, "stream": stream} if isinstance(body, dict) else body
        status, answer = post(client, path, asked)
        assert (status, words in json.loads(answer)["error"]["message"]) == (400, True), answer
        assert len(answer) < 1200


def test_a_model_that_cannot_be_loaded_is_404_in_words_and_an_adapter_400(
    client: openai.OpenAI, folder: Path, tmp_path: Path
) -> None:
    """Then the server's own model is loaded again."""
    with pytest.raises(openai.NotFoundError, match="There is no folder nowhere/at/all"):
        complete(client, model="nowhere/at/all")
    with pytest.raises(openai.BadRequestError, match="is no folder with an adapter_config"):
        complete(client, model=str(folder), extra_body={"adapters": str(tmp_path)})
    assert complete(client, max_tokens=2).usage.completion_tokens == 2


def test_a_server_whose_thread_died_says_that_it_is_not_available(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503, the status that load balancers know."""
    monkeypatch.setattr(SpeculatingGenerator, "generation_available", lambda self: False)
    status, answer = post(client, *chatting())
    assert (status, "generation thread died" in answer) == (503, True)


def test_a_drafter_that_raises_is_an_error_in_words(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HTTP 500, or the last event of a stream before [DONE]; and the server serves on."""
    asked = iter(range(10**9))

    def raising(self: SuffixSession, limit: int) -> Any:
        if next(asked) % 20 == 19:
            raise RuntimeError("no idea")
        return Draft()

    monkeypatch.setattr(SuffixSession, "propose", raising)
    with pytest.raises(openai.InternalServerError, match="RuntimeError: no idea"):
        chat(client)
    _, answer = post(client, *chatting(stream=True, max_tokens=60))
    *events, error, done = [e for e in answer.split("\n\n") if e.startswith("data: ")]
    assert len(events) > 1
    assert "RuntimeError: no idea" in json.loads(error.removeprefix("data: "))["error"]["message"]
    assert done == "data: [DONE]"
    assert chat(client, extra_body={"drafter": "none"}).usage.completion_tokens == 60


# Served


NULLABLE = (
    "temperature top_p max_tokens max_completion_tokens stream stream_options n seed stop logprobs "
    "top_logprobs logit_bias presence_penalty frequency_penalty response_format draft_model "
    "chat_template_kwargs user"
)


@in_one_test("request_", [completion(), chatting()])
def test_null_is_the_default(request_: tuple[str, dict[str, Any]], client: openai.OpenAI) -> None:
    """As OpenAI's clients send it, for every field."""
    path, body = request_
    body = {name: value for name, value in body.items() if name != "max_tokens"}
    nulls = dict.fromkeys(NULLABLE.split())
    replies = [post(client, path, body), post(client, path, body | nulls)]
    assert [status for status, _ in replies] == [200, 200], replies
    choices = [json.loads(answer)["choices"] for _, answer in replies]
    assert choices[0] == choices[1]


@in_one_test("number", [0, 3])
def test_completions_take_a_number_of_logprobs(number: int, client: openai.OpenAI) -> None:
    """That of each token, and so many of the likeliest."""
    reply = complete(client, max_tokens=4, logprobs=number)
    tokens = reply.choices[0].logprobs.model_dump()["content"]
    assert [len(token.get("top_logprobs", ())) for token in tokens] == [number] * 4
    assert all(token["logprob"] <= 0 for token in tokens)


@in_one_test(
    ("ask", "prompts"),
    [(complete, [PROMPT, "the end"]), (complete, [[5, 17, 99], [42, 7]]), (chat, [MESSAGES])],
)
def test_choices_are_the_texts_of_their_prompts_and_seeds(
    ask: Any, prompts: Any, client: openai.OpenAI
) -> None:
    """`n` of each prompt, each with its index, streaming and not; a prompt is counted once."""
    body = {"rule": "match"}
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "extra_body": body}
    alone = [ask(client, one, seed=seed, **options) for one in prompts for seed in (4, 5)]
    expected = [(text_of(reply), reply.choices[0].finish_reason) for reply in alone]
    options |= {"seed": 4, "n": 2}
    several = prompts if ask is complete else prompts[0]
    reply = ask(client, several, **options)
    assert [choice.index for choice in reply.choices] == list(range(len(alone)))
    texts = [text_of(SimpleNamespace(choices=[choice])) for choice in reply.choices]
    assert texts == [text for text, _ in expected]
    wanted = {"include_usage": True}
    *chunks, last = ask(client, several, stream=True, stream_options=wanted, **options)
    assert [said(chunks, i) for i in range(len(alone))] == expected
    assert not last.choices
    for usage in (reply.usage, last.usage):
        assert usage.completion_tokens == sum(one.usage.completion_tokens for one in alone)
        assert usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone[::2])
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert len(usage.speculation["choices"]) == len(alone)
        assert usage.speculation["batched"] is True


def test_without_max_tokens_a_text_ends_with_the_models_positions(client: openai.OpenAI) -> None:
    """The server's own default is cut to what there is room for."""
    reply = client.completions.create(model=MODEL, prompt="ab" * 200)
    assert reply.usage.completion_tokens == 512 - reply.usage.prompt_tokens + 1


KEPT = {"given": ("draft_model", "model", "adapters"), "targets": ("draft_model",)}


@in_one_test("models", KEPT)
def test_a_server_may_be_kept_to_the_models_that_it_was_started_with(
    models: str, folder: Path
) -> None:
    """All of them, or no other draft models; those given have their names still."""
    with serving("--model", str(folder), "--request-models", models) as client:
        for field in KEPT[models]:
            status, answer = post(client, *chatting(**{field: "another"}))
            assert (status, "--request-models any" in answer) == (400, True), answer
        assert post(client, *chatting(model=str(folder), draft_model=MODEL))[0] == 200


LOOPBACK, OTHERS = ("127.0.0.1", "localhost", "::1"), ("0.0.0.0", "::", "", "10.0.0.5", "box.local")


@in_one_test("host", [*LOOPBACK, *OTHERS])
def test_others_may_not_name_draft_models_by_default(host: str) -> None:
    """Where more than this machine can reach the server."""
    flags = {"host": host, "model": "m", "adapter_path": None, "allow_chat_templates": False}
    access = Access.of(Namespace(request_models=None, **flags), "given")
    assert access.allows("draft_model", "another") is (host in LOOPBACK)
    assert access.allows("draft_model", "given")
    assert access.allows("model", "another")


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Anna", "Bert"]},
        "age": {"type": "integer", "minimum": 10, "maximum": 99},
        "likes_cats": {"type": "boolean"},
    },
    "required": ["name", "age", "likes_cats"],
    "additionalProperties": False,
}
JSON_SCHEMA = schema_of(SCHEMA)


def assert_fits(text: str) -> None:
    """It is JSON, and fits the schema."""
    person = json.loads(text)
    assert list(person) == SCHEMA["required"]
    assert person["name"] in ("Anna", "Bert")
    assert 10 <= person["age"] <= 99
    assert isinstance(person["likes_cats"], bool)


def test_a_grammar_is_compiled_apart_and_not_for_longer_than_a_client_waits(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that generates compiles nothing; one that takes too long gets 400."""
    begin, threads = Grammar.begin, []

    def noted(self: Grammar, tokenizer: Any) -> Any:
        if self not in grammar._begun:
            threads.append(threading.current_thread().name)
        return begin(self, tokenizer)

    with monkeypatch.context() as patch:
        patch.setattr(Grammar, "begin", noted)
        unknown = schema_of(SCHEMA | {"title": "one that nobody asked for"})
        assert_fits(text_of(chat(client, response_format=unknown)))
    assert threads
    assert not [name for name in threads if "_run_generate" in name]
    end = threading.Event()
    monkeypatch.setattr(openai_fields, "COMPILE_SECONDS", 0.1)
    monkeypatch.setattr(Grammar, "json_schema", lambda schema: end.wait(60))
    with pytest.raises(openai.BadRequestError, match="not compiled in"):
        chat(client, response_format=JSON_SCHEMA)
    end.set()


def test_a_json_schema_is_kept_to_and_its_structure_is_drafted(client: openai.OpenAI) -> None:
    """The text is that without a drafter, in fewer passes; also drawn, and in later turns."""
    plain = chat(client, response_format=JSON_SCHEMA, extra_body={"drafter": "none"})
    text, accounts = both(client, response_format=JSON_SCHEMA)
    assert_fits(text)
    assert text == text_of(plain)
    assert plain.choices[0].finish_reason == "stop"
    for account in accounts:
        assert (account["batched"], account["drafter"]) == (False, "auto")
        assert account["tokens_per_pass"] > 2
    later = [*MESSAGES, {"role": "assistant", "content": "yes"}, *MESSAGES]
    for seed, messages in enumerate([MESSAGES, later]):
        drawn = {"seed": seed, "temperature": 1.5}
        assert_fits(text_of(chat(client, messages, response_format=JSON_SCHEMA, **drawn)))


def test_a_json_object_is_one(client: openai.OpenAI, folder: Path) -> None:
    """Whatever the model would rather write; a bias for the closing bracket keeps it short."""
    bias = {str(mlx_lm.load(str(folder))[1].encode("}")[0]): 100}
    text = {"type": "text"}
    assert text_of(chat(client, logit_bias=bias, max_tokens=3, response_format=text)) == "}}}"
    assert both(client, logit_bias=bias, response_format={"type": "json_object"})[0] == "{}"
    own: dict[str, Any] = {"type": "json_object", "schema": SCHEMA}
    assert_fits(text_of(chat(client, logit_bias=bias, response_format=own)))


SEEDED = {"temperature": 0.3, "seed": 7}
"""A text that hardly repeats itself, so that there is little to copy but a prediction."""


def test_a_prediction_is_copied_and_the_text_is_unchanged(client: openai.OpenAI) -> None:
    """At least 3 tokens a pass if it is right, streaming and not; a wrong one costs nothing."""
    plain = chat(client, **SEEDED)
    expected = text_of(plain)
    assert plain.usage.speculation["tokens_per_pass"] < 1.5

    def predicted(content: Any, drafter: Any = "auto") -> dict[str, Any]:
        given = {"type": "content", "content": content}
        text, accounts = both(client, prediction=given, extra_body={"drafter": drafter}, **SEEDED)
        assert text == expected
        return accounts[1]

    assert predicted(expected)["tokens_per_pass"] >= 3
    edited = [expected[:30], "something else altogether", expected[36:]]
    assert predicted([{"type": "text", "text": part} for part in edited])["tokens_per_pass"] > 2
    for drafter in ("ngram", ["ngram", "prompt-lookup"]):
        assert predicted(expected, drafter)["tokens_per_pass"] > 2
    wrong = predicted("nobody said this " * 20)
    assert wrong["target_passes"] <= plain.usage.speculation["target_passes"]
    assert predicted(expected, "none").get("drafted", 0) == 0


@FULL
def test_the_old_models_weights_are_freed_before_the_new_ones_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models that fit one at a time are served by turns."""
    folders = [write_model_folder(tmp_path / name, intermediate_size=4096) for name in "ab"]
    module: Any = importlib.import_module("mlx_lm.server")
    load, in_use = module.load, []

    def measured(*args: Any, **kwargs: Any) -> Any:
        mx.clear_cache()
        in_use.append(mx.get_active_memory())
        return load(*args, **kwargs)

    monkeypatch.setattr(module, "load", measured)
    with serving("--model", str(folders[0])) as client:
        for name in (*folders[1::-1], *folders[::-1]):
            complete(client, model=str(name), max_tokens=20)
    assert len(in_use) >= 4
    size = (folders[0] / "model.safetensors").stat().st_size
    assert max(in_use) - in_use[0] < 0.3 * size
