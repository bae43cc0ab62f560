"""What caches hold is kept with them, so that a host that reads the prompt itself gets drafts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import cache as caches_of
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache, trim_prompt_cache

import scripted
import specdec_mlx as sd
import tiny
from scripted import PROMPT, target
from selection import in_one_test
from specdec_mlx import lab
from specdec_mlx.contracts import DraftContext
from specdec_mlx.lab.pair import held_out_openings
from specdec_mlx.lab.papers.cascade import Cascade
from specdec_mlx.lab.papers.parallel_sampling import LookAhead, PaSSDrafter
from specdec_mlx.sequence import SHOWS_PROMPT, remember, tokens_on

NUM_TOKENS = 24
BEFORE, LAST = [*PROMPT, *range(30, 50)], [9, 17]
"""What the host reads, and what it gives to be continued."""


def read_by_host(model: nn.Module, tokens: Sequence[int] = BEFORE) -> list[Any]:
    """Caches that a program filled by the model alone."""
    caches = make_prompt_cache(model)
    model(mx.array([list(tokens)]), cache=caches)
    return caches


def run(model: nn.Module, prompt: Sequence[int], drafter: Any, **how: Any) -> tuple[list[int], Any]:
    """The tokens, and the account."""
    how = {"max_tokens": NUM_TOKENS, "num_draft_tokens": 4} | how
    tokens = list(sd.speculate(model, prompt, drafter, **how))
    return [token.token for token in tokens], tokens[-1].stats


@dataclass(eq=False)
class Noting:
    """A drafter that notes what it is told, and drafts nothing."""

    told: list[int] = field(default_factory=list)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> scripted.ScriptedSession:
        self.told = list(prompt)
        return scripted.ScriptedSession(lambda start, limit: [])


MODELS = ("qwen2", "gemma3_text", "mamba2", "qwen3_next")


@in_one_test("name", MODELS)
def test_named_tokens_give_the_drafts_of_the_whole_prompt(name: str) -> None:
    """A draft model, which is the target itself, is right as if it had read all; the text is the
    same whatever is named; unnamed tokens are told.
    """
    model = target(name)
    drafter = sd.ModelDrafter(model)
    new = make_prompt_cache(model)  # kept caches let the last token be drafted
    expected, whole = run(model, [*BEFORE, *LAST], drafter, prompt_cache=new)
    assert whole.accepted == whole.drafted > 0
    wrong = [(token + 1) % 64 for token in BEFORE]
    counts = {}
    for case, named in (("nothing", None), ("all", BEFORE), ("wrong", wrong)):
        caches = read_by_host(model)
        remember(caches, named or [])
        text, stats = run(model, LAST, drafter, prompt_cache=caches)
        assert text == expected
        counts[case] = stats.accepted, stats.drafted
        assert tokens_on(caches)[len(named or []) :] == [*LAST, *text]
        has_offset = any(hasattr(one, "offset") for one in caches)
        unknown = len(BEFORE) if has_offset and named is None else 0
        assert stats.num_unnamed == unknown
        said = f"history unknown: the caches hold {unknown} tokens that nobody named"
        assert (said in str(stats)) == (unknown > 0)
    given = read_by_host(model)
    text, stats = run(model, LAST, drafter, prompt_cache=given, history=BEFORE)
    assert (text, stats.accepted, stats.drafted) == (expected, *counts["all"])
    assert counts["all"] == (whole.accepted, whole.drafted)
    assert counts["nothing"][0] < counts["nothing"][1]


def test_every_drafter_is_told_and_processors_are_not() -> None:
    """Look-ups copy from it; processors see what mlx-lm would show them; progress, stops and
    embeddings count from the prompt's first token.
    """
    model, noting, seen = target(), Noting(), list[list[int]]()
    progress: list[tuple[int, int]] = []

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())
        return logits

    prompt = [*LAST, 3, 4, 5, 6]
    caches = read_by_host(model)
    remember(caches, mx.array(BEFORE))
    text, _ = run(
        *(model, prompt, sd.drafters.FirstOf(noting)),
        prompt_cache=caches,
        logits_processors=[processor],
        prefill_step_size=4,
        prefill_stops=[3],
        prompt_progress_callback=lambda done, total: progress.append((done, total)),
        input_embeddings=model.model.embed_tokens(mx.array(prompt)),
    )
    assert noting.told == [*BEFORE, *prompt]
    assert seen[0] == (prompt if SHOWS_PROMPT else prompt[-1:])
    assert [done for done, _ in progress] == [0, 3, 5, 6]
    assert {total for _, total in progress} == {6}
    assert text == scripted.plain(NUM_TOKENS, [*BEFORE, *prompt], model)
    other, stats = run(model, prompt, None, prompt_cache=read_by_host(model))
    assert (other, stats.num_unnamed) == (text, 0)


def test_a_prompt_known_by_its_embeddings_alone_leaves_no_names_on_the_caches() -> None:
    """No later drafter may take the places of these positions for tokens."""
    model = target()
    caches = make_prompt_cache(model)
    embeddings = model.model.embed_tokens(mx.array(LAST))
    options: dict[str, Any] = {"prompt_cache": caches, "input_embeddings": embeddings}
    assert len(list(sd.speculate(model, [], max_tokens=3, **options))) == 3
    assert tokens_on(caches) == []


def made(kind: str) -> Any:
    """A cache of this class that holds what a test needs of it."""
    arguments = {"RotatingKVCache": (16,), "ChunkedKVCache": (16,), "ArraysCache": (2,)}
    if kind == "CacheList":
        return caches_of.CacheList(caches_of.KVCache(), caches_of.KVCache())
    return getattr(caches_of, kind)(*arguments.get(kind, ()))


KINDS = (
    *("KVCache", "QuantizedKVCache", "RotatingKVCache", "ChunkedKVCache", "ConcatenateKVCache"),
    *("ArraysCache", "CacheList"),
)


@in_one_test("kind", KINDS)
def test_names_stay_with_caches_through_copies_and_trims(kind: str) -> None:
    """Of every class of mlx-lm's; a copy that is changed later does not change the first."""
    first = [made(kind), made(kind)]
    if kind == "ArraysCache":
        first[0][0] = mx.zeros((1, 4))
    else:
        for one in [*first[0].caches, *first[1].caches] if kind == "CacheList" else first:
            one.update_and_fetch(*[mx.zeros((1, 1, 8, 64))] * 2)
    remember(first, range(8))
    again = copy.deepcopy(first)
    assert tokens_on(again) == tokens_on(first) == list(range(8))
    store = LRUPromptCache()
    store.insert_cache("model", list(range(8)), copy.deepcopy(first))
    if trim_prompt_cache(again, 3) == 3:
        assert tokens_on(again) == list(range(5))
        fetched, rest = store.fetch_nearest_cache("model", [0, 1, 2, 3, 99])
        assert tokens_on(fetched) == [0, 1, 2, 3]
        assert rest == [99]
    remember(again, [7])
    assert tokens_on(first) == list(range(8))


