"""Draft models that speak the target's tokens, and those that do not."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import count
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import models

import specdec_mlx as sd
import tiny
import tiny_text
from selection import in_one_test
from specdec_mlx.drafters.shared_vocabulary import check_same_tokenizer
from specdec_mlx.models.loading import PerModel
from tiny_text import BYTES, MERGES, SPECIAL, bpe, tokenizer

NUM_TOKENS = 24
PROMPT = [5, 17, 99, 3, 64, 17, 99]


def swapped(i: int, j: int) -> tuple[str, ...]:
    """The bytes, with two of them in each other's place."""
    single = list(BYTES)
    single[i], single[j] = single[j], single[i]
    return tuple(single)


PADDED = [*SPECIAL, "<|pad0|>", "<|pad1|>"]


@in_one_test(
    "make",
    [
        tokenizer,
        lambda: tokenizer()._tokenizer,
        lambda: tokenizer(bos_token=None),  # many have none
        lambda: tokenizer(bpe(special=PADDED)),  # ids that only one of them has
    ],
)
def test_what_is_no_difference(make: Callable[[], Any]) -> None:
    """By content; in either direction."""
    check_same_tokenizer(tokenizer(), make())
    check_same_tokenizer(make(), tokenizer())


def fewer_merges() -> Any:
    """Equal vocabularies; a sample shows it."""
    fewer = bpe()
    vocab = {token: i for token, i in fewer.get_vocab().items() if token not in SPECIAL}
    fewer.model = models.BPE(vocab, [(a, b) for a, b in (m.split() for m in MERGES[1:])])
    return tokenizer(fewer)


@in_one_test(
    ("make", "said"),
    [
        (fewer_merges, "is encoded as"),
        (lambda: tokenizer(bos_token=SPECIAL[2]), "bos_token_id is 264 there and 266 here"),
        (lambda: tokenizer(eos_token=SPECIAL[2]), "eos_token_id is 265 there and 266 here"),
    ],
)
def test_a_difference_beside_the_vocabulary_is_found(make: Callable[[], Any], said: str) -> None:
    """A draft model that ends with another token drafts past the end."""
    with pytest.raises(sd.errors.TokenizerMismatchError, match=said):
        check_same_tokenizer(tokenizer(), make())


@given(st.tuples(st.integers(0, 255), st.integers(0, 255)).filter(lambda ij: ij[0] != ij[1]))
def test_any_two_ids_exchanged_are_found_and_the_first_is_shown(pair: tuple[int, int]) -> None:
    """Same size, same set of tokens: the error names the lower id's token, and both its ids."""
    i, j = sorted(pair)
    target, draft = tokenizer(), tokenizer(bpe(single=swapped(i, j)))
    assert len(target) == len(draft)
    with pytest.raises(sd.errors.TokenizerMismatchError) as caught:
        check_same_tokenizer(target, draft)
    assert f"token {BYTES[i]!r} has id {i} there and {j} here" in str(caught.value)


def test_a_foreign_draft_model_may_be_refused_before_anything_is_generated() -> None:
    """No token comes out, and nothing was computed: the caller's caches are as they were; without
    its tokenizer nothing can be compared.
    """
    model, draft = tiny_text.model(), tiny_text.model(5)
    drafter = sd.ModelDrafter(draft, tokenizer(bpe(single=swapped(7, 8))), tokenizers="same")
    caches, got = make_prompt_cache(model), []
    with pytest.raises(sd.errors.TokenizerMismatchError, match="has id 7 there and 8 here"):
        options: Any = {"drafter": drafter, "prompt_cache": caches}
        got += sd.stream_generate(model, tokenizer(), PROMPT, **options)
    assert got == []
    assert {c.offset for c in caches} == {0}
    text = sd.generate(model, tokenizer(), PROMPT, max_tokens=8, drafter=sd.ModelDrafter(draft))
    assert text.tokens == [t.token for t in sd.speculate(model, PROMPT, max_tokens=8)]


NARROW, WIDE = 120, 128


