"""Does a test fail for each small error in rules, sampling, rollback and loop? Writes mutations.md.

    python docs/mutations.py [--module rules] [--part 1/4] [--results results.json]

Every operator, comparison, number, truth value, condition and choice of function in a module is
changed, one at a time, each `where` takes one side for all, and the module's tests run until the
first failure. Results are kept in a file, so that the run can be made in parts; the page says how
many are there. Begin a new file when a module or its tests have changed.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import FunctionType
from typing import NamedTuple

from tqdm import tqdm

ROOT = Path(__file__).parent.parent
TESTS = {
    "rules": ["rules/test_acceptance.py", "rules/test_trees.py"],
    "lab/papers/lossy": ["rules/test_acceptance.py", "rules/test_trees.py"],
    "sampling": ["sampling/test_sampling.py"],
    "caches": [
        "caches/test_cache.py",
        "lab/proof/test_check_strategy.py",
        "exactness/test_taps.py",
    ],
    "loop": [
        *("loop/test_loop.py", "loop/test_rounds.py", "test_generation.py"),
        *(
            "test_contracts.py",
            "caches/test_cache.py",
            "exactness/test_taps.py",
            "draft_length/test_tuning.py",
        ),
    ],
}
"""The modules that are changed, and the files whose tests are to find it."""
ONLY: dict[str, str] = {}
"""Of tests that are parametrised over all rules: those whose name has this word."""
SLOW = {
    "rules/test_acceptance.py": (
        "test_one_token_is_accepted_as_the_formulas_say",
        "test_rules_accept_in_their_order",
        "test_auto_takes_a_lossless_rule",
    ),
    "rules/test_trees.py": ("test_every_small_tree_leaves_the_distribution_alone",),
}
"""Tests that run a model, or enumerate much; left out, for time."""
LEFT_OUT = shutil.ignore_patterns("*.safetensors", "__pycache__")
OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
FUNCTIONS = {
    "maximum": "minimum",
    "minimum": "maximum",
    "argmax": "argmin",
    "cumprod": "cumsum",
    "max": "min",
    "min": "max",
    "sum": "max",
    "ones_like": "zeros_like",
    "zeros_like": "ones_like",
    "zeros": "ones",
    "exp": "expm1",
    "log": "log1p",
}
TWO_AXES = "The array has two axes, so that the last is the second."
GREEDY = "With a greedy target the formulas come down to exact match as well; it is quicker."
FROZEN = "Nobody assigns to it."
SHOWN = "What `repr` shows."
ONES = "Times one is divided by one."
EQUIVALENT: dict[str, str] = {
    "rules.point_mass: `-1` → `+1`": TWO_AXES,
    "lab/papers/lossy.log_where_positive: `1` → `2`": "What it yields for p = 0 is multiplied "
    "by p.",
    "rules.at: `-1` → `+1`": TWO_AXES,
    "rules.with_zero_row: `-1` → `+1`": TWO_AXES,
    "rules.Block.accept_probs: `-1` → `+1`": TWO_AXES,
    "rules.Block: `True` → `False`": GREEDY,
    "rules.Rejection: `True` → `False`": GREEDY,
    "rules.Block.accept_probs: `xp.where(xp.isnan(mass), weights, 1)` → `weights`": "Where the row "
    "is a distribution, 0/0 has the weight 1.",
    "rules.Block: `True` → `False` (again)": FROZEN,
    "rules.AutoRule: `True` → `False`": FROZEN,
    "rules.CoinRule: `False` → `True`": "Every rule of ours says it for itself.",
    "rules.running_weights: `xp.ones_like` → `xp.zeros_like`": "It keeps the place of p_0; "
    "no run of tokens contains it.",
    "rules.running_weights: `0` → `1` (again) (again)": "Where a product overflowed before a "
    "0, the run that begins with the 0 has the product 0, which is the smallest.",
    "lab/papers/lossy.Typical: `True` → `False`": GREEDY,
    "lab/papers/lossy.Typical: `True` → `False` (again)": FROZEN,
    "caches.Rollback._return_to_checkpoint: `True` → `False`": "A checkpoint holds a state for "
    "each cache.",
    "loop.module: `256` → `257`": "How often MLX's buffers are freed changes no text.",
    "loop.Generation.verify: `0` → `1`": "Nothing is launched ahead of a round with a draft, "
    "pipelined or not.",
    "loop.Generation.roll_back: `len(outcome.tokens) - 1` → `len(outcome.tokens) + 1`": "More is "
    "kept than emitted only where a text ends, and then the caches are brought to its end.",
    "sampling.Sampling: `True` → `False`": FROZEN,
    "loop.Token: `False` → `True`": SHOWN,
    "loop.Token: `False` → `True` (again)": SHOWN,
    "loop.Token: `True` → `False`": "A class without slots does the same.",
    "lab/papers/lossy.Lenient.nearly_matches: `-1` → `+1` (again)": TWO_AXES,
    "lab/papers/lossy.Typical._is_typical: `(p > self.threshold(target_probs)) * "
    "namespace_of(p).ones_like(p)` → `(p > self.threshold(target_probs)) / "
    "namespace_of(p).ones_like(p)`": ONES,
    "sampling.Sampling._unnormalized: `0 < self.top_p < 1` → "
    "`0 < self.top_p <= 1`": "mlx-lm's filter keeps every token with mass at top_p = 1.",
    "sampling.Sampling._unnormalized: `1` → `2`": "As above: it only lets top_p = 1 through.",
}
"""Mutants that no test can tell from the original, and why; by their name in the page."""


class Mutant(NamedTuple):
    """A module's source with one change, what that is, and where."""

    name: str
    source: str
    is_inside_a_function: bool = True


