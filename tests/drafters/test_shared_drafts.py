"""A draft model in a batch: its drafts are what it would draft alone, and its passes are shared."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

import heads
import specdec_mlx as sd
import tiny
import tiny_text
from selection import cases, in_one_test
from specdec_mlx.batch.rounds import BatchGeneration
from specdec_mlx.batch.schedule import Request, Schedule
from specdec_mlx.contracts import Draft, DraftContext
from specdec_mlx.draft_length.batches import RowLength, SharedLength
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.drafters import shared_drafts
from specdec_mlx.drafters.draft_sources import WritingSession
from specdec_mlx.drafters.heads.drafter import HeadDrafter
from specdec_mlx.drafters.shared_drafts import DraftPasses, SharedDrafts, SharedSession
from specdec_mlx.options import Options

PROMPTS = [[9], [5, 17, 99, 3, 41, 8, 7], [11, 12, 13], [30, 31] * 20]
LENGTHS = [75, 12, 66, 50]


@functools.cache
def plain(name: str) -> list[list[int]]:
    """The target's own texts."""
    target = tiny.build(name)
    both = zip(PROMPTS, LENGTHS, strict=True)
    return [[t.token for t in sd.speculate(target, p, max_tokens=n)] for p, n in both]


def like(model: nn.Module, name: str) -> nn.Module:
    """A model that agrees with another now and then."""
    draft = tiny.build(name)
    mx.random.seed(1)
    noisy = tree_map(lambda w: w + 0.01 * mx.random.normal(w.shape), model.parameters())
    draft.update(noisy)
    return draft


class Batch:
    """A batch that is written, its texts by uid; `drafts` of each text, where there are any."""

    def __init__(
        self, name: str, *, max_rows: int = 3, before: Any = None, head: Any = None, **options: Any
    ):
        self.target = tiny.build(name)
        if head is None:
            self.draft = like(self.target, name)
        drafter: Any = head or sd.ModelDrafter(self.draft)
        drafter = sd.drafters.FirstOf(before, drafter) if before else drafter
        batch = BatchGeneration(self.target, drafter, Options(**options), Schedule(max_rows))
        for prompt, length in zip(PROMPTS, LENGTHS, strict=True):
            batch.insert(Request(prompt, length, sd.Sampling()))
        self.texts: dict[int, list[int]] = {}
        self.accepted = 0
        for uid, token, *_ in batch.run():
            self.texts.setdefault(uid, []).append(token.token)
            self.accepted += token.from_draft


def drafted_alone(model: nn.Module, text: list[int], length: int) -> list[int]:
    """The model's greedy continuation, every token from a pass over the whole text."""
    text = list(text)
    for _ in range(length):
        text.append(int(np.argmax(logits(model, text))))
    return text[-length:]


def logits(model: nn.Module, text: list[int]) -> list[float]:
    return model(mx.array([text]))[0, -1].tolist()


class Sometimes(sd.Drafter, sd.Session):
    """A look-up that is right for 20 tokens of every 30: the model is not asked then."""

    cheap = True

    def __init__(self, name: str = "qwen2", prompt: Sequence[int] = ()) -> None:
        self.name, self.text = name, list(prompt)
        self.full = [*prompt, *plain(name)[PROMPTS.index(prompt)]] if prompt else []

    def begin(self, prompt: Sequence[int], context: Any) -> Sometimes:
        return Sometimes(self.name, list(prompt))

    def propose(self, limit: int) -> Draft:
        is_silent = len(self.text) % 30 >= 20
        return Draft() if is_silent else Draft(self.full[len(self.text) :][: min(2, limit)])

    def observe(self, tokens: Sequence[int]) -> None:
        self.text += tokens


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], Draft]]:
    """Each draft that a text asked for, and the text."""
    found: list[tuple[list[int], Draft]] = []
    real = SharedSession.propose

    def propose(self: SharedSession, limit: int) -> Draft:
        draft = real(self, limit)
        found.append((list(self.source.tokens), draft))
        return draft

    monkeypatch.setattr(SharedSession, "propose", propose)
    monkeypatch.setattr(shared_drafts, "MOST_PENDING", 3)  # texts that wait longer are read apart
    return found


