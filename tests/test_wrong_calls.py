"""What people try first: it works as they meant it, or one sentence says what to write instead."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import specdec_mlx as sd
import tiny_text
from specdec_mlx import lab

PROMPT = "a b c a b"


@cache
def pair() -> tuple[Any, Any]:
    return tiny_text.model(), tiny_text.tokenizer()


def generated(*prompt: Any, **options: Any) -> list[int]:
    model, tokenizer = pair()
    options.setdefault("max_tokens", 6)
    return sd.generate(model, tokenizer, *(prompt or (PROMPT,)), **options).tokens


def call(**options: Any) -> Callable[[], Any]:
    return lambda: generated(**options)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a temperature as the sampler": (call(sampler=0.7), r"give temp=0\.7"),
    "both a temperature and a sampler": (
        call(sampler=sd.Sampling(0.7), temp=0.7),
        r"temp= or sampler=, not both",
    ),
    "a negative temperature": (call(temp=-1.0), r"temp=-1\.0.*>= 0"),
    "a model by name": (
        lambda: sd.generate("mlx-community/Qwen3-8B-4bit", None, PROMPT),
        r"mlx_lm\.load",
    ),
    "no tokenizer": (
        lambda: sd.generate(pair()[0], None, PROMPT),
        r"tokenizer=None.*mlx_lm\.load",
    ),
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
    "a misspelt policy": (call(drafter="ngram", draft_length="automatic"), r"auto"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_answered_in_one_sentence(name: str) -> None:
    """A ValueError, or a class of it, that names what to write instead."""
    wrong, words = WRONG[name]
    with pytest.raises(ValueError, match=words) as caught:
        wrong()
    assert "\n" not in str(caught.value)


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
    with pytest.raises(sd.PromptError, match="no chat template"):
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
    from specdec_mlx.generation import choose_drafter

    chosen = choose_drafter("prompt-lookup", model)
    assert isinstance(chosen, sd.FirstOf)
    assert [type(part) for part in chosen.drafters] == [sd.PromptLookupDrafter, sd.ModelDrafter]
    assert generated(drafter="prompt-lookup", draft_model=model) == generated()


SCRIPT = """
from typing import Any

import specdec_mlx as sd

def run(model: Any, tokenizer: Any) -> None:
    text: sd.Text = sd.generate(model, tokenizer, "a", drafter="ngram", max_tokens=3)
    print(text.stats.tokens_per_pass)
    sd.generate(model, tokenizer, "a", drafer="ngram")
    for response in sd.stream_generate(model, tokenizer, "a", draft_lenght=3):
        print(response.text)
    for token in sd.speculate(model, [1], temprature=3):
        print(token.token)
"""


@pytest.mark.full
def test_a_type_checker_finds_a_misspelt_argument(tmp_path: Path) -> None:
    """`mypy --strict` on a script that calls the public API."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-incremental", str(script)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    for name in ("drafer", "draft_lenght", "temprature"):
        assert f'Unexpected keyword argument "{name}"' in checked.stdout, checked.stdout
    assert "sd.Text" not in checked.stdout


def test_the_public_names_are_what_dir_shows() -> None:
    """`__all__` and the version; each is there, and none hides a module."""
    assert set(dir(sd)) == {*sd.__all__, "__version__"}
    for name in sd.__all__:
        assert getattr(sd, name).__module__.startswith("specdec_mlx")
        assert f"specdec_mlx.{name}" not in sys.modules
