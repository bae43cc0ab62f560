"""Passes over trees: every node as its own path alone, and the text is plain decoding's."""

from __future__ import annotations

import math
import random
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from threading import Event
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

import tiny
from lossless import PROMPT, TOLERANCE, plain_text, spoken, tree_deviation
from scripted import TREE, OracleDrafter, OracleTrees
from selection import FULL, cases, in_one_test
from specdec_mlx import Sampling, speculate
from specdec_mlx.caches import Rollback
from specdec_mlx.exactness import probe as exactness
from specdec_mlx.exactness.probe import first_inexact, tree_report
from specdec_mlx.lab.probing import probe
from specdec_mlx.loop import Token
from specdec_mlx.models import anatomy as watching
from specdec_mlx.target import Verifier
from specdec_mlx.trees import tree_pass as tree_passes

REPRESENTATIVE = ("llama", "gemma3_text", "gpt_oss", "deepseek_v3", "ministral3")
"""One of each kind of attention that trees work on; `test_architectures` measures all others."""

CHAINS_ALONE = ("llama4", "mamba2", "gpt2", "nanochat", "falcon_h1", "minimax_m3_vl")
"""Own chunk masks, recurrent states, learned positions, ropes that are no module, both caches, and
blocks of rows that are chosen by their scores."""

CLOSE = 1e-4

NUM_TOKENS = 60
VOCAB = tiny.CONFIGS["llama"]["vocab_size"]


def kept_branches(tokens: list[Token]) -> int:
    """Tokens that stand in a row other than the next: kept from a later branch."""
    rows = [token.row for token in tokens]
    return sum(b > a + 1 for a, b in pairwise(rows))


IN_SHORT = ("llama", "gemma3_text", "deepseek_v3", "llama4", "mamba2", "gpt2")


