"""Draft models with a tokenizer of their own: the text is followed in their tokens.

The model writes its likeliest text, which is encoded with the target's tokenizer: a point mass.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.caches import Rollback, leaves, strategy_for, wait_for
from specdec_mlx.contracts import Draft, DraftContext, Session
from specdec_mlx.drafters.drawing import ChainDraws, draft_to
from specdec_mlx.drafters.shared_vocabulary import SharedVocabulary, Spelling
from specdec_mlx.sampling import Sampling
from specdec_mlx.token_ids import to_ids, to_list

MARGIN = 8
"""Last tokens that more text may still change; longer words are rare, and cost acceptance alone."""

MOST_OPEN = 64
"""Tokens that are encoded again in each round, at most; the start of a word ends them sooner."""

CONTEXT = 8  # tokens of the target before a draft that are encoded together with it
SHORTER = 1.25  # draft tokens in one of the target's from which a draft often ends inside of one


class DraftText:
    """The target's text in the draft model's tokens.

    settled: number of the `ids` that no longer text changes, up to the start of a word.
    """

    def __init__(self, shared: SharedVocabulary) -> None:
        self.shared = shared
        self.ids = list(shared.draft.prefix)
        self.settled = len(self.ids)
        self._open = ""
        self._bytes = getincrementaldecoder("utf-8")("replace")

    @property
    def ends_in_character(self) -> bool:
        """True if the text ends inside of a character, whose bytes wait for the rest of it."""
        return bool(self._bytes.getstate()[0])

    @property
    def _at_start(self) -> bool:
        return self.settled == len(self.shared.draft.prefix)

    def read(self, tokens: Sequence[int]) -> None:
        """Take further tokens of the target."""
        target = self.shared.target
        for token in tokens:
            content = target.special.get(token)
            if content is not None and token in self.shared.to_draft:
                self._add_special(self.shared.to_draft[token])
                continue
            word = target.spelled.get(token, b"") if content is None else content.encode()
            if target.prepends_space and self._at_start and not self._open:
                word = word.removeprefix(b" ")
            self._open += self._bytes.decode(word)
        self._settle(self._encode())

    def _add_special(self, own: int) -> None:
        """A token that is no text; all before it is settled."""
        self._open += self._bytes.decode(b"", final=True)
        self._encode()
        if self.ids != [own]:  # BOS may be there already
            self.ids.append(own)
        self.settled, self._open = len(self.ids), ""

    def _encode(self) -> list[int]:
        """Encode what is not settled; returns where each of these tokens ends."""
        ids, ends = self.shared.draft.encode(self._open, at_start=self._at_start)
        self.ids[self.settled :] = ids
        return ends

    def _settle(self, ends: list[int]) -> None:
        """Settle all but the last tokens, if a word starts there or they became many."""
        places = [n for n in range(1, len(ends) - MARGIN + 1) if ends[n] > ends[n - 1]]
        words = [n for n in places if self._open[ends[n - 1]] == " " != self._open[ends[n - 1] + 1]]
        settled = (words or places)[-1:] if words or len(ends) > MOST_OPEN else []
        for count in settled:
            self.settled += count
            self._open = self._open[ends[count - 1] :]


def continuation(target: Spelling, tokens: Sequence[int], text: str) -> list[int]:
    """`text` in the target's tokens after `tokens`, up to one that does not spell it."""
    last = list(takewhile(target.spelled.__contains__, reversed(tokens[-CONTEXT:])))
    before = b"".join(target.spelled[token] for token in reversed(last)).decode(errors="ignore")
    ids, ends = target.encode(before + text)
    first = bisect_right(ends, len(before)) if before else 0
    if first and ends[first - 1] != len(before):  # a token would begin before the draft
        ids, first = target.encode(text)[0], 0
    kept: list[int] = []
    rest = text.encode()
    for index in ids[first:]:
        word = target.spelled.get(index)
        if not word or not rest.startswith(word):
            break
        kept.append(index)
        rest = rest[len(word) :]
    return kept


