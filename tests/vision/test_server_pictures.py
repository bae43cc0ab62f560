"""Pictures that clients send reach the model: the text is its own, in all protocols."""

from __future__ import annotations

import json
import urllib.request
from base64 import b64encode
from collections.abc import Iterator, Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import specdec_mlx as sd
from engines import Client, ask, running, settled, submit, with_flags
from live import listening
from specdec_mlx.errors import ModelFolderError
from specdec_mlx.server import loading
from specdec_mlx.server.app import make_app
from specdec_mlx.server.models import Models
from specdec_mlx.server.pictures import take_pictures
from specdec_mlx.server.protocols.chat import CHAT

pytestmark = pytest.mark.full
mlx_vlm = pytest.importorskip("mlx_vlm")

import tiny_vision  # noqa: E402  needs mlx-vlm
from tiny_vision import CONFIGS, MARK, START, Processor  # noqa: E402

vision = sd.vision
NUM_TOKENS = 12
SHOWN = START + MARK  # what the template writes for a picture
LOOK, SEE, NEXT = "What is in this one?", "This is what it is:", "Is it in the other one?"
CALL = {"name": "see", "arguments": "{}"}


@cache
def encoded(seed: int) -> str:
    """A picture, as a client sends it."""
    file = BytesIO()
    tiny_vision.image(seed).save(file, "PNG")
    return b64encode(file.getvalue()).decode()


def openai(seed: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(seed)}"}}


def anthropic(seed: int) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": encoded(seed)}
    return {"type": "image", "source": source}


def responses(seed: int) -> dict[str, Any]:
    return {"type": "input_image", "image_url": f"data:image/png;base64,{encoded(seed)}"}


def text(words: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": words}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


PROTOCOLS: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [user(openai(0), text(LOOK))]},
        f"{SHOWN}{LOOK}<|bos|>",
    ),
    "chat, of a tool": (
        "/v1/chat/completions",
        {
            "messages": [
                user(text(LOOK)),
                {"role": "assistant", "tool_calls": [{"id": "1", "function": CALL}]},
                {"role": "tool", "tool_call_id": "1", "content": [text(SEE), openai(0)]},
            ]
        },
        f"{LOOK}<|bos|><|bos|>{SEE}{SHOWN}<|bos|>",
    ),
    "messages": (
        "/v1/messages",
        {"messages": [user(anthropic(0), text(LOOK), anthropic(1))]},
        f"{SHOWN}\n\n{LOOK}\n\n{SHOWN}<|bos|>",
    ),
    "messages, of a tool": (
        "/v1/messages",
        {
            "messages": [
                user(text(LOOK)),
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "1", "name": "see", "input": {}}],
                },
                user(
                    {
                        "type": "tool_result",
                        "tool_use_id": "1",
                        "content": [text(SEE), anthropic(0)],
                    }
                ),
            ]
        },
        f"{LOOK}<|bos|><|bos|>{SEE}\n\n{SHOWN}<|bos|>",
    ),
    "responses": (
        "/v1/responses",
        {"input": [user(responses(0), text(LOOK, "input_text"))]},
        f"{SHOWN}\n\n{LOOK}<|bos|>",
    ),
    "responses, of a tool": (
        "/v1/responses",
        {
            "input": [
                user(text(LOOK, "input_text")),
                {"type": "function_call", "call_id": "1", **CALL},
                {"type": "function_call_output", "call_id": "1", "output": [responses(0)]},
            ]
        },
        f"{LOOK}<|bos|><|bos|>{SHOWN}<|bos|>",
    ),
}
"""Path, body and rendered prompt."""


