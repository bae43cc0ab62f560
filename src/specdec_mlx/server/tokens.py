"""Tokens of texts and of chats: three small endpoints beside the protocols, as vLLM has them."""

from __future__ import annotations

from typing import Any

from specdec_mlx.server.engine import Engine
from specdec_mlx.server.models import LONGEST_TEXT
from specdec_mlx.server.pictures import take_pictures
from specdec_mlx.server.prompts import READING, check_length, encoded, read_prompt
from specdec_mlx.server.protocols.body import Body, fields_of, text_request
from specdec_mlx.server.protocols.chat import CHAT
from specdec_mlx.server.protocols.completions import COMPLETIONS
from specdec_mlx.server.requests import Object, RequestError, TextRequest


def tokenize(engine: Engine, body: Object) -> Object:
    """The tokens of a `prompt`, or of `messages` under the chat template.

    `add_special_tokens: false` leaves out those that the tokenizer puts before a prompt.
    `max_model_len` is the number of positions, if the model is loaded. Raises RequestError.
    """
    request, tokenizer, most = asked_for(engine, body)
    bound = most or LONGEST_TEXT
    is_bare = body.get("add_special_tokens") is False and isinstance(request.prompt, str)
    if is_bare and request.messages is None:
        check_length(str(request.prompt), tokenizer, bound)
        tokens = encoded(tokenizer, str(request.prompt))
    else:
        tokens = read_prompt(
            request, tokenizer, engine.settings, most=bound, sight=engine.models.sight_for(request)
        ).tokens
    return {"count": len(tokens), "max_model_len": most, "tokens": tokens}


def detokenize(engine: Engine, body: Object) -> Object:
    """The text of `tokens`; raises RequestError."""
    tokens = body.get("tokens")
    tokenizer = engine.models.tokenizer_for(text_request(fields_of(body, Body)))
    num_tokens = len(tokenizer)
    are_ids = isinstance(tokens, list) and all(
        type(token) is int and 0 <= token < num_tokens for token in tokens
    )
    if not are_ids:
        words = f"tokens must be a list of token ids from 0 to {num_tokens - 1}."
        raise RequestError(words)
    with READING:
        return {"prompt": tokenizer.decode(tokens)}


def apply_template(engine: Engine, body: Object) -> Object:
    """The text of `messages` under the chat template, as the model reads it."""
    if "messages" not in body:
        raise RequestError("messages is missing. Give the messages of a chat.")
    return detokenize(engine, {**body, "tokens": tokenize(engine, body)["tokens"]})


def asked_for(engine: Engine, body: Object) -> tuple[TextRequest, Any, int | None]:
    """A body as a request, its model's tokenizer, and the positions if that model is loaded."""
    wire = CHAT if "messages" in body else COMPLETIONS
    own = {name: value for name, value in body.items() if name != "add_special_tokens"}
    requests = wire.read({**own, "max_tokens": 1, "n": 1}).requests
    if len(requests) > 1:
        raise RequestError("prompt must be one text.")
    request, models = requests[0], engine.models
    engine.settings.check(request)
    take_pictures(request, models.can_see)
    tokenizer, loaded = models.tokenizer_for(request), models.loaded
    is_loaded = loaded is not None and loaded.names == models.names_of(request)
    return request, tokenizer, loaded.longest_text if loaded and is_loaded else None