@pytest.mark.parametrize("name", cases([*REPRESENTATIVE, *CHAINS_ALONE], *IN_SHORT))
def test_greedy_text_with_trees_is_plain_text(name):
    """60 tokens, past the windows; where trees cannot be verified chains are, with one warning."""
    model = tiny.build(name)
    plain = plain_text(model, PROMPT, NUM_TOKENS)
    drafter = OracleTrees(plain.tokens, plain.logprobs.shape[-1])
    options = {"max_tokens": NUM_TOKENS, "num_draft_tokens": len(TREE)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tokens = list(speculate(model, PROMPT, drafter, **options))
    assert spoken(tokens).deviation(plain) < TOLERANCE
    assert any(token.from_draft for token in tokens)
    assert (kept_branches(tokens) > 3) == (name in REPRESENTATIVE)
    assert len(caught) == (name in CHAINS_ALONE)


def classes(model: Any) -> list[type]:
    return [type(module) for module in model.modules()]


def taught_classes(name: str) -> list[type]:
    """Those of a model that nobody watched."""
    model = tiny.build(name)
    tree_passes.patch_ropes(model)
    return classes(model)


@pytest.mark.parametrize("name", ["llama", "ministral3"])
def test_depths_are_taught_while_another_thread_watches_every_module(name):
    """As it does where a head begins: trees are not given up, and what is taught stays taught."""
    model = tiny.build(name)
    watches, is_taught = Event(), Event()

    def watch() -> None:
        with watching.watching(model.modules(), lambda *call: None):
            watches.set()
            assert is_taught.wait(60)

    with ThreadPoolExecutor(1) as pool:
        watcher = pool.submit(watch)
        assert watches.wait(60)
        target = Verifier(model, Rollback(make_prompt_cache(model)))
        was_taken = target.takes_trees()
        tree_passes.patch_ropes._make(model)  # a second thread that came at the same time
        is_taught.set()
        watcher.result()
    assert was_taken
    assert classes(model) == taught_classes(name)


def test_depths_are_taught_while_another_thread_begins_to_watch(monkeypatch):
    """Between looking at a module's class and changing it: both are under one lock."""
    model, with_rows = tiny.build("llama"), tree_passes._with_rows
    teaches, watches, is_taught = Event(), Event(), Event()

    def watch() -> None:
        assert teaches.wait(60)
        with watching.watching(model.modules(), lambda *call: None):
            watches.set()
            assert is_taught.wait(60)

    def slowly(kind: type) -> type:
        teaches.set()
        watches.wait(0.5)  # the other thread would be done by then, if it could
        return with_rows(kind)

    monkeypatch.setattr(tree_passes, "_with_rows", slowly)
    with ThreadPoolExecutor(1) as pool:
        watcher = pool.submit(watch)
        tree_passes.patch_ropes(model)
        is_taught.set()
        watcher.result()
    monkeypatch.undo()
    assert classes(model) == taught_classes("llama")


SCALED = ("ministral3", "mistral3", "mistral4")  # from position 32 on

BY_LENGTH = ("llama", "internlm3")  # see `tiny.DYNAMIC`

READ_ELSEWHERE = {
    "mistral3": "queries scaled by position",
    "llama": "ropes by the length of a text",
    "gpt2": "learned positions",
    "nanochat": "rotations that are no module",
    "llama4": "chunks, a mask of its own, and queries scaled by position",
    "deepseek_v32": "keys that are chosen by their scores",
    "minimax_m3_vl": "blocks of keys",
    "gemma3n": "offsets handed on",
    "plamo3": "an inexact window",
}
"""Where positions are read elsewhere than in ropes of one offset and a fixed base: one of each."""


@pytest.mark.parametrize(
    ("name", "way", "num_prompts"),
    [
        ("ministral3", OracleTrees, 3),
        pytest.param("mistral4", OracleTrees, 3, marks=FULL),
        ("internlm3", OracleDrafter, 2),
        *(pytest.param(name, OracleTrees, 1, marks=FULL) for name in READ_ELSEWHERE),
    ],
)
@pytest.mark.filterwarnings("ignore:specdec_mlx")
def test_greedy_text_across_every_boundary_is_plain_text(name, way, num_prompts):
    """80 tokens, across the window (16), the original length (32) and all positions (64)."""
    model = tiny.build(name, **tiny.DYNAMIC if name in BY_LENGTH else {})
    kept = 0
    for prompt in prompts(num_prompts):
        text = plain_text(model, prompt, 80)
        drafter = way(text.tokens, text.logprobs.shape[-1])
        items = list(speculate(model, prompt, drafter, max_tokens=80, num_draft_tokens=len(TREE)))
        assert spoken(items).tokens == text.tokens, prompt
        kept += kept_branches(items)
    assert kept > 3 or way is OracleDrafter or name not in SCALED


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
    assert first_inexact(scaled(name), 2 * ORIGINAL, on_trees=True) is None
    monkeypatch.setattr(tree_passes, "_with_scale", lambda kind: kind)
    model = scaled(name)
    assert first_inexact(model, 1000, on_trees=True) is None
    fed = []
    kind = type(model)
    call = kind.__call__

    def counted(self: Any, tokens: mx.array, *args: Any, **options: Any) -> Any:
        fed.append(tokens.size)
        return call(self, tokens, *args, **options)

    monkeypatch.setattr(kind, "__call__", counted)
    start = ORIGINAL - exactness.MARGIN
    assert first_inexact(model, start, on_trees=True) == start
    assert sum(fed) < 300


@in_one_test("dtype", [mx.float32, mx.bfloat16])
@in_one_test("name", ["llama", "internlm2", "internlm3"])
def test_ropes_by_the_length_of_a_text_end_drafting(name, dtype):
    """From 32 positions before the length on, with a warning; before it, drafts do not cross."""
    length = 32_768
    model = tiny.build(name, dtype, **tiny.DYNAMIC | {"max_position_embeddings": length})
    start = length - exactness.MARGIN
    assert first_inexact(model, 1000) == start
    assert not probe(model).exact
    with pytest.warns(UserWarning, match="around position 32768"):
        assert first_inexact(model, start) == start


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
    assert first_inexact(model, 10_000) is None
    assert first_inexact(model, 10_000, on_trees=True) is None


def by_the_last_two(tokens: mx.array, logits: mx.array) -> mx.array:
    """A logits processor that moves everything, by the two tokens before."""
    places = mx.arange(logits.shape[-1])
    return logits + 3 * mx.cos(places * (tokens[-1] + 3 * tokens[-2]))


by_the_last_two.pure = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(("rule", "processed"), [("coupled", True), ("match", False)])
def test_a_seeds_text_is_the_same_with_trees(rule, processed):
    """Each depth has the noise of its position, and processors see each node's own path."""
    model = tiny.build("llama")
    given: dict[str, Any] = {
        "max_tokens": NUM_TOKENS,
        "sampler": Sampling(temp=0.8, top_p=0.95),
        "seed": 3,
        "rule": rule,
        "logits_processors": [by_the_last_two] if processed else None,
    }
    plain = [token.token for token in speculate(model, PROMPT, None, **given)]
    drafter = OracleTrees(plain, VOCAB)
    tokens = list(speculate(model, PROMPT, drafter, num_draft_tokens=len(TREE), **given))
    assert [token.token for token in tokens] == plain
    assert kept_branches(tokens) > 3


KINDS = {
    "KVCache": (KVCache, CLOSE),
    "QuantizedKVCache": (partial(QuantizedKVCache, group_size=32, bits=8), 2e-2),
    "RotatingKVCache": (partial(RotatingKVCache, max_size=16), CLOSE),
}
LENGTHS = [("KVCache", 14), ("QuantizedKVCache", 40), ("RotatingKVCache", 14)]
LENGTHS += [("RotatingKVCache", length) for length in (5, 15, 16, 40)]


@pytest.mark.parametrize(("name", "length"), cases(LENGTHS, *LENGTHS[:2], ("RotatingKVCache", 16)))
def test_what_was_kept_of_a_tree_is_as_if_fed_alone(name, length):
    """After a tree and the rewind to one of its paths, 20 more tokens have the same logits."""
    model, (kind, close) = tiny.build("qwen3", head_dim=32), KINDS[name]
    for end in (-1, 2, 3, 6, 7):
        assert tree_deviation(model, length, end, lambda m: [kind() for _ in m.layers]) < close


def test_an_exception_while_rows_are_moved_leaves_the_caches_as_they_were(monkeypatch):
    model = tiny.build("qwen3")
    caches = make_prompt_cache(model)
    target = Verifier(model, Rollback(caches))
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
