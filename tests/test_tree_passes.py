"""Passes over trees, masked or as rows of a batch: every node as its own path alone, plain text."""

from __future__ import annotations

import copy
import math
import random
import warnings
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

import tiny
from exact_trees import shapes
from lossless import (
    INEXACT,
    PROMPT,
    SECOND_PROMPT,
    TOLERANCE,
    plain_text,
    rows_of,
    spoken,
    tree_deviation,
)
from scripted import TREE, OracleDrafter, OracleTrees
from selection import FULL, cases, in_one_test
from specdec_mlx import Sampling, speculate
from specdec_mlx.contracts.trees import path_to
from specdec_mlx.loop import Token
from specdec_mlx.target import exactness, tree_passes
from specdec_mlx.target.exactness import exact_until, probe, rows_pay, tree_report
from specdec_mlx.target.model_pass import ModelPass
from specdec_mlx.target.rollback import Rollback
from specdec_mlx.target.strategies import leaves
from specdec_mlx.target.tree_passes import BranchRows, tree_logits

REPRESENTATIVE = ("llama", "gemma3_text", "gpt_oss", "deepseek_v3", "ministral3")
"""One of each kind of attention that trees work on; `test_architectures` measures all others."""

CHAINS_ALONE = ("llama4", "mamba2", "gpt2", "nanochat", "falcon_h1", "minimax_m3_vl")
"""Own chunk masks, recurrent states, learned positions, ropes that are no module, both caches, and
blocks of rows that are chosen by their scores."""

UNMASKED = ("mamba2", "qwen3_next", "rwkv7", "falcon_h1", "gpt2", "llama4")
"""Recurrent states, alone and beside attention; learned positions; a mask of its own."""

CLOSE = 1e-4
ROWS = rows_of((Path(__file__).parent.parent / "docs" / "architectures.md").read_text())
RUNS = [name for name in tiny.architecture_files() if name not in tiny.CANNOT_RUN]

NUM_TOKENS = 60
VOCAB = tiny.CONFIGS["llama"]["vocab_size"]


def kept_branches(tokens: list[Token]) -> int:
    """Tokens that stand in a row other than the next: kept from a later branch."""
    rows = [token.row for token in tokens]
    return sum(b > a + 1 for a, b in pairwise(rows))


@FULL
def test_what_the_page_calls_exact_is_what_is_drafted_as_trees():
    """The quick measurement before the first tree agrees with the page on every architecture."""
    for row in ROWS:
        if row.architecture in RUNS:
            model = tiny.build(row.architecture)
            rows_pay.put(model, False)
            target = ModelPass(model, Rollback(make_prompt_cache(model)))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert target.takes_trees() == (row.trees == "exact"), row


