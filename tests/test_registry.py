"""Drafters by name: the built-in ones and a stranger's come in by the same door."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

import specdec_mlx as sd
import tiny_text
from selection import FULL, in_one_test
from specdec_mlx.drafters import registry
from specdec_mlx.drafters.registry import GROUP, drafter_names, first_of, make_drafter
from specdec_mlx.options import parse_options

BUILT_IN = {
    "prompt-lookup": sd.PromptLookupDrafter,
    "ngram": sd.NGramDrafter,
    "model": sd.ModelDrafter,
}


def test_the_built_in_drafters_are_entry_points_of_this_distribution() -> None:
    """No table in the code knows them."""
    entries = {e.name: e for e in entry_points(group=GROUP)}
    for name, kind in BUILT_IN.items():
        assert entries[name].dist is not None
        assert entries[name].dist.name == "specdec-mlx"
        # not `is`: the tests' import hook may have loaded the class anew
        assert entries[name].load().__qualname__ == kind.__qualname__
    assert set(drafter_names()) >= set(BUILT_IN)
    assert drafter_names() == sorted(drafter_names())


def test_a_name_with_options_makes_what_the_class_would() -> None:
    """Options in the name, as keywords, or both; dashes stand for underscores."""
    assert make_drafter("ngram") == sd.NGramDrafter()
    assert make_drafter("ngram:max_order=3,num_draft=8") == sd.NGramDrafter(3, num_draft=8)
    assert make_drafter("ngram:max-order=3") == sd.NGramDrafter(max_order=3)
    assert make_drafter("ngram", num_draft=7) == sd.NGramDrafter(num_draft=7)
    assert make_drafter("ngram:max_order=3", num_draft=7) == sd.NGramDrafter(3, num_draft=7)
    assert make_drafter("ngram:stochastic=true") == sd.NGramDrafter(stochastic=True)
    model = tiny_text.model()
    drafter: Any = make_drafter("model", model=model)
    assert drafter.model is model


def test_one_factory_serves_python_the_command_line_and_the_server() -> None:
    """A draft model goes to the name "model" only; "none" is plain decoding, and takes nothing."""
    model, tokenizer = tiny_text.model(), tiny_text.tokenizer()
    given = {"draft_model": model, "draft_tokenizer": tokenizer}
    drafter = make_drafter("model:greedy=true", **given)
    assert isinstance(drafter, sd.ModelDrafter)
    assert (drafter.model, drafter.tokenizer, drafter.greedy) == (model, tokenizer, True)
    assert make_drafter("ngram", **given) == sd.NGramDrafter()
    assert make_drafter("none", **given) is None
    assert "none" in drafter_names()
    with pytest.raises(ValueError, match="none takes no options"):
        make_drafter("none:a=1")


def test_the_name_none_is_plain_decoding_in_python_too() -> None:
    """The same list of names everywhere; the text is the target's own."""
    model, tokenizer = tiny_text.model(), tiny_text.tokenizer()
    expected = [t.token for t in sd.speculate(model, [5, 17, 99], max_tokens=9)]
    text = sd.generate(model, tokenizer, [5, 17, 99], max_tokens=9, drafter="none")
    assert text.tokens == expected
    assert text.stats.drafted == 0
    with sd.installed("none") as speculation:
        assert speculation.drafter is None


def test_several_drafters_are_one_that_tries_them_in_order() -> None:
    """None of them counts; one alone is itself; of none there is None."""
    ngram, lookup = sd.NGramDrafter(), sd.PromptLookupDrafter()
    assert first_of([]) is first_of([None]) is None
    assert first_of([None, ngram]) is ngram
    both: Any = first_of([ngram, None, lookup])
    assert both.drafters == (ngram, lookup)


@in_one_test(
    ("text", "options"),
    [
        ("", {}),
        ("a=1", {"a": 1}),
        ("a=1,b=2.5", {"a": 1, "b": 2.5}),
        ("a=-3", {"a": -3}),
        ("a=true,b=False,c=none", {"a": True, "b": False, "c": None}),
        ("a=earliest", {"a": "earliest"}),
        ("a='1'", {"a": "1"}),
        ("a=1e-3,b=.5,c=+2", {"a": 1e-3, "b": 0.5, "c": 2}),
        ("a=nan,b=inf", {"a": "nan", "b": "inf"}),
        ("a=(1),b=[1],c=f(1)", {"a": "(1)", "b": "[1]", "c": "f(1)"}),
        ("a=x=y", {"a": "x=y"}),
        ("a=/some/folder", {"a": "/some/folder"}),
        ("a-b = 1 , c = x", {"a_b": 1, "c": "x"}),
        ("a=", {"a": ""}),
        (",a=1,,", {"a": 1}),
    ],
)
def test_options_are_numbers_words_for_values_or_text(text: str, options: dict[str, Any]) -> None:
    """Nothing is evaluated."""
    assert parse_options(text) == options


