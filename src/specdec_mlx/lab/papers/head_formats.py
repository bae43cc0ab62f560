"""Formats of heads for `load_head`; what loads a head is imported when one is loaded."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn

from specdec_mlx.drafters.heads.drafter import anatomy_for_head
from specdec_mlx.drafters.heads.files import HeadFiles
from specdec_mlx.drafters.heads.loading import Format, Variant, check_sizes
from specdec_mlx.drafters.model import ModelDrafter
from specdec_mlx.errors import HeadError


def _exit(
    files: HeadFiles, target: nn.Module, variant: Variant, options: dict[str, Any]
) -> ModelDrafter:
    from specdec_mlx.lab.papers.early_exit import load_exit

    return load_exit(files, target, window=variant.window, **options)


def _pass(
    files: HeadFiles, target: nn.Module, variant: Variant, options: dict[str, Any]
) -> ModelDrafter:
    from specdec_mlx.lab.papers.parallel_sampling import load_pass

    check_sizes(files, anatomy_for_head(target))
    if variant != Variant():
        raise HeadError(
            f"{files.name} is a PaSS head, which has no matrices and reads no states: leave "
            "draft_bits, layers, pre_norm, norms_less_one and window out."
        )
    return load_pass(files, target, **options)


EXIT = Format("trained exit", r"\bexit_layer=", load=_exit)
PASS = Format("PaSS, look-ahead embeddings", r"\blook_ahead=", load=_pass)
