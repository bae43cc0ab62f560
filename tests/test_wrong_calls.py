"""What people try first: it works as they meant it, or one sentence says what to write instead."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import scripted
import specdec_mlx as sd
import tiny
import tiny_text
from selection import in_one_test
from specdec_mlx import lab
from specdec_mlx.arguments import installed, load, parse_options
from specdec_mlx.draft_length.value import Fixed
from specdec_mlx.drafters.choosing.choice import resolve
from specdec_mlx.drafters.choosing.registry import GROUP, drafter_names, make_drafter
from specdec_mlx.lab.beams.generation import BeamSearchResponse
from specdec_mlx.lab.bench.timing import Settings

PROMPT = "a b c a b"
Case = tuple[dict[str, Any], str]  # arguments, and words of the answer


@cache
def pair() -> tuple[Any, Any]:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}  # 32 wide, a group of kv_bits
    return tiny.build("qwen2", **tiny_text.SHAPE | heads), tiny_text.tokenizer()


def generated(prompt: Any = PROMPT, **options: Any) -> list[int]:
    return sd.generate(*pair(), prompt, **{"max_tokens": 6} | options).tokens


def batch_generated(*, prompt: Any = PROMPT, prompts: Any = None, **options: Any) -> list[Any]:
    prompts = [prompt, prompt] if prompts is None else prompts
    return list(sd.batch_stream_generate(*pair(), prompts, **options))


def streamed(prompt: Any = PROMPT, **given: Any) -> Any:
    return sd.stream_generate(*pair(), prompt, **given)


def speculated(*, prompt: Any = (1, 2, 3, 1, 2), **options: Any) -> Any:
    return sd.speculate(pair()[0], prompt, **options)


def beams(*, prompt: Any = PROMPT, **options: Any) -> Any:
    return lab.beam_search(*pair(), prompt, **{"num_beams": 2} | options)


CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "generate": (generated, sd.stream_generate),
    "stream_generate": (streamed, sd.stream_generate),
    "batch_generate": (batch_generated, sd.batch_stream_generate),
    "speculate": (speculated, sd.speculate),
    "beam_search": (beams, lab.beam_search),
}
"""By name: what makes a call, and the function whose arguments it takes. A stream that is returned
is never asked for a token: what is wrong is refused where it is given."""


class WithoutObserve:
    """A drafter and its session, which cannot be told anything."""

    def begin(self, prompt: Any, context: Any) -> WithoutObserve:
        return self

    def propose(self, limit: int) -> sd.Draft:
        return sd.Draft([1])


def width(change: Callable[[mx.array], Any]) -> dict[str, Any]:
    return {"logits_processors": [lambda tokens, logits: change(logits)]}


AN_INT = "expected an int"
IDS = "expected token ids, a flat list of ints"
CACHES = "expected a list of [0-9]+ caches.*make_prompt_cache"

ARGUMENTS: list[Case] = [
    ({"drafter": sd.NGramDrafter}, r"drafter=NGramDrafter: .*Drafter\(\)"),
    ({"drafter": (sd.NGramDrafter(),)}, r"several drafters are a list"),
    ({"draft_model": (nn.Linear(2, 2), None)}, r"of mlx_lm.load\(...\) the first"),
    ({"drafter": "prompt-lookup:max_ngrams=4", "draft_model": None}, r"Did you mean max_ngram\?"),
    ({"seed": "a"}, f"seed='a': {AN_INT}"),
    ({"max_tokens": 2.5}, rf"max_tokens=2\.5: {AN_INT}"),
    ({"max_tokens": True}, f"max_tokens=True: {AN_INT}"),
    ({"num_draft_tokens": Fixed}, "num_draft_tokens=Fixed.*auto"),
    ({"logits_processors": 5}, "logits_processors=5: expected a list"),
    ({"logits_processors": Fixed.cut}, r"cut.*expected a list.*\[cut\]"),
    ({"sampler": sd.Sampling}, r"sampler=Sampling: expected a sampler"),
    ({"prompt": None}, f"prompt=None: {IDS}"),
    ({"prompt": mx.array([[1, 2]])}, IDS),
    ({"prompt": {1, 2}}, rf"prompt=\{{1, 2\}}: {IDS}"),
    ({"prompts": None, "prompt": None}, IDS),
    ({"prompts": "a b"}, r"prompts='a b': expected a list.*\[prompt\]"),
    ({"prompt_cache": 5}, f"prompt_cache=5: {CACHES}"),
    ({"prompt_cache": [None] * 9}, CACHES),
    ({"prefill_step_size": 0}, f"prefill_step_size=0: {AN_INT} >= 1"),
    ({"kv_bits": 7, "kv_group_size": 32}, "kv_bits=7, kv_group_size=32.*MLX"),
    ({"kv_bits": 4, "kv_group_size": "x"}, f"kv_group_size='x': {AN_INT}"),
    ({"kv_bits": 4, "kv_group_size": 64}, "kv_group_size=64.*MLX"),
    ({"max_kv_size": 0}, f"max_kv_size=0: {AN_INT} >= 1"),
    ({"tuning": {}}, r"tuning=\{\}: expected a Tuning"),
    ({"completion_batch_size": 0}, f"completion_batch_size=0: {AN_INT} >= 1"),
    ({"num_samples": 2.5}, rf"num_samples=2\.5: {AN_INT} >= 1"),
]

FIRST_CALL: list[Case] = [
    ({"sampler": lambda rows: None}, r"sampler returned None.*\(1,\).*integer"),
    ({"sampler": lambda rows: mx.array([[3]])}, r"returned .*\(1, 1\).*expected.*\(1,\)"),
    ({"sampler": lambda rows: mx.array([3.0])}, r"returned .*float32.*integer"),
    (width(lambda logits: logits[:, :5]), r"processor returned .*\(1, 5\).*expected.*\(1, 288\)"),
    (width(lambda x: mx.concatenate([x, x], axis=-1)), r"returned .*\(1, 576\).*\(1, 288\)"),
    (width(lambda logits: None), "processor returned None"),
    ({"drafter": WithoutObserve()}, r"WithoutObserve.*observe\(tokens\)"),
]
"""What shows with the first token."""

OF_GENERATE: list[Case] = [
    ({"drafter": [sd.NGramDrafter(), 5]}, r"drafter=5: expected an object with begin"),
    ({"drafter": "n-gram"}, r"Unknown drafter 'n-gram'.*Did you mean ngram\?.*OWNER/NAME"),
    ({"drafter": "/no/such/folder"}, r"There is no folder"),
    ({"draft_model": sd.NGramDrafter()}, r"A drafter is given as drafter="),
    ({"draft_model": "org/small"}, r"expected a loaded model.*give drafter='org/small'"),
    ({"sampler": 0.7}, r"give temp=0\.7"),
    ({"sampler": sd.Sampling(0.7), "temp": 0.7}, r"temp= or sampler=, not both"),
    ({"sampler": sd.Sampling(0.7), "top_k": 4}, r"top_k= or sampler=, not both"),
    ({"top_p": 2}, r"top_p=2.*\[0, 1\]"),
    ({"temp": -1.0}, r"temp=-1\.0.*>= 0"),
    ({"drafter": object()}, r"begin\(prompt, context\)"),
    ({"max_tokens": 0}, r"max_tokens=0"),
    ({"rule": "lenient:leniency=1"}, r"mean lenience\?"),
    ({"drafter": "ngram", "num_draft_tokens": "automatic"}, r"auto"),
]

MEMORY: Any = sd.Memory
OTHERS: list[tuple[Callable[[], Any], str]] = [
    (lambda: sd.generate(pair()[0], "org/Qwen3-8B", PROMPT), r"tokenizer that mlx_lm\.load"),
    (lambda: batch_generated(seed=[1, "a"]), f"seed='a': {AN_INT}"),
    (lambda: batch_generated(seed=[1]), r"seed=\[1\]: expected a value for each"),
    (lambda: batch_generated(max_tokens=[3]), r"max_tokens=\[3\]: expected a value for each"),
    (lambda: batch_generated(prompt_caches=[make_prompt_cache(pair()[0])]), "a value for each"),
    (lambda: Settings(max_tokens=0), f"max_tokens=0: {AN_INT} >= 1"),
    (lambda: Settings(repeats=0), f"repeats=0: {AN_INT} >= 1"),
    (lambda: MEMORY("folder"), r"Memory\.load"),
    (lambda: MEMORY(2.5), AN_INT),
    (lambda: MEMORY().add("text"), "token ids"),
    (lambda: MEMORY.load(None), "expected a path"),
    (lambda: MEMORY.load(Path(__file__).parent), "is a folder"),
    (lambda: MEMORY.load("/no/such/file"), "no file /no/such/file"),
]

MODEL_DRAFTER: Any = sd.ModelDrafter
HINTED: list[tuple[Callable[[], Any], str]] = [
    (lambda: generated(temp="1"), "temp='1'.*expected a number"),
    (lambda: MODEL_DRAFTER("name"), r"model='name': .*ModelDrafter\(\*mlx_lm\.load"),
    (lambda: MODEL_DRAFTER((nn.Linear(2, 2), None)), r"ModelDrafter\(\*mlx_lm\.load"),
]
"""What the type hints refuse already where they are checked, as they are in tests."""


def is_answered(wrong: Callable[[], Any], words: str) -> None:
    """A ValueError, or OSError for a file, of one line that is not long."""
    with pytest.raises((ValueError, FileNotFoundError), match=words) as caught:
        wrong()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@in_one_test(("wrong", "words"), [*OF_GENERATE, *OTHERS])
def test_a_wrong_call_is_answered_in_one_sentence(wrong: Any, words: str) -> None:
    """A ValueError, or a class of it, that names what to write instead."""
    is_answered(wrong if callable(wrong) else lambda: generated(**wrong), words)


def taking(table: list[Case]) -> list[tuple[dict[str, Any], str, str]]:
    """Each case with each of the calls that take its arguments."""
    takes = {
        name: {"prompt", *inspect.signature(function).parameters}
        for name, (_, function) in CALLS.items()
    }
    return [(*case, name) for case in table for name in CALLS if takes[name] >= case[0].keys()]


@in_one_test(("arguments", "words", "name"), taking(ARGUMENTS))
def test_a_wrong_argument_is_refused_where_it_is_given(
    arguments: dict[str, Any], words: str, name: str
) -> None:
    """By each call that takes it, in one sentence, before a token is asked for."""
    is_answered(lambda: CALLS[name][0](**{"max_tokens": 6} | arguments), words)


@in_one_test("name", CALLS)
def test_a_model_is_loaded_before_it_is_called(name: str) -> None:
    """A name in its place, or in that of its tokenizer, is answered with how to load one."""
    function = CALLS[name][1]
    if name == "speculate":
        is_answered(lambda: function("Qwen3-8B-4bit", [1]), r"mlx_lm\.load")
        return
    model, tokenizer = pair()
    is_answered(lambda: list(function("Qwen3-8B-4bit", tokenizer, [PROMPT])), r"mlx_lm\.load")
    is_answered(lambda: list(function(model, None, [PROMPT])), r"tokenizer=None.*mlx_lm\.load")


@in_one_test(("arguments", "words", "name"), taking(FIRST_CALL))
def test_what_a_callable_returns_is_looked_at_when_it_is_called(
    arguments: dict[str, Any], words: str, name: str
) -> None:
    """Of samplers, processors and drafters of the caller's; drafted for or not."""
    for drafter in (None, scripted.ScriptedDrafter(lambda n, k: [1, 2][:k])):
        given = {"max_tokens": 6, "num_draft_tokens": 2, "drafter": drafter} | arguments
        is_answered(lambda given=given: list(CALLS[name][0](**given)), words)  # type: ignore[misc]