def test_of_caches_that_others_fed_the_named_part_is_known() -> None:
    """A name that is too long counts as far as the caches reach; one for `history` is refused."""
    model, noting = target(), Noting()
    assert tokens_on(None) == tokens_on([]) == tokens_on(make_prompt_cache(model)) == []
    caches = read_by_host(model, BEFORE)
    remember(caches, [*BEFORE, *LAST])  # the prompt as a host has it, before the last is read
    assert tokens_on(caches) == BEFORE
    model(mx.array([[1, 2, 3]]), cache=caches)
    remember(caches, BEFORE)
    text, stats = run(model, LAST, noting, prompt_cache=caches)
    assert noting.told == [*BEFORE, *LAST]
    assert stats.num_unnamed == 3
    assert text == scripted.plain(NUM_TOKENS, [*BEFORE, 1, 2, 3, *LAST], model)
    for how in ({}, {"prompt_cache": read_by_host(model, [1, 2])}):
        with pytest.raises(ValueError, match=r"history=.*tokens at most"):
            run(model, LAST, None, history=[1, 2, 3], **how)
    with pytest.raises(sd.errors.PromptError):
        remember(caches, "the cat")  # type: ignore[arg-type]


@in_one_test("kind", ["qwen2", "mamba2"])
def test_draft_caches_in_step_are_not_read_again(kind: str) -> None:
    """Of a host that filled both models' caches; and of one that filled the target's alone."""
    model, small = target(), tiny.build(kind, seed=7)
    new = [*make_prompt_cache(model), *make_prompt_cache(small)]
    expected, whole = run(model, [*BEFORE, *LAST], sd.ModelDrafter(small), prompt_cache=new)
    own, theirs = read_by_host(model), read_by_host(small)
    assert whole.drafted > 0
    for draft_caches in (theirs, make_prompt_cache(small)):
        caches = [*copy.deepcopy(own), *draft_caches]
        remember(caches, BEFORE)
        text, stats = run(model, LAST, sd.ModelDrafter(small), prompt_cache=caches)
        assert text == expected
        assert (stats.accepted, stats.drafted) == (whole.accepted, whole.drafted)
        lengths = {one.offset for one in caches if hasattr(one, "offset")}
        assert lengths == {len(BEFORE) + len(LAST) + NUM_TOKENS}
        kept, right = (
            small(mx.array([LAST]), cache=copy.deepcopy(both[len(own) :])) for both in (caches, new)
        )
        assert mx.allclose(kept, right, atol=1e-4)


