"""A vertical cascade: a draft model whose own tokens are guessed, and checked several in a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.sample_utils import make_logits_processors

import narrow
import specdec_mlx as sd
import tiny
import tiny_text
from exact import COIN_RULES, TARGET, ByRule, Rounds, rolled
from lossless import PROMPT
from scripted import ScriptedDrafter
from selection import cases, in_one_test
from specdec_mlx import lab
from specdec_mlx.caches import Rollback
from specdec_mlx.contracts import NO_DRAFT, Draft, DraftContext, Evidence, GoesOn, Session, Step
from specdec_mlx.drafters.draft_sources import DraftSource, WritingSession
from specdec_mlx.drafters.drawing import ChainDraws
from specdec_mlx.errors import TokenizerMismatchError
from specdec_mlx.lab.beams.search import copy_of
from specdec_mlx.lab.papers.vertical_cascade import GuessedSource
from specdec_mlx.lab.proof.enumeration import Tokens, state_after
from specdec_mlx.sampling import Noise
from specdec_mlx.token_ids import to_list

EXACT = 1e-12
MODEL = rolled([0.2, 0.7, 0.1])
LONGEST = 4


class GivenDraws(ChainDraws):
    """Draws that are given in advance by place, the likeliest wherever none is; `laws`: of each."""

    def __init__(self, source: OnSource, script: dict[int, int]) -> None:
        super().__init__(DraftContext(), sd.Sampling(temp=1.0), [0], 1)
        self.source, self.script = source, script
        self.laws: dict[int, np.ndarray] = {}

    def draw(self, logits: mx.array) -> mx.array:
        law = self.laws[len(self)] = self.source.law
        token = mx.array([self.script.get(len(self), int(law.argmax()))])
        self._rows.append(logits)
        self._tokens.append(token)
        self._num_drawn += 1
        return token


class Guesses(Session):
    """A look-up that guesses what the state says, right or wrong."""

    def __init__(self, state: int, guesses: Sequence[Tokens]) -> None:
        self.state, self.guesses = state, guesses

    def propose(self, limit: int) -> Draft:
        return self.propose_after((), limit)

    def observe(self, tokens: Sequence[int]) -> None: ...

    def propose_after(self, tokens: Sequence[int], limit: int) -> Draft:
        return Draft(self.guesses[state_after(self.state, tuple(tokens))][:limit])


class OnSource(GuessedSource):
    """A draft model in a state, of which guesses are given; its text so far is one token."""

    law: np.ndarray

    def __init__(self, state: int, guesses: Sequence[Tokens]) -> None:
        DraftSource.__init__(self, [0], DraftContext())
        self.guesser: Any = Guesses(state, guesses)
        self.rollback, self.num_told = Rollback([]), 1
        self.state, self.held = state, list[int]()

    def catch_up(self) -> None: ...

    def num_guesses(self, most: int, num_pending: int) -> int:
        return most

    def next_logits(self, tokens: mx.array | None, parents: Any = None) -> mx.array:
        logits = super().next_logits(tokens, parents)
        self.law = self.laws[len(self.drafted) - self.num_before]
        return logits

    def feed(self, ids: mx.array, tree: Any = None) -> mx.array:
        """Rows of what is fed after what the caches hold."""
        text = [*self.held[: self.rollback.position], *to_list(ids)]
        new = range(self.rollback.position + 1, len(text) + 1)
        rows = [MODEL.after(self.state, tuple(text[1:end])) for end in new]
        self.laws = rows[-1 - len(self.guesses) :]
        self.held = text
        self.rollback.advance(len(ids))
        return mx.array(np.log(np.stack(rows) + 1e-30))


class GivenSession(WritingSession):
    """A session on such a source, with draws that are given."""

    def __init__(self, source: OnSource, script: dict[int, int]) -> None:
        super().__init__(sd.ModelDrafter(nn.Linear(1, 1)), source)
        self.given = GivenDraws(source, script)

    def draws(self, at_once: int = 1) -> ChainDraws:
        return self.given


@dataclass(frozen=True, eq=False)
class Guessed:
    """Every draft that a session may hand over, one draw after the other."""

    guesses: Sequence[Tokens]
    goes_on: GoesOn
    source: type[OnSource] = OnSource

    def drafts(self, state: int) -> Iterator[tuple[float, Tokens, np.ndarray]]:
        waiting: list[tuple[float, dict[int, int]]] = [(1.0, {})]
        while waiting:
            weight, script = waiting.pop()
            session = GivenSession(self.source(state, self.guesses), script)
            draft = session.propose_while(LONGEST, self.goes_on)
            laws = [session.given.laws[place] for place in range(len(draft))]
            missing = next((place for place in range(len(draft)) if place not in script), None)
            if missing is None:
                tokens = tuple(to_list(draft.tokens))
                yield weight, tokens, np.stack(laws) if laws else np.zeros((0, 3))
                continue
            for token in np.flatnonzero(laws[missing]).tolist():
                longer = {**script, missing: token}
                waiting.append((weight * laws[missing][token], longer))


GUESSES: list[Tokens] = [(1, 1, 0), (), (2, 0), (0,), (1, 2, 2), (1,), (0, 0, 1)]


def unless_sure(step: Step) -> GoesOn:
    """Go on while the model is sure."""

    def goes_on(evidence: Sequence[Evidence]) -> Step:
        confidence = evidence[-1].confidence
        assert confidence is not None
        return Step.GO_ON if confidence > 0.75 else step

    return goes_on


ENDS: dict[str, GoesOn] = {
    "whole": lambda evidence: Step.GO_ON,
    "stops after": unless_sure(Step.STOP_AFTER),
    "stops before": unless_sure(Step.STOP_BEFORE),
}


class KeepsWhatFollowed(OnSource):
    """Wrong: rows that follow a wrong guess are drawn from, too."""

    def next_logits(self, tokens: mx.array | None, parents: Any = None) -> mx.array:
        place = len(self.drafted) - self.num_before
        if tokens is not None and place < len(self.guesses):
            self.guesses[place] = to_list(tokens)[0]
        return super().next_logits(tokens, parents)


WAYS = list(zip([*ENDS] * 2, cycle(COIN_RULES), strict=False))


@pytest.mark.full
@in_one_test(("end", "name"), WAYS)
def test_the_joint_distribution_is_the_targets(end: str, name: str) -> None:
    """Two rounds of drafts of up to 4 tokens, whatever is guessed: to 1e-12; each draft comes as
    often as the model alone would write it.
    """
    drafting = Guessed(GUESSES, ENDS[end])
    for weight, tokens, laws in drafting.drafts(3):
        own = MODEL.along(3, tokens)[: len(tokens)]
        np.testing.assert_allclose(laws, own, atol=EXACT)
        assert weight == pytest.approx(np.prod(own[range(len(tokens)), tokens]), abs=EXACT)
    rounds = Rounds(TARGET, drafting, ByRule(COIN_RULES[name]))
    assert rounds.total_variation(2, 5) < EXACT


def test_rows_that_follow_a_wrong_guess_are_found() -> None:
    """The same test tells a session that draws from them: its draws are not the model's."""
    drafting = Guessed(GUESSES, ENDS["whole"], source=KeepsWhatFollowed)
    off = [
        np.abs(laws - MODEL.along(3, tokens)[: len(tokens)]).max()
        for _, tokens, laws in drafting.drafts(3)
    ]
    assert max(off) > 0.1


