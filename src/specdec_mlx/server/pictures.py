"""Pictures in messages, from a client's bytes to the places in a prompt where a model sees them.

Until a prompt is read, a picture stands in the text of its message as letters that no client can
guess. So protocols join texts, and chat templates write them, without knowing of pictures.
"""

from __future__ import annotations

import logging
from base64 import b64decode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from itertools import chain, repeat
from secrets import token_hex
from threading import Lock
from typing import Any

import mlx.core as mx

from specdec_mlx.memory.drafter_states import num_common
from specdec_mlx.server.requests import Object, RequestError, TextRequest
from specdec_mlx.vision.model import VisionModel
from specdec_mlx.vision.prompts import embed, encode

KINDS = {"image", "image_url", "input_image"}
"""Types of parts that are pictures, in all protocols."""

MOST_PICTURES = 100  # in one request
MOST_PIXELS = 2**25  # of one picture: 100 MB once it is decoded
MOST_PIXELS_IN_ALL = 2**28  # of all pictures of one request
PROBE_SIZE = 64  # of the sides, in pixels, of the picture that a model is tried with
FORMATS = ("PNG", "JPEG", "GIF", "WEBP")

# letters and digits alone, which every filter of a template leaves as they are
_BEGIN, _END = f"picture{token_hex(16)}x", f"x{token_hex(16)}"
_PROBE = f"probe{token_hex(8)}"


def unseen(what: Any) -> str:
    """A text in the place of what is none, as an image, with a line in the log."""
    logging.info("Not shown: a part of type %s. This model is shown texts only.", what)
    return f"[{what}: not shown to this model]"


def mark(part: Object) -> str:
    """The text that stands for a part that is a picture, until `take_pictures`."""
    match part.get("image_url", part.get("source")):
        case {"type": "base64", "data": str(data), **more}:
            source = f"data:{more.get('media_type')};base64,{data}"
        case str(url) | {"url": str(url)}:
            source = url
        case _:
            source = ""
    return f"{_BEGIN}{part['type']} {source}{_END}"


def _replaced(text: str, new: Callable[[str], str]) -> str:
    """A text with something else in the place of each mark, made from what the mark holds."""
    before, *rest = text.split(_BEGIN)
    parts = [piece.partition(_END) for piece in rest]
    return before + "".join(new(content) + after for content, _, after in parts)


def take_pictures(request: TextRequest, can_see: Callable[[TextRequest], bool]) -> None:
    """Move the pictures of a request's messages into `pictures`, and check them.

    Where no model is to see them they are named in their place. Raises RequestError for pictures
    that cannot be read, are too large or too many, and for those that are not in the request.
    """
    marked = [
        (message, name)
        for message in request.messages or ()
        for name, value in message.items()
        if isinstance(value, str) and _BEGIN in value
    ]
    if not marked:
        return
    sees, num_pixels = can_see(request), 0

    def take(content: str) -> str:
        nonlocal num_pixels
        kind, _, source = content.partition(" ")
        if not sees:
            return unseen(kind)
        data = _data_of(source)
        digest = sha256(data).hexdigest()
        if digest not in request.pictures:
            request.pictures[digest] = data
            width, height = image_of(data).size
            num_pixels += width * height
        if len(request.pictures) > MOST_PICTURES or num_pixels > MOST_PIXELS_IN_ALL:
            raise RequestError(
                f"The pictures are too many or too large: at most {MOST_PICTURES}, of "
                f"{MOST_PIXELS_IN_ALL} pixels in all. Send fewer or smaller pictures."
            )
        return f"{_BEGIN}{digest}{_END}"

    for message, name in marked:
        message[name] = _replaced(message[name], take)


def _data_of(source: str) -> bytes:
    """The bytes of a data URL; raises RequestError for anything else."""
    head, _, data = source.partition(",")
    if not (head.startswith("data:") and head.endswith(";base64")):
        raise RequestError(
            "A picture must be in the request, as data:image/png;base64,... or as Anthropic's "
            "base64 source. This server fetches no addresses and reads no files for a request."
        )
    try:
        return b64decode(data)
    except ValueError as error:
        raise RequestError(f"A picture is no base64: {error}") from error


def image_of(data: bytes) -> Any:
    """The PIL image of a file's bytes, in RGB and upright, as mlx-vlm reads it.

    Raises RequestError for what is no whole file of `FORMATS`, and for more than `MOST_PIXELS`.
    """
    from PIL import Image, ImageOps  # comes with mlx-vlm

    try:
        # The size is checked before the pixels are decoded, which may be gigabytes.
        image = Image.open(BytesIO(data), formats=FORMATS)
        width, height = image.size
        if width * height <= MOST_PIXELS:
            return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # of many kinds, for damaged files
        expected = "expected a whole PNG, JPEG, GIF or WebP file"
        raise RequestError(f"A picture cannot be read: {expected}.") from error
    raise RequestError(
        f"A picture has {width} x {height} pixels; at most {MOST_PIXELS} are read. Send a smaller "
        "one."
    )


def replace_pictures(text: str) -> str:
    """A rendered prompt whose pictures are named: its model turned out to see none."""
    return _replaced(text, lambda digest: unseen("image"))


