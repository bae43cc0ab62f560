"""Several texts at once: each is what it is alone, whatever the others do."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
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
from scipy.stats import chisquare

import narrow
import specdec_mlx as sd
import tiny
import tiny_text
from scripted import OracleDrafter, ScriptedSession
from selection import cases, in_one_test
from specdec_mlx import batch_caches as row_caches
from specdec_mlx import lab
from specdec_mlx.batch.passes import SharedPasses, make_passes
from specdec_mlx.batch.rounds import BatchGeneration
from specdec_mlx.batch.schedule import BatchToken, OwnDrafting, Request, Schedule
from specdec_mlx.contracts import DraftContext, Drafter, Features
from specdec_mlx.options import Options
from specdec_mlx.sequence import PromptReader, split_cache

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

LONG = [*BLOCK, 21] * 7
"""A prompt of 49 tokens: 10 steps of 5, of which the last is read with the first token."""

ARCHITECTURES = [
    *("qwen2", "gpt_oss", "gemma3_text", "qwen3_next", "lfm2", "falcon_h1", "deepseek_v3"),
    "ministral3",  # which scales queries by position, from 32 on
]

ONE_BY_ONE: dict[str, dict[str, Any]] = {
    "mamba": {},  # recurrent without a mask
    "llama4": {},  # with caches of its own
    "gemma2": {},  # with a mask for one text only
    "minimax_m3_vl": {},  # which chooses blocks of rows, where padding counts
    "internlm2": tiny.DYNAMIC,  # the base of its rope goes by the length, one for all rows
    "internlm3": tiny.DYNAMIC,
}

model = functools.cache(tiny.build)


def said(target: nn.Module, prompt: Sequence[int], length: int, **options: Any) -> list[int]:
    return [t.token for t in sd.speculate(target, prompt, max_tokens=length, **options)]


@functools.cache
def alone(name: str = "qwen2") -> list[list[int]]:
    """The greedy text of each prompt, by plain decoding."""
    return [said(model(name), *pair) for pair in zip(PROMPTS, LENGTHS, strict=True)]


def oracle(name: str = "qwen2", wrong: float = 0.4) -> OracleDrafter:
    """Knows the texts of an architecture, and is wrong in a share of the positions."""
    return OracleDrafter(lambda prompt: alone(name)[PROMPTS.index([*prompt])], 128, wrong)


@dataclass(frozen=True, eq=False)
class Sessions(sd.Drafter):
    """A drafter that drafts nothing, or has each prompt's session made; those that were begun."""

    make: Callable[[Sequence[int]], Any] = lambda prompt: ScriptedSession(lambda start, limit: [])
    begun: list[Any] = field(default_factory=list)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Any:
        self.begun.append(self.make(prompt))
        return self.begun[-1]


def collected(rows: Iterable[BatchToken], count: int) -> list[list[int]]:
    texts: list[list[int]] = [[] for _ in range(count)]
    for row in rows:
        texts[row.uid].append(row.token.token)
    return texts


def written(batch: BatchGeneration, *requests: Request) -> list[list[int]]:
    for request in requests:
        batch.insert(request)
    return collected(batch.run(), len(requests))


def texts_of(batch: BatchGeneration, numbers: Sequence[int] = range(len(PROMPTS))) -> Any:
    """The texts of some of the prompts."""
    return written(batch, *(Request(PROMPTS[i], LENGTHS[i]) for i in numbers))


