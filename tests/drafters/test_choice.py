"""Who drafts: one meaning of `--drafter` and `--draft-model` in all commands, and in Python."""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest

import specdec_mlx as sd
from serving import drafter_of
from specdec_mlx import lab
from specdec_mlx.cli.commands import main
from specdec_mlx.contracts import DraftContext, Drafter
from specdec_mlx.draft_length import drafting
from specdec_mlx.draft_length.value import Auto
from specdec_mlx.drafters.choosing.choice import DrafterChoice, DraftModel
from specdec_mlx.drafters.model import ModelDrafter
from specdec_mlx.mlx_lm_plugin import flags
from specdec_mlx.models.loading import load_model

MEANINGS = [
    pytest.param([], "BestOf(SuffixDrafter, ModelDrafter)", id="it competes with look-up"),
    pytest.param(["auto"], "BestOf(SuffixDrafter, ModelDrafter)", id="the default, said"),
    pytest.param(
        ["ngram", "suffix"],
        "BestOf(NGramDrafter, SuffixDrafter, ModelDrafter)",
        id="and with all that are named",
    ),
    pytest.param(["model"], "ModelDrafter", id="the model alone"),
    pytest.param(["none"], "ModelDrafter", id="no look-up"),
    pytest.param(["cascade"], "Cascade(ModelDrafter, SuffixDrafter)", id="as a part"),
]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The drafter, with its parts, and the draft length of each generation that is begun."""
    found: list[tuple[str, str]] = []
    begin = drafting.Drafting.begin

    def spy(self: drafting.Drafting, context: DraftContext) -> None:
        if self.drafter is not None:
            found.append((shape(self.drafter), type(self.length).__name__))
        begin(self, context)

    monkeypatch.setattr(drafting.Drafting, "begin", spy)
    return found


def shape(drafter: Drafter) -> str:
    """Names of a drafter and its parts."""
    parts = ", ".join(map(shape, getattr(drafter, "drafters", ())))
    return f"{type(drafter).__name__}({parts})" if parts else type(drafter).__name__


def commands(folder: Path, tmp_path: Path) -> dict[str, list[str]]:
    """Each command but the server, on a tiny model, with as little to do as there is."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "a", "category": "chat", "turns": ["ab ab ab"]}) + "\n")
    session = tmp_path / "sessions.jsonl"
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ab ab"}]
    session.write_text(json.dumps({"id": "a", "messages": messages}) + "\n")
    model, short = ["--model", str(folder)], ["--max-tokens", "4"]
    return {
        "generate": [*model, *short, "--prompt", "ab ab"],
        "chat": [*model, *short],
        "benchmark": [*model, "-p", "8", "-g", "4", "-n", "1"],
        "check": [*model, "--prompts", str(prompts), "--budget", "20"],
        "bench": [*model, *short, "--prompts", str(prompts), "--no-cost"],
        "replay": [*model, "--sessions", str(session), "--cost", "linear:0.1"],
    }


NAMES = ("generate", "chat", "benchmark", "check", "bench", "replay")
OTHERS = [name for name in NAMES if name != "check"]  # which takes long
IN_COMMANDS = [pytest.param(name, *MEANINGS[0].values, id=name) for name in NAMES]
IN_COMMANDS += [
    pytest.param(name, *given.values, id=f"{name}, {given.id}")
    for name, given in zip(OTHERS, MEANINGS[1:], strict=True)
]
"""Every command, and every meaning in one of them: in Python and to the server all are tried."""


