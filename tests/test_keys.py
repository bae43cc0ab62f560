"""A drafter's identity: what it is called where costs and acceptance are remembered."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import LRUPromptCache

import specdec_mlx as sd
import tiny
from selection import in_one_test
from specdec_mlx.contracts import Drafter, key_of
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.drafters import fingerprint as fingerprint_module
from specdec_mlx.drafters.fingerprint import fingerprint
from specdec_mlx.drafters.grammar import GrammarDrafter
from specdec_mlx.mlx_lm_plugin.conversation import Continued, keeping_caches

PROMPT = [5, 17, 99, 3]


@pytest.fixture(scope="module")
def target() -> nn.Module:
    return tiny.build("llama")


def learn(target: nn.Module, drafter: Drafter, tuning: Tuning) -> None:
    """A generation that measures plain rounds and drafts."""
    tokens = sd.speculate(target, PROMPT, drafter, max_tokens=12, tuning=tuning)
    assert len(list(tokens)) == 12


def test_two_draft_models_on_one_target_share_no_history(target: nn.Module, tmp_path: Path) -> None:
    """Each learns under its own name, in memory and on disk; an unknown key begins anew."""
    keys, tuning, known = [], Tuning(), []
    for seed in (1, 2):
        drafter = sd.ModelDrafter(tiny.build("qwen2", seed=seed))
        learn(target, drafter, tuning)
        keys.append(drafter.key)
        known.append(deepcopy(tuning.of(keys[0]).as_dict()))
    assert known[0] == known[1] != tuning.of(keys[1]).as_dict()
    tuning.save(tmp_path / "tuning.json")
    loaded = Tuning.load(tmp_path / "tuning.json")
    assert set(loaded.drafters) == set(keys)
    for key in keys:
        assert loaded.of(key).as_dict() == tuning.of(key).as_dict()
    third = key_of(sd.PromptLookupDrafter())
    assert loaded.of(third, look_up=True) == Tuning().of("new", look_up=True)


def kept(drafter: Drafter) -> Drafter:
    return keeping_caches(drafter, LRUPromptCache())


@in_one_test(
    "wrap",
    [
        lambda drafter: Continued(kept(Continued(drafter, [1])), [2]),
        lambda drafter: sd.FirstOf(sd.FirstOf(drafter)),
        lambda drafter: kept(Continued(sd.FirstOf(drafter), [1])),
    ],
)
def test_a_wrapper_goes_on_with_the_history_of_what_it_wraps(
    wrap: Callable[[Drafter], Drafter], target: nn.Module
) -> None:
    """The server's, and `FirstOf`: what a look-up or a model learned alone holds among others."""
    for drafter in (sd.PromptLookupDrafter(), sd.ModelDrafter(tiny.build("qwen2", seed=1))):
        tuning = Tuning()
        learn(target, drafter, tuning)
        learn(target, wrap(drafter), tuning)
        assert set(tuning.drafters) == {key_of(drafter)}


def test_the_parts_of_a_drafter_learn_under_their_own_keys(target: nn.Module) -> None:
    """In nested ones too; and there is no history of the whole."""
    look_up, model = sd.PromptLookupDrafter(min_ngram=1), sd.ModelDrafter(tiny.build("qwen2"))
    parts, tuning = (look_up, sd.NGramDrafter(), model), Tuning()
    learn(target, sd.FirstOf(parts[0], sd.FirstOf(*parts[1:])), tuning)
    assert set(tuning.drafters) == {key_of(part) for part in parts}


def model_drafter(**options: Any) -> sd.ModelDrafter:
    return sd.ModelDrafter(tiny.build("qwen2"), **options)


DRAFTERS: list[Callable[[], Drafter]] = [
    GrammarDrafter,
    sd.PromptLookupDrafter,
    lambda: sd.PromptLookupDrafter(max_ngram=4),
    sd.NGramDrafter,
    lambda: sd.NGramDrafter(stochastic=True),
    model_drafter,
    lambda: model_drafter(greedy=True),
    lambda: model_drafter(draft_temp=0.5),
    lambda: sd.FirstOf(sd.NGramDrafter(), model_drafter()),
    lambda: sd.FirstOf(model_drafter(), sd.NGramDrafter()),
]


def test_what_drafts_the_same_has_the_same_key_and_nothing_else_has() -> None:
    """Loaded twice, made twice, and in a wrapper that adds nothing; options are part of it."""
    keys = set()
    for make in DRAFTERS:
        drafter = make()
        others = make(), Continued(drafter, [1]), kept(drafter)
        assert {key_of(other) for other in others} == {key_of(drafter)}
        keys.add(key_of(drafter))
    assert len(keys) == len(DRAFTERS)
    assert key_of(model_drafter(tokenizer=object())) == key_of(model_drafter())


def changed(change: Callable[[str, mx.array], mx.array]) -> nn.Module:
    model = tiny.build("qwen2")
    parameters = [(name, change(name, array)) for name, array in tree_flatten(model.parameters())]
    model.update(tree_unflatten(parameters))
    return model


def odd(value: float) -> nn.Module:
    """Its parameters are a scalar and an empty one."""
    model = nn.Module()
    model.scalar, model.empty = mx.array(value), mx.zeros((0, 3))
    return model


def test_a_fingerprint_tells_models_apart() -> None:
    """By weights, of one layer too, architecture, dtype and quantization; of any parameters, or
    none."""
    nn.quantize(quantized := tiny.build("qwen2"), group_size=32, bits=4)
    models = [
        tiny.build("qwen2"),
        tiny.build("qwen2", seed=1),
        tiny.build("llama"),
        changed(lambda name, array: array.astype(mx.bfloat16)),
        changed(lambda name, array: array * 1.01 if "layers.1.mlp.up_proj" in name else array),
        quantized,
        *(odd(1.0), odd(2.0), nn.ReLU()),
    ]
    assert len({fingerprint(model) for model in models}) == len(models)
    assert fingerprint(odd(1.0)) == fingerprint(odd(1.0))


def test_a_fingerprint_is_computed_once_for_a_loaded_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each generation asks for it, so that it must not read weights again."""
    model = tiny.build("qwen2")
    key = sd.ModelDrafter(model).key
    monkeypatch.setattr(fingerprint_module, "_sample", None)
    assert sd.ModelDrafter(model).key == key


def test_keys_are_the_same_in_every_process() -> None:
    """Nothing of a process is in them: no address, no hash of a str."""
    make = "sd.FirstOf(sd.PromptLookupDrafter(), sd.ModelDrafter(tiny.build('qwen2')))"
    script = (
        "import tiny, specdec_mlx as sd; from specdec_mlx.contracts import key_of;"
        f"print(key_of({make}), end='')"
    )
    options: dict[str, Any] = {"cwd": Path(__file__).parent, "text": True, "timeout": 240}
    there = subprocess.check_output([sys.executable, "-c", script], **options)
    assert there == key_of(eval(make))
