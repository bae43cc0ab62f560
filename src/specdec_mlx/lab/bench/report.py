"""A report of a machine: costs of passes and speeds, with nothing that belongs to its owner.

A report has numbers, versions and public names. It has no text, no path, and no name of a user, a
folder or a host.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx_lm.utils import MODEL_REMAPPING
from msgspec import Struct
from msgspec.structs import replace

from specdec_mlx.arguments import AUTO
from specdec_mlx.cli.blas import blas_name
from specdec_mlx.drafters.choosing.candidates import choose_for, models_in, weight_bytes
from specdec_mlx.drafters.choosing.choice import DrafterChoice
from specdec_mlx.drafters.choosing.registry import DEFAULT_DRAFTER
from specdec_mlx.drafters.heads.loading import config_of, is_head, kind_of
from specdec_mlx.errors import ModelFolderError
from specdec_mlx.files import cache_root, parse, read_text
from specdec_mlx.lab.bench.cost import CostCurve, CostMeter
from specdec_mlx.lab.bench.peers import MODULES, make_peer
from specdec_mlx.lab.bench.record import SPEED_NOTE, SPEEDS, Record, results_table
from specdec_mlx.lab.bench.replay import score_record
from specdec_mlx.lab.bench.run import run_bench
from specdec_mlx.lab.bench.summary import Result
from specdec_mlx.lab.bench.timing import Contender, Settings, make_contenders, plain
from specdec_mlx.lab.prompts import RecordedText
from specdec_mlx.lab.tables import markdown_table, or_dash
from specdec_mlx.models.loading import check_folder, folder_of

T = TypeVar("T")
Row = tuple[str, Callable[[], list[Contender]]]

FOLDER = Path("specdec-mlx-report")
JSON_FILE, TABLE_FILE = "report.json", "report.md"
MINUTES = 10.0
DEPTHS = 256, 2048, 8192
WIDTHS = *range(1, 17), 32, 64  # drafts have up to 64 rows, whose costs the model needs
NUM_SWEEPS = 5

MOST_BYTES = 9e9  # of a model that is chosen, so that a report takes minutes on any chip
SHARE_OF_MEMORY = 1 / 3
LM_STUDIO = "~/.lmstudio/models", "~/.cache/lm-studio/models"
SMALL_MODELS = "mlx-community/Qwen3-1.7B-4bit", "mlx-community/Qwen3-0.6B-4bit"
PUBLIC = "mlx-community/"  # whose repositories may be named
PACKAGES = "mlx", "mlx-lm", "specdec-mlx"


class ModelFacts(Struct, frozen=True, forbid_unknown_fields=True):
    """Public facts about a model.

    Attributes:
        architecture: name of mlx-lm's module, or of a kind of head.
        weights: such as "4 affine", or "float".
        gigabytes: size of the weights in memory.
        name: of a repository of mlx-community. "" for every other model.
    """

    architecture: str
    weights: str
    gigabytes: float
    name: str = ""

    def __str__(self) -> str:
        return f"{self.name or self.architecture}, {self.weights}, {self.gigabytes:.2f} GB"


class MachineReport(Struct, frozen=True, forbid_unknown_fields=True):
    """Measurements of one machine.

    Attributes:
        date: day of the report, as 2026-11-28.
        chip: name of the chip.
        memory_gb: memory of the machine.
        system: operating system and its version.
        backend: device, and the matrix library of a CPU.
        load: other work of the machine at the start, as mean number of running processes.
        versions: package -> version.
        model: the target.
        draft_model: the draft model or head, or None.
        max_tokens: of each text.
        costs: tokens before a pass -> costs of passes.
        results: by category and contender.
        modelled: speeds of look-up by replaying the texts at the measured costs.
        left_out: row -> reason.
        seconds: duration of all measurements.
    """

    date: str
    chip: str
    memory_gb: float
    system: str
    backend: str
    load: float
    versions: dict[str, str]
    model: ModelFacts
    draft_model: ModelFacts | None
    max_tokens: int
    costs: dict[int, CostCurve] = {}
    results: list[Result] = []
    modelled: list[Result] = []
    left_out: dict[str, str] = {}
    seconds: float = 0.0

    @property
    def machine(self) -> str:
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        parts = [self.chip, f"{self.memory_gb:.0f} GB", self.system, self.backend, versions]
        return ", ".join([*parts, f"load {self.load:.1f}", self.date])


def load_report(path: Path | str) -> MachineReport:
    """Read a file of `save_report`. ValueError says what is wrong in another file."""
    text = read_text(path)
    try:
        return parse(text, MachineReport)
    except ValueError as error:
        raise ValueError(
            f"{path} is no report of a machine: {error}. Make a report with "
            "specdec-mlx bench --report."
        ) from error


def save_report(report: MachineReport, folder: Path) -> list[Path]:
    """Write the report as JSON and as Markdown. Returns both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / JSON_FILE, folder / TABLE_FILE]
    paths[0].write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    paths[1].write_text(format_report(report) + "\n", encoding="utf-8")
    return paths


