"""Several texts at once: each is what it is alone, whatever the others do."""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors

import narrow
import specdec_mlx as sd
import tiny
import tiny_text
from counting import Counting
from scripted import OracleDrafter, ScriptedSession
from selection import in_one_test
from specdec_mlx.batch.generation import BatchGeneration
from specdec_mlx.batch.rows import Request, RowDrafting, RowToken, samples_of
from specdec_mlx.checks import chi_square
from specdec_mlx.contracts import Draft, DraftContext, Drafter, Features
from specdec_mlx.target import row_caches
from specdec_mlx.target.inputs import CacheOptions
from specdec_mlx.target.row_pass import RowPasses

BLOCK = [5, 17, 99, 3, 41, 8]
PROMPTS = [
    [9],
    [*BLOCK, 7],
    BLOCK * 2,
    [11, 12, 13],
    BLOCK * 4 + BLOCK[:3],
    [30, 31] * 3,
    BLOCK[2:] + BLOCK,
    [50, 60, 70, 80, 90],
]
LENGTHS = [40, 12, 30, 1, 21, 7, 34, 26]
"""Some prompts and texts end before a window of 16 tokens, others lie across its end or past it."""

ARCHITECTURES = [
    *("qwen2", "gpt_oss", "gemma3_text", "qwen3_next", "lfm2", "falcon_h1", "deepseek_v3"),
    "ministral3",  # which scales queries by position, from 32 on
]

ONE_BY_ONE: dict[str, dict[str, Any]] = {
    "mamba": {},  # recurrent without a mask
    "llama4": {},  # with caches of its own
    "gemma2": {},  # with a mask for one text only
    "internlm2": tiny.DYNAMIC,  # the base of its rope goes by the length, one for all rows
    "internlm3": tiny.DYNAMIC,
}


@functools.cache
def model(name: str) -> nn.Module:
    return tiny.build(name)


def said(target: nn.Module, prompt: Sequence[int], length: int, **options: Any) -> list[int]:
    """The text of one prompt, alone."""
    return [t.token for t in sd.speculate(target, prompt, max_tokens=length, **options)]


@functools.cache
def alone(name: str) -> list[list[int]]:
    """The greedy text of each prompt, by plain decoding."""
    return [said(model(name), *pair) for pair in zip(PROMPTS, LENGTHS, strict=True)]


@dataclass(frozen=True, eq=False)
class Oracles:
    """An oracle for each prompt of an architecture, wrong in a share of the positions."""

    name: str = "qwen2"
    wrong: float = 0.4

    def begin(self, prompt: Sequence[int], context: DraftContext) -> ScriptedSession:
        text = alone(self.name)[PROMPTS.index(list(prompt))]
        drafter = OracleDrafter(text, context.vocab_size or 0, self.wrong, len(prompt))
        return drafter.begin(prompt, context)


def collected(rows: Iterator[RowToken], count: int) -> list[list[int]]:
    """The tokens of each text."""
    texts: list[list[int]] = [[] for _ in range(count)]
    for row in rows:
        texts[row.uid].append(row.token.token)
    return texts


def texts_of(batch: BatchGeneration, numbers: Sequence[int]) -> list[list[int]]:
    """The texts of some of the prompts."""
    for i in numbers:
        batch.insert(Request(PROMPTS[i], LENGTHS[i]))
    return collected(batch.run(), len(numbers))


def written(target: nn.Module, drafter: Drafter | None, **options: Any) -> list[list[int]]:
    """All prompts' texts, three at a time, greedy."""
    return texts_of(BatchGeneration(target, drafter, max_rows=3, **options), range(len(PROMPTS)))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_greedy_text_is_what_it_is_alone(name: str) -> None:
    """Token by token, with drafts of which two in five tokens are wrong."""
    assert BatchGeneration(model(name))._passes.is_together
    for draft_length in (0, 1, 3, "auto"):
        texts = written(model(name), Oracles(name), draft_length=draft_length)
        assert texts == alone(name), draft_length