@pytest.fixture(scope="module", params=CONFIGS)
def served(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An architecture's name, an engine with its tiny model, and the port of a server over it.

    mlx-vlm has read one from its folder, and the others' processors are the tests' own.
    """
    name = request.param
    folder = tiny_vision.write_folder(tmp_path_factory.mktemp("models"), name)
    by_mlx_vlm, by_mlx_lm = vision.load, loading.mlx_lm.load

    def load(path: Any, **options: Any) -> tuple[Any, Any]:
        if str(path) != str(folder):
            return by_mlx_vlm(path, **options)
        return vision.VisionModel(tiny_vision.build.__wrapped__(name)), Processor(name)

    def load_text(path: Any, **options: Any) -> Any:
        if str(path) == str(folder):
            raise ValueError("Model type is not supported.")
        return by_mlx_lm(path, **options)

    with pytest.MonkeyPatch.context() as patch:
        if name != "qwen2_5_vl":
            patch.setattr(vision, "load", load)
            patch.setattr(loading.mlx_lm, "load", load_text)
        with (
            running(folder, flags=with_flags(num_draft_tokens=4)) as engine,
            listening(make_app(engine, engine.settings), lifespan="off") as port,
        ):
            yield name, engine, port


def post(
    port: int, path: str, body: dict[str, Any], drafted: list[int] | None = None
) -> tuple[str, int]:
    """The text of an answer, and how many tokens of the prompt were not read again.

    drafted: takes how many tokens were drafted.
    """
    data = json.dumps({"max_tokens": NUM_TOKENS, "temperature": 0, **body}).encode()
    asked = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data)
    with urllib.request.urlopen(asked, timeout=240) as reply:
        said = json.load(reply)
    if drafted is not None:
        drafted.append(said["usage"]["speculation"]["drafted"])
    match said:
        case {"choices": [{"message": message}], "usage": usage}:
            return message["content"], usage["prompt_tokens_details"]["cached_tokens"]
        case {"type": "message", "content": blocks, "usage": usage}:
            return "".join(b["text"] for b in blocks), usage["cache_read_input_tokens"]
        case {"output": items, "usage": usage}:
            said = "".join(item["content"][0]["text"] for item in items)
            return said, usage["input_tokens_details"]["cached_tokens"]
    raise AssertionError(said)


def expected(
    served: Any, prompt: str, seeds: Sequence[int] = (0, 1), num_tokens: int = NUM_TOKENS
) -> str:
    """The text of the vision model after a rendered prompt with pictures, without drafts."""
    name, engine, _ = served
    model, processor = (
        vision.VisionModel(tiny_vision.build(name)),
        engine.models.loaded.sight.processor,
    )
    images = [tiny_vision.image(seed) for seed in seeds[: prompt.count(MARK)]]
    tokens, options = vision.read_prompt(model, processor, prompt, images)
    written = sd.speculate(model, tokens, None, max_tokens=num_tokens, **options)
    tokenizer = engine.models.loaded.tokenizer
    detokenizer = tokenizer.detokenizer
    for token in written:
        if token.token not in tokenizer.eos_token_ids:
            detokenizer.add_token(token.token)
    detokenizer.finalize()
    return str(detokenizer.text)


@pytest.mark.parametrize("kind", PROTOCOLS)
def test_a_text_after_a_picture_is_the_vision_models_own(served: Any, kind: str) -> None:
    """In what a user says and in what a tool gives back, where the client put it."""
    path, body, prompt = PROTOCOLS[kind]
    said, _ = post(served[2], path, body)
    assert said == expected(served, prompt)
    others = ([seed, seed + 1] for seed in (7, 9, 11))
    assert any(said != expected(served, prompt, seeds) for seeds in others)


def chat(port: int, *messages: dict[str, Any]) -> tuple[str, int]:
    return post(port, "/v1/chat/completions", {"messages": list(messages)})


def test_two_pictures_never_share_what_was_read(served: Any) -> None:
    """Their tokens are alike, and so is what is said before them and after."""
    _, engine, port = served
    for seed in (20, 21, 20):
        said, num_cached = chat(port, user(text(NEXT), openai(seed), text(LOOK)))
        assert said == expected(served, f"{NEXT}{SHOWN}{LOOK}<|bos|>", [seed])
        settled(engine)
    assert num_cached > len(engine.models.loaded.tokenizer.encode(NEXT))


def test_a_conversation_goes_on_from_its_pictures(served: Any) -> None:
    """What was read of the first picture is not read again, also when another one comes."""
    name, engine, port = served
    first = user(openai(30), text(LOOK))
    said, _ = chat(port, first)
    settled(engine)
    begun = f"{SHOWN}{LOOK}<|bos|>"
    assert said == expected(served, begun, [30])
    for turn, more, seeds in (
        (user(text(NEXT)), NEXT, [30]),
        (user(openai(31), text(NEXT)), f"{SHOWN}{NEXT}", [30, 31]),
    ):
        said, num_cached = chat(port, first, turn)
        settled(engine)
        assert said == expected(served, f"{begun}{more}<|bos|>", seeds)
        # a window that is full does not go back
        assert num_cached > tiny_vision.ROWS[name] or name in ("gemma3", "qwen3_5")


def test_a_text_without_pictures_is_the_same_after_one_with(served: Any) -> None:
    """Also one that begins alike: the positions of its caches are those of a text."""
    _, engine, port = served
    chat(port, user(text(LOOK), openai(40), text(NEXT)))
    settled(engine)
    for words in (LOOK + NEXT, LOOK + SEE, NEXT):
        assert chat(port, user(text(words)))[0] == expected(served, f"{words}<|bos|>")
        settled(engine)


def test_a_text_after_a_picture_is_drafted_for(served: Any) -> None:
    """By look-up, in the words that it repeats, and the text is the same."""
    words = "the other one, or the other one, or the other one, or"
    body = {"messages": [user(openai(60), text(words))], "drafter": "ngram", "max_tokens": 48}
    said = post(served[2], "/v1/chat/completions", body, drafted := [])[0]
    assert said == expected(served, f"{SHOWN}{words}<|bos|>", [60], 48)
    assert sum(drafted) > 0


def test_words_for_pictures_in_a_text_are_no_pictures(served: Any) -> None:
    """As in the files of one who works on vision models."""
    written = f"A mark is {MARK}"
    said, _ = chat(served[2], user(text(written), openai(50)))
    broken = written.replace(MARK, f"{MARK[0]} {MARK[1:]}")
    assert said == expected(served, f"{broken}{SHOWN}<|bos|>", [50])


def test_tokens_of_pictures_are_counted(served: Any) -> None:
    _, engine, port = served
    body = PROTOCOLS["messages"][1]
    data = json.dumps(body).encode()
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/v1/messages/count_tokens", data)
    chat(port, user(openai(0)))
    with urllib.request.urlopen(asked, timeout=240) as reply:
        counted = json.load(reply)["input_tokens"]
    encode = engine.models.loaded.tokenizer.encode
    alone = len(encode(PROTOCOLS["messages"][2].replace(MARK, ""), add_special_tokens=False))
    assert counted == alone + 2 * tiny_vision.ROWS[served[0]]
    body = {"messages": [user(openai(0), text(LOOK))]}
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/tokenize", json.dumps(body).encode())
    with urllib.request.urlopen(asked, timeout=240) as reply:
        tokens = json.load(reply)["tokens"]
    assert tokens.count(tiny_vision.IDS[MARK]) == tiny_vision.ROWS[served[0]]


def test_a_model_is_loaded_with_what_sees_when_a_picture_comes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Until then its texts are written as without mlx-vlm: several together."""
    folder = tiny_vision.write_folder(tmp_path)
    caplog.set_level("INFO")
    with running(folder, flags=with_flags()) as engine:
        ask(engine)
        assert engine.models.loaded.sight is None
        assert engine.models.loaded.has_rows
        with listening(make_app(engine, engine.settings), lifespan="off") as port:
            chat(port, user(openai(0)))
            loaded = engine.models.loaded
            assert loaded.sight is not None
            chat(port, user(text(LOOK)))
            chat(port, user(openai(1)))
        assert engine.models.loaded is loaded
    assert caplog.text.count("is loaded by mlx-vlm") == 1


def test_a_picture_waits_for_the_texts_that_are_written(tmp_path: Path) -> None:
    """It has the model loaded anew, which they would lose."""
    long = {"prompt": LOOK, "max_tokens": 100}
    with running(tiny_vision.write_folder(tmp_path), flags=with_flags()) as engine:
        alone = ask(engine, **long).text
        first, second = submit(engine, **long), Client()
        first.until_text()
        (request,) = CHAT.read({"messages": [user(openai(0))], "max_tokens": 4}).requests
        take_pictures(request, engine.models.can_see)
        second.ticket = engine.submit(request, second.queue.put)
        assert first.wait().text == alone
        assert second.wait().ended
        assert engine.models.loaded.sight is not None


def test_a_conversion_without_what_sees_has_its_pictures_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As mlx-lm converts models: the configuration still speaks of vision."""
    folder = tiny_vision.write_folder(tmp_path)
    weights = mx.load(str(folder / "model.safetensors"))
    text_only = {k: v for k, v in weights.items() if not k.startswith("vision_tower")}
    mx.save_safetensors(str(folder / "model.safetensors"), text_only, metadata={"format": "mlx"})
    named = user(text("[image: not shown to this model]" + LOOK))
    with (
        running(folder, flags=with_flags()) as engine,
        listening(make_app(engine, engine.settings), lifespan="off") as port,
    ):
        for _ in range(2):
            assert chat(port, user(openai(0), text(LOOK)))[0] == chat(port, named)[0]
        assert engine.models.loaded.sight is None
    assert caplog.text.count("is shown no pictures") == 1


def test_files_keep_no_caches_of_pictures(tmp_path: Path) -> None:
    """They would not tell which pictures their tokens stand for, nor where a text goes on."""
    folder, kept = tiny_vision.write_folder(tmp_path), tmp_path / "kept"
    with (
        running(folder, flags=with_flags(), prompt_cache=kept) as engine,
        listening(make_app(engine, engine.settings), lifespan="off") as port,
    ):
        chat(port, user(text(LOOK)))
        settled(engine)
        files = list(kept.iterdir())
        for seed in (0, 1):
            chat(port, user(openai(seed), text(LOOK)))
            settled(engine)
    assert files == list(kept.iterdir()) != []


def test_code_in_a_models_folder_is_not_run(tmp_path: Path) -> None:
    """mlx-vlm would; mlx-lm asks for a flag."""
    folder = tiny_vision.write_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_file": "model.py"}))
    (folder / "model.py").write_text(f"open({str(folder / 'was_run')!r}, 'w')")
    with running(None, flags=with_flags()) as engine:
        for pictures in ({}, {"0": b""}):
            with pytest.raises(ModelFolderError):
                ask(engine, model=str(folder), pictures=pictures)
    assert not (folder / "was_run").exists()


def test_settings_that_a_vision_model_does_not_take_have_pictures_named(tmp_path: Path) -> None:
    folder = tiny_vision.write_folder(tmp_path)

    def sees(**settings: Any) -> bool:
        given = sd.server.flags.ServerSettings(model=str(folder), **settings)
        return Models(given).can_see(sd.server.requests.TextRequest())

    assert sees()
    assert not sees(kv_bits=8)
    assert not sees(adapter_path="an/adapter")
