"""A prompt given back before its text, with the log-probabilities of its own tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.server.requests import Said, TokenLogprob
from specdec_mlx.server.text.logprobs import token_bytes, token_logprob
from specdec_mlx.server.under_way import AskedText

# positions of one pass: each has a row of logits, as large as the vocabulary
MOST_ROWS = 128


def echo(text: AskedText, step_size: int) -> Said:
    """The prompt as it was given; its first token has no log-probability: NaN."""
    request, tokenizer, tokens = text.request, text.loaded.tokenizer, text.prompt.tokens
    is_text = isinstance(request.prompt, str)
    said = request.prompt if is_text else tokenizer.decode(tokens)
    if request.num_logprobs is None:
        return Said(str(said))
    entries = [TokenLogprob(tokens[0], token_bytes(tokenizer, tokens[0]), math.nan)]
    rows = _rows(text, min(step_size, MOST_ROWS))
    for token, row in zip(tokens[1:], rows, strict=True):
        entries.append(token_logprob(tokenizer, token, row, request.num_logprobs))
    bos = tokenizer.bos_token
    was_added = (
        bos and tokens[0] == tokenizer.bos_token_id and not str(said).startswith(bos)
    )
    return Said(str(said), logprobs=entries[1:] if is_text and was_added else entries)


def _rows(text: AskedText, step_size: int) -> Iterator[mx.array]:
    """Log-probabilities [V] after each token of the prompt but the last."""
    model, known = text.loaded.model, text.prompt.tokens[:-1]
    caches = make_prompt_cache(model)
    for start in range(0, len(known), step_size):
        logits = model(mx.array([known[start : start + step_size]]), cache=caches)[0]
        logits = logits.astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(logprobs)
        yield from logprobs
