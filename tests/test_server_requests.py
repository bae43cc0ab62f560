"""What clients may ask of the server, and what it answers to those that ask for the impossible."""

from __future__ import annotations

import importlib
import json
import threading
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import mlx.core as mx
import mlx_lm
import openai
import pytest
from huggingface_hub.errors import CacheNotFound
from mlx.utils import tree_flatten
from pydantic import BaseModel, ConfigDict, Field

from selection import in_one_test
from serving import post, serving
from specdec_mlx.drafters import grammar
from specdec_mlx.drafters.grammar import Grammar
from specdec_mlx.drafters.suffix import SuffixSession
from specdec_mlx.mlx_lm_plugin import openai_fields
from specdec_mlx.mlx_lm_plugin.requests import Access
from specdec_mlx.mlx_lm_plugin.server import SpeculatingGenerator
from tiny_model_folder import write_model_folder

PROMPT = "the cat in the hat and the other cat in the hat"
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
MODEL = "default_model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[openai.OpenAI]:
    with serving("--model", str(folder), "--draft-length", "4") as running:
        yield running


def complete(client: openai.OpenAI, **more: Any) -> Any:
    """A short chat that is always the same."""
    options = {"max_tokens": 60, "temperature": 0.0, "messages": MESSAGES} | more
    return client.chat.completions.create(model=MODEL, **options)


def text_of(reply: Any) -> str:
    return str(reply.choices[0].message.content)


def streamed(client: openai.OpenAI, **more: Any) -> tuple[str, dict[str, Any]]:
    """The text and the account of a stream."""
    chunks = list(complete(client, stream=True, **more))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    return text, chunks[-1].speculation


# What is refused


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "completions", {"prompt": PROMPT, "max_tokens": 2, **fields}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "chat/completions", {"messages": MESSAGES, "max_tokens": 2, **fields}


def schema_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def nested(levels: int) -> dict[str, Any]:
    return {"items": nested(levels - 1)} if levels else {}