@pytest.mark.parametrize("name", cases(ARCHITECTURES, "qwen2", "qwen3_next", "gemma3_text"))
def test_each_greedy_text_is_what_it_is_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three at a time, with drafts of which two in five tokens are wrong; with room for two empty
    slots, these are dropped in nearly every round. Right drafts save passes."""
    assert BatchGeneration(model(name)).passes.is_together
    for length, most_empty in ((0, 64), (3, 64), ("auto", 64), (4, 2)):
        monkeypatch.setattr(row_caches, "MOST_EMPTY", most_empty)
        how = Options(num_draft_tokens=length)
        batch = BatchGeneration(model(name), oracle(name), how, Schedule(3))
        assert texts_of(batch) == alone(name), length
    batch = BatchGeneration(model(name), oracle(name, wrong=0.0), Options(num_draft_tokens=4))
    assert texts_of(batch, [0, 0]) == [alone(name)[0]] * 2
    assert batch.num_rounds <= 1 + 8


def test_a_row_sees_no_more_positions_than_its_cache_keeps() -> None:
    """plamo3 asks for a mask that is one position wider than its window."""
    assert texts_of(BatchGeneration(model("plamo3")), [0, 1]) == alone("plamo3")[:2]


@pytest.mark.parametrize("rule", ["match", "coupled"])
@pytest.mark.parametrize("drafter", [sd.PromptLookupDrafter(), lab.StochasticNGramDrafter()])
def test_a_seeds_text_is_what_it_is_alone(rule: str, drafter: Drafter) -> None:
    """The target's own draws are keyed by the row's own seed and its own positions."""
    target, sampling = narrow.model(), sd.Sampling(temp=1.0)
    how: dict[str, Any] = {"rule": rule, "num_draft_tokens": 3}
    batch = BatchGeneration(target, drafter, Options(**how), Schedule(3))
    prompts = [[1, 2, 3, 1, 2], [0], [3, 3, 1], [2, 1] * 5]
    requests = [Request(prompt, 20 + i, sampling, i) for i, prompt in enumerate(prompts)]
    assert written(batch, *requests) == [
        said(target, prompt, 20 + i, drafter=drafter, sampler=sampling, seed=i, **how)
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.full
def test_two_rows_have_the_targets_distribution_and_nothing_to_do_with_each_other() -> None:
    """At temperature 1: each row's first two tokens, and the pair of both rows' second ones."""
    target, num_pairs, prompts = narrow.model(), 200, [[1, 2, 3, 1, 2], [3, 0, 3]]
    drafter = lab.StochasticNGramDrafter()
    how = Options(rule="rejection", num_draft_tokens=2)
    batch = BatchGeneration(target, drafter, how, Schedule(2))
    sampling = sd.Sampling(temp=1.0)
    requests = (Request(prompt, 2, sampling, i) for i, prompt in enumerate(prompts * num_pairs))
    texts = np.array(written(batch, *requests)).reshape(num_pairs, 2, 2)
    exacts = [two_tokens(target, prompt) for prompt in prompts]
    pairs = [(4 * texts[:, row, 0] + texts[:, row, 1], exacts[row]) for row in (0, 1)]
    seconds = np.outer(exacts[0].sum(axis=0), exacts[1].sum(axis=0))
    for samples, exact in (*pairs, (4 * texts[:, 0, 1] + texts[:, 1, 1], seconds)):
        counts = np.bincount(samples, minlength=16)
        assert chisquare(counts, exact.ravel() * num_pairs / exact.sum()).pvalue > 1e-6


def two_tokens(target: nn.Module, prompt: Sequence[int]) -> np.ndarray:
    """[4, 4] distribution of the first two tokens."""

    def after(tokens: Sequence[int]) -> np.ndarray:
        logits = target(mx.array([tokens]), cache=make_prompt_cache(target))[0, -1]
        return np.array(mx.softmax(logits.astype(mx.float32)), np.float64)[: narrow.NUM_TOKENS]

    first = after(prompt)
    return np.stack([first[token] * after([*prompt, token]) for token in range(len(first))])


# Prompt, most tokens, tokens of all texts after which it comes, own tokens after which it leaves.
ARRIVAL = st.tuples(
    st.integers(0, 7), st.integers(1, 14), st.integers(0, 20), st.none() | st.integers(1, 6)
)


@given(
    arrivals=st.lists(ARRIVAL, min_size=1, max_size=9),
    max_rows=st.integers(1, 4),
    length=st.integers(0, 4),
)
@settings(max_examples=15, deadline=None)
def test_texts_may_come_and_go_at_any_time(arrivals: Any, max_rows: int, length: int) -> None:
    """Whole texts are what they are alone; of those taken out there is the beginning."""
    batch = BatchGeneration(
        model("qwen2"),
        oracle(),
        Options(num_draft_tokens=length, prefill_step_size=5),
        Schedule(max_rows),
    )
    arrivals.sort(key=lambda arrival: arrival[2])
    texts: list[list[int]] = []
    reasons: dict[int, str | None] = {}

    def arrive() -> None:
        for i, most, after, _ in arrivals[len(texts) :]:
            if after > sum(map(len, texts)) and batch.schedule.num_open:
                return
            texts.append([])
            batch.insert(Request(PROMPTS[i], min(most, LENGTHS[i])))

    arrive()
    while batch.schedule.num_open:
        for row in batch.run():
            texts[row.uid].append(row.token.token)
            reasons[row.uid] = row.finish_reason
            if len(texts[row.uid]) == arrivals[row.uid][3]:
                batch.schedule.remove(row.uid)
            arrive()
        arrive()
    for uid, (i, most, _, leaves_after) in enumerate(arrivals):
        whole = alone()[i][: min(most, LENGTHS[i])]
        assert texts[uid] == whole[:leaves_after]
        assert (reasons[uid] == "length") == (texts[uid] == whole)


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("name", ["qwen2", "qwen3_next"])
def test_a_long_prompt_is_read_between_the_passes_of_the_others(name: str, leaves: bool) -> None:
    """Each of its steps keeps them waiting once; both texts are what they are alone. It may leave
    meanwhile."""
    drafter = Sessions()
    batch = BatchGeneration(model(name), drafter, Options(prefill_step_size=5))
    batch.insert(Request(PROMPTS[0], 40))
    run = batch.run()
    rows = [next(run)]
    batch.insert(Request(LONG, 6))
    rows += itertools.islice(run, 4)
    assert batch.schedule.num_open == 2
    if leaves:
        batch.schedule.remove(1)
    rows += run
    expected = [] if leaves else said(model(name), LONG, 6)
    assert collected(iter(rows), 2) == [alone(name)[0], expected]
    assert leaves or 10 <= [row.uid for row in rows].index(1) <= 12
    assert [session.closed_at is not None for session in drafter.begun] == [True, True]


def test_a_text_taken_out_while_another_prompt_is_read_has_no_more_passes() -> None:
    """Between two parts of the prompt, where the caller has its turn."""
    batch = BatchGeneration(model("qwen2"), options=Options(prefill_step_size=5))
    batch.insert(Request(PROMPTS[0], 40))
    steps = batch.steps()
    first = next(step for step in steps if step is not None)
    batch.insert(Request(LONG, 6))
    assert next(steps).uid == 0  # of the pass that was under way
    assert next(steps) is None
    num_passes = first.token.stats.target_passes
    batch.schedule.remove(0)
    assert [step.uid for step in steps if step is not None] == [1] * 6
    assert first.token.stats.target_passes == num_passes


# Nemotron-H does not tell its recurrences how long padded rows are.
@pytest.mark.parametrize("name", ["qwen2", "gpt_oss", "qwen3_next", "nemotron_h"])
def test_short_prompts_are_read_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one padded pass, but where padding would take longer than passes of their own."""
    read: list[list[int]] = []
    real = SharedPasses.read

    def note(passes: SharedPasses, texts: Sequence[Sequence[int]]) -> None:
        read.append([len(text) for text in texts])
        real(passes, texts)

    monkeypatch.setattr(SharedPasses, "read", note)
    batch = BatchGeneration(model(name), oracle(name), Options(num_draft_tokens=2))
    assert texts_of(batch, [1, 5, 7]) == [alone(name)[i] for i in (1, 5, 7)]
    requests = Request(PROMPTS[7], 3), Request(LONG, 3)
    assert written(BatchGeneration(model(name)), *requests)[0] == alone(name)[7][:3]
    assert read == [[6, 5, 4]]