INNER: dict[str, Callable[[str], Any]] = {
    "suffix": lambda name: "suffix",
    "ngram": lambda name: "ngram",
    "prompt-lookup": lambda name: "prompt-lookup:min_ngram=1",
    "model": lambda name: sd.ModelDrafter(tiny.build(name, seed=6)),
    "itself": lambda name: sd.ModelDrafter(tiny.build(name, seed=5)),
    "three levels": lambda name: lab.GuessedDrafter(tiny.build(name, seed=5), drafter="suffix"),
}
IN_SHORT = [("llama", "suffix"), ("gemma3_text", "three levels")]
TABLE = [
    *IN_SHORT,
    ("qwen3_5", "itself"),
    ("mamba2", "prompt-lookup"),
    ("gemma3_text", "model"),
    ("llama", "ngram"),
]
"""Each kind of caches and each guesser: neither knows the other."""


@pytest.mark.parametrize(("name", "inner"), cases(TABLE, *IN_SHORT))
def test_texts_are_those_with_the_draft_model_alone(name: str, inner: str) -> None:
    """With a seed, greedy and under a rule by coins, whose text depends on every draw; the draft
    model has full caches, windows and recurrent ones, and greedy text is plain text.
    """
    model, draft = tiny.build(name), tiny.build(name, seed=5)
    some = make_logits_processors(logit_bias=dict.fromkeys(range(4), 1e4))
    for how in ({}, {"sampler": sd.Sampling(temp=0.8), "seed": 3, "rule": "rejection"}):
        options: Any = {"max_tokens": 28, "num_draft_tokens": 5, "logits_processors": some} | how
        drafters = [
            None,
            sd.ModelDrafter(draft),
            lab.GuessedDrafter(draft, drafter=INNER[inner](name)),
        ]
        plain, alone, both = (
            [t.token for t in sd.speculate(model, PROMPT, one, **options)] for one in drafters
        )
        assert alone == both
        assert how or plain == both


@in_one_test("temp", [0.0, 1.0])
def test_the_draft_model_makes_fewer_passes(temp: float) -> None:
    """In a text of four tokens, of which the look-up finds many; drafted is as much."""
    counting = narrow.Counting(narrow.model(seed=1))
    passes = []
    how: Any = {"sampler": sd.Sampling(temp=temp), "seed": 1, "max_tokens": 60}
    for drafter in (None, "suffix"):
        counting.num_passes = 0
        own = sd.ModelDrafter(counting)
        one = own if drafter is None else lab.GuessedDrafter(counting, drafter=drafter)
        tokens = list(sd.speculate(narrow.model(), PROMPT, one, num_draft_tokens=8, **how))
        passes.append(counting.num_passes / max(1, tokens[-1].stats.drafted))
    assert passes[1] < 0.85 * passes[0]


