"""Trained heads for a model: those that are here, and repositories that are known to have one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from specdec_mlx.drafters.heads.files import HeadFiles
from specdec_mlx.drafters.heads.formats import FORMATS, VOCABULARY_MARGIN, known_kind
from specdec_mlx.drafters.heads.mtp_families import family_of, other_formula
from specdec_mlx.errors import HeadError

KNOWN: dict[str, tuple[str, ...]] = {
    "llama-3.1-8b-instruct": (
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",
        "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
    ),
    "llama-3.3-70b-instruct": ("yuhuili/EAGLE3-LLaMA3.3-Instruct-70B",),
    "llama-3": ("amd/PARD-Llama-3.2-1B",),
    "deepseek-r1-distill-llama-8b": ("yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B",),
    "deepseek-r1-distill-qwen": ("amd/PARD-DeepSeek-R1-Distill-Qwen-1.5B",),
    "qwen2.5": ("amd/PARD-Qwen2.5-0.5B",),
    "qwen3": ("amd/PARD-Qwen3-0.6B",),
    "qwen3-1.7b": ("AngelSlim/Qwen3-1.7B_eagle3",),
    "qwen3-4b": ("AngelSlim/Qwen3-4B_eagle3", "z-lab/Qwen3-4B-DFlash-b16"),
    "qwen3-8b": (
        "AngelSlim/Qwen3-8B_eagle3",
        "Tengyunw/qwen3_8b_eagle3",
        "RedHatAI/Qwen3-8B-speculator.eagle3",
        "z-lab/Qwen3-8B-DFlash-b16",
    ),
    "qwen3-14b": ("AngelSlim/Qwen3-14B_eagle3", "RedHatAI/Qwen3-14B-speculator.eagle3"),
    "qwen3-32b": ("AngelSlim/Qwen3-32B_eagle3",),
    "qwen3-30b-a3b-instruct-2507": ("RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3",),
    "qwen3-coder-30b-a3b-instruct": ("z-lab/Qwen3-Coder-30B-A3B-DFlash",),
    "qwen3-coder-next": ("z-lab/Qwen3-Coder-Next-DFlash",),
    "qwen3.5-4b": ("mlx-community/Qwen3.5-4B-MTP-4bit", "z-lab/Qwen3.5-4B-DFlash"),
    "qwen3.5-9b": ("mlx-community/Qwen3.5-9B-MTP-4bit", "z-lab/Qwen3.5-9B-DFlash"),
    "qwen3.5-27b": ("z-lab/Qwen3.5-27B-DFlash",),
    "qwen3.5-35b-a3b": ("z-lab/Qwen3.5-35B-A3B-DFlash",),
    "qwen3.5-122b-a10b": ("z-lab/Qwen3.5-122B-A10B-DFlash",),
    "qwen3.6-27b": ("z-lab/Qwen3.6-27B-DFlash",),
    "qwen3.6-35b-a3b": ("z-lab/Qwen3.6-35B-A3B-DFlash",),
    "qwen3.8-27b": ("mlx-community/Qwen3.8-27B-MTP-4bit", "seabit-ai/Qwen3.8-27B-MTP-draft"),
    "gpt-oss-20b": ("RedHatAI/gpt-oss-20b-speculator.eagle3", "z-lab/gpt-oss-20b-DFlash"),
    "gpt-oss-120b": (
        "RedHatAI/gpt-oss-120b-speculator.eagle3",
        "lmsys/EAGLE3-gpt-oss-120b-bf16",
        "z-lab/gpt-oss-120b-DFlash",
    ),
    "gemma-4-e2b-it": ("google/gemma-4-e2b-it-assistant",),
    "gemma-4-e4b-it": ("google/gemma-4-e4b-it-assistant",),
    "gemma-4-31b-it": (
        "google/gemma-4-31B-it-assistant",
        "RedHatAI/gemma-4-31B-it-speculator.eagle3",
        "z-lab/gemma-4-31B-it-DFlash",
    ),
    "gemma-4-26b-a4b-it": (
        "google/gemma-4-26B-A4B-it-assistant",
        "RedHatAI/gemma-4-26B-A4B-it-speculator.eagle3",
        "z-lab/gemma-4-26B-A4B-it-DFlash",
    ),
    "glm-4.7-flash": ("thoughtworks/GLM-4.7-Flash-Eagle3",),
    "vicuna-7b-v1.3": ("FasterDecoding/medusa-vicuna-7b-v1.3",),
    "vicuna-13b-v1.3": ("yuhuili/EAGLE3-Vicuna1.3-13B",),
    "zephyr-7b-beta": ("FasterDecoding/medusa-1.0-zephyr-7b-beta",),
}
"""How the name of a model begins -> repositories with heads for it, by what their authors say."""

CONVERTED = re.compile(
    r"([-_.](mlx|hf|\d+-?bits?|b?f(p|loat)?\d+|int\d|(mx|nv)fp\d|q\d\w*|dwq|awq|gptq|g(s|roup)?\d+|\d{6,8}))*"
)
"""What the name of a model goes on with where it is the same one, converted."""


def known_repositories(model: str) -> dict[str, str]:
    """Repositories that are known to have a head for a model, by its name.

    With what is to be said of each: a head that was made for one model may draft for another one
    of its family whose name goes on, such as a base model or a later version, but less well.
    """
    name = model.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    found = {}
    for beginning, repositories in KNOWN.items():
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
    """What is known of heads for a model, for people to read; empty if nothing is.

    Args:
        model: its name.
        folder: where it is, None if it is not here.
        folders: where heads may be, each with its name.
    """
    target, known = _config(folder) if folder is not None else {}, known_repositories(model)
    lines: list[str] = []
    refused: list[str] = []
    for name, place in folders:
        config = _config(place)
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


def _config(folder: Path) -> dict[str, Any]:
    """A folder's configuration; empty if it has none that can be read."""
    try:
        return HeadFiles(folder).config
    except HeadError:
        return {}


def _misfit(config: Mapping[str, Any], target: Mapping[str, Any]) -> str | None:
    """Why a head does not fit a target, by what their configurations say."""
    try:
        head = config.get("transformer_layer_config") or config.get("text_config") or config
        model = target.get("text_config") or target
        width = config.get("target_hidden_size") or config.get("backbone_hidden_size")
        width, theirs = width or head.get("hidden_size"), model.get("hidden_size")
        vocabularies = [n for c in (head, model) if (n := c.get("vocab_size")) is not None]
        if vocabularies and max(vocabularies) - min(vocabularies) > VOCABULARY_MARGIN:
            return "another vocabulary"
    except (AttributeError, TypeError):  # of a config with other things in it
        return "its config.json is damaged"
    is_gemma4 = str(model.get("model_type")).startswith("gemma4")
    if known_kind(config) == "gemma4_assistant" and not is_gemma4:
        return "for Gemma 4"
    reads_states = "pard_token" not in config and None not in (width, theirs)
    return "another width" if reads_states and width != theirs else None
