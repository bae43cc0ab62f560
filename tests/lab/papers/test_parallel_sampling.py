"""PaSS: the target drafts on its own caches, with embeddings behind its last token."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from test_stepwise import WAYS

import specdec_mlx as sd
import tiny
from exact import DRAFT, TARGET, Rounds, Source
from lossless import PROMPT, TOLERANCE, plain_text, spoken
from scripted import OracleDrafter
from selection import cases, in_one_test
from specdec_mlx.caches import Rollback
from specdec_mlx.contracts import Draft, DraftContext, GoesOn, RoundRecord
from specdec_mlx.draft_length.value import Fixed
from specdec_mlx.errors import HeadError, TrainingError
from specdec_mlx.lab.beams.search import copy_of
from specdec_mlx.lab.papers.parallel_sampling import (
    LookAhead,
    PaSSDrafter,
    PaSSSource,
    looking_ahead,
)
from specdec_mlx.lab.proof.enumeration import Tokens, state_after
from specdec_mlx.lab.training.features import live_batch
from specdec_mlx.lab.training.trainees import KINDS, Recipe, Size
from specdec_mlx.models.anatomy import vocab_size_of
from specdec_mlx.sampling import Noise
from specdec_mlx.token_ids import to_list

NUM_ROWS, NUM_TOKENS = 4, 40  # past the windows of the tiny models
EXACT = 1e-12

TARGETS = ("gemma3_text", "qwen3_5", "deepseek_v3", "mamba2")
"""Windows, hybrids, latent attention, and recurrences that are fed again."""
IN_SHORT = TARGETS[:2]

target = cache(tiny.build)


def embeddings(model: nn.Module, number: int = NUM_ROWS) -> LookAhead:
    """Random ones."""
    head = LookAhead(model, number)
    head.rows = mx.random.normal(head.rows.shape, key=mx.random.key(2))
    return head


@cache
def drafter(name: str, **options: Any) -> PaSSDrafter:
    return PaSSDrafter(target(name), None, head=embeddings(target(name)), **options)


def guessed(one: PaSSDrafter, text: Sequence[int], number: int) -> list[int]:
    """What a fresh pass over the text and so many embeddings makes likeliest behind it."""
    ids = mx.array([[*text, *[0] * number]])
    with looking_ahead(one.model, one.head.rows[:number]):
        logits = one.model(ids, cache=make_prompt_cache(one.model))[0, -number - 1 :]
    return to_list(mx.argmax(logits, axis=-1))


class PartlyRight:
    """The drafter, each draft compared with a fresh pass, and right at about half of the places."""

    def __init__(self, one: PaSSDrafter, text: Sequence[int]) -> None:
        self.one, self.compared = one, 0
        self.text = OracleDrafter(text, vocab_size_of(one.model), wrong=0.5).script()

    def begin(self, prompt: Sequence[int], context: DraftContext) -> PartlyRight:
        self.tokens, self.start = list(prompt), len(prompt)
        begun: Any = self.one.begin(prompt, context)
        assert begun.source.is_lent
        self.session = begun
        return self

    def observe(self, tokens: Sequence[int]) -> None:
        self.session.observe(tokens)
        self.tokens += tokens

    def propose(self, limit: int) -> Draft:
        drafted = to_list(self.session.propose(limit).tokens)
        assert len(drafted) == (min(limit, 1 + NUM_ROWS) if limit > 1 else 0)
        if drafted:
            assert drafted == guessed(self.one, self.tokens, len(drafted) - 1)
            self.compared += 1
        start = len(self.tokens) - self.start
        return Draft(self.text[start : start + len(drafted)])


@pytest.mark.parametrize("name", cases(TARGETS, *IN_SHORT))
def test_text_with_its_drafts_is_plain_text(name: str) -> None:
    """Greedy, of a fixed length and of its own, and a seed's under coupled; its first token is
    always right, so that each draft writes two tokens at least.
    """
    model, one = target(name), drafter(name)
    plain = plain_text(model, PROMPT, NUM_TOKENS)
    for length in ("auto", 3, 9):
        items = list(
            sd.speculate(model, PROMPT, one, max_tokens=NUM_TOKENS, num_draft_tokens=length)
        )
        assert spoken(items).deviation(plain) < TOLERANCE
        rounds = items[-1].stats.rounds
        assert all(accepted for drafted, accepted in rounds if drafted)
    assert sum(drafted > 0 for drafted, _ in rounds) > 5
    options: dict[str, Any] = {"sampler": sd.Sampling(temp=1.0), "seed": 5, "rule": "coupled"}
    texts = [
        [
            t.token
            for t in sd.speculate(model, PROMPT, d, max_tokens=24, num_draft_tokens=4, **options)
        ]
        for d in (None, one)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", cases(TARGETS, *IN_SHORT))
def test_a_draft_is_that_of_a_fresh_pass_whatever_was_kept_before(name: str) -> None:
    """After drafts kept in part, whole and not at all, also past a window; and the text is plain,
    so that the drafting pass has left nothing on the target's caches.
    """
    model = target(name)
    plain = plain_text(model, PROMPT, NUM_TOKENS).tokens
    reader = PartlyRight(drafter(name), plain)
    items = list(sd.speculate(model, PROMPT, reader, max_tokens=NUM_TOKENS, num_draft_tokens=4))
    assert [item.token for item in items] == plain
    stats = items[-1].stats
    assert min(reader.compared, stats.accepted, stats.drafted - stats.accepted) > 5


class Bursts(Fixed):
    """Plain rounds, which run ahead of their tokens, and after every eight two of drafts."""

    num_rounds = 0

    def limit(self, part: str, cheap: bool) -> int:
        return self.length if self.num_rounds % 10 > 7 else 0

    def record(self, round_: RoundRecord) -> None:
        self.num_rounds += 1


@in_one_test("name", ["qwen2", "gemma3_text"])
def test_a_pass_that_runs_ahead_is_left_alone(name: str) -> None:
    """Its position on the shared caches is the loop's, whatever the drafter is told meanwhile."""
    model, plain = target(name), plain_text(target(name), PROMPT, NUM_TOKENS)
    how: dict[str, Any] = {"max_tokens": NUM_TOKENS, "num_draft_tokens": Bursts(4)}
    items = list(sd.speculate(model, PROMPT, drafter(name), **how))
    assert spoken(items).deviation(plain) < TOLERANCE
    stats = items[-1].stats
    assert min(stats.ahead, sum(drafted > 0 for drafted, _ in stats.rounds)) > 2


