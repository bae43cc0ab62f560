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

import specdec_mlx as sd
import tiny
from selection import in_one_test
from specdec_mlx import lab
from specdec_mlx.contracts import Drafter
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.drafters.fingerprint import fingerprint
from specdec_mlx.drafters.grammar import GrammarDrafter

PROMPT = [5, 17, 99, 3]


@pytest.fixture(scope="module")
def target() -> nn.Module:
    return tiny.build("llama")


def learn(target: nn.Module, drafter: Drafter, tuning: Tuning) -> None:
    """A generation that measures plain rounds and drafts."""
    tokens = sd.speculate(target, PROMPT, drafter, max_tokens=12, tuning=tuning)
    assert len(list(tokens)) == 12


WRAPPERS: list[Callable[[Drafter], Drafter]] = [
    lambda drafter: sd.drafters.FirstOf(sd.drafters.FirstOf(drafter)),
    sd.drafters.FirstOf,
]


@in_one_test("wrap", WRAPPERS)
def test_a_wrapper_goes_on_with_the_history_of_what_it_wraps(
    wrap: Callable[[Drafter], Drafter], target: nn.Module
) -> None:
    """`FirstOf`: what a look-up or a model learned alone holds among others; each
    part learns under its own key, and there is no history of the whole.
    """
    look_up, model = sd.PromptLookupDrafter(), sd.ModelDrafter(tiny.build("qwen2", seed=1))
    for drafter, parts in (
        (look_up, [look_up]),
        (model, [model]),
        (sd.drafters.FirstOf(look_up, sd.drafters.FirstOf(model)), [look_up, model]),
    ):
        tuning = Tuning()
        learn(target, parts[0], tuning)
        learn(target, wrap(drafter), tuning)
        assert set(tuning.drafters) == {part.key for part in parts}


def test_two_draft_models_on_one_target_share_no_history(target: nn.Module, tmp_path: Path) -> None:
    """Each learns under its own name, in memory and on disk; an unknown key begins anew."""
    one, two = (sd.ModelDrafter(tiny.build("qwen2", seed=seed)) for seed in (1, 2))
    tuning = Tuning()
    learn(target, one, tuning)
    first = deepcopy(tuning.of(one.key).saved())
    learn(target, two, tuning)
    assert tuning.of(one.key).saved() == first != tuning.of(two.key).saved()
    tuning.save(tmp_path / "tuning.json")
    loaded = Tuning.load(tmp_path / "tuning.json")
    assert set(loaded.drafters) == {one.key, two.key}
    for key in (one.key, two.key):
        assert loaded.of(key).saved() == tuning.of(key).saved()
    assert loaded.of("another", look_up=True) == Tuning().of("new", look_up=True)


MODEL = tiny.build("qwen2")
DIFFERENT: list[Callable[[], Any]] = [
    sd.PromptLookupDrafter,
    lambda: sd.PromptLookupDrafter(max_ngram=4),
    sd.NGramDrafter,
    lambda: lab.StochasticNGramDrafter(),
    lambda: sd.ModelDrafter(tiny.build("qwen2"), tokenizer=object()),
    lambda: sd.ModelDrafter(MODEL, greedy=True),
    lambda: sd.ModelDrafter(MODEL, draft_temp=0.5),
    GrammarDrafter,
    lambda: sd.drafters.FirstOf(sd.PromptLookupDrafter(), sd.NGramDrafter()),
    lambda: sd.drafters.FirstOf(sd.NGramDrafter(), sd.PromptLookupDrafter()),
]


def test_the_same_drafts_have_the_same_key_and_others_another() -> None:
    """Made twice, and with a model loaded twice; options count."""
    for make in DIFFERENT:
        assert make().key == make().key
    assert len({make().key for make in DIFFERENT}) == len(DIFFERENT)


def changed(change: Callable[[str, mx.array], mx.array]) -> nn.Module:
    model = tiny.build("qwen2")
    parameters = [(name, change(name, array)) for name, array in tree_flatten(model.parameters())]
    model.update(tree_unflatten(parameters))
    return model


CHANGES: dict[str, Callable[[], nn.Module]] = {
    "other weights": lambda: tiny.build("qwen2", seed=1),
    "another architecture": lambda: tiny.build("llama"),
    "another dtype": lambda: changed(lambda name, array: array.astype(mx.bfloat16)),
    "one layer, fine-tuned": lambda: changed(
        lambda name, array: array * 1.01 if "layers.1.mlp.up_proj" in name else array
    ),
}


@in_one_test("name", CHANGES)
def test_a_fingerprint_tells_models_apart(name: str) -> None:
    assert fingerprint(CHANGES[name]()) != fingerprint(tiny.build("qwen2"))


def test_keys_are_the_same_in_every_process() -> None:
    """Nothing of a process is in them: no address, no hash of a str."""
    script = (
        "import tiny, specdec_mlx as sd; "
        "parts = sd.PromptLookupDrafter(), sd.ModelDrafter(tiny.build('qwen2'));"
        "drafter = sd.drafters.FirstOf(*parts);"
        "print(drafter.key, end='')"
    )
    here = sd.drafters.FirstOf(sd.PromptLookupDrafter(), sd.ModelDrafter(MODEL))
    options: dict[str, Any] = {"cwd": Path(__file__).parent, "text": True, "timeout": 240}
    assert subprocess.check_output([sys.executable, "-c", script], **options) == here.key
