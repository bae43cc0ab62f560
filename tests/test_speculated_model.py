"""A draft model whose own decoding is speculated for: the same drafts, fewer passes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pydoc_data.topics import topics
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors

import specdec_mlx as sd
import tiny
from counting import Counting
from lossless import PROMPT, SECOND_PROMPT, plain_text
from scripted import OracleDrafter, Recorder, ScriptedDrafter, always_wrong
from selection import FULL, cases, in_one_test
from specdec_mlx import lab
from specdec_mlx.drafters.speculated_model import SpeculatedSession
from specdec_mlx.sampling.noise import Noise
from specdec_mlx.token_ids import to_list
from specdec_mlx.types import DraftContext, Drafter, key_of

ARCHITECTURES = ("llama", "llama4", "mamba2", "qwen3_next", "falcon_h1")
"""Caches that trim, windows, chunks, and recurrent states that only return to a checkpoint."""

GUESSERS: dict[str, Callable[[], Drafter | str]] = {
    "prompt lookup": lambda: sd.PromptLookupDrafter(min_ngram=1),
    "now and then a long one": lambda: ScriptedDrafter(lambda start, limit: [5] * (start % 3) * 4),
    "ngram, by its name": lambda: "ngram",
    "always one token": lambda: ScriptedDrafter(lambda start, limit: [7] * limit),
}


@cache
def target(name: str) -> nn.Module:
    return tiny.build(name)


@cache
def draft_model(name: str) -> nn.Module:
    """The architecture's model, a little off: right now and then."""
    model, other = tiny.build(name), tiny.build(name, seed=1)
    pairs = zip(tree_flatten(model.parameters()), tree_flatten(other.parameters()), strict=True)
    mixed = [
        (path, a + 0.1 * (b - a))
        for (path, a), (_, b) in pairs
        if mx.issubdtype(a.dtype, mx.floating)
    ]
    model.update(tree_unflatten(mixed))
    return model


def proposals(
    name: str, drafter: sd.ModelDrafter, **options: Any
) -> list[tuple[list[int], list[int]]]:
    """Texts, and the drafts that were proposed after them, over a generation."""
    recorder = Recorder(drafter)
    given = {"max_tokens": 32, "draft_length": 5, "seed": 3} | options
    list(sd.speculate(target(name), PROMPT, recorder, **given))
    return recorder.proposals


@pytest.mark.parametrize("name", cases(ARCHITECTURES, "llama", "mamba2"))
def test_the_drafts_are_the_same_token_by_token(name: str) -> None:
    """Greedy, past the window, with right guesses and wrong ones, for every kind of cache."""
    model = draft_model(name)
    drafts = proposals(name, sd.ModelDrafter(model))
    assert len(drafts) > 6
    for guesser in list(GUESSERS.values())[: 4 if name == "llama" else 2]:
        assert proposals(name, sd.ModelDrafter(model, drafter=guesser())) == drafts


LOOKING_BACK = make_logits_processors({3: 2.0}, repetition_penalty=1.8, repetition_context_size=12)
DRAWN: dict[str, dict[str, Any]] = {
    rule: {"sampler": sd.Sampling(0.7, top_k=5), "rule": rule}
    for rule in ("block", "rejection", "coupled")
} | {"greedy, with penalties": {"logits_processors": LOOKING_BACK}}


@in_one_test("how", DRAWN)
@in_one_test("name", ["llama", "mamba2"])
def test_drafts_that_are_drawn_or_penalised_are_the_same_too(name: str, how: str) -> None:
    """Each is drawn from the same logits with the same noise, whatever was guessed."""
    model = draft_model(name)
    drafts = proposals(name, sd.ModelDrafter(model), **DRAWN[how])
    assert drafts != proposals(name, sd.ModelDrafter(model))
    for guesser in list(GUESSERS.values())[:2]:
        assert proposals(name, sd.ModelDrafter(model, drafter=guesser()), **DRAWN[how]) == drafts


def test_the_distributions_are_those_that_the_tokens_were_drawn_from() -> None:
    """Row by row those of drafts without guesses."""
    model = draft_model("llama")
    width = model(mx.array([[0]])).shape[-1]
    given = DraftContext(vocab_size=width, sampling=sd.Sampling(0.8), noise=Noise(5))
    guessers = (None, sd.PromptLookupDrafter(min_ngram=1))
    drafters = [sd.ModelDrafter(model, drafter=guesser) for guesser in guessers]
    plain, speculated = (drafter.begin(PROMPT, given).propose(6) for drafter in drafters)
    assert to_list(plain.tokens) == to_list(speculated.tokens)
    assert mx.allclose(plain.logprobs, speculated.logprobs, atol=1e-5)


