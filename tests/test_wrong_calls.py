"""What people try first: it works as they meant it, or one sentence says what to write instead."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import scripted
import specdec_mlx as sd
import tiny
import tiny_text
from selection import in_one_test
from specdec_mlx import lab
from specdec_mlx.beams.generation import BeamSearchResponse
from specdec_mlx.draft_length.policy import Heuristic

PROMPT = "a b c a b"


@cache
def pair() -> tuple[Any, Any]:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}  # 32 wide, a group of kv_bits
    return tiny.build("qwen2", **tiny_text.SHAPE | heads), tiny_text.tokenizer()


def generated(*prompt: Any, **options: Any) -> list[int]:
    model, tokenizer = pair()
    options.setdefault("max_tokens", 6)
    return sd.generate(model, tokenizer, *(prompt or (PROMPT,)), **options).tokens


def call(**options: Any) -> Callable[[], Any]:
    return lambda: generated(**options)


def batch_generated(*, prompt: Any = PROMPT, prompts: Any = None, **options: Any) -> list[Any]:
    prompts = [prompt, prompt] if prompts is None else prompts
    return list(sd.batch_stream_generate(*pair(), prompts, **options))


def speculated(*, prompt: Any = (1, 2, 3, 1, 2), **options: Any) -> Any:
    return sd.speculate(pair()[0], prompt, **options)


def beams(*, prompt: Any = PROMPT, **options: Any) -> Any:
    return sd.beam_search(*pair(), prompt, **{"num_beams": 2} | options)


CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "generate": (lambda prompt=PROMPT, **given: generated(prompt, **given), sd.generate),
    "stream_generate": (
        lambda prompt=PROMPT, **given: sd.stream_generate(*pair(), prompt, **given),
        sd.stream_generate,
    ),
    "batch_generate": (batch_generated, sd.batch_stream_generate),
    "speculate": (speculated, sd.speculate),
    "beam_search": (beams, sd.beam_search),
}
"""By name: what makes a call, and the function whose arguments it takes. A stream that is returned
is never asked for a token: what is wrong is refused where it is given."""


class WithoutObserve:
    """A drafter and its session, which cannot be told anything."""

    def begin(self, prompt: Any, context: Any) -> WithoutObserve:
        return self

    def propose(self, limit: int) -> sd.Draft:
        return sd.Draft([1])


def width(change: Callable[[mx.array], Any]) -> list[Callable[..., Any]]:
    return [lambda tokens, logits: change(logits)]


AN_INT = "expected an int"
IDS = "expected token ids, a flat list of ints"

ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "a class of drafter": ({"drafter": sd.NGramDrafter}, r"drafter=NGramDrafter: .*Drafter\(\)"),
    "a list of drafters": ({"drafter": [sd.NGramDrafter()]}, r"FirstOf\(\*drafters\)"),
    "a model as the drafter": ({"drafter": nn.Linear(2, 2)}, r"as draft_model="),
    "what load gives": ({"draft_model": (nn.Linear(2, 2), None)}, r"draft_model=model"),
    "an option nearly right": (
        {"drafter": "prompt-lookup:max_ngrams=4", "draft_model": None},
        r"Did you mean max_ngram\?",
    ),
    "a seed of letters": ({"seed": "a"}, f"seed='a': {AN_INT}"),
    "half a token": ({"max_tokens": 2.5}, rf"max_tokens=2\.5: {AN_INT}"),
    "max_tokens None": ({"max_tokens": None}, f"max_tokens=None: {AN_INT}"),
    "max_tokens True": ({"max_tokens": True}, f"max_tokens=True: {AN_INT}"),
    "draft_length None": ({"draft_length": None}, "draft_length=None.*auto"),
    "a class of draft length": ({"draft_length": Heuristic}, "draft_length=Heuristic.*auto"),
    "a number of processors": ({"logits_processors": 5}, "logits_processors=5: expected a list"),
    "a bare processor": ({"logits_processors": Heuristic.cut}, r"cut.*expected a list.*\[cut\]"),
    "a class of sampler": ({"sampler": sd.Sampling}, r"sampler=Sampling: expected a sampler"),
    "prompt None": ({"prompt": None}, f"prompt=None: {IDS}"),
    "prompt [1.5]": ({"prompt": [1.5]}, rf"prompt=\[1\.5\]: {IDS}"),
    "an array of rows": ({"prompt": mx.array([[1, 2]])}, IDS),
    "a set of ids": ({"prompt": {1, 2}}, rf"prompt=\{{1, 2\}}: {IDS}"),
    "prompts None": ({"prompts": None, "prompt": None}, IDS),
    "one text as the prompts": ({"prompts": "a b"}, r"prompts='a b': expected a list.*\[prompt\]"),
    "cache 5": (
        {"prompt_cache": 5},
        "prompt_cache=5: expected a list of caches.*make_prompt_cache",
    ),
    "caches None": ({"prompt_cache": [None] * 9}, "expected a list of caches.*make_prompt_cache"),
    "step 0": ({"prefill_step_size": 0}, f"prefill_step_size=0: {AN_INT} >= 1"),
    "7 bits": ({"kv_bits": 7, "kv_group_size": 32}, "kv_bits=7, kv_group_size=32.*MLX"),
    "groups of 48": ({"kv_bits": 4, "kv_group_size": 48}, "kv_bits=4, kv_group_size=48.*MLX"),
    "groups of text": ({"kv_bits": 4, "kv_group_size": "x"}, f"kv_group_size='x': {AN_INT}"),
    "groups wider than a head": ({"kv_bits": 4, "kv_group_size": 64}, "kv_group_size=64.*MLX"),
    "size 0": ({"max_kv_size": 0}, f"max_kv_size=0: {AN_INT} >= 1"),
    "a dict as the tuning": ({"tuning": {}}, r"tuning=\{\}: expected a Tuning"),
    "rows of none": ({"completion_batch_size": 0}, f"completion_batch_size=0: {AN_INT} >= 1"),
    "half a sample": ({"num_samples": 2.5}, rf"num_samples=2\.5: {AN_INT} >= 1"),
}
"""By name: arguments, and words of the answer."""

FIRST_CALL: dict[str, tuple[dict[str, Any], str]] = {
    "a sampler of None": (
        {"sampler": lambda rows: None},
        r"sampler returned None.*\(1,\).*integer",
    ),
    "a sampler of a row": (
        {"sampler": lambda rows: mx.array([[3]])},
        r"sampler returned .*\(1, 1\).*expected.*\(1,\)",
    ),
    "a sampler of an int": ({"sampler": lambda rows: 3}, r"sampler returned 3;.*\(1,\)"),
    "a sampler of a float": (
        {"sampler": lambda rows: mx.array([3.0])},
        r"returned .*float32.*integer",
    ),
    "a narrower row": (
        {"logits_processors": width(lambda logits: logits[:, :5])},
        r"processor returned .*\(1, 5\).*expected.*\(1, 288\)",
    ),
    "a wider row": (
        {"logits_processors": width(lambda logits: mx.concatenate([logits, logits], axis=-1))},
        r"processor returned .*\(1, 576\).*expected.*\(1, 288\)",
    ),
    "no row": ({"logits_processors": width(lambda logits: None)}, "processor returned None"),
    "a session without observe": (
        {"drafter": WithoutObserve()},
        r"WithoutObserve.*observe\(tokens\)",
    ),
}
"""What shows with the first token, by name: arguments, and words of the answer."""

WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a temperature as the sampler": (call(sampler=0.7), r"give temp=0\.7"),
    "both a temperature and a sampler": (
        call(sampler=sd.Sampling(0.7), temp=0.7),
        r"temp= or sampler=, not both",
    ),
    "a negative temperature": (call(temp=-1.0), r"temp=-1\.0.*>= 0"),
    "a tokenizer by name": (
        lambda: sd.generate(pair()[0], "mlx-community/Qwen3-8B-4bit", PROMPT),
        r"tokenizer that mlx_lm\.load",
    ),
    "a folder that is not there": (call(draft_model="/no/such/folder"), r"There is no folder"),
    "a class in place of a drafter": (call(drafter=object()), r"begin\(prompt, context\)"),
    "a misspelt drafter": (call(drafter="prompt-look"), r"Known: .*prompt-lookup"),
    "an option that it does not take": (call(drafter="ngram:max_n=3"), r"max_n"),
    "no tokens": (call(max_tokens=0), r"max_tokens=0"),
    "a misspelt rule": (call(rule="leviathan"), r"Known: auto, match"),
    "a misspelt option of a rule": (call(rule="lenient:leniency=1"), r"mean lenience\?"),
    "a misspelt policy": (call(drafter="ngram", draft_length="automatic"), r"auto"),
    "a seed of letters among seeds": (
        lambda: batch_generated(seed=[1, "a"]),
        f"seed='a': {AN_INT}",
    ),
    "a memory of a folder": (lambda: sd.Memory("folder"), r"Memory\.load"),  # type: ignore[arg-type]
    "half a token of memory": (lambda: sd.Memory(2.5), AN_INT),  # type: ignore[arg-type]
    "text in a memory": (lambda: sd.Memory().add("text"), "token ids"),  # type: ignore[arg-type]
    "floats in a memory": (lambda: sd.Memory().add([1.5, 2.7]), "token ids"),  # type: ignore[list-item]
    "the memory of None": (lambda: sd.Memory.load(None), "expected a path"),  # type: ignore[arg-type]
    "the memory of a folder": (lambda: sd.Memory.load(Path(__file__).parent), "is a folder"),
    "the memory of no file": (lambda: sd.Memory.load("/no/such/file"), "no file /no/such/file"),
}

HINTED: dict[str, tuple[Callable[[], Any], str]] = {
    "a temperature as text": (call(temp="1"), "temp='1'.*expected a number"),
    "a list of temperatures": (call(temp=[1]), r"temp=\[1\].*expected a number"),
    "a drafter of a model's name": (
        lambda: sd.ModelDrafter("name"),  # type: ignore[arg-type]
        r"model='name': .*ModelDrafter\(\*mlx_lm\.load",
    ),
    "a drafter of what load gives": (
        lambda: sd.ModelDrafter((nn.Linear(2, 2), None)),  # type: ignore[arg-type]
        r"ModelDrafter\(\*mlx_lm\.load",
    ),
}
"""What the type hints refuse already where they are checked, as they are in tests."""


def is_answered(wrong: Callable[[], Any], words: str) -> None:
    """A ValueError, or OSError for a file, of one line that is not long."""
    with pytest.raises((ValueError, FileNotFoundError), match=words) as caught:
        wrong()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@in_one_test("name", WRONG)
def test_a_wrong_call_is_answered_in_one_sentence(name: str) -> None:
    """A ValueError, or a class of it, that names what to write instead."""
    is_answered(*WRONG[name])


def test_so_is_one_that_only_type_hints_would_refuse() -> None:
    """In a process of its own, which checks none of them, as users have it."""
    code = "import test_wrong_calls as t; [t.is_answered(*case) for case in t.HINTED.values()]"
    done = plain_python("-c", code)
    assert done.returncode == 0, done.stderr[-2000:]


def plain_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python without what pytest adds, in a process of its own."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def taking(cases: dict[str, tuple[dict[str, Any], str]]) -> list[tuple[str, str]]:
    """Each case with each of the calls that take its arguments."""
    own = {"prompt": set(CALLS), "prompts": {"batch_generate"}}
    takes = {
        (name, argument)
        for name, (_, function) in CALLS.items()
        for argument in inspect.signature(function).parameters
    } | {(name, argument) for argument, names in own.items() for name in names}
    return [
        (case, name)
        for case, (arguments, _) in cases.items()
        for name in CALLS
        if all((name, argument) in takes for argument in arguments)
    ]


@in_one_test(("case", "name"), taking(ARGUMENTS))
def test_a_wrong_argument_is_refused_where_it_is_given(case: str, name: str) -> None:
    """By each call that takes it, in one sentence, before a token is asked for."""
    arguments, words = ARGUMENTS[case]
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


@in_one_test(("case", "name"), taking(FIRST_CALL))
def test_what_a_callable_returns_is_looked_at_when_it_is_called(case: str, name: str) -> None:
    """Of samplers, processors and drafters of the caller's; drafted for or not."""
    arguments, words = FIRST_CALL[case]
    for drafter in (None, scripted.ScriptedDrafter(lambda n, k: [1, 2][:k])):
        given = {"max_tokens": 6, "draft_length": 2, "drafter": drafter} | arguments
        is_answered(lambda given=given: list(CALLS[name][0](**given)), words)  # type: ignore[misc]