def test_after_a_failed_prompt_the_caches_are_as_they_were() -> None:
    model = target()
    caches = read_by_host(model)
    remember(caches, BEFORE)

    def fail(done: int, total: int) -> None:
        if done > 2:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        run(
            *(model, [1, 2, 3, 4, 5, 6], None),
            prompt_cache=caches,
            prompt_progress_callback=fail,
            prefill_step_size=2,
        )
    assert {one.offset for one in caches} == {len(BEFORE)}
    assert tokens_on(caches) == BEFORE


@cache
def pair() -> lab.Pair:
    return lab.load_pair()


@cache
def opening() -> tuple[list[int], list[int]]:
    """A prompt for the pair, and what its target writes after it."""
    prompt = list(pair().tokenizer.encode(next(held_out_openings())[2]))
    return prompt, run(pair().target, prompt, None, max_tokens=40)[0]


@pytest.mark.full
@in_one_test("kind", ["eagle3", "medusa", "recycling"])
def test_heads_go_on_from_where_their_prompt_begins(kind: str) -> None:
    """They see no state of what was read before: the text is right, and drafts still are."""
    model, (prompt, expected) = pair().target, opening()
    drafter = sd.drafters.make_drafter(kind) if kind == "recycling" else lab.head(kind, model)
    caches = read_by_host(model, prompt[:-20])
    remember(caches, prompt[:-20])
    text, stats = run(model, prompt[-20:], drafter, prompt_cache=caches, max_tokens=40)
    assert text == expected
    assert stats.accepted > 0


def test_turns_need_no_name() -> None:
    """Each of our texts names what the caches hold at its end, a text that was left early too."""
    model, tokenizer = pair().target, pair().tokenizer
    caches, noting = make_prompt_cache(model), Noting()
    how: dict[str, Any] = {"prompt_cache": caches, "drafter": noting, "max_tokens": 12}
    first = tokenizer.encode("The bool type")
    stream = sd.stream_generate(model, tokenizer, first, **how)
    said = [next(stream).token for _ in range(5)]
    stream.close()
    assert tokens_on(caches) == [*first, *said]
    text = sd.generate(model, tokenizer, [5, 6], **how)
    assert noting.told == [*first, *said, 5, 6]
    assert text.stats.num_unnamed == 0


COMBINATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "first of": lambda one, other: sd.drafters.FirstOf(sd.SuffixDrafter(), one, other),
    "best of": lambda one, other: sd.BestOf(one, other),
    "tree of": lambda one, other: lab.TreeOf(one, other),
    "nested": lambda one, other: sd.drafters.FirstOf(
        Cascade(one), sd.BestOf(sd.SuffixDrafter(), other)
    ),
}


@in_one_test("kind", COMBINATIONS)
def test_draft_caches_belong_to_one_model(kind: str) -> None:
    """Beside drafters without caches, the one draft model keeps them in step. Two that would fill
    them are refused before any text, and so are caches that are another model's.
    """
    model, small, combine = target(), tiny.build("qwen2", seed=7), COMBINATIONS[kind]
    other = tiny.build("qwen2", seed=7, num_key_value_heads=1)
    one = sd.ModelDrafter(small)
    alone = [*make_prompt_cache(model), *make_prompt_cache(small)]
    expected, _ = run(model, LAST, one, prompt_cache=alone)
    pass_ = PaSSDrafter(model, None, head=LookAhead(model, 2))
    for beside in (lab.RecyclingDrafter(), pass_):
        caches = [*make_prompt_cache(model), *make_prompt_cache(small)]
        assert run(model, LAST, combine(one, beside), prompt_cache=caches)[0] == expected
        assert {cache.offset for cache in caches} == {len(LAST) + NUM_TOKENS}
        kept = caches[len(caches) // 2].keys[..., : len(LAST) + NUM_TOKENS - 1, :]
        right = alone[len(caches) // 2].keys[..., : len(LAST) + NUM_TOKENS - 1, :]
        assert mx.allclose(kept, right, atol=1e-5)
    for second in (sd.ModelDrafter(model), sd.ModelDrafter(other)):
        caches = [*make_prompt_cache(model), *make_prompt_cache(small)]
        with pytest.raises(ValueError, match=r"2 drafters of \w+ would fill them"):
            sd.speculate(model, LAST, combine(one, second), prompt_cache=caches)
        assert not any(cache.offset for cache in caches)
    filled = make_prompt_cache(other)
    other(mx.array([LAST]), cache=filled)
    for wrong in (filled, filled[:1], make_prompt_cache(target("mamba2"))[:2]):
        with pytest.raises(ValueError, match=r"not the draft model's\. Expected"):
            sd.speculate(model, LAST, one, prompt_cache=[*make_prompt_cache(model), *wrong])
