"""Draft models with another tokenizer. Drafts are carried over as text.

The model writes its likeliest text, and the target's tokenizer encodes the text as a deterministic
draft.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from itertools import takewhile
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.caches import Rollback, leaves, strategy_for, wait_for
from specdec_mlx.contracts import Draft, DraftContext, Session
from specdec_mlx.drafters.drawing import ChainDraws, draft_to
from specdec_mlx.drafters.shared_vocabulary import SharedVocabulary, Spelling
from specdec_mlx.sampling import Sampling
from specdec_mlx.token_ids import to_ids, to_list

MARGIN = 8
"""Last tokens that more text may change. A longer word is rare, and costs only acceptance."""

MOST_OPEN = 64
"""Most tokens that are encoded again in each round. Usually the start of a word is nearer."""

CONTEXT = 8  # tokens of the target that are encoded together with the draft behind them
SHORTER = 1.25  # draft tokens for a target token, from which a draft often ends inside a token


class DraftText:
    """The target's text in the draft model's tokens.

    Attributes:
        ids: the tokens.
        settled: number of `ids` that more text cannot change, up to the start of a word.
    """

    def __init__(self, shared: SharedVocabulary) -> None:
        self.shared = shared
        self.ids = list(shared.draft.prefix)
        self.settled = len(self.ids)
        self._open = ""
        self._bytes = getincrementaldecoder("utf-8")("replace")

    @property
    def ends_in_character(self) -> bool:
        """True if the text ends inside a character of several bytes."""
        return bool(self._bytes.getstate()[0])

    @property
    def _at_start(self) -> bool:
        return self.settled == len(self.shared.draft.prefix)

    def read(self, tokens: Sequence[int]) -> None:
        target = self.shared.target
        for token in tokens:
            content = target.special.get(token)
            if content is not None and token in self.shared.to_draft:
                self._add_special(self.shared.to_draft[token])
                continue
            word = target.spelled.get(token, b"") if content is None else content.encode()
            if target.prepends_space and self._at_start and not self._open:
                # sentencepiece puts a space before the text, which is not part of it.
                word = word.removeprefix(b" ")
            self._open += self._bytes.decode(word)
        self._settle(self._encode())

    def _add_special(self, draft_id: int) -> None:
        self._open += self._bytes.decode(b"", final=True)
        self._encode()
        # The prefix may hold this BOS already.
        if self.ids != [draft_id]:
            self.ids.append(draft_id)
        self.settled, self._open = len(self.ids), ""

    def _encode(self) -> list[int]:
        """Encode the unsettled text. Returns the end of each token among its characters."""
        ids, stops = self.shared.draft.encode(self._open, at_start=self._at_start)
        self.ids[self.settled :] = ids
        return stops

    def _settle(self, stops: list[int]) -> None:
        """Settle all except the last tokens, if a word starts there or there are many."""
        # Only after a whole character, because a token may end inside a character.
        places = [n for n in range(1, len(stops) - MARGIN + 1) if stops[n] > stops[n - 1]]
        words = [
            n for n in places if self._open[stops[n - 1]] == " " != self._open[stops[n - 1] + 1]
        ]
        settled = (words or places)[-1:] if words or len(stops) > MOST_OPEN else []
        for count in settled:
            self.settled += count
            self._open = self._open[stops[count - 1] :]


def continuation(target: Spelling, tokens: Sequence[int], text: str) -> list[int]:
    """Encode `text` in the target's tokens after `tokens`, up to a token that does not spell it."""
    last = list(takewhile(target.spelled.__contains__, reversed(tokens[-CONTEXT:])))
    before = b"".join(target.spelled[token] for token in reversed(last)).decode(errors="ignore")
    ids, stops = target.encode(before + text)
    first = bisect_right(stops, len(before)) if before else 0
    # A token that begins before the draft cannot follow the text.
    if first and stops[first - 1] != len(before):
        ids, first = target.encode(text)[0], 0
    spelling_ids: list[int] = []
    rest = text.encode()
    for index in ids[first:]:
        word = target.spelled.get(index)
        # An encoder may normalise the text, and such a token would spell something else.
        if not word or not rest.startswith(word):
            break
        spelling_ids.append(index)
        rest = rest[len(word) :]
    return spelling_ids