@dataclass(frozen=True)
class SeenPrompt:
    """A prompt with pictures.

    Attributes:
        tokens: [n].
        keys: [n], the tokens, with numbers of the pictures in place of their tokens. Two prompts
            share a prefix if their keys do.
        inputs: mlx-vlm's.
    """

    tokens: list[int]
    keys: list[int]
    inputs: dict[str, Any]


class Sight:
    """How pictures are put into the prompts of a loaded vision model.

    Attributes:
        takes_text: the template takes the content of a message as text.
    """

    def __init__(self, model: VisionModel, processor: Any, tokenizer: Any) -> None:
        """Raises ValueError for a model that cannot be shown a picture."""
        self.processor, self.config = processor, model.model.config
        ids = (getattr(self.config, name, None) for name in ("image_token_id", "image_token_index"))
        self.token: int = next((token for token in ids if token is not None), -1)
        if self.token < 0:
            raise ValueError("its configuration names no token for pictures")
        token = str(tokenizer.convert_ids_to_tokens(self.token))
        self.takes_text = _PROBE in _rendered(tokenizer, _PROBE)
        self.mark = _picture_in_template(tokenizer) or token
        words = (getattr(processor, name, None) for name in ("image_token", "boi_token"))
        self._words = {token, *(word for word in words if isinstance(word, str) and word)}
        self._reading = Lock()  # processors are no friends of threads
        self._num_tokens: dict[str, int] = {}  # of pictures, by their digests
        self._check(model)

    def _check(self, model: VisionModel) -> None:
        """Raise ValueError unless a small picture can be put into a prompt."""
        from PIL import Image

        Image.new("RGB", (PROBE_SIZE, PROBE_SIZE)).save(file := BytesIO(), "PNG")
        try:
            seen = self.read(self.mark, [_PROBE], {_PROBE: file.getvalue()})
            embed(model, model.make_cache(), seen.inputs)
        except Exception as error:  # of many kinds, as where a conversion left out what sees
            raise ValueError(f"mlx-vlm cannot show it a picture: {error}") from error
        if self.token not in seen.tokens:
            raise ValueError("no token of its prompts stands for a picture")

    def contents(self, messages: Sequence[Object]) -> list[Object]:
        """Messages as the model's template takes them."""
        if self.takes_text:
            return list(messages)
        parts = [[{"type": "text", "text": m.get("content") or ""}] for m in messages]
        return [{**m, "content": part} for m, part in zip(messages, parts, strict=True)]

    def placed(self, text: str) -> tuple[str, list[str]]:
        """A rendered prompt with the model's words for its pictures, and their digests in order.

        Where a text itself has such a word, and there are pictures, a space breaks the word.
        """
        if _BEGIN not in text:
            return text, []
        for word in self._words:
            text = text.replace(word, f"{word[0]} {word[1:]}")
        digests = list[str]()

        def place(digest: str) -> str:
            digests.append(digest)
            return self.mark

        return _replaced(text, place), digests

    def read(self, text: str, digests: list[str], pictures: dict[str, bytes]) -> SeenPrompt:
        """The prompt of what `placed` returns; any thread may ask."""
        images = [image_of(pictures[digest]) for digest in digests]
        with self._reading:
            inputs = encode(self.processor, text, images, self.config)
            tokens = inputs["input_ids"][0].tolist()
            keys = self._keys(tokens, digests, images)
        # a thread's arrays are computed before it ends
        mx.eval([value for value in inputs.values() if isinstance(value, mx.array)])
        return SeenPrompt(tokens, keys, inputs)

    def _keys(self, tokens: list[int], digests: list[str], images: list[Any]) -> list[int]:
        """Keys [n] of a prompt's tokens; below zero, and so no token, where a picture is.

        If pictures are not encoded one by one, all of them decide each.
        """
        counts = list(map(self._count, digests, images))
        if sum(counts) != tokens.count(self.token):
            digests = [sha256("".join(digests).encode()).hexdigest()]
            counts = [tokens.count(self.token)]
        numbers = [-1 - int(sha256(digest.encode()).hexdigest()[:15], 16) for digest in digests]
        of_tokens = chain.from_iterable(map(repeat, numbers, counts))
        return [next(of_tokens) if token == self.token else token for token in tokens]

    def _count(self, digest: str, image: Any) -> int:
        """Tokens that stand for a picture that is alone in a prompt."""
        if digest not in self._num_tokens:
            ids = encode(self.processor, self.mark, [image], self.config)["input_ids"][0]
            self._num_tokens[digest] = ids.tolist().count(self.token)
        return self._num_tokens[digest]


def _rendered(tokenizer: Any, content: Any) -> str:
    """A chat of one message; "" if its content cannot be this."""
    try:
        chat = [{"role": "user", "content": content}]
        return str(tokenizer.apply_chat_template(chat, tokenize=False))
    except Exception:  # a template is a program
        return ""


def _picture_in_template(tokenizer: Any) -> str:
    """What a template writes for a picture before a text; "" if it takes none."""
    text = {"type": "text", "text": _PROBE}
    without, end, _ = _rendered(tokenizer, [text]).partition(_PROBE)
    with_picture = _rendered(tokenizer, [{"type": "image"}, text]).partition(_PROBE)[0]
    if not end:
        return ""
    return with_picture[num_common(without, with_picture) :]