@pytest.mark.parametrize(
    ("name", "by_rows"),
    [*product((*REPRESENTATIVE, *CHAINS_ALONE), [False]), *product(UNMASKED, [True])],
)
def test_greedy_text_with_trees_is_plain_text(name, by_rows, monkeypatch):
    """60 tokens, past the windows, masked or as rows; where trees cannot be verified chains are,
    with one warning."""
    monkeypatch.setattr(exactness, "rows_cost", lambda model: 0.9 if by_rows else 3.0)
    model = tiny.build(name)
    plain = plain_text(model, PROMPT, NUM_TOKENS)
    drafter = OracleTrees(plain.tokens, plain.logprobs.shape[-1])
    options = {"max_tokens": NUM_TOKENS, "draft_length": len(TREE)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tokens = list(speculate(model, PROMPT, drafter, **options))
    takes_trees = by_rows or name in REPRESENTATIVE
    assert spoken(tokens).deviation(plain) < TOLERANCE
    assert any(token.from_draft for token in tokens)
    assert (kept_branches(tokens) > 3) == takes_trees
    assert len(caught) == (not takes_trees)


SCALED = ("ministral3", "mistral3", "mistral4")  # queries scaled by position, from 32 on

BY_LENGTH = ("llama", "qwen2", "internlm2", "internlm3")
"""Some of those whose ropes can take their base from the length of a text; see `tiny.DYNAMIC`."""

WAYS = ("chains", "trees", "rows")

READ_ELSEWHERE = (
    *SCALED,
    *BY_LENGTH,
    *("gpt2", "gpt_bigcode"),  # learned positions
    *("nanochat", "talkie"),  # rotations that are no module
    "llama4",  # chunks, a mask of its own, and queries scaled by position
    *("deepseek_v32", "glm_moe_dsa"),  # keys that are chosen by their scores
    *("minimax_m3_vl", "phi3small"),  # blocks of keys
    *("afm7", "baichuan_m1", "gemma3n", "gemma4_text", "iquestloopcoder"),  # offsets handed on
    *("plamo3", "spark2_5", "muse_glimmer"),
)
"""Architectures that read positions elsewhere than in ropes of one offset and a fixed base."""


@pytest.mark.parametrize(
    ("name", "ways", "num_prompts"),
    [
        ("ministral3", ["trees"], 3),
        ("mistral4", ["trees"], 3),
        ("internlm3", ["chains"], 2),
        *(pytest.param(name, WAYS, 3, marks=FULL) for name in READ_ELSEWHERE),
    ],
)
@pytest.mark.filterwarnings("ignore:specdec_mlx")
def test_greedy_text_across_every_boundary_is_plain_text(name, ways, num_prompts, monkeypatch):
    """80 tokens, across the window (16), the original length (32) and all positions (64)."""
    model = tiny.build(name, **tiny.DYNAMIC if name in BY_LENGTH else {})
    plain = [(prompt, plain_text(model, prompt, 80)) for prompt in prompts(num_prompts)]
    for way in ways:
        rows_pay.put(model, way == "rows")
        if way == "rows":
            monkeypatch.setattr(Rollback, "takes_trees", lambda self: False)
        oracle = OracleDrafter if way == "chains" else OracleTrees
        kept = 0
        for prompt, text in plain:
            drafter = oracle(text.tokens, text.logprobs.shape[-1])
            items = list(speculate(model, prompt, drafter, max_tokens=80, draft_length=len(TREE)))
            assert spoken(items).tokens == text.tokens, (way, prompt)
            kept += kept_branches(items)
        if way == "rows" or (way == "trees" and name in SCALED):
            assert kept > 3 or name in INEXACT


def prompts(number: int) -> list[list[int]]:
    coins = [random.Random(seed) for seed in range(number)]
    return [[coin.randrange(3, 90) for _ in range(coin.randrange(4, 29))] for coin in coins]


ORIGINAL = 16_384


def scaled(name: str) -> Any:
    """A model that scales its queries from position 16,384 on, as those that were trained do."""
    config = tiny.CONFIGS[name]
    parameters = config["rope_parameters"] | {"original_max_position_embeddings": ORIGINAL}
    return tiny.build(name, rope_parameters=parameters, max_position_embeddings=2 * ORIGINAL)


@pytest.mark.parametrize("name", ["ministral3", "mistral4"])
def test_a_scale_that_nobody_knows_is_found_where_it_begins(name, monkeypatch):
    """Trees far before it, none from 32 positions before it on, and few tokens are fed."""
    assert exact_until(scaled(name), 2 * ORIGINAL, on_trees=True) is None
    monkeypatch.setattr(tree_passes, "_with_scale", lambda kind: kind)
    model = scaled(name)
    assert exact_until(model, 1000, on_trees=True) is None
    fed = []
    kind = type(model)
    call = kind.__call__

    def counted(self: Any, tokens: mx.array, *args: Any, **options: Any) -> Any:
        fed.append(tokens.size)
        return call(self, tokens, *args, **options)

    monkeypatch.setattr(kind, "__call__", counted)
    start = ORIGINAL - exactness.MARGIN
    assert exact_until(model, start, on_trees=True) == start
    assert sum(fed) < 300


@in_one_test("dtype", [mx.float32, mx.bfloat16])
@in_one_test("name", ["llama", "internlm2", "internlm3"])
def test_ropes_by_the_length_of_a_text_end_drafting(name, dtype):
    """From 32 positions before the length on, with a warning; before it, drafts do not cross."""
    length = 32_768
    model = tiny.build(name, dtype, **tiny.DYNAMIC | {"max_position_embeddings": length})
    start = length - exactness.MARGIN
    assert exact_until(model, 1000) == start
    assert not probe(model).exact
    with pytest.warns(UserWarning, match="around position 32768"):
        assert exact_until(model, start) == start


ORIGINALLY = {"original_max_position_embeddings": 64}
FIXED: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0} | ORIGINALLY,
    "yarn": {"factor": 4.0} | ORIGINALLY,
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8} | ORIGINALLY,
}


