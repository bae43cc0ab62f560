"""The house: who imports whom, how large things may be, and the map of it."""

from __future__ import annotations

import ast
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import grimp
import pytest
from importlinter.cli import lint_imports

import specdec_mlx
from selection import in_one_test

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "specdec_mlx"
MODULES = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}

sys.path.insert(0, str(ROOT / "docs"))

import generate_map  # noqa: E402

LONGEST_MODULE, LONGEST_FUNCTION = 5_600, 640
"""At most so many tokens of code: breaking a line makes nothing longer."""

MOST_AT_THE_TOP = 22

MLX_LM_TYPES = {"GenerationResponse", "GenerationContext", "Response", "GenerationBatch"}
KNOW_MLX_LM_TYPES = ("generation.py", "mlx_lm_plugin", "cli")

TOTALS = {
    "files": 219,
    "numeric constants": 198,
    "protocols": 6,
    "public names": 20,
}
"""At most so much of each. These only go down, or the commit says what paid for it; the calls a
token takes are in test_host_time."""

WINGS = "lab", "server"

CORE = tuple(
    f"{name}.py"
    for name in (
        *("__init__", "generation", "options", "loop", "sequence"),
        *("contracts", "target", "caches", "rules", "sampling"),
    )
)
"""What one call passes through: who has read it understands the whole."""

TOKENS = {
    "core": 23_700,
    "library": 145_500,
    "lab": 75_640,
    "server": 44_960,
}
"""At most so many tokens of code in the core, in the library with its core, and in each wing.
Tokens, since lines can be saved by writing densely and tokens only by saying less."""

NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}

NO_MODEL_AND_NO_CACHE = ("rules", "sampling", "stats")


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def imported(name: str) -> Iterator[str]:
    """Dotted names that a module imports, wherever in it the import stands."""
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.fixture(autouse=True)
def loggers_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """import-linter's command would switch off all loggers that there are."""
    monkeypatch.setattr("logging.config.dictConfig", lambda config: None)


def test_imports_keep_to_the_layers_and_run_in_no_circle(monkeypatch, capsys):
    """Every contract of import-linter in pyproject.toml is kept."""
    monkeypatch.chdir(ROOT)
    assert lint_imports(no_cache=True, no_logo=True) == 0, capsys.readouterr().out


WRONG_IMPORTS = [
    ("layers", "caches", "draft_length.costs"),
    ("layers", "draft_length.value", "target"),
    ("layers", "exactness.probe", "drafters.model"),
    ("layers", "drafters.ngram", "loop"),
    ("layers", "drafters.model", "lab.pair"),
    ("layers", "cli.commands", "server.command"),
    ("layers", "mlx_lm_plugin.flags", "lab.training.learner"),
    ("layers", "server.engine", "lab.bench.run"),
    ("layers", "lab.bench.run", "server.engine"),
    ("circles", "errors", "arguments"),
    ("circles", "drafters.drawing", "drafters.model"),
    ("pure", "rules", "mlx_lm"),
    ("pure", "stats.theory", "mlx_lm.models.cache"),
    ("loop", "loop", "rules"),
    ("loop", "draft_length.drafting", "drafters.model"),
    ("loop", "caches", "rules"),
    ("loop", "draft_length.value", "drafters.model"),
    ("proof", "lab.proof.texts", "lab.bench.timing"),
    ("views", "views.html", "loop"),
    ("views", "stats.account", "caches"),
]


