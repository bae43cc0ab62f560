"""The documentation builds without a warning, is current, and its code runs."""

from __future__ import annotations

import ast
import html
import importlib
import inspect
import io
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import mlx_lm
import nbformat
import pytest
from markdown import markdown
from nbclient import NotebookClient
from PIL import Image

import specdec_mlx
from selection import FULL, cases, in_one_test
from specdec_mlx import lab
from specdec_mlx.draft_length.value import Fixed
from specdec_mlx.drafters.choosing.candidates import KNOWN
from specdec_mlx.lab.bench.summary import ALL
from specdec_mlx.rules import rule_names

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README, API = ROOT / "README.md", DOCS / "api.md"
PAGES = sorted([*DOCS.glob("*.md"), README, ROOT / "CONTRIBUTING.md"])
FENCE = re.compile(r"^(?P<mark>```|~~~)(?P<language>\w*)\n(?P<code>.*?)^(?P=mark)$", re.M | re.S)
NOT_RUN = re.compile(r"<!-- not run: (.+) -->\s*$")
FORMULA = re.compile(r"(?<![\\$`{(])\$(?![\s({$A-Z_])([^$`\n]+?)\$")
OUTPUT = re.compile(r"\n*<!-- output -->\n+```\n(?P<text>.*?)^```$", re.M | re.S)

sys.path.insert(0, str(DOCS))


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


class Block(NamedTuple):
    """A block of Python in a page. output: what the page says that it prints, if it does."""

    line: int
    code: str
    is_run: bool
    output: str | None


def blocks(page: Path) -> list[Block]:
    text, found = text_of(page), []
    for match in FENCE.finditer(text):
        if match["language"] == "python":
            before, output = text[: match.start()], OUTPUT.match(text, match.end())
            line, is_run = before.count("\n") + 2, not NOT_RUN.search(before)
            found.append(Block(line, match["code"], is_run, output and output["text"]))
    return found


AS_A_READER_HAS_THEM = {
    "sd": specdec_mlx,
    "lab": lab,
    "prompt": "The same text, the same text,",
    "schema": '{"type": "array", "items": {"type": "boolean"}, "maxItems": 3}',
}
"""Names that pages use without saying what they are."""

SHORT_PAGES = ("recipes.md", "lossless.md", "mlx-lm.md", "tuning.md", "write-a-drafter.md")
"""Their code, and the README's, runs always; that of the others in the full run."""

DRAFTED = ("README.md", "index.md")
"""What they show has drafts that are accepted."""

PAGES_WITH_CODE = [page for page in PAGES if blocks(page)]


