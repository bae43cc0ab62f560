"""Early exits copy what the target has read: the drafts of one that reads it by itself, sooner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, make_prompt_cache

import heads
import specdec_mlx as sd
import tiny
from selection import cases, in_one_test
from specdec_mlx import lab
from specdec_mlx.batch.rounds import BatchGeneration
from specdec_mlx.batch.schedule import Request
from specdec_mlx.contracts import DraftContext
from specdec_mlx.drafters.model import ModelReader
from specdec_mlx.drafters.reduced_models import first_layers as cut
from specdec_mlx.exactness.probe import first_inexact
from specdec_mlx.lab.papers.early_exit import (
    WINDOW,
    Exit,
    ExitDrafter,
    ExitModel,
    fills_alike,
)
from specdec_mlx.models.anatomy import keys_values_of
from specdec_mlx.options import Options

COPIES = ("qwen2", "qwen3", "gemma2", "gpt2", "deepseek_v3")
READS = {"llama": 2, "gemma3_text": 2, "mamba2": 1}
"""Architecture -> layers; those with windows or states are left to read for themselves."""

PROMPT = [5, 17, 40, 3, 64, 17, 40, 42] * 5


def exit_of(model: nn.Module, layers: int = 1, window: int | None = None) -> ExitDrafter:
    """An exit with the target's own norm; for a window one with random weights."""
    if window is None:
        drafter = lab.early_exit(model, layers)
        assert isinstance(drafter, ExitDrafter)
        return drafter
    width = model.args.hidden_size
    mx.random.seed(0)
    sizes = {"hidden_size": width, "intermediate_size": width, "rms_norm_eps": 1e-5}
    trained = Exit({**sizes, WINDOW: window})
    trained.apply(lambda x: mx.random.normal(x.shape))
    return ExitDrafter(ExitModel(cut(model, layers), trained), exit=trained, copies=True)


@contextmanager
def fed_to_exits() -> Iterator[list[list[int]]]:
    """Tokens of each pass of a draft model, its drafts among them."""
    fed: list[list[int]] = []
    feed = ModelReader.feed

    def counted(self: ModelReader, ids: mx.array, tree: Any = None) -> mx.array:
        fed.append(ids.tolist())
        return feed(self, ids, tree)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelReader, "feed", counted)
        yield fed


def written(model: nn.Module, drafter: Any, prompt: list[int] = PROMPT, **options: Any) -> Any:
    """The text, what became of each draft, and tokens of the exit's passes."""
    with fed_to_exits() as fed:
        options = {"max_tokens": 24, "num_draft_tokens": 3} | options
        tokens = list(sd.speculate(model, prompt, drafter, **options))
    return [t.token for t in tokens], tokens[-1].stats.rounds, fed


def test_an_early_exit_by_hand() -> None:
    """Embedding, first layers, final norm, head, all of them the target's own arrays."""
    model, ids = heads.target(), mx.array([[3, 14, 15, 9, 2]])
    h = model.model.embed_tokens(ids)
    for layer in model.layers[:3]:
        h = layer(h, "causal", None)
    short = cut(model, 3)
    assert mx.allclose(short(ids), model.lm_head(model.model.norm(h)), atol=1e-5)
    assert len(model.layers) == heads.NUM_LAYERS
    shared, own = ({id(x) for _, x in tree_flatten(m.parameters())} for m in (model, short))
    assert own <= shared


def test_an_exit_that_is_none_is_refused() -> None:
    """Before the first layer, after the last, or of a model that has two lists of layers."""
    for layers in (0, 9, -1):
        with pytest.raises(sd.errors.DraftModelError, match="expected a number from 1 to 8"):
            lab.early_exit(heads.target(), layers)
    with pytest.raises(sd.errors.DraftModelError, match="no single list of layers"):
        lab.early_exit(tiny.build("afm7"), 1)


TABLE = [*((name, None) for name in COPIES), *(("qwen2", w) for w in (1, 8, 64))]


@pytest.mark.parametrize(("name", "window"), cases(TABLE, ("qwen2", None), ("qwen2", 8)))
@in_one_test("temp", [0.0, 1.0])
def test_drafts_are_as_if_an_exit_read_for_itself(
    name: str, window: int | None, temp: float
) -> None:
    """And the same text; only what a trained exit attends to is run through the layers."""
    model = tiny.build(name)
    drafter = exit_of(model, 1, window)
    assert drafter.copies
    options = {"sampler": sd.Sampling(temp=temp), "seed": 1}
    text, rounds, fed = written(model, drafter, **options)
    own_text, own_rounds, own_fed = written(model, replace(drafter, copies=False), **options)
    assert (text, rounds, fed[-9:]) == (own_text, own_rounds, own_fed[-9:])
    assert text == written(model, None, **options)[0] or temp
    num_fed, num_own = (sum(map(len, tokens)) for tokens in (fed, own_fed))
    assert num_own - num_fed == max(0, len(PROMPT) + 1 - (window or 1))
    if window is None:
        assert (len(fed[0]), max(map(len, fed)) <= 2) == (1, True)


