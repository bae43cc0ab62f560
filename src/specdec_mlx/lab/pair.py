"""The folders of the pair and of its heads, and what is loaded from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import mlx.nn as nn
import mlx_lm

from specdec_mlx.drafters.heads.loading import load_head
from specdec_mlx.errors import UnknownNameError
from specdec_mlx.types import Drafter

HEADS = ("mtp", "eagle3", "medusa", "exit")
"""Kinds of heads that were trained for the target."""


class Pair(NamedTuple):
    """A target, a draft model for it, and the tokenizer that both were trained with."""

    target: nn.Module
    draft: nn.Module
    tokenizer: Any


def load_pair() -> Pair:
    """Both models in float32, and their tokenizer as `mlx_lm.load` gives it; no download."""
    target, tokenizer = mlx_lm.load(str(target_path()))[:2]
    draft = mlx_lm.load(str(draft_path()))[0]
    return Pair(target, draft, tokenizer)


def target_path() -> Path:
    """Folder of the target, for anything that takes an mlx-lm model folder."""
    return Path(__file__).parent / "target"


def draft_path() -> Path:
    """Folder of the draft model."""
    return Path(__file__).parent / "draft"


def head(kind: str, target: nn.Module) -> Drafter:
    """A trained head as a drafter for the pair's target; raises UnknownNameError."""
    return load_head(head_path(kind), target)


def head_path(kind: str) -> Path:
    """Folder of a trained head, a name of HEADS; raises UnknownNameError for another."""
    if kind not in HEADS:
        raise UnknownNameError(f"The lab has no head {kind!r}: expected {', '.join(HEADS)}.")
    return Path(__file__).parent / "heads" / kind