def format_report(report: MachineReport) -> str:
    """The report in Markdown."""
    parts = [f"{report.machine}\n\nModel: {report.model}. Draft model: {report.draft_model}."]
    if report.results:
        modelled = {(r.drafter, r.kernels, r.category): r.ratio for r in report.modelled}
        columns = SPEEDS | {
            "modelled": lambda r: or_dash(modelled.get((r.drafter, r.kernels, r.category)))
        }
        note = "modelled: look-up, with the same texts at the measured costs, without host time."
        parts += [markdown_table(*results_table(report.results, columns)), f"{SPEED_NOTE} {note}"]
    if report.costs:
        header = ["tokens before", "ms", *(f"{m}" for m in WIDTHS)]
        rows = [
            [f"{depth}", f"{1e3 * curve(1):.1f}", *(f"{curve(m) / curve(1):.2f}" for m in WIDTHS)]
            for depth, curve in report.costs.items()
        ]
        note = "Cost of a pass by its rows, in passes over 1 row."
        parts += [markdown_table(header, rows, 0), note]
    if report.left_out:
        missing = [f"{name} ({reason})" for name, reason in report.left_out.items()]
        parts.append(f"Left out: {'; '.join(missing)}.")
    return "\n\n".join(parts)


# Measuring


@dataclass
class Budget:
    """Time for the steps of a report.

    Attributes:
        seconds: time for all steps.
        clock: in seconds.
        left_out: name of a step -> reason.
    """

    seconds: float
    clock: Callable[[], float] = time.monotonic
    left_out: dict[str, str] = field(default_factory=dict)
    _longest: float = 0.0

    def __post_init__(self) -> None:
        self._began = self.clock()

    @property
    def spent(self) -> float:
        return self.clock() - self._began

    def run(self, name: str, step: Callable[[], T], expected: float = 0.0) -> T | None:
        """The result of a step, or None for a step that has no time left or fails.

        The step is expected to take as many seconds as the longest step so far, or `expected`.
        """
        began = self.spent
        if began + max(self._longest, expected) > self.seconds:
            self.left_out[name] = "no time was left"
            return None
        try:
            return step()
        except Exception as error:  # a fault in another package must not end the report
            # A message may have a path or a text, so only its class is reported.
            self.left_out[name] = f"stopped by {type(error).__name__}"
            return None
        finally:
            self._longest = max(self._longest, self.spent - began)