@in_one_test("kind", FIXED)
def test_other_scaled_ropes_are_exact_past_their_original_length(kind):
    model = tiny.build("llama", rope_scaling=FIXED[kind] | {"rope_type": kind})
    assert exact_until(model, 10_000) is None
    assert exact_until(model, 10_000, on_trees=True) is None


def by_the_last_two(tokens: mx.array, logits: mx.array) -> mx.array:
    """A logits processor that moves everything, by the two tokens before."""
    places = mx.arange(logits.shape[-1])
    return logits + 3 * mx.cos(places * (tokens[-1] + 3 * tokens[-2]))


by_the_last_two.pure = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize(
    ("name", "rule"), [("llama", "match"), *product(["llama", *UNMASKED], ["coupled"])]
)
def test_a_seeds_text_is_the_same_with_trees(name, rule, processed):
    """Each depth has the noise of its position, and processors see each node's own path."""
    model = tiny.build(name)
    rows_pay.put(model, name in UNMASKED)
    given: dict[str, Any] = {
        "max_tokens": NUM_TOKENS,
        "sampler": Sampling(temp=0.8, top_p=0.95),
        "seed": 3,
        "rule": rule,
        "logits_processors": [by_the_last_two] if processed else None,
    }
    plain = [token.token for token in speculate(model, PROMPT, None, **given)]
    drafter = OracleTrees(plain, VOCAB)
    tokens = list(speculate(model, PROMPT, drafter, draft_length=len(TREE), **given))
    assert [token.token for token in tokens] == plain
    assert kept_branches(tokens) > 3


@pytest.mark.parametrize(
    ("kind", "close"),
    [
        (KVCache, CLOSE),
        (partial(QuantizedKVCache, group_size=32, bits=8), 2e-2),
        (partial(RotatingKVCache, max_size=16), CLOSE),
    ],
)
@pytest.mark.parametrize("length", cases([5, 14, 15, 16, 40], 14, 16, 40))
def test_what_was_kept_of_a_tree_is_as_if_fed_alone(kind, close, length):
    """After a tree and the rewind to one of its paths, 20 more tokens have the same logits."""
    model = tiny.build("qwen3", head_dim=32)
    for end in (-1, 2, 3, 6, 7):
        assert tree_deviation(model, length, end, lambda m: [kind() for _ in m.layers]) < close


def test_an_exception_while_rows_are_moved_leaves_the_caches_as_they_were(monkeypatch):
    model = tiny.build("qwen3")
    caches = make_prompt_cache(model)
    target = ModelPass(model, Rollback(caches))
    target.feed(mx.array([1, 2, 3]))
    target.takes_trees()
    target.feed(mx.array([3, *range(8)]), parents=TREE)
    before = [array for cache in caches for array in map(mx.array, cache.keys_and_values())]
    monkeypatch.setattr(caches[-1], "trim", lambda n: 1 / 0, raising=False)
    with pytest.raises(ZeroDivisionError):
        target.rollback.keep(4, [1, 4])
    assert target.rollback.position == 12
    now = [array for cache in caches for array in cache.keys_and_values()]
    assert all(map(mx.array_equal, now, before))


