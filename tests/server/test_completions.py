"""OpenAI's completions of texts: what a body becomes, and what events become."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import openai
import pytest
from openai.types import Completion

from live import openai_at, scripted, served
from selection import in_one_test
from specdec_mlx.server.protocols.completions import COMPLETIONS, MOST_PROMPTS
from specdec_mlx.server.requests import (
    Ended,
    Event,
    PromptProgress,
    RequestError,
    TextPiece,
    TokenLogprob,
    Transcript,
)
from wires import each_wrong, events_in

ENDED = Ended("length", num_prompt=4, num_cached=1, num_written=3)


@in_one_test(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        ([5, 6], [[5, 6]]),
        (["a", [5], ""], ["a", [5], ""]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
def test_prompts_are_texts_or_tokens_one_or_several(prompt: Any, expected: Any) -> None:
    asked = COMPLETIONS.read({"prompt": prompt, "n": 2, "seed": 4})
    found = [(request.prompt, request.seed) for request in asked.requests]
    assert found == [(one, seed) for one in expected for seed in (4, 5)]
    assert all(request.messages is None for request in asked.requests)


def test_fields_of_completions_reach_the_engine() -> None:
    body = {"prompt": "a", "echo": True, "logprobs": 3, "max_tokens": 0, "stop": "x", "best_of": 1}
    (request,) = COMPLETIONS.read({**body, "suffix": "", "user": None}).requests
    told = request.echo, request.num_logprobs, request.max_tokens, request.stop
    assert told == (True, 3, 0, ["x"])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"suffix": "x"}, "suffix: models here continue a text"),
    ({"best_of": 3, "n": 2}, "best_of: texts are not chosen among"),
    ({"prompt": None}, "required field `prompt`"),
    ({"prompt": []}, "prompt: expected a text, token ids, or a list of 1 to 128"),
    ({"prompt": ["a", 3]}, "prompt: expected a text"),
    ({"prompt": [True]}, "prompt.0.: expected `int . str . array`, got True"),
    ({"prompt": [5, -1]}, "prompt.1.: expected `int` >= 0, got -1"),
    ({"prompt": [[5, -1]]}, "prompt.0..1.: expected `int` >= 0, got -1"),
    ({"prompt": ["a"] * (MOST_PROMPTS + 1)}, "prompt: expected a text"),
    ({"max_tokens": 0}, "max_tokens: expected `int` >= 1"),
    ({"logprobs": 21}, "logprobs: expected `int` <= 20, got 21"),
    ({"echo": "yes"}, "echo: expected `bool`, got 'yes'"),
]


@in_one_test(("body", "words"), REFUSED)
def test_a_wrong_body_is_refused_in_words(body: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        COMPLETIONS.read({"prompt": "a", **body})


def test_a_body_is_read_or_refused_whatever_stands_where() -> None:
    body = {"prompt": [[5], "a"], "echo": True, "best_of": 1, "logprobs": 1, "suffix": ""}
    assert each_wrong(COMPLETIONS, body) > 20


FIRST = TokenLogprob(3, b"ab", math.nan)
SECOND = TokenLogprob(4, b"\xc3", -1.0, [(5, b"x", -0.5)])
THIRD = TokenLogprob(6, b"\xa9", -2.0, [(6, b"\xa9", -2.0), (7, b"\x80", -3.0)])
EVENTS: Sequence[Event] = [
    PromptProgress(4, 4, 1),
    TextPiece("ab", logprobs=[FIRST]),
    TextPiece("é", logprobs=[SECOND, THIRD]),
    ENDED,
]


def test_log_probabilities_are_in_the_form_of_completions() -> None:
    """That of a first token is null; what is likeliest has the written token among it."""
    asked = COMPLETIONS.read({"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 1})
    written = Transcript()
    for event in EVENTS:
        written.add(event)
    reply = COMPLETIONS.reply(asked).build([written])
    (choice,) = reply["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abé", "length")
    content = choice["logprobs"].pop("content")
    assert choice["logprobs"] == {
        "tokens": ["ab", "�", "�"],
        "token_logprobs": [None, -1.0, -2.0],
        "top_logprobs": [None, {"x": -0.5, "�": -1.0}, {"�": -2.0}],
        "text_offset": [0, 2, 3],
    }
    assert [entry["id"] for entry in content] == [4, 6]
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


def test_a_stream_says_what_a_whole_reply_says() -> None:
    usage = {"include_usage": True}
    body = {"prompt": ["ab", "cd"], "logprobs": 1, "stream_options": usage, "stream": True}
    stream = COMPLETIONS.reply(COMPLETIONS.read(body))
    raw = b"".join(stream.begin())
    for event in EVENTS:
        for choice in (1, 0):
            raw += b"".join(stream.write(choice, event))
    raw += stream.keepalive() + b"".join(stream.end())
    *chunks, last = events_in(raw)
    for chunk in chunks:
        Completion.model_validate({**chunk, "choices": []})
    own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == 1]
    assert "".join(part["text"] for part in own) == "abé"
    assert [part["finish_reason"] for part in own] == [None, None, "length"]
    assert [part["logprobs"]["text_offset"] for part in own] == [[0], [2, 3], []]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 6)


# A model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models") / "model"


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[openai.OpenAI]:
    with scripted() as script, served(script, folder) as url:
        yield openai_at(url)


TEXTS = ["the cat in the hat", "a cat"]


def test_an_echoed_prompt_has_the_log_probabilities_of_one_pass(
    client: openai.OpenAI, folder: Path
) -> None:
    """As harnesses read it that score a continuation: from the length of its context on."""
    model, tokenizer = mlx_lm.load(str(folder))
    prompts = [tokenizer.encode(text) for text in TEXTS]
    reply = client.completions.create(
        model="m", prompt=prompts, max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1
    )
    assert [choice.index for choice in reply.choices] == [0, 1]
    for text, prompt, choice in zip(TEXTS, prompts, reply.choices, strict=True):
        logits = model(mx.array([prompt]))[0].astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        expected = [logprobs[i, token].item() for i, token in enumerate(prompt[1:])]
        found = choice.logprobs
        assert choice.text.startswith(text)
        assert found.token_logprobs[0] is None
        assert found.token_logprobs[1:-1] == pytest.approx(expected, abs=1e-4)
        assert "".join(found.tokens[:-1]) == text
        ends = accumulate(map(len, found.tokens[:-1]), initial=0)
        assert found.text_offset == [*ends]
        greedy = [logprobs[i].argmax().item() == token for i, token in enumerate(prompt[1:])]
        top = [max(each.values()) for each in found.top_logprobs[1:-1]]
        assert [a == b for a, b in zip(found.token_logprobs[1:-1], top, strict=True)] == greedy


def test_a_prompt_can_be_scored_without_writing(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "m", "prompt": TEXTS[0], "echo": True, "logprobs": 0}
    reply = client.completions.create(max_tokens=0, **asked)
    assert (reply.choices[0].text, reply.usage.completion_tokens) == (TEXTS[0], 0)
    written = client.completions.create(max_tokens=3, **asked)
    chunks = [*client.completions.create(max_tokens=3, stream=True, **asked)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == written.choices[0].text
    assert written.choices[0].text.startswith(TEXTS[0])
    assert len(written.choices[0].logprobs.tokens) == len(reply.choices[0].logprobs.tokens) + 3


def test_choices_are_the_texts_of_their_prompts_and_seeds(client: openai.OpenAI) -> None:
    """`n` of each prompt, each with its index, streaming and not; a prompt is counted once."""
    options: dict[str, Any] = {"model": "m", "max_tokens": 6, "temperature": 1.0}
    options |= {"extra_body": {"rule": "match"}}
    alone = [
        client.completions.create(prompt=prompt, seed=seed, **options)
        for prompt in TEXTS
        for seed in (4, 5)
    ]
    options |= {"seed": 4, "n": 2, "prompt": TEXTS}
    reply = client.completions.create(**options)
    expected = [one.choices[0].text for one in alone]
    assert [(c.index, c.text) for c in reply.choices] == [*enumerate(expected)]
    parts = [chunk.choices[0] for chunk in client.completions.create(stream=True, **options)]
    for index, text in enumerate(expected):
        assert "".join(part.text for part in parts if part.index == index) == text
    assert reply.usage.completion_tokens == sum(one.usage.completion_tokens for one in alone)
    assert reply.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone[::2])
