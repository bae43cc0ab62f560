"""The conformance test passes our drafters, and fails drafters that are broken in one way each."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import specdec_mlx as sd
import tiny
from selection import cases, each
from specdec_mlx import lab
from specdec_mlx.contracts import Draft, DraftContext
from specdec_mlx.lab import check_drafter
from specdec_mlx.lab.proof.drafter import DrafterConformance

V = 32
CHECKS = ["protocol", "empty drafts", "sessions", "rewinds", "distribution", "memory"]


def model_drafter(**options: Any) -> sd.ModelDrafter:
    return sd.ModelDrafter(tiny.build("qwen2", vocab_size=V), **options)


OURS: dict[str, Callable[[], sd.Drafter]] = {
    "prompt lookup": sd.PromptLookupDrafter,
    "prompt lookup, earliest": lambda: sd.PromptLookupDrafter(occurrence="earliest", num_draft=2),
    "suffix": sd.SuffixDrafter,
    "n-gram, drawn": lambda: lab.StochasticNGramDrafter(min_order=1),
    "model": model_drafter,
    "recurrent model": lambda: sd.ModelDrafter(tiny.build("mamba", vocab_size=V)),
    "cascade": lambda: lab.Cascade(model_drafter(), "prompt-lookup:min_ngram=1", num_first=2),
    "best of": lambda: sd.BestOf(sd.PromptLookupDrafter(min_ngram=3), sd.NGramDrafter()),
}
AS_MODEL_DRAWS = ("recurrent model", "cascade")
DRAWN = ("n-gram, drawn", "model", *AS_MODEL_DRAWS)


@pytest.mark.parametrize(
    "name",
    cases(OURS, "prompt lookup", "prompt lookup, earliest"),
)
def test_our_drafters_keep_the_contract(name: str) -> None:
    """Every check passes; those that draw at random are held to what they declare."""
    num_draws = 200 if name in AS_MODEL_DRAWS else 1500
    lines = check_drafter(OURS[name](), vocab_size=V, num_draws=num_draws)
    assert [line.partition(":")[0] for line in lines] == CHECKS
    assert ("chi-square" in lines[4]) == (name in DRAWN)
    assert not lines[0].startswith("protocol: 0 drafts")


# Broken in one way each ---------------------------------------------------------------------------


class Copying:
    """A sound session to break: proposes the last tokens again."""

    def __init__(self, prompt: Sequence[int], context: DraftContext) -> None:
        self.text = list(prompt)
        self.num_prompt = len(prompt)
        self.context = context

    def tokens(self, limit: int) -> list[int]:
        return (self.text[-3:] * limit)[:limit]

    def propose(self, limit: int) -> Draft:
        return Draft(self.tokens(limit))

    def observe(self, tokens: Sequence[int]) -> None:
        self.text += tokens


LOGPROBS = nn.log_softmax(-0.3 * mx.arange(V))


class Drawing(Copying):
    """Draws from a distribution that favours the tokens after the last one."""

    def after(self, last: int) -> mx.array:
        return mx.roll(LOGPROBS, last)

    def parents(self, limit: int) -> list[int]:
        return list(range(-1, limit - 1))

    def place(self, start: int, node: int) -> tuple[int, int]:
        """Start and index of a node's noise, `start` tokens into the generation."""
        return start, node

    def propose(self, limit: int) -> Draft:
        tokens: list[int] = []
        logprobs: list[mx.array] = []
        for node, parent in enumerate(self.parents(limit)):
            logprobs.append(self.after(self.text[-1] if parent < 0 else tokens[parent]))
            noise = self.context.draft_gumbel(*self.place(len(self.text) - self.num_prompt, node))
            tokens.append(int(mx.argmax(logprobs[-1] + noise).item()))
        return self.hand_over(tokens, logprobs)

    def hand_over(self, tokens: list[int], logprobs: list[mx.array]) -> Draft:
        return stacked(tokens, logprobs)


