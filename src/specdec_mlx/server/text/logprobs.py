"""Log-probabilities of the tokens that a client sees, each with the piece of text it is seen in."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from specdec_mlx.drafters.shared_vocabulary import Spelling
from specdec_mlx.errors import TokenizerMismatchError
from specdec_mlx.models.loading import PerModel
from specdec_mlx.server.requests import TokenLogprob
from specdec_mlx.token_ids import read_all


def _spelling(tokenizer: Any) -> Spelling | None:
    """The tokens of a tokenizer in bytes; None if each has to be decoded by itself."""
    try:
        return Spelling(tokenizer)
    except TokenizerMismatchError:
        return None


spelling_of = PerModel(_spelling)


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """A token's text as bytes, which may be a part of a character; b"" for one without a text."""
    if (spelling := spelling_of(tokenizer)) is not None:
        return spelling.spelled.get(token, spelling.special.get(token, "").encode())
    return str(tokenizer.decode([token])).encode() if token < len(tokenizer) else b""


def token_logprob(
    tokenizer: Any, token: int, logprobs: mx.array, num_alternatives: int
) -> TokenLogprob:
    """The entry of a written token; waits for `logprobs` [V]."""
    most = min(num_alternatives, logprobs.size)
    likeliest = mx.argpartition(-logprobs, max(0, most - 1))[:most]
    logprob, ids, values = read_all(logprobs[token], likeliest, logprobs[likeliest])
    pairs = sorted(zip(values, ids, strict=True), key=lambda pair: (-pair[0], pair[1]))
    top = [
        (index, token_bytes(tokenizer, index), value)
        for value, index in pairs
        if value > -mx.inf  # a grammar forbids it
    ]
    return TokenLogprob(token, token_bytes(tokenizer, token), logprob, top)


class SeenLogprobs:
    """Entries that wait until a character of their token is shown, or none can be any more."""

    def __init__(self) -> None:
        self._without_text: list[TokenLogprob] = []
        # with the characters of the written text that a token has a part in
        self._waiting = deque[tuple[int, int, TokenLogprob]]()

    def add(self, logprob: TokenLogprob) -> None:
        self._without_text.append(logprob)

    def place(self, start: int, text: str) -> None:
        """The tokens since the last call have given `text`, which begins at a character `start`.

        Several tokens give it where a character has several, or a space waits for its word.
        """
        if not text:
            return
        data = text.encode()
        exact = data == b"".join(entry.data for entry in self._without_text)
        num_before = 0
        for entry in self._without_text:
            num_after = num_before + len(entry.data)
            if exact:
                begin = len(data[:num_before].decode(errors="ignore"))
                end = len(text) - len(data[num_after:].decode(errors="ignore"))
            else:
                begin, end = 0, len(text)
            self._waiting.append((start + begin, start + end, entry))
            num_before = num_after
        self._without_text = []

    def take(self, start: int, end: int) -> Sequence[TokenLogprob]:
        """Entries of the characters from `start` to `end`, which are shown now.

        Those of characters before them, that were not shown, are dropped.
        """
        taken = []
        while self._waiting and self._waiting[0][0] < end:
            first, after, entry = self._waiting.popleft()
            if after > start or first == start:
                taken.append(entry)
        return taken

    def take_rest(self) -> Sequence[TokenLogprob]:
        """Entries of the tokens at the end that give no text, the end token among them."""
        return self._without_text