def test_bits_of_caches_that_rotate_are_no_fault_before_they_are_due() -> None:
    """MLX quantizes none of these; a text that ends before `quantized_kv_start` is as in mlx-lm."""
    options = {"max_kv_size": 64, "kv_group_size": 32}
    assert generated(kv_bits=4, **options) == generated(**options)


NUMBERS: dict[str, dict[str, int]] = {
    "of tokens": {"max_tokens": 6, "draft_length": 2, "seed": 3, "prefill_step_size": 4},
    "of samples": {"num_samples": 2, "completion_batch_size": 2, "num_beams": 2},
    "of windows": {"max_kv_size": 64},
    "of bits": {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 4},
}


def tokens_of(found: Any) -> list[Any]:
    """All tokens of what a call returned."""
    if isinstance(found, BeamSearchResponse):
        return [beam.tokens for beam in found.beams]
    return [getattr(part, "token", part) for part in found]


@pytest.mark.filterwarnings("ignore:specdec_mlx. caches with max_kv_size")
@in_one_test("kind", NUMBERS)
@in_one_test("name", CALLS)
def test_integers_of_numpy_are_integers(name: str, kind: str) -> None:
    """Each number that a call takes, in NumPy's types, gives what Python's gives."""
    call, function = CALLS[name]
    taken = inspect.signature(function).parameters
    numbers = {key: value for key, value in NUMBERS[kind].items() if key in taken}
    given: dict[str, Any] = {"max_tokens": 6, "drafter": sd.NGramDrafter()} | numbers
    if "sampler" in taken:
        given |= {"sampler": sd.Sampling(temp=1.0), "seed": 3}
    in_numpy = {key: np.int64(value) for key, value in numbers.items()}
    assert tokens_of(call(**given | in_numpy)) == tokens_of(call(**given))


