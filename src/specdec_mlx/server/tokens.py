"""Tokens of texts and of chats: three small endpoints beside the protocols, as vLLM has them."""

from __future__ import annotations

from specdec_mlx.server.engine import Engine
from specdec_mlx.server.loading import LONGEST_TEXT
from specdec_mlx.server.pictures import take_pictures
from specdec_mlx.server.prompts import READING, check_length, encoded, read_prompt
from specdec_mlx.server.protocols.body import Body, Count, fields_of, text_request
from specdec_mlx.server.protocols.chat import CHAT
from specdec_mlx.server.protocols.completions import COMPLETIONS
from specdec_mlx.server.requests import Object, RequestError, TextRequest


class TokensBody(Body):
    add_special_tokens: bool = True
    tokens: tuple[Count, ...] | None = None


def tokenize(engine: Engine, body: Object) -> Object:
    """The tokens of a `prompt`, or of `messages` under the chat template.

    `add_special_tokens: false` leaves out those that the tokenizer puts before a prompt.
    `max_model_len` is the number of positions, if the model is loaded. Raises RequestError.
    """
    is_bare = not fields_of(body, TokensBody).add_special_tokens
    request = request_of(engine, body)
    tokenizer, loaded = engine.models.tokenizer_for(request), engine.models.loaded_for(request)
    bound = LONGEST_TEXT if loaded is None else loaded.longest_text
    prompt = request.prompt
    if is_bare and request.messages is None and isinstance(prompt, str):
        check_length(prompt, tokenizer, bound)
        tokens = encoded(tokenizer, prompt)
    else:
        sight = None if loaded is None else loaded.sight
        tokens = read_prompt(request, tokenizer, engine.settings, most=bound, sight=sight).tokens
    return {"count": len(tokens), "max_model_len": loaded and bound, "tokens": tokens}


def detokenize(engine: Engine, body: Object) -> Object:
    """The text of `tokens`; raises RequestError."""
    fields = fields_of(body, TokensBody)
    tokenizer = engine.models.tokenizer_for(text_request(fields))
    if fields.tokens is None or max(fields.tokens, default=0) >= len(tokenizer):
        words = f"tokens: expected a list of token ids from 0 to {len(tokenizer) - 1}."
        raise RequestError(words)
    with READING:
        return {"prompt": tokenizer.decode(list(fields.tokens))}


def apply_template(engine: Engine, body: Object) -> Object:
    """The text of `messages` under the chat template, as the model reads it."""
    if "messages" not in body:
        raise RequestError("messages is missing. Give the messages of a chat.")
    return detokenize(engine, {**body, "tokens": tokenize(engine, body)["tokens"]})


def request_of(engine: Engine, body: Object) -> TextRequest:
    """A body as a request, which is checked; raises RequestError."""
    wire = CHAT if "messages" in body else COMPLETIONS
    requests = wire.read({**body, "max_tokens": 1, "n": 1}).requests
    if len(requests) > 1:
        raise RequestError("prompt must be one text.")
    take_pictures(requests[0], engine.models.can_see)
    return requests[0]