@pytest.mark.parametrize(("contract", "importer", "imported"), WRONG_IMPORTS)
def test_an_import_that_should_not_be_breaks_its_contract(
    contract: str, importer: str, imported: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more import in the graph; that of the loop through another room too."""
    build = grimp.build_graph

    def broken(*args: Any, **options: Any) -> grimp.ImportGraph:
        graph = build(*args, **options)
        library = imported.startswith("mlx_lm")
        name = imported.partition(".")[0] if library else f"specdec_mlx.{imported}"
        graph.add_import(importer=f"specdec_mlx.{importer}", imported=name)
        return graph

    monkeypatch.setattr(grimp, "build_graph", broken)
    monkeypatch.chdir(ROOT)
    assert lint_imports(no_cache=True, no_logo=True, limit_to_contracts=(contract,)) == 1


@pytest.mark.parametrize(
    "name", [name for name in MODULES if name.startswith(NO_MODEL_AND_NO_CACHE)]
)
def test_arithmetic_imports_no_model_and_no_cache(name: str) -> None:
    """Of other libraries too: neither layers nor what mlx-lm loads and caches."""
    forbidden = ("mlx.nn", "mlx_lm.models", "mlx_lm.utils", "mlx_lm.load", "mlx_lm.generate")
    assert not [found for found in imported(name) if found.startswith(forbidden)]


def test_few_know_mlx_lms_types_of_a_generation() -> None:
    """What mlx-lm's calls, commands and server hand over stays with those who stand in for them."""
    knowing = {
        name
        for name in MODULES
        for found in imported(name)
        if found.startswith("mlx_lm.") and found.rpartition(".")[2] in MLX_LM_TYPES
    }
    assert "generation.py" in knowing
    assert not [name for name in knowing if not name.startswith(KNOW_MLX_LM_TYPES)]


@in_one_test("name", MODULES)
def test_no_module_and_no_function_is_too_long(name: str) -> None:
    """A long function is a sign that two things share one name; so is a long module."""
    code = code_of(name)
    assert len(code) <= LONGEST_MODULE
    functions = [n for n in ast.walk(tree(name)) if isinstance(n, ast.FunctionDef)]
    sizes = {
        f.name: sum(f.lineno <= token.start[0] <= f.end_lineno for token in code) for f in functions
    }
    assert not {name: size for name, size in sizes.items() if size > LONGEST_FUNCTION}


def totals() -> dict[str, int]:
    """What the package is made of."""
    nodes = [node for name in MODULES for node in tree(name).body]
    numbers = [
        node
        for node in nodes
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and type(node.value.value) in (int, float)
    ]
    protocols = [
        node
        for node in nodes
        if isinstance(node, ast.ClassDef)
        and any("Protocol" in ast.unparse(base) for base in node.bases)
    ]
    return {
        "files": len(MODULES),
        "numeric constants": len(numbers),
        "protocols": len(protocols),
        "public names": len(specdec_mlx.__all__),
    }


def test_the_package_grows_no_larger() -> None:
    """A reader has to hold all of it in the head."""
    found = totals()
    assert not {name: number for name, number in found.items() if number > TOTALS[name]}, found


def test_no_name_is_given_to_two_classes() -> None:
    """A reader who looks for one finds one; and few are called rows of something."""
    names = [
        node.name
        for name in MODULES
        for node in ast.walk(tree(name))
        if isinstance(node, ast.ClassDef)
    ]
    assert not [name for name, uses in Counter(names).items() if uses > 1]
    assert sum("Row" in name for name in names) <= 8


@cache
def code_of(name: str) -> list[tokenize.TokenInfo]:
    """A module's tokens without comments, docstrings and white space."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        node.body[0].lineno
        for node in ast.walk(tree(name))
        if isinstance(node, documented) and ast.get_docstring(node) is not None
    }
    code, depth = [], 0
    with tokenize.open(MODULES[name]) as source:
        for token in tokenize.generate_tokens(source.readline):
            kind = tokenize.tok_name[token.type]
            is_docstring = kind == "STRING" and token.start[0] in docstrings
            if depth == 0 and token.type not in NO_CODE and not is_docstring:
                code.append(token)
            # from Python 3.12 on the parts of a formatted string are tokens: it counts as one
            depth += (kind == "FSTRING_START") - (kind == "FSTRING_END")
    return code


def test_neither_the_library_nor_a_wing_grows_too_heavy() -> None:
    """In tokens of code; the core is a part of the library, and all that it names is there."""
    code = {name: len(code_of(name)) for name in MODULES}
    assert not [part for part in CORE if not any(name.startswith(part) for name in code)]
    found = dict.fromkeys(TOKENS, 0)
    for name, tokens in code.items():
        found["core"] += tokens if name.startswith(CORE) else 0
        found[room if (room := name.partition("/")[0]) in WINGS else "library"] += tokens
    assert not {part: n for part, n in found.items() if not 0 < n <= TOKENS[part]}, found


def test_what_is_no_code_weighs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments, docstrings, blank lines and line breaks; a string that is used does weigh."""
    dense, airy = tmp_path / "dense.py", tmp_path / "airy.py"
    dense.write_text("def f(x):\n    return [x, 'used', f'{x + 1} or {f\"{x}\"}']\n")
    airy.write_text(
        '"""A module."""\n\ndef f(x):\n    """Double it."""\n'
        "    # why\n    return [\n        x, 'used', f'{x} at all'\n    ]\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "MODULES", {"dense": dense, "airy": airy})
    for name in ("dense", "airy"):
        *words, formatted, bracket = (token.string for token in code_of(name))
        assert " ".join(words) == "def f ( x ) : return [ x , 'used' ,"
        assert (formatted[:1], bracket) == ("f", "]")


def test_the_top_level_is_seen_at_a_glance() -> None:
    """Modules beside the rooms are few."""
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_AT_THE_TOP


def test_the_map_is_current() -> None:
    """CONTRIBUTING.md has what the docstrings and the layers say: python docs/generate_map.py."""
    assert generate_map.current() == generate_map.section()
    mapped = {name for layer in generate_map.layers() for name in layer}
    top = {
        path.stem
        for path in PACKAGE.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert top - {"__init__"} <= mapped