@in_one_test(
    "drafter",
    [
        sd.PromptLookupDrafter(),
        sd.NGramDrafter(stochastic=True),
        sd.SuffixDrafter(),
        sd.FirstOf(sd.PromptLookupDrafter(), sd.NGramDrafter()),
        sd.BestOf(sd.SuffixDrafter(), sd.NGramDrafter()),
        sd.ModelDrafter(tiny.build("qwen2", seed=1)),
    ],
)
def test_every_drafter_leaves_the_texts_alone(drafter: Drafter) -> None:
    """Each text has a session of its own, and so caches of the draft model."""
    assert written(model("qwen2"), drafter, draft_length=3) == alone("qwen2")


def test_right_drafts_save_passes() -> None:
    """Two texts of 40 tokens with drafts of four right ones take about 8 passes each, together."""
    batch = BatchGeneration(model("qwen2"), Oracles(wrong=0.0), draft_length=4)
    assert texts_of(batch, [0, 0]) == [alone("qwen2")[0]] * 2
    assert batch.num_rounds <= 1 + 8


@pytest.mark.parametrize("name", ["qwen2", "gemma3_text"])
def test_empty_slots_may_be_dropped_at_any_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for two of them, they are dropped in nearly every round."""
    monkeypatch.setattr(row_caches, "MOST_EMPTY", 2)
    assert written(model(name), Oracles(name), draft_length=4) == alone(name)


@pytest.mark.parametrize("rule", ["match", "coupled"])
@pytest.mark.parametrize("drafter", [sd.PromptLookupDrafter(), sd.NGramDrafter(stochastic=True)])
def test_a_seeds_text_is_what_it_is_alone(rule: str, drafter: Drafter) -> None:
    """The target's own draws are keyed by the row's own seed and its own positions."""
    target, sampling = narrow.model(), sd.Sampling(temp=1.0)
    how: dict[str, Any] = {"rule": rule, "draft_length": 3}
    batch = BatchGeneration(target, drafter, max_rows=3, **how)
    prompts = [[1, 2, 3, 1, 2], [0], [3, 3, 1], [2, 1] * 5]
    expected = []
    for seed, prompt in enumerate(prompts):
        batch.insert(Request(prompt, 20 + seed, sampling, seed))
        one = said(target, prompt, 20 + seed, drafter=drafter, sampler=sampling, seed=seed, **how)
        expected.append(one)
    assert collected(batch.run(), len(prompts)) == expected


def test_two_rows_have_the_targets_distribution_and_nothing_to_do_with_each_other() -> None:
    """At temperature 1: each row's first two tokens, and the pair of both rows' second ones."""
    target, num_pairs = narrow.model(), 400
    prompts = [[1, 2, 3, 1, 2], [3, 0, 3]]
    batch = BatchGeneration(
        target, sd.NGramDrafter(stochastic=True), rule="rejection", draft_length=2, max_rows=2
    )
    for seed in range(num_pairs):
        for row, prompt in enumerate(prompts):
            batch.insert(Request(prompt, 2, sd.Sampling(temp=1.0), 2 * seed + row))
    texts = np.array(collected(batch.run(), 2 * num_pairs)).reshape(num_pairs, 2, 2)
    exacts = [two_tokens(target, prompt) for prompt in prompts]
    pairs = [(4 * texts[:, row, 0] + texts[:, row, 1], exacts[row]) for row in (0, 1)]
    seconds = np.outer(exacts[0].sum(axis=0), exacts[1].sum(axis=0))
    for samples, exact in (*pairs, (4 * texts[:, 0, 1] + texts[:, 1, 1], seconds)):
        expected = exact.ravel() * num_pairs
        counts = np.bincount(samples, minlength=16)
        statistic = ((counts - expected) ** 2 / np.maximum(expected, 1e-9)).sum()
        assert statistic < chi_square.limit(15)


def two_tokens(target: nn.Module, prompt: Sequence[int]) -> np.ndarray:
    """The distribution of the two tokens after a prompt, [4, 4]."""

    def after(tokens: Sequence[int]) -> np.ndarray:
        logits = target(mx.array([tokens]), cache=make_prompt_cache(target))[0, -1]
        return np.array(mx.softmax(logits.astype(mx.float32)))[: narrow.NUM_TOKENS]

    first = after(prompt)
    return np.stack([first[token] * after([*prompt, token]) for token in range(len(first))])


@given(
    arrivals=st.lists(
        st.tuples(
            st.integers(0, 7), st.integers(1, 14), st.integers(0, 20), st.none() | st.integers(1, 6)
        ),
        min_size=1,
        max_size=9,
    ),
    max_rows=st.integers(1, 4),
    draft_length=st.integers(0, 4),
)
@settings(max_examples=25, deadline=None)
def test_texts_may_come_and_go_at_any_time(
    arrivals: list[tuple[int, int, int, int | None]], max_rows: int, draft_length: int
) -> None:
    """Whole texts are what they are alone; of those taken out there is the beginning."""
    batch = BatchGeneration(
        model("qwen2"),
        Oracles(),
        draft_length=draft_length,
        max_rows=max_rows,
        prefill_step_size=5,
    )
    waiting = sorted(arrivals, key=lambda arrival: arrival[2])
    inserted: list[tuple[int, int, int, int | None]] = []
    texts: list[list[int]] = []
    reasons: dict[int, str | None] = {}

    def arrive() -> None:
        total = sum(map(len, texts))
        while waiting and (waiting[0][2] <= total or not batch.num_open):
            i, length, _, _ = waiting[0]
            inserted.append(waiting.pop(0))
            texts.append([])
            batch.insert(Request(PROMPTS[i], min(length, LENGTHS[i])))

    arrive()
    while batch.num_open:
        for row in batch.run():
            texts[row.uid].append(row.token.token)
            reasons[row.uid] = row.finish_reason
            if len(texts[row.uid]) == inserted[row.uid][3]:
                batch.remove(row.uid)
            arrive()
        arrive()
    for uid, (text, (i, length, _, leaves_after)) in enumerate(zip(texts, inserted, strict=True)):
        whole = alone("qwen2")[i][: min(length, LENGTHS[i])]
        assert text == whole[:leaves_after]
        assert (reasons[uid] == "length") == (len(text) == len(whole))


LONG = [*BLOCK, 21] * 7
"""A prompt of 49 tokens: 10 steps of 5, of which the last is read with the first token."""


@pytest.mark.parametrize("name", ["qwen2", "qwen3_next"])
def test_a_long_prompt_is_read_between_the_passes_of_the_others(name: str) -> None:
    """Each of its steps keeps them waiting once; both texts are what they are alone."""
    batch = BatchGeneration(model(name), prefill_step_size=5)
    batch.insert(Request(PROMPTS[0], 40))
    rows = batch.run()
    texts: list[list[int]] = [[next(rows).token.token], []]
    batch.insert(Request(LONG, 6))
    order = []
    for row in rows:
        order.append(row.uid)
        texts[row.uid].append(row.token.token)
    assert texts == [alone(name)[0], said(model(name), LONG, 6)]
    assert 9 <= order.index(1) <= 11


@pytest.mark.parametrize("name", ["qwen2", "gpt_oss", "qwen3_next"])
def test_short_prompts_are_read_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one padded pass, but where padding would take longer than passes of their own."""
    read: list[list[int]] = []
    real = RowPasses.read

    def note(passes: RowPasses, texts: Sequence[Sequence[int]]) -> None:
        read.append([len(text) for text in texts])
        real(passes, texts)

    monkeypatch.setattr(RowPasses, "read", note)
    batch = BatchGeneration(model(name), Oracles(name), draft_length=2)
    assert texts_of(batch, [1, 5, 7]) == [alone(name)[i] for i in (1, 5, 7)]
    assert read == [[6, 5, 4]]
    batch = BatchGeneration(model(name))
    for prompt in (PROMPTS[7], LONG):
        batch.insert(Request(prompt, 3))
    assert collected(batch.run(), 2)[0] == alone(name)[7][:3]
    assert len(read) == 1