def test_a_model_that_is_not_given_trees_stays_as_it_is():
    model = tiny.build("qwen3")
    fed = mx.array([PROMPT])
    before, classes = model(fed), [type(module) for module in model.modules()]
    list(speculate(model, PROMPT, OracleTrees([0] * 9, 90), max_tokens=8, rule="lenient"))
    assert [type(module) for module in model.modules()] == classes
    tree_report(model, 5)
    assert [type(module) for module in model.modules()] != classes
    assert mx.array_equal(model(fed), before).item()
    assert not math.isnan(before.max().item())


PARENTS = st.integers(1, 7).flatmap(lambda size: st.sampled_from(shapes(size)))


@given(PARENTS)
def test_every_node_stands_behind_its_own_path(parents: tuple[int, ...]) -> None:
    """In the row and column where its logits are taken; each path once, from its leaf."""
    rows = BranchRows.of(parents)
    fed = rows.fed(mx.array([99, *range(len(parents))])).tolist()
    for node, (row, column) in zip(range(-1, len(parents)), rows.places, strict=True):
        assert fed[row][: column + 1] == [99, *path_to(node, parents)]
    assert len(set(map(tuple, rows.paths))) == len(rows.paths) == len(fed)


def test_the_caches_are_left_alone() -> None:
    model = tiny.build("falcon_h1")
    caches = make_prompt_cache(model)
    model(mx.array([PROMPT]), cache=caches)
    before = copy.deepcopy(caches)
    mx.eval(tree_logits(model, caches, mx.array([3, *range(8)]), TREE))
    one, other = (model(mx.array([[5]]), cache=held) for held in (caches, before))
    assert mx.array_equal(one, other).item()


@pytest.mark.parametrize("name", ["qwen3_5", "gpt2"])
def test_an_early_end_leaves_the_caches_at_what_was_handed_out(name: str) -> None:
    """In the middle of a tree that was kept; the second turn is as after plain decoding."""
    model = tiny.build(name)
    rows_pay.put(model, True)
    plain = plain_text(model, PROMPT, 40)
    drafter = OracleTrees(plain.tokens, plain.logprobs.shape[-1])
    for taken in (5, 6, 7, 12):
        caches = make_prompt_cache(model)
        loop = speculate(model, PROMPT, drafter, prompt_cache=caches, draft_length=len(TREE))
        assert [next(loop).token for _ in range(taken)] == plain.tokens[:taken]
        loop.close()
        offsets = {cache.offset for cache in leaves(caches) if hasattr(cache, "offset")}
        assert offsets == {len(PROMPT) + taken}
        afresh = plain_text(model, PROMPT + plain.tokens[:taken] + SECOND_PROMPT, 8)
        again = speculate(model, SECOND_PROMPT, None, prompt_cache=caches, max_tokens=8)
        assert spoken(again).deviation(afresh) < TOLERANCE


@pytest.mark.parametrize("cost", [0.9, 2.3])
def test_rows_are_taken_only_where_they_cost_no_more_than_a_chain(
    monkeypatch: pytest.MonkeyPatch, cost: float
) -> None:
    """Measured once for a model; elsewhere chains are drafted, and one line says why."""
    model = tiny.build("mamba2")
    assert exactness.rows_cost(model) > 0.2
    monkeypatch.setattr(exactness, "rows_cost", lambda model: cost)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            target = ModelPass(model, Rollback(make_prompt_cache(model)))
            assert target.takes_trees() == target.by_rows == (cost < 1)
    target.taps = object()  # type: ignore[assignment]
    assert not target.takes_trees(), "a head's rows are those of one text"
    assert len(caught) == (cost > 1)
    assert all("2.3 times as much as a chain" in str(warning.message) for warning in caught)