@in_one_test("length", [1, 2, 5, 9])
def test_passes_are_as_few_as_the_guesses_allow(length: int) -> None:
    """Right guesses: one pass for five tokens at first, then for more; wrong ones: one for each."""
    model = Counting(draft_model("llama"))
    written = plain_text(model.model, PROMPT, 20).tokens
    vocab_size = tiny.CONFIGS["llama"]["vocab_size"]
    for guesser, expected in (
        (OracleDrafter(written, vocab_size), 1 if length <= 5 else 2),
        (always_wrong(written, vocab_size), length),
    ):
        session = sd.ModelDrafter(model, drafter=guesser).begin(PROMPT, DraftContext())
        assert to_list(session.propose(1).tokens) == written[:1]
        session.observe(written[:1])
        model.num_passes = 0
        assert to_list(session.propose(length).tokens) == written[1 : 1 + length]
        assert model.num_passes == expected


@FULL
def test_texts_that_repeat_take_at_most_seven_passes_for_ten_draft_tokens() -> None:
    """Passes of the lab's draft model, prompts and all, over its draft tokens."""
    pair = lab.load_pair()
    model = Counting(pair.draft)
    num_drafted = 0
    for name in ("while", "assert", "if"):  # of Python's manual
        text = topics[name][:400]
        prompt = pair.tokenizer.encode(f"{text}\n{text}\n{text[:60]}")
        drafter = sd.ModelDrafter(model, drafter="prompt-lookup")
        tokens = sd.speculate(pair.target, prompt, drafter, max_tokens=64, draft_length=6)
        num_drafted += list(tokens)[-1].stats.drafted
    assert num_drafted > 150
    assert model.num_passes <= 0.7 * num_drafted


@in_one_test("name", ["llama", "mamba2", "qwen3_next"])
def test_the_callers_caches_are_in_step_for_a_second_turn(name: str) -> None:
    """Drafts on them are those of a draft model that has read all of it."""
    large, model = target(name), draft_model(name)
    caches = make_prompt_cache(large) + make_prompt_cache(model)
    drafter = sd.ModelDrafter(model, drafter="prompt-lookup:min_ngram=1")
    first = sd.speculate(large, PROMPT, drafter, max_tokens=31, draft_length=4, prompt_cache=caches)
    said = PROMPT + [token.token for token in first] + SECOND_PROMPT
    recorder = Recorder(drafter)
    second = sd.speculate(
        large, SECOND_PROMPT, recorder, max_tokens=9, draft_length=4, prompt_cache=caches
    )
    said.append(next(second).token)  # nothing is drafted before the first token
    list(second)
    _, proposed = recorder.proposals[0]
    assert proposed == plain_text(model, said, len(proposed)).tokens


def test_it_has_a_key_of_its_own() -> None:
    """Its drafts cost something else; the guesser's options count."""
    model = draft_model("llama")
    drafters = [
        sd.ModelDrafter(model),
        sd.ModelDrafter(model, drafter="prompt-lookup"),
        sd.ModelDrafter(model, drafter="prompt-lookup:min_ngram=1"),
        sd.ModelDrafter(model, drafter="ngram"),
    ]
    assert len({key_of(drafter) for drafter in drafters}) == 4
    assert key_of(drafters[1]) == key_of(sd.ModelDrafter(model, drafter=sd.PromptLookupDrafter()))
    assert key_of(sd.ModelDrafter(model, drafter="none")) == key_of(drafters[0])
    named = sd.make_drafter("model:drafter=ngram", draft_model=model)
    assert key_of(named) == key_of(drafters[3])
    assert isinstance(named.begin(PROMPT, DraftContext()), SpeculatedSession)


def test_a_guesser_that_costs_a_model_is_refused() -> None:
    """So is one that nobody knows."""
    model = draft_model("llama")
    for costly in (sd.ModelDrafter(model), sd.FirstOf(sd.NGramDrafter(), sd.ModelDrafter(model))):
        with pytest.raises(ValueError, match="expected a look-up"):
            sd.ModelDrafter(model, drafter=costly)
    with pytest.raises(sd.errors.UnknownNameError, match="Unknown drafter 'nothing'"):
        sd.ModelDrafter(model, drafter="nothing")