class Forking(Drawing):
    """Draws siblings after the text, and one more after the first of them."""

    def parents(self, limit: int) -> list[int]:
        return [-1, -1, 0][:limit]

    def hand_over(self, tokens: list[int], logprobs: list[mx.array]) -> Draft:
        draft = stacked(tokens, logprobs)
        return replace(draft, parents=self.parents(len(tokens))) if tokens else draft


@dataclass(frozen=True)
class Of:
    """The drafter of a session class, or of one with other members."""

    session: Callable[[Sequence[int], DraftContext], Any]

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Any:
        return self.session(prompt, context)


def copying(**members: Any) -> Of:
    return Of(type("Broken", (Copying,), members))


def drawing(hand_over: Callable[[list[int], list[mx.array]], Draft]) -> Of:
    """Hands over tokens and log-probabilities otherwise."""
    member = {"hand_over": lambda self, tokens, rows: hand_over(tokens, rows)}
    return Of(type("Broken", (Drawing,), member))


def declaring(rows: Callable[[list[int], list[mx.array]], list[mx.array]]) -> Of:
    """Declares other log-probabilities than were drawn from."""
    return drawing(lambda tokens, logprobs: stacked(tokens, rows(tokens, logprobs)))


def stacked(tokens: list[int], logprobs: list[mx.array]) -> Draft:
    return Draft(tokens, mx.stack(logprobs)) if tokens else Draft()


def forking(place: Callable[[int, int], tuple[int, int]]) -> Of:
    return Of(type("Broken", (Forking,), {"place": lambda self, *at: place(*at)}))


def test_the_sound_sessions_pass() -> None:
    """The ones that are broken below, as they are."""
    check_drafter(Of(Copying))
    assert "chi-square" in check_drafter(Of(Drawing), num_draws=200)[4]
    assert "chi-square" in check_drafter(Of(Forking), num_draws=200)[4]


class KeepsThePrompt(Copying):
    """Writes into the loop's own text."""

    def __init__(self, prompt: Any, context: DraftContext) -> None:
        super().__init__(prompt, context)
        self.text = prompt


def changes_tokens(self: Copying, tokens: Any) -> None:
    self.text += tokens
    tokens.clear()


class NeedsADraft(Copying):
    """Takes what is observed for a verdict on something proposed."""

    last: Draft | None = None

    def propose(self, limit: int) -> Draft:
        self.last = super().propose(limit)
        return self.last

    def observe(self, tokens: Sequence[int]) -> None:
        if self.last is None:
            raise AssertionError("empty drafts: observed without a proposal")
        super().observe(tokens)
        self.last = None


def forgets_the_correction(self: Copying, tokens: Sequence[int]) -> None:
    """Takes only the accepted part for what was emitted."""
    self.text += tokens[:-1] if len(tokens) > 1 else tokens


class NeverRewinds(Copying):
    """Its proposals stay in its text."""

    def propose(self, limit: int) -> Draft:
        draft = super().propose(limit)
        self.text += draft.tokens
        return draft


class ForgetsItsDistribution(Drawing):
    """Declares another distribution at the second round, and draws the same."""

    rounds = 0

    def after(self, last: int) -> mx.array:
        return mx.roll(super().after(last), self.rounds)

    def observe(self, tokens: Sequence[int]) -> None:
        self.rounds += len(tokens) > 1
        super().observe(tokens)


def one_hot(tokens: list[int], logprobs: list[mx.array]) -> list[mx.array]:
    """Declares that it would always have proposed what it drew, as a distribution."""
    return [mx.where(mx.arange(V) == token, 0.0, -mx.inf) for token in tokens]


def drop_unlikely(tokens: list[int], logprobs: list[mx.array]) -> Draft:
    """Drops drawn tokens that its own distribution finds unlikely."""
    kept = 0
    while kept < len(tokens) and logprobs[kept][tokens[kept]].item() > -2.5:
        kept += 1
    return stacked(tokens[:kept], logprobs[:kept])


def copies_the_text(self: Any, tokens: Sequence[int]) -> None:
    """Keeps every version of the text, so that memory is quadratic."""
    self.text += tokens
    self.versions = [*getattr(self, "versions", []), list(self.text)]


