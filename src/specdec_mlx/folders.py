"""Where this package keeps its files."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_root() -> Path:
    """Folder of the files that this package makes; it may not exist yet."""
    if own := os.environ.get("SPECDEC_MLX_CACHE"):
        return Path(own).expanduser().absolute()
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if xdg.is_absolute():  # the XDG specification ignores relative paths
        return xdg / "specdec-mlx"
    caches = "Library/Caches" if sys.platform == "darwin" else ".cache"
    return Path.home() / caches / "specdec-mlx"