def test_samplers_processors_and_stop_tokens_are_each_rows_own() -> None:
    """A penalty sees its row's text alone, an opaque sampler each row; a stop token ends one."""
    processors = make_logits_processors(repetition_penalty=1.6, repetition_context_size=12)
    penalised = said(model("qwen2"), PROMPTS[2], 25, logits_processors=processors)
    stop = alone()[0][5]
    how, ends = Options(num_draft_tokens=3), frozenset({stop})
    batch = BatchGeneration(model("qwen2"), oracle(), how, stop_tokens=ends)
    requests = (
        Request(PROMPTS[0], 40),
        Request(PROMPTS[2], 25, logits_processors=processors),
        Request(PROMPTS[4], 21, lambda logprobs: mx.argmax(logprobs, axis=-1)),
    )
    assert written(batch, *requests) == [
        text[: text.index(stop) + 1] if stop in text else text
        for text in (alone()[0], penalised, alone()[4])
    ]


@pytest.mark.full
def test_what_cannot_be_rows_is_written_one_by_one() -> None:
    """A model whose caches are no rows; a drafter that reads the target, whose session sees each
    position of a text, in order, but for the last."""
    for name, changes in ONE_BY_ONE.items():
        target = tiny.build(name, **changes)
        with pytest.warns(UserWarning, match="one by one"):
            texts = texts_of(BatchGeneration(target, sd.PromptLookupDrafter()), range(5))
        assert texts == [said(target, *pair) for pair in zip(PROMPTS[:5], LENGTHS, strict=False)]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            BatchGeneration(target)

    class Reader(Sessions):
        features = Features(caches=(0,))

    with pytest.warns(UserWarning, match="Reader reads the target's caches"):
        make_passes(
            model("qwen2"), Options(), Reader(lambda prompt: ScriptedSession(lambda *_: []))
        )