@in_one_test("name", ["qwen2", "gemma3_text"])
def test_embeddings_stand_where_the_last_tokens_would(name: str) -> None:
    """As if they were given to the model by mlx-lm's own argument; without them nothing changes."""
    model, rows = target(name), drafter(name).head.rows
    ids = mx.array([[*PROMPT, *[0] * NUM_ROWS]])
    given = model.model.embed_tokens(ids)
    given[0, -NUM_ROWS:] = rows
    with looking_ahead(model, rows):
        got = model(ids)
    expected = model(ids, input_embeddings=given)
    assert mx.allclose(got, expected, atol=1e-5)
    assert not mx.allclose(got[:, -1], model(ids)[:, -1], atol=1e-2)


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each pass over the target."""
    seen: list[int] = []
    forward = Rollback.forward

    def counted(self: Rollback, model: Any, tokens: mx.array, *args: Any, **more: Any) -> Any:
        seen.append(tokens.shape[0])
        return forward(self, model, tokens, *args, **more)

    monkeypatch.setattr(Rollback, "forward", counted)
    return seen


def test_a_draft_costs_one_pass_more(widths: list[int]) -> None:
    """Over the last token and the embeddings; then one verifies the draft, whose first token is
    the target's own.
    """
    items = list(sd.speculate(target("qwen2"), PROMPT, drafter("qwen2"), max_tokens=21,
                              num_draft_tokens=5))  # fmt: skip
    rounds = items[-1].stats.rounds
    expected = [[drafted, drafted + 1] if drafted else [1] for drafted, _ in rounds]
    assert widths[1 : 1 + sum(map(len, expected))] == [w for pair in expected for w in pair]
    assert max(drafted for drafted, _ in rounds) == 1 + NUM_ROWS


def test_caches_of_its_own_where_none_are_lent() -> None:
    """In batches, in a conversation that shows earlier turns, and outside of the loop; they never
    hold an embedding afterwards.
    """
    model, one = target("qwen2"), drafter("qwen2")
    session: Any = one.begin(PROMPT, DraftContext(vocab_size=vocab_size_of(model)))
    text = list(PROMPT)
    for length, emitted in ((4, 2), (1, 0), (9, 0), (3, 3)):
        got = to_list(session.propose(length).tokens)
        expected = guessed(one, text, min(length, 1 + NUM_ROWS) - 1) if length > 1 else []
        assert got == expected
        read = session.source.rollback
        assert read.caches[0].offset == read.position <= len(text)
        tokens = [*got[:emitted], 50]
        session.observe(tokens)
        text += tokens
    fork: Any = copy_of(session)
    assert to_list(fork.propose(4).tokens) == to_list(session.propose(4).tokens)


def test_earlier_turns_are_those_on_the_targets_caches() -> None:
    """A conversation goes on: the history, which the caches hold, comes before what is drafted."""
    model, one, earlier = target("qwen2"), drafter("qwen2"), [9, 8, 7]
    plain = plain_text(model, [*earlier, *PROMPT], 24).tokens
    caches = make_prompt_cache(model)
    model(mx.array([earlier]), cache=caches)
    items = list(sd.speculate(model, PROMPT, one, max_tokens=24, history=earlier,
                              num_draft_tokens=4, prompt_cache=caches))  # fmt: skip
    assert [item.token for item in items] == plain
    assert all(accepted for drafted, accepted in items[-1].stats.rounds if drafted)


class Silent:
    """Has nothing to say, though it is asked step by step."""

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Silent:
        return self

    def observe(self, tokens: Sequence[int]) -> None: ...

    def propose(self, limit: int) -> Draft:
        return Draft()

    def propose_while(self, limit: int, goes_on: GoesOn) -> Draft:
        return Draft()


def test_the_automatic_length_takes_no_draft_for_an_answer() -> None:
    """From a session that is asked as long as the next token pays, as here where one is allowed."""
    text = sd.speculate(target("qwen2"), PROMPT, Silent(), max_tokens=30)
    assert [t.token for t in text] == plain_text(target("qwen2"), PROMPT, 30).tokens


# Drawn at random ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class InParallel:
    """Every draft of three tokens: the first of the target's distribution, the others of rows that
    know the text alone, whatever is drawn; declared: what the first is said to be drawn from.
    """

    declared: Source = TARGET

    def drafts(self, state: int) -> Iterator[tuple[float, Tokens, np.ndarray]]:
        behind = [DRAFT.probs[state_after(state, (0,) * i)] for i in (1, 2)]
        rows = np.stack([TARGET.probs[state], *behind])
        said = np.stack([self.declared.probs[state], *behind])
        for tokens in product(range(TARGET.vocab_size), repeat=3):
            yield float(np.prod(rows[range(3), tokens])), tokens, said


@in_one_test("name", WAYS)
def test_its_draws_leave_the_joint_distribution_alone(name: str) -> None:
    """Two rounds and four tokens, to 1e-12; a first token declared as another's draw is found."""
    assert Rounds(TARGET, InParallel(), WAYS[name]).total_variation(2, 4) < EXACT
    if name != "coupled":
        wrong = Rounds(TARGET, InParallel(DRAFT), WAYS[name])
        assert wrong.total_variation(1, 3) > 0.01
        outcomes = Rounds(TARGET, InParallel(), WAYS[name]).outcomes_from(0)
        assert min(map(len, outcomes)) == 1  # p = q at the first place


