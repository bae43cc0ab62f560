"""The documentation builds without a warning, is current, and its code runs."""

from __future__ import annotations

import html
import importlib
import io
import os
import pkgutil
import re
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from html import unescape
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx_lm
import pytest
from markdown import markdown
from PIL import Image

import specdec_mlx
from selection import FULL, cases, in_one_test
from specdec_mlx import lab
from specdec_mlx.bench.summary import ALL
from specdec_mlx.draft_length.policy import Fixed

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
FENCE = re.compile(r"^(?P<mark>```|~~~)(?P<language>\w*)\n(?P<code>.*?)^(?P=mark)$", re.M | re.S)
NOT_RUN = re.compile(r"<!-- not run: (.+) -->\s*$")
WORD = re.compile(r"[A-Za-z_]{2,}")
FORMULA = re.compile(r"(?<![\\$`{(])\$(?![\s({$A-Z_])([^$`\n]+?)\$")
OUTPUT = re.compile(r"\n*<!-- output -->\n+```\n(?P<text>.*?)^```$", re.M | re.S)

sys.path.insert(0, str(DOCS))


@dataclass(frozen=True)
class Block:
    """A block of Python in a page. output: what the page says that it prints, if it does."""

    line: int
    code: str
    not_run: str | None
    output: str | None


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        if match["language"] == "python":
            reason = NOT_RUN.search(text[: match.start()])
            output = OUTPUT.match(text, match.end())
            line = text.count("\n", 0, match.start()) + 2
            said = output["text"] if output else None
            found.append(Block(line, match["code"], reason[1] if reason else None, said))
    return found


AS_A_READER_HAS_THEM = {
    "sd": specdec_mlx,
    "prompt": "The same text, the same text,",
    "schema": '{"type": "array", "items": {"type": "boolean"}, "maxItems": 3}',
}
"""Names that pages use without saying what they are."""

SHORT_PAGES = ("lossless.md", "mlx-lm.md", "tuning.md", "write-a-drafter.md")
"""Their code, and the README's, runs always; that of the others in the full run."""

DRAFTED = ("README.md", "index.md")
"""What they show has drafts that are accepted."""

PAGES_WITH_CODE = [page for page in PAGES if blocks(page)]


@pytest.fixture
def lab_pair_for_every_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Names of models give the lab pair; the check takes five seconds instead of minutes."""
    pair = lab.load_pair()
    messages = "{% for m in messages %}{{ m.content }}{% endfor %}"
    pair.tokenizer.chat_template, pair.tokenizer.has_chat_template = messages, True

    def load(name: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        is_small = re.search(r"0\.\dB|135M-4bit|draft|small", name)
        return (pair.draft if is_small else pair.target), pair.tokenizer

    quick = partial(specdec_mlx.check, budget=5, prompts=["The text,"], progress=False)
    monkeypatch.setattr(mlx_lm, "load", load)
    monkeypatch.setattr(specdec_mlx, "check", quick)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("lab_pair_for_every_name")
@pytest.mark.parametrize(
    "page",
    cases(PAGES_WITH_CODE, *(DOCS / name for name in SHORT_PAGES), ROOT / "README.md"),
    ids=lambda page: page.name,
)
def test_code_in_pages_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python of a page runs from top to bottom, in one namespace, and prints what it says."""
    if page.name in DRAFTED:  # whatever a pass costs on this machine
        monkeypatch.setattr("specdec_mlx.loop.make_draft_length", lambda *given: Fixed(4))
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # dataclasses look themselves up there
    namespace = vars(module)
    model, tokenizer = mlx_lm.load("target")
    namespace |= AS_A_READER_HAS_THEM | {"model": model, "tokenizer": tokenizer}
    namespace["small"] = mlx_lm.load("small")[0]
    for block in blocks(page):
        if block.not_run:
            continue
        printed = io.StringIO()
        code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
        with redirect_stdout(printed):
            exec(code, namespace)
        if page.name in DRAFTED and "text" in namespace:
            assert namespace["text"].stats.accepted > 0
        if block.output is not None:
            assert printed.getvalue() == block.output, f"{page.name}, line {block.line}"
    for name, test in list(namespace.items()):
        if name.startswith("test_"):
            test()


def test_pages_with_code_and_formulas_are_found() -> None:
    """The patterns find blocks, reasons, outputs and formulas; and most code is run."""
    names = {page.name for page in PAGES_WITH_CODE}
    assert {"README.md", "index.md", "tuning.md", "write-a-drafter.md"} <= names
    everything = [block for page in PAGES_WITH_CODE for block in blocks(page)]
    assert any(block.output for block in everything)
    assert sum(bool(block.not_run) for block in everything) <= 0.2 * len(everything)
    assert len(FORMULA.findall((DOCS / "lossless.md").read_text(encoding="utf-8"))) > 20


@FULL
def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    """`mkdocs build --strict`: every link, anchor and docstring that a page names exists."""
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    api = (tmp_path / "api" / "index.html").read_text(encoding="utf-8")
    assert "Stream the same text as" in api
    assert "<math" in api
    assert "arithmatex" not in api
    assert (tmp_path / "write-a-drafter" / "index.html").exists()