def closes_at_the_end(self: Copying, length: int) -> None:
    if length != len(self.text):
        raise AssertionError(f"memory: closed at {length} of {len(self.text)}")


held: list[Any] = []


@dataclass
class Counts:
    """Counts its generations, in the drafter."""

    generations: int = 0

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Copying:
        self.generations += 1
        return Copying(prompt, context)


@dataclass(frozen=True)
class SharesItsTable:
    """All generations learn in one table what follows a token."""

    table: dict[int, int] = field(default_factory=dict)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Copying:
        def propose(session: Copying, limit: int) -> Draft:
            return Draft([self.table.get(session.text[-1], 0)] * min(1, limit))

        def observe(session: Copying, tokens: Sequence[int]) -> None:
            self.table.update(itertools.pairwise([session.text[-1], *tokens]))
            session.text += tokens

        return copying(propose=propose, observe=observe).begin(prompt, context)


@dataclass(frozen=True)
class SharesAScratchpad:
    """Right for one generation at a time: a scratchpad of the drafter's holds the draft."""

    scratchpad: list[int] = field(default_factory=list)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Copying:
        def propose(session: Copying, limit: int) -> Draft:
            self.scratchpad[:] = session.tokens(limit)
            if threading.active_count() > 1:
                time.sleep(0.001)  # where another thread would take over, sooner or later
            return Draft(list(self.scratchpad)[:limit])

        return copying(propose=propose).begin(prompt, context)


BROKEN: dict[str, list[Any]] = {
    "protocol": [
        object(),
        Copying,
        Of(lambda prompt, context: object()),
        copying(propose=lambda self, limit: Draft(self.tokens(limit + 1))),
        copying(propose=lambda self, limit: Draft(self.tokens(max(1, limit)))),  # for nothing
        copying(propose=lambda self, limit: self.text[-limit:]),
        copying(propose=lambda self, limit: Draft(np.array(self.tokens(limit)))),
        copying(propose=lambda self, k: Draft(self.tokens(k), evidence=(1,) * (k + 1))),
        Of(KeepsThePrompt),
        copying(observe=changes_tokens),
        Counts(),
    ],
    "noise": [
        forking(lambda start, node: (0, node)),  # the same each round
        forking(lambda start, node: (start + node, 0)),  # later drafts have it as well
        forking(lambda start, node: (start, node // 2)),  # siblings share it
    ],
    "empty drafts": [Of(NeedsADraft)],
    "rewinds": [
        Of(NeverRewinds),
        copying(observe=forgets_the_correction),
        Of(ForgetsItsDistribution),
    ],
    "sessions": [
        SharesItsTable(),
        copying(propose=lambda self, k: Draft([random.randrange(V) for _ in range(k)])),
        SharesAScratchpad(),
    ],
    "distribution": [
        declaring(lambda tokens, rows: [row + 0.1 for row in rows]),
        # draws at temperature 1, declares 0.8: total variation 0.1 over 32 tokens
        declaring(lambda tokens, rows: [row / 0.8 - mx.logsumexp(row / 0.8) for row in rows]),
        declaring(one_hot),
        drawing(drop_unlikely),
    ],
    "memory": [
        copying(observe=copies_the_text),
        copying(close=lambda self, length: held.append(self)),
        copying(close=closes_at_the_end),
    ],
}


@pytest.mark.parametrize("check", cases(BROKEN, *BROKEN.keys() - {"distribution"}))
def test_a_broken_drafter_fails_by_name(check: str) -> None:
    """AssertionError names the property that it breaks; every property has such a control."""
    assert BROKEN.keys() == DrafterConformance.properties.keys()

    def fails(drafter: Any) -> None:
        with pytest.raises(AssertionError, match=f"{check}: "):
            check_drafter(drafter, vocab_size=V)

    each(BROKEN[check], fails)


def test_memory_across_generations_has_to_be_meant() -> None:
    """It shows, and `remembers` and `learns` allow it."""
    lines = check_drafter(SharesItsTable(), remembers=True, learns=True, vocab_size=V)
    assert [line.partition(":")[0] for line in lines] == [
        part for part in CHECKS if part != "rewinds"
    ]