@in_one_test("leaves", ["is removed", "with all others"])
def test_a_text_may_leave_while_its_prompt_is_read(leaves: str) -> None:
    """No token of it comes, its drafter's session is closed, and the others go on."""
    sessions: list[ScriptedSession] = []

    class Noting:
        def begin(self, prompt: Sequence[int], context: DraftContext) -> ScriptedSession:
            sessions.append(ScriptedSession(lambda start, limit: []))
            return sessions[-1]

    batch = BatchGeneration(model("qwen2"), Noting(), prefill_step_size=5)
    batch.insert(Request(PROMPTS[0], 40))
    rows = batch.run()
    text = [next(rows).token.token]
    batch.insert(Request(LONG, 6))
    text += [next(rows).token.token for _ in range(4)]
    assert batch.num_open == 2
    if leaves == "is removed":
        batch.remove(1)
        text += [row.token.token for row in rows]
    else:
        rows.close()
    assert text == alone("qwen2")[0][: 40 if leaves == "is removed" else 5]
    assert [session.closed_at is not None for session in sessions] == [True, True]
    assert batch.num_open == 0


def test_processors_and_stop_tokens_are_each_rows_own() -> None:
    """A repetition penalty sees its row's text alone; a stop token ends its row alone."""
    processors = make_logits_processors(repetition_penalty=1.6, repetition_context_size=12)
    penalised = said(model("qwen2"), PROMPTS[2], 25, logits_processors=processors)
    stop = alone("qwen2")[0][5]
    batch = BatchGeneration(
        model("qwen2"), Oracles(), draft_length=3, stop_tokens=frozenset({stop})
    )
    batch.insert(Request(PROMPTS[0], 40))
    batch.insert(Request(PROMPTS[2], 25, logits_processors=processors))
    expected = [
        text[: text.index(stop) + 1] if stop in text else text
        for text in (alone("qwen2")[0], penalised)
    ]
    assert collected(batch.run(), 2) == expected


