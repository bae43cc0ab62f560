"""Heads in a generation: rows and tokens go together, q is what is drawn from, caches stay true.

A draft that stops by confidence leaves the text's distribution alone, whatever is decided.
"""

from __future__ import annotations

import io
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from test_stepwise import DECIDERS, PEAKED, WAYS, Coins, stop_at

import heads
import specdec_mlx as sd
import tiny
from exact import TARGET, Rounds, Source
from heads import HEADS, VOCAB, Shown, states
from selection import FULL, cases, in_one_test
from specdec_mlx import lab
from specdec_mlx.contracts import (
    MANY_WAITING,
    MOST_WAITING,
    Draft,
    DraftContext,
    Evidence,
    GoesOn,
    Step,
)
from specdec_mlx.draft_length.value import Model
from specdec_mlx.drafters.drawing import ChainDraws, Pace, draft_while, truncate
from specdec_mlx.drafters.heads import session as head_session
from specdec_mlx.drafters.heads.drafter import DraftVocabulary, HeadDrafter, anatomy_for_head
from specdec_mlx.drafters.heads.pard import PardDrafter
from specdec_mlx.lab import check_drafter
from specdec_mlx.lab.proof.enumeration import Tokens, state_after
from specdec_mlx.sampling import Noise
from specdec_mlx.token_ids import to_list

target = cache(heads.target)
small = cache(partial(tiny.build, "qwen2", vocab_size=VOCAB))
MASK = VOCAB - 1

WHOLE: dict[str, Callable[[], Any]] = {
    "pard": lambda: PardDrafter(small(), mask_token=MASK),
    "early exit": lambda: lab.early_exit(target(), 2),
}
"""Drafters that read tokens, as models do."""


@cache
def drafter(name: str) -> Any:
    """A head with random weights for a target of its width; of a family by its name."""
    if name in WHOLE:
        return WHOLE[name]()
    if name in HEADS:
        return HeadDrafter(heads.random_head(HEADS[name], target()))
    config = tiny.CONFIGS[name]
    width = config.get("text_config", config)["hidden_size"]
    return HeadDrafter(heads.random_head(heads.mtp(name, vocab_size=VOCAB), target(width)))


def context(**given: Any) -> DraftContext:
    return DraftContext(vocab_size=VOCAB, noise=Noise(5), **given)


PROMPT = [5, 17, 9, 33, 71, 2, 64]
ALL = [*HEADS, "qwen3_5", "deepseek_v3", "longcat_flash", "step3p5", "nemotron_h"]
"""Each kind of head, and of a family's layer; `test_heads_lossless` has all families."""