def file_of(module: str, src: Path = ROOT / "src") -> Path:
    """Where a module's source stands."""
    return src / "specdec_mlx" / f"{module}.py"


def imported_as(module: str) -> str:
    """The name that a module is imported by."""
    return f"specdec_mlx.{module}".replace("/", ".")


def mutants(module: str) -> list[Mutant]:
    """All mutants of a module, in the order of its lines."""
    source = file_of(module).read_text(encoding="utf-8")
    tree = ast.parse(source)
    found, names = [], set()
    for path, node in list(located(tree)):
        for changed in list(changes(node)):
            before, after = (ast.unparse(n).replace("\n", " ") for n in (node, changed))
            name = f"{module}.{path}: `{before[:70]}` → `{after[:70]}`"
            while name in names:
                name += " (again)"
            names.add(name)
            inside = path.split(".")[-1].strip("_")[:1].islower() and path != "module"
            found.append(Mutant(name, _with(tree, node, changed), inside))
    return found


def _with(tree: ast.Module, node: ast.AST, changed: ast.AST) -> str:
    """The source of a tree with one node changed; the tree itself stays as it is."""
    before = node.__class__, dict(node.__dict__)
    node.__class__ = changed.__class__
    node.__dict__.update(changed.__dict__)
    source = ast.unparse(tree)
    node.__class__, node.__dict__ = before
    return source