@pytest.mark.parametrize(
    "page",
    cases(PAGES_WITH_CODE, *(DOCS / name for name in SHORT_PAGES), README),
    ids=lambda page: page.name,
)
def test_code_in_pages_runs(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The Python of a page runs from top to bottom, in one namespace, and prints what it says.

    Names of models give the lab pair; the check takes five seconds instead of minutes.
    """
    pair = lab.load_pair()
    messages = "{% for m in messages %}{{ m.content }}{% endfor %}"
    pair.tokenizer.chat_template, pair.tokenizer.has_chat_template = messages, True

    def load(name: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        is_small = re.search(r"0\.\dB|135M-4bit|draft|small", name)
        return (pair.draft if is_small else pair.target), pair.tokenizer

    quick = partial(lab.check, budget=5, prompts=["The text,"], progress=False)
    monkeypatch.setattr(mlx_lm, "load", load)
    monkeypatch.setattr(lab, "check", quick, raising=False)
    monkeypatch.chdir(tmp_path)
    if page.name in DRAFTED:  # whatever a pass costs on this machine
        make_draft_length = "specdec_mlx.loop.make_draft_length"
        monkeypatch.setattr(make_draft_length, lambda *given: Fixed(4))
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # dataclasses look themselves up there
    namespace = vars(module)
    own = {"model": pair.target, "tokenizer": pair.tokenizer, "small": pair.draft}
    namespace |= AS_A_READER_HAS_THEM | own
    for block in blocks(page):
        if block.is_run:
            printed = io.StringIO()
            code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
            with redirect_stdout(printed):
                exec(code, namespace)
            where = f"{page.name}, line {block.line}"
            assert block.output is None or printed.getvalue() == block.output, where
            assert page.name not in DRAFTED or namespace["text"].stats.accepted > 0
    for name, test in list(namespace.items()):
        if name.startswith("test_"):
            test()


def test_recipes_are_short() -> None:
    """Ten lines or so; the page's code runs above, with that of the others."""
    recipes = blocks(DOCS / "recipes.md")
    assert len(recipes) >= 9
    assert all(block.is_run and block.code.count("\n") <= 12 for block in recipes)


def test_what_notebooks_write_is_not_committed() -> None:
    """The folders and files of notebooks 5 and 8, where they are run in place."""
    written = ["phrases.py", "phrases-0.1.dist-info/METADATA", "prompts.jsonl", "held-out.jsonl"]
    written += ["head/model.safetensors", "medusa/training.json", "work/tokens"]
    command = ["git", "check-ignore", *(f"notebooks/{name}" for name in written)]
    ignored = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ignored.stdout.split() == command[2:]


@FULL
def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    """`mkdocs build --strict`: every link, anchor and docstring that a page names exists."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    api = text_of(tmp_path / "api" / "index.html")
    assert "Stream the same text as" in api
    assert "<math" in api
    assert "arithmatex" not in api
    assert (tmp_path / "write-a-drafter" / "index.html").exists()


@in_one_test("text", [*PAGES, *(ROOT / "src").rglob("*.py")])
def test_formulas_are_drawn_without_a_script(text: Path) -> None:
    """Each formula of a page or docstring becomes MathML, in which no command of LaTeX is left."""
    import hooks

    for formula in FORMULA.findall(FENCE.sub("", text_of(text))):
        content = rf'<p><span class="arithmatex">\({html.escape(formula)}\)</span></p>'
        drawn = hooks.on_page_content(content, None, None, None)
        assert drawn.startswith("<p><math"), formula
        assert "\\" not in drawn, formula


ROOMS = ("drafters", "errors", "kernels", "lab", "rules", "stats")
"""Rooms of the public names that `specdec_mlx` itself does not have."""
OF_ONE_MODULE = ("caches", "files", "generation", "mlx_lm_plugin", "vision")
"""Modules of which a response, a strategy or a vision model is public."""


def public_names() -> set[str]:
    """Names that the package and its rooms list, as a reader writes them."""
    modules = [specdec_mlx, *(getattr(specdec_mlx, room) for room in ROOMS)]
    return {f"{one.__name__}.{name}" for one in modules for name in getattr(one, "__all__", ())}


def unwritten(page: str) -> dict[str, set[str]]:
    """Public names that a page of the API leaves out, and names there that nobody could guess."""
    shown = set(re.findall(r"(?m)^::: (\S+)$", page))
    for path in shown:
        pkgutil.resolve_name(path)
    modules = ("", *(f"{room}." for room in (*ROOMS, *OF_ONE_MODULE)))
    guessed = re.compile(rf"specdec_mlx\.({'|'.join(modules)})\w+")
    listed = {path.rpartition(".")[0] for path in public_names()}
    hidden = {path for path in shown - public_names() if path.rpartition(".")[0] in listed}
    whole = {"specdec_mlx.errors", "specdec_mlx.lab.plots", "specdec_mlx.stats.theory"}
    return {
        "left out": public_names() - shown,
        "by a path": {path for path in shown if not guessed.fullmatch(path)},
        "not listed": hidden - whole,
    }


def test_the_api_page_has_every_public_name_and_no_other() -> None:
    """As a reader writes it: none by the path of the module that defines it."""
    page = text_of(API)
    assert unwritten(page) == {"left out": set(), "by a path": set(), "not listed": set()}
    by_path = page.replace("specdec_mlx.Options", "specdec_mlx.options.Options")
    assert {kind: names for kind, names in unwritten(by_path).items() if names} == {
        "left out": {"specdec_mlx.Options"},
        "by a path": {"specdec_mlx.options.Options"},
    }


def undocumented(page: str) -> list[str]:
    """Public names, and members that a page shows, without a docstring that somebody wrote."""
    paths = [f"specdec_mlx.{name}" for name in specdec_mlx.__all__]
    for path in list(paths):
        members = vars(value) if inspect.isclass(value := pkgutil.resolve_name(path)) else {}
        paths += [
            f"{path}.{name}"
            for name, member in members.items()
            if not name.startswith("_")
            and isinstance(member, FunctionType | classmethod | staticmethod | property)
        ]
    for path, members in re.findall(r"(?m)^::: (\S+)\n(?: +options: .*\[(.*)\].*)?", page):
        paths += [path, *(f"{path}.{name}" for name in re.findall(r"\w+", members))]
    docstrings = {path: inspect.getdoc(pkgutil.resolve_name(path)) or "" for path in paths}
    # a dataclass without a docstring gets its signature as one
    return [
        path
        for path, text in docstrings.items()
        if not text or text.startswith(f"{path.rpartition('.')[2]}(")
    ]


def test_public_names_have_docstrings() -> None:
    """All other code has a docstring only where its name and types do not say it."""
    assert undocumented(text_of(API)) == []


@in_one_test("page", PAGES_WITH_CODE)
def test_pages_import_public_names_alone(page: Path) -> None:
    """What a reader copies is on the page of the API, under the name that it is imported by."""
    shown = set(re.findall(r"(?m)^::: (\S+)$", text_of(API)))
    trees = [ast.parse(block.code) for block in blocks(page)]
    imports = [
        node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
    ]
    names = {f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    rooms, modules = {f"specdec_mlx.{room}" for room in ROOMS}, {"specdec_mlx.stats.theory"}
    ours = {name for name in names if name.startswith("specdec_mlx.")}
    guessed = {name for name in ours if name.rpartition(".")[0] not in modules}
    assert guessed <= shown | rooms | modules, page.name


def test_pages_name_what_there_is() -> None:
    """Every page is in the navigation; each name in the glossary's last column is a word of the
    sources.
    """
    navigation = text_of(ROOT / "mkdocs.yml")
    assert [p.name for p in DOCS.glob("*.md") if f": {p.name}\n" not in navigation] == []
    words = set(re.findall(r"\w+", " ".join(map(text_of, (ROOT / "src").rglob("*.py")))))
    rows = re.findall(r"(?m)^\|.*\|([^|]*)\|$", text_of(DOCS / "glossary.md"))
    code = " ".join(re.findall(r"`([^`]+)`", "".join(rows)))
    names = set(re.findall(r"[A-Za-z_]{2,}", code))
    assert len(names) > 30
    assert names <= words


OURS = re.compile(
    r"https://(?:github\.com/specdec-mlx/specdec-mlx/(?:blob|tree)"
    r"|raw\.githubusercontent\.com/specdec-mlx/specdec-mlx)/main/"
)
"""Where the package index finds files of this repository."""


def rendered(page: Path) -> str:
    """A page as HTML, without its code."""
    return re.sub(r"<code>.*?</code>", "", markdown(FENCE.sub("", text_of(page))), flags=re.S)


def links(page: Path) -> list[str]:
    """Targets of the links and figures in a page, without their anchors."""
    return [html.unescape(x) for x in re.findall(r'(?:href|src)="([^"#]+)', rendered(page))]


@in_one_test("page", PAGES)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    """Also those to files outside docs/, which the site does not check, and by their address."""
    for target in links(page):
        path = OURS.sub(f"{ROOT}/", target)
        assert "://" in path or (page.parent / path).exists(), target


def test_the_readme_is_whole_on_the_package_index() -> None:
    """There it stands alone: links and figures are addresses, most of them in this repository."""
    targets = links(README)
    assert all(target.startswith("https://") for target in targets)
    assert sum(bool(OURS.match(target)) for target in targets) > 10
    assert set(re.findall(r"(?m)^\[[^\]]+\]: ([^\s#]+)", text_of(README))) <= set(targets)
    assert "[" not in rendered(README), "a link without an address"


def test_help_is_current() -> None:
    """Word by word, since Python 3.14 breaks lines elsewhere; docs/generate_help.py mends it."""
    import generate_help

    assert text_of(generate_help.PAGE).split() == generate_help.page().split()


def test_gains_are_told_in_one_generated_table() -> None:
    """A single page has it, as docs/generate_gains.py writes it."""
    import generate_gains as generator

    with_table = {page.name for page in PAGES if generator.BEGIN in text_of(page)}
    assert with_table == {"expect.md"}
    for name in with_table:
        assert text_of(DOCS / name) == generator.written(text_of(DOCS / name)), name


def test_known_repositories_and_gains_are_those_of_the_package() -> None:
    """docs/generate_known.py writes the page, docs/generate_gains.py what the command says."""
    import generate_gains
    import generate_known

    page = text_of(generate_known.PAGE)
    assert page == generate_known.written(page)
    assert page.count("| qwen3.8 |") == 1
    assert text_of(generate_gains.IN_PACKAGE) == generate_gains.lines()


def test_models_are_found_by_the_names_that_people_use() -> None:
    """Each module that stands beside a name has its row below; each known family has a name."""
    names, rows = text_of(DOCS / "architectures.md").split("## What was tried")
    lines = [line for line in names.splitlines() if line.startswith("| ")][1:]
    modules = {name for line in lines for name in re.findall(r"`(\w+)`", line)}
    assert modules <= set(re.findall(r"^\| ([\w-]+) \|", rows, re.M))
    said = re.sub(r"[^a-z0-9.]", "", " ".join(line.split("|")[1] for line in lines).lower())
    known = (re.split("[ -]", line)[0] for line in text_of(KNOWN).splitlines())
    families = {re.sub(r"[\d.]+$", "", name) for name in known} - {"vicuna", "zephyr"}
    assert {name for name in families if name not in said} == set()


MEASURED = (
    "policies.md",
    "specbench.md",
    "benchmarks.md",
    "measurements.md",
    "lossless.md",
    "training.md",
    "heads.md",
    "cookbook.md",
)
"""Pages of tables with their commands, which say what was measured and where."""

GENERATED = ("commands.md", "architectures.md", "mutations.md")
OF_NO_GAIN = re.compile(
    r"(?ms)^(```|~~~).*?^\1"  # code and what it prints
    r"|^<!-- (gains|measured|known).*?<!-- end of \2 -->"  # generated
    r"|\d+\.\d+\.\d+|[A-Za-z\]] \d+\.\d+|version \d\.\d+|-\d\.\d+"  # versions and names
)


@in_one_test("page", [page for page in PAGES if page.name not in MEASURED + GENERATED])
def test_no_other_page_states_a_gain_of_its_own(page: Path) -> None:
    """Numbers such as 1.5 and 1.5 to 2.1 stand where they are generated or measured, once."""
    assert re.findall(r"(?<![\d.])1\.\d+(?![\d.]*\d)", OF_NO_GAIN.sub("", text_of(page))) == []


def test_the_table_of_distances_is_current_and_tells_right_from_wrong() -> None:
    """docs/lossless.md says what the enumeration says: zero for the lossless rules alone."""
    import generate_lossless as generator

    page = text_of(generator.PAGE)
    assert generator.section(page, "enumerated") == generator.enumerated()
    assert len(generator.section(page, "draft-temp").splitlines()) == 2 + len(generator.DRAFT_TEMPS)
    for line in generator.section(page, "enumerated").splitlines()[2:]:
        name, distance = [cell.strip() for cell in line.strip("|").split("|")][:2]
        is_exact = not name.startswith(("lossy: ", "wrong: "))
        assert (distance == "< 1e-12") == is_exact, name
        # a wrong rule shows after every number of rounds
        shortest = min(generator.distances(*generator.ways()[name]))
        assert (shortest < generator.ZERO) == is_exact, name
    assert all(f"`{name}`" in page or f'`"{name}"`' in page for name in rule_names())


def test_what_is_mutated_is_there() -> None:
    """The modules, the tests that are to find it or are left out, and the mutants named."""
    import mutations

    page = text_of(DOCS / "mutations.md")
    assert re.findall(r"^\| `(.+)\.py`", page, re.M) == list(mutations.TESTS)
    made = {mutant.name for module in mutations.TESTS for mutant in mutations.mutants(module)}
    assert set(mutations.EQUIVALENT) - made == set()
    for module in mutations.TESTS:
        importlib.import_module(mutations.imported_as(module))
    tests = {name for files in mutations.TESTS.values() for name in files}
    sources = {name: text_of(ROOT / "tests" / name) for name in tests}
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


# Notebooks run from top to bottom, and are committed as they ran ----------------------------------

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))
MOST_CELLS = 17
DEFINES = {"05_write_a_drafter.ipynb"}  # A drafter of the reader's own is the point of it


def read(name: str) -> tuple[Any, list[Any]]:
    """A notebook, and its cells of code."""
    notebook = nbformat.read(FOLDER / name, as_version=4)
    return notebook, [cell for cell in notebook.cells if cell.cell_type == "code"]


def fails_as_it_is_meant_to(cell: Any) -> bool:
    """True if it raised and says that it does, or neither."""
    has_failed = any(output.output_type == "error" for output in cell.outputs)
    return has_failed == ("raises-exception" in cell.metadata.get("tags", []))


def shown_by(cell: Any) -> str:
    """All that a cell printed, displayed or raised."""
    return "".join(
        output.get("text", "")
        + "".join(output.get("traceback", []))
        + "".join(str(value) for value in output.get("data", {}).values())
        for output in cell.outputs
    )


SHORTER = """
from functools import partial

from specdec_mlx.lab.bench import run

run.Settings = partial(run.Settings, 32)
"""
"""Before a notebook's cells: benchmarks of fewer tokens than a reader's."""


@FULL
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_cell_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the lab pair; cells tagged raises-exception raise, no other does, and texts are equal."""
    folder = shutil.copytree(lab.target_path(), tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.setenv("SPECDEC_MLX_NOTEBOOK_MODEL", str(folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("SPECDEC_MLX_NOTEBOOK_STEPS", "4")
    monkeypatch.setenv("SPECDEC_MLX_CACHE", str(tmp_path / "cache"))
    notebook, cells = read(name)
    for cell in cells:
        cell.outputs, cell.execution_count = [], None
        cell.source = cell.source.replace("MAX_TOKENS = 128", "MAX_TOKENS = 32")
    cells[0].source = f"{SHORTER}\n{cells[0].source}"
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources=resources).execute()
    for cell in cells:
        assert fails_as_it_is_meant_to(cell), cell.source
        assert "DIFFERENT" not in shown_by(cell)
        assert "ANOTHER TEXT" not in shown_by(cell)
    unpacked = tmp_path / "cache" / "lab"  # the pair that ships, in float32
    fetched = set((tmp_path / "cache").rglob("*.safetensors")) - set(unpacked.rglob("*"))
    assert not fetched, "the notebook does not use the model it is given"


@in_one_test("name", NOTEBOOKS)
def test_outputs_are_committed_from_one_run_and_clean(name):
    """Executed once, in order; no warnings, no paths of somebody's machine, no other text.

    Functions and classes belong in the package, but for a drafter of one's own.
    """
    notebook, cells = read(name)
    nbformat.validate(notebook)
    assert (FOLDER / name).stat().st_size < 1_000_000
    assert len(notebook.cells) <= MOST_CELLS
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(shown_by(cell).strip() for cell in cells if "print(" in cell.source)
    assert sum(bool(cell.outputs) for cell in cells) >= len(cells) / 2
    raises = any("raises-exception" in cell.metadata.get("tags", []) for cell in cells)
    assert raises == (name in DEFINES), "an error is shown where one writes code of one's own"
    assert any("import specdec_mlx" in cell.source for cell in cells)
    for cell in cells:
        assert fails_as_it_is_meant_to(cell), cell.source
        assert not [o for o in cell.outputs if o.get("name") == "stderr"], shown_by(cell)
        for unwanted in ("/home/", "/Users/", "/root/", "/tmp/", "site-packages", "DIFFERENT"):
            assert unwanted not in shown_by(cell)
    for cell in cells if name not in DEFINES else []:
        lines = [line for line in cell.source.splitlines() if not line.startswith("%")]
        for node in ast.walk(ast.parse("\n".join(lines))):
            assert not isinstance(node, ast.FunctionDef | ast.ClassDef), ast.unparse(node)