@pytest.mark.parametrize("name", ALL)
def test_a_draft_follows_from_the_text_and_its_rows_alone(name: str) -> None:
    """Whatever was drafted, accepted or shown in chunks before: as a fresh session would draft."""
    one = drafter(name)
    shown = Shown(one, PROMPT, context(), chunk=2)
    lengths = [4, 3, 0, 5, 2]
    emitted: list[list[int]] = [[0, 1], [8], [3, 4, 5], [], [90]]
    for length, more in zip(lengths, emitted, strict=True):
        got = to_list(shown.propose(length).tokens)
        fresh = Shown(one, shown.text, context())
        assert got == to_list(fresh.propose(length).tokens)
        assert len(got) == min(length, 5)
        accepted = got[: len(got) // 2]
        shown.emit(*accepted, *more, 11)


@pytest.mark.parametrize("name", ALL)
def test_a_draft_depends_on_every_row_and_every_token(name: str) -> None:
    """Of the text before it; Medusa's on the last row."""
    one = drafter(name)
    assert len(Shown(one, PROMPT[:1], context()).propose(4)) == 0, "before a row was shown"
    probs = first_probs(one, PROMPT)
    for position in range(len(PROMPT) - 1):
        changed = list(PROMPT)
        changed[position + 1] += 1
        by_token = mx.abs(first_probs(one, changed) - probs).max().item()
        reads_all = name not in ("dflash", "assistant", "hydra")
        reads_token = "medusa" not in name and (reads_all or position == len(PROMPT) - 2)
        assert (by_token > 0) == reads_token, position


def first_probs(drafter: HeadDrafter, prompt: Sequence[int]) -> mx.array:
    """Probabilities that the first token is drawn from at temperature 1."""
    sampled = context(sampling=sd.Sampling(temp=1.0))
    logprobs = Shown(drafter, prompt, sampled).propose(1).logprobs
    assert logprobs is not None
    return mx.exp(logprobs)


@in_one_test("name", HEADS)
def test_what_is_handed_over_is_what_was_drawn_from(name: str) -> None:
    """Normalised, filtered, and the argmax of it with the draft's noise; greedy: a point mass."""
    sampling = sd.Sampling(temp=0.7, top_p=0.9)
    given = context(sampling=sampling)
    draft = Shown(drafter(name), PROMPT, given).propose(3)
    assert draft.logprobs is not None
    assert draft.logprobs.shape == (3, VOCAB)
    assert mx.allclose(mx.exp(draft.logprobs).sum(-1), mx.ones(3), atol=1e-5)
    noise = given.draft_gumbels(0, 3)
    assert to_list(draft.tokens) == mx.argmax(draft.logprobs + noise, axis=-1).tolist()
    assert not mx.isinf(draft.logprobs).all()
    assert mx.isinf(draft.logprobs).any(), "top-p left everything in"
    greedy = HeadDrafter(drafter(name).head, greedy=True)
    assert Shown(greedy, PROMPT, given).propose(2).logprobs is None
    for given in (context(sampling=sd.Sampling()), context()):
        assert Shown(drafter(name), PROMPT, given).propose(2).logprobs is None
    with pytest.raises(ValueError, match="draft_temp=-1"):
        HeadDrafter(drafter(name).head, draft_temp=-1)


def test_tokens_outside_of_the_draft_vocabulary_have_no_mass() -> None:
    """And all others do; in another order logits find their places."""
    probs = first_probs(drafter("eagle3"), PROMPT)
    assert [i for i in range(VOCAB) if probs[0, i] > 0] == list(range(0, VOCAB, 3))
    logits, three = mx.array([[1.0, 2.0, 3.0]]), anatomy_for_head(heads.target(vocab=3))
    assert DraftVocabulary(mx.array([2, 1, 0]), three).widen(logits).tolist() == [[3, 2, 1]]


@in_one_test("name", HEADS)
def test_processors_see_the_text_and_the_draft(name: str) -> None:
    """Before each token: prompt, emitted, and what was drafted so far."""
    seen: list[list[int]] = []

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())
        return logits

    shown = Shown(drafter(name), PROMPT, context(logits_processors=[processor]))
    shown.emit(1)
    drafted = to_list(shown.propose(3).tokens)
    assert seen == [[*PROMPT, 1, *drafted[:i]] for i in range(3)]


@pytest.mark.parametrize("name", ["eagle3", "qwen3_5", "dflash", "medusa"])
def test_a_prompt_is_read_when_the_first_token_is_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its rows wait until the first draft, so that nobody waits for what a head reads; then all
    but the last are read by themselves, of which only keys and values are computed.
    """
    steps: list[int] = []
    step = head_session.LayerState.step
    monkeypatch.setattr(
        head_session.LayerState, "step", lambda *of: steps.append(of[1].shape[0]) or step(*of)
    )
    length = 500
    shown = Shown(drafter(name), [i % VOCAB for i in range(length)], context(), chunk=512)
    assert shown.session.source.waiting.start == 0
    assert shown.session.source.waiting.num_rows == length - 1 < MOST_WAITING
    shown.emit(1)
    assert len(shown.propose(1).tokens) == 1
    assert shown.session.source.waiting.num_rows <= 1
    assert steps == ([length - 1, 1] if name in ("eagle3", "qwen3_5") else [])


@pytest.mark.parametrize("name", ["eagle3", "qwen3_5", "dflash", "medusa"])
def test_a_long_text_is_read_as_it_comes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows do not pile up: of a long prompt, and of a long stretch without drafts."""
    most = 8
    monkeypatch.setattr(head_session, "MOST_WAITING", most)
    shown = Shown(drafter(name), [i % VOCAB for i in range(5 * most)], context(), chunk=6)
    for more in (0, 2 * most):
        for i in range(more):
            shown.emit(i % VOCAB)
            assert shown.session.source.waiting.num_rows <= most
        fresh = Shown(drafter(name), shown.text, context())
        assert to_list(shown.propose(3).tokens) == to_list(fresh.propose(3).tokens)