def test_a_smaller_model_guesses_with_the_same_noise() -> None:
    """The model itself as its own guesser is always right, at any temperature: two passes for six
    tokens, of which one checks five.
    """
    counting = narrow.Counting(tiny.build("llama", seed=5))
    drafter = lab.GuessedDrafter(counting, drafter=sd.ModelDrafter(tiny.build("llama", seed=5)))
    vocab_size = tiny.CONFIGS["llama"]["vocab_size"]
    for coupled in (False, True):
        sampling = sd.Sampling(temp=1.0)
        context = DraftContext(sampling, Noise(7), coupled, vocab_size=vocab_size)
        alone = sd.ModelDrafter(tiny.build("llama", seed=5))
        begun = [one.begin(PROMPT, context) for one in (drafter, alone)]
        for session in begun:  # one that has read the prompt
            session.propose(1)
            session.observe([9])
        counting.num_passes = 0
        tokens, expected = (to_list(session.propose(6).tokens) for session in begun)
        assert tokens == expected
        assert counting.num_passes == 2


def test_it_has_a_name_and_a_key() -> None:
    """`guessed-model:drafter=suffix`; it is not copied for beams."""
    model = tiny.build("llama")
    drafter = sd.drafters.make_drafter("guessed-model:drafter=suffix", draft_model=model)
    assert drafter.key == lab.GuessedDrafter(model, drafter=sd.SuffixDrafter()).key
    assert drafter.key != sd.ModelDrafter(model).key
    session: Any = drafter.begin(PROMPT, DraftContext(vocab_size=128))
    assert copy_of(session) is None


@in_one_test(
    ("options", "message"),
    [
        ({"branches": 2}, "writes chains"),
        ({"on_every_rank": True}, "on one rank"),
        ({"drafter": lab.RecyclingDrafter()}, "reads the target"),
        ({"drafter": sd.ModelDrafter(nn.Linear(1, 1), branches=2)}, "drafts trees"),
        ({"drafter": ScriptedDrafter(lambda start, limit: [])}, "propose_after"),
        ({"drafter": sd.BestOf(sd.SuffixDrafter())}, "propose_after"),
        ({"drafter": "none"}, "guesses nothing"),
        ({"drafter": "nothing-like-it"}, "Unknown drafter"),
    ],
)
def test_what_cannot_be_put_together_is_refused(options: dict[str, Any], message: str) -> None:
    """In words that say what to do."""
    given = {"drafter": "suffix"} | options
    with pytest.raises(ValueError, match=message):
        lab.GuessedDrafter(tiny.build("llama"), **given).begin(PROMPT, DraftContext())


def test_guesses_are_tokens_of_the_target() -> None:
    """Another tokenizer, of the draft model or of the smaller one, is refused by its difference."""
    model, own = tiny_text.model(), tiny_text.tokenizer()
    other = tiny_text.tokenizer(tiny_text.bpe((), tiny_text.SPECIAL[:2]))
    inner = sd.ModelDrafter(model, other)
    outer = [lab.GuessedDrafter(model, other, drafter="suffix")]
    for drafter in [*outer, lab.GuessedDrafter(model, own, drafter=inner)]:
        with pytest.raises(TokenizerMismatchError, match="tokenizer is not the target's"):
            drafter.check(DraftContext(tokenizer=own))


def test_nothing_is_guessed_where_a_pass_may_not_be_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is not exact over several positions is asked token by token."""
    monkeypatch.setattr(
        "specdec_mlx.lab.papers.vertical_cascade.first_inexact", lambda model, place: 0
    )
    counting = narrow.Counting(tiny.build("llama", seed=5))
    session: Any = lab.GuessedDrafter(counting, drafter="prompt-lookup:min_ngram=1").begin(
        [*PROMPT, *PROMPT], replace(DraftContext(), vocab_size=128)
    )
    session.propose(1)
    session.observe([9])
    counting.num_passes = 0
    session.propose(4)
    assert counting.num_passes == 4
    assert session.propose(0).tokens == NO_DRAFT.tokens


def test_guesses_that_were_not_drawn_leave_the_caches() -> None:
    """A draft that stops early leaves the text alone: a wrong guess would pass for its token."""
    drafter = lab.GuessedDrafter(tiny.build("llama"), drafter="prompt-lookup:min_ngram=1")
    text = [*PROMPT, *PROMPT]
    session: Any = drafter.begin(text, DraftContext(vocab_size=128))
    assert len(session.propose_while(6, lambda evidence: Step.STOP_AFTER)) == 1
    assert len(session.source.guesses) > 1
    assert session.source.rollback.position == len(text)