@in_one_test("name", CALLS)
def test_prompts_may_be_arrays_of_any_library(name: str) -> None:
    """Of MLX or NumPy, or lists of NumPy's integers: the same ids, the same text."""
    given: dict[str, Any] = {"max_tokens": 3}
    expected = tokens_of(CALLS[name][0](prompt=[1, 2, 3], **given))
    ids = np.array([1, 2, 3], np.int32)
    for prompt in (ids, mx.array(ids), list(ids), (1, 2, 3), range(1, 4)):
        assert tokens_of(CALLS[name][0](prompt=prompt, **given)) == expected


OUTSIDE = """
import sys

import mlx.core as mx
import specdec_mlx as sd
from mlx_lm.models.cache import make_prompt_cache

import scripted, tiny_text

model, tokenizer = tiny_text.model(), tiny_text.tokenizer()
prompt = [1, 2, 3, 1, 2]


def sampler(wrong, at, pure):
    calls = []

    def sample(logprobs):
        calls.append(1)
        return mx.array([wrong if len(calls) == at else 2])

    sample.pure = pure
    return sample


for wrong in (10**6, -5, 300, 2**32 + 2):
    for at in (1, 3):
        for pure in (False, True):
            for drafter in (None, scripted.ScriptedDrafter(lambda n, k: [2, 2][:k])):
                got, caches = [], make_prompt_cache(model)
                options = dict(max_tokens=9, sampler=sampler(wrong, at, pure), draft_length=2)
                try:
                    for token in sd.speculate(
                        model, prompt, drafter, prompt_cache=caches, **options
                    ):
                        got.append(token.token)
                except ValueError as error:
                    print(wrong, error)
                assert set(got) <= {2}, (got, wrong, at, pure, drafter)
                assert {c.offset for c in caches} == {len(prompt) + len(got)}, (got, wrong)
                options["sampler"] = sampler(wrong, at, pure)
                try:
                    sd.batch_generate(model, tokenizer, [prompt] * 2, drafter=drafter, **options)
                except ValueError as error:
                    print(wrong, error)
"""


