"""A prompt given back before its text, with the log-probabilities of its own tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.server.requests import TextPiece, TokenLogprob
from specdec_mlx.server.served_requests import ServedText
from specdec_mlx.server.text.logprobs import token_bytes, token_logprob

MOST_ROWS = 128  # positions of one pass: each has a row of logits, as large as the vocabulary


def echo_prompt(text: ServedText, step_size: int) -> TextPiece:
    """The prompt as it was given; its first token has no log-probability: NaN."""
    request, tokenizer, tokens = text.request, text.loaded.tokenizer, text.prompt.tokens
    is_text = isinstance(request.prompt, str)
    prompt_text = str(request.prompt if is_text else tokenizer.decode(tokens))
    if request.num_logprobs is None:
        return TextPiece(prompt_text)
    entries = [TokenLogprob(tokens[0], token_bytes(tokenizer, tokens[0]), math.nan)]
    rows = _rows(text.loaded.model, tokens[:-1], min(step_size, MOST_ROWS))
    for token, row in zip(tokens[1:], rows, strict=True):
        text.ticket.check()  # others wait meanwhile, but not for a client that has gone
        entries.append(token_logprob(tokenizer, token, row, request.num_logprobs))
    # The tokenizer adds this token. The client did not send it.
    has_bos = is_text and tokens[0] == tokenizer.bos_token_id
    was_added = has_bos and not prompt_text.startswith(tokenizer.bos_token)
    return TextPiece(prompt_text, logprobs=entries[1:] if was_added else entries)


def _rows(model: Any, tokens: list[int], step_size: int) -> Iterator[mx.array]:
    """Log-probabilities [V] after each of the tokens."""
    caches = make_prompt_cache(model)
    for start in range(0, len(tokens), step_size):
        inputs = mx.array([tokens[start : start + step_size]])
        # In float32: 16 bits round the log-probabilities of likely tokens to 0.
        logits = model(inputs, cache=caches)[0].astype(mx.float32)
        yield from nn.log_softmax(logits)