def test_what_is_meant_is_done() -> None:
    """A temperature is a sampler with it. Bits of caches that rotate, of which MLX quantizes none,
    are no fault before they are due: a text that ends sooner is as in mlx-lm.
    """
    assert generated(temp=0.9, seed=3) == generated(sampler=sd.Sampling(temp=0.9), seed=3)
    options = {"max_kv_size": 64, "kv_group_size": 32}
    assert generated(kv_bits=4, **options) == generated(**options)


def test_temperature_and_filters_are_those_of_a_sampler() -> None:
    """By mlx-lm's names; the text is a sampler's with the same, and each has a say in it."""
    filters: dict[str, Any] = {"top_p": 0.8, "min_p": 0.05, "top_k": 20}
    how: dict[str, Any] = {"seed": 3, "max_tokens": 24}
    text = generated(temp=3.0, **filters, **how)
    assert text == generated(sampler=sd.Sampling(temp=3.0, **filters), **how)
    streamed_text = streamed(temp=3.0, **filters, **how)
    assert text == [response.token for response in streamed_text]
    for name in filters:
        others = {key: value for key, value in filters.items() if key == name}
        assert generated(temp=3.0, **others, **how) != generated(temp=3.0, **how), name


UNKNOWN = {
    "generate": ("temperature", "temp"),
    "stream_generate": ("max_new_tokens", "max_tokens"),
    "batch_generate": ("max_token", "max_tokens"),
    "speculate": ("num_draft_token", "num_draft_tokens"),
}