def test_a_token_that_a_sampler_makes_up_is_neither_fed_nor_emitted(tmp_path: Path) -> None:
    """Ids outside the vocabulary are named, alone and in a batch; the caches stay in order."""
    script = tmp_path / "outside.py"
    script.write_text(OUTSIDE)
    done = plain_python(str(script))
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    for wrong in (10**6, -5, 300, 2**32 + 2):
        words = f"{wrong} The next token is {wrong}; the target has 0 to 287."
        assert sum(line.startswith(words) for line in lines) == 16, done.stdout


def test_a_temperature_is_a_sampler_with_it() -> None:
    """`temp=0.7` draws as `sampler=Sampling(temp=0.7)` does."""
    expected = generated(sampler=sd.Sampling(temp=0.9), seed=3)
    assert generated(temp=0.9, seed=3) == expected
    assert generated(temp=0.0) == generated()


def test_chat_messages_go_through_the_chat_template() -> None:
    """The same tokens as the template applied by hand; without one, a sentence."""
    target, tokenizer = lab.load_pair().target, lab.load_pair().tokenizer
    messages = [{"role": "user", "content": "print a list"}]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '\n' }}"
    with pytest.raises(sd.errors.PromptError, match="no chat template"):
        sd.generate(target, tokenizer, messages, max_tokens=4)
    tokenizer.chat_template = template
    tokenizer.has_chat_template = True
    try:
        by_hand = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        expected = sd.generate(target, tokenizer, by_hand, max_tokens=8)
        assert sd.generate(target, tokenizer, messages, max_tokens=8) == expected
        assert len(by_hand) > 1
    finally:
        tokenizer.chat_template, tokenizer.has_chat_template = None, False