@pytest.mark.parametrize(("name", "drafters", "meaning"), IN_COMMANDS)
def test_a_draft_model_means_the_same_in_every_command(
    name: str,
    drafters: list[str],
    meaning: str,
    folder: Path,
    seen: list[tuple[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every generation of a command drafts so, at an automatic length, unless flags say else."""
    said = iter(["ab ab", "q"])
    monkeypatch.setattr("builtins.input", lambda *prompt: next(said))
    named = [word for drafter in drafters for word in ("--drafter", drafter)]
    own = commands(folder, tmp_path)[name]
    tuning = ["--no-tuning"] if name in ("generate", "chat", "benchmark") else []
    main([name, *own, *named, "--draft-model", str(folder), *tuning])
    assert {found for found, _ in seen} == {meaning}
    assert {length for _, length in seen} == {Auto.__name__}


@pytest.mark.parametrize(("drafters", "meaning"), MEANINGS)
def test_a_draft_model_means_the_same_to_the_server(
    drafters: list[str], meaning: str, folder: Path
) -> None:
    """To requests that name nothing, and to those that name what the flags did."""
    parser = argparse.ArgumentParser()
    flags.add_arguments(parser)
    named = [word for drafter in drafters for word in ("--drafter", drafter)]
    given = parser.parse_args([*named, "--draft-model", str(folder)])
    target, _ = load_model(folder)
    for asked in ({}, {"user": "somebody"}):
        drafter = drafter_of(flags.take_flags(copy.copy(given)), target, **asked)
        assert drafter is not None
        assert shape(drafter) == meaning


@pytest.mark.parametrize(("drafters", "meaning"), MEANINGS)
def test_a_draft_model_means_the_same_in_python(
    drafters: list[str], meaning: str, folder: Path, seen: list[tuple[str, str]]
) -> None:
    """As a loaded model or as a folder among the drafters, in every call that drafts."""
    model, tokenizer = load_model(folder)
    how: dict[str, Any] = {"drafter": drafters} if drafters else {}
    named = {"drafter": [*(drafters or ["auto"]), str(folder)]}
    of_model = meaning in ("ModelDrafter", "Cascade(ModelDrafter, SuffixDrafter)")
    for way in ({"draft_model": model, **how}, *(() if of_model else (named,))):
        given: Any = {"max_tokens": 4, **way}
        sd.generate(model, tokenizer, "ab ab", **given)
        list(sd.stream_generate(model, tokenizer, "ab ab", **given))
    sd.batch_generate(model, tokenizer, ["ab ab"], max_tokens=4, draft_model=model, **how)
    assert {found for found, _ in seen} == {meaning}


def test_without_flags_the_check_proves_what_generate_runs(
    folder: Path, seen: list[tuple[str, str]], tmp_path: Path
) -> None:
    """Look-up at an automatic length; a length that is given is the loop's."""
    own = commands(folder, tmp_path)
    main(["generate", *own["generate"], "--no-tuning"])
    main(["check", *own["check"]])
    assert set(seen) == {("SuffixDrafter", "Auto")}
    seen.clear()
    main(["check", *own["check"], "--num-draft-tokens", "3"])
    assert set(seen) == {("SuffixDrafter", "Fixed")}


def test_drafters_that_are_compared_share_one_draft_model() -> None:
    """A name that stands for the model has it; where none does, it joins each of them."""
    model = DraftModel(nn.Linear(2, 2))
    apart = DrafterChoice(["suffix", "model"], model).each()
    assert [one.ordered for one in apart.values()] == [["suffix"], ["model"]]
    joined = DrafterChoice(["suffix", "ngram"], model).each()
    assert [one.ordered for one in joined.values()] == [["suffix", "model"], ["ngram", "model"]]
    made = apart["model"].resolve()
    assert isinstance(made, ModelDrafter)
    assert made.model is model.name


def test_the_place_of_a_model_or_a_head_is_a_drafter_in_every_command(
    folder: Path, seen: list[tuple[str, str]], tmp_path: Path
) -> None:
    """Alone, or in competition with others; what is neither a name nor a place is refused."""
    own = commands(folder, tmp_path)
    for name in ("generate", "bench"):
        main([name, *own[name], "--drafter", str(folder)])
        assert {found for found, _ in seen} == {"ModelDrafter"}
        seen.clear()
    main(["replay", *own["replay"], "--drafter", str(folder)])
    assert {found for found, _ in seen} == {"ModelDrafter"}
    head = [*own["generate"][2:], "--model", str(lab.target_path()), "--drafter", "ngram"]
    seen.clear()
    main(["generate", *head, "--drafter", str(lab.head_path("medusa"))])
    assert {found for found, _ in seen} == {"BestOf(NGramDrafter, HeadDrafter)"}


def test_a_server_drafts_with_the_place_of_a_model(folder: Path) -> None:
    """Clients see the last part of the path, and cannot name another place."""
    parser = argparse.ArgumentParser()
    flags.add_arguments(parser)
    places = ["--drafter", str(folder), "--drafter", "ngram"]
    target, _ = load_model(folder)
    taken = flags.take_flags(parser.parse_args(places))
    assert shape(drafter_of(taken, target)) == "BestOf(ModelDrafter, NGramDrafter)"
    assert shape(drafter_of(taken, target, drafters=[folder.name])) == "ModelDrafter"
    with pytest.raises(sd.errors.UnknownNameError):
        drafter_of(taken, target, drafters=[str(folder)])