@pytest.mark.parametrize("name", ["qwen2", "qwen3_next", "gemma3n"])
def test_a_drafter_sees_its_own_texts_states(name: str) -> None:
    """Each position once, in order, but for the last, whatever the rows beside it; of a text whose
    beginning was read before, those after it."""
    target = model(name)

    class Seeing(ScriptedSession):
        def see(self, rows: Any) -> None:
            self.seen = [*getattr(self, "seen", []), *rows.layers[1].tolist()]

    class Reader(Sessions):
        features = Features(layers=(1,), top=2)

    texts = [[*PROMPTS[i], *said(target, PROMPTS[i], LENGTHS[i])] for i in range(5)]

    def session(prompt: Sequence[int]) -> ScriptedSession:
        text = next(text for text in texts if text[: len(prompt)] == list(prompt))
        return Seeing(lambda start, limit: [*text[len(prompt) + start :][: limit - 1], 0])

    def shown_of(drafter: Any) -> list[np.ndarray]:
        return [np.array(session.seen) for session in drafter.begun]

    together, alone = Reader(session), Reader(session)
    batch = BatchGeneration(target, together, Options(num_draft_tokens=3), Schedule(3))
    assert texts_of(batch, range(5)) == [
        text[len(prompt) :] for text, prompt in zip(texts, PROMPTS, strict=False)
    ]
    for prompt, length in zip(PROMPTS[:5], LENGTHS, strict=False):
        list(sd.speculate(target, prompt, alone, max_tokens=length, num_draft_tokens=3))
    for text, rows, expected in zip(texts, shown_of(together), shown_of(alone), strict=True):
        assert len(rows) == len(text) - 1
        np.testing.assert_allclose(rows, expected, atol=1e-4)


