"""Drafters by name: the built-in ones and a stranger's come in by the same door."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from types import SimpleNamespace
from typing import Any

import pytest

import specdec_mlx as sd
import tiny_text
from scripted import ScriptedDrafter
from selection import in_one_test
from specdec_mlx.drafters.registry import GROUP, drafter_names, first_of, make_drafter
from specdec_mlx.options import installed, load, parse_options


def test_the_built_in_drafters_are_entry_points_of_this_distribution() -> None:
    """No table in the code knows them."""
    entries = {e.name: e for e in entry_points(group=GROUP)}
    kinds = {"ngram": sd.NGramDrafter, "model": sd.ModelDrafter}
    for name, kind in (kinds | {"prompt-lookup": sd.PromptLookupDrafter}).items():
        assert entries[name].dist is not None
        assert entries[name].dist.name == "specdec-mlx"
        # not `is`: the tests' import hook may have loaded the class anew
        assert entries[name].load().__qualname__ == kind.__qualname__
        assert name in drafter_names()
    assert drafter_names() == sorted(drafter_names())


def test_a_name_with_options_makes_what_the_class_would() -> None:
    """Options in the name, as keywords, or both; dashes stand for underscores."""
    assert make_drafter("ngram") == sd.NGramDrafter()
    assert make_drafter("ngram:max_order=3,num_draft=8") == sd.NGramDrafter(3, num_draft=8)
    assert make_drafter("ngram:max-order=3", num_draft=7) == sd.NGramDrafter(3, num_draft=7)
    assert make_drafter("ngram:stochastic=true") == sd.NGramDrafter(stochastic=True)
    drafter: Any = make_drafter("model", model=tiny_text.model())
    assert drafter.model is tiny_text.model()


def test_one_factory_serves_python_the_command_line_and_the_server() -> None:
    """A draft model goes to the name "model" only; "none" is plain decoding, and takes nothing."""
    model, tokenizer = tiny_text.model(), tiny_text.tokenizer()
    given = {"draft_model": model, "draft_tokenizer": tokenizer}
    drafter = make_drafter("model:greedy=true", **given)
    assert isinstance(drafter, sd.ModelDrafter)
    assert (drafter.model, drafter.tokenizer, drafter.greedy) == (model, tokenizer, True)
    assert make_drafter("ngram", **given) == sd.NGramDrafter()
    assert make_drafter("none", **given) is None
    assert sd.generate(model, tokenizer, [5, 17], max_tokens=3, drafter="none").stats.drafted == 0
    assert "none" in drafter_names()
    with pytest.raises(ValueError, match="none takes no options"):
        make_drafter("none:a=1")


def test_several_drafters_are_one_that_tries_them_in_order() -> None:
    """None of them counts; one alone is itself; of none there is None."""
    ngram, lookup = sd.NGramDrafter(), sd.PromptLookupDrafter()
    assert first_of([]) is first_of([None]) is None
    assert first_of([None, ngram]) is ngram
    both: Any = first_of([ngram, None, lookup])
    assert both.drafters == (ngram, lookup)


@in_one_test(
    ("text", "values"),
    [
        ("a=1,b=2.5,c=-3,d=+2,e=1e-3,f=.5", [1, 2.5, -3, 2, 1e-3, 0.5]),
        ("a=true,b=False,c=none", [True, False, None]),
        ("a=earliest,b='1',c=/some/folder,d=", ["earliest", "1", "/some/folder", ""]),
        ("a=nan,b=inf", ["nan", "inf"]),
        ("a=(1),b=[1],c=f(1),d=x=y", ["(1)", "[1]", "f(1)", "x=y"]),
        ("", []),
    ],
)
def test_options_are_numbers_words_for_values_or_text(text: str, values: list[Any]) -> None:
    """Nothing is evaluated."""
    assert list(parse_options(text).values()) == values
    assert parse_options(",a-b = 1 , c = x,,") == {"a_b": 1, "c": "x"}


WRONG = {
    "n-gram:max_order=3": "Unknown drafter 'n-gram'. Known: .*" + ".*".join(drafter_names()),
    "ngram:max_order": "'max_order'.*key=value",
    "ngram:max_n=3": r"Drafter 'ngram': .*help\(\w+Drafter\)",
    "model": r"Drafter 'model': .*help\(\w+Drafter\)",
    "model:layers=2": r"Drafter 'model': .*help\(\w+Drafter\)",
    "prompt-lookup:max_ngram=x": "max_ngram is 'x', expected int",
    "prompt-lookup:max_ngram=2.5": "max_ngram is 2.5, expected int",
    "prompt-lookup:num_draft=x": r"num_draft is 'x', expected int \| None",
    "ngram:stochastic=3": "stochastic is 3, expected bool",
    "ngram:max_order=99": "max_order",
}


@in_one_test("spec", WRONG)
def test_what_is_wrong_with_a_name_or_an_option_is_said(spec: str) -> None:
    """The known names, the option, the type that it is annotated with, and where to read on."""
    with pytest.raises(ValueError, match=WRONG[spec]):
        make_drafter(spec)


def test_installed_packages_are_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the metadata of all packages takes milliseconds, which each request would pay."""
    drafter_names()
    monkeypatch.setattr("specdec_mlx.options.entry_points", pytest.fail)
    assert make_drafter("ngram") == sd.NGramDrafter()
    assert "ngram" in drafter_names()


@in_one_test("length", [0, 1, 4, "auto", "heuristic"])
def test_any_object_with_the_protocol_drafts(length: int | str) -> None:
    """In stream_generate, as drafter= and as draft_model=."""
    call = tiny_text.model(), tiny_text.tokenizer(), [5, 17, 99], 20
    drafter = ScriptedDrafter(lambda start, limit: [7] * limit)  # two methods, nothing inherited
    assert isinstance(drafter, sd.Drafter)
    expected = [r.token for r in sd.stream_generate(*call, drafter="none")]
    for name in ("drafter", "draft_model"):
        options: dict[str, Any] = {"draft_length": length, name: drafter}
        responses = list(sd.stream_generate(*call, **options))
        assert [r.token for r in responses] == expected
    assert responses[-1].stats.drafted > 0 or length != 4


def entry(package: str, name: str, value: str = "nowhere:Nothing") -> Any:
    """An entry point of an installed package."""
    found = EntryPoint(name, value, GROUP)
    vars(found)["dist"] = SimpleNamespace(name=package)
    return found


@in_one_test("package", ["a-first-package", "zz-last-package"])
def test_nobody_takes_a_name_that_another_has(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours stays, whatever the package's name; of two strangers the first by name has it. The
    warning names both.
    """
    ours, theirs = entry("specdec-mlx", "ngram"), entry(package, "ngram")
    one, other = entry("another", "constant"), entry("somebody", "constant")
    found = [theirs, other, one, ours, entry(package, "taken")]
    monkeypatch.setattr("specdec_mlx.options.entry_points", lambda group: found)
    with pytest.warns(UserWarning, match="is left out, since .* has one of that name") as caught:
        assert installed(GROUP, "drafter", ["taken"]) == {"ngram": ours, "constant": one}
    said = {str(warning.message).partition(" is left out")[0] for warning in caught}
    assert said == {
        f"specdec_mlx: drafter {name!r} of {stranger}"
        for name, stranger in (("ngram", package), ("constant", "somebody"), ("taken", package))
    }


def test_a_package_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(sd.errors.MissingPackageError, match="'constant' of somebody cannot be"):
        load(entry("somebody", "constant"), "drafter")