BESIDE = [("qwen2", 4, True), ("gemma3_text", 4, False)]
"""Target, draft length, and whether a look-up drafts too."""


@in_one_test(("name", "length", "has_look_up"), BESIDE)
def test_drafts_are_those_of_the_model_alone(name, length, has_look_up, asked) -> None:
    """Whichever rows came and went, and whatever was drafted and accepted before."""
    asked.clear()
    batch = Batch(name, before=Sometimes(name) if has_look_up else None, num_draft_tokens=length)
    assert batch.texts == dict(enumerate(plain(name)))
    assert len(asked) > 15
    assert batch.accepted > 20
    for text, draft in asked[::3]:
        assert draft.tokens.tolist() == drafted_alone(batch.draft, text, len(draft))


HEADS = {  # target -> its prediction layer, or heads of other kinds
    "qwen3_next": {"mtp": heads.mtp("qwen3_next")},
    "deepseek_v3": {"mtp": heads.mtp("deepseek_v3")},
    "mimo": {"mtp": heads.mtp("mimo")},
    "qwen2": {kind: heads.HEADS[kind] for kind in ("eagle1", "eagle3", "eagle3 variants")},
}


OF_A_KIND = [(name, kind) for name, kinds in HEADS.items() for kind in kinds]


@pytest.mark.parametrize(
    ("name", "kind"), cases(OF_A_KIND, ("qwen3_next", "mtp"), ("qwen2", "eagle3 variants"))
)
def test_drafts_are_those_of_the_head_alone(name, kind, monkeypatch) -> None:
    """Of the same states, in a batch whose rows come and go; a few layers draft alone in it."""
    head = HeadDrafter(heads.random_head(HEADS[name][kind], tiny.build(name)))
    both = sd.drafters.FirstOf(Sometimes(name), head)
    found: list[dict[tuple[int, ...], list[int]]] = [{}, {}]
    with monkeypatch.context() as patched:
        for kinds, where in ((WritingSession, found[0]), (SharedSession, found[1])):

            def propose(
                self: Any, limit: int, real: Any = kinds.propose, kept: Any = where
            ) -> Draft:
                draft: Draft = real(self, limit)
                kept[tuple(self.source.tokens)] = list(map(int, draft.tokens))
                return draft

            patched.setattr(kinds, "propose", propose)
        patched.setattr(shared_drafts, "MOST_WAITING", 9)  # texts that wait longer are read apart
        for prompt, length in zip(PROMPTS, LENGTHS, strict=True):
            list(
                sd.speculate(tiny.build(name), prompt, both, max_tokens=length, num_draft_tokens=3)
            )
        alone = dict(found[0])
        batch = Batch(name, head=both, num_draft_tokens=3)
    assert batch.texts == dict(enumerate(plain(name)))
    assert batch.accepted > 20
    rows = found[1]
    assert len(rows) > 15
    together = rows.keys() & alone.keys()
    assert len(together) > 0.9 * len(rows)
    assert {text: alone[text] for text in together} == {text: rows[text] for text in together}


def test_a_head_begins_where_the_prompt_was_not_read_before(monkeypatch: Any) -> None:
    """Samples of one prompt: it pairs the states that it sees with the tokens after them."""
    target, real, counts = tiny.build("qwen2"), SharedSession.propose, list[int]()

    def propose(self: SharedSession, limit: int) -> Draft:
        waiting = self.source.waiting
        counts.append(waiting.start + waiting.num_rows - len(self.source.tokens))
        return real(self, limit)

    monkeypatch.setattr(SharedSession, "propose", propose)
    head = HeadDrafter(heads.random_head(heads.HEADS["eagle3"], target))
    batch = BatchGeneration(target, head, Options(num_draft_tokens=2))
    asked = Request(PROMPTS[3], LENGTHS[3], sd.Sampling())
    for _ in range(2):
        batch.insert(asked)
    texts: dict[int, list[int]] = {0: [], 1: []}
    for uid, token, *_ in batch.run():
        texts[uid].append(token.token)
    assert texts == dict.fromkeys(texts, plain("qwen2")[3])
    assert set(counts) == {-1}  # the state of all but the last token