def test_what_is_handed_over_is_what_was_drawn_from() -> None:
    """The first row is the target's distribution, and every token the argmax of its row and the
    draft's noise; greedy drafts are point masses.
    """
    model, one, sampling = target("qwen2"), drafter("qwen2"), sd.Sampling(temp=0.8, top_k=20)
    vocab_size = vocab_size_of(model)
    context = DraftContext(sampling=sampling, vocab_size=vocab_size, noise=Noise(3))
    draft = one.begin(PROMPT, context).propose(1 + NUM_ROWS)
    noise = context.draft_gumbels(0, 1 + NUM_ROWS)
    assert draft.logprobs is not None
    assert to_list(draft.tokens) == to_list(mx.argmax(draft.logprobs + noise, axis=-1))
    p = sampling.log_distribution(model(mx.array([PROMPT]))[0, -1:])
    assert mx.allclose(mx.exp(draft.logprobs[:1]), mx.exp(p), atol=1e-5)
    assert not mx.allclose(mx.exp(draft.logprobs[1]), mx.exp(p[0]), atol=1e-2)
    greedy = PaSSDrafter(model, None, head=one.head, greedy=True).begin(PROMPT, context)
    assert greedy.propose(3).logprobs is None


@in_one_test("branches", [1, 3])
def test_texts_at_a_temperature_end_with_caches_in_order(branches: int) -> None:
    """Chains and trees, under each rule; the caches hold prompt and text, and the text goes on."""
    model, one = target("qwen2"), drafter("qwen2", branches=branches)
    for rule in ("auto", "rejection", "typical"):
        caches = make_prompt_cache(model)
        options: dict[str, Any] = {"sampler": sd.Sampling(temp=1.0), "rule": rule}
        items = list(sd.speculate(model, PROMPT, one, max_tokens=20, num_draft_tokens=6,
                                  prompt_cache=caches, **options))  # fmt: skip
        text = [item.token for item in items]
        assert caches[0].offset == len(PROMPT) + len(text)
        after = model(mx.array([[7]]), cache=caches)[0, -1]
        fresh = model(mx.array([[*PROMPT, *text, 7]]))[0, -1]
        assert mx.allclose(after, fresh, atol=1e-4)