@in_one_test("name", UNKNOWN)
def test_an_unknown_argument_is_named_by_the_function_that_was_called(name: str) -> None:
    """With the one that is probably meant."""
    wrong, meant = UNKNOWN[name]
    first = (pair()[0], [1]) if name == "speculate" else (*pair(), [PROMPT])
    words = rf"^{name}\(\) got an unexpected keyword argument '{wrong}'\. Did you mean {meant}\?"
    with pytest.raises(TypeError, match=words):
        getattr(sd, name)(*first, **{wrong: 3})


def test_a_memory_of_one_path_needs_no_list(tmp_path: Path) -> None:
    """A str is a path, not a list of letters."""
    (tmp_path / "a.txt").write_text("the cat in the hat")
    [expected] = sd.Memory.from_files([tmp_path], pair()[1]).texts()
    for one in (str(tmp_path), tmp_path):
        [text] = sd.Memory.from_files(one, pair()[1]).texts()
        assert [*text] == [*expected]


def test_stats_and_the_pair_are_shown_in_a_line() -> None:
    """Where they are the value of a cell or stand in a response."""
    stats = sd.generate(*pair(), PROMPT, max_tokens=6).stats
    assert repr(stats).startswith("<SpeculationStats: 6 tokens in ")
    shown = repr(lab.load_pair())
    assert re.fullmatch(r"<Pair: target [\d,]+, draft [\d,]+ parameters>", shown)
    assert "\n" not in repr(stats) + shown