@in_one_test("name", ["medusa", "medusa, target's head"])
def test_medusa_is_its_formula(name: str) -> None:
    """Head i: x + silu(W x + b) for each block, then a matrix, of the last state shown."""
    one = drafter(name)
    head = one.head
    matrices = head.lm_heads if name == "medusa" else [target().lm_head] * 5
    expected = []
    for blocks, matrix in zip(head.blocks, matrices, strict=True):
        x = np.array(states(one, len(PROMPT) - 2, 1).head_input)[0].astype(np.float64)
        for block in blocks:
            y = np.array(block.weight) @ x + np.array(block.bias)
            x = x + y / (1 + np.exp(-y))
        expected.append(int(np.argmax(np.array(matrix.weight) @ x)))
    for length in (9, 2):
        assert to_list(Shown(one, PROMPT, context()).propose(length).tokens) == expected[:length]


# PARD ---------------------------------------------------------------------------------------------


def test_pard_drafts_what_stands_after_its_masks() -> None:
    """The last rows of one pass over text and masks; its caches hold no mask afterwards."""
    session = drafter("pard").begin(PROMPT, context())
    text = list(PROMPT)
    for length, emitted in ((4, 2), (1, 1), (6, 0), (3, 3)):
        got = to_list(session.propose(length).tokens)
        logits = small()(mx.array([[*text, *[MASK] * (length - 1)]]))[0, -length:]
        assert got == mx.argmax(logits, axis=-1).tolist()
        read = session.source.rollback
        assert read.position == read.caches[0].offset == len(text)
        tokens = [*got[:emitted], 50]
        session.observe(tokens)
        text += tokens


@FULL
@pytest.mark.parametrize("name", WHOLE)
def test_drafters_that_read_tokens_conform(name: str) -> None:
    """To `check_drafter`."""
    check_drafter(drafter(name), vocab_size=VOCAB, num_draws=400)


@in_one_test("name", ["eagle1", "eagle3", "qwen3_5"])
def test_what_is_read_ahead_of_a_draft_is_keys_and_values_alone(name: str) -> None:
    """No attention and no logits are computed but at the last position, which drafts."""
    one, text, dot = drafter(name), list(range(40)), io.StringIO()
    session = Shown(one, text, context()).session
    named: Any = tree_flatten(session.source.read())
    mx.export_to_dot(dot, *(leaf for _, leaf in named if isinstance(leaf, mx.array)))
    operations = set(re.findall(r'label ="(\w+)"', dot.getvalue()))
    assert operations.isdisjoint({"ScaledDotProductAttention", "Softmax"})
    assert session.source.waiting.num_rows == 1
    fresh = Shown(one, text, context())
    assert to_list(session.propose(3).tokens) == to_list(fresh.propose(3).tokens)


# Drafts that stop ---------------------------------------------------------------------------------

EXACT = 1e-12
LONGEST = 4
GUESSED = (1, 2, 2, 1)
"""Tokens that a draft in one pass takes to stand before its later ones, whatever is drawn."""