# Training and files -------------------------------------------------------------------------------


@in_one_test("name", ["qwen2", "gemma3_text"])
def test_training_sees_what_drafting_makes(name: str) -> None:
    """States behind every token of a window at once, to 1e-4, past the window of the model."""
    model = target(name)
    trainee = KINDS["pass"](Recipe(model, Size(guesses=3)))
    trainee.module.rows = embeddings(model, 3).rows
    tokens = mx.array(np.random.default_rng(0).integers(1, 100, (2, 40)))
    made = list(trainee.predictions(live_batch(model, (), tokens)))
    assert [first for _, first in made] == [1, 2, 3]
    for row, place in ((0, 0), (1, 6), (0, 35)):
        ids = mx.concatenate([tokens[row, : place + 1], mx.zeros(3, tokens.dtype)])
        with looking_ahead(model, trainee.module.rows):
            logits = model(ids[None], cache=make_prompt_cache(model))[0, -3:]
        for i, (states, _) in enumerate(made):
            assert mx.allclose(trainee.logits(states[row, place]), logits[i], atol=1e-4), (i, place)


def saved(folder: Path, model: nn.Module, **changes: Any) -> Path:
    """Embeddings as `train` writes them; changes: of the config."""
    trainee = KINDS["pass"](Recipe(model, Size(guesses=2)))
    trainee.module.rows = embeddings(model, 2).rows
    trainee.config |= changes
    trainee.save(folder, "float32")
    return folder


def test_what_train_saves_is_loaded_and_drafts(tmp_path: Path) -> None:
    """Bit for bit, as a drafter with a name and a key of its own."""
    model = target("qwen2")
    one = sd.load_head(saved(tmp_path, model), model)
    assert isinstance(one, PaSSDrafter)
    assert mx.array_equal(one.head.rows, embeddings(model, 2).rows)
    assert one.describe() == f"{tmp_path}: PaSS; 2 look-ahead embeddings"
    assert one.key != drafter("qwen2").key
    text = [t.token for t in sd.speculate(model, PROMPT, one, max_tokens=12, num_draft_tokens=3)]
    assert text == plain_text(model, PROMPT, 12).tokens
    assert isinstance(one.source(PROMPT, DraftContext()), PaSSSource)


def test_what_cannot_be_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """Options of other kinds, other targets, files that contradict their config, and training on
    caches that take no trees.
    """
    model, folder = target("qwen2"), saved(tmp_path / "whole", target("qwen2"))
    for option in ({"draft_bits": 4}, {"layers": (0,)}, {"pre_norm": True}):
        with pytest.raises(HeadError, match="no matrices and reads no states: leave"):
            sd.load_head(folder, model, **option)
    with pytest.raises(HeadError, match="load it for the target of this text"):
        list(sd.speculate(tiny.build("qwen2", seed=1), PROMPT, drafter("qwen2"), max_tokens=2))
    with pytest.raises(HeadError, match="vocabulary of 9999 tokens"):
        sd.load_head(saved(tmp_path / "other", model, vocab_size=9999), model)
    with pytest.raises(HeadError, match="make no head that runs"):
        sd.load_head(saved(tmp_path / "more", model, look_ahead=5), model)
    with pytest.raises(TrainingError, match="caches do not take"):
        KINDS["pass"](Recipe(target("mamba2")))
    assert json.loads((folder / "config.json").read_text())["look_ahead"] == 2