def test_an_option_without_a_value_is_refused() -> None:
    """ValueError that shows the option and the form."""
    with pytest.raises(ValueError, match=r"'max_order'.*key=value"):
        make_drafter("ngram:max_order")


def test_an_unknown_name_lists_the_known_ones() -> None:
    """All of them; the error is a ValueError."""
    with pytest.raises(sd.errors.UnknownNameError) as caught:
        make_drafter("n-gram:max_order=3")
    assert "'n-gram'" in str(caught.value)
    assert all(name in str(caught.value) for name in drafter_names())
    assert isinstance(caught.value, ValueError)


@in_one_test("spec", ["ngram:max_n=3", "model", "model:layers=2"])
def test_options_that_a_drafter_does_not_take_are_refused(spec: str) -> None:
    """The drafter's name, the option, and where to read on."""
    name = spec.partition(":")[0]
    with pytest.raises(ValueError, match=rf"Drafter '{name}': .*help\(\w+Drafter\)"):
        make_drafter(spec)


@in_one_test(
    ("spec", "words"),
    [
        ("prompt-lookup:max_ngram=x", "max_ngram is 'x', expected int"),
        ("prompt-lookup:max_ngram=2.5", "max_ngram is 2.5, expected int"),
        ("prompt-lookup:num_draft=x", r"num_draft is 'x', expected int \| None"),
        ("ngram:stochastic=3", "stochastic is 3, expected bool"),
    ],
)
def test_a_value_of_the_wrong_kind_is_said_with_the_kind_expected(spec: str, words: str) -> None:
    """From the drafter's own annotations; not what Python says when it compares them."""
    with pytest.raises(ValueError, match=words):
        make_drafter(spec)


def test_installed_packages_are_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the metadata of all packages takes milliseconds, which each request would pay."""
    drafter_names()
    monkeypatch.setattr(registry, "entry_points", pytest.fail)
    assert make_drafter("ngram") == sd.NGramDrafter()
    assert "ngram" in drafter_names()


def test_values_that_a_drafter_does_not_take_are_its_own_error() -> None:
    """Not hidden by the registry."""
    with pytest.raises(ValueError, match="max_order"):
        make_drafter("ngram:max_order=99")


class EchoSession:
    """Proposes the last token again."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.last = prompt[-1]

    def propose(self, limit: int) -> sd.Draft:
        return sd.Draft([self.last] * limit)

    def observe(self, tokens: Sequence[int]) -> None:
        self.last = tokens[-1]


class Echo:
    """The smallest drafter: two methods and a session, nothing inherited."""

    def begin(self, prompt: Sequence[int], context: sd.DraftContext) -> EchoSession:
        return EchoSession(prompt)


@in_one_test("length", [0, 1, 4, "auto", "heuristic"])
def test_any_object_with_the_protocol_drafts(length: int | str) -> None:
    """In stream_generate, as drafter= and as draft_model=."""
    model, tokenizer = tiny_text.model(), tiny_text.tokenizer()
    assert isinstance(Echo(), sd.Drafter)
    expected = [t.token for t in sd.speculate(model, [5, 17, 99], max_tokens=20)]
    for name in ("drafter", "draft_model"):
        got = sd.stream_generate(
            model, tokenizer, [5, 17, 99], 20, draft_length=length, **{name: Echo()}
        )
        responses = list(got)
        assert [r.token for r in responses] == expected
    if length == 4:
        assert responses[-1].stats.drafted > 0


def test_the_drafter_in_the_guide_works() -> None:
    """As it is written there: the text is the target's own, whatever it proposes."""
    guide = (Path(__file__).parent.parent / "docs" / "write-a-drafter.md").read_text()
    code = guide.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(code, "write-a-drafter.md", "exec", dont_inherit=True), names)
    drafter = names["RepeatDrafter"](period=2)
    model = tiny_text.model()
    expected = [t.token for t in sd.speculate(model, [5, 17, 99], max_tokens=20)]
    for length in (3, "auto"):
        got = list(sd.speculate(model, [5, 17, 99], drafter, max_tokens=20, draft_length=length))
        assert [t.token for t in got] == expected
        if length == 3:
            assert got[-1].stats.drafted > 0