NUMBERS: list[dict[str, int]] = [
    {"max_tokens": 6, "num_draft_tokens": 2, "seed": 3, "prefill_step_size": 4},
    {"num_samples": 2, "completion_batch_size": 2, "num_beams": 2},
    {"max_kv_size": 64},
    {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 4},
]


def tokens_of(found: Any) -> list[Any]:
    """All tokens of what a call returned, those of a batch text by text."""
    if isinstance(found, BeamSearchResponse):
        return [beam.tokens for beam in found.beams]
    by_text = sorted(
        found, key=lambda part: (getattr(part, "index", 0), getattr(part, "sample", 0))
    )
    return [getattr(part, "token", part) for part in by_text]


@pytest.mark.filterwarnings("ignore:specdec_mlx. caches with (max_kv_size|kv_bits)")
@in_one_test("name", CALLS)
def test_numbers_and_prompts_may_be_of_any_library(name: str) -> None:
    """NumPy's integers and arrays, and MLX's, give the text that Python's give."""
    call, function = CALLS[name]
    taken = {*inspect.signature(function).parameters}
    taken |= {one.name for one in fields(sd.Options)} if "options" in taken else set()
    for table in NUMBERS:
        numbers = {key: value for key, value in table.items() if key in taken}
        given: dict[str, Any] = {"max_tokens": 6, "drafter": sd.NGramDrafter()} | numbers
        if "sampler" in taken:
            given |= {"sampler": sd.Sampling(temp=1.0), "seed": 3}
        in_numpy = {key: np.int64(value) for key, value in numbers.items()}
        assert tokens_of(call(**given | in_numpy)) == tokens_of(call(**given))
    expected = tokens_of(call(prompt=[1, 2, 3], max_tokens=3))
    ids = np.array([1, 2, 3], np.int32)
    for prompt in (ids, mx.array(ids), list(ids), range(1, 4)):
        assert tokens_of(call(prompt=prompt, max_tokens=3)) == expected


