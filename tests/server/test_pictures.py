"""Pictures in requests: what is read of them, what is refused, and how they stand in a text.

None of this needs mlx-vlm; that models see them is tested in tests/vision.
"""

from __future__ import annotations

import json
import sys
from base64 import b64encode
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer
from PIL import Image

from engines import ask, running, with_flags
from selection import in_one_test
from specdec_mlx.server import pictures
from specdec_mlx.server.app import WIRES, refusal
from specdec_mlx.server.flags import ServerSettings
from specdec_mlx.server.models import Models
from specdec_mlx.server.pictures import image_of, replace_pictures, take_pictures
from specdec_mlx.server.prompts import read_prompt
from specdec_mlx.server.requests import RequestError, TextRequest
from tiny_model_folder import write_model_folder


def file_of(color: str = "red", size: tuple[int, int] = (4, 4), form: str = "PNG") -> bytes:
    """A picture of one color."""
    file = BytesIO()
    Image.new("RGB", size, color).save(file, form)
    return file.getvalue()


def url(data: bytes) -> str:
    return f"data:image/png;base64,{b64encode(data).decode()}"


def bodies(source: str) -> dict[str, dict[str, Any]]:
    """A request with a picture, by its path."""
    base64 = {"type": "base64", "media_type": "image/png", "data": source.partition(",")[2]}
    is_data = ";base64," in source
    picture = {"type": "image", "source": base64 if is_data else {"type": "url", "url": source}}
    contents = {
        "/chat/completions": {"type": "image_url", "image_url": {"url": source}},
        "/messages": picture,
        "/responses": {"type": "input_image", "image_url": source},
    }
    name = {"/responses": "input"}
    return {
        path: {name.get(path, "messages"): [{"role": "user", "content": ["a", part, "b"]}]}
        for path, part in contents.items()
    }


def read(path: str, body: dict[str, Any], sees: bool = True) -> TextRequest:
    """A request as the server reads it."""
    (request,) = WIRES[path].read({"max_tokens": 9, **body}).requests
    take_pictures(request, lambda request: sees)
    return request


@pytest.mark.parametrize("path", bodies(""))
def test_a_picture_keeps_its_place_in_the_text(path: str) -> None:
    """Its bytes stand apart, once, and no base64 is left in the messages."""
    data = file_of()
    body = bodies(url(data))[path]
    (name,) = body
    body[name] *= 2
    request = read(path, body)
    assert list(request.pictures.values()) == [data]
    (content,) = {message["content"] for message in request.messages or ()} or {""}
    assert b64encode(data).decode()[:20] not in content
    named = replace_pictures(content).split("[image: not shown to this model]")
    assert named[0].strip() == "a"
    assert named[-1].strip() == "b"


REFUSED: list[tuple[str, str, str]] = [
    ("an address", "https://example.org/a.png", "fetches no addresses"),
    ("an address of this machine", "http://127.0.0.1:8080/", "fetches no addresses"),
    ("a file", "file:///etc/hostname", "reads no files"),
    ("a path", "/etc/hostname", "reads no files"),
    ("nothing", "", "must be in the request"),
    ("no base64", "data:image/png,abc", "must be in the request"),
    ("half a base64", "data:image/png;base64,abcde", "no base64"),
    ("no picture", url(b"GIF89 of words"), "cannot be read"),
    ("a picture that was cut", url(file_of(size=(64, 64))[:60]), "cannot be read"),
    ("a program that draws", url(b"%!PS-Adobe-3.0 EPSF-3.0\n"), "cannot be read"),
    ("a format that few read", url(file_of(form="TIFF")), "cannot be read"),
]


@in_one_test(("what", "source", "words"), REFUSED)
def test_what_is_no_picture_is_refused_in_the_protocols_form(
    what: str, source: str, words: str
) -> None:
    """Nothing is fetched and no file is read; where no model sees, it is named as it always was."""
    for path, body in bodies(source).items():
        with pytest.raises(RequestError, match=words) as raised:
            read(path, body)
        reply = refusal(WIRES[path], raised.value)
        assert reply.status_code == 400
        assert words in json.loads(reply.body)["error"]["message"]
        named = read(path, body, sees=False)
        assert named.pictures == {}
        assert "not shown to this model]" in str(named.messages)


def test_a_picture_with_too_many_pixels_is_refused_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file of 9 kB may decode to 67 million pixels."""
    file = BytesIO()
    Image.new("1", (2**13, 2**13)).save(file, "PNG")
    assert len(file.getvalue()) < 20_000
    monkeypatch.setattr(Image.Image, "convert", lambda *args, **kwargs: pytest.fail("decoded"))
    with pytest.raises(RequestError, match="8192 x 8192 pixels; at most"):
        image_of(file.getvalue())


def test_pictures_of_one_request_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their number, and by their pixels; a picture that comes again is the same."""
    parts = [
        {"type": "image_url", "image_url": {"url": url(file_of(color))}}
        for color in ("red", "green", "red")
    ]
    body = {"messages": [{"role": "user", "content": parts}]}
    for name, enough in (("MOST_PICTURES", 2), ("MOST_PIXELS_IN_ALL", 32)):
        with monkeypatch.context() as patch:
            patch.setattr(pictures, name, enough)
            assert len(read("/chat/completions", body).pictures) == 2
            patch.setattr(pictures, name, enough - 1)
            with pytest.raises(RequestError, match="too many or too large"):
                read("/chat/completions", body)


def test_a_picture_is_upright_and_has_three_colors() -> None:
    """As mlx-vlm reads a file."""
    file, exif = BytesIO(), Image.Exif()
    exif[0x0112] = 6  # a camera that was turned
    Image.new("L", (4, 8)).save(file, "JPEG", exif=exif)
    image = image_of(file.getvalue())
    assert (image.mode, image.size) == ("RGB", (8, 4))


@pytest.mark.parametrize("filters", ["m.content", "m.content | trim | tojson"])
def test_a_prompt_without_sight_names_its_pictures(tmp_path: Path, filters: str) -> None:
    """Where a model turns out to see none, whatever its template does with texts."""
    folder = write_model_folder(tmp_path)
    template = "{% for m in messages %}{{ " + filters + " }}{% endfor %}"
    tokenizer = load_tokenizer(folder, {"chat_template": template})
    request = read("/chat/completions", bodies(url(file_of()))["/chat/completions"])
    prompt = read_prompt(request, tokenizer, ServerSettings())
    assert "a[image: not shown to this model]b" in tokenizer.decode(prompt.tokens)
    assert prompt.keys == prompt.tokens


def test_without_mlx_vlm_a_line_in_the_log_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A vision model writes texts, and its pictures are named."""
    monkeypatch.setitem(sys.modules, "mlx_vlm", None)
    caplog.set_level("INFO")
    folder = write_model_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vision_config": {}}))
    with running(folder, flags=with_flags()) as engine:
        assert not engine.models.can_see(TextRequest())
        assert ask(engine).text
    assert "pip install 'specdec-mlx[vision]'" in caplog.text


def test_models_of_texts_see_nothing(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    assert not Models(ServerSettings(model=str(folder))).can_see(TextRequest())