def widths(target_width: int, draft_width: int) -> tuple[nn.Module, nn.Module]:
    """Two models alike but for the rows of padding at the end of their embeddings."""
    wide = tiny.build("qwen2", vocab_size=WIDE)
    narrow = tiny.build("qwen2", vocab_size=NARROW)
    weights = dict(tree_flatten(wide.parameters()))
    rows = weights["model.embed_tokens.weight"]
    rows[NARROW:] = rows[NARROW:] * 0.5
    wide.load_weights(list(weights.items()))
    narrow.load_weights(list((weights | {"model.embed_tokens.weight": rows[:NARROW]}).items()))
    by_width = {NARROW: narrow, WIDE: wide}
    return by_width[target_width], by_width[draft_width]


def run(
    model: nn.Module, drafter: Any, prompt: list[int] = PROMPT, **options: Any
) -> list[sd.generation.Token]:
    options = {"max_tokens": NUM_TOKENS, "num_draft_tokens": 4} | options
    return list(sd.speculate(model, prompt, drafter, **options))


@in_one_test("target_width", [NARROW, WIDE])
@in_one_test("processed", [False, True])
def test_greedy_text_is_the_targets_own_at_any_width(target_width: int, processed: bool) -> None:
    """The draft model's logits may be narrower or wider than the target's."""
    target, draft = widths(target_width, NARROW + WIDE - target_width)
    options = {"logits_processors": make_logits_processors({3: 1.0}, 1.2)} if processed else {}
    expected = [t.token for t in run(target, None, **options)]
    tokens = run(target, sd.ModelDrafter(draft), **options)
    assert [t.token for t in tokens] == expected
    assert tokens[-1].stats.accepted > 0


@in_one_test(
    "sampling", [sd.Sampling(temp=1.0), sd.Sampling(temp=1.0, top_p=0.9, min_p=0.01, top_k=50)]
)
def test_a_wider_draft_model_draws_from_the_targets_law(sampling: sd.Sampling) -> None:
    """Cut to the target's ids, its law is the target's own here: every draft is accepted."""
    target, draft = widths(NARROW, WIDE)
    tokens = run(target, sd.ModelDrafter(draft), sampler=sampling, seed=3, max_tokens=40)
    stats = tokens[-1].stats
    assert stats.accepted == stats.drafted > 30


def test_a_narrower_draft_model_lives_with_tokens_that_it_does_not_have() -> None:
    """At temperature 1 the target emits some of its own, and drafting goes on behind them; its
    embeddings are not read past their end.
    """
    target, draft = widths(WIDE, NARROW)
    seen: list[int] = []

    class Watched(nn.Module):
        layers = draft.layers

        def __call__(self, ids: mx.array, **kwargs: Any) -> mx.array:
            seen.extend(ids.flatten().tolist())
            return draft(ids, **kwargs)

    options = {"sampler": sd.Sampling(temp=1.0), "max_tokens": 120, "seed": 2}
    tokens = run(target, sd.ModelDrafter(Watched()), [WIDE - 1, *PROMPT], **options)
    foreign = [i for i, t in enumerate(tokens) if t.token >= NARROW]
    assert {tokens[i].origin for i in foreign} <= {"correction", "bonus"}
    assert tokens[-1].stats.tokens_per_pass > 2
    assert {"draft"} < {t.origin for t in tokens[foreign[0] + 1 :]}
    assert max(seen) == NARROW - 1


def test_what_is_known_of_a_pair_is_made_once_and_goes_with_it() -> None:
    """Whatever wraps the two, in one order; of a class that cannot be referred to weakly it is made
    at each call.
    """
    numbers = count(1)
    known = PerModel(lambda *owners: next(numbers))
    one, other = tokenizer(), tokenizer()
    assert known(one, other) == known(TokenizerWrapper(one._tokenizer), other._tokenizer) == 1
    assert known(other, one) == 2
    assert known.put(9, one, other) == known(one, other) == 9
    del one
    gc.collect()
    assert not known._values
    assert known(b"bare") < known(b"bare")
