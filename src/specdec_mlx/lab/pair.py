"""The pair's two folders, and both models loaded from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import mlx.nn as nn
import mlx_lm


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
