"""Trained heads for a model: those that are here, and repositories that are known to have one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from specdec_mlx.drafters.heads.loading import FORMATS, VOCABULARY_MARGIN, config_of, known_kind
from specdec_mlx.drafters.heads.mtp import family_of, other_formula

KNOWN = Path(__file__).with_name("known.txt")
"""Lines of how a model's name begins, and repositories with heads for it by their authors' word."""

CONVERTED = re.compile(
    r"([-_.](mlx|hf|\d+-?bits?|b?f(p|loat)?\d+|int\d|(mx|nv)fp\d|q\d\w*|dwq|awq|gptq|g(s|roup)?\d+|\d{6,8}))*"
)
"""Endings of a model's name that stand for a conversion of it."""


def known_repositories(model: str) -> dict[str, str]:
    """Repositories with a head for a model, by its name -> a note on heads of its relatives."""
    name = model.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    found = {}
    for beginning, *repositories in map(str.split, KNOWN.read_text("utf-8").splitlines()):
        rest = name.removeprefix(beginning)
        if rest == name or rest[:1].isalnum() or (beginning == "qwen3" and rest[:1] == "."):
            continue
        for repository in repositories:
            of_family = "PARD" in repository or CONVERTED.fullmatch(rest)
            found[repository] = "" if of_family else f", made for {beginning}, not for {name}"
    return found


def heads_lines(
    model: str, folder: Path | None, folders: Iterable[tuple[str, Path]] = ()
) -> list[str]:
    """Heads for a model, for people to read; folders: of possible heads, each with its name."""
    target, known = config_of(folder) if folder is not None else {}, known_repositories(model)
    lines: list[str] = []
    refused: list[str] = []
    for name, place in folders:
        config = config_of(place)
        kind = known_kind(config)
        if kind is None:
            continue
        refusal = _misfit(config, target) if FORMATS[kind].loads else "cannot be loaded yet"
        line = f"  {name}  {FORMATS[kind].label}, {refusal or 'here' + known.get(name, '')}"
        (lines if refusal is None else refused).append(line)
    lines += [*refused, *(f"  {one}  to be fetched{note}" for one, note in known.items())]
    own = "  its original repository  multi-token prediction, "
    if (other := other_formula(target)) is not None:
        lines.append(f"{own}not to be loaded: it {other}")
    if family_of(target) is not None:
        lines.append(f"{own}to be fetched")
    return ["", f"Trained heads for {model} (--draft-model):", *lines] if lines else []


def _misfit(config: Mapping[str, Any], target: Mapping[str, Any]) -> str | None:
    """Why a head does not fit a target, by their configs."""
    try:
        head = config.get("transformer_layer_config") or config.get("text_config") or config
        model = target.get("text_config") or target
        width = config.get("target_hidden_size") or config.get("backbone_hidden_size")
        width, theirs = width or head.get("hidden_size"), model.get("hidden_size")
        vocabularies = [n for c in (head, model) if (n := c.get("vocab_size")) is not None]
        if vocabularies and max(vocabularies) - min(vocabularies) > VOCABULARY_MARGIN:
            return "another vocabulary"
    except (AttributeError, TypeError):
        return "its config.json is damaged"
    is_gemma4 = str(model.get("model_type")).startswith("gemma4")
    if known_kind(config) == "gemma4_assistant" and not is_gemma4:
        return "for Gemma 4"
    reads_states = "pard_token" not in config and None not in (width, theirs)
    return "another width" if reads_states and width != theirs else None