REFUSED: dict[str, tuple[tuple[str, dict[str, Any]], str]] = {
    "unknown drafter": (
        completion(drafter="nothing"),
        "Unknown drafter 'nothing'. Known: auto, cascade, lookahead, ",
    ),
    "a draft model that is not there": (completion(drafter="model"), "needs --draft-model"),
    "a drafter's options": (completion(drafter="ngram:max_order=9"), "Unknown drafter"),
    "a drafter that is no name": (completion(drafter=3), "drafter must be a name"),
    "an endless list of drafters": (completion(drafter=["ngram"] * 1000), "at most 8"),
    "a drafter and a draft model": (
        completion(drafter="ngram", draft_model="some/model"),
        "not both",
    ),
    "a negative draft length": (completion(draft_length=-1), "draft_length must be"),
    "a draft length that is none": (completion(draft_length=True), "draft_length must be"),
    "a policy that is none": (completion(draft_length="often"), "auto or heuristic"),
    "an endless name": (completion(drafter="x" * 100_000), "Unknown drafter 'xxx"),
    "unknown rule": (completion(rule="nothing"), "Unknown rule 'nothing'. Known: auto"),
    "a rule that is no name": (completion(rule=[]), "rule=[]: expected a name"),
    "a rule in endless brackets": (
        completion(rule="lenient:lenience=" + "(" * 300_000),
        "lenience must be a number, true or false",
    ),
    "a rule in endless signs": (
        completion(rule="lenient:lenience=" + "-" * 300_000 + "1"),
        "lenience must be a number, true or false",
    ),
    "a rule with text": (completion(rule="lenient:lenience=x"), "must be a number, true or false"),
    "a rule's option that there is not": (completion(rule="lenient:leniency=1"), "leniency"),
    "a negative temperature": (completion(temperature=-1), "temperature must be at least 0"),
    "an empty prompt": (completion(prompt=""), "The prompt is empty."),
    "several prompts of which one is none": (completion(prompt=["a", 3]), "prompt must be a text"),
    "no prompts": (completion(prompt=[]), "prompt must be a text, token ids, or a list of 1 to"),
    "too many prompts": (completion(prompt=["a"] * 129), "a list of 1 to 128 of either"),
    "tokens that there are not": (completion(prompt=[5, 10**6]), "holds token 1000000"),
    "tokens below the vocabulary": (completion(prompt=[5, -1]), "holds token -1"),
    "a prompt beyond the model's positions": (
        completion(prompt="ab" * 1000),
        "The prompt has 2000 tokens; there are 512 positions",
    ),
    "more tokens than there are positions for": (
        completion(prompt="abc", max_tokens=10**30),
        "after the 3 tokens of the prompt there is room for 510.",
    ),
    "more tokens by another name": (chat(max_completion_tokens=5000), "there is room for "),
    "a temperature that is none": (completion(temperature=float("nan")), "a finite number"),
    "a draft model that is none": (completion(draft_model=["a"]), "draft_model must be a text"),
    "log-probabilities that are none": (completion(logprobs="3"), "logprobs must be a boolean"),
    "a template": (
        chat(chat_template_kwargs={"chat_template": "{% for a in range(10 ** 8) %}{% endfor %}"}),
        "chat_template cannot be set by a request",
    ),
    "a prompt that is padded": (
        chat(chat_template_kwargs={"padding": "max_length", "max_length": 10**8}),
        "max_length, padding cannot be set",
    ),
    "a schema with many patterns": (
        chat(
            response_format=schema_of({"patternProperties": {f"^{i}.*$": {} for i in range(5000)}})
        ),
        "5000 patternProperties; at most ",
    ),
    "a large schema": (chat(response_format=schema_of({"const": "x" * 2**17})), "characters"),
    "a deep schema": (chat(response_format=schema_of(nested(150))), "levels"),
    "no prompt": (("completions", {}), "prompt must be a text"),
    "no messages": (chat(messages=[]), "at least one message"),
    "messages that are none": (chat(messages=["hello"]), "objects with a role"),
    "no role": (chat(messages=[{"content": "hello"}]), "objects with a role"),
    "no bias": (completion(logit_bias={"5": None}), "expected a number for token 5"),
    "a bias for no token": (completion(logit_bias={"x": 1.0}), "logit_bias"),
    "a bias beyond the vocabulary": (
        completion(logit_bias={"500000": 1.0}),
        "there is no token 500000; the model has 0 to ",
    ),
    "a bias below the vocabulary": (chat(logit_bias={"-1": 1.0}), "there is no token -1"),
    "a negative seed": (completion(seed=-1), "seed must be an int from 0"),
    "a seed that is too large": (completion(seed=2**64), "seed must be an int from 0"),
    "a seed that is none": (completion(seed=True), "seed must be an int from 0"),
    "no choices": (completion(n=0), "n must be an int from 1 to 32, not 0"),
    "too many choices": (chat(n=33), "n must be an int from 1 to 32, not 33"),
    "choices that are none": (chat(n=True), "n must be an int from 1 to 32, not True"),
    "a stop that is no text": (completion(stop=5), "stop must be a text"),
    "stream options that are none": (completion(stream_options=3), "stream_options must be"),
    "no format": (chat(response_format="json"), "text, json_object or json_schema"),
    "a format without a schema": (
        chat(response_format={"type": "json_schema"}),
        'expected {"json_schema": {"schema": {...}}}',
    ),
    "a schema that is none": (
        chat(response_format={"type": "json_schema", "json_schema": {"schema": {"type": 3}}}),
        "This is no json_schema that can be followed",
    ),
    "no prediction": (chat(prediction="text"), "prediction: expected"),
    "a prediction of pictures": (
        chat(prediction={"type": "content", "content": [{"type": "image_url"}]}),
        "prediction: expected",
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@in_one_test("case", REFUSED)
def test_a_bad_request_gets_400_in_words_and_the_next_one_is_served(
    case: str, stream: bool, client: openai.OpenAI
) -> None:
    """Before a stream begins, its answer is the same."""
    (path, body), words = REFUSED[case]
    status, answer = post(client, path, {**body, "stream": stream})
    assert (status, words in json.loads(answer)["error"]["message"]) == (400, True), answer
    assert len(answer) < 1200
    assert complete(client, max_tokens=2).usage.completion_tokens == 2


def test_a_model_that_cannot_be_loaded_is_404_in_words_and_an_adapter_400(
    client: openai.OpenAI, folder: Path, tmp_path: Path
) -> None:
    """What the client would see; then the server's own model is loaded again."""
    with pytest.raises(openai.NotFoundError, match="There is no folder nowhere/at/all"):
        client.completions.create(model="nowhere/at/all", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError, match="is no folder with an adapter_config"):
        client.completions.create(
            model=str(folder), prompt=PROMPT, extra_body={"adapters": str(tmp_path)}
        )
    assert complete(client, max_tokens=2).usage.completion_tokens == 2


def test_a_server_whose_thread_died_says_that_it_is_not_available(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503, the status that load balancers know, and not that something was not found."""
    monkeypatch.setattr(SpeculatingGenerator, "generation_available", lambda self: False)
    status, answer = post(client, *chat())
    assert status == 503
    assert "generation thread died" in json.loads(answer)["error"]["message"]


@pytest.mark.parametrize("drafter", ["none", "prompt-lookup"])
def test_more_of_the_likeliest_tokens_than_there_are_are_all_of_them(
    drafter: str, client: openai.OpenAI
) -> None:
    """In a batch, where such a request without a drafter is served, it would end the server."""
    expected = text_of(complete(client))
    reply = complete(client, extra_body={"top_k": 500_000, "drafter": drafter})
    assert text_of(reply) == expected
    drawn = complete(client, temperature=1.0, extra_body={"top_k": 500_000, "drafter": drafter})
    assert drawn.usage.completion_tokens > 0


def test_json_that_is_nested_without_end_is_refused(client: openai.OpenAI) -> None:
    """Python's own reader gives up on it; the connection is not dropped."""
    status, answer = post(client, "completions", '{"prompt": ' + "[" * 100_000)
    assert status == 400
    assert "error" in json.loads(answer)


def test_a_long_draft_is_cut_to_what_a_request_may_have(client: openai.OpenAI) -> None:
    """A client written for another server may ask for any number; it gets at most 64."""
    expected = text_of(complete(client))
    for name in ("num_draft_tokens", "draft_length"):
        reply = complete(client, extra_body={name: 100_000})
        assert text_of(reply) == expected
        assert 4 < len(reply.usage.speculation["acceptance_by_position"]) <= 64


def test_requests_do_not_look_through_the_installed_packages(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known since the server started, also for a list of names."""
    monkeypatch.setattr("specdec_mlx.options.entry_points", pytest.fail)
    reply = complete(client, extra_body={"drafter": ["ngram", "none", "prompt-lookup"]})
    assert reply.usage.speculation["drafter"] == "ngram+prompt-lookup"


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that raises in the middle of a generation."""
    propose = SuffixSession.propose
    asked: Counter[SuffixSession] = Counter()

    def raising(self: SuffixSession, limit: int) -> Any:
        asked[self] += 1
        if asked[self] > 20:
            raise RuntimeError("no idea")
        return propose(self, limit)

    monkeypatch.setattr(SuffixSession, "propose", raising)


@pytest.mark.usefixtures("broken")
def test_a_drafter_that_raises_is_an_error_in_words(client: openai.OpenAI) -> None:
    """HTTP 500, since the request is right, and the server serves on."""
    with pytest.raises(openai.InternalServerError, match="RuntimeError: no idea"):
        complete(client)
    assert complete(client, extra_body={"drafter": "none"}).usage.completion_tokens == 60


@pytest.mark.usefixtures("broken")
def test_a_drafter_that_raises_ends_a_stream_with_an_error_event(client: openai.OpenAI) -> None:
    """Behind what was said, and before [DONE], so that no client waits or takes it for the end."""
    with pytest.raises(openai.APIError, match="RuntimeError: no idea"):
        list(complete(client, stream=True))
    _, answer = post(client, *chat(stream=True, max_tokens=60))
    events = [event for event in answer.split("\n\n") if event.startswith("data: ")]
    assert len(events) > 3
    assert (
        "RuntimeError: no idea" in json.loads(events[-2].removeprefix("data: "))["error"]["message"]
    )
    assert events[-1] == "data: [DONE]"


# What is served

NULLABLE = (
    "temperature",
    "top_p",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "stream_options",
    "n",
    "seed",
    "stop",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
    "response_format",
    "draft_model",
    "chat_template_kwargs",
    "user",
)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_null_is_the_default(path: str, client: openai.OpenAI) -> None:
    """As OpenAI's clients send it, for every field."""
    body: dict[str, Any] = {"prompt": PROMPT} if path == "completions" else {"messages": MESSAGES}
    replies = [post(client, path, body), post(client, path, body | dict.fromkeys(NULLABLE))]
    assert [status for status, _ in replies] == [200, 200], replies
    choices = [json.loads(answer)["choices"] for _, answer in replies]
    assert choices[0] == choices[1]


@in_one_test("number", [0, 3])
def test_completions_take_a_number_of_logprobs(number: int, client: openai.OpenAI) -> None:
    """That of each token, and so many of the likeliest."""
    reply = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4, logprobs=number)
    tokens = reply.choices[0].logprobs.model_dump()["content"]
    assert [len(token.get("top_logprobs", ())) for token in tokens] == [number] * 4
    assert all(token["logprob"] <= 0 for token in tokens)


@pytest.mark.parametrize("num_choices", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_are_answered_as_each_alone(
    stream: bool, num_choices: int, client: openai.OpenAI, folder: Path
) -> None:
    """Texts or token ids; the choices of the first prompt come first, and tokens are added up."""
    ids = mlx_lm.load(str(folder))[1].encode("another hat")
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "n": num_choices}
    options |= {"temperature": 1.0, "seed": 4, "extra_body": {"rule": "match"}}
    for prompts in ([PROMPT, "the end"], [ids, ids[:2]]):
        alone = [client.completions.create(prompt=prompt, **options) for prompt in prompts]
        expected = [choice.text for reply in alone for choice in reply.choices]
        if stream:
            wanted = {"stream_options": {"include_usage": True}}
            chunks = list(
                client.completions.create(prompt=prompts, stream=True, **wanted, **options)
            )
            parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
            got = [
                "".join(part.text for part in parts if part.index == i)
                for i in range(len(expected))
            ]
            usage = chunks[-1].usage
        else:
            reply = client.completions.create(prompt=prompts, **options)
            assert [choice.index for choice in reply.choices] == list(range(len(expected)))
            got, usage = [choice.text for choice in reply.choices], reply.usage
        assert got == expected
        counts = [(reply.usage.prompt_tokens, reply.usage.completion_tokens) for reply in alone]
        assert (usage.prompt_tokens, usage.completion_tokens) == tuple(
            map(sum, zip(*counts, strict=True))
        )
    one = client.completions.create(prompt=ids, **options)
    assert one.choices[0].text == alone[0].choices[0].text


def test_without_max_tokens_a_text_ends_with_the_models_positions(client: openai.OpenAI) -> None:
    """The server's own default is cut to what there is room for."""
    reply = client.completions.create(model=MODEL, prompt="ab" * 200)
    assert reply.usage.completion_tokens == 512 - reply.usage.prompt_tokens + 1


def test_max_tokens_is_bounded_by_memory_too(tmp_path: Path) -> None:
    """Where the model has positions without end."""
    folder = write_model_folder(tmp_path / "endless", max_position_embeddings=10**15)
    with serving("--model", str(folder)) as client:
        _, answer = post(client, *completion(max_tokens=10**14))
    room = int(answer.partition("there is room for ")[2].partition(".")[0])
    assert 10**5 < room < 10**11


def test_models_are_listed_where_there_is_no_folder_of_hugging_face(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's own, in valid JSON."""

    def scan() -> Any:
        raise CacheNotFound("no folder", cache_dir=folder)

    monkeypatch.setattr("mlx_lm.server.scan_cache_dir", scan)
    with serving("--model", str(folder)) as client:
        (listed,) = client.models.list().data
        assert client.completions.create(model=listed.id, prompt="a", max_tokens=1).choices


@pytest.mark.parametrize("models", ["given", "targets"])
def test_a_server_may_be_kept_to_the_models_that_it_was_started_with(
    models: str, folder: Path
) -> None:
    """All of them, or no other draft models; those given have their names still."""
    kept = [chat(draft_model=str(folder))]
    kept += [chat(model=str(folder.parent)), chat(adapters="x")] * (models == "given")
    with serving("--model", str(folder), "--request-models", models) as client:
        for path, body in kept:
            status, answer = post(client, path, body)
            assert (status, "--request-models any" in answer) == (400, True), answer
        assert post(client, *chat(model=str(folder), draft_model="default_model"))[0] == 200


LISTENING = {
    "127.0.0.1": True,
    "localhost": True,
    "::1": True,
    "0.0.0.0": False,
    "::": False,
    "": False,
    "192.168.0.5": False,
    "box.local": False,
}


@in_one_test("host", LISTENING)
def test_others_may_not_name_draft_models_by_default(host: str) -> None:
    """Where more than this machine can reach the server."""
    flags = {"host": host, "model": "m", "adapter_path": None, "allow_chat_templates": False}
    access = Access.of(Namespace(request_models=None, **flags), "given")
    assert access.allows("draft_model", "another") is LISTENING[host]
    assert access.allows("draft_model", "given")
    assert access.allows("model", "another")


def test_a_template_may_be_allowed_at_the_start(folder: Path) -> None:
    """It is what the prompt is made by then."""
    with serving("--model", str(folder), "--allow-chat-templates") as client:
        template = {"chat_template_kwargs": {"chat_template": "{{ messages[0]['content'] }}"}}
        reply = complete(client, extra_body=template)
        assert reply.usage.prompt_tokens == len(mlx_lm.load(str(folder))[1].encode(PROMPT))


def test_a_grammar_is_compiled_apart_and_not_for_longer_than_a_client_waits(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that generates compiles nothing; one that takes too long gets 400."""
    llguidance, threads = grammar._llguidance(), []

    class Matcher:
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            threads.append(threading.current_thread().name)
            return llguidance.LLMatcher(*args, **kwargs)

        def __getattr__(self, name: str) -> Any:
            return getattr(llguidance.LLMatcher, name)

    with monkeypatch.context() as patch:
        patch.setattr(grammar, "_llguidance", lambda: SimpleNamespace(LLMatcher=Matcher()))
        assert_fits(text_of(complete(client, response_format=JSON_SCHEMA)))
    assert threads
    assert not [name for name in threads if "_run_generate" in name]
    end = threading.Event()
    monkeypatch.setattr(openai_fields, "COMPILE_SECONDS", 0.1)
    monkeypatch.setattr(Grammar, "json_schema", lambda schema: end.wait(60))
    with pytest.raises(openai.BadRequestError, match="not compiled in"):
        complete(client, response_format=JSON_SCHEMA)
    end.set()


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Anna", "Bert"]},
        "age": {"type": "integer", "minimum": 10, "maximum": 99},
        "likes_cats": {"type": "boolean"},
    },
    "required": ["name", "age", "likes_cats"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}


def assert_fits(text: str) -> None:
    """It is JSON, and fits the schema."""
    person = json.loads(text)
    assert list(person) == ["name", "age", "likes_cats"]
    assert person["name"] in ("Anna", "Bert")
    assert 10 <= person["age"] <= 99
    assert isinstance(person["likes_cats"], bool)


def test_a_json_schema_is_kept_to_and_its_structure_is_drafted(client: openai.OpenAI) -> None:
    """Streaming and not; the text is that without a drafter, in fewer passes."""
    plain = complete(client, response_format=JSON_SCHEMA, extra_body={"drafter": "none"})
    reply = complete(client, response_format=JSON_SCHEMA)
    assert_fits(text_of(reply))
    assert text_of(reply) == text_of(plain)
    assert reply.choices[0].finish_reason == "stop"
    text, account = streamed(client, response_format=JSON_SCHEMA)
    assert text == text_of(reply)
    for stats in (reply.usage.speculation, account):
        assert stats["batched"] is False
        assert stats["tokens_per_pass"] > 2
        assert stats["drafter"] == "auto"


@in_one_test("seed", [1, 2, 3])
def test_a_json_schema_is_kept_to_at_any_temperature(seed: int, client: openai.OpenAI) -> None:
    """Also in a later turn, whose beginning comes from a cache."""
    messages = [*MESSAGES, {"role": "assistant", "content": "yes"}, *MESSAGES]
    for said in (MESSAGES, messages):
        reply = complete(
            client, messages=said, response_format=JSON_SCHEMA, seed=seed, temperature=1.5
        )
        assert_fits(text_of(reply))


def test_the_clients_own_reader_of_answers_gets_an_object(client: openai.OpenAI) -> None:
    """`parse` of the openai client sends the schema of a class, and reads the answer into one."""

    class Person(BaseModel):
        model_config = ConfigDict(extra="forbid")
        name: Literal["Anna", "Bert"]
        age: int = Field(ge=10, le=99)

    reply = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Person, max_tokens=60
    )
    person = reply.choices[0].message.parsed
    assert person is not None
    assert person.name in ("Anna", "Bert")


def test_a_json_object_is_one(client: openai.OpenAI, folder: Path) -> None:
    """Whatever the model would rather write; a bias for the closing bracket keeps it short."""
    close = mlx_lm.load(str(folder))[1].encode("}")[0]
    bias = {str(close): 100}
    assert text_of(complete(client, logit_bias=bias, max_tokens=3)) == "}}}"
    formats: list[Any] = [{"type": "json_object"}, {"type": "json_object", "schema": SCHEMA}]
    reply = complete(client, logit_bias=bias, response_format=formats[0])
    assert (text_of(reply), reply.choices[0].finish_reason) == ("{}", "stop")
    assert streamed(client, logit_bias=bias, response_format=formats[0])[0] == "{}"
    assert_fits(text_of(complete(client, response_format=formats[1])))


def test_a_format_of_text_is_none(client: openai.OpenAI) -> None:
    reply = complete(client, response_format={"type": "text"})
    assert text_of(reply) == text_of(complete(client))


SEEDED = {"temperature": 0.3, "seed": 7}
"""A text that hardly repeats itself, so that there is little to copy but a prediction."""


def predicted(text: str) -> dict[str, Any]:
    return {"type": "content", "content": text}


def test_a_right_prediction_is_copied_and_the_text_is_unchanged(client: openai.OpenAI) -> None:
    """At least 3 tokens a pass, with drafts of 4, from the first pass on; streaming and not."""
    plain = complete(client, **SEEDED)
    expected = text_of(plain)
    assert plain.usage.speculation["tokens_per_pass"] < 1.5
    reply = complete(client, prediction=predicted(expected), **SEEDED)
    text, account = streamed(client, prediction=predicted(expected), **SEEDED)
    assert text_of(reply) == text == expected
    for stats in (reply.usage.speculation, account):
        assert stats["tokens_per_pass"] >= 3
        assert stats["rounds"][0][1] > 0 if "rounds" in stats else True
    assert reply.usage.prompt_tokens == plain.usage.prompt_tokens


def test_a_prediction_may_come_in_parts_and_be_partly_wrong(client: openai.OpenAI) -> None:
    """An edit: the middle was changed."""
    expected = text_of(complete(client, **SEEDED))
    parts = [expected[:30], "something else altogether", expected[36:]]
    given: Any = {
        "type": "content",
        "content": [{"type": "text", "text": part} for part in parts],
    }
    reply = complete(client, prediction=given, **SEEDED)
    assert text_of(reply) == expected
    assert reply.usage.speculation["tokens_per_pass"] > 2


def test_a_wrong_prediction_changes_nothing(client: openai.OpenAI) -> None:
    """Not the text, and hardly the number of passes."""
    plain = complete(client, **SEEDED)
    reply = complete(client, prediction=predicted("nobody said this " * 20), **SEEDED)
    assert text_of(reply) == text_of(plain)
    passes = [r.usage.speculation["target_passes"] for r in (plain, reply)]
    assert passes[1] <= passes[0]


@pytest.mark.parametrize("drafter", ["ngram", ["ngram", "prompt-lookup"]])
def test_a_prediction_is_copied_beside_other_drafters(drafter: Any, client: openai.OpenAI) -> None:
    """The look-up reads it, and comes first where the request has none of its own."""
    expected = text_of(complete(client, **SEEDED))
    options: dict[str, Any] = {
        "prediction": predicted(expected),
        "extra_body": {"drafter": drafter},
    }
    reply = complete(client, **options, **SEEDED)
    assert text_of(reply) == expected
    assert reply.usage.speculation["tokens_per_pass"] > 2


def test_no_drafter_copies_from_no_prediction(client: openai.OpenAI) -> None:
    """Who asks for plain decoding gets it."""
    reply = complete(
        client, prediction=predicted("the cat " * 9), extra_body={"drafter": "none"}, max_tokens=5
    )
    assert reply.usage.speculation.get("drafted", 0) == 0


# What is loaded


def test_the_old_models_weights_are_freed_before_the_new_ones_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models that fit one at a time are served by turns, and what was learned is kept."""
    folders = [
        write_model_folder(tmp_path / name, seed=seed, intermediate_size=4096)
        for seed, name in enumerate("ab")
    ]
    module: Any = importlib.import_module("mlx_lm.server")
    load = module.load
    in_use: list[int] = []
    sizes: list[int] = []

    def measured(*args: Any, **kwargs: Any) -> Any:
        mx.clear_cache()
        in_use.append(mx.get_active_memory())
        loaded = load(*args, **kwargs)
        sizes.append(sum(value.nbytes for _, value in tree_flatten(loaded[0].parameters())))
        return loaded

    monkeypatch.setattr(module, "load", measured)
    with serving("--model", str(folders[0])) as client:
        for name in (*folders[1::-1], *folders[::-1]):
            client.completions.create(model=str(name), prompt=PROMPT, max_tokens=20)
    assert len(in_use) >= 4
    assert max(in_use) - in_use[0] < 0.3 * min(sizes)