@in_one_test("temp", [0.0, 1.0])
def test_a_trained_exit_drafts_trees(temp: float) -> None:
    """Each path in them as a chain would have been."""
    model = tiny.build("qwen2")
    drafter = replace(exit_of(model, 1, 8), branches=2)
    options = {"sampler": sd.Sampling(temp=temp), "seed": 1, "num_draft_tokens": 6}
    assert drafter.model(mx.array([PROMPT]))[0].shape == (len(PROMPT), 128)
    assert first_inexact(drafter.model, 0, on_trees=True) is None
    text = written(model, drafter, **options)[0]
    assert text == written(model, None, **options)[0] or temp


@in_one_test("name", READS)
def test_caches_that_forget_are_not_copied(name: str) -> None:
    """Windows and recurrent states; the text is the target's all the same."""
    model = tiny.build(name)
    drafter = exit_of(model, READS[name])
    assert not drafter.copies
    assert written(model, drafter)[0] == written(model, None)[0]


def test_caches_that_the_caller_wants_otherwise() -> None:
    """With a window the exit reads for itself; quantized ones are unpacked. Its text is the same,
    and of an earlier turn, which the target's caches remember, its own hold the text too.
    """
    model = tiny.build("qwen2", num_attention_heads=2, num_key_value_heads=1)
    drafter, quantized = exit_of(model), {"kv_bits": 8, "kv_group_size": 32}
    for options in ({"max_kv_size": 48}, quantized | {"quantized_kv_start": 0}):
        text, rounds, fed = written(model, drafter, **options)
        assert text == written(model, None, **options)[0]
        assert rounds
        assert max(map(len, fed)) <= 2 or "max_kv_size" in options
    caches, of_exit = make_prompt_cache(model), make_prompt_cache(drafter.model)
    text = written(model, None, prompt_cache=caches)[0]
    both = [*caches, *of_exit]
    later = written(model, drafter, [7, 8, 9], prompt_cache=both, max_tokens=4)[0]
    assert caches[0].offset == len(PROMPT) + len(text) + 3 + len(later)
    assert of_exit[0].offset == caches[0].offset


@in_one_test("window", [None, 8])
def test_an_earlier_turn_is_copied(window: int | None) -> None:
    """Of which only the target's caches know: it reads and drafts as with all of it in view."""
    model, caches = tiny.build("qwen2"), make_prompt_cache(tiny.build("qwen2"))
    drafter, turn = exit_of(model, 1, window), [7, 8, 9, *PROMPT[:8]]
    earlier = written(model, None, prompt_cache=caches)[0]
    text, _, fed = written(model, drafter, turn, prompt_cache=caches)
    whole, _, fed_of_whole = written(model, drafter, [*PROMPT, *earlier, *turn])
    assert (text, fed[:30]) == (whole, fed_of_whole[:30])


@in_one_test(("size", "fed"), [(None, [1, 1]), (16, [5, 1])])
def test_what_was_missed_in_a_pause_is_copied_unless_the_target_forgot(size, fed):
    """Rows that are fed: the last token, and one that was drafted and not fed."""
    model = tiny.build("qwen2")
    caches = make_prompt_cache(model, max_kv_size=size)
    held = SimpleNamespace(position=0, rollback=None, keys_values=partial(keys_values_of, caches))
    session: Any = exit_of(model).begin(PROMPT, DraftContext(vocab_size=128, target_caches=held))

    def read(tokens: list[int]) -> None:
        model(mx.array([tokens]), cache=caches)
        held.position += len(tokens)

    read(PROMPT[:-1])
    kept: Any = mx.array(session.propose(2).tokens).tolist()[0]
    session.observe([kept, 8, 7, 6, 5, 4])
    read([PROMPT[-1], kept, 8, 7, 6, 5])
    with fed_to_exits() as tokens:
        mx.eval(session.propose(2).tokens)
    assert [len(ids) for ids in tokens] == fed
    own = session.source.rollback
    assert own.caches[0].offset == len(PROMPT) + 6 + 1  # one of two drafted was fed


def test_caches_that_hold_something_else_are_told() -> None:
    """Such as those of layers in another order; no model is trusted unseen."""
    model = tiny.build("qwen2")
    assert fills_alike(model, cut(model, 1))

    class Turned(nn.Module):  # type: ignore[misc]
        """The target with its caches the other way around."""

        layers = model.layers

        def make_cache(self) -> list[Any]:
            return [KVCache() for _ in model.layers]

        def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
            logits: mx.array = model(ids, cache=cache[::-1])
            return logits

    assert not fills_alike(Turned(), cut(model, 1))


@in_one_test("window", [None, 8])
def test_several_texts_at_once_draft_with_an_exit(window: int | None) -> None:
    """Their caches are rows, so that it reads for itself; so it is with what was trained."""
    model = tiny.build("qwen2")
    drafter = exit_of(model, 1, window)
    options = {"max_tokens": 8, "num_draft_tokens": 2}
    alone = [written(model, drafter, PROMPT[i:], **options)[:2] for i in (0, 3)]
    assert alone[0][0] == written(model, None, max_tokens=8)[0]
    batch = BatchGeneration(model, drafter, Options(num_draft_tokens=2))
    for i in (0, 3):
        batch.insert(Request(PROMPT[i:], 8))
    texts: dict[int, list[Any]] = {}
    with fed_to_exits() as fed:
        for row in batch.run():
            texts.setdefault(row.uid, []).append(row.token)
    got = [([t.token for t in text], text[-1].stats.rounds) for text in texts.values()]
    assert got == alone
    assert max(map(len, fed)) > 2