def _readable(data: bytes) -> str:
    """The characters before the first invalid byte, which may be half a character at the end."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()


@dataclass(eq=False)
class Retokenized(Session):
    """A draft model with another tokenizer, in one generation.

    After each round the caches go back to the common beginning of `fed` and the text.

    Attributes:
        tokens: the text in the target's tokens.
        num_read: number of these that `text` has read.
        text: the text in the draft model's tokens.
        fed: tokens in the draft model's caches.
        num_same: number of `fed` that are known to agree with the text.
    """

    model: nn.Module
    shared: SharedVocabulary
    tokens: list[int]
    context: DraftContext
    caches: InitVar[list[Any]]
    num_read: int = 0
    num_same: int = 0

    def __post_init__(self, caches: list[Any]) -> None:
        self.rollback = Rollback(caches)
        self.text = DraftText(self.shared)
        self.fed: list[int] = []

    def propose(self, limit: int) -> Draft:
        """At most `limit` of the target's tokens. No tokens inside a character."""
        if limit == 0:
            return Draft()
        pending = self.catch_up()
        per_token = len(self.text.ids) / max(1, len(self.tokens))
        # One more step where a target token takes several draft tokens, because the last token is
        # often incomplete.
        num_steps = math.ceil(limit * per_token) + (per_token > SHORTER)
        room = self.rollback.widest_pass()
        has_room = room is None or len(pending) + num_steps <= room
        if not pending or not has_room or self.text.ends_in_character:
            return Draft()
        return Draft(self.write(pending, num_steps)[:limit])

    def write(self, pending: list[int], num_steps: int) -> list[int]:
        def step(token: mx.array | None) -> mx.array:
            if token is None:
                return self.feed(pending)[-1:]
            return self.rollback.forward(self.model, token)

        # The argmax: a text has no distribution over target tokens that a draw could be compared
        # with.
        draws = ChainDraws(DraftContext(), Sampling(), (), 0)
        ids = to_list(draft_to(num_steps, draws, step).tokens)
        self.fed += ids[:-1]
        num_logits = self.context.vocab_size or math.inf
        return list(takewhile(num_logits.__gt__, self.in_targets_tokens(ids)))

    def in_targets_tokens(self, ids: Sequence[int]) -> list[int]:
        """Draft tokens in the target's tokens, up to a token that is no text."""
        draft, target = self.shared.draft, self.shared.target
        words = [draft.spelled[i] for i in takewhile(draft.spelled.__contains__, ids)]
        tokens = continuation(target, self.tokens, _readable(b"".join(words)))
        if len(words) < len(ids):
            end = self.shared.to_target.get(ids[len(words)])
            return tokens if end is None else [*tokens, end]
        # The draft may have stopped inside the last target token.
        if len(tokens) > 1 and target.spelled[tokens[-1]] != words[-1]:
            tokens.pop()
        return tokens

    def observe(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens

    def catch_up(self) -> list[int]:
        """Read the text except its last tokens, which are returned."""
        self.text.read(self.tokens[self.num_read :])
        self.num_read = len(self.tokens)
        ids = self.text.ids
        settled = max(0, min(self.text.settled, len(ids) - 1))
        position = self.go_back(ids)
        restores = any(strategy_for(c).must_restore for c in leaves(self.rollback.caches))
        # Unsettled tokens may change, and these caches can only go back to a checkpoint, so one is
        # saved after the settled tokens.
        if restores and position > settled:
            position = self.rollback.rewind_to(settled)
        del self.fed[position:]
        step = self.context.prefill_step_size
        while (left := settled - position) > (0 if restores else MARGIN):
            self.feed(ids[position : position + min(left, step)])
            wait_for(self.rollback.caches)
            position = self.rollback.position
        self.rollback.checkpoint()
        self.num_same = min(position, settled)
        return ids[position:]

    def go_back(self, ids: Sequence[int]) -> int:
        """Rewind to the longest common prefix of `fed` and the text. Returns its length."""
        # Settled tokens need no comparison.
        same = min(self.num_same, len(ids) - 1)
        longest = min(len(self.fed), len(ids) - 1)
        while same < longest and self.fed[same] == ids[same]:
            same += 1
        return self.rollback.rewind_to(max(0, same))

    def feed(self, ids: list[int]) -> mx.array:
        logits = self.rollback.forward(self.model, to_ids(ids))
        self.fed += ids
        return logits
