"""`specdec-mlx drafters --model M`: what to expect here, and what to take for M, heads first."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import mlx.core as mx

from specdec_mlx.draft_length.costs import curve_for
from specdec_mlx.drafters.choosing.candidates import (
    find_candidates,
    find_heads,
    known_repositories,
    locate,
    models_in,
    own_head,
    weight_bytes,
)
from specdec_mlx.drafters.choosing.registry import describe_drafters
from specdec_mlx.drafters.heads.drafter import Config
from specdec_mlx.drafters.heads.loading import config_of
from specdec_mlx.drafters.heads.mtp import FAMILIES, OTHER_FORMULAS, of_type, text_part
from specdec_mlx.errors import ModelFolderError
from specdec_mlx.models.loading import is_path

GAINS = Path(__file__).with_name("gains.tsv")
"""Lines of a chip's curve, and what to expect with it, as docs/generate_gains.py writes them."""
USUAL: Config = {"bits": 4}
"""Weights of a model that is not here: what most people fetch."""


def report(model: str, where: Path | None = None) -> str:
    """All that can draft for a model, for people to read; by its name alone if it is not here.

    Raises ModelFolderError for a path that holds no model.
    """
    try:
        target: Path | None = locate(model)
        missing = ""
    except ModelFolderError as error:
        if is_path(model) or Path(model).exists():
            raise
        target, missing = None, str(error)
    folders = [] if target is None else [*models_in(where)]
    able, refused = _models(model, target, where)
    size = "" if target is None else f" ({_size(weight_bytes(target))})"
    alone = describe_drafters(with_model=False)
    width = max(map(len, alone)) + 2
    parts = [
        [_expectation({} if target is None else config_of(target))],
        [missing] if missing else [],
        heads_lines(model, target, folders),
        [f"Draft models for {model}{size} (--draft-model):", *able],
        [
            "Without a second model:",
            _command(model),
            *(f"  {name:<{width}}{text}" for name, text in alone.items()),
        ],
        ["Left out:", *refused] if refused else [],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _expectation(config: Config) -> str:
    """The chip, and how much sooner each kind of text is written on it with weights like these."""
    packed = config.get("quantization") or ({} if config else USUAL)
    bits, mode = packed.get("bits"), packed.get("mode", "affine")
    kind = "float" if bits is None else f"{bits} {mode}"
    weights = {"float": "unquantized", f"{bits} affine": f"{bits}-bit"}.get(kind, mode)
    has_experts = any("expert" in name for name in text_part(config))
    name = curve_for("experts" if has_experts else kind)[0]
    known = dict(line.split("\t") for line in GAINS.read_text("utf-8").splitlines())
    chip = mx.device_info().get("device_name", mx.default_device())
    told = known.get(name, "nobody has measured it; try `specdec-mlx bench`")
    return f"{chip}, {weights} weights{', experts' * has_experts}: {told}."


def heads_lines(
    model: str, folder: Path | None, folders: Iterable[tuple[str, Path]] = ()
) -> list[str]:
    """Heads for a model, each with its command; folders: of possible heads, with their names."""
    target = {} if folder is None else config_of(folder)
    known = known_repositories(model)
    lines, refused = _own_layers(model, folder, target)
    for head in find_heads(target, folder, folders):
        line = f"  {head.name}  {head.note}, {head.refusal or 'here' + known.get(head.name, '')}"
        if head.refusal is None:
            lines += [line, _command(model, head.folder)]
        else:
            refused.append(line)
    for name, note in known.items():
        lines += [f"  {name}  to be fetched{note}", _command(model, name)]
    lines += refused
    return [f"Trained heads for {model} (--draft-model):", *lines] if lines else []


def _own_layers(model: str, folder: Path | None, config: Config) -> tuple[list[str], list[str]]:
    """Lines about a model's own prediction layers: those to take, and those that are refused."""
    own = "  its original repository  multi-token prediction"
    if (other := of_type(config, OTHER_FORMULAS)) is not None:
        return [], [f"{own}, not to be loaded: it {other}"]
    if (family := of_type(config, FAMILIES)) is None or folder is None:
        return [], []
    prefix = family.prefix_at(text_part(config)).rstrip(".")
    if (found := own_head(folder, model).found) is not None:
        here = f"  its own folder  multi-token prediction ({prefix}), here"
        return [here, _command(model, found)], []
    return [f"{own} ({prefix}), to be fetched"], []


def _models(model: str, target: Path | None, where: Path | None) -> tuple[list[str], list[str]]:
    """Lines about draft models: those here and those known, and those that cannot serve."""
    able, refused = list[str](), list[str]()
    for one in () if target is None else find_candidates(model, where):
        if one.refusal is not None:
            refused.append(f"  {one.name}  {one.refusal}")
            continue
        cost = f"a token costs about {one.cost:.2f} of the target's{one.note}"
        able += [f"  {one.name}  {_size(one.size)}, {cost}", f"    {one.expectation()}"]
        able.append(_command(model, one.folder))
    for name in known_repositories(model, small=True):
        able += [f"  {name}  to be fetched", _command(model, name)]
    return able or [f"  none in {where or 'the Hugging Face cache'}"], refused


def _command(model: str, draft: Path | str | None = None) -> str:
    """The command to paste."""
    drafting = "" if draft is None else f" --draft-model {draft}"
    return f'    specdec-mlx generate --model {model}{drafting} --prompt "..."'


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