class Path(ChainDraws):
    """Draws that come out as one path; its rows are those of a source."""

    is_drawn = True

    def __init__(self, tokens: Tokens, rows: np.ndarray, peeks: bool, num_drawn: int = 0) -> None:
        self.tokens, self.num_drawn = tokens, num_drawn
        self.sure = rows[np.arange(LONGEST), tokens] if peeks else rows.max(axis=-1)

    def __len__(self) -> int:
        return self.num_drawn

    def draw(self, logits: mx.array) -> mx.array:
        self.num_drawn += 1
        return mx.array([self.tokens[self.num_drawn - 1]])

    def log_confidences(self, *, latest: bool = False) -> mx.array:
        logs = mx.log(mx.array(self.sure[: self.num_drawn]))
        return logs[-1:] if latest else logs

    def draft(self, length: int | None = None) -> Draft:
        return Draft(self.tokens[:length])


@dataclass(frozen=True, eq=False)
class Enumerated:
    """Every draft of up to 4 tokens that the package's own loops make of a source's rows."""

    source: Source
    goes_on: GoesOn
    way: str
    peeks: bool = False
    own: str = ""  # the source's own estimate reads the token "before", or the "drawn" one

    def rows(self, state: int, tokens: Tokens) -> np.ndarray:
        before = GUESSED if self.way == "at once" else tokens
        states = [state_after(state, before[:i]) for i in range(len(tokens))]
        return self.source.probs[states].reshape(-1, self.source.vocab_size)

    @cache  # noqa: B019  there are few, and each is enumerated many times
    def drafts(self, state: int) -> list[tuple[float, Tokens, np.ndarray]]:
        weights: dict[Tokens, float] = defaultdict(float)
        for tokens in itertools.product(range(self.source.vocab_size), repeat=LONGEST):
            rows = self.rows(state, tokens)
            kept = tokens[: len(self.ended(tokens, rows))]
            weights[kept] += float(np.prod(rows[np.arange(LONGEST), tokens]))
        return [(weight, kept, self.rows(state, kept)) for kept, weight in weights.items()]

    def ended(self, tokens: Tokens, rows: np.ndarray) -> Draft:
        if self.way == "at once":
            return truncate(Path(tokens, rows, self.peeks, LONGEST), self.goes_on)
        pace, draws = Pace(float(self.way == "overlapping"), 1.0), Path(tokens, rows, self.peeks)

        def estimate() -> mx.array | None:
            read = (0, *tokens)[draws.num_drawn - (self.own == "before")]
            return mx.log(mx.array([OWN[read]])) if self.own else None

        step = lambda token: mx.zeros((1, 3))  # noqa: E731
        return draft_while(LONGEST, draws, step, self.goes_on, pace, estimate)


OWN = (0.95, 0.4, 0.15)  # a head's estimate by a token

IN_SHORT = [("block", "value", "stepwise"), ("block", "threshold", "overlapping")]
IN_SHORT += [("block", "value", "at once")]
LOOPS = [*IN_SHORT, ("rejection", "threshold", "stepwise"), ("coupled", "value", "overlapping")]
LOOPS += [("rejection", "value", "overlapping"), ("coupled", "threshold", "at once")]


@pytest.mark.parametrize(("name", "how", "way"), cases(LOOPS, *IN_SHORT))
def test_the_loops_leave_the_joint_distribution_alone(name: str, how: str, way: str) -> None:
    """Of two rounds and three tokens, for a head that steps and for one that drafts at once."""
    drafting = Enumerated(PEAKED, DECIDERS[how], way)
    lengths = {len(tokens) for state in range(7) for _, tokens, _ in drafting.drafts(state)}
    assert len(lengths) > 1
    assert Rounds(TARGET, drafting, WAYS[name]).total_variation(2, 3) < EXACT


@pytest.mark.parametrize("way", ["stepwise", "at once"])
def test_a_loop_that_is_told_of_the_draws_is_caught(way: str) -> None:
    """By the same enumeration."""
    drafting = Enumerated(PEAKED, DECIDERS["threshold"], way, peeks=True)
    assert Rounds(TARGET, drafting, WAYS["block"]).total_variation(1, 3) > 0.01