@in_one_test("text", [*PAGES, *(ROOT / "src").rglob("*.py")])
def test_formulas_are_drawn_without_a_script(text: Path) -> None:
    """Each formula of a page or docstring becomes MathML, in which no command of LaTeX is left."""
    import hooks

    for formula in FORMULA.findall(FENCE.sub("", text.read_text(encoding="utf-8"))):
        content = rf'<p><span class="arithmatex">\({html.escape(formula)}\)</span></p>'
        drawn = hooks.on_page_content(content, None, None, None)
        assert drawn.startswith("<p><math"), formula
        assert "\\" not in drawn, formula


def test_the_api_page_has_every_public_name() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    shown = [pkgutil.resolve_name(path) for path in re.findall(r"^::: (\S+)$", page, re.M)]
    for name in specdec_mlx.__all__:
        assert any(getattr(specdec_mlx, name) is thing for thing in shown), name


def test_the_glossary_names_what_the_code_has() -> None:
    """Each name in the last column is a word of the sources."""
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    words = set(re.findall(r"\w+", sources))
    rows = re.findall(r"^\|.*\|([^|]*)\|$", (DOCS / "glossary.md").read_text("utf-8"), re.M)
    names = set(WORD.findall(" ".join(re.findall(r"`([^`]+)`", "".join(rows)))))
    assert len(names) > 30
    assert names <= words


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in DOCS.glob("*.md"):
        assert f": {page.name}\n" in navigation, page.name


OURS = re.compile(
    r"https://(?:github\.com/specdec-mlx/specdec-mlx/(?:blob|tree)"
    r"|raw\.githubusercontent\.com/specdec-mlx/specdec-mlx)/main/"
)
"""Where the package index finds files of this repository."""


def rendered(page: Path) -> str:
    """A page as HTML, without its code."""
    html = markdown(FENCE.sub("", page.read_text(encoding="utf-8")))
    return re.sub(r"<code>.*?</code>", "", html, flags=re.S)


def links(page: Path) -> list[str]:
    """Targets of the links and figures in a page, without their anchors."""
    targets = re.findall(r'(?:href|src)="([^"#]+)', rendered(page))
    return [unescape(target) for target in targets]


@in_one_test("page", PAGES)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    """Also those to files outside docs/, which the site does not check, and by their address."""
    for target in links(page):
        if ours := OURS.match(target):
            assert (ROOT / target[ours.end() :]).exists(), target
        elif "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_readme_is_whole_on_the_package_index() -> None:
    """There it stands alone: links and figures are addresses, most of them in this repository."""
    page = ROOT / "README.md"
    targets = links(page)
    assert [target for target in targets if not target.startswith("https://")] == []
    assert sum(bool(OURS.match(target)) for target in targets) > 10
    defined = re.findall(r"^\[[^\]]+\]: ([^\s#]+)", page.read_text(encoding="utf-8"), re.M)
    assert set(defined) <= set(targets)
    assert "[" not in rendered(page), "a link without an address"


def test_help_is_current() -> None:
    """Word by word, since Python 3.14 breaks lines elsewhere; docs/generate_help.py mends it."""
    import generate_help

    assert generate_help.PAGE.read_text(encoding="utf-8").split() == generate_help.page().split()


def test_what_is_mutated_is_there() -> None:
    """The modules, the tests that are to find it or are left out, and the mutants named."""
    import mutations

    page = (DOCS / "mutations.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(.+)\.py`", page, re.M) == list(mutations.TESTS)
    made = {mutant.name for module in mutations.TESTS for mutant in mutations.mutants(module)}
    assert set(mutations.EQUIVALENT) - made == set()
    for module in mutations.TESTS:
        importlib.import_module(mutations.imported_as(module))
    tests = {name for files in mutations.TESTS.values() for name in files}
    sources = {name: (ROOT / "tests" / name).read_text(encoding="utf-8") for name in tests}
    for name, left_out in mutations.SLOW.items():
        assert [test for test in left_out if f"def {test}(" not in sources[name]] == []


def test_figures_are_those_of_the_committed_benchmark() -> None:
    """What `make figures` draws is what docs/data says, without the texts; and it is there."""
    import figures

    data = figures.read()
    assert all(set(record) == set(figures.KEPT) for record in data.values())
    drawn = figures.figures(data)
    assert {f"{name}.png" for name in drawn} == {path.name for path in figures.FIGURES.iterdir()}
    for path in figures.FIGURES.iterdir():
        with Image.open(path) as image:
            assert image.info["Source"] == figures.digest(), f"make figures: {path.name} is old"
    by_text, pair = drawn["speed_by_text"].axes
    everything = {name: figures.results(data, name) for name in data}
    totals = [r for name in ("greedy", "sampled") for r in everything[name] if r.category == ALL]
    for ax, results in ((by_text, everything["benchmark"]), (pair, totals)):
        shown = [x for container in ax.containers for x in container[0].get_xdata()]
        assert sorted(shown) == sorted(r.ratio for r in results if r.drafter != "mlx-lm")
