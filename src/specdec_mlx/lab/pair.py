"""Folders of the trained pair and its heads, and functions that load them."""

from __future__ import annotations

import shutil
import tempfile
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx.utils import tree_flatten

from specdec_mlx.contracts import Drafter
from specdec_mlx.drafters.heads.loading import load_head
from specdec_mlx.errors import UnknownNameError
from specdec_mlx.files import cache_root

HEADS = ("mtp", "eagle3", "medusa", "exit")  # kinds of heads that were trained for the target
PACKED = Path(__file__).parent
WEIGHTS = "model.safetensors"
HELD_OUT = ("binary", "booleans", "calls", "global", "objects", "power", "return", "slicings")
"""Topics that are never trained on, about a twentieth of the text; nothing else quotes them."""
OPENING_LENGTH = 400  # characters of a held-out topic that make a prompt
SHORTEST_QUOTE = 60  # characters from which a repeated paragraph counts as a quotation: a heuristic
SCALE = ".row_scale"  # ends the name of a matrix's scales: a weight is an int8 times its row's


class Pair(NamedTuple):
    """A target, a draft model for it, and the tokenizer of both."""

    target: nn.Module
    draft: nn.Module
    tokenizer: Any

    def __repr__(self) -> str:
        models = {"target": self.target, "draft": self.draft}
        sizes = [
            f"{name} {sum(x.size for _, x in tree_flatten(model.parameters())):,}"
            for name, model in models.items()
        ]
        return f"<Pair: {', '.join(sizes)} parameters>"


def load_pair() -> Pair:
    """Load both models in float32, and their tokenizer, without a download."""
    target, tokenizer = mlx_lm.load(str(target_path()))[:2]
    return Pair(target, mlx_lm.load(str(draft_path()))[0], tokenizer)


def target_path() -> Path:
    """Folder of the target, for anything that takes an mlx-lm model folder."""
    return unpacked(PACKED / "target")


def draft_path() -> Path:
    """Folder of the draft model, like `target_path`."""
    return unpacked(PACKED / "draft")


def head(kind: str, target: nn.Module) -> Drafter:
    """Load a trained head as a drafter for the pair's target. Raises UnknownNameError."""
    return load_head(head_path(kind), target)


def head_path(kind: str) -> Path:
    """Folder of a trained head. `kind` is a name of HEADS, otherwise raises UnknownNameError."""
    if kind not in HEADS:
        raise UnknownNameError(f"The lab has no head {kind!r}: expected {', '.join(HEADS)}.")
    return unpacked(PACKED / "heads" / kind)


def unpacked(packed: Path) -> Path:
    """The folder in float32, in the cache or a temporary folder. The first call writes it."""
    # The checksum gives other weights, or another config, another folder.
    content = b"".join((packed / name).read_bytes() for name in (WEIGHTS, "config.json"))
    within = Path("lab", f"{zlib.crc32(content):08x}", packed.name)
    folder = cache_root() / within
    if folder.exists():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # The folder is renamed when it is complete.
        part = Path(tempfile.mkdtemp(dir=folder.parent))
    except OSError:
        temporary = Path(_of_this_process().name) / within
        return temporary if temporary.exists() else unpack(packed, temporary)
    try:
        return unpack(packed, part).rename(folder)
    except OSError:
        shutil.rmtree(part)
        if not folder.exists():  # else another process was sooner
            raise
        return folder


def unpack(packed: Path, folder: Path) -> Path:
    shutil.copytree(packed, folder, ignore=shutil.ignore_patterns(WEIGHTS), dirs_exist_ok=True)
    stored: Any = mx.load(str(packed / WEIGHTS))
    weights = {
        name: weight.astype(mx.float32) * stored[name + SCALE] if name + SCALE in stored else weight
        for name, weight in stored.items()
        if not name.endswith(SCALE)
    }
    mx.save_safetensors(str(folder / WEIGHTS), weights, {"format": "mlx"})
    return folder


@cache
def _of_this_process() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="specdec-mlx-lab-")


def held_out_openings() -> Iterator[tuple[str, int, str]]:
    """Name, number and text of the start and the middle of each held-out topic."""
    for name in HELD_OUT:
        text = topics[name]
        for i, start in enumerate((0, len(text) // 2)):
            yield name, i, text[start : start + OPENING_LENGTH]


def split_topics() -> tuple[list[str], list[str]]:
    """Documents to train on and documents to hold out, without long repeated paragraphs."""
    held_out = [topics[name] for name in HELD_OUT]
    seen = {paragraph for text in held_out for paragraph in text.split("\n\n")}
    trained = []
    for name in sorted(topics.keys() - set(HELD_OUT)):
        paragraphs = topics[name].split("\n\n")
        new_paragraphs = [p for p in paragraphs if len(p) < SHORTEST_QUOTE or p not in seen]
        seen.update(paragraphs)
        if sum(map(len, new_paragraphs)) >= SHORTEST_QUOTE:
            trained.append("\n\n".join(new_paragraphs))
    return trained, held_out
