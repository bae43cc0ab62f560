"""A drafter's identity: what it is called where costs and acceptance are remembered."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
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
from specdec_mlx.draft_length.store import LONGEST_NAME, Tuning, short_name
from specdec_mlx.drafters import fingerprint as fingerprint_module
from specdec_mlx.drafters.fingerprint import fingerprint
from specdec_mlx.drafters.grammar import GrammarDrafter
from specdec_mlx.mlx_lm_plugin.conversation import Continued, keeping_caches
from specdec_mlx.types import Drafter, key_of

PROMPT = [5, 17, 99, 3]


@pytest.fixture(scope="module")
def target() -> nn.Module:
    return tiny.build("llama")


def learn(target: nn.Module, drafter: Drafter, tuning: Tuning, length: Any = "auto") -> None:
    """A generation that measures plain rounds and drafts."""
    tokens = sd.speculate(
        target, PROMPT, drafter, max_tokens=12, tuning=tuning, draft_length=length
    )
    assert len(list(tokens)) == 12


def test_two_draft_models_on_one_target_share_no_history(target: nn.Module, tmp_path: Path) -> None:
    """Each learns under its own name, in memory and on disk."""
    one, two = (sd.ModelDrafter(tiny.build("qwen2", seed=seed)) for seed in (1, 2))
    tuning = Tuning()
    learn(target, one, tuning)
    first = tuning.as_dict()["drafters"]
    learn(target, two, tuning)
    assert {**tuning.as_dict()["drafters"], **first} == tuning.as_dict()["drafters"]
    tuning.save(tmp_path / "tuning.json")
    loaded = Tuning.load(tmp_path / "tuning.json")
    assert set(loaded.drafters) == {short_name(one.key), short_name(two.key)}
    known = [loaded.of(drafter.key).as_dict() for drafter in (one, two)]
    assert known[0] != known[1]


@in_one_test(
    "wrap",
    [
        lambda drafter: Continued(drafter, [1, 2, 3]),
        lambda drafter: Continued(Continued(drafter, [1]), [2]),
        lambda drafter: keeping_caches(drafter, LRUPromptCache()),
        lambda drafter: Continued(keeping_caches(drafter, LRUPromptCache()), [1]),
        sd.FirstOf,
        lambda drafter: sd.FirstOf(sd.FirstOf(drafter)),
        lambda drafter: Continued(sd.FirstOf(drafter), [1]),
        lambda drafter: keeping_caches(sd.FirstOf(drafter), LRUPromptCache()),
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
        assert set(tuning.drafters) == {short_name(key_of(drafter))}


def test_the_parts_of_a_drafter_learn_under_their_own_keys(target: nn.Module) -> None:
    """In nested ones too; and there is no history of the whole."""
    parts = [
        sd.PromptLookupDrafter(min_ngram=1),
        sd.NGramDrafter(),
        sd.ModelDrafter(tiny.build("qwen2")),
    ]
    tuning = Tuning()
    learn(target, sd.FirstOf(parts[0], sd.FirstOf(*parts[1:])), tuning)
    assert set(tuning.drafters) == {short_name(key_of(part)) for part in parts}


def test_the_same_content_has_the_same_key() -> None:
    """A model that was loaded twice, and drafters that were made twice."""
    drafters: list[Callable[[], Any]] = [
        lambda: sd.ModelDrafter(tiny.build("qwen2")),
        sd.PromptLookupDrafter,
        lambda: sd.NGramDrafter(max_order=3),
        GrammarDrafter,
        lambda: sd.FirstOf(sd.NGramDrafter(), sd.ModelDrafter(tiny.build("qwen2"))),
    ]
    for make in drafters:
        assert key_of(make()) == key_of(make())
    keys = [key_of(make()) for make in drafters]
    assert len(set(keys)) == len(keys)


def test_options_are_part_of_the_key() -> None:
    """Those that change what is drafted, of every drafter that has some."""
    model = tiny.build("qwen2")
    different = [
        *(sd.PromptLookupDrafter(), sd.PromptLookupDrafter(max_ngram=4)),
        *(sd.NGramDrafter(), sd.NGramDrafter(stochastic=True)),
        *(sd.ModelDrafter(model), sd.ModelDrafter(model, greedy=True)),
        sd.ModelDrafter(model, draft_temp=0.5),
        sd.FirstOf(sd.PromptLookupDrafter(), sd.NGramDrafter()),
        sd.FirstOf(sd.NGramDrafter(), sd.PromptLookupDrafter()),
    ]
    assert len({key_of(drafter) for drafter in different}) == len(different)
    assert len({short_name(key_of(drafter)) for drafter in different}) == len(different)


def test_a_tokenizer_is_not_part_of_a_models_key() -> None:
    """It is compared with the target's, and changes no draft."""
    drafter = sd.ModelDrafter(tiny.build("qwen2"))
    assert replace(drafter, tokenizer=object()).key == drafter.key


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


def test_parameters_of_any_shape_have_a_fingerprint() -> None:
    """Scalars, empty ones, and none at all."""

    class Odd(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.scalar, self.empty = mx.array(value), mx.zeros((0, 3))

    assert fingerprint(Odd(1.0)) == fingerprint(Odd(1.0)) != fingerprint(Odd(2.0))
    assert fingerprint(nn.ReLU())


def test_a_fingerprint_is_computed_once_for_a_loaded_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stands in front of every generation, so that it must not read weights again."""
    model = tiny.build("qwen2")
    key = sd.ModelDrafter(model).key

    def computed(*args: Any) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(fingerprint_module, "_sample", computed)
    assert sd.ModelDrafter(model).key == key


def test_keys_are_the_same_in_every_process(tmp_path: Path) -> None:
    """Nothing of a process is in them: no address, no hash of a str."""
    script = (
        "import tiny, specdec_mlx as sd; from specdec_mlx.types import key_of;"
        "drafter = sd.FirstOf(sd.PromptLookupDrafter(), sd.ModelDrafter(tiny.build('qwen2')));"
        "print(key_of(drafter), end='')"
    )
    here = sd.FirstOf(sd.PromptLookupDrafter(), sd.ModelDrafter(tiny.build("qwen2")))
    there = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    assert there.stdout == key_of(here)


def test_long_keys_are_shortened_to_class_and_digest() -> None:
    """Readable, never longer than a line, the same for the same key, and short ones as they are."""
    key = key_of(sd.PromptLookupDrafter())
    assert short_name(key).startswith("PromptLookupDrafter-")
    assert short_name(short_name(key)) == short_name(key)
    assert short_name("MyDrafter(3)") == "MyDrafter(3)"
    assert short_name(key) != short_name(key + " ")
    assert len(short_name("a" * 1000)) <= LONGEST_NAME
    whole = key_of(sd.FirstOf(sd.PromptLookupDrafter(), sd.NGramDrafter()))
    assert short_name(whole).startswith("FirstOf-")


def test_a_history_under_another_key_does_no_harm(tmp_path: Path) -> None:
    """A file that was written for drafters of other keys is loaded, and they begin anew."""
    tuning = Tuning()
    tuning.of("PromptLookupDrafter").account.budget = 7.0
    tuning.save(tmp_path / "tuning.json")
    loaded = Tuning.load(tmp_path / "tuning.json")
    new = Tuning().of("new", look_up=True)
    assert loaded.of(key_of(sd.PromptLookupDrafter()), look_up=True) == new