def test_a_sampler_of_the_callers_is_asked_row_by_row() -> None:
    """It may remember what it saw, so it sees each position once, in order."""
    own = lambda logprobs: mx.argmax(logprobs, axis=-1)  # noqa: E731 (an opaque callable)
    batch = BatchGeneration(model("qwen2"), Oracles(), draft_length=3)
    for prompt, length in zip(PROMPTS[:3], LENGTHS, strict=False):
        batch.insert(Request(prompt, length, own))
    assert collected(batch.run(), 3) == alone("qwen2")[:3]


@in_one_test("name", ONE_BY_ONE)
def test_what_cannot_be_rows_is_written_one_by_one(name: str) -> None:
    """It is said once for a loaded model, and the texts are the same."""
    target = tiny.build(name, **ONE_BY_ONE[name])
    with pytest.warns(UserWarning, match="one by one"):
        texts = written(target, sd.PromptLookupDrafter())
    assert texts == [said(target, *pair) for pair in zip(PROMPTS, LENGTHS, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        BatchGeneration(target)


def test_a_drafter_that_reads_the_target_goes_one_by_one() -> None:
    """Its session sees each position of a text, in order, but for the last."""
    seen: dict[int, int] = {}

    class Session(ScriptedSession):
        def see(self, rows: Any) -> None:
            seen[id(self)] = seen.get(id(self), 0) + rows.layers[0].shape[0]

    @dataclass(frozen=True)
    class Reader:
        features: Features = field(default_factory=lambda: Features(layers=(0,)))

        def begin(self, prompt: Sequence[int], context: DraftContext) -> Session:
            sessions.append(Session(lambda start, limit: []))
            return sessions[-1]

    sessions: list[Session] = []
    with pytest.warns(UserWarning, match="Reader reads the target's states"):
        assert written(model("qwen2"), Reader(), draft_length=2) == alone("qwen2")
    lengths = [len(prompt) + n - 1 for prompt, n in zip(PROMPTS, LENGTHS, strict=True)]
    assert [seen[id(session)] for session in sessions] == lengths


@dataclass(frozen=True)
class Failing:
    """A drafter that raises, at a given time, in the text of one prompt."""

    prompt: Sequence[int]
    when: str

    def begin(self, prompt: Sequence[int], context: DraftContext) -> ScriptedSession:
        mine = list(prompt) == list(self.prompt)
        if mine and self.when == "begin":
            raise RuntimeError("no more")
        return FailingSession(self.when if mine else "")


class FailingSession(ScriptedSession):
    def __init__(self, when: str) -> None:
        super().__init__(lambda start, limit: [])
        self.when = when

    def propose(self, limit: int) -> Draft:
        late = len(self.observed) >= 3
        if late and self.when == "propose":
            raise RuntimeError("no more")
        return Draft([-1] if late and self.when == "draft" else [])

    def observe(self, tokens: Sequence[int]) -> None:
        super().observe(tokens)
        if len(self.observed) >= 3 and self.when == "observe":
            raise RuntimeError("no more")


@in_one_test("when", ["propose", "observe"])
def test_what_a_drafter_raises_comes_after_what_was_accepted(when: str) -> None:
    """As in a single generation."""
    texts: list[list[int]] = [[], []]
    batch = BatchGeneration(model("qwen2"), Failing(PROMPTS[0], when), draft_length=2)
    for i in (0, 2):
        batch.insert(Request(PROMPTS[i], 20))
    with pytest.raises(RuntimeError, match="no more"):
        for row in batch.run():
            texts[row.uid].append(row.token.token)
    assert min(map(len, texts)) >= 3
    assert texts == [alone("qwen2")[i][: len(text)] for text, i in zip(texts, (0, 2), strict=True)]


@in_one_test("when", ["begin", "propose", "draft", "observe", "logits"])
def test_a_text_that_cannot_go_on_ends_alone(when: str) -> None:
    """If somebody is told; the others, later ones too, are what they are alone."""
    errors: dict[int, Exception] = {}
    batch = BatchGeneration(
        model("qwen2"),
        Failing(PROMPTS[2], when),
        draft_length=2,
        max_rows=2,
        on_error=errors.setdefault,
    )

    def broken(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits * (mx.nan if tokens.shape[0] > len(PROMPTS[2]) + 3 else 1)

    for i in (0, 2, 4):
        processors = [broken] if when == "logits" and i == 2 else []
        batch.insert(Request(PROMPTS[i], 20, logits_processors=processors))
    texts = collected(batch.run(), 3)
    assert list(errors) == [1]
    assert len(texts[1]) < 8
    lengths = [20, len(texts[1]), 20]
    expected = [alone("qwen2")[i][:n] for i, n in zip((0, 2, 4), lengths, strict=True)]
    assert texts == expected


WORDS = ["the cat the cat sat", "a", "in the thing on the thing on the", "hello"]


@in_one_test("drafter", [None, "prompt-lookup"])
def test_batch_generate_is_mlx_lms_with_one_argument_more(drafter: str | None) -> None:
    """Texts, ids, log-probabilities and caches are those of `mlx_lm.batch_generate`."""
    target, tokenizer = tiny_text.model(), tiny_text.tokenizer()
    prompts = [tokenizer.encode(text) for text in WORDS]
    options: dict[str, Any] = {
        "max_tokens": [20, 40, 10, 30],
        "return_prompt_caches": True,
        "return_token_ids": True,
        "return_logprobs": True,
    }
    theirs = mlx_lm.batch_generate(target, tokenizer, prompts, **options)
    ours = sd.batch_generate(target, tokenizer, prompts, drafter=drafter, **options)
    assert isinstance(ours, type(theirs))
    assert (ours.texts, ours.token_ids) == (theirs.texts, theirs.token_ids)
    for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
        assert mine == pytest.approx(other, abs=1e-4)
    for mine, other in zip(ours.caches, theirs.caches, strict=True):
        assert mine[0].offset == other[0].offset
        keys = [cache[-1].keys[..., : cache[-1].offset, :] for cache in (mine, other)]
        assert mx.allclose(keys[0], keys[1], atol=1e-4)
    assert ours.stats.generation_tokens == theirs.stats.generation_tokens
    assert len(ours.speculation) == len(prompts)


@pytest.mark.parametrize("name", ["qwen2", "gemma3_text", "qwen3_next", "mamba"])
@pytest.mark.filterwarnings("ignore:specdec_mlx")
def test_returned_caches_go_on_where_the_text_ended(name: str) -> None:
    """A second turn on them is what it is on caches of a text that was written alone."""
    target = model(name)
    batch = BatchGeneration(target, Oracles(name), draft_length=3, returns_caches=True)
    for prompt, length in zip(PROMPTS[:3], LENGTHS, strict=False):
        batch.insert(Request(prompt, length))
    caches = {row.uid: row.prompt_cache for row in batch.run() if row.finish_reason}
    again = BatchGeneration(target, sd.PromptLookupDrafter(), draft_length=2)
    for uid in range(3):
        again.insert(Request([4, 44], 12, prompt_cache=caches[uid]))
    texts = [[*prompt, *text] for prompt, text in zip(PROMPTS[:3], alone(name), strict=False)]
    assert collected(again.run(), 3) == [said(target, [*text, 4, 44], 12) for text in texts]


def test_a_stream_asks_for_prompts_as_places_come_free() -> None:
    """An iterator of prompts is read no further than there are places."""
    target, tokenizer = tiny_text.model(), tiny_text.tokenizer()
    asked: list[int] = []

    def arriving() -> Iterator[str]:
        for i, text in enumerate(WORDS):
            asked.append(i)
            yield text

    responses = sd.batch_stream_generate(
        target, tokenizer, arriving(), max_tokens=6, drafter="ngram", completion_batch_size=2
    )
    first = next(responses)
    assert (first.index, asked) == (0, [0, 1])
    texts = {first.index: first.text}
    for response in responses:
        texts[response.index] = texts.get(response.index, "") + response.text
    expected = [sd.generate(target, tokenizer, text, max_tokens=6) for text in WORDS]
    assert [texts[i] for i in range(4)] == expected


@pytest.mark.parametrize("name", ["qwen2", "gemma3_text", "lfm2", "mamba"])
@pytest.mark.filterwarnings("ignore:specdec_mlx")
def test_samples_of_a_prompt_are_the_texts_of_their_seeds(name: str) -> None:
    """Each is what it is alone; the prompt is read once, also after caches that were given."""
    target, prompt, earlier = model(name), PROMPTS[4], PROMPTS[1]
    given = make_prompt_cache(target)
    target(mx.array([earlier]), cache=given)
    sampling = sd.Sampling(temp=1.0)
    request = Request(prompt, 15, sampling, prompt_cache=given)
    fed = Counting(target)
    stream = mx.default_stream(mx.default_device())
    requests = list(samples_of(fed, request, 3, CacheOptions(None, 8), stream))
    assert fed.num_passes <= 1 + 4, "read once, and not three times"
    batch = BatchGeneration(target, sd.PromptLookupDrafter(min_ngram=1), draft_length=3)
    expected = []
    for seed, sample in enumerate(requests):
        batch.insert(dataclasses.replace(sample, seed=seed))
        cache = copy.deepcopy(given)
        expected.append(said(target, prompt, 15, sampler=sampling, seed=seed, prompt_cache=cache))
    assert collected(batch.run(), 3) == expected
    assert expected[0] != expected[1]


def test_samples_come_prompt_by_prompt_with_a_seed_each() -> None:
    """`num_samples` texts of each prompt, those of the seeds counted through."""
    target, tokenizer = tiny_text.model(), tiny_text.tokenizer()
    several = sd.batch_stream_generate(
        *(target, tokenizer, WORDS[:2]),
        max_tokens=12,
        temp=1.0,
        seed=7,
        drafter="ngram",
        num_samples=3,
    )
    texts: dict[tuple[int, int], str] = {}
    for response in several:
        place = response.index, response.sample
        texts[place] = texts.get(place, "") + response.text
    assert texts == {
        (i, sample): sd.generate(
            target, tokenizer, prompt, max_tokens=12, temp=1.0, seed=7 + 3 * i + sample
        )
        for i, prompt in enumerate(WORDS[:2])
        for sample in range(3)
    }


@in_one_test("wrong", [{"num_samples": 0}, {"max_tokens": [3, 0, 3, 3]}])
def test_wrong_numbers_are_refused(wrong: dict[str, Any]) -> None:
    """Before anything is computed."""
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=0"):
        sd.batch_generate(tiny_text.model(), tiny_text.tokenizer(), WORDS, **wrong)


def test_a_text_may_go_on_that_was_begun_elsewhere() -> None:
    """Its first tokens count: as positions of its noise, and among the most wanted."""
    target, sampling, prompt = narrow.model(), sd.Sampling(temp=1.0), [1, 2, 3, 1, 2]
    whole = said(target, prompt, 20, sampler=sampling, seed=5)
    own = RowDrafting(sd.PromptLookupDrafter(), "match", draft_length=2)
    batch = BatchGeneration(target)
    for num_said in (1, 7, 19):
        text = [*prompt, *whole[:num_said]]
        batch.insert(Request(text, 20, sampling, 5, num_said=num_said, drafting=own))
    assert collected(batch.run(), 3) == [whole[num_said:] for num_said in (1, 7, 19)]