def test_a_draft_model_may_be_named_by_its_folder() -> None:
    """It is loaded with its tokenizer, which may be another one than the target's."""
    pair_ = lab.load_pair()
    prompt = pair_.tokenizer.encode("def f(x):")
    expected = sd.generate(pair_.target, pair_.tokenizer, prompt, max_tokens=12)
    for folder in (lab.draft_path(), str(lab.draft_path())):
        text = sd.generate(
            pair_.target,
            pair_.tokenizer,
            prompt,
            draft_model=folder,
            draft_length=3,
            max_tokens=12,
        )
        assert text == expected
        assert text.stats.drafted > 0
    options: dict[str, Any] = {"max_tokens": 12, "draft_length": 3}
    text = sd.generate(*pair(), PROMPT, draft_model=lab.draft_path(), **options)
    assert text == sd.generate(*pair(), PROMPT, **options)
    assert text.stats.drafted > 0


def test_a_drafter_and_a_draft_model_take_turns_in_this_order() -> None:
    """As on the command line: the model is asked where the drafter has nothing."""
    model = pair()[0]
    from specdec_mlx.drafters.draft_models import choose_drafter

    chosen = choose_drafter("prompt-lookup", model)
    assert isinstance(chosen, sd.FirstOf)
    assert [type(part) for part in chosen.drafters] == [sd.PromptLookupDrafter, sd.ModelDrafter]
    assert generated(drafter="prompt-lookup", draft_model=model) == generated()


def test_the_public_names_are_what_dir_shows() -> None:
    """`__all__`, the rooms and the version; each is there, and none hides a module."""
    rooms = {"drafters", "errors", "responses", "rules", "stats"}
    assert set(dir(sd)) == {*sd.__all__, *rooms, "__version__"}
    assert len(sd.__all__) <= 30
    for name in sd.__all__:
        assert getattr(sd, name).__module__.startswith("specdec_mlx")
        assert f"specdec_mlx.{name}" not in sys.modules