def located(tree: ast.AST, path: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Nodes that may be changed, each with the name of the function it is in.

    Annotations, docstrings, error messages and what raises them are passed over.
    """
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "bases"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, ast.Raise | ast.JoinedStr):
                continue
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                continue
            inner = path
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                inner = f"{path}.{node.name}" if path else node.name
            yield inner or "module", node
            yield from located(node, inner)


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """The node with one small error."""
    match node:
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            yield ast.BinOp(node.left, OPERATORS[type(op)](), node.right)
        case ast.BoolOp(op=op):
            yield ast.BoolOp(OPERATORS[type(op)](), node.values)
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                other = [*ops[:i], OPERATORS[type(op)](), *ops[i + 1 :]]
                yield ast.Compare(node.left, other, node.comparators)
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert()):
            yield (
                ast.UnaryOp(ast.UAdd(), node.operand)
                if isinstance(node.op, ast.USub)
                else node.operand
            )
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield ast.Constant(value + 1)
        case ast.Attribute(attr=attr) if attr in FUNCTIONS:
            yield ast.Attribute(node.value, FUNCTIONS[attr], node.ctx)
        case ast.Call(func=ast.Attribute(attr="where"), args=[_, then, otherwise]):
            yield then
            yield otherwise
        case ast.IfExp():
            yield ast.IfExp(node.test, node.orelse, node.body)
        case ast.If():
            negated = ast.UnaryOp(ast.Not(), node.test)
            yield ast.If(negated, node.body, node.orelse)


class Patched:
    """A module whose functions run the code of a mutant, until it is left."""

    def __init__(self, module: str, source: str) -> None:
        """Compile; what cannot be imported raises here."""
        self.module = sys.modules[imported_as(module)]
        self.code: dict[str, FunctionType] = {}
        namespace = {"__name__": self.module.__name__}
        exec(compile(source, self.module.__file__, "exec"), namespace)
        self.mutated = functions(namespace, self.module.__name__)
        self.original = functions(vars(self.module), self.module.__name__)

    def __enter__(self) -> None:
        """Put the mutant's code in."""
        self.saved = {name: _body(f) for name, f in self.original.items()}
        for name, function in self.original.items():
            _set_body(function, _body(self.mutated[name]))

    def __exit__(self, *error: object) -> None:
        """Put the original's back."""
        for name, function in self.original.items():
            _set_body(function, self.saved[name])


def functions(namespace: dict[str, object], module: str, path: str = "") -> dict[str, FunctionType]:
    """Functions and methods that a module defines, by qualified name."""
    found: dict[str, FunctionType] = {}
    for name, value in list(namespace.items()):
        inner = getattr(value, "fget", getattr(value, "__func__", value))
        if getattr(value, "__module__", module) != module and not isinstance(value, property):
            continue
        if isinstance(inner, FunctionType) and inner.__code__.co_filename.endswith(".py"):
            found[path + name] = inner
        elif isinstance(value, type):
            found |= functions(dict(vars(value)), module, f"{path}{name}.")
    return found


def _body(function: FunctionType) -> tuple:
    return function.__code__, function.__defaults__, function.__kwdefaults__


def _set_body(function: FunctionType, body: tuple) -> None:
    function.__code__, function.__defaults__, function.__kwdefaults__ = body


def is_found(mutant: Mutant, module: str) -> bool:
    """Whether a test fails for it: in this process if only functions differ, else in a new one."""
    if mutant.is_inside_a_function:
        try:
            patched = Patched(module, mutant.source)
        except Exception:
            return True
        with patched:
            return run_tests(module) != 0
    with tempfile.TemporaryDirectory() as folder:
        src = Path(folder) / "src"
        shutil.copytree(ROOT / "src", src, ignore=LEFT_OUT)
        file_of(module, src).write_text(mutant.source, encoding="utf-8")
        environment = os.environ | {"PYTHONPATH": str(src), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", *arguments_for(module)]
        return subprocess.run(command, env=environment, capture_output=True).returncode != 0


def run_tests(module: str) -> int:
    """Exit status of the module's tests, here, in silence.

    They are imported anew each time: what they have cached may come from another mutant.
    """
    import pytest

    for name, loaded in list(sys.modules.items()):
        if str(getattr(loaded, "__file__", None)).startswith(str(ROOT / "tests")):
            del sys.modules[name]
    with (
        open(os.devnull, "w", encoding="utf-8") as silence,
        redirect_stdout(silence),
        redirect_stderr(silence),
    ):
        return int(pytest.main(arguments_for(module), plugins=[ORDER]))


class LikeliestFirst:
    """Plugin for pytest: tests that have found most go first, and a failure is not made small."""

    def __init__(self) -> None:
        """Nothing has found anything yet."""
        self.finds: Counter[str] = Counter()
        self.max_examples: int | None = None

    def pytest_configure(self, config: object) -> None:
        """Any example will do."""
        from hypothesis import Phase, settings

        settings.register_profile(
            "any example",
            settings(),
            phases=(Phase.explicit, Phase.generate),
            max_examples=self.max_examples or settings().max_examples,
        )
        settings.load_profile("any example")

    def pytest_collection_modifyitems(self, items: list) -> None:
        """Sort; what has found nothing stays in its order."""
        items.sort(key=lambda item: -self.finds[item.nodeid])

    def pytest_runtest_logreport(self, report: object) -> None:
        """Count."""
        self.finds[report.nodeid] += report.failed


ORDER = LikeliestFirst()


def arguments_for(module: str) -> list[str]:
    """Pytest's arguments for a module's tests."""
    files = [str(ROOT / "tests" / name) for name in TESTS[module]]
    left_out = [f"--deselect=tests/{f}::{test}" for f in TESTS[module] for test in SLOW.get(f, ())]
    chosen = ["-m", "not full", "-k", ONLY.get(module, ""), *left_out]
    return ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", *chosen, *files]


def page(results: dict[str, bool]) -> str:
    """The report."""
    lines = [
        "# Mutations",
        "",
        "Does a test fail for each small error in rules, sampling, rollback and loop? Every",
        "operator, comparison, number, truth value, condition and choice of function was changed,",
        "one at a time, each `where` took one side for all, and the module's tests ran until the",
        "first failure. Made by `docs/mutations.py`.",
        "",
        "| module | mutants | run | found | cannot be found | missed |",
        "|---|---|---|---|---|---|",
    ]
    survivors = [name for name, found in results.items() if not found]
    for module in TESTS:
        own = [name for name in results if name.startswith(f"{module}.")]
        alive = [name for name in survivors if name.startswith(f"{module}.")]
        excused = [name for name in alive if name in EQUIVALENT]
        lines.append(
            f"| `{module}.py` | {len(mutants(module))} | {len(own)} | {len(own) - len(alive)} | "
            f"{len(excused)} | "
            f"{len(alive) - len(excused)} |"
        )
    lines += ["", "Why nothing can find some of them stands beside each in `docs/mutations.py`."]
    missed = [name for name in survivors if name not in EQUIVALENT]
    if missed:
        lines += ["", "## What was missed", "", *[f"- {name[:80]}" for name in missed]]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what has no result yet; write the page when all have one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--module", choices=list(TESTS), help="default: all")
    parser.add_argument("--part", default="1/1", help="which part of how many")
    parser.add_argument("--examples", type=int, help="at most so many a test; fewer are quicker")
    parser.add_argument("--results", type=Path, default=Path("mutations.json"))
    arguments = parser.parse_args()
    ORDER.max_examples = arguments.examples
    part, parts = map(int, arguments.part.split("/"))
    everything = {module: mutants(module) for module in TESTS}
    results = (
        json.loads(arguments.results.read_text(encoding="utf-8"))
        if arguments.results.exists()
        else {}
    )
    for module in [arguments.module] if arguments.module else TESTS:
        importlib.import_module(imported_as(module))  # before pytest wraps it to check shapes
        if run_tests(module) != 0:
            parser.error(f"the tests of {module} fail without a mutation")
        for mutant in tqdm(everything[module][part - 1 :: parts], desc=module):
            if mutant.name not in results:
                results[mutant.name] = is_found(mutant, module)
                arguments.results.write_text(json.dumps(results, indent=1), encoding="utf-8")
    names = [mutant.name for module in everything.values() for mutant in module]
    known = {name: results[name] for name in names if name in results}
    (ROOT / "docs" / "mutations.md").write_text(page(known), encoding="utf-8")


if __name__ == "__main__":
    main()