def test_all_rows_draft_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    widths, real = [], DraftPasses.draft

    def draft(self: DraftPasses, *asked: Any) -> None:
        real(self, *asked)
        widths.append(len(self.sessions))

    monkeypatch.setattr(DraftPasses, "draft", draft)
    batch = Batch("qwen2", max_rows=4, num_draft_tokens=3)
    assert max(widths) == 4
    assert len(widths) < max(map(len, batch.texts.values()))  # one a round, not one a text


def test_drawn_texts_are_repeatable_and_a_recurrent_model_drafts_alone() -> None:
    target, model = tiny.build("qwen2"), tiny.build("mamba")
    drafter = sd.ModelDrafter(like(target, "qwen2"))
    options: dict[str, Any] = {"num_draft_tokens": 3, "temp": 1.0, "seed": 5, "max_tokens": 12}
    texts = [
        sd.batch_generate(target, tiny_text.tokenizer(), PROMPTS, drafter=drafter, **options).texts
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    assert type(SharedDrafts()(sd.ModelDrafter(model), [1], DraftContext())) is WritingSession


@pytest.mark.parametrize("length", [5, 20])
def test_a_text_that_ends_leaves_what_was_read_to_the_caller(length: int, asked: Any) -> None:
    """The server keeps a draft model's caches for the next turn."""
    model = tiny.build("qwen2")
    rows, context = (
        SharedDrafts(),
        DraftContext(sampling=sd.Sampling(), vocab_size=model.args.vocab_size),
    )
    caches, earlier = [make_prompt_cache(model) for _ in range(3)], [5, 6, 7]
    model(mx.array([earlier]), cache=caches[0])
    texts = [[1, 2, 3, 4, 5], [7, 8], [1]]
    sessions: list[Any] = [
        rows(sd.ModelDrafter(model), text, replace(context, draft_cache=cache))
        for text, cache in zip(texts, caches, strict=True)
    ]
    for session, text in zip(sessions, texts, strict=True):
        accepted = session.propose(6).tokens.tolist()[:4]
        session.observe([*accepted, 0])
        text += [*accepted, 0]
    sessions[2].observe([4, 5, 6, 7, 8, 9])  # it waits to be read, the others do not
    sessions[0].close(length)
    read = sessions[0].source.rollback
    assert read.caches is caches[0]
    assert read.position == min(length, len(texts[0]) - 1)
    held, last = [*earlier, *texts[0][: read.position]], texts[0][read.position :][:1]
    fed = model(mx.array([last]), cache=caches[0])[0, -1]
    assert fed.tolist() == pytest.approx(logits(model, held + last), abs=1e-4)
    assert sessions[1].propose(3).tokens.tolist() == drafted_alone(model, texts[1], 3)


def test_what_drafting_adds_to_a_pass_is_the_cost_of_its_steps() -> None:
    """And not of a pass as wide, by which look-ups are judged."""
    shared = SharedLength(Tuning())
    row = RowLength(shared)
    row.limit("model", cheap=False)
    shared.record(0, [(row, 1)], 1.0, steady=True)
    cost_model = shared.prices.cost_model
    shared.record(4, [(row, 3)], cost_model(5) + 2.0, steady=True, parts={"model"})
    assert list(shared.models["model"].learned.steps.first) == pytest.approx([0.5])
    assert not cost_model.ratios