OUTSIDE = (10**6, -5, 300, 2**32 + 2)


def sampler(wrong: int, at: int, pure: bool) -> Any:
    """One that makes up a token at its `at`-th call."""
    calls: list[int] = []

    def sample(logprobs: mx.array) -> mx.array:
        calls.append(1)
        return mx.array([wrong if len(calls) == at else 2])

    sample.pure = pure  # type: ignore[attr-defined]
    return sample


def makes_up_tokens() -> None:
    """Each token outside the vocabulary, at the first and at a later call, alone and in a batch."""
    model, tokenizer, prompt = tiny_text.model(), tiny_text.tokenizer(), [1, 2, 3, 1, 2]
    drafters = None, scripted.ScriptedDrafter(lambda n, k: [2, 2][:k])
    for drafter, *made in product(drafters, OUTSIDE, (1, 3), (False, True)):
        words = f"^The next token is {made[0]}; the target has 0 to 287"
        got, caches = [], make_prompt_cache(model)
        options: dict[str, Any] = {"max_tokens": 9, "num_draft_tokens": 2, "drafter": drafter}
        with pytest.raises(ValueError, match=words):
            for token in sd.speculate(
                model, prompt, sampler=sampler(*made), prompt_cache=caches, **options
            ):
                got.append(token.token)
        assert set(got) <= {2}, (got, made, drafter)
        assert {c.offset for c in caches} == {len(prompt) + len(got)}, (got, made)
        with pytest.raises(ValueError, match=words):
            sd.batch_generate(model, tokenizer, [prompt] * 2, sampler=sampler(*made), **options)


def test_what_hints_would_refuse_and_tokens_that_a_sampler_makes_up_are_answered() -> None:
    """In a process of its own, which checks no hints, as users have it.

    Ids outside the vocabulary are named, and neither fed nor emitted; the caches stay in order.
    """
    code = "[t.is_answered(*case) for case in t.HINTED]; t.makes_up_tokens()"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", f"import test_wrong_calls as t; {code}"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_chat_messages_go_through_the_chat_template() -> None:
    """The same tokens as the template applied by hand; without one, a sentence."""
    target, _, tokenizer = lab.load_pair()
    messages = [{"role": "user", "content": "print a list"}]
    with pytest.raises(sd.errors.PromptError, match="no chat template"):
        sd.generate(target, tokenizer, messages, max_tokens=4)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '\n' }}"
    tokenizer.has_chat_template = True
    by_hand = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    expected = sd.generate(target, tokenizer, by_hand, max_tokens=8)
    assert sd.generate(target, tokenizer, messages, max_tokens=8) == expected
    assert len(by_hand) > 1


def test_a_draft_model_may_be_named_by_its_folder() -> None:
    """It is loaded with its tokenizer, which may be another one than the target's."""
    target, _, tokenizer = lab.load_pair()
    options: dict[str, Any] = {"max_tokens": 12, "num_draft_tokens": 3}
    folder = lab.draft_path()
    of_the_lab: Any = target, tokenizer, tokenizer.encode("def f(x):"), folder
    for model, own, prompt, name in (of_the_lab, (*pair(), PROMPT, str(folder))):
        text = sd.generate(model, own, prompt, drafter=name, **options)
        assert text == sd.generate(model, own, prompt, **options)
        assert text.stats.drafted > 0