def measure_report(
    model: nn.Module,
    tokenizer: Any,
    choice: DrafterChoice,
    tasks: Sequence[RecordedText],
    settings: Settings,
    name: str,
    budget: Budget,
) -> Iterator[MachineReport]:
    """Measure as much as the budget allows, and yield the report so far after every step.

    Args:
        model: the target.
        tokenizer: the target's.
        choice: has the draft model, if there is one.
        tasks: the prompts.
        settings: of all contenders.
        name: folder or repository of the target.
        budget: for all measurements.
    """
    report = MachineReport(
        date=date.today().isoformat(),
        chip=str(mx.device_info().get("device_name", platform.machine())),
        memory_gb=memory_bytes() / 1e9,
        system=system_name(),
        backend=backend_name(),
        load=os.getloadavg()[0],
        versions=versions_of((*PACKAGES, *MODULES)),
        model=facts_of(name),
        draft_model=facts_of(choice.model.name) if choice.model.name else None,
        max_tokens=settings.max_tokens,
        left_out=budget.left_out,
    )
    measure_costs = partial(cost_curve, model, tasks[0].prompt)
    first, *later = depths_of(model)
    pace = 0.0  # seconds of measuring costs, for each token before the passes
    steps: list[int | Row] = [first, *rows_of(model, choice, settings, tokenizer), *later]
    # Packages come last, because importing them may change mlx-lm's own functions.
    steps += peer_rows(model, tokenizer, settings)
    for step in steps:
        began = budget.spent
        if isinstance(step, int):
            work = partial(measure_costs, step)
            if curve := budget.run(f"costs after {step} tokens", work, pace * step):
                report = replace(report, costs={**report.costs, step: curve})
            pace = (budget.spent - began) / step if report.costs.keys() - {first} else 0.0
        else:
            name, contenders = step
            record = budget.run(name, partial(measure_row, model, contenders, tasks, settings))
            report = with_results(report, record)
        yield replace(report, seconds=budget.spent)


def measure_row(
    model: nn.Module,
    contenders: Callable[[], list[Contender]],
    tasks: Sequence[RecordedText],
    settings: Settings,
) -> Record:
    return run_bench(model, tasks, contenders(), settings, measure_cost=False)


def with_results(report: MachineReport, record: Record | None) -> MachineReport:
    """The report with the results of one more row, sorted by kind of text."""
    if record is None:
        return report
    results = {(r.category, r.key): r for r in report.results}
    for result in record.results:
        # Every row measures plain decoding, and the first measurement is enough.
        results.setdefault((result.category, result.key), result)
    order = list(dict.fromkeys(category for category, _ in results))
    results_in_order = sorted(results.values(), key=lambda r: order.index(r.category))
    modelled = report.modelled or modelled_of(record, report.costs)
    return replace(report, results=results_in_order, modelled=modelled)


def depths_of(model: nn.Module) -> list[int]:
    """`DEPTHS`, or the deepest that leaves room for the widest pass in the model's context."""
    most = getattr(getattr(model, "args", None), "max_position_embeddings", None) or max(DEPTHS) * 2
    return sorted({min(depth, most - max(WIDTHS)) for depth in DEPTHS})


def cost_curve(model: nn.Module, tokens: Sequence[int], depth: int) -> CostCurve:
    meter = CostMeter(model, tokens, WIDTHS, depth)
    for _ in range(NUM_SWEEPS):
        meter.sweep()
    return replace(meter.curve(), name=f"measured after {depth} tokens")


def rows_of(
    model: nn.Module, choice: DrafterChoice, settings: Settings, tokenizer: Any
) -> Iterator[Row]:
    """Name of each row, and a function that makes its contenders. Plain decoding is the first.

    Every row has plain decoding beside it, so that a row is compared under its own conditions.
    """
    first, *ours = make_contenders(model, choice, [AUTO], settings, tokenizer, kernels=[AUTO])
    # Look-up is first, because it needs no second model.
    for contender in sorted(ours, key=lambda one: one.drafter != DEFAULT_DRAFTER):
        name = contender.drafter + ", kernels" * bool(contender.kernels)
        yield name, partial(list, (first, contender))


def peer_rows(model: nn.Module, tokenizer: Any, settings: Settings) -> Iterator[Row]:
    """Rows of other packages that are installed."""
    for name in filter(is_installed, MODULES):
        yield name, partial(with_peer, plain(model, settings.temp), name, model, tokenizer)


def with_peer(first: Contender, name: str, model: nn.Module, tokenizer: Any) -> list[Contender]:
    return [first, make_peer(name, model, tokenizer)]


def is_installed(package: str) -> bool:
    return find_spec(MODULES[package]) is not None