MODULE = """
import specdec_mlx as sd


class Session:
    def __init__(self, token):
        self.token = token

    def propose(self, limit):
        return sd.Draft([self.token] * limit)

    def observe(self, tokens):
        pass


class Constant:
    def __init__(self, token=0):
        self.token = token

    def begin(self, prompt, context):
        return Session(self.token)
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder in which a third party's distribution is installed, as pip would leave it."""
    (tmp_path / "somebodys_drafter.py").write_text(MODULE)
    info = tmp_path / "somebodys_drafter-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys-drafter\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nconstant = somebodys_drafter:Constant\n")
    return tmp_path


def python(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    tests = Path(__file__).parent
    return subprocess.run(
        [sys.executable, *arguments],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(site), str(tests), os.environ.get("PYTHONPATH", "")]
            ),
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@FULL
def test_an_installed_third_party_drafter_has_its_name_everywhere(site: Path) -> None:
    """make_drafter with options, stream_generate, and the list of known names."""
    program = """
        import specdec_mlx as sd, tiny_text
        assert "constant" in sd.drafters.drafter_names()
        assert sd.make_drafter("constant:token=7").token == 7
        model, tokenizer = tiny_text.model(), tiny_text.tokenizer()
        def tokens(**kwargs):
            stream = sd.stream_generate(model, tokenizer, [5, 17], 12, draft_length=3, **kwargs)
            return list(stream)
        plain, got = tokens(), tokens(drafter="constant:token=7")
        assert [r.token for r in plain] == [r.token for r in got]
        assert got[-1].stats.drafted > 0
        try:
            sd.make_drafter("konstant")
        except sd.errors.UnknownNameError as error:
            print(error)
    """
    done = python(site, "-c", textwrap.dedent(program))
    assert done.returncode == 0, done.stderr
    assert "constant" in done.stdout


@FULL
def test_an_installed_third_party_drafter_is_listed_on_the_command_line(site: Path) -> None:
    """Beside the built-in ones; and gone with its distribution."""
    listed = python(site, "-m", "specdec_mlx", "drafters").stdout.splitlines()
    assert set(listed) == {*drafter_names(), "constant"}
    assert "constant" not in drafter_names()


@FULL
def test_a_third_party_drafter_that_cannot_be_imported_breaks_only_itself(site: Path) -> None:
    """The list and the other drafters work; its own name says what is wrong."""
    (site / "somebodys_drafter.py").write_text("import a_module_that_is_not_installed\n")
    assert "constant" in python(site, "-m", "specdec_mlx", "drafters").stdout
    program = "import specdec_mlx as sd; sd.make_drafter('ngram'); sd.make_drafter('constant')"
    done = python(site, "-c", program)
    assert done.returncode == 1
    assert "a_module_that_is_not_installed" in done.stderr.splitlines()[-1]


CLASHING = """
import warnings
import specdec_mlx as sd
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    kind = type(sd.make_drafter("{name}"))
    names = sd.drafters.drafter_names()
print(kind.__module__, names.count("{name}"))
print(caught[0].message)
"""


def install_another(site: Path, package: str, name: str) -> None:
    """Another third party's distribution whose drafter wants a name."""
    info = site / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = somebodys_drafter:Constant\n")


@FULL
@pytest.mark.parametrize("package", ["a-first-package", "zz-last-package"])
def test_nobody_takes_a_built_in_name(package: str, site: Path) -> None:
    """Whatever the package's name: ours stays, and a warning names both packages."""
    install_another(site, package, "ngram")
    done = python(site, "-c", CLASHING.format(name="ngram"))
    assert done.returncode == 0, done.stderr
    module, message = done.stdout.splitlines()
    assert module == "specdec_mlx.drafters.ngram 1"
    assert f"'ngram' of {package} is left out, since specdec-mlx has one" in message


@FULL
def test_two_packages_that_want_one_name_are_both_named(site: Path) -> None:
    """The first by name has it."""
    install_another(site, "another-drafter", "constant")
    done = python(site, "-c", CLASHING.format(name="constant"))
    module, message = done.stdout.splitlines()
    assert module == "somebodys_drafter 1"
    assert "of somebodys-drafter is left out, since another-drafter has one" in message