def _readable(data: bytes) -> str:
    """The characters up to what is no UTF-8, such as the half of one at the end."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()


@dataclass(eq=False)
class Retokenized(Session):
    """The side of a draft model with another tokenizer in one generation.

    Its caches hold tokens of its own, `fed`, and go back to what these have in common with the
    text, encoded anew at its end.

    tokens: the text, of which the first `num_read` were read. num_same: of `fed` and the text.
    """

    model: nn.Module
    shared: SharedVocabulary
    tokens: list[int]
    context: DraftContext
    num_read: int = 0
    num_same: int = 0

    def __post_init__(self) -> None:
        self.rollback = Rollback.of(self.model)
        self.text = DraftText(self.shared)
        self.fed: list[int] = []

    def propose(self, limit: int) -> Draft:
        """At most `limit` of the target's tokens; none inside of a character."""
        if limit == 0:
            return Draft()
        pending = self.catch_up()
        per_token = len(self.text.ids) / max(1, len(self.tokens))
        num_steps = math.ceil(limit * per_token) + (per_token > SHORTER)
        room = self.rollback.widest_pass()
        has_room = room is None or len(pending) + num_steps <= room
        if not pending or not has_room or self.text.ends_in_character:
            return Draft()
        return Draft(self.write(pending, num_steps)[:limit])

    def write(self, pending: list[int], num_steps: int) -> list[int]:
        """The likeliest text of so many draft tokens; one synchronisation, to encode it."""

        def step(token: mx.array | None) -> mx.array:
            if token is None:
                return self.feed(pending)[-1:]
            return self.rollback.forward(self.model, token)

        draws = ChainDraws(DraftContext(), Sampling(), (), 0)
        ids = to_list(draft_to(num_steps, draws, step).tokens)
        self.fed += ids[:-1]
        num_logits = self.context.vocab_size or math.inf
        return list(takewhile(num_logits.__gt__, self.in_targets_tokens(ids)))

    def in_targets_tokens(self, ids: Sequence[int]) -> list[int]:
        """Draft tokens as the target's, up to one that is no text; a last one in which the draft
        may have ended is left out unless it is alone.
        """
        draft, target = self.shared.draft, self.shared.target
        words = [draft.spelled[i] for i in takewhile(draft.spelled.__contains__, ids)]
        tokens = continuation(target, self.tokens, _readable(b"".join(words)))
        if len(words) < len(ids):
            end = self.shared.to_target.get(ids[len(words)])
            return tokens if end is None else [*tokens, end]
        if len(tokens) > 1 and target.spelled[tokens[-1]] != words[-1]:
            tokens.pop()
        return tokens

    def observe(self, tokens: Sequence[int]) -> None:
        """Note what was emitted; it is read with the next proposal."""
        self.tokens += tokens

    def catch_up(self) -> list[int]:
        """Read the text but for its last tokens, which are returned.

        Caches that cannot be trimmed return to a checkpoint after the settled tokens.
        """
        self.text.read(self.tokens[self.num_read :])
        self.num_read = len(self.tokens)
        ids = self.text.ids
        settled = max(0, min(self.text.settled, len(ids) - 1))
        position = self.go_back(ids)
        restores = any(strategy_for(c).must_restore for c in leaves(self.rollback.caches))
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
        """Go back to the longest common prefix of what was fed and the text; the position."""
        same = min(self.num_same, len(ids) - 1)
        longest = min(len(self.fed), len(ids) - 1)
        while same < longest and self.fed[same] == ids[same]:
            same += 1
        return self.rollback.rewind_to(max(0, same))

    def feed(self, ids: list[int]) -> mx.array:
        """One pass of the draft model; logits [S, W]."""
        logits = self.rollback.forward(self.model, to_ids(ids))
        self.fed += ids
        return logits