@pytest.mark.parametrize("way", ["stepwise", "overlapping"])
def test_a_heads_own_estimate_leaves_the_joint_distribution_alone(way: str) -> None:
    """It may know the token before, as DSpark's does; one that knows the token itself is caught."""
    read, peeked = (
        Enumerated(PEAKED, DECIDERS["threshold"], way, own=own) for own in ("before", "drawn")
    )
    lengths = {len(tokens) for state in range(7) for _, tokens, _ in read.drafts(state)}
    assert len(lengths) > 1
    assert Rounds(TARGET, read, WAYS["block"]).total_variation(2, 3) < EXACT
    assert Rounds(TARGET, peeked, WAYS["block"]).total_variation(1, 3) > 0.01


STOPPING = ("eagle3", "eagle1", "qwen3_5", "step3p5", "dflash", "medusa", "pard")


@pytest.mark.parametrize("temp", [0.0, 1.0])
@pytest.mark.parametrize("kind", STOPPING)
def test_a_stopped_draft_is_the_head_of_the_whole_one(kind: str, temp: float) -> None:
    """Tokens and distributions, wherever it stops; and so is the next one, after a verdict."""
    stops = [(1, Step.STOP_AFTER), (3, Step.STOP_BEFORE), (3, Step.STOP_AFTER)]
    for overlaps, (stop, step) in itertools.product((0.0, 1.0), stops):
        given = context(sampling=sd.Sampling(temp=temp))
        whole, stopped = (Shown(drafter(kind), PROMPT, given) for _ in range(2))
        stopped.session.pace = Pace(build=overlaps, wait=1.0)
        for emitted in ([9], [11, 12]):
            expected = whole.propose(5)
            draft = stopped.session.propose_while(5, stop_at(stop, step))
            kept = stop - (step is Step.STOP_BEFORE)
            assert to_list(draft.tokens) == to_list(expected.tokens)[:kept]
            assert len(draft) == len(draft.evidence or ()) == kept
            if temp:
                assert mx.allclose(draft.logprobs, expected.logprobs[:kept], atol=1e-5)
            whole.emit(*emitted)
            stopped.emit(*emitted)


@pytest.mark.parametrize("kind", STOPPING)
def test_the_evidence_is_the_largest_probability_of_what_is_drawn_from(kind: str) -> None:
    """And the decision is asked once a position, in order, with all that came before."""
    asked: list[list[float]] = []

    def goes_on(evidence: Sequence[Evidence]) -> Step:
        asked.append([known.confidence or 0.0 for known in evidence])
        return Step.GO_ON

    shown = Shown(drafter(kind), PROMPT, context(sampling=sd.Sampling(temp=1.0)))
    logprobs: Any = shown.session.propose_while(4, goes_on).logprobs
    assert asked == [asked[-1][:length] for length in (1, 2, 3, 4)]
    assert asked[-1] == pytest.approx(mx.exp(mx.max(logprobs, axis=-1)).tolist(), rel=1e-5)


TEXTS = cases((*STOPPING, "early exit"), "qwen3_5", "dflash")


@pytest.mark.parametrize("temp", [0.0, 1.0])
@pytest.mark.parametrize("kind", TEXTS)
def test_texts_are_the_same_however_it_stops(kind: str, temp: float) -> None:
    """Coupled: a seed's text, greedy: the target's; of fixed lengths, and with coins."""
    one = drafter(kind)
    model = target() if kind in WHOLE else target(one.head.anatomy.width)

    def text(drafter: Any, length: Any) -> list[int]:
        options = {"rule": "coupled", "seed": 5, "sampler": sd.Sampling(temp=temp)}
        tokens = sd.speculate(
            model, PROMPT, drafter, max_tokens=24, num_draft_tokens=length, **options
        )
        return [token.token for token in tokens]

    coins, plain = Coins(1), text(None, 0)
    assert [text(one, length) for length in (coins, 1, 4)] == 3 * [plain]
    (part,) = coins.parts.values()
    assert isinstance(part, Model)
    assert (part.most_unread == MANY_WAITING) == (kind not in WHOLE)