def test_drafters_of_a_list_and_a_draft_model_compete() -> None:
    """As on the command line: whichever of them has the better draft.

    None among several counts for nothing; one alone is itself; of none there is None.
    """
    model, folder = pair()[0], str(lab.draft_path())
    for given, kinds in (
        (("auto", model), [sd.SuffixDrafter, sd.ModelDrafter]),
        (("prompt-lookup", model), [sd.PromptLookupDrafter, sd.ModelDrafter]),
        ((["ngram", folder],), [sd.NGramDrafter, sd.ModelDrafter]),
        (([sd.NGramDrafter(), "none", None, model],), [sd.NGramDrafter, sd.ModelDrafter]),
    ):
        both: Any = resolve(*given)
        assert type(both) is sd.BestOf
        assert [type(part) for part in both.drafters] == kinds
    for alone in ((None, model), (model,), ([model],), (folder,), (["none", Path(folder)],)):
        assert isinstance(resolve(*alone), sd.ModelDrafter)
    assert resolve([]) is resolve("none") is resolve(None) is None
    assert generated(drafter="prompt-lookup", draft_model=model) == generated()
    assert generated(drafter=["ngram", sd.SuffixDrafter(), folder]) == generated()


def test_rooms_bring_by_star_what_the_page_lists_of_them() -> None:
    """Further drafters, rules and statistics, each by its name, and of rules nothing else."""
    page = (Path(__file__).parents[1] / "docs/api.md").read_text()
    listed = set(re.findall(r"^::: specdec_mlx\.rules\.(\w+)$", page, re.MULTILINE))
    brought: dict[str, Any] = {}
    exec("from specdec_mlx.rules import *", brought)
    assert brought.keys() - {"__builtins__"} == listed
    exec("from specdec_mlx.drafters import *; from specdec_mlx.stats import *", brought)
    assert {"Grammar", "drafter_names", "SpeculationStats", "Rows"} <= brought.keys()


