"""`specdec-mlx drafters --model M`: the expected gain on this chip, and the drafters for M."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import mlx.core as mx

from specdec_mlx.draft_length.costs import curve_for
from specdec_mlx.drafters.choosing.candidates import (
    Candidate,
    find_candidates,
    find_heads,
    known_repositories,
    locate,
    models_in,
    own_layer,
    weight_bytes,
)
from specdec_mlx.drafters.choosing.registry import describe_drafters
from specdec_mlx.drafters.heads.drafter import Config
from specdec_mlx.drafters.heads.loading import LARGE_HEAD, config_of
from specdec_mlx.drafters.heads.mtp import text_part
from specdec_mlx.drafters.shortlist import LEAST_SAVED, shortlist_size
from specdec_mlx.errors import ModelFolderError
from specdec_mlx.models.loading import is_path

GAINS = Path(__file__).with_name("gains.tsv")
"""Each line has the name of a chip's curve and the expected gain (see docs/generate_gains.py)."""
USUAL: Config = {"bits": 4}
"""Assumed weights of a model that is not here: most people fetch 4 bits."""


def report(model: str, where: Path | None = None) -> str:
    """All drafters for a model, as a text. Raises ModelFolderError for a path without a model."""
    try:
        folder: Path | None = locate(model)
        missing = ""
    except ModelFolderError as error:
        # A name without a model here still has known heads, and a wrong path is a mistake.
        if is_path(model) or Path(model).exists():
            raise
        folder, missing = None, str(error)
    places = [] if folder is None else [*models_in(where)]
    here = [] if folder is None else find_candidates(model, where)
    able = [
        with_bytes(
            one._replace(
                kind=f"{_size(one.size)}, a token costs about {one.cost:.2f} of the target's"
            ),
            folder,
            is_head=False,
        )
        for one in here
        if one.refusal is None
    ]
    able += fetched(model, small=True)
    size = "" if folder is None else f" ({_size(weight_bytes(folder))})"
    alone = describe_drafters(with_model=False)
    width = max(map(len, alone)) + 2
    none = [f"  none in {where or 'the Hugging Face cache'}"]
    refused = [one for one in here if one.refusal is not None]
    parts = [
        [_expectation({} if folder is None else config_of(folder))],
        [missing] if missing else [],
        heads_lines(model, folder, places),
        [f"Draft models for {model}{size} (--draft-model):", *(_lines(model, able) or none)],
        [
            "Without a second model:",
            _command(model),
            *(f"  {name:<{width}}{text}" for name, text in alone.items()),
        ],
        ["Left out:", *_lines(model, refused)] if refused else [],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _expectation(config: Config) -> str:
    """The chip, and the expected gain of each kind of text for weights like these."""
    packed = config.get("quantization") or ({} if config else USUAL)
    bits, mode = packed.get("bits"), packed.get("mode", "affine")
    kind = "float" if bits is None else f"{bits} {mode}"
    weights = {"float": "unquantized", f"{bits} affine": f"{bits}-bit"}.get(kind, mode)
    has_experts = any("expert" in name for name in text_part(config))
    name = curve_for("experts" if has_experts else kind)[0]
    known = dict(line.split("\t") for line in GAINS.read_text("utf-8").splitlines())
    chip = mx.device_info().get("device_name", mx.default_device())
    expectation = known.get(name, "nobody has measured it; try `specdec-mlx bench`")
    return f"{chip}, {weights} weights{', experts' * has_experts}: {expectation}."


def read_bytes(target: Config, draft: Config, size: int, *, is_head: bool) -> tuple[int, int]:
    """Bytes that a draft token reads, with all output rows and with the default shortlist.

    Estimated from the configs. A head without its own vocabulary multiplies by the target's rows.

    Args:
        target, draft: configs of the target, and of the head or the draft model.
        size: bytes of the drafter's weights.
        is_head: it is a head.
    """
    owner = target if is_head else draft
    text, packed = text_part(owner), owner.get("quantization") or {}
    # A group of quantized weights has a scale and a bias of 16 bits each.
    bits = packed["bits"] + 32 / packed.get("group_size", 64) if "bits" in packed else 16
    num_rows = text.get("vocab_size") or 0
    matrix = int(num_rows * (text.get("hidden_size") or 0) * bits / 8)
    if is_head and "draft_vocab_size" in draft:
        return size, size
    tied = text.get("tie_word_embeddings", True)
    reads = size + matrix if is_head else size if tied else size - matrix
    saved = int(matrix * (1 - min(1, shortlist_size(num_rows) / max(1, num_rows))))
    return reads, reads - saved if saved >= LEAST_SAVED * reads else reads


def with_bytes(candidate: Candidate, folder: Path | None, *, is_head: bool) -> Candidate:
    """The candidate with its size, the bytes that a draft token reads, and its cost by these."""
    place = Path(candidate.place)
    if folder is None or candidate.refusal is not None or not place.is_dir():
        return candidate
    target, draft, size = config_of(folder), config_of(place), weight_bytes(place)
    if is_head and size > LARGE_HEAD and "quantization" not in draft:
        size = size * 9 // 32  # quantized from 16 bits to 4.5 when it is loaded
    reads, with_list = read_bytes(target, draft, size, is_head=is_head)
    words = f"{_size(size)} in memory, a draft token reads {_size(reads)}"
    if with_list < reads:
        words += f", or {_size(with_list)} with a shortlist"
    cost = candidate.cost or with_list / max(1, weight_bytes(folder))
    return candidate._replace(reads=words, cost=cost)


def heads_lines(
    model: str, folder: Path | None, places: Iterable[tuple[str, Path]] = ()
) -> list[str]:
    """Heads for a model, each with its command. `places` has names and folders of heads."""
    layers = [] if folder is None else own_layer(folder)
    heads_here = find_heads(model, folder, places)
    heads = [*layers, *(with_bytes(one, folder, is_head=True) for one in heads_here)]
    heads += fetched(model)
    heads.sort(key=lambda one: one.refusal is not None)
    return [f"Trained heads for {model} (--draft-model):", *_lines(model, heads)] if heads else []


def fetched(model: str, *, small: bool = False) -> list[Candidate]:
    known = known_repositories(model, small)
    return [Candidate(name, "to be fetched" + note, name) for name, note in known.items()]


def _lines(model: str, candidates: Iterable[Candidate]) -> list[str]:
    lines = []
    for candidate in candidates:
        remarks = (candidate.kind, candidate.refusal or candidate.note or candidate.doubt)
        lines.append(f"  {candidate.name}  {', '.join(filter(None, remarks))}")
        if candidate.reads:
            lines.append(f"    {candidate.reads}")
        if candidate.cost:
            lines.append(f"    {candidate.expectation()}")
        if candidate.refusal is None:
            lines.append(_command(model, candidate.place))
    return lines


def _command(model: str, draft: str | None = None) -> str:
    drafting = "" if draft is None else f" --draft-model {draft}"
    return f'    specdec-mlx generate --model {model}{drafting} --prompt "..."'


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
