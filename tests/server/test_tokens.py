"""Tokens of texts and chats, and templates that are applied, over a model that is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from mlx_lm.utils import load_tokenizer

from engines import ASKED, running, with_flags
from live import listening, post
from specdec_mlx.server.app import make_app
from specdec_mlx.server.tokens import tokenize

TEXT = "the cat in the hat"


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[tuple[str, Any]]:
    with (
        running(folder, flags=with_flags(), any_model_name=True) as engine,
        listening(make_app(engine, engine.settings), lifespan="off") as port,
    ):
        yield f"http://127.0.0.1:{port}", load_tokenizer(folder)


def test_tokens_are_the_tokenizers_and_come_back_as_the_text(served: tuple[str, Any]) -> None:
    url, tokenizer = served
    for add in True, False:
        body = {"model": "any", "prompt": TEXT, "add_special_tokens": add}
        status, text = post(f"{url}/v1/tokenize", body)
        tokens = tokenizer.encode(TEXT, add_special_tokens=add)
        reply = json.loads(text)
        assert (status, reply["tokens"], reply["count"]) == (200, tokens, len(tokens))
        assert reply["max_model_len"] > len(tokens)
    status, text = post(f"{url}/detokenize", {"model": "any", "tokens": tokens})
    assert (status, json.loads(text)) == (200, {"prompt": TEXT})


def test_special_tokens_are_left_out_where_a_request_says_so() -> None:
    """With a tokenizer that puts one before each prompt."""
    tokenizer = Mock(
        encode=lambda text, add_special_tokens=True: [0] * add_special_tokens + [7] * len(text),
        get_vocab=lambda: {"a": 7},
        bos_token=None,
        has_chat_template=False,
    )
    models = Mock(loaded_for=lambda request: None, tokenizer_for=lambda request: tokenizer)
    engine = Mock(models=models)
    assert tokenize(engine, {"prompt": "abc"})["tokens"] == [0, 7, 7, 7]
    bare = tokenize(engine, {"prompt": "abc", "add_special_tokens": False})
    assert bare == {"count": 3, "max_model_len": None, "tokens": [7, 7, 7]}


def test_a_chat_is_read_under_its_template(served: tuple[str, Any]) -> None:
    url, tokenizer = served
    text = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, tokenize=False)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert json.loads(post(f"{url}/tokenize", {"messages": ASKED})[1])["tokens"] == tokens
    assert json.loads(post(f"{url}/apply-template", {"messages": ASKED})[1]) == {"prompt": text}


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("tokenize", {}, "prompt"),
    ("tokenize", {"prompt": ["a", "b"]}, "one text"),
    ("tokenize", {"prompt": "a " * 10**6}, "positions"),
    ("tokenize", {"prompt": "a " * 10**6, "add_special_tokens": False}, "positions"),
    ("tokenize", {"messages": [{"role": "user", "content": "a " * 10**6}]}, "positions"),
    ("detokenize", {}, "tokens"),
    ("detokenize", {"tokens": [1], "model": 5}, "model: expected"),
    ("detokenize", {"tokens": "a"}, "tokens"),
    ("detokenize", {"tokens": [-1]}, "tokens"),
    ("detokenize", {"tokens": [10**9]}, "tokens"),
    ("detokenize", {"tokens": [True]}, "tokens"),
    ("apply-template", {"prompt": "a"}, "messages is missing"),
]


def test_wrong_bodies_are_refused_in_words(served: tuple[str, Any]) -> None:
    for path, body, words in WRONG:
        status, text = post(f"{served[0]}/{path}", body)
        assert (status, words in json.loads(text)["error"]["message"]) == (400, True), text
    assert post(f"{served[0]}/tokenize", {"model": "/none", "prompt": "a"})[0] == 404