def modelled_of(record: Record, costs: dict[int, CostCurve]) -> list[Result]:
    """Modelled results of look-up on the recorded texts, at the costs of a short context."""
    if not costs or all(r.drafter != DEFAULT_DRAFTER for r in record.results):
        return []
    # A new drafter has no memory of the texts.
    drafter = {DEFAULT_DRAFTER: DrafterChoice().resolve}
    return score_record(record, drafter, [AUTO], costs[min(costs)]).results


# The machine and its models


def memory_bytes() -> int:
    size = mx.device_info().get("memory_size")
    return int(size or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def system_name() -> str:
    mac = platform.mac_ver()[0]
    return f"macOS {mac}" if mac else f"{platform.system()} {platform.machine()}"


def backend_name() -> str:
    if mx.metal.is_available():
        return "Metal"
    return "CUDA" if mx.cuda.is_available() else blas_name()


def versions_of(packages: Sequence[str]) -> dict[str, str]:
    """Versions of the packages that are installed."""
    versions = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def facts_of(place: Path | str) -> ModelFacts:
    """Facts about a model or a head in a folder or a repository."""
    config = config_of(place)
    packed = config.get("quantization") or {}
    name = str(config.get("model_type", ""))
    # The name of a private architecture is its owner's.
    architecture = kind_of(config) or (name if is_known(name) else "unknown")
    weights = f"{packed.get('bits')} {packed.get('mode', 'affine')}" if packed else "float"
    # A model in the Hugging Face cache has its repository's name in its path.
    repositories = [part.removeprefix("models--").replace("--", "/") for part in Path(place).parts]
    if not Path(place).is_dir():  # a folder's name is its owner's
        repositories.append(str(place))
    names = (name for name in repositories if name.startswith(PUBLIC))
    public = next(names, "")
    return ModelFacts(architecture, weights, weight_bytes(folder_of(place)) / 1e9, public)


def is_known(model_type: str) -> bool:
    """True for a model type of mlx-lm."""
    name = MODEL_REMAPPING.get(model_type, model_type)
    return name.isidentifier() and find_spec(f"mlx_lm.models.{name}") is not None


def choose_model(most_bytes: float | None = None) -> str:
    """Folder of the largest model on this machine that fits a report. Nothing is fetched.

    Args:
        most_bytes: of its weights. By default a third of the memory, and 9 GB at most.

    Raises:
        ModelFolderError: there is no such model. The message names two models to fetch.
    """
    most = most_bytes or min(MOST_BYTES, SHARE_OF_MEMORY * memory_bytes())
    usable = [folder for folder in models_here() if is_usable(folder)]
    fitting = [folder for folder in usable if weight_bytes(folder) <= most]
    if not fitting:
        fetches = " && ".join(f"hf download {name}" for name in SMALL_MODELS)
        raise ModelFolderError(
            f"No model of mlx-lm with at most {most / 1e9:.1f} GB is on this machine. Fetch two "
            f"small models (1.3 GB) and try again: {fetches}"
        )
    return str(max(fitting, key=weight_bytes))


def choose_draft(model: str) -> str | None:
    """A head or a small model on this machine that drafts for a model, or None."""
    places = (choose_for(model, where=where).place for where in (None, folder_of(model).parent))
    return next(filter(None, places), None)


def models_here() -> Iterator[Path]:
    """Models in the Hugging Face cache, in LM Studio's folders and in our own cache."""
    publishers = (folder for root in LM_STUDIO for folder in Path(root).expanduser().glob("*/"))
    for where in (None, *publishers, cache_root()):
        if where is None or where.is_dir():
            yield from (folder for _, folder in models_in(where))


def is_usable(folder: Path) -> bool:
    """True for a model of mlx-lm that is here completely. Heads are left out."""
    try:
        check_folder(folder)
        index = folder / "model.safetensors.index.json"
        files = json.loads(read_text(index))["weight_map"].values() if index.exists() else ()
    except (OSError, ValueError, KeyError):
        return False
    is_complete = all((folder / name).exists() for name in files)
    return is_complete and is_known(config_of(folder).get("model_type", "")) and not is_head(folder)