def test_a_text_that_cannot_go_on_ends_alone() -> None:
    """By a draft of no tokens, or logits that are no numbers, if somebody is told; what was
    accepted comes first, and the others are whole."""

    def broken(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits * (mx.nan if tokens.shape[0] > len(PROMPTS[2]) + 3 else 1)

    def session(prompt: Sequence[int]) -> ScriptedSession:
        fails_at = 3 if list(prompt) == PROMPTS[2] else 99
        return ScriptedSession(lambda start, limit: [-1] * (start >= fails_at))

    for drafter, processors in ((Sessions(session), []), (Sessions(), [broken])):
        errors: dict[int, Exception] = {}
        for on_error in (None, errors.setdefault):
            batch = BatchGeneration(
                model("qwen2"),
                drafter,
                Options(num_draft_tokens=2),
                Schedule(2),
                on_error=on_error,
            )
            for i in (0, 2, 4):
                own = processors if i == 2 else []
                batch.insert(Request(PROMPTS[i], 20, logits_processors=own))
            rows = []
            with nullcontext() if on_error else pytest.raises((ArithmeticError, ValueError)):
                rows.extend(batch.run())
            texts = collected(rows, 3)
            assert (0 if on_error else 3) <= len(texts[1]) < 8
            assert texts == [alone()[i][: len(texts[j])] for j, i in enumerate((0, 2, 4))]
        assert list(errors) == [1]
        assert [len(text) for text in texts] == [20, len(texts[1]), 20]


WORDS = ["the cat the cat sat", "a", "in the thing on the thing on the", "hello"]


@pytest.mark.parametrize("drafter", [None, "prompt-lookup"])
def test_batch_generate_is_mlx_lms_with_one_argument_more(drafter: str | None) -> None:
    """Texts, ids, log-probabilities and caches are those of `mlx_lm.batch_generate`."""
    target, tokenizer = tiny_text.model(), tiny_text.tokenizer()
    wanted = ("return_prompt_caches", "return_token_ids", "return_logprobs")
    given = target, tokenizer, [tokenizer.encode(text) for text in WORDS]
    options: dict[str, Any] = {"max_tokens": [20, 40, 10, 30], **dict.fromkeys(wanted, True)}
    theirs = mlx_lm.batch_generate(*given, **options)
    ours = sd.batch_generate(*given, drafter=drafter, **options)
    assert isinstance(ours, type(theirs))
    assert (ours.texts, ours.token_ids) == (theirs.texts, theirs.token_ids)
    for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
        assert mine == pytest.approx(other, abs=1e-4)
    for mine, other in zip(ours.caches, theirs.caches, strict=True):
        assert mine[0].offset == other[0].offset
        keys = [cache[-1].keys[..., : cache[-1].offset, :] for cache in (mine, other)]
        assert mx.allclose(keys[0], keys[1], atol=1e-4)
    assert ours.stats.generation_tokens == theirs.stats.generation_tokens
    assert len(ours.speculation) == len(WORDS)


def test_a_stream_asks_for_prompts_as_places_come_free() -> None:
    """And writes samples of each, of seeds counted through, prompt by prompt."""
    asked: list[str] = []
    arriving = (asked.append(text) or text for text in WORDS)  # type: ignore[func-returns-value]
    given = tiny_text.model(), tiny_text.tokenizer()
    options: dict[str, Any] = {"max_tokens": 12, "temp": 1.0}
    several = options | {"drafter": "ngram", "num_samples": 3, "seed": 7}
    texts = dict.fromkeys(itertools.product(range(len(WORDS)), range(3)), "")
    for response in sd.batch_stream_generate(*given, arriving, completion_batch_size=3, **several):
        if not any(texts.values()):
            assert asked == WORDS[:1]
        texts[response.index, response.sample] += response.text
    for (i, sample), text in texts.items():
        assert text == sd.generate(*given, WORDS[i], seed=7 + 3 * i + sample, **options)


@pytest.mark.parametrize("name", ["qwen2", "gemma3_text", "lfm2", "mamba"])
@pytest.mark.filterwarnings("ignore:specdec_mlx")
def test_samples_of_a_prompt_are_the_texts_of_their_seeds(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is what it is alone; the prompt is read once, also after caches that were given."""
    target, prompt, sampling = model(name), PROMPTS[4], sd.Sampling(temp=1.0)
    given = make_prompt_cache(target)
    target(mx.array([PROMPTS[1]]), cache=given)
    request = Request(prompt, 15, sampling, prompt_cache=given)
    read, real = list[int](), PromptReader.read
    monkeypatch.setattr(PromptReader, "read", lambda one: read.append(size := real(one)) or size)
    how = Options(num_draft_tokens=3, prefill_step_size=2)
    batch = BatchGeneration(target, sd.PromptLookupDrafter(min_ngram=1), how, Schedule(2))
    texts = written(batch, *(replace(request, seed=seed) for seed in range(3)))
    assert sum(read) == len(prompt) - 1, "read once, and not three times"
    assert texts[0] != texts[1]
    for seed, text in enumerate(texts):
        alone = {"sampler": sampling, "seed": seed, "prompt_cache": copy.deepcopy(given)}
        assert text == said(target, prompt, 15, **alone)


@pytest.mark.filterwarnings("ignore:specdec_mlx")
@in_one_test("limits", [{"max_kv_size": 16}, {"kv_bits": 4, "kv_group_size": 32}])
def test_caches_that_forget_or_round_are_gone_on_from_one_by_one_or_refused(
    limits: dict[str, int],
) -> None:
    """As rows they would neither forget nor round, so that the text would be another."""
    target, how = tiny.build("qwen2", head_dim=32, hidden_size=128), Options(**limits)
    caches, _ = split_cache(target, None, replace(how, kv_bits=None))
    said(target, PROMPTS[4], 20, prompt_cache=caches, quantized_kv_start=0, **limits)
    request = Request([3, 4, 5], 15, prompt_cache=caches)
    with pytest.raises(ValueError, match="written together cannot go on from"):
        written(BatchGeneration(target), request)
    alone = said(target, [3, 4, 5], 15, prompt_cache=copy.deepcopy(caches), **limits)
    assert written(BatchGeneration(target, options=how), request) == [alone]


def test_a_text_may_go_on_that_was_begun_elsewhere() -> None:
    """Its first tokens count: as positions of its noise, and among the most wanted."""
    target, sampling, prompt = narrow.model(), sd.Sampling(temp=1.0), [1, 2, 3, 1, 2]
    whole = said(target, prompt, 20, sampler=sampling, seed=5)
    own = OwnDrafting(sd.PromptLookupDrafter(), "match", num_draft_tokens=2)
    requests = [
        Request([*prompt, *whole[:n]], 20, sampling, 5, num_said=n, drafting=own)
        for n in (1, 7, 19)
    ]
    assert written(BatchGeneration(target), *requests) == [whole[n:] for n in (1, 7, 19)]


def test_a_failed_pass_ends_the_texts_that_it_writes_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One is written, one read, one waits: the other two have their texts when it goes on."""
    launch, left = SharedPasses.launch, iter([True, True, False])

    def fails_once(passes: SharedPasses, *about: Any) -> Any:
        if next(left, True):
            return launch(passes, *about)
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(SharedPasses, "launch", fails_once)
    how = Options(prefill_step_size=4)
    batch = BatchGeneration(model("qwen2"), options=how, schedule=Schedule(max_texts=2))
    requests = Request(PROMPTS[7], 9), Request(LONG, 9), Request(PROMPTS[1], 9)
    for request in requests:
        batch.insert(request)
    with pytest.raises(RuntimeError, match="the device is lost"):
        list(batch.run())
    texts: dict[int, list[int]] = {}
    for uid, token, *_ in batch.run():
        texts.setdefault(uid, []).append(token.token)
    assert texts == {n: said(model("qwen2"), requests[n].prompt, 9) for n in (1, 2)}