def test_errors_name_a_model_and_do_not_print_it() -> None:
    """Also one that a drafter holds: one short line each."""
    model: Any = scripted.target()
    held = sd.ModelDrafter(model)
    for call in (
        lambda: lab.Cascade(sd.PromptLookupDrafter(), then=held),
        lambda: generated(rule=model),
        lambda: generated(drafter=(model,)),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 (the words are checked below)
            call()
        assert "Linear" not in str(caught.value)
        assert "(mod" not in str(caught.value)
        assert "\n" not in str(caught.value)


def test_the_public_names_are_what_dir_shows() -> None:
    """`__all__`, the rooms and the version; each is there, and none hides a module."""
    rooms = {"drafters", "errors", "generation", "kernels", "lab", "rules", "stats", "vision"}
    assert set(dir(sd)) == {*sd.__all__, *rooms, "__version__"}
    assert len(sd.__all__) <= 20
    for name in sd.__all__:
        assert getattr(sd, name).__module__.startswith("specdec_mlx")
        assert f"specdec_mlx.{name}" not in sys.modules


# Drafters by name: the built-in ones and a stranger's come in by the same door --------------------


def test_the_built_in_drafters_are_entry_points_of_this_distribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No table in the code knows them. Reading the metadata of all packages takes milliseconds,
    which each request would pay: they are looked through once.
    """
    entries = {e.name: e for e in entry_points(group=GROUP)}
    for name, kind in {"ngram": sd.NGramDrafter, "prompt-lookup": sd.PromptLookupDrafter}.items():
        assert entries[name].dist is not None
        assert entries[name].dist.name == "specdec-mlx"
        # not `is`: the tests' import hook may have loaded the class anew
        assert entries[name].load().__qualname__ == kind.__qualname__
    assert drafter_names() == sorted({*entries, *drafter_names(), "none"})
    monkeypatch.setattr("specdec_mlx.arguments.entry_points", pytest.fail)
    assert make_drafter("ngram") == sd.NGramDrafter()


def test_one_factory_serves_python_the_command_line_and_the_server() -> None:
    """Options in the name, as keywords, or both; dashes stand for underscores.

    A draft model goes to the name "model" only; "none" is plain decoding, and takes nothing.
    """
    model, tokenizer = tiny_text.model(), tiny_text.tokenizer()
    given = {"draft_model": model, "draft_tokenizer": tokenizer}
    drafter = make_drafter("model:greedy=true", **given)
    assert isinstance(drafter, sd.ModelDrafter)
    assert (drafter.model, drafter.tokenizer, drafter.greedy) == (model, tokenizer, True)
    assert make_drafter("ngram", **given) == sd.NGramDrafter()
    assert make_drafter("ngram:max-order=3,num_draft=8") == sd.NGramDrafter(3, num_draft=8)
    assert make_drafter("ngram:max_order=3", num_draft=7) == sd.NGramDrafter(3, num_draft=7)
    assert make_drafter("none", **given) is None
    assert sd.generate(model, tokenizer, [5, 17], max_tokens=3, drafter="none").stats.drafted == 0


@in_one_test(
    ("text", "values"),
    [
        ("a=1,b=2.5,c=-3,d=+2,e=1e-3,f=.5", [1, 2.5, -3, 2, 1e-3, 0.5]),
        ("a=true,b=False,c=none", [True, False, None]),
        ("a=earliest,b='1',c=/some/folder,d=", ["earliest", "1", "/some/folder", ""]),
        ("a=nan,b=(1),c=[1],d=f(1),e=x=y", ["nan", "(1)", "[1]", "f(1)", "x=y"]),
        ("", []),
    ],
)
def test_options_are_numbers_words_for_values_or_text(text: str, values: list[Any]) -> None:
    """Nothing is evaluated."""
    assert list(parse_options(text).values()) == values
    assert parse_options(",a-b = 1 , c = x,,") == {"a_b": 1, "c": "x"}


@in_one_test(
    ("spec", "words"),
    [
        ("n-gram:max_order=3", "Unknown drafter 'n-gram'. Known: .*" + ".*".join(drafter_names())),
        ("none:a=1", "none takes no options"),
        ("ngram:max_order", "'max_order'.*key=value"),
        ("ngram:max_n=3", r"Drafter 'ngram': .*help\(\w+Drafter\)"),
        ("model", r"Drafter 'model': .*help\(\w+Drafter\)"),
        ("model:layers=2", r"Drafter 'model': .*help\(\w+Drafter\)"),
        ("prompt-lookup:max_ngram=2.5", "max_ngram is 2.5, expected int"),
        ("prompt-lookup:num_draft=x", r"num_draft is 'x', expected int \| None"),
        ("trees:recycling=3", "recycling is 3, expected bool"),
        ("ngram:max_order=99", "max_order"),
    ],
)
def test_what_is_wrong_with_a_name_or_an_option_is_said(spec: str, words: str) -> None:
    """The known names, the option, the type that it is annotated with, and where to read on."""
    with pytest.raises(ValueError, match=words):
        make_drafter(spec)


def entry(package: str, name: str, value: str = "nowhere:Nothing") -> Any:
    """An entry point of an installed package."""
    found = EntryPoint(name, value, GROUP)
    vars(found)["dist"] = SimpleNamespace(name=package)
    return found


def test_nobody_takes_a_name_that_another_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours stays; of two strangers the first by name has it. The warning names both."""
    ours, one = entry("specdec-mlx", "ngram"), entry("another", "constant")
    taken = {"ngram": "a-first-package", "constant": "somebody", "taken": "zz-last-package"}
    found = [*(entry(package, name) for name, package in taken.items()), one, ours]
    monkeypatch.setattr("specdec_mlx.arguments.entry_points", lambda group: found)
    with pytest.warns(UserWarning, match="is left out, since .* has one of that name") as caught:
        assert installed(GROUP, "drafter", ["taken"]) == {"ngram": ours, "constant": one}
    said = {str(warning.message).partition(" is left out")[0] for warning in caught}
    assert said == {f"specdec_mlx: drafter {name!r} of {it}" for name, it in taken.items()}


def test_a_package_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(sd.errors.MissingPackageError, match="'constant' of somebody cannot be"):
        load(entry("somebody", "constant"), "drafter")
