"""Where mlx-vlm is not installed."""

from __future__ import annotations

import sys

import pytest

import specdec_mlx as sd
from specdec_mlx.errors import MissingPackageError


def test_without_mlx_vlm_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlx_vlm", None)
    sd.vision.mlx_vlm.cache_clear()
    with pytest.raises(MissingPackageError, match=r"pip install 'specdec-mlx\[vision\]'"):
        sd.vision.load("a/model")
